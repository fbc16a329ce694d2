"""The tasks of a deployment that has the library, or has not: its code is the same.

It takes the environment of ``shop``. Where ``celery_lease`` cannot be imported its tasks are
plain ones, as they were before the library came.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

from celery import Celery

from tests.integration.apps.side import SETTINGS, note

try:
    from celery_lease import LeasedTask
except ImportError:
    leased: dict[str, Any] = {}
else:
    leased = {"base": LeasedTask}

app = Celery("tally", broker=os.environ["SHOP_BROKER"], backend=os.environ["SHOP_RESULTS"])
app.conf.update(SETTINGS)
app.conf.update(json.loads(os.environ.get("SHOP_SETTINGS", "{}")))


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
