"""Two and more real connections that collide on purpose, on PostgreSQL unless a test says more.

Nothing here waits for a time to pass. A transaction is held in the middle by a raw connection
that did its first half, or a verb is watched until the server says that it waits for a lock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from celery_lease.store import Store
from tests.services import libpq
from tests.waiting import wait_until


@pytest.fixture
def database(request: pytest.FixtureRequest) -> str:
    """PostgreSQL, unless a test asks for others by ``indirect`` parameters."""
    return str(getattr(request, "param", "postgresql"))


class Session:
    """A connection of the test's own that does one half of something."""

    def __init__(self, url: str) -> None:
        self.connection = psycopg.connect(libpq(url), autocommit=True)

    def begin(self, statement: str = "", *given: Any) -> None:
        """Open a transaction, and do its first statement."""
        self.connection.execute("BEGIN ISOLATION LEVEL READ COMMITTED")
        if statement:
            self.do(statement, *given)

    def do(self, statement: str, *given: Any) -> None:
        """One more statement."""
        self.connection.execute(statement, given)  # type: ignore[call-overload]

    def commit(self) -> None:
        """Let go, with what was done."""
        self.connection.execute("COMMIT")

    def roll_back(self) -> None:
        """Let go, without it."""
        self.connection.execute("ROLLBACK")

    def lock_run(self, run_id: str) -> None:
        """Hold the run's row."""
        self.begin("SELECT 1 FROM celery_lease_run WHERE run_id = %s FOR UPDATE", run_id)

    def lock_lease(self, run_id: str) -> None:
        """Hold the rows of the run's leases."""
        self.begin("SELECT 1 FROM celery_lease_lease WHERE run_id = %s FOR UPDATE", run_id)


@pytest.fixture
def session(store_url: str) -> Iterator[Session]:
    """A raw connection of the test."""
    made = Session(store_url)
    yield made
    made.connection.close()


class Background:
    """Verbs that run beside the test."""

    def __init__(self, url: str) -> None:
        self._pool = ThreadPoolExecutor(32)
        self._watcher = psycopg.connect(libpq(url), autocommit=True)

    def start(self, verb: Callable[..., Any], *given: Any, **named: Any) -> Future[Any]:
        """Start a verb."""
        return self._pool.submit(verb, *given, **named)

    def start_blocked(self, verb: Callable[..., Any], *given: Any, **named: Any) -> Future[Any]:
        """Start a verb, and come back when the server says that it waits for a lock."""
        before = self._blocked()
        future = self.start(verb, *given, **named)
        wait_until(lambda: self._blocked() > before or future.done(), what="a verb to be blocked")
        assert not future.done(), f"it did not wait: {future.exception() or future.result()!r}"
        return future

    def _blocked(self) -> int:
        row = self._watcher.execute(
            "SELECT count(*) FROM pg_stat_activity"
            " WHERE datname = current_database() AND wait_event_type = 'Lock'"
        ).fetchone()
        assert row is not None
        return int(row[0])

    def close(self) -> None:
        """Wait for every verb."""
        self._pool.shutdown()
        self._watcher.close()


@pytest.fixture
def background(store_url: str) -> Iterator[Background]:
    """Starts verbs beside the test."""
    made = Background(store_url)
    yield made
    made.close()


@pytest.fixture
def at_once(
    store: Store, make_store: Callable[..., Store]
) -> Callable[[int, Callable[[Store, int], Any]], list[Any]]:
    """``at_once(n, verb)``: ``verb(store, number)`` from n stores behind one barrier."""

    def collide(count: int, verb: Callable[[Store, int], Any]) -> list[Any]:
        barrier = threading.Barrier(count)
        stores = [make_store(store) for _ in range(count)]

        def one(number: int) -> Any:
            stores[number].view("warm")  # the connection is there before the barrier
            barrier.wait(30)
            return verb(stores[number], number)

        with ThreadPoolExecutor(count) as pool:
            return [future.result(60) for future in [pool.submit(one, n) for n in range(count)]]

    return collide
