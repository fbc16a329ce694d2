"""Deliveries of one FIFO group take turns within a worker.

SQS delivers nothing of a group to anybody while it hides a message of it. But one receive may
bring several messages of one group, and a pool with several slots would execute them beside
each other. So only one of them is in the pool; the others wait here, hidden by the heartbeat.

When the first one's message is deleted the next begins. When it was deferred, its run may be
held elsewhere at this moment: those behind it go back to SQS, which keeps them behind it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

__all__ = ["Turn", "Turns"]


@dataclass(frozen=True, slots=True)
class Turn:
    """A delivery of a group."""

    #: Names the group, across queues.
    group: tuple[str, str]
    holder: str
    #: Lets the worker try again to give the delivery to the pool.
    begin: Callable[[], None]
    #: Gives its message back to the broker.
    give_back: Callable[[], None]


@dataclass(slots=True)
class _Line:
    """Who is at work, and who waits for that."""

    holder: str
    waiting: deque[Turn] = field(default_factory=deque)


class Turns:
    """One delivery at a time for each group; safe to use from several threads."""

    def __init__(self) -> None:
        self._lines: dict[tuple[str, str], _Line] = {}
        self._lock = threading.Lock()

    def take(self, turn: Turn) -> bool:
        """Whether it is this delivery's turn; if not, ``begin`` is called when it is."""
        with self._lock:
            line = self._lines.get(turn.group)
            if line is None:
                self._lines[turn.group] = _Line(turn.holder)
            elif line.holder != turn.holder:
                line.waiting.append(turn)
                return False
            return True

    def end(self, group: tuple[str, str], holder: str, *, gone: bool) -> None:
        """The message of this delivery is ``gone``, or comes back and must be the next one."""
        with self._lock:
            line = self._lines.get(group)
            if line is None or line.holder != holder:
                return
            following = line.waiting.popleft() if gone and line.waiting else None
            if following is None:
                del self._lines[group]
            else:
                line.holder = following.holder
        if following is not None:
            following.begin()
            return
        for turn in line.waiting:
            turn.give_back()

    def keep_only(self, holders: Collection[str]) -> None:
        """The connection is lost: forget who waits, and who was to begin but did not."""
        with self._lock:
            for group, line in list(self._lines.items()):
                line.waiting.clear()
                if line.holder not in holders:
                    del self._lines[group]
