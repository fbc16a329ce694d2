"""Amazon SQS: ChangeMessageVisibility, in batches, never beyond the twelve hours.

SQS counts twelve hours from the receive and answers a request for more with an error, so
that the rest is worked out here first. What the broker answers to an old receipt handle
differs between queues and emulators; nothing here takes an answer for a decision: the
database alone decides who may run what.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from celery_lease.visibility import Gone, Held

__all__ = ["LONGEST_HIDDEN", "SQSVisibility"]

logger = logging.getLogger(__name__)

#: Twelve hours less a second: SQS refuses to hide a message for longer than 43200 s in all.
LONGEST_HIDDEN = 43199
_BATCH = 10
_UNKNOWN_TIMEOUT = 30.0
_DENIED = {"AccessDenied", "AccessDeniedException", "403"}
_GONE = {
    "InvalidParameterValue",
    "InvalidParameterValueException",
    "InvalidParameterCombination",
    "MessageNotInflight",
    "AWS.SimpleQueueService.MessageNotInflight",
    "ReceiptHandleIsInvalid",
    "AWS.SimpleQueueService.NonExistentQueue",
    "QueueDoesNotExist",
}


class SQSVisibility:
    """Keeps messages of SQS queues hidden; safe to use from several threads."""

    def __init__(self, *, timeout: float = 5.0) -> None:
        self._timeout = timeout
        self._clients: dict[int, tuple[Any, Any]] = {}
        self._timeouts: dict[str, float] = {}
        self._warned: set[str] = set()
        self._lock = threading.Lock()

    def introduce(self, channel: Any, queues: Sequence[str]) -> None:
        """Read the real VisibilityTimeout of each queue; it need not be the app's.

        kombu's ``visibility_timeout`` option counts only for queues that kombu creates.
        """
        if not hasattr(channel, "sqs"):
            return
        asked = channel.transport_options.get("visibility_timeout")
        for name in queues:
            held = self._hold_nothing(channel, name)
            real = self.timeout_of(held)
            if asked is not None and real != asked:
                self._warn_once(
                    f"queue {name} hides a received message for {real:g} s, not for the "
                    f"visibility_timeout = {asked:g} s of broker_transport_options, which counts "
                    f"only for queues that Celery creates; the heartbeat follows the {real:g} s"
                )

    def _hold_nothing(self, channel: Any, name: str) -> Held:
        """A queue as if a message of it were held."""
        url = channel._new_queue(name)  # noqa: SLF001 - kombu's only way from a name to a URL
        return Held("", url, time.monotonic(), None, self._client_of(channel, name))

    def hold(self, message: Any) -> Held | None:
        """The receipt handle, queue and receive count of a kombu message from SQS."""
        info = message.delivery_info or {}
        received = info.get("sqs_message")
        url = info.get("sqs_queue")
        if not received or not url:
            return None
        return Held(
            handle=received["ReceiptHandle"],
            queue=url,
            received_at=time.monotonic(),
            receives=_count(received),
            client=self._client_of(message.channel, info.get("routing_key")),
        )

    def timeout_of(self, held: Held) -> float:
        """The queue's own VisibilityTimeout, asked once; 30 s if we may not read it."""
        known = self._timeouts.get(held.queue)
        if known is not None:
            return known
        timeout = self._ask_timeout(held)
        self._timeouts[held.queue] = timeout
        if timeout < 3:
            self._warn_once(
                f"queue {held.queue} hides a received message for only {timeout:g} s: "
                "duplicates will be deferred instead of avoided; set its VisibilityTimeout "
                "to 30 s or more"
            )
        return timeout

    def _ask_timeout(self, held: Held) -> float:
        try:
            answer = held.client.get_queue_attributes(
                QueueUrl=held.queue, AttributeNames=["VisibilityTimeout"]
            )
            return float(answer["Attributes"]["VisibilityTimeout"])
        except Exception as exc:  # noqa: BLE001 - boto's errors share no base with the network's
            self._warn_once(
                f"the visibility timeout of {held.queue} cannot be read ({exc}); assuming "
                f"{_UNKNOWN_TIMEOUT:g} s. Allow sqs:GetQueueAttributes"
            )
            return _UNKNOWN_TIMEOUT

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
            code = _code(exc)
            self._report(code, batch[0][0].queue, exc)
            answered = code is not None
            return [Gone(held, code or "network", str(exc), final=False) for held, _ in batch], (
                answered
            )
        return [
            Gone(
                batch[int(entry["Id"])][0],
                str(entry.get("Code")),
                str(entry.get("Message", "")),
                final=entry.get("Code") in _GONE,
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
                logger.info("could not defer a message of %s: %s", held.queue, exc)
        message.channel.qos.ack(message.delivery_tag)

    def _client_of(self, channel: Any, name: str | None) -> Any:
        """A copy of kombu's client with short time-outs, made once a client."""
        queue = channel.canonical_queue_name(name) if name else None
        original = channel.sqs(queue=queue if channel.predefined_queues else None)
        with self._lock:
            known = self._clients.get(id(original))
            if known is None:
                known = self._clients[id(original)] = (original, self._copy(original))
        return known[1]

    def _copy(self, original: Any) -> Any:
        from botocore.client import Config  # noqa: PLC0415 - boto3 is loaded when SQS is used
        from botocore.session import get_session  # noqa: PLC0415

        session = get_session()
        session._credentials = original._request_signer._credentials  # noqa: SLF001
        config = original.meta.config.merge(
            Config(
                connect_timeout=min(2.0, self._timeout),
                read_timeout=self._timeout,
                retries={"total_max_attempts": 1},
            )
        )
        return session.create_client(
            "sqs",
            region_name=original.meta.region_name,
            endpoint_url=original.meta.endpoint_url,
            config=config,
        )

    def _report(self, code: str | None, queue: str, exc: Exception) -> None:
        if code in _DENIED:
            logger.error(
                "messages of %s cannot be kept hidden: %s. Allow sqs:ChangeMessageVisibility; "
                "until then duplicates come back after the queue's own timeout",
                queue,
                exc,
            )
        else:
            logger.warning("could not keep messages of %s hidden: %s", queue, exc)

    def _warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            logger.warning("%s", text)


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


def _code(exc: Exception) -> str | None:
    response = getattr(exc, "response", None)
    return response.get("Error", {}).get("Code") if isinstance(response, dict) else None
