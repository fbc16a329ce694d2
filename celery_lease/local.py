"""A leased task outside a worker: called directly, in a unit test, or eagerly.

A direct call touches no store: checkpoints and stages live in memory for that one call. An
eager call (``apply``, ``task_always_eager``) claims in the store like any other, and renews
its lease from a thread of its own, since there is no worker around it to do so. It needs no
broker: it is never handed off, and whoever called it is the one who is told.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from celery_lease.board import Board
from celery_lease.heartbeat import Heartbeat
from celery_lease.keeper import Keeper, Kept
from celery_lease.loop import Loop
from celery_lease.successors import replacement_name

if TYPE_CHECKING:
    from celery_lease.codec import Codec
    from celery_lease.policy import Terms
    from celery_lease.store import Grant, Store

__all__ = [
    "EagerRun",
    "MemoryBacking",
    "current_eager_run",
    "eager_run",
    "local_heartbeat",
    "replacing",
    "run_replaced",
]


class MemoryBacking:
    """A lease that nobody can take away: for direct calls and unit tests."""

    epoch = 1
    attempt = 1

    def __init__(self, run_id: str | None, codec: Callable[[], Codec]) -> None:
        self.run_id = run_id or str(uuid.uuid4())
        self.holder = f"direct/{uuid.uuid4().hex}"
        self._codec = codec
        self._checkpoint: bytes | None = None
        self._stages: dict[str, bytes] = {}

    def restore(self) -> tuple[bool, Any]:
        """The checkpoint of this call, if one was saved."""
        if self._checkpoint is None:
            return False, None
        return True, self._codec().decode(self._checkpoint)

    def checkpoint(
        self,
        value: Any,
        within: Any,  # noqa: ARG002 - the caller's transaction needs nothing from us
        progress: float | None,  # noqa: ARG002 - nobody watches a direct call
        note: str | None,  # noqa: ARG002 - as above
    ) -> None:
        """Keep the value, encoded as it would be stored."""
        self._checkpoint = self._codec().encode(value, what=f"the checkpoint of {self.run_id}")

    def load_stage(self, name: str) -> tuple[bool, Any]:
        """A stage of this call."""
        blob = self._stages.get(name)
        return (False, None) if blob is None else (True, self._codec().decode(blob))

    def save_stage(
        self,
        name: str,
        value: Any,
        seconds: float,  # noqa: ARG002 - nobody watches a direct call
    ) -> Any:
        """Keep the result; it comes back in its decoded form, as in a worker."""
        blob = self._codec().encode(value, what=f"the result of stage {name!r}")
        self._stages[name] = blob
        return self._codec().decode(blob)

    def fence(self, session: Any) -> None:
        """Nobody else can hold this run."""

    def check(self) -> None:
        """Nobody else can hold this run."""

    def remaining(self) -> float:
        """For ever."""
        return float("inf")

    def should_yield(self) -> bool:
        """Never."""
        return False


@dataclass(slots=True)
class EagerRun:
    """What became of one call of ``apply``."""

    run_id: str = ""
    holder: str = ""
    #: Celery's state for the run's outcome; None as long as it has none.
    outcome: str | None = None


_EAGER: ContextVar[EagerRun | None] = ContextVar("celery_lease_eager", default=None)


@contextlib.contextmanager
def eager_run(run: EagerRun) -> Iterator[None]:
    """The eager execution in the block writes down in ``run`` what it does."""
    token = _EAGER.set(run)
    try:
        yield
    finally:
        _EAGER.reset(token)


def current_eager_run() -> EagerRun:
    """Where the eager execution here writes; what nobody asked for is thrown away."""
    return _EAGER.get() or EagerRun()


@dataclass(slots=True)
class _Replaced:
    task_id: str
    run_id: str
    replacements: int = 0


_REPLACED: ContextVar[_Replaced | None] = ContextVar("celery_lease_replaced", default=None)


@contextlib.contextmanager
def replacing(task_id: str, run_id: str) -> Iterator[None]:
    """Eager executions of ``task_id`` in the block replace the run, which still goes on."""
    token = _REPLACED.set(_Replaced(task_id, run_id))
    try:
        yield
    finally:
        _REPLACED.reset(token)


def run_replaced(task_id: str) -> str | None:
    """The name of the run that an eager execution of ``task_id`` is, if it is a replacement.

    In a chain Celery gives the id to each step: each is a run of its own.
    """
    replaced = _REPLACED.get()
    if replaced is None or replaced.task_id != task_id:
        return None
    replaced.replacements += 1
    return replacement_name(replaced.run_id, replaced.replacements)


@contextlib.contextmanager
def local_heartbeat(store: Store, grant: Grant, task: str, terms: Terms) -> Iterator[None]:
    """Renew ``grant`` from a thread while the block runs."""
    keeper = Keeper(Board(slots=1))
    keeper.add(
        Kept(
            run_id=grant.run_id,
            holder=grant.holder,
            task=task,
            terms=terms,
            held=None,
            slot=None,
            extend_at=float("inf"),
            pid=os.getpid(),
        )
    )
    heartbeat = Heartbeat(store, keeper, None, interval=terms.heartbeat, now=time.monotonic)
    loop = Loop("lease-local-heartbeat", heartbeat.run_once)
    loop.start()
    try:
        yield
    finally:
        loop.stop()
