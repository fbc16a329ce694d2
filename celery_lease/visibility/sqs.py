"""Amazon SQS: ChangeMessageVisibility, in batches, never beyond the twelve hours.

SQS counts twelve hours from the receive and answers a request for more with an error, so
that the rest is worked out here first. What the broker answers to an old receipt handle
differs between queues and emulators; nothing here takes an answer for a decision: the
database alone decides who may run what.
"""

from __future__ import annotations

import functools
import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from celery_lease.complaints import Complaints
from celery_lease.visibility import Gone, Held
from celery_lease.visibility.answers import DENIED, FINAL_CODES, code_of, is_denied
from celery_lease.visibility.clients import Clients
from celery_lease.visibility.facts import QueueFacts, shortcomings

__all__ = ["LONGEST_HIDDEN", "SQSVisibility"]

logger = logging.getLogger(__name__)

#: Twelve hours less a second: SQS refuses to hide a message for longer than 43200 s in all.
LONGEST_HIDDEN = 43199
_BATCH = 10
#: Seconds until a queue that could not be asked is asked again.
_ASK_AGAIN = 60.0
#: kombu gives messages of FIFO queues this group if the sender names none.
_GROUP_OF_THE_REST = "default"


class SQSVisibility:
    """Keeps messages of SQS queues hidden; safe to use from several threads."""

    def __init__(self, *, timeout: float = 5.0, retrigger_after: float = 900.0) -> None:
        self._clients = Clients(timeout=timeout)
        self._retrigger_after = retrigger_after
        self._facts: dict[str, tuple[QueueFacts, float]] = {}
        self._complaints = Complaints(logger)

    # -- queues ---------------------------------------------------------------------------

    def introduce(self, channel: Any, queues: Sequence[str]) -> None:
        """Read each queue's real attributes and say what does not fit the settings.

        kombu's ``visibility_timeout`` option counts only for queues that kombu creates.
        """
        if not hasattr(channel, "sqs"):
            return
        asked = channel.transport_options.get("visibility_timeout")
        for name in queues:
            url = channel._new_queue(name)  # noqa: SLF001 - kombu's only way from a name to a URL
            nothing = Held("", url, time.monotonic(), None, self._clients.of(channel, url, name))
            facts = self.facts_of(nothing)
            if facts.retention is None:  # nothing could be read, which has been said
                continue
            for text in shortcomings(
                name, facts, asked=asked, retrigger_after=self._retrigger_after
            ):
                self._complaints.say(text, logging.WARNING, "%s", text)

    def facts_of(self, held: Held) -> QueueFacts:
        """The attributes of this message's queue, asked once."""
        facts, good_until = self._facts.get(held.queue, (None, 0.0))
        if facts is None or time.monotonic() > good_until:
            facts, good_until = self._ask(held)
            self._facts[held.queue] = facts, good_until
        return facts

    def timeout_of(self, held: Held) -> float:
        """The queue's own VisibilityTimeout; 30 s if we may not read it."""
        return self.facts_of(held).visibility_timeout

    def _ask(self, held: Held) -> tuple[QueueFacts, float]:
        try:
            # All: SQS refuses to be asked for FifoQueue on a queue that is not one.
            answer = held.client.get_queue_attributes(QueueUrl=held.queue, AttributeNames=["All"])
            return QueueFacts.of(held.queue, answer["Attributes"]), math.inf
        except Exception as exc:  # noqa: BLE001 - boto's errors share no base with the network's
            unknown = QueueFacts.unknown(held.queue)
            denied = is_denied(exc)
            self._complaints.say(
                f"facts {held.queue}",
                logging.WARNING,
                "the attributes of %s cannot be read (%s); assuming a visibility timeout of %g s%s",
                held.queue,
                exc,
                unknown.visibility_timeout,
                ". Allow sqs:GetQueueAttributes" if denied else "",
            )
            return unknown, math.inf if denied else time.monotonic() + _ASK_AGAIN

    # -- messages -------------------------------------------------------------------------

    def hold(self, message: Any) -> Held | None:
        """The receipt handle, queue, group and receive count of a kombu message from SQS."""
        info = message.delivery_info or {}
        received = info.get("sqs_message")
        url = info.get("sqs_queue")
        if not received or not url:
            return None
        # Celery calls it in its main loop, where an error of kombu's would end the worker.
        message.ack = functools.partial(self._ack, message, message.ack)
        return Held(
            handle=received["ReceiptHandle"],
            queue=url,
            received_at=time.monotonic(),
            receives=_count(received),
            client=self._clients.of(message.channel, url, info.get("routing_key")),
            group=_group(message, received) if url.endswith(".fifo") else None,
        )

    def extend(self, messages: Sequence[tuple[Held, float]]) -> list[Gone]:
        """Hide the messages longer; those that could not be are returned.

        After a failure of the network the other batches of the same queue are left for
        the next tick: a heartbeat must not wait for one time-out after the other.
        """
        gone: list[Gone] = []
        wanted: dict[str, list[tuple[Held, int]]] = defaultdict(list)
        for held, seconds in messages:
            allowed = _allowed(held, seconds)
            if allowed is None:
                gone.append(Gone(held, "cap", "the twelve hours are used up", final=True))
            else:
                wanted[held.queue].append((held, allowed))
        for entries in wanted.values():
            for batch in _batches(entries):
                failed, reachable = self._extend_batch(batch)
                gone += failed
                if not reachable:
                    break
        return gone

    def _extend_batch(self, batch: list[tuple[Held, int]]) -> tuple[list[Gone], bool]:
        client = batch[0][0].client
        try:
            answer = client.change_message_visibility_batch(
                QueueUrl=batch[0][0].queue,
                Entries=[
                    {"Id": str(i), "ReceiptHandle": held.handle, "VisibilityTimeout": seconds}
                    for i, (held, seconds) in enumerate(batch)
                ],
            )
        except Exception as exc:  # noqa: BLE001 - boto's errors share no base with the network's
            self._not_hidden(batch[0][0].queue, exc)
            answered = code_of(exc)
            code = DENIED if is_denied(exc) else answered or "network"
            failed = [Gone(held, code, str(exc), final=False) for held, _ in batch]
            return failed, answered is not None
        return [
            Gone(
                batch[int(entry["Id"])][0],
                str(entry.get("Code")),
                str(entry.get("Message", "")),
                final=entry.get("Code") in FINAL_CODES,
            )
            for entry in answer.get("Failed", ())
        ], True

    def defer(self, message: Any, held: Held, delay: float) -> None:
        """Make the message visible after ``delay`` seconds and free its prefetch slot.

        kombu's own requeue is not used: it would make the message visible at once.
        """
        allowed = _allowed(held, delay)
        if allowed is not None:
            try:
                held.client.change_message_visibility(
                    QueueUrl=held.queue, ReceiptHandle=held.handle, VisibilityTimeout=allowed
                )
            except Exception as exc:  # noqa: BLE001 - it comes back by itself in any case
                if is_denied(exc):
                    self._not_hidden(held.queue, exc)
                else:
                    logger.info("could not defer a message of %s: %s", held.queue, exc)
        message.channel.qos.ack(message.delivery_tag)

    def _ack(self, message: Any, ack: Callable[..., None], *args: Any, **options: Any) -> None:
        """What kombu does, but a missing permission does not end the worker."""
        try:
            ack(*args, **options)
        except Exception as exc:
            if not is_denied(exc):
                raise
            queue = message.delivery_info["sqs_queue"]
            self._complaints.say(
                f"delete {queue}",
                logging.ERROR,
                "messages of %s cannot be deleted: %s. Allow sqs:DeleteMessage; until then each "
                "comes back after the queue's visibility timeout, and is dropped again",
                queue,
                exc,
            )
            message.channel.qos.ack(message.delivery_tag)

    def _not_hidden(self, queue: str, exc: Exception) -> None:
        if is_denied(exc):
            self._complaints.say(
                f"hide {queue}",
                logging.ERROR,
                "messages of %s cannot be kept hidden: %s. Allow sqs:ChangeMessageVisibility; "
                "until then duplicates come back after the queue's own timeout",
                queue,
                exc,
            )
        else:
            self._complaints.say(
                f"hide {queue} {code_of(exc) or type(exc).__name__}",
                logging.WARNING,
                "could not keep messages of %s hidden: %s",
                queue,
                exc,
            )


def _allowed(held: Held, seconds: float) -> int | None:
    """Whole seconds that may be asked for now, or None when the twelve hours are over.

    Rounded up: a message that came back before its time would be deferred again at once.
    """
    left = LONGEST_HIDDEN - math.ceil(time.monotonic() - held.received_at)
    return None if left <= 0 else max(0, min(math.ceil(seconds), left))


def _batches(entries: list[tuple[Held, int]]) -> Iterator[list[tuple[Held, int]]]:
    for start in range(0, len(entries), _BATCH):
        yield entries[start : start + _BATCH]


def _count(received: dict[str, Any]) -> int | None:
    """``ApproximateReceiveCount`` is a string and may be missing."""
    try:
        return int(received["Attributes"]["ApproximateReceiveCount"])
    except (KeyError, TypeError, ValueError):
        return None


def _group(message: Any, received: dict[str, Any]) -> str:
    """The FIFO group: SQS's own word for it if kombu has asked for it, else the sender's."""
    told = (received.get("Attributes") or {}).get("MessageGroupId")
    return str(told or (message.properties or {}).get("MessageGroupId") or _GROUP_OF_THE_REST)
