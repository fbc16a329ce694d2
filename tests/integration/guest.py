"""A worker in this process: one delivery after the other, driven by the test.

Messages go through kombu's in-memory broker, requests are made by Celery's own strategy
classes and executed by its solo pool; only the loops of the worker do not run. What the
broker would be told about a message is written down in ``Guest.fates``.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from celery import Celery
from celery.concurrency.solo import TaskPool
from celery.worker import state as worker_state
from celery.worker.request import create_request_cls
from celery.worker.strategy import hybrid_to_proto2, proto1_to_proto2

from celery_lease import LeasedTask
from celery_lease.application import Leasing
from celery_lease.request import LeasedRequest
from celery_lease.store import Grant, Store
from celery_lease.testing.clock import advance_database_clock
from celery_lease.visibility import Gone, Held
from celery_lease.visibility.facts import QueueFacts
from celery_lease.worker import WorkerSide

__all__ = ["Guest", "app_of"]


def app_of(
    folder: Path, *, task_cls: Any = None, backend: str = "cache+memory://", **settings: Any
) -> Celery:
    """An app on a memory broker, with its store in ``folder``; results stay in memory."""
    app = Celery(
        f"guest-{uuid.uuid4().hex}",
        broker="memory://",
        backend=backend,
        set_as_current=False,
        task_cls=task_cls,
    )
    app.conf.update(
        lease_store_url=f"sqlite:///{folder / 'leases.sqlite3'}",
        task_default_queue=f"queue-{uuid.uuid4().hex}",
        broker_connection_retry_on_startup=True,
    )
    app.conf.update(settings)
    return app


class Hidden:
    """A broker that can hide messages and says yes to everything."""

    def __init__(self) -> None:
        self.extended: list[str] = []
        self.deferred: list[tuple[str, float]] = []
        #: Whether the queue has a dead-letter policy; None: unknown.
        self.dead_letters: bool | None = True

    def introduce(self, channel: Any, queues: Sequence[str]) -> None:
        """Nothing to say."""

    def hold(self, message: Any) -> Held:
        """Every message can be hidden."""
        return Held(str(message.delivery_tag), "queue", time.monotonic(), 1, None)

    def timeout_of(self, held: Held) -> float:
        """As SQS has it."""
        return 30.0

    def facts_of(self, held: Held) -> QueueFacts:
        """As SQS has them by default."""
        return QueueFacts(dead_letters=self.dead_letters)

    def extend(self, messages: Sequence[tuple[Held, float]]) -> list[Gone]:
        """Kept."""
        self.extended += [held.handle for held, _ in messages]
        return []

    def defer(self, message: Any, held: Held, delay: float) -> None:
        """Written down."""
        self.deferred.append((held.handle, delay))


class Guest:
    """An app, its store, and the main process of a worker that has not started its loops."""

    def __init__(self, app: Celery) -> None:
        self.app = app
        app.set_current()  # as a worker does
        app.finalize()
        self.leasing = Leasing.of(app)
        self.pool = TaskPool(app=app)
        worker = SimpleNamespace(
            app=app, hostname="w@test", pool_cls=TaskPool, hub=None, consumer=None
        )
        self.side = WorkerSide(self.leasing, worker)
        self.hidden = Hidden()
        self.side.visibility = self.side.heartbeat.visibility = self.hidden
        self.leasing.worker = self.side
        self.leasing.board = self.side.board
        self.fates: list[str] = []

    @property
    def store(self) -> Store:
        """The app's lease store."""
        return self.leasing.store

    def message(self, queue: str | None = None) -> Any:
        """The next message of the queue, or None."""
        channel = self.app.connection_for_read().channel()
        name = queue or self.app.conf.task_default_queue
        with contextlib.suppress(Exception):
            return channel.basic_get(name)
        return None

    def request(self, message: Any) -> LeasedRequest:
        """What Celery's strategy makes of a message."""
        payload = message.payload
        name = message.headers.get("task") or payload["task"]
        task = self.app.tasks[name]
        if isinstance(payload, dict) and "args" in payload:
            convert = hybrid_to_proto2 if message.headers.get("id") else proto1_to_proto2
            body, headers, decoded, utc = convert(message, payload)
        else:
            body, headers, decoded, utc = message.body, message.headers, False, True
        kind = create_request_cls(LeasedRequest, task, self.pool, "w@test", None, app=self.app)
        request: LeasedRequest = kind(
            message,
            on_ack=lambda *_: self.fates.append("ack"),
            on_reject=lambda _log, _errors, requeue: self.fates.append(f"reject {requeue}"),
            app=self.app,
            hostname="w@test",
            task=task,
            body=body,
            headers=headers,
            decoded=decoded,
            utc=utc,
        )
        worker_state.task_reserved(request)
        return request

    def claimed(self, message: Any = None) -> LeasedRequest:
        """The request of a delivery whose child has claimed its run, and lives no more."""
        request = self.request(message or self.message())
        granted = self.store.claim(
            request.id,
            0,
            request._holder,
            task=request.name,
            terms=request._terms,
            envelope=request._parent.envelope(),
        )
        assert isinstance(granted, Grant)
        return request

    def deliver(self, message: Any = None) -> LeasedRequest:
        """Take the next message and execute it, as the solo pool does; then settle."""
        message = message or self.message()
        assert message is not None, "there is no message"
        request = self.request(message)
        request.execute_using_pool(self.pool)
        self.side.heartbeat._settle()
        return request

    def reap(self) -> Any:
        """One pass of the reaper: triggers go to the memory broker."""
        return self.side.reaper.run_once()

    def age(self, seconds: float) -> None:
        """The database's clock moves on."""
        advance_database_clock(self.store, seconds)

    def kinds(self, run_id: str) -> list[str]:
        """The kinds of the run's events."""
        return [one["kind"] for one in self.store.events(run_id)]

    def row(self, run_id: str) -> dict[str, Any]:
        """The run's row, empty without one."""
        return self.store.run(run_id) or {}


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Callable[..., Any]) -> Iterator[None]:
    """``owner.name`` is ``value`` in the block."""
    known = owner.__dict__.get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if known is None:
            delattr(owner, name)
        else:
            setattr(owner, name, known)


def leased(app: Celery, **options: Any) -> Callable[[Any], Any]:
    """``app.task`` for a leased task."""
    return app.task(base=LeasedTask, shared=False, **options)
