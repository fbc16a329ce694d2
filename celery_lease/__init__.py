"""Safe long work over at-least-once delivery for Celery.

The message is only a trigger; the database decides who may run what. A task becomes safe by
its base class::

    @app.task(base=LeasedTask, bind=True)
    def import_file(self, path):
        for offset, rows in batches(path, start=self.lease.restore(0)):
            save(rows)
            self.lease.checkpoint(offset)
"""

from __future__ import annotations

from celery_lease.errors import LeaseControl, LeaseError, LeaseLost
from celery_lease.lease import Lease, current_lease
from celery_lease.policy import LeasePolicy
from celery_lease.runs import Runs
from celery_lease.task import LeasedTask

__all__ = [
    "Lease",
    "LeaseControl",
    "LeaseError",
    "LeaseLost",
    "LeasePolicy",
    "LeasedTask",
    "Runs",
    "current_lease",
]

__version__ = "0.1.0"
