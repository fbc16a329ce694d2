"""An app for tests with real workers; its environment alone configures it.

``SHOP_BROKER``, ``SHOP_STORE`` and ``SHOP_RESULTS`` are URLs, ``SHOP_SETTINGS`` is JSON over
the settings of ``side``, and ``SHOP_SIDE`` is explained there.
``SHOP_CRASH`` names a point at which this worker is killed; see ``crashes``.
"""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.request
from typing import Any

from celery import Celery
from kombu import Queue
from sqlalchemy import create_engine, text

from celery_lease import LeasedTask, LeasePolicy
from tests.integration.apps import crashes
from tests.integration.apps.side import SETTINGS, is_open, note, wait_for

STORE = os.environ["SHOP_STORE"]

app = Celery("shop", broker=os.environ["SHOP_BROKER"], backend=os.environ["SHOP_RESULTS"])
app.conf.update(SETTINGS, task_track_started=True)
settings = json.loads(os.environ.get("SHOP_SETTINGS", "{}"))
if settings.pop("queues_are_declared_elsewhere", False):
    settings["task_queues"] = [Queue("celery", no_declare=True)]
app.conf.update(settings)
crashes.arm(os.environ.get("SHOP_CRASH", ""))


def entered(task: Any, **fields: Any) -> None:
    """Note that a body was entered, by whom and under which epoch."""
    known = {"run": task.request.id, "node": task.request.hostname, "name": task.name}
    if isinstance(task, LeasedTask):
        known |= {"epoch": task.lease.epoch, "attempt": task.lease.attempt}
    note("body", **known, **fields)


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
