"""Everything one server knows, shared by its request threads."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from celery_lease.testing.sqs.calls import CallLog
from celery_lease.testing.sqs.clock import ServerClock
from celery_lease.testing.sqs.faults import Faults
from celery_lease.testing.sqs.rules import Mode, QueueState
from celery_lease.testing.sqs.sts import Sessions

if TYPE_CHECKING:
    from moto.sqs.models import Queue

ACCOUNT_ID: Final = "123456789012"
REGION: Final = "us-east-1"


@dataclass(slots=True, eq=False)
class Account:
    """The one account in one region, whatever credentials or region a client signs with.

    Everything is read and changed while `changed` is held. Whoever waits on it lets the others
    go on and is woken by each change: a send, a visibility, the clock, the end of the server.
    """

    initial_mode: Mode = "error"
    mode: Mode = field(init=False)
    changed: threading.Condition = field(default_factory=threading.Condition)
    clock: ServerClock = field(init=False)
    faults: Faults = field(default_factory=Faults)
    calls: CallLog = field(default_factory=CallLog)
    #: What STS has granted.
    sessions: Sessions = field(default_factory=Sessions)
    #: moto's queues: name, attributes, tags. Their own message lists stay empty.
    queues: dict[str, Queue] = field(default_factory=dict)
    #: The messages of each queue.
    states: dict[str, QueueState] = field(default_factory=dict)
    #: Sequence numbers of FIFO messages: they only grow.
    sequence: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    closing: bool = False

    def __post_init__(self) -> None:
        self.mode = self.initial_mode
        self.clock = ServerClock(on_advance=self.wake)

    def wake(self) -> None:
        """Let every waiting request look again."""
        with self.changed:
            self.changed.notify_all()

    def close(self) -> None:
        """Let every waiting request end."""
        with self.changed:
            self.closing = True
            self.changed.notify_all()

    def reset(self) -> None:
        """Forget queues, messages, faults, calls and the added time; the first mode is back."""
        with self.changed:
            self.mode = self.initial_mode
            self.queues.clear()
            self.states.clear()
            self.faults.clear()
            self.calls.clear()
            self.sessions.clear()
            self.clock.reset()
            self.changed.notify_all()
