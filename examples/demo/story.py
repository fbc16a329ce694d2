"""What happens in the demo, act by act: each step is waited for, and fails if it does not come."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from celery.result import AsyncResult

from examples.demo import orders
from examples.demo.app import import_orders
from examples.demo.processes import DemoFailed, Processes, Worker
from examples.demo.view import View
from examples.demo.watch import Snapshot, Watch

__all__ = ["Story"]

_KILL_AT = 0.3
_PAUSE_AT = 0.6
_PICTURE_AT = 0.8
#: For a worker to start, a lease to be handed over, a third of the file to be imported.
_SECONDS = 30.0


class Story:
    """Queue the import, kill its holder, pause the next one, wake it up, wait for the end."""

    def __init__(self, processes: Processes, watch: Watch, view: View) -> None:
        #: A moment near the end, for the picture.
        self.picture: Snapshot | None = None
        self._processes = processes
        self._watch = watch
        self._view = view

    def play(self, file: Path) -> AsyncResult:
        """All of it; returns the result of the finished task."""
        self._start_workers()
        result = import_orders.delay(str(file))
        self._watch.run_id = result.id
        self._watch.note(f"queued: import_orders.delay({file.name!r})")
        self._kill_the_holder()
        self._pause_the_holder(result)
        self.picture = self._until(lambda now: now.progress >= _PICTURE_AT, "the third holder")
        self._until(lambda now: now.state == "succeeded", "the end of the import")
        self._watch.note("the import has succeeded")
        self._view.show(self._watch.look())
        return result

    def _start_workers(self) -> None:
        self._watch.note("starting two Celery workers on a local SQS server")
        for _ in range(2):
            self._processes.start_worker()
        self._until(lambda now: all(w[1] == "running" for w in now.workers), "the two workers")

    def _kill_the_holder(self) -> None:
        now = self._until_held(_KILL_AT, "the first part of the import")
        victim = self._processes.workers[now.holder]
        self._processes.kill(victim)
        self._note_act("SIGKILL", victim, now.epoch, f"which holds epoch {now.epoch}")
        spare = self._processes.start_worker()
        self._watch.note(f"started {spare.name}, as a supervisor would")
        self._until_taken_over(now.epoch)

    def _pause_the_holder(self, result: AsyncResult) -> None:
        now = self._until_held(_PAUSE_AT, "the second part of the import")
        paused = self._processes.workers[now.holder]
        body = result.info["pid"]  # its pool process, as Celery's STARTED tells
        with nobody_writes():
            self._processes.pause(paused)
            time.sleep(0.2)
        self._note_act("SIGSTOP", paused, now.epoch, f"which holds epoch {now.epoch}")
        now = self._until_taken_over(now.epoch)
        then = now.imported
        self._until(lambda now: now.imported > then, "progress of the next holder")
        # Its body wakes up first, before the heartbeat beside it can say that the lease is
        # lost: the worst case, a holder that writes and cannot know.
        self._note_act(
            "SIGCONT", paused, now.epoch - 1, f"which believes it holds epoch {now.epoch - 1}"
        )
        os.kill(body, signal.SIGCONT)
        self._until(lambda now: now.refused, "the refusal of the stale write")
        self._processes.resume(paused)
        self._watch.note(f"the stale write of {paused.name} was refused")

    def _note_act(self, act: str, worker: Worker, epoch: int, which: str) -> None:
        text = f"{act} to {worker.name} (pid {worker.pid}), {which}"
        self._watch.note(text, epoch=epoch, act=act, worker=worker.name)

    def _until_held(self, progress: float, what: str) -> Snapshot:
        return self._until(lambda now: now.progress >= progress and bool(now.holder), what)

    def _until_taken_over(self, epoch: int) -> Snapshot:
        now = self._until(
            lambda now: now.epoch > epoch and bool(now.holder), f"the hand-over of epoch {epoch}"
        )
        self._watch.note(
            f"{now.holder} claimed epoch {now.epoch} and goes on after line {now.imported:,}"
        )
        return now

    def _until(self, condition: Callable[[Snapshot], bool], what: str) -> Snapshot:
        deadline = time.monotonic() + _SECONDS
        while True:
            self._processes.check()
            now = self._watch.look()
            self._view.show(now)
            if condition(now):
                return now
            if time.monotonic() > deadline:
                raise DemoFailed(
                    f"waited {_SECONDS:g} s for {what}; the run is {now.state}, epoch {now.epoch}"
                )
            time.sleep(0.1)


@contextmanager
def nobody_writes() -> Iterator[None]:
    """SQLite has one writer: who is stopped in the middle of a write stops everybody.

    PostgreSQL would end the transaction of a holder that hangs (see ``lease_statement_timeout``).
    """
    autocommit = orders.engine().execution_options(isolation_level="AUTOCOMMIT")
    with autocommit.connect() as connection:
        connection.exec_driver_sql("BEGIN IMMEDIATE")
        yield
        connection.exec_driver_sql("ROLLBACK")
