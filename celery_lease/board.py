"""Shared memory between a worker's main process and its pool children.

The main process renews leases and learns that one was lost; the child runs the body and
must hear of it without a round trip. A board is an anonymous mapping made before the fork:
one slot a delivery, written by the parent (trust, lost, yield) and by the child (progress).
Slots are told apart by holder, so a signal that arrives late cannot hit the next task.
"""

from __future__ import annotations

import contextlib
import mmap
import struct
import threading
import time
from collections.abc import Iterator

__all__ = ["LOST_REASONS", "Board", "Slot"]

_SLOT = struct.Struct("=48sddB7x")
_TRUST = struct.Struct("=d")
_HOLDER_BYTES = 48
_TRUST_AT = 48
_PROGRESS_AT = 56
_LOST_AT = 64
_HEADER = 8

#: Why a holder lost its lease, by the byte that says so; 0 means that it did not.
LOST_REASONS = ("", "reclaimed", "revoked", "stalled")


class Board:
    """A fixed number of slots; a delivery that finds none asks the store instead."""

    def __init__(self, slots: int = 4096) -> None:
        self._memory = mmap.mmap(-1, _HEADER + slots * _SLOT.size)
        self._free = list(range(slots - 1, -1, -1))
        self._lock = threading.Lock()

    @property
    def stopping(self) -> bool:
        """The worker was told to stop: holders hand off at their next checkpoint."""
        return self._memory[0] == 1

    @stopping.setter
    def stopping(self, value: bool) -> None:
        self._memory[0] = int(value)

    def take(self, holder: str, trust_until: float = 0.0) -> Slot | None:
        """A slot for ``holder``, or None if all are in use. Parent only."""
        with self._lock:
            if not self._free:
                return None
            index = self._free.pop()
        offset = _HEADER + index * _SLOT.size
        _SLOT.pack_into(self._memory, offset, _key(holder), trust_until, time.monotonic(), 0)
        return Slot(self, index, holder)

    def give_back(self, slot: Slot) -> None:
        """Clear and free a slot. Parent only."""
        offset = _HEADER + slot.index * _SLOT.size
        with self._lock:
            _SLOT.pack_into(self._memory, offset, b"", 0.0, 0.0, 0)
            self._free.append(slot.index)

    def slot(self, index: int | None, holder: str) -> Slot | None:
        """The child's view of the slot that its parent named."""
        return None if index is None else Slot(self, index, holder)

    def read_double(self, index: int, at: int) -> float:
        """The number at ``at`` in a slot."""
        value: float = _TRUST.unpack_from(self._memory, _HEADER + index * _SLOT.size + at)[0]
        return value

    def write_double(self, index: int, at: int, value: float) -> None:
        """Set the number at ``at`` in a slot."""
        _TRUST.pack_into(self._memory, _HEADER + index * _SLOT.size + at, value)

    @contextlib.contextmanager
    def owned(self, index: int, holder: str) -> Iterator[bool]:
        """Whether the slot is that holder's, as long as the block lasts. Parent only.

        The heartbeat may write about a delivery that the main process has just forgotten;
        the slot may have been given to the next one since.
        """
        with self._lock:
            yield self.belongs_to(index, holder)

    def read_byte(self, index: int, at: int) -> int:
        """The byte at ``at`` in a slot."""
        return self._memory[_HEADER + index * _SLOT.size + at]

    def write_byte(self, index: int, at: int, value: int) -> None:
        """Set the byte at ``at`` in a slot."""
        self._memory[_HEADER + index * _SLOT.size + at] = value

    def belongs_to(self, index: int, holder: str) -> bool:
        """Whether the slot is still that holder's."""
        offset = _HEADER + index * _SLOT.size
        return self._memory[offset : offset + _HOLDER_BYTES] == _key(holder)


class Slot:
    """One holder's place on the board; reads as empty once it belongs to somebody else."""

    __slots__ = ("_board", "holder", "index")

    def __init__(self, board: Board, index: int, holder: str) -> None:
        self._board = board
        self.index = index
        self.holder = holder

    @property
    def stopping(self) -> bool:
        """The worker was told to stop."""
        return self._board.stopping

    @property
    def trust_until(self) -> float:
        """Until when, on the monotonic clock, the lease is known to be ours; 0: unknown."""
        return self._read(_TRUST_AT)

    @trust_until.setter
    def trust_until(self, value: float) -> None:
        with self._board.owned(self.index, self.holder) as owned:
            if owned:
                self._board.write_double(self.index, _TRUST_AT, value)

    @property
    def progress_at(self) -> float:
        """When the body last saved new progress, on the monotonic clock."""
        return self._read(_PROGRESS_AT)

    def progressed(self) -> None:
        """The body saved new progress. Child."""
        if self._board.belongs_to(self.index, self.holder):
            self._board.write_double(self.index, _PROGRESS_AT, time.monotonic())

    @property
    def lost(self) -> str:
        """Why the lease was lost, or an empty string."""
        if not self._board.belongs_to(self.index, self.holder):
            return ""
        return LOST_REASONS[self._board.read_byte(self.index, _LOST_AT)]

    def mark_lost(self, reason: str) -> None:
        """The store said that the lease is over. Parent."""
        known = reason if reason in LOST_REASONS else "reclaimed"
        with self._board.owned(self.index, self.holder) as owned:
            if owned:
                self._board.write_byte(self.index, _LOST_AT, LOST_REASONS.index(known))

    def _read(self, at: int) -> float:
        if not self._board.belongs_to(self.index, self.holder):
            return 0.0
        return self._board.read_double(self.index, at)


def _key(holder: str) -> bytes:
    # The random part is at the end of a holder's id; it alone tells holders apart.
    return holder.encode()[-_HOLDER_BYTES:].ljust(_HOLDER_BYTES, b"\0")
