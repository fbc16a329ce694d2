"""A message kept hidden, deferred, or let go: one small module a broker, one protocol."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from celery_lease.visibility.facts import QueueFacts

__all__ = ["Gone", "Held", "Visibility"]


@dataclass(frozen=True, slots=True)
class Held:
    """A received message that the broker hides for us."""

    #: What the broker calls this receive: SQS's receipt handle.
    handle: str
    #: Where it was received: SQS's queue URL.
    queue: str
    #: On the monotonic clock of this machine.
    received_at: float
    #: The broker's count of deliveries, None if it does not say.
    receives: int | None
    #: What the module needs to talk about this queue.
    client: Any
    #: The group whose messages are delivered one after the other; None: there is no such order.
    group: str | None = None


@dataclass(frozen=True, slots=True)
class Gone:
    """A message that could not be kept hidden, and whether asking again makes sense."""

    held: Held
    code: str
    message: str
    final: bool


class Visibility(Protocol):
    """What the heartbeat and a delivery ask of a broker."""

    def introduce(self, channel: Any, queues: Sequence[str]) -> None:
        """Look at the queues a worker consumes from and say what cannot be kept."""

    def hold(self, message: Any) -> Held | None:
        """What is needed to keep ``message`` hidden; None if that is not known."""

    def timeout_of(self, held: Held) -> float:
        """Seconds for which the broker hides a message of this queue by itself."""

    def facts_of(self, held: Held) -> QueueFacts:
        """What is known of this message's queue."""

    def extend(self, messages: Sequence[tuple[Held, float]]) -> list[Gone]:
        """Hide each message for so many seconds from now, in as few calls as possible."""

    def defer(self, message: Any, held: Held, delay: float) -> None:
        """Let the message come back after ``delay`` seconds, neither deleted nor re-sent."""
