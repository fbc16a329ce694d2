"""Tasks for FIFO groups: they note when a body is entered and when it is left.

Loaded into workers of ``shop`` by Celery's own setting: ``imports=[groups.__name__]``.
"""

from __future__ import annotations

import time
from typing import Any

from celery_lease import LeasedTask, LeasePolicy
from tests.integration.apps.shop import app, entered
from tests.integration.apps.side import note, wait_for


@app.task(
    base=LeasedTask,
    bind=True,
    name="shop.in_group",
    lease_policy=LeasePolicy(stage_handoff="always"),
)
def in_group(self: Any, group: str, stages: int = 1, gate: str = "", retries: int = 0) -> str:
    """So many stages, each on a message of its own, then so many retries by a timer."""
    fields = {"run": self.request.id, "group": group, "holder": self.lease.holder}
    entered(self)
    note("enter", **fields)
    try:
        if gate:
            wait_for(gate, self.lease.epoch)
        for number in range(stages):
            self.lease.stage(("part", number), time.sleep, 0.1)
        if self.request.retries < retries:
            raise self.retry(countdown=0.5)
        return group
    finally:
        note("leave", **fields)
