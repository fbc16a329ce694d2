"""What is known of a queue, and what in it does not fit the settings."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

__all__ = ["QueueFacts", "shortcomings"]

#: Assumed where a queue's attributes may not be read; SQS's own default.
_UNKNOWN_TIMEOUT = 30.0
_SHORTEST_TIMEOUT = 3.0
#: A trigger may be put off three times before it is dropped; then it is received once more.
_FEWEST_RECEIVES = 4
_ADVISED_RECEIVES = 5


@dataclass(frozen=True, slots=True)
class QueueFacts:
    """A queue's attributes, durations in seconds; without the permission nothing is known."""

    #: How long the broker hides a received message by itself.
    visibility_timeout: float = _UNKNOWN_TIMEOUT
    #: Whether a message that nobody deletes ends in a dead-letter queue; None: unknown.
    dead_letters: bool | None = None
    #: Receives after which it does; None if it does not, or if that is unknown.
    max_receives: int | None = None
    #: How long a message stays in the queue in all, hidden or not; None: unknown.
    retention: float | None = None
    #: Messages of a group are delivered one after the other.
    fifo: bool = False

    @classmethod
    def of(cls, url: str, attributes: Mapping[str, str]) -> QueueFacts:
        """What SQS's ``GetQueueAttributes`` has answered for the queue at ``url``."""
        redrive = json.loads(attributes.get("RedrivePolicy") or "{}")
        receives = redrive.get("maxReceiveCount")
        retention = attributes.get("MessageRetentionPeriod")
        return cls(
            visibility_timeout=float(attributes["VisibilityTimeout"]),
            dead_letters=bool(redrive.get("deadLetterTargetArn")),
            max_receives=None if receives is None else int(receives),
            retention=None if retention is None else float(retention),
            fifo=url.endswith(".fifo") or attributes.get("FifoQueue") == "true",
        )

    @classmethod
    def unknown(cls, url: str) -> QueueFacts:
        """What the name of a queue alone says."""
        return cls(fifo=url.endswith(".fifo"))


def shortcomings(
    name: str, facts: QueueFacts, *, asked: float | None, retrigger_after: float
) -> Iterator[str]:
    """Sentences about what cannot be kept with this queue, each with both numbers.

    ``asked`` is the visibility timeout in the app's transport options, if there is one.
    """
    timeout = facts.visibility_timeout
    if asked is not None and timeout != asked:
        yield (
            f"queue {name} hides a received message for {timeout:g} s, not for the "
            f"visibility_timeout = {asked:g} s of broker_transport_options, which counts "
            f"only for queues that Celery creates; the heartbeat follows the {timeout:g} s"
        )
    if timeout < _SHORTEST_TIMEOUT:
        yield (
            f"queue {name} hides a received message for only {timeout:g} s: "
            "duplicates will be deferred instead of avoided; set its VisibilityTimeout "
            "to 30 s or more"
        )
    if facts.max_receives is not None and facts.max_receives < _FEWEST_RECEIVES:
        yield (
            f"queue {name} gives a message to its dead-letter queue after maxReceiveCount = "
            f"{facts.max_receives} receives, but a trigger may be put off "
            f"{_FEWEST_RECEIVES - 1} times: set maxReceiveCount to {_ADVISED_RECEIVES} or more. "
            "A run whose trigger ended there is triggered again "
            f"after lease_retrigger_after = {retrigger_after:g} s"
        )
    if facts.retention is not None and facts.retention < retrigger_after:
        yield (
            f"queue {name} keeps a message for MessageRetentionPeriod = {facts.retention:g} s, "
            f"less than lease_retrigger_after = {retrigger_after:g} s: a trigger that waits "
            "longer in the queue is lost until it is sent again, and the first message of a run "
            "for ever"
        )
    if facts.retention is not None and facts.retention < timeout:
        yield (
            f"queue {name} keeps a message for MessageRetentionPeriod = {facts.retention:g} s, "
            f"less than its VisibilityTimeout = {timeout:g} s: the message of a worker that died "
            "does not come back"
        )
