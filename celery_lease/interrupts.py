"""How a lost lease reaches a body that is busy.

On the prefork pool the parent marks the holder's slot and signals the child; the handler
compares holders and raises ``LeaseLost`` in the task, as Celery's soft time limit does.
Inside a verb of the lease it only leaves a note, and the verb raises at its end. On other
pools nothing can be raised from outside: the next verb looks at the slot.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

from celery_lease.board import Slot
from celery_lease.errors import LeaseLost

__all__ = ["INTERRUPT_SIGNAL", "Interrupts"]

#: Ignored by default, so that a process without the handler is not harmed by it.
INTERRUPT_SIGNAL = signal.SIGURG
_SOFT_LIMIT_SIGNAL = signal.SIGUSR1


class Interrupts(threading.local):
    """What may interrupt the one body that runs in this thread of this process."""

    def __init__(self) -> None:
        super().__init__()
        self._slot: Slot | None = None
        self._run: tuple[str, int] = ("", 0)
        self._shields = 0
        self._installed = False

    def install(self) -> None:
        """Listen for the parent's signal; once a process, in its main thread only."""
        if self._installed or threading.current_thread() is not threading.main_thread():
            return
        signal.signal(INTERRUPT_SIGNAL, self._on_signal)
        self._installed = True

    @contextlib.contextmanager
    def watching(self, slot: Slot | None, run_id: str, epoch: int) -> Iterator[None]:
        """``LeaseLost`` may be raised in the block if ``slot`` says so.

        A body may execute another task eagerly: after that its own slot counts again.
        """
        outer = self._slot, self._run
        self._slot, self._run = slot, (run_id, epoch)
        try:
            yield
        finally:
            self._slot, self._run = outer

    @contextlib.contextmanager
    def shield(self) -> Iterator[None]:
        """No signal raises inside; a loss that came meanwhile is raised by ``check``.

        A soft time limit that came meanwhile is raised at the end: inside, it would leave
        a connection of the store in the middle of a statement.
        """
        self._shields += 1
        try:
            with _soft_limit_put_off():
                yield
        finally:
            self._shields -= 1

    def check(self) -> None:
        """Raise ``LeaseLost`` if the parent has learned that the lease is over."""
        slot = self._slot
        if slot is not None and slot.lost:
            self._lose(slot)

    def over(self) -> None:
        """The lease has ended by its holder's own commit: nothing interrupts any more."""
        self._slot = None

    def _on_signal(self, _signum: int, _frame: Any) -> None:
        slot = self._slot
        if slot is not None and not self._shields and slot.lost:
            self._lose(slot)

    def _lose(self, slot: Slot) -> None:
        self._slot = None
        raise LeaseLost(slot.lost or "reclaimed", *self._run)


@contextlib.contextmanager
def _soft_limit_put_off() -> Iterator[None]:
    handler = signal.getsignal(_SOFT_LIMIT_SIGNAL)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    arrived: list[tuple[int, Any]] = []
    # Not by the thread's mask: another thread of the process would take the signal.
    signal.signal(_SOFT_LIMIT_SIGNAL, lambda number, frame: arrived.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(_SOFT_LIMIT_SIGNAL, handler)
        if arrived:
            handler(*arrived[0])


@contextlib.contextmanager
def no_soft_limit() -> Iterator[None]:
    """Between commit and acknowledgement a soft time limit must not change the outcome.

    A signal that arrived meanwhile is thrown away, so that it cannot hit the next task.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(_SOFT_LIMIT_SIGNAL)
    signal.signal(_SOFT_LIMIT_SIGNAL, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(_SOFT_LIMIT_SIGNAL, handler)
