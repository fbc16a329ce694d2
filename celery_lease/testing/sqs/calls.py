"""What the server was asked and how it answered; and a message seen without receiving it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Call:
    """One finished request."""

    action: str
    #: Name of the queue, None for actions without one.
    queue: str | None
    #: The parameters as AWS names them, the same for both protocols.
    parameters: Mapping[str, Any]
    #: When it arrived, on the server's clock.
    at: float
    #: HTTP status of the answer; 0 if the connection was dropped instead.
    status: int
    #: The error's code as boto3 shows it, without `AWS.SimpleQueueService.`; None if none.
    error: str | None
    #: The same for each refused entry of a batch that was answered 200.
    entry_errors: tuple[str, ...] = ()
    #: Whose keys it was signed with; those of an assumed role begin with `ASIA`.
    access_key: str = ""


class CallLog:
    """The finished calls in the order they arrived. Guarded by the server's condition."""

    def __init__(self) -> None:
        self._calls: dict[int, Call] = {}
        self._pending: dict[int, str] = {}
        self._arrived = 0
        self._forgotten = 0

    def arrive(self, action: str) -> int:
        """Take the place of a call that has just arrived."""
        self._arrived += 1
        self._pending[self._arrived] = action
        return self._arrived

    def pending(self, action: str) -> int:
        """How many calls of the action have arrived and are not finished."""
        return list(self._pending.values()).count(action)

    def finish(self, place: int, call: Call) -> None:
        """Write down how it ended. A call that arrived before a `clear` is not written."""
        del self._pending[place]
        if place > self._forgotten:
            self._calls[place] = call

    def finished(self) -> list[Call]:
        """The finished calls, in the order of their arrival."""
        return [self._calls[place] for place in sorted(self._calls)]

    def clear(self) -> None:
        """Forget every call that has arrived so far."""
        self._forgotten = self._arrived
        self._calls.clear()


@dataclass(frozen=True, slots=True)
class MessageInfo:
    """A message as it is now, seen without receiving it. Times are on the server's clock."""

    message_id: str
    body: str
    receive_count: int
    first_received_at: float | None
    #: Whether a receive could get it now (a FIFO group may still hold it back).
    visible: bool
    #: When hiding or delay ends; None if it is visible.
    hidden_until: float | None
    sent_at: float
    group: str | None
    #: Whether somebody deleted it.
    deleted: bool
