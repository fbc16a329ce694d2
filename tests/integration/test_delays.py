"""Countdown and ETA: what is due later waits in the broker or in the store, in no worker."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from celery.signals import before_task_publish

from celery_lease import LeasedTask
from celery_lease.settings import Settings
from celery_lease.testing.clock import advance_database_clock
from tests.integration.guest import Guest, app_of, leased
from tests.workers import SMOKE_BOTH, Shop, slowly

HOUR = 3600.0


@pytest.fixture
def producer(shop: Shop) -> Iterator[Celery]:
    """An app of somebody who has the library and sends, with the tasks by their names."""
    app = Celery(
        "producer",
        broker=shop.sqs.broker_url,
        backend=f"db+sqlite:///{shop.results}",
        set_as_current=False,
    )
    app.conf.update(lease_store_url=shop.store_url, lease_namespace=shop.namespace)
    app.task(base=LeasedTask, name="shop.hold", shared=False)(_elsewhere)
    yield app
    app.close()


def _elsewhere(gate: str) -> None:
    raise AssertionError("this body runs in workers")


def _delays(shop: Shop) -> list[Any]:
    """The DelaySeconds of every message that was sent."""
    return [c.parameters.get("DelaySeconds") for c in shop.sqs.calls if c.action == "SendMessage"]


def _resident_kilobytes(pid: int) -> int:
    fields = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in fields if line.startswith("VmRSS"))


# -- a producer that has the library ----------------------------------------------------------


def test_a_short_delay_is_the_brokers_own(shop: Shop, producer: Celery) -> None:
    """Cases 10 and 12: one execution, at or after its time; the store knows nothing before."""
    shop.queue("quick", hides=2)
    due = time.time() + 4
    run = producer.tasks["shop.hold"].apply_async(("go",), countdown=4, queue="quick").id
    assert _delays(shop) == [4]
    assert shop.run(run) == {}
    shop.open("go")
    shop.start("w1", queue="quick")
    assert shop.entered(run)["at"] >= due
    shop.settled(run)
    shop.empty("quick")
    assert shop.receives(run, "quick") == [1]
    assert shop.bodies(run) == 1


@pytest.mark.parametrize("database", SMOKE_BOTH)
def test_a_delay_that_the_broker_cannot_hold_is_a_timer_in_the_store(
    shop: Shop, producer: Celery
) -> None:
    """Case 12: longer than 900 s: no message until the run is due."""
    run = producer.tasks["shop.hold"].apply_async(("go",), countdown=HOUR).id
    row = shop.run(run)
    assert (row["state"], row["epoch"]) == ("ready", 0)
    assert HOUR - 60 < row["trigger_in"] <= HOUR
    shop.open("go")
    shop.start("w1")
    other = shop.send("hold", "go")
    shop.settled(other)
    assert shop.sent("hold", run) == []
    advance_database_clock(shop.store, HOUR, run_id=run)
    assert shop.outcome(run) == ("SUCCESS", [None, 1])
    shop.settled(run)
    assert shop.bodies(run) == 1


def test_a_fifo_queue_delays_nothing_so_the_store_does(shop: Shop, producer: Celery) -> None:
    shop.queue("jobs.fifo", FifoQueue="true", ContentBasedDeduplication="false")
    due = time.time() + 3
    options = {"countdown": 3, "queue": "jobs.fifo", "MessageGroupId": "a group"}
    run = producer.tasks["shop.hold"].apply_async(("go",), **options).id
    assert shop.run(run)["state"] == "ready"
    shop.open("go")
    shop.start("w1", queue="jobs.fifo")
    assert shop.entered(run)["at"] >= due
    shop.settled(run)
    calls = [c.parameters for c in shop.sqs.calls if c.action == "SendMessage"]
    assert [call["MessageGroupId"] for call in calls] == ["a group"]


def test_a_producer_that_cannot_reach_the_store_sends_as_celery_does(
    shop: Shop, producer: Celery
) -> None:
    producer.conf.lease_store_url = "postgresql+psycopg://nobody@127.0.0.1:1/nowhere"
    run = producer.tasks["shop.hold"].apply_async(("go",), countdown=HOUR).id
    assert [one["eta"] is not None for one in shop.sent("hold", run)] == [True]
    shop.start("w1")
    shop.until_state(run, "ready")
    shop.empty()
    assert shop.bodies(run) == 0


def test_a_producer_that_names_no_store_sends_as_celery_does(shop: Shop, producer: Celery) -> None:
    """Its default would be a file in its own folder, in which no worker looks."""
    producer.conf.lease_store_url = Settings.defaults().store_url
    run = producer.tasks["shop.hold"].apply_async(("go",), countdown=HOUR).id
    assert [one["eta"] is not None for one in shop.sent("hold", run)] == [True]
    assert not Path("celery-lease.sqlite3").exists()


# -- messages with an ETA that arrive in a worker ----------------------------------------------


def test_an_old_producers_eta_becomes_a_timer(shop: Shop) -> None:
    """Case 10: one execution at or after its time, from a queue that hides for two seconds."""
    shop.queue("quick", hides=2)
    shop.start("w1", queue="quick")
    due = time.time() + 5
    run = shop.send("hold", "go", countdown=5, queue="quick")
    shop.until_state(run, "ready")
    shop.empty("quick")
    shop.open("go")
    assert shop.entered(run)["at"] >= due
    shop.settled(run)
    shop.empty("quick")
    assert shop.bodies(run) == 1
    assert [kind["kind"] for kind in shop.events(run)][:2] == ["enqueued", "too_early_dropped"]


def test_a_worker_hoards_no_messages_that_are_due_later(shop: Shop) -> None:
    """Case 11: they leave the queue and the worker, and an idle worker gets what is due."""
    [busy] = shop.start("w1", slots=2, worker_prefetch_multiplier=8)
    working = shop.send("hold", "much later")
    shop.entered(working)
    before = _resident_kilobytes(busy.pid)
    later = datetime.now(UTC) + timedelta(hours=1)
    runs = [shop.send("hold", "go", eta=later) for _ in range(60)]

    def registered() -> bool:
        return sum(shop.state(run) == "ready" for run in runs[-20:]) == 20

    slowly(registered, timeout=90, what="every run to be registered")
    shop.empty_but(1, timeout=90)  # the one that is being executed
    assert _resident_kilobytes(busy.pid) - before < 20_000
    assert shop.bodies(runs[0]) == 0
    shop.open("go")
    shop.start("w2")
    for run in runs[:3]:
        advance_database_clock(shop.store, HOUR, run_id=run)
    for run in runs[:3]:
        assert shop.outcome(run)[0] == "SUCCESS"
    shop.open("much later")
    shop.settled(working)


# -- what stays as Celery has it --------------------------------------------------------------


@pytest.fixture
def later(tmp_path: Path) -> Callable[..., tuple[Guest, Any]]:
    """A guest, and a leased task of its app that can be sent."""

    def made(**settings: Any) -> tuple[Guest, Any]:
        app = app_of(tmp_path, **settings)
        task = leased(app, name="t", bind=True)(_what_it_sees)
        return Guest(app), task

    return made


def _what_it_sees(self: Any, *args: Any, **kwargs: Any) -> Any:
    headers = self.request.headers or {}
    return [list(args), kwargs, self.request.eta, headers.get("trace"), self.request.shadow]


def test_a_timer_keeps_arguments_headers_and_shadow_and_starts_without_an_eta(
    later: Callable[..., tuple[Guest, Any]],
) -> None:
    guest, task = later()
    result = task.apply_async(
        (1,), {"b": 2}, countdown=60, headers={"trace": "x"}, shadow="alias", priority=7
    )
    assert guest.message() is None
    guest.age(61)
    guest.reap()
    message = guest.message()
    assert message.properties["priority"] == 7
    guest.deliver(message)
    assert result.get(timeout=1) == [[1], {"b": 2}, None, "x", "alias"]


def test_signals_of_publishing_are_sent_for_a_timer_too(
    later: Callable[..., tuple[Guest, Any]],
) -> None:
    _, task = later()
    seen: list[str] = []

    def note(headers: Any = None, **_: Any) -> None:
        headers["trace"] = "from the signal"
        seen.append(headers["id"])

    before_task_publish.connect(note, sender="t")
    try:
        result = task.apply_async(countdown=60)
    finally:
        before_task_publish.disconnect(note, sender="t")
    assert seen == [result.id]


def test_a_timer_that_expires_before_its_time_is_revoked(
    later: Callable[..., tuple[Guest, Any]],
) -> None:
    guest, task = later()
    result = task.apply_async(countdown=60, expires=30)
    guest.age(31)
    guest.reap()
    guest.deliver()
    assert guest.row(result.id)["state"] == "revoked"
    assert result.state == "REVOKED"


def test_a_message_of_a_revoked_run_that_is_due_later_brings_no_timer(
    later: Callable[..., tuple[Guest, Any]],
) -> None:
    guest, task = later(lease_enabled=False)
    result = task.apply_async(countdown=60)
    guest.leasing.__dict__.pop("settings")
    guest.app.conf.lease_enabled = True
    guest.store.revoke(result.id, "not wanted any more")
    guest.deliver()
    assert guest.row(result.id)["state"] == "revoked"
    assert result.state == "REVOKED"


def test_the_event_that_a_message_was_sent_is_not_taken_for_the_message(
    later: Callable[..., tuple[Guest, Any]],
) -> None:
    guest, task = later(task_send_sent_event=True)
    result = task.apply_async((1,), countdown=60)
    guest.age(61)
    guest.reap()
    guest.deliver()
    assert result.get(timeout=1)[0] == [1]


def test_the_event_of_a_retry_is_not_taken_for_its_message(tmp_path: Path) -> None:
    app = app_of(tmp_path, task_send_sent_event=True)

    def again(self: Any, n: int) -> int:
        if self.request.retries < 1:
            raise self.retry(args=(n + 1,), countdown=0)
        return n

    task = leased(app, name="t", bind=True)(again)
    guest = Guest(app)
    result = task.delay(3)
    guest.deliver()
    guest.deliver()
    assert result.get(timeout=1) == 4


def test_switched_off_the_message_is_sent_with_its_eta(
    later: Callable[..., tuple[Guest, Any]],
) -> None:
    guest, task = later(lease_enabled=False)
    task.apply_async((1,), countdown=60)
    assert guest.message().headers["eta"] is not None
