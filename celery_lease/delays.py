"""Where a task waits that is due later: in the broker, if it can, else in the store.

Celery sends a message at once and lets a worker hold it until its time. Thousands of them
fill the worker's memory, none of them can be taken by an idle worker, and SQS gives them back
when their visibility ends. So the broker's own delay is used where there is one that is long
enough; else the run is registered in the store, due then, and its trigger is sent then.
"""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any

from celery.app.task import Context

from celery_lease.errors import LeaseError, NotSerializable
from celery_lease.moments import seconds_until
from celery_lease.trigger import BROKER_DELAYS_THERE, RUN_HEADER, Envelope, message_headers

if TYPE_CHECKING:
    from celery_lease.application import Leasing

__all__ = ["DelayingProducer"]

logger = logging.getLogger(__name__)

#: What SQS can hold back itself, on a standard queue; a FIFO queue delays no single message.
LONGEST_BROKER_DELAY = 900


class DelayingProducer:
    """A kombu producer for one leased task: what is due later waits where it costs nothing.

    Without the store the message is sent as Celery would; the worker that receives it
    registers the run then.
    """

    def __init__(self, leasing: Leasing, task: Any, producer: Any) -> None:
        self._leasing = leasing
        self._task = task
        self._producer = producer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._producer, name)

    def publish(self, body: Any, **publishing: Any) -> Any:
        """Publish now, with the broker's delay, or register the run for its time."""
        try:
            envelope = Envelope.of_publishing(body, publishing)
        except NotSerializable:
            envelope = None  # Celery says so itself
        delay = seconds_until(message_headers(body, publishing).get("eta")) or 0.0
        if envelope is None or delay <= 0 or envelope.exchange.startswith(BROKER_DELAYS_THERE):
            return self._producer.publish(body, **publishing)
        if self._broker_can(envelope, delay):
            publishing["DelaySeconds"] = math.ceil(delay)
            return self._producer.publish(body, **publishing)
        try:
            return self._register(envelope, delay, message_headers(body, publishing))
        except LeaseError as exc:
            logger.warning(
                "task %s is sent with its eta, since its run cannot be registered: %s",
                self._task.name,
                exc,
            )
            return self._producer.publish(body, **publishing)

    def _broker_can(self, envelope: Envelope, delay: float) -> bool:
        transport = self._producer.connection.transport.driver_type
        fifo = envelope.routing_key.endswith(".fifo")
        return transport == "sqs" and not fifo and delay <= LONGEST_BROKER_DELAY

    def _register(self, envelope: Envelope, delay: float, headers: Any) -> None:
        _, _, embed = envelope.unpack()
        asked = Context(ignore_result=headers.get("ignore_result"), **embed)
        # A body may send it: an interrupt would leave a connection within a statement.
        with self._leasing.interrupts.shield():
            self._leasing.store.enqueue(
                str(headers.get(RUN_HEADER) or headers["id"]),
                task=self._task.name,
                terms=self._leasing.terms(self._task.lease_policy),
                envelope=envelope.dump(),
                deliver=self._task.has_to_deliver(asked),
                delay=delay,
                expires_in=seconds_until(headers.get("expires")),
            )
