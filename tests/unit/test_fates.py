"""Fates: what a task may say, and which one an exception meets."""

from __future__ import annotations

import pickle
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from billiard.exceptions import TimeLimitExceeded

from celery_lease import LeasedTask
from celery_lease.errors import InvalidSetting
from celery_lease.fates import DELETE, LEAVE, DeleteMessage, Fate, Kind, TryAgain, again, fate_of


def a_task(fates: Any = None, *, failures: bool = True, timeouts: bool = True) -> Any:
    """What ``fate_of`` looks at."""
    return SimpleNamespace(lease_fates=fates, acks_on_failure=failures, acks_on_timeout=timeouts)


def test_without_a_word_a_message_is_deleted() -> None:
    assert fate_of(a_task(), ValueError()) is DELETE


def test_the_nearest_class_of_an_exception_decides() -> None:
    fates = {Exception: LEAVE, OSError: again(1), ConnectionError: DELETE}
    task = a_task(fates)
    assert fate_of(task, ConnectionResetError()) is DELETE
    assert fate_of(task, FileNotFoundError()) == again(1)
    assert fate_of(task, ValueError()) is LEAVE


def test_one_fate_may_stand_for_all() -> None:
    assert fate_of(a_task(LEAVE), ValueError()) is LEAVE


def test_an_exception_that_brings_a_fate_decides_for_itself() -> None:
    assert fate_of(a_task(LEAVE), TryAgain(3)) == again(3)
    assert fate_of(a_task(LEAVE), DeleteMessage()) is DELETE


def test_celerys_options_decide_where_nothing_is_said() -> None:
    task = a_task(failures=False, timeouts=False)
    assert fate_of(task, ValueError()) is LEAVE
    assert fate_of(task, TimeLimitExceeded(1)) == again(0)
    assert fate_of(a_task(failures=False), TimeLimitExceeded(1)) is DELETE


@pytest.mark.parametrize("delay", [-1, "10", None, True, float("nan"), float("inf")])
def test_a_delay_has_to_be_a_duration(delay: Any) -> None:
    with pytest.raises(InvalidSetting, match="again"):
        again(delay)


def test_a_delay_may_be_a_timedelta() -> None:
    assert again(timedelta(minutes=2)) == Fate(Kind.AGAIN, 120.0)


def test_an_exception_keeps_its_fate_between_processes() -> None:
    error = pickle.loads(pickle.dumps(TryAgain(timedelta(seconds=5), "busy")))
    assert error.lease_fate == again(5)
    assert error.args == (5.0, "busy")


@pytest.mark.parametrize(
    ("fates", "names"),
    [
        ("leave", "'leave'"),
        ({"ValueError": LEAVE}, "'ValueError'"),
        ({ValueError: "leave"}, "ValueError"),
        ([LEAVE], "LEAVE|Fate"),
    ],
)
def test_what_is_no_fate_is_refused_when_the_class_is_made(fates: Any, names: str) -> None:
    with pytest.raises(InvalidSetting, match=names):
        type("Bad", (LeasedTask,), {"lease_fates": fates})
