"""The server's clock: real time plus what a test has added."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class ServerClock:
    """Every duration the server knows runs on this clock; only `reset` takes it back.

    It starts at the wall clock and follows the monotonic one, so that a correction of the wall
    clock in the middle of a test changes nothing.
    """

    def __init__(self, *, on_advance: Callable[[], None] | None = None) -> None:
        self._origin = time.time() - time.monotonic()
        self._added = 0.0
        self._lock = threading.Lock()
        self._on_advance = on_advance

    def now(self) -> float:
        """Seconds since 1970, with everything added so far."""
        return self._origin + time.monotonic() + self._added

    @property
    def added(self) -> float:
        """Seconds that tests have added."""
        return self._added

    def advance(self, seconds: float = 0, *, hours: float = 0) -> float:
        """Move the clock forward at once and return the new time.

        Visibility timeouts, delays, the 12 hours, deduplication and retention all follow;
        waiting receivers look again. The time a long poll waits is real time and does not.
        """
        step = seconds + hours * 3600
        if step < 0:
            raise ValueError(f"the clock only goes forward, not by {step} seconds")
        with self._lock:
            self._added += step
        if self._on_advance is not None:
            self._on_advance()
        return self.now()

    def reset(self) -> None:
        """Forget what was added. Only sensible when no message is left that knows the old time."""
        with self._lock:
            self._added = 0.0
