"""An exception that a signal raises in the middle of a statement spoils no connection.

Celery's soft time limit does that to whatever the body is doing; the next verb must not get
a connection that still waits for the answer to another statement.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from billiard.exceptions import SoftTimeLimitExceeded
from sqlalchemy import text

from celery_lease.store import Store

SLOW = text("SELECT pg_sleep(1.5)")
QUICK = text("SELECT 1 AS one")


def _in_run(store: Store, statement: Any) -> Any:
    return store.connections.run(lambda c: c.execute(statement).all())


def _in_transaction(store: Store, statement: Any) -> Any:
    return store.connections.transact(lambda c: c.execute(statement).all())


def _through_driver(store: Store, statement: Any) -> Any:
    return store.connections.one(statement, {})


@pytest.fixture
def soft_limit() -> Iterator[None]:
    """A soft time limit that hits 0.3 s from now."""

    def raise_it(_number: int, _frame: Any) -> None:
        raise SoftTimeLimitExceeded

    before = signal.signal(signal.SIGALRM, raise_it)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("soft_limit")
@pytest.mark.parametrize("ask", [_in_run, _in_transaction, _through_driver])
def test_the_next_verb_gets_a_connection_that_works(
    pg_store: Store, ask: Callable[[Store, Any], Any]
) -> None:
    with pytest.raises(SoftTimeLimitExceeded):
        ask(pg_store, SLOW)
    for again in (_in_run, _in_transaction, _through_driver):
        assert again(pg_store, QUICK)[0].one == 1
