"""Celery's retry under a lease: a postponement, not a second message.

``Task.retry`` builds the next message and sends it at once. Sent by a holder that has lost
its run, it would start the run again; so the message is caught, becomes the run's new
envelope under the epoch, and its trigger is sent after the commit.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from celery_lease.moments import seconds_until
from celery_lease.trigger import (
    BROKER_DELAYS_THERE,
    EPOCH_HEADER,
    RUN_HEADER,
    Envelope,
    message_headers,
)

if TYPE_CHECKING:
    from celery.exceptions import Retry

    from celery_lease.execution import Execution

__all__ = ["Catcher", "captured_retry", "caught_by", "postpone"]


#: Where RabbitMQ's own delay ends: it takes the same routing key to the task's queue at once.
_DELAYED_LONG_ENOUGH = "celery_delayed_delivery"


@dataclass(slots=True)
class Catcher:
    """Looks like a kombu producer to Celery; keeps what would have been published."""

    envelope: Envelope | None = None
    delay: float = 0.0
    #: Set by ``retry`` until it sends: only its own message is caught.
    listening: bool = False
    #: What ``replace`` put in the run's place.
    replacement: bytes | None = None
    #: What was added to the run's chord, and how often.
    added: Counter[str] = field(default_factory=Counter)

    @property
    def connection(self) -> Catcher:
        """Celery asks the producer for its connection."""
        return self

    @contextlib.contextmanager
    def _reraise_as_library_errors(self) -> Iterator[None]:
        yield

    def publish(self, body: Any, **publishing: Any) -> None:
        """Keep a task's message as an envelope and its ETA as a delay; events go nowhere."""
        envelope = Envelope.of_publishing(body, publishing)
        if envelope is not None:
            if envelope.exchange.startswith(BROKER_DELAYS_THERE):
                # The store waits; after that the broker must not wait once more.
                envelope = replace(envelope, exchange=_DELAYED_LONG_ENOUGH)
            self.envelope = envelope
            self.delay = max(0.0, seconds_until(message_headers(body, publishing).get("eta")) or 0)


_CATCHER: ContextVar[Catcher | None] = ContextVar("celery_lease_retry", default=None)


@contextlib.contextmanager
def captured_retry() -> Iterator[Catcher]:
    """What ``retry`` sends in the block is caught."""
    catcher = Catcher()
    token = _CATCHER.set(catcher)
    try:
        yield catcher
    finally:
        _CATCHER.reset(token)


def caught_by() -> Catcher | None:
    """The catcher of the leased execution around this call, if there is one."""
    return _CATCHER.get()


def postpone(task: Any, execution: Execution, catcher: Catcher, retry: Retry) -> None:
    """Commit the caught retry, or one that the body raised by itself.

    An eager one has no message: Celery goes on with its signature, under the next epoch.
    """
    if catcher.envelope is not None:
        execution.postpone(catcher.envelope.dump(), catcher.delay, "retry")
    elif retry.is_eager and retry.sig is not None:
        options = retry.sig.options
        options["headers"] = {
            **(options.get("headers") or {}),
            EPOCH_HEADER: execution.epoch,
            RUN_HEADER: execution.run_id,
        }
        execution.release("retry")
    elif not task.request.is_eager:
        catcher.delay = _asked_delay(retry, task.default_retry_delay or 0)
        execution.postpone(None, catcher.delay, "retry")


def _asked_delay(retry: Retry, default: float) -> float:
    when = default if retry.when is None else retry.when
    return float(when) if isinstance(when, int | float) else max(0.0, seconds_until(when) or 0)
