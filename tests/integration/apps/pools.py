"""Tasks and receivers for tests of pools, limits and shutdown; imported beside ``shop``.

A worker gets them with the setting ``imports=[POOLS]``. Every signal of a lease is noted, in
the process that sent it.
"""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Any

from celery_lease import LeasedTask, current_lease, signals
from tests.integration.apps.shop import app, entered
from tests.integration.apps.side import SIDE, note, wait_for


def _note_signals() -> None:
    for name in ("lease_claimed", "lease_released", "lease_lost"):

        def receive(sender: str, *, _name: str = name, **fields: Any) -> None:
            run, epoch, reason = fields["run_id"], fields["epoch"], fields["reason"]
            note("signal", name=_name, run=run, epoch=epoch, reason=reason, task=sender)

        getattr(signals, name).connect(receive, weak=False)


_note_signals()


@app.task(base=LeasedTask, bind=True, name="pools.grip")
def grip(self: Any, gate: str, ending: str = "return") -> Any:
    """Hold the interpreter's lock in one C call until the test opens the pipe ``gate``."""
    entered(self)
    epoch = self.lease.epoch
    if epoch == 1:
        # Opening a named pipe waits for its other end; PyDLL does not let go of the lock.
        path = str(SIDE / gate).encode()
        os.close(ctypes.PyDLL(None).open(path, os.O_RDONLY))
        note("let go", run=self.request.id)
        if ending == "checkpoint":
            self.lease.checkpoint("the first holder's")
    return ["done", epoch]


@app.task(base=LeasedTask, bind=True, name="pools.leaves")
def leaves(self: Any, how: str) -> Any:
    """The first holder leaves by an exception that is no ``Exception``."""
    entered(self)
    if self.lease.epoch == 1:
        if how == "exit":
            sys.exit(3)
        raise KeyboardInterrupt
    return ["done", self.lease.epoch]


def _whose() -> str:
    """A helper that is not given the lease."""
    return current_lease().run_id


@app.task(base=LeasedTask, bind=True, name="pools.beside", max_retries=3)
def beside(self: Any, gate: str) -> Any:
    """Use everything of the lease while another body does so in the same process."""
    entered(self)
    seen = {_whose(), self.lease.run_id, self.request.id}
    done = self.lease.restore(0)
    for step in range(done, 5):
        wait_for(f"{gate}-{step}")
        self.lease.stage(("step", step), _whose)
        self.lease.checkpoint(step + 1)
        seen |= {_whose(), self.lease.run_id, self.request.id}
        if step == 2 and self.request.retries == 0:
            raise self.retry(countdown=0)
    return [sorted(seen), self.lease.epoch]


@app.task(base=LeasedTask, bind=True, name="pools.hangs")
def hangs(self: Any, gate: str) -> Any:
    """The first holder makes no progress and asks nothing of the lease."""
    entered(self)
    epoch = self.lease.epoch
    if epoch == 1:
        wait_for(gate)
    return ["done", epoch]


@app.task(base=LeasedTask, bind=True, name="pools.ends")
def ends(self: Any, how: str) -> Any:
    """The first holder raises, exits, or waits for its end or its gate; a later one returns."""
    entered(self)
    epoch = self.lease.epoch
    if epoch == 1:
        if how == "raise":
            raise ValueError("on purpose")
        if how == "exit":
            sys.exit(3)
        wait_for(how)
    return ["done", epoch, self.lease.attempt]


@app.task(base=LeasedTask, bind=True, name="pools.slow_retry")
def slow_retry(self: Any, gate: str) -> int:
    """Wait, ask for one more try, and return how many there were."""
    entered(self)
    wait_for(gate)
    if self.request.retries == 0:
        raise self.retry(countdown=0)
    return int(self.request.retries)


@app.task(base=LeasedTask, bind=True, name="pools.quick", rate_limit="2/s")
def quick(self: Any, value: int) -> int:
    """A body of no length, two of them a second."""
    entered(self, value=value)
    return value
