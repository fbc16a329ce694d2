"""One queue's messages, receives and receipt handles, kept by AWS's rules.

The rules, and where this differs from the emulators:

- A receive hides the message and gives out a new handle. The handle is *current* until the
  hiding ends (then it is *expired*) or until the next receive (then it is *superseded*).
- The hiding may be moved as often as wanted, but never beyond 12 hours **from the receive**.
  Asking for more is an error; nothing is clamped and nothing is changed.
- What SQS does with an expired or superseded handle on a standard queue is not promised: the
  documentation says that a delete succeeds "but the message might not be deleted", and real
  queues were seen to refuse as well. So it is a `Mode`:

  =========  ============================  ==========================================
  mode       delete with an old handle     change of visibility with an old handle
  =========  ============================  ==========================================
  `error`    refused                       refused
  `silent`   answered 200, message stays   answered 200, nothing happens
  `rehide`   answered 200, message stays   obeyed: it moves the hiding of whoever holds
                                           the message now, or hides it again
  =========  ============================  ==========================================

  Code that is right must be right in all three. FIFO queues refuse in every mode.
- A handle this queue never gave out is malformed: always refused. Deleting a message that is
  already gone is always answered 200.
- A FIFO queue delivers nothing of a group while an earlier receive still hides a message of
  it, and remembers a deduplication id for five minutes whatever became of the message.

Time is handed in as seconds; there is no clock, no thread and no moto in this file.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final, Literal, get_args

from celery_lease.testing.sqs.limits import (
    MAX_HIDDEN_SECONDS,
    Refusal,
    check_visibility,
    invalid_value,
)

Mode = Literal["error", "silent", "rehide"]
MODES: Final[tuple[str, ...]] = get_args(Mode)
DEDUPLICATION_SECONDS: Final = 300

Left = Literal["deleted", "dead-lettered", "expired", "purged"]


class HandleExpired(Refusal):
    """A delete with a handle that no longer holds the message."""

    def __init__(self, handle: str) -> None:
        super().__init__(
            "InvalidParameterValue",
            f"Value {handle} for parameter ReceiptHandle is invalid. "
            "Reason: The receipt handle has expired.",
        )


class Standing(Enum):
    """What a receipt handle is worth now."""

    CURRENT = "current"
    EXPIRED = "expired"
    SUPERSEDED = "superseded"


@dataclass(slots=True, eq=False)
class StoredMessage:
    """A message in a queue; only `QueueState` changes it."""

    message_id: str
    sent_at: float
    payload: Any = None
    group: str | None = None
    deduplication_key: tuple[str | None, str] | None = None
    delayed_until: float = 0.0
    hidden_until: float = 0.0
    handle: str | None = None
    received_at: float | None = None
    first_received_at: float | None = None
    receive_count: int = 0
    #: At-least-once delivery gone wrong: the next receive gets it although it is hidden.
    duplicated: bool = False
    #: Why it is no longer in the queue.
    left: Left | None = None

    def in_flight(self, now: float) -> bool:
        """Whether a receive hides it: received, and the hiding not over."""
        return self.handle is not None and now < self.hidden_until

    def delayed(self, now: float) -> bool:
        """Whether its delay is not over."""
        return now < self.delayed_until

    def deliverable(self, now: float) -> bool:
        """Whether a receive may get it now, the order of FIFO groups aside."""
        return not self.delayed(now) and (self.duplicated or now >= self.hidden_until)

    def standing(self, handle: str, now: float) -> Standing:
        """What this handle of the message is worth now."""
        if handle != self.handle:
            return Standing.SUPERSEDED
        return Standing.CURRENT if now < self.hidden_until else Standing.EXPIRED


@dataclass(frozen=True, slots=True)
class Delivery:
    """One message handed out by one receive, as it was at that moment."""

    message: StoredMessage
    handle: str
    receive_count: int
    first_received_at: float


@dataclass(slots=True)
class Received:
    """What one receive did: deliveries, and messages due for the dead-letter queue."""

    deliveries: list[Delivery] = field(default_factory=list)
    dead: list[StoredMessage] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Counts:
    """The three approximate numbers of a queue; here they are exact."""

    available: int
    delayed: int
    in_flight: int


class QueueState:
    """The messages of one queue and every handle it ever gave out. Not thread-safe."""

    def __init__(
        self, *, fifo: bool = False, new_handle: Callable[[], str] = lambda: uuid.uuid4().hex
    ) -> None:
        self.fifo = fifo
        self._new_handle = new_handle
        self._messages: dict[str, StoredMessage] = {}
        self._gone: list[StoredMessage] = []
        self._by_handle: dict[str, StoredMessage] = {}
        self._deduplication: dict[tuple[str | None, str], tuple[float, StoredMessage]] = {}

    @property
    def messages(self) -> list[StoredMessage]:
        """The messages in the queue, oldest first."""
        return list(self._messages.values())

    @property
    def gone(self) -> list[StoredMessage]:
        """The messages that left it, in the order they did."""
        return list(self._gone)

    def counts(self, now: float) -> Counts:
        """How many messages can be received, are delayed, are in flight."""
        delayed = sum(m.delayed(now) for m in self._messages.values())
        in_flight = sum(m.in_flight(now) for m in self._messages.values())
        return Counts(len(self._messages) - delayed - in_flight, delayed, in_flight)

    def next_change(self, now: float) -> float | None:
        """Seconds until a delay or a hiding ends by itself, None if nothing is waiting."""
        ends = (max(m.delayed_until, m.hidden_until) for m in self._messages.values())
        return min((end - now for end in ends if end > now), default=None)

    def add(self, message: StoredMessage) -> StoredMessage:
        """Put a message in, or return the one that was sent first under its deduplication id."""
        key = message.deduplication_key
        if self.fifo and key is not None:
            known = self._deduplication.get(key)
            if known is not None and message.sent_at < known[0]:
                return known[1]
            self._deduplication[key] = (message.sent_at + DEDUPLICATION_SECONDS, message)
        self._messages[message.message_id] = message
        return message

    def move_to(self, target: QueueState, messages: Iterable[StoredMessage]) -> None:
        """Move messages to a dead-letter queue; they keep id, sending time and receive count."""
        for message in messages:
            self._leave(message, "dead-lettered")
            target._messages[message.message_id] = StoredMessage(
                message_id=message.message_id,
                sent_at=message.sent_at,
                payload=message.payload,
                group=message.group,
                receive_count=message.receive_count,
                first_received_at=message.first_received_at,
            )

    def receive(
        self,
        now: float,
        *,
        count: int = 1,
        hide_for: int = 30,
        max_receive_count: int | None = None,
        newest_first: bool = False,
    ) -> Received:
        """Hand out up to `count` messages and hide each for `hide_for` seconds.

        A message that was received `max_receive_count` times is not handed out but reported
        as dead. `newest_first` turns the order round; FIFO queues ignore it.
        """
        check_visibility(hide_for)
        result = Received()
        blocked = self._blocked_groups(now)
        candidates = self.messages
        if newest_first and not self.fifo:
            candidates.reverse()
        for message in candidates:
            if len(result.deliveries) >= count:
                break
            if not message.deliverable(now) or message.group in blocked:
                continue
            if max_receive_count is not None and message.receive_count >= max_receive_count:
                result.dead.append(message)
            else:
                result.deliveries.append(self._deliver(message, now, hide_for))
        return result

    def _blocked_groups(self, now: float) -> set[str | None]:
        if not self.fifo:
            return set()
        # A delayed message holds its group back too, else its successor would overtake it.
        return {m.group for m in self._messages.values() if not m.deliverable(now)}

    def _deliver(self, message: StoredMessage, now: float, hide_for: int) -> Delivery:
        handle = self._new_handle()
        message.handle = handle
        message.received_at = now
        message.hidden_until = now + hide_for
        message.receive_count += 1
        message.duplicated = False
        if message.first_received_at is None:
            message.first_received_at = now
        self._by_handle[handle] = message
        return Delivery(message, handle, message.receive_count, message.first_received_at)

    def change_visibility(self, handle: str, seconds: int, now: float, *, mode: Mode) -> None:
        """Hide the message for `seconds` from now, at most until 12 hours after its receive."""
        check_visibility(seconds)
        message = self._issued(handle)
        if message.left is not None:
            raise _not_available(handle)
        if message.standing(handle, now) is not Standing.CURRENT:
            if self.fifo:
                raise _not_available(handle)
            if mode == "silent":
                return
            if mode == "error" and message.in_flight(now):
                raise _not_available(handle)
            if mode == "error":
                raise Refusal(
                    "MessageNotInflight",
                    "The specified message isn't in flight.",
                )
        assert message.received_at is not None  # it has a handle
        if now + seconds - message.received_at > MAX_HIDDEN_SECONDS:
            raise invalid_value(
                "VisibilityTimeout",
                seconds,
                "Total VisibilityTimeout for the message is beyond the limit "
                f"[{MAX_HIDDEN_SECONDS} seconds]",
            )
        message.hidden_until = now + seconds

    def delete(self, handle: str, now: float, *, mode: Mode) -> None:
        """Delete the message if the handle is current; else what queue type and mode say."""
        message = self._issued(handle)
        if message.left is not None:
            return
        if message.standing(handle, now) is Standing.CURRENT:
            self._leave(message, "deleted")
        elif self.fifo or mode == "error":
            raise HandleExpired(handle)

    def purge(self) -> None:
        """Take every message out; deduplication ids stay known."""
        for message in self.messages:
            self._leave(message, "purged")

    def expire(self, now: float, retention: float) -> None:
        """Drop the messages that are older than the retention period in seconds."""
        for message in self.messages:
            if now - message.sent_at >= retention:
                self._leave(message, "expired")

    def _issued(self, handle: str) -> StoredMessage:
        message = self._by_handle.get(handle)
        if message is None:
            raise Refusal(
                "ReceiptHandleIsInvalid",
                f'The input receipt handle "{handle}" is not a valid receipt handle.',
            )
        return message

    def _leave(self, message: StoredMessage, why: Left) -> None:
        message.left = why
        del self._messages[message.message_id]
        self._gone.append(message)


def _not_available(handle: str) -> Refusal:
    return invalid_value(
        "ReceiptHandle",
        handle,
        "Message does not exist or is not available for visibility timeout change.",
    )
