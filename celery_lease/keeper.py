"""The deliveries that a worker's main process keeps alive: their leases and messages."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from celery_lease.board import Board, Slot
from celery_lease.policy import Terms
from celery_lease.visibility import Held

__all__ = ["Keeper", "Kept"]


@dataclass(slots=True, eq=False)
class Kept:
    """One delivery, from its arrival in the worker until its message is let go."""

    run_id: str
    holder: str
    task: str
    terms: Terms
    held: Held | None
    slot: Slot | None
    #: On the monotonic clock: when the message must be extended next.
    extend_at: float
    #: On the monotonic clock: until when the broker hides it from others, as far as we know.
    hidden_until: float = float("inf")
    #: The broker's message, to give it back; None where that is the broker library's affair.
    message: Any = None
    #: The pool process that executes it; None while it waits in the worker.
    pid: int | None = None
    interruptible: bool = False
    #: Known to the store as ours at least once.
    claimed: bool = False
    lost: str = ""
    kill_at: float = float("inf")
    #: Since when its outcome is committed and being told.
    telling_since: float = float("inf")


class Keeper:
    """A registry that the main process and the heartbeat thread share.

    ``forget`` returns only when no call to the broker about this message is under way, so
    that nothing is asked about a message after it was deleted or deferred.
    """

    def __init__(self, board: Board) -> None:
        self.board = board
        self._kept: dict[str, Kept] = {}
        self._busy: set[str] = set()
        self._change = threading.Condition()
        self._delivered: dict[str, str] = {}

    def add(self, kept: Kept) -> None:
        """Keep a delivery's message hidden from now on."""
        with self._change:
            self._kept[kept.holder] = kept

    def accepted(self, holder: str, pid: int, *, interruptible: bool) -> bool:
        """The pool has taken the delivery: its lease is renewed from now on.

        False if it was forgotten while it waited.
        """
        with self._change:
            kept = self._kept.get(holder)
            if kept is not None:
                kept.pid = pid
                kept.interruptible = interruptible
            return kept is not None

    def forget(self, holder: str, timeout: float = 15.0) -> Kept | None:
        """Stop keeping a delivery; waits for a call that is under way."""
        with self._change:
            kept = self._kept.pop(holder, None)
            self._change.wait_for(lambda: holder not in self._busy, timeout)
        if kept is not None and kept.slot is not None:
            self.board.give_back(kept.slot)
        return kept

    def all(self) -> list[Kept]:
        """What is kept at this moment."""
        with self._change:
            return list(self._kept.values())

    def begin(self, wanted: Iterable[Kept]) -> list[Kept]:
        """Mark deliveries as being talked about; those forgotten meanwhile are left out."""
        with self._change:
            present = [kept for kept in wanted if kept.holder in self._kept]
            self._busy.update(kept.holder for kept in present)
            return present

    def end(self, kept: Iterable[Kept]) -> None:
        """The call about these deliveries is over."""
        with self._change:
            self._busy.difference_update(one.holder for one in kept)
            self._change.notify_all()

    def delivered(self, run_id: str, holder: str) -> None:
        """The outcome of this run has been reported; settle it with the next batch."""
        with self._change:
            self._delivered[holder] = run_id

    def take_delivered(self) -> list[tuple[str, str]]:
        """The (run, holder) pairs to settle, each once."""
        with self._change:
            pairs = [(run_id, holder) for holder, run_id in self._delivered.items()]
            self._delivered.clear()
            return pairs

    @property
    def has_delivered(self) -> bool:
        """Whether something waits to be settled."""
        return bool(self._delivered)

    def is_hidden(self, holder: str) -> bool:
        """Whether nobody else can have received this delivery's message meanwhile."""
        with self._change:
            kept = self._kept.get(holder)
            return kept is not None and time.monotonic() < kept.hidden_until

    def next_extension(self) -> float:
        """Seconds until the first message must be extended."""
        with self._change:
            due = min((one.extend_at for one in self._kept.values()), default=float("inf"))
        return due - time.monotonic()
