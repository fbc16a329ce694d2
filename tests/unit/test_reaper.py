"""One pass of the reaper: what it does when the store or the broker does not answer."""

from __future__ import annotations

from typing import Any

import pytest
from botocore.exceptions import ClientError

from celery_lease.errors import LeaseError, StoreBusy, StoreUnavailable
from celery_lease.reaper import Reaper


class Store:
    """A store with so many triggers due and nothing else to do."""

    def __init__(
        self, due: int = 0, error: LeaseError | None = None, next_due: float | None = None
    ) -> None:
        self._due = due
        self._error = error
        self._next_due = next_due

    def next_due(self) -> float | None:
        return self._next_due

    def expired(self) -> list[Any]:
        if self._error is not None:
            raise self._error
        return []

    def overripe(self) -> list[Any]:
        return []

    def sweep(self) -> int:
        return 0

    def due(self, most: int) -> list[tuple[str, int]]:
        return [(f"run-{n}", 1) for n in range(self._due)][:most]


@pytest.mark.parametrize(("error", "told"), [(StoreBusy(), True), (StoreUnavailable(), False)])
def test_a_busy_store_is_not_an_outage(error: LeaseError, told: bool) -> None:
    heard: list[bool] = []
    store: Any = Store(error=error)
    Reaper(store, lambda *_: True, on_store=heard.append).pass_and_wait()
    assert heard == [told]


def test_a_trigger_that_cannot_be_sent_does_not_hold_up_the_others() -> None:
    def send(run_id: str, _epoch: int) -> bool:
        if run_id in {"run-0", "run-2"}:
            raise OSError("too large")
        return True

    store: Any = Store(due=4)
    assert Reaper(store, send).run_once().triggered == 2


def test_a_full_portion_of_triggers_is_followed_by_the_next_one_at_once() -> None:
    """Thousands of timers that end at one time must not wait for one pass each hundred."""
    many: Any = Store(due=5000)
    assert Reaper(many, lambda *_: True).pass_and_wait() == 0.0
    few: Any = Store(due=99)
    assert Reaper(few, lambda *_: True).pass_and_wait() > 0.0
    refused: Any = Store(due=5000)
    assert Reaper(refused, lambda *_: False).pass_and_wait() > 0.0


def test_the_next_pass_comes_when_the_next_trigger_is_due() -> None:
    soon: Any = Store(next_due=2.0)
    assert 2.0 < Reaper(soon, lambda *_: True, interval=10).pass_and_wait() < 2.5
    later: Any = Store(next_due=2000.0)
    assert 7.5 <= Reaper(later, lambda *_: True, interval=10).pass_and_wait() <= 12.5


def test_a_broker_that_is_away_is_not_asked_for_every_trigger() -> None:
    asked: list[str] = []

    def send(run_id: str, _epoch: int) -> bool:
        asked.append(run_id)
        raise OSError("the broker is away")

    store: Any = Store(due=50)
    Reaper(store, send).run_once()
    assert len(asked) == 3


def test_a_queue_without_the_permission_to_send_does_not_hold_up_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    denied = ClientError({"Error": {"Code": "AccessDenied", "Message": "no"}}, "SendMessage")

    def send(run_id: str, _epoch: int) -> bool:
        if run_id == "run-49":
            return True
        raise denied

    store: Any = Store(due=50)
    reaper = Reaper(store, send)
    assert [reaper.run_once().triggered, reaper.run_once().triggered] == [1, 1]
    warnings = [one for one in caplog.records if one.levelname == "WARNING"]
    assert len(warnings) == 1
