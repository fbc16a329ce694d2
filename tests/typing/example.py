"""How users write leased tasks, for type checkers: nothing here is run."""
# pyright: strict

from __future__ import annotations

from datetime import timedelta
from typing import Any, assert_type

from celery import Celery

from celery_lease import Lease, LeasedTask, LeasePolicy, Runs, current_lease
from celery_lease.runs import RunInfo

app = Celery("shop", broker="sqs://")


# A function with ``bind=True``: its first argument is the task.
@app.task(base=LeasedTask, bind=True, lease_policy=LeasePolicy.long(max_attempts=3))
def import_file(self: LeasedTask, path: str) -> int:
    assert_type(self.lease, Lease)
    offset: int = self.lease.restore(0)
    self.lease.checkpoint(offset + 1, progress=0.5, note=path)
    if self.lease.should_yield:
        return offset
    return self.lease.stage("count", count, path, start=offset)


def count(path: str, *, start: int) -> int:
    lease = current_lease()
    lease.check()
    assert_type(lease.epoch, int)
    assert_type(lease.run_id, str)
    assert_type(lease.headers, dict[str, str])
    return len(path) + start


# A class, registered by hand.
class Export(LeasedTask):
    name = "shop.export"
    lease_policy = LeasePolicy.steps(duration=timedelta(minutes=2), heartbeat=timedelta(seconds=20))

    def run(self, customer: int, *, upper: bool = False) -> str:
        assert_type(self.lease, Lease)
        text = self.lease.stage("render", render, customer)
        assert_type(text, str)
        return text.upper() if upper else text


def render(customer: int) -> str:
    return f"customer {customer}"


export = app.register_task(Export())


# A base class of one's own.
class Reported(LeasedTask):
    abstract = True
    autoretry_for = (ConnectionError,)

    def on_failure(self, exc: Exception, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
        print(self.name, task_id, exc)


@app.task(base=Reported, bind=True)
def send(self: Reported, address: str) -> str:
    self.lease.fence(object())
    return address


def stop(run_id: str) -> RunInfo:
    runs = Runs(app)
    assert_type(runs.revoke(run_id, "not wanted"), bool)
    assert_type(runs.list(state="running"), list[RunInfo])
    return runs.get(run_id)
