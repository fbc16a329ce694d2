"""What bodies and the test that watches them see of each other, beside broker and store.

Needs no ``celery_lease``: an app without it has the same. ``SHOP_SIDE`` is a folder in which
bodies append to ``notes.jsonl`` and wait for files, their gates.
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

from celery.signals import worker_ready
from celery.utils.nodenames import gethostname

SIDE = Path(os.environ["SHOP_SIDE"])

#: How the apps talk to the strict SQS, and the short leases of tests.
SETTINGS = {
    "lease_store_url": os.environ["SHOP_STORE"],
    "lease_duration": 4,
    "lease_heartbeat": 1,
    "lease_grace": 3,
    "lease_statement_timeout": 2,
    "lease_lock_timeout": 1,
    "lease_connect_timeout": 2,
    "lease_reap_interval": 0.5,
    "lease_settle_timeout": 5,
    "worker_prefetch_multiplier": 1,
    "broker_connection_retry_on_startup": True,
    "broker_transport_options": {"wait_time_seconds": 1, "polling_interval": 0.05},
}


def _end_with_the_test() -> None:
    """A test that dies takes its workers with it: their standard input ends."""
    os.read(0, 1)  # not through sys.stdin, whose lock a fork would copy
    os.killpg(0, signal.SIGKILL)


def _end_with_the_parent() -> None:
    """Also while it is paused, where its threads do not run; Linux can promise that."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


if os.environ.get("SHOP_TIED"):
    threading.Thread(target=_end_with_the_test, daemon=True).start()
    _end_with_the_parent()


def note(what: str, **fields: Any) -> None:
    """Tell the test; one write to a file opened for appending, so that lines stay whole."""
    line = json.dumps({"what": what, "pid": os.getpid(), "at": time.time(), **fields})
    file = os.open(SIDE / "notes.jsonl", os.O_APPEND | os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        os.write(file, f"{line}\n".encode())
    finally:
        os.close(file)


def is_open(gate: str, epoch: int = 0) -> bool:
    """Whether the test has opened ``gate``, for everybody or for one epoch."""
    return (SIDE / gate).exists() or (SIDE / f"{gate}-{epoch}").exists()


def wait_for(gate: str, epoch: int = 0) -> None:
    """Wait until the test opens ``gate``; a signal may interrupt it."""
    while not is_open(gate, epoch):
        time.sleep(0.02)


@worker_ready.connect
def _ready(sender: Any, **_: Any) -> None:
    note("ready", node=gethostname() if sender is None else sender.hostname)
