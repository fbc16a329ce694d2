"""A time-out on the client's side of a statement.

The server's ``statement_timeout`` cannot help when the network swallows the answer: the
client would wait for ever, and a heartbeat that blocks past its own expiry is no heartbeat.
A watch-dog thread shuts the socket of a connection whose deadline has passed; the blocked
call then fails like any broken connection, and is reported as unavailable, not repeated.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from types import TracebackType
from typing import Any, Self

from celery_lease.errors import StoreUnavailable

__all__ = ["Deadlines"]

_LOOK_EVERY = 0.25


class Deadlines:
    """Watches the connections in use; one lazy daemon thread."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._watched: set[_Watch] = set()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def watch(self, dbapi_connection: Any) -> _Watch:
        """A context that breaks ``dbapi_connection`` if it takes longer than ``seconds``.

        What the broken connection raises leaves it as :class:`StoreUnavailable`.
        """
        return _Watch(self, _fileno(dbapi_connection))

    def add(self, watch: _Watch) -> None:
        """Start to watch."""
        with self._lock:
            self._watched.add(watch)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="lease-store-deadlines", daemon=True
                )
                self._thread.start()

    def remove(self, watch: _Watch) -> None:
        """Watch no more; under the lock, so that a number used again is never shut."""
        with self._lock:
            self._watched.discard(watch)

    def _run(self) -> None:
        while True:
            time.sleep(_LOOK_EVERY)
            if self._watched:
                self._break_late(time.monotonic())

    def _break_late(self, now: float) -> None:
        with self._lock:
            late = {watch for watch in self._watched if watch.deadline <= now}
            self._watched -= late
            for watch in late:
                watch.late = True
                _shut(watch.fileno)


class _Watch:
    """One use of one connection."""

    __slots__ = ("_deadlines", "deadline", "fileno", "late")

    def __init__(self, deadlines: Deadlines, fileno: int) -> None:
        self._deadlines = deadlines
        self.deadline = time.monotonic() + deadlines.seconds
        self.fileno = fileno
        self.late = False

    def __enter__(self) -> Self:
        if self.fileno >= 0:
            self._deadlines.add(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.fileno >= 0:
            self._deadlines.remove(self)
        if self.late and isinstance(error, Exception):
            raise StoreUnavailable(
                f"the lease store did not answer within {self._deadlines.seconds:g} s"
            ) from error


def _fileno(dbapi_connection: Any) -> int:
    """The connection's socket; -1 if it has none, or is closed already."""
    fileno = getattr(dbapi_connection, "fileno", None)
    if not callable(fileno):
        return -1
    try:
        return int(fileno())
    except Exception:  # noqa: BLE001 - each driver has an error of its own for "closed"
        return -1


def _shut(fileno: int) -> None:
    with contextlib.suppress(OSError):
        duplicate = socket.socket(fileno=os.dup(fileno))
        try:
            duplicate.shutdown(socket.SHUT_RDWR)
        finally:
            duplicate.close()
