"""The tasks of a deployment that has the library, or has not: its code is the same.

It takes the environment of ``shop``. Where ``celery_lease`` cannot be imported its tasks are
plain ones, as they were before the library came.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from celery import Celery
from celery.signals import worker_ready

try:
    from celery_lease import LeasedTask
except ImportError:
    leased: dict[str, Any] = {}
else:
    leased = {"base": LeasedTask}

SIDE = Path(os.environ["SHOP_SIDE"])

app = Celery("tally", broker=os.environ["SHOP_BROKER"], backend=os.environ["SHOP_RESULTS"])
app.conf.update(
    lease_store_url=os.environ["SHOP_STORE"],
    lease_duration=4,
    lease_heartbeat=1,
    lease_grace=3,
    lease_statement_timeout=2,
    lease_lock_timeout=1,
    lease_reap_interval=0.5,
    lease_settle_timeout=5,
    worker_prefetch_multiplier=1,
    broker_connection_retry_on_startup=True,
    broker_transport_options={"wait_time_seconds": 1, "polling_interval": 0.05},
)
app.conf.update(json.loads(os.environ.get("SHOP_SETTINGS", "{}")))


def _end_with_the_test() -> None:
    os.read(0, 1)
    os.killpg(0, signal.SIGKILL)


if os.environ.get("SHOP_TIED"):
    threading.Thread(target=_end_with_the_test, daemon=True).start()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def note(what: str, **fields: Any) -> None:
    """Tell the test, in one write."""
    line = json.dumps({"what": what, "pid": os.getpid(), "at": time.time(), **fields})
    file = os.open(SIDE / "notes.jsonl", os.O_APPEND | os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        os.write(file, f"{line}\n".encode())
    finally:
        os.close(file)


@worker_ready.connect
def _ready(sender: Any, **_: Any) -> None:
    note("ready", node=sender.hostname)


@app.task(bind=True, name="tally.count", **leased)
def count(self: Any, number: int, steps: int) -> int:
    """A side effect a step; with a lease it goes on after the step that was done last."""
    lease = getattr(self, "lease", None)
    start = lease.restore(0) if lease else 0
    epoch = lease.epoch if lease else None
    note("begun", number=number, epoch=epoch, node=self.request.hostname)
    for step in range(start, steps):
        time.sleep(0.2)
        note("counted", number=number, step=step, node=self.request.hostname)
        if lease:
            lease.checkpoint(step + 1)
    return number
