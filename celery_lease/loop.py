"""A background loop, written once: ``start``, ``stop``, and one verb that a test calls."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

__all__ = ["Loop"]

logger = logging.getLogger(__name__)


class Loop:
    """Calls ``run_once`` on a thread; what it returns is the delay to the next call.

    An exception is logged and the loop goes on after ``retry`` seconds: a heartbeat that
    dies of one bad tick would lose every lease of its worker.
    """

    def __init__(self, name: str, run_once: Callable[[], float], *, retry: float = 1.0) -> None:
        self.name = name
        self._run_once = run_once
        self._retry = retry
        self._wake = threading.Event()
        self._stopping = False
        self._thread: threading.Thread | None = None

    @property
    def alive(self) -> bool:
        """The thread is there and has not been told to stop."""
        return self._thread is not None and self._thread.is_alive() and not self._stopping

    def start(self) -> None:
        """Start the thread; calling it again does nothing."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
            self._thread.start()

    def wake(self) -> None:
        """Do the next call now."""
        self._wake.set()

    def stop(self, timeout: float = 10.0) -> None:
        """Ask the loop to end and wait for the call that is under way."""
        self._stopping = True
        self._wake.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def join(self, timeout: float) -> None:
        """Wait for the thread to end, at most ``timeout`` seconds."""
        if self._thread is not None:
            self._thread.join(timeout)

    def _run(self) -> None:
        while not self._stopping:
            self._wake.clear()
            try:
                delay = self._run_once()
            except Exception:
                logger.exception("%s: a pass failed; the next one follows", self.name)
                delay = self._retry
            self._wake.wait(delay)
