"""What goes on being wrong is said when it begins, and not at every tick."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

__all__ = ["Complaints"]

_AGAIN_AFTER = 600.0
_MOST = 200


class Complaints:
    """Logs a thing once, and once more every ten minutes while it is still told.

    Safe to use from several threads. What is held back is logged at level DEBUG.
    """

    def __init__(
        self, logger: logging.Logger, *, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._logger = logger
        self._now = now
        self._said: dict[str, float] = {}
        self._lock = threading.Lock()

    def say(self, about: str, level: int, text: str, *args: object) -> None:
        """Log ``text`` unless the same thing, which ``about`` names, was said a short time ago."""
        self._logger.log(level if self._is_news(about) else logging.DEBUG, text, *args)

    def _is_news(self, about: str) -> bool:
        now = self._now()
        with self._lock:
            said = self._said.get(about)
            if said is not None and now - said < _AGAIN_AFTER:
                return False
            if len(self._said) >= _MOST:  # names that never come again
                self._said.clear()
            self._said[about] = now
            return True
