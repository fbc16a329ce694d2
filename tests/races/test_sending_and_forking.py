"""A process that forks while one of its threads sends a trigger makes a child that can send."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from celery import Celery

from celery_lease.policy import Terms
from celery_lease.store import Outgoing
from celery_lease.trigger import Envelope, Sender


class Broker(Celery):
    """An app whose producer takes a lock of its class, as kombu does, until it is let go."""

    taken = threading.Lock()

    def __init__(self) -> None:
        super().__init__("app", broker="memory://", set_as_current=False)
        self.inside = threading.Event()
        self.go_on = threading.Event()

    @contextmanager
    def producer_or_acquire(self, producer: Any = None) -> Iterator[Any]:
        with self.taken:
            self.inside.set()
            self.go_on.wait(10)
            yield SimpleNamespace(publish=lambda **_: None)


def test_a_child_inherits_no_lock_of_a_message_that_is_being_sent(terms: Terms) -> None:
    app = Broker()
    store: Any = None
    sender = Sender(app, store)
    envelope = Envelope.pack(
        args=[],
        kwargs={},
        embed={},
        content_type="json",
        headers={"id": "run", "task": "t"},
        properties={},
        exchange="",
        routing_key="celery",
    ).dump()
    outgoing = Outgoing("run", 1, envelope, 0, "t", terms)
    thread = threading.Thread(target=sender._publish, args=(outgoing,))
    thread.start()
    assert app.inside.wait(10)
    threading.Timer(0.2, app.go_on.set).start()
    pid = os.fork()
    if pid == 0:
        os._exit(1 if Broker.taken.locked() else 0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    thread.join(10)
