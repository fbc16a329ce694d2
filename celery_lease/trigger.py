"""Envelope in, message out.

The envelope is all that a trigger needs: serialized arguments with callbacks, errbacks,
chain and chord, the task's headers, and where the message goes. It is stored in the run, so
that whoever sends the next trigger needs neither the first message nor the task's code.
"""

from __future__ import annotations

import base64
import logging
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from kombu import serialization
from kombu.utils import json

from celery_lease.errors import NotSerializable
from celery_lease.store.forks import ForkGate

if TYPE_CHECKING:
    from celery import Celery

    from celery_lease.store import Outgoing, Store

__all__ = [
    "BROKER_DELAYS_THERE",
    "EPOCH_HEADER",
    "RUN_HEADER",
    "STORED_HEADER",
    "Envelope",
    "Sender",
    "message_headers",
]

logger = logging.getLogger(__name__)

EPOCH_HEADER = "lease_epoch"
RUN_HEADER = "lease_run"
STORED_HEADER = "lease_stored"
_PREFIX = "lease_"
#: RabbitMQ's own delay, which Celery uses with quorum queues, begins in such an exchange.
BROKER_DELAYS_THERE = "celery_delayed"

#: Headers that belong to one sending, not to the run.
_OF_ONE_SENDING = {"eta", "expires", "compression", "delivery_info", "lease_delivery"}
#: What a message of Celery's protocol 1 has beside its headers; the envelope's body has it.
_OF_THE_BODY = {"args", "kwargs", "callbacks", "errbacks", "chain", "chord", "properties"}
_PROPERTIES = ("correlation_id", "reply_to", "priority", "MessageGroupId")
_EMBEDDED = ("callbacks", "errbacks", "chain", "chord")


@dataclass(frozen=True, slots=True)
class Envelope:
    """A message that can be sent any number of times."""

    body: str
    binary: bool
    content_type: str
    content_encoding: str
    headers: Mapping[str, Any]
    exchange: str
    routing_key: str
    properties: Mapping[str, Any] = field(default_factory=dict)
    #: As the first message was compressed: its size may be near the broker's limit.
    compression: str | None = None

    @classmethod
    def pack(
        cls,
        *,
        args: Any,
        kwargs: Any,
        embed: Mapping[str, Any],
        content_type: str,
        headers: Mapping[str, Any],
        properties: Mapping[str, Any],
        exchange: str,
        routing_key: str,
        compression: str | None = None,
    ) -> Envelope:
        """The envelope of a delivery, serialized as its message was.

        Raises ``NotSerializable`` if arguments or callbacks cannot be encoded.
        """
        payload = (args, kwargs, {name: embed.get(name) for name in _EMBEDDED})
        try:
            content_type, encoding, body = serialization.dumps(
                payload, serializer=_serializer_of(content_type)
            )
        except Exception as exc:  # each serializer has errors of its own
            raise NotSerializable(f"the arguments of the run cannot be stored: {exc}") from exc
        binary = not isinstance(body, str)
        return cls(
            body=base64.b64encode(body).decode() if binary else body,
            binary=binary,
            content_type=content_type,
            content_encoding=encoding,
            headers={
                name: value
                for name, value in headers.items()
                if name not in _OF_ONE_SENDING | _OF_THE_BODY and not name.startswith(_PREFIX)
            },
            exchange=exchange,
            routing_key=routing_key,
            properties={
                name: properties[name] for name in _PROPERTIES if properties.get(name) is not None
            },
            compression=compression,
        )

    @classmethod
    def of_publishing(cls, body: Any, publishing: Mapping[str, Any]) -> Envelope | None:
        """The envelope of what Celery is about to give to ``Producer.publish``.

        None if it is not a task's message: Celery sends its events the same way.
        """
        headers = message_headers(body, publishing)
        if "task" not in headers:
            return None
        if isinstance(body, Mapping):
            body = body["args"], body["kwargs"], body
        args, kwargs, embed = body
        exchange = publishing.get("exchange")
        return cls.pack(
            args=args,
            kwargs=kwargs,
            embed=embed or {},
            content_type=publishing["serializer"],
            headers=headers,
            properties=publishing,
            exchange=str(getattr(exchange, "name", exchange) or ""),
            routing_key=publishing.get("routing_key") or "",
            compression=publishing.get("compression"),
        )

    def dump(self) -> bytes:
        """The form stored in the run."""
        return str(json.dumps(asdict(self))).encode()

    @classmethod
    def load(cls, blob: bytes) -> Envelope:
        """What ``dump`` wrote; keys of newer releases are ignored."""
        known = {one.name for one in fields(cls)}
        given = json.loads(bytes(blob).decode())
        return cls(**{name: value for name, value in given.items() if name in known})

    def unpack(self) -> tuple[list[Any], dict[str, Any], dict[str, Any]]:
        """(args, kwargs, embed) as the task's message had them."""
        body: str | bytes = base64.b64decode(self.body) if self.binary else self.body
        args, kwargs, embed = serialization.loads(
            body, self.content_type, self.content_encoding, accept={self.content_type}
        )
        return list(args), dict(kwargs), dict(embed or {})

    def message_for(self, run_id: str, epoch: int, sending: int) -> dict[str, Any]:
        """Keyword arguments for kombu's ``Producer.publish``."""
        headers = {**self.headers, EPOCH_HEADER: epoch}
        if headers.get("id") != run_id:
            headers[RUN_HEADER] = run_id
        properties = dict(self.properties)
        if self.routing_key.endswith(".fifo"):
            # Deduplication outlives receive and delete: each sending needs an id of its own.
            token = f"{run_id}:{epoch}:{sending}:{uuid.uuid4().hex}"
            properties["MessageDeduplicationId"] = sha256(token.encode()).hexdigest()
        return {
            "body": base64.b64decode(self.body) if self.binary else self.body,
            "content_type": self.content_type,
            "content_encoding": self.content_encoding,
            "headers": headers,
            "exchange": self.exchange,
            "routing_key": self.routing_key,
            "compression": self.compression,
            **properties,
        }


class Sender:
    """Sends due triggers: reserve, publish, mark as sent.

    If it dies after the reservation the trigger is due again 30 s later; if the broker
    swallows the message, ``retrigger_after`` later. Sending twice is harmless.
    """

    def __init__(self, app: Celery, store: Store) -> None:
        self._app = app
        self._store = store
        # Celery replaces a dead child by a fork just when the reaper sends the trigger of its
        # run. kombu takes locks of its classes meanwhile; a child that is made of a process
        # in which they are taken waits for them for ever, at the first message it sends.
        self._gate = ForkGate(self._fork)

    def _fork(self) -> None:
        """Nothing to close: Celery itself sees to its connections in a child."""

    def send(self, run_id: str, epoch: int) -> bool:
        """Send the trigger of ``run_id`` at ``epoch`` if it is due and not reserved.

        Raises what the broker's transport raises; the run stays in the outbox then.
        """
        outgoing = self._store.reserve(run_id, epoch)
        if outgoing is None:
            return False
        self._publish(outgoing)
        self._store.sent(outgoing)
        return True

    def _publish(self, outgoing: Outgoing) -> None:
        envelope = Envelope.load(outgoing.envelope)
        message = envelope.message_for(outgoing.run_id, outgoing.epoch, outgoing.triggers)
        with self._gate, self._app.producer_or_acquire() as producer:
            producer.publish(declare=self._declared(envelope), retry=False, **message)
        logger.info(
            "sent trigger run=%s epoch=%s task=%s sending=%s",
            outgoing.run_id,
            outgoing.epoch,
            outgoing.task,
            outgoing.triggers + 1,
        )

    def _declared(self, envelope: Envelope) -> list[Any]:
        """The queue that a message for the default exchange names, if the app knows it."""
        if envelope.exchange:
            return [
                queue
                for queue in self._app.amqp.queues.values()
                if queue.exchange.name == envelope.exchange
                and queue.routing_key == envelope.routing_key
            ]
        return [self._app.amqp.queues[envelope.routing_key]]


def message_headers(body: Any, publishing: Mapping[str, Any]) -> dict[str, Any]:
    """The task's headers; in Celery's message protocol 1 they stand in the body."""
    headers = publishing.get("headers") or {}
    return {**body, **headers} if isinstance(body, Mapping) else dict(headers)


def _serializer_of(content_type: str) -> str:
    name = serialization.registry.type_to_name.get(content_type)
    return str(name or content_type)
