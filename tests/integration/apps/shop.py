"""An app for tests with real workers; its environment alone configures it.

``SHOP_BROKER``, ``SHOP_STORE`` and ``SHOP_RESULTS`` are URLs, ``SHOP_SETTINGS`` is JSON over
the settings below, and ``SHOP_SIDE`` a folder beside broker and store, through which bodies
and test see each other: a body appends to ``notes.jsonl`` and waits for files, its gates.
``SHOP_CRASH`` names a point at which this worker is killed; see ``crashes``.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

from celery import Celery
from celery.signals import worker_ready
from celery.utils.nodenames import gethostname
from kombu import Queue
from sqlalchemy import create_engine, text

from celery_lease import LeasedTask, LeasePolicy
from tests.integration.apps import crashes

SIDE = Path(os.environ["SHOP_SIDE"])
STORE = os.environ["SHOP_STORE"]

app = Celery("shop", broker=os.environ["SHOP_BROKER"], backend=os.environ["SHOP_RESULTS"])
app.conf.update(
    lease_store_url=STORE,
    lease_duration=4,
    lease_heartbeat=1,
    lease_grace=3,
    lease_statement_timeout=2,
    lease_lock_timeout=1,
    lease_connect_timeout=2,
    lease_reap_interval=0.5,
    lease_settle_timeout=5,
    task_track_started=True,
    worker_prefetch_multiplier=1,
    broker_connection_retry_on_startup=True,
    broker_transport_options={"wait_time_seconds": 1, "polling_interval": 0.05},
)
settings = json.loads(os.environ.get("SHOP_SETTINGS", "{}"))
if settings.pop("queues_are_declared_elsewhere", False):
    settings["task_queues"] = [Queue("celery", no_declare=True)]
app.conf.update(settings)
crashes.arm(os.environ.get("SHOP_CRASH", ""))


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


def entered(task: Any, **fields: Any) -> None:
    """Note that a body was entered, by whom and under which epoch."""
    known = {"run": task.request.id, "node": task.request.hostname, "name": task.name}
    if isinstance(task, LeasedTask):
        known |= {"epoch": task.lease.epoch, "attempt": task.lease.attempt}
    note("body", **known, **fields)


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


# -- leased tasks ---------------------------------------------------------------------------


@app.task(base=LeasedTask, bind=True, name="shop.hold")
def hold(self: Any, gate: str, value: Any = None, ending: str = "return") -> Any:
    """Wait for ``gate``; the first holder ends as ``ending`` says, later ones return."""
    entered(self, gate=gate)
    epoch = self.lease.epoch
    wait_for(gate, epoch)
    note("passed", run=self.request.id, epoch=epoch)
    if epoch == 1:
        _end(self, ending)
    return [value, epoch]


def _end(task: Any, ending: str) -> None:
    if ending == "raise":
        raise ValueError("the first holder failed")
    if ending == "retry":
        raise task.retry(countdown=0)
    if ending == "checkpoint":
        task.lease.checkpoint("the first holder's")


@app.task(base=LeasedTask, bind=True, name="shop.hold_plainly")
def hold_plainly(self: Any, gate: str) -> str:
    """As ``hold``, but it looks at nothing that only a lease has."""
    note("body", run=self.request.id, node=self.request.hostname)
    wait_for(gate)
    return "done"


@app.task(base=LeasedTask, bind=True, name="shop.steps")
def steps(self: Any, gate: str, count: int) -> Any:
    """``count`` steps with a checkpoint after each; step N waits for the gate ``gate-N``."""
    start = self.lease.restore(0)
    entered(self, start=start)
    for step in range(start, count):
        note("step", run=self.request.id, step=step, epoch=self.lease.epoch)
        wait_for(f"{gate}-{step}")
        self.lease.checkpoint(step + 1, progress=(step + 1) / count)
    return [count, self.lease.epoch]


@app.task(
    base=LeasedTask,
    bind=True,
    name="shop.stages",
    lease_policy=LeasePolicy(stage_handoff="always"),
)
def stages(self: Any, gate: str, count: int) -> Any:
    """``count`` stages, each on a message of its own; stage N waits for ``gate-N``."""
    entered(self)

    def work(step: int) -> int:
        note("stage", run=self.request.id, step=step, epoch=self.lease.epoch)
        wait_for(f"{gate}-{step}")
        return step * step

    return [self.lease.stage(("part", step), work, step) for step in range(count)]


@app.task(base=LeasedTask, bind=True, name="shop.mailing")
def mailing(self: Any, recipients: int, gate: str) -> int:
    """A row for each recipient, committed together with the checkpoint; a gate near the end."""
    start = self.lease.restore(0)
    entered(self, start=start)
    engine = create_engine(STORE)
    for number in range(start, recipients):
        if number == recipients * 3 // 4:
            wait_for(gate)
        with engine.begin() as connection:
            connection.execute(
                text("INSERT INTO mail (run_id, recipient) VALUES (:run, :number)"),
                {"run": self.lease.run_id, "number": number},
            )
            self.lease.checkpoint(number + 1, within=connection)
    engine.dispose()
    return recipients


@app.task(base=LeasedTask, bind=True, name="shop.dies")
def dies(self: Any, how: str) -> None:
    """Kill this pool process, or the whole worker, at every attempt."""
    entered(self)
    if how == "worker":
        os.killpg(0, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


@app.task(base=LeasedTask, bind=True, name="shop.outside")
def outside(self: Any, url: str, gate: str) -> Any:
    """Ask somebody outside, wait, make sure of the lease, and ask again."""
    entered(self)
    _post(f"{url}/first", self.lease.headers)
    wait_for(gate, self.lease.epoch)
    note("passed", run=self.request.id, epoch=self.lease.epoch)
    self.lease.check()
    _post(f"{url}/second", self.lease.headers)
    return ["done", self.lease.epoch]


def _post(url: str, headers: dict[str, str]) -> None:
    urllib.request.urlopen(urllib.request.Request(url, b"", headers), timeout=10).close()


@app.task(base=LeasedTask, bind=True, name="shop.stubborn")
def stubborn(self: Any, gate: str) -> str:
    """Swallow every ordinary exception, and ask nothing of the lease."""
    entered(self)
    try:
        while not is_open(gate):
            try:
                time.sleep(0.1)
            except Exception as exc:  # noqa: BLE001 - on purpose
                note("swallowed", error=type(exc).__name__)
    except BaseException as exc:
        note("interrupted", run=self.request.id, error=type(exc).__name__, why=str(exc))
        raise
    return "done"


@app.task(base=LeasedTask, bind=True, name="shop.deaf")
def deaf(self: Any) -> None:
    """Block the signal of an interrupt and never end."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGURG})
    entered(self)
    while True:
        time.sleep(0.1)


@app.task(base=LeasedTask, bind=True, name="shop.unserializable")
def unserializable(self: Any) -> Any:
    """Return what no serializer takes."""
    entered(self)
    return object()


@app.task(base=LeasedTask, bind=True, name="shop.ignored", ignore_result=True)
def ignored(self: Any) -> str:
    """A result that nobody wants."""
    entered(self)
    return "nothing"


@app.task(base=LeasedTask, bind=True, name="shop.unlucky", max_retries=2)
def unlucky(self: Any, failures: int) -> str:
    """Fail so many times, each time asking Celery for another try."""
    entered(self, retries=self.request.retries)
    if self.request.retries < failures:
        raise self.retry(exc=ValueError("not yet"), countdown=0)
    return f"after {self.request.retries}"


# -- the same work, leased and plain ----------------------------------------------------------


@app.task(base=LeasedTask, bind=True, name="shop.leased_add")
def leased_add(self: Any, *numbers: int) -> int:
    """The sum, under a lease."""
    entered(self)
    return sum(numbers)


@app.task(bind=True, name="shop.plain_add")
def plain_add(self: Any, *numbers: int) -> int:
    """The sum, as Celery has it."""
    entered(self)
    return sum(numbers)


@app.task(base=LeasedTask, bind=True, name="shop.leased_fail")
def leased_fail(self: Any, *numbers: int) -> None:
    """An error, under a lease."""
    entered(self)
    raise ValueError(f"no sum of {list(numbers)}")


@app.task(bind=True, name="shop.plain_fail")
def plain_fail(self: Any, *numbers: int) -> None:
    """An error, as Celery has it."""
    entered(self)
    raise ValueError(f"no sum of {list(numbers)}")


@app.task(bind=True, name="shop.after")
def after(self: Any, *args: Any) -> Any:
    """A callback: note what it was given."""
    note("after", run=self.request.id, args=list(args), parent=self.request.parent_id)
    return args[0] if args else None


@app.task(bind=True, name="shop.mourn")
def mourn(self: Any, *args: Any) -> None:
    """An errback: note what it was given."""
    note("mourn", run=self.request.id, args=[str(arg) for arg in args])


@app.task(base=LeasedTask, bind=True, name="shop.replaced")
def replaced(self: Any, *numbers: int) -> Any:
    """End as another leased task, or as a chain of two."""
    entered(self)
    if len(numbers) == 2:
        return self.replace(leased_add.si(*numbers))
    return self.replace(leased_add.si(*numbers[:2]) | leased_add.s(*numbers[2:]))
