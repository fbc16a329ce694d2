"""All that an application writes: a Celery app and one leased task.

The task is an import in three stages: check the file, import its orders in batches, report.
Killed or paused anywhere, it goes on with the next batch in another worker.
"""

from __future__ import annotations

import time
from itertools import islice
from typing import Any

from celery import Celery
from sqlalchemy import func, insert, select
from sqlalchemy.orm import Session

from celery_lease import LeasedTask, LeasePolicy
from examples.demo import orders

#: Short leases, so that the demo does not keep you waiting; the defaults are 90 s and 30 s.
POLICY = LeasePolicy(duration=5, heartbeat=1)
BATCH = 50
STAGES = ("check", "import", "report")

app = Celery("demo")
app.config_from_object("examples.demo.celeryconfig")


@app.task(base=LeasedTask, bind=True, lease_policy=POLICY)
def import_orders(self: Any, path: str) -> dict[str, int]:
    """Import each order of the file once, whatever happens to the workers."""
    lines = self.lease.stage("check", count_lines, path)
    done = self.lease.restore(0)
    waiting = orders.read_file(path, start=done)
    while batch := list(islice(waiting, BATCH)):
        time.sleep(0.25)  # stands for what makes a real import slow
        done += len(batch)
        rows = [
            {"line": line, "customer": customer, "cents": cents, "epoch": self.lease.epoch}
            for line, customer, cents in batch
        ]
        with Session(orders.engine()) as session, session.begin():
            session.execute(insert(orders.imported), rows)
            # In the same transaction: the orders and the checkpoint, or neither; and neither
            # if the run has meanwhile been handed to somebody else.
            self.lease.checkpoint(done, within=session, progress=done / lines)
    report: dict[str, int] = self.lease.stage("report", totals)
    return report


def count_lines(path: str) -> int:
    """Every line can be read; a file that cannot is refused before anything is imported."""
    return sum(1 for _ in orders.read_file(path))


def totals() -> dict[str, int]:
    """What the caller gets as the result."""
    count, cents = func.count(), func.sum(orders.imported.c.cents)
    with Session(orders.engine()) as session:
        row = session.execute(select(count, cents)).one()
    return {"orders": row[0], "cents": row[1]}
