"""While the store is away a worker takes no new messages; when it is back it goes on."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

__all__ = ["Outage"]

logger = logging.getLogger(__name__)


class Outage:
    """Told by the loops whether the store answers; stops and resumes consuming."""

    def __init__(self, worker: Any, probe: Callable[[], bool]) -> None:
        self._worker = worker
        self._probe = probe
        self._lock = threading.Lock()
        self.on = False

    def tell(self, reachable: bool) -> None:
        """Take in what a loop has seen; the first failure stops consuming."""
        with self._lock:
            if not reachable and self.on:
                # The consumer may be a new one, after its connection to the broker was lost.
                self._in_main_loop(self._pause)
            if reachable == (not self.on):
                return
            if reachable and not self._probe():
                return
            self.on = not reachable
        if self.on:
            logger.error("the lease store cannot be reached: this worker takes no more messages")
        else:
            logger.warning("the lease store is back: this worker takes messages again")
        self._in_main_loop(self._pause if self.on else self._resume)

    def _in_main_loop(self, work: Callable[[], None]) -> None:
        hub = getattr(self._worker, "hub", None)
        consumer = getattr(self._worker, "consumer", None)
        if hub is not None:
            hub.call_soon(work)
        elif consumer is not None:
            consumer.call_soon(work)

    def _pause(self) -> None:
        consumer = getattr(self._worker.consumer, "task_consumer", None)
        if consumer is not None and self.on:
            consumer.cancel()

    def _resume(self) -> None:
        consumer = getattr(self._worker.consumer, "task_consumer", None)
        if consumer is not None and not self.on:
            consumer.consume()
