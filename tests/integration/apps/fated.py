"""Tasks that say what becomes of their message after a failure."""

from __future__ import annotations

from typing import Any

from celery_lease import LeasedTask, LeasePolicy
from celery_lease.fates import LEAVE, DeleteMessage, LeaveMessage, TryAgain, again
from tests.integration.apps.shop import app, entered


class Unreachable(Exception):
    """The other side is away."""


class Unreadable(Exception):
    """The input is broken."""


class Slow(Exception):
    """Brings its own fate."""

    lease_fate = again(0.2)


ERRORS = {
    "unreachable": Unreachable,
    "unreadable": Unreadable,
    "slow": Slow,
    "plain": ValueError,
    "leave": LeaveMessage,
    "delete": DeleteMessage,
}


@app.task(
    base=LeasedTask,
    bind=True,
    name="shop.fated",
    lease_policy=LeasePolicy(max_attempts=3),
    lease_fates={Unreachable: again(0.2), Unreadable: LEAVE, LeaveMessage: again(60)},
)
def fated(self: Any, kind: str, failures: int = 99) -> Any:
    """Fail so many times in one way, then return."""
    entered(self, retries=self.request.retries)
    if self.lease.epoch > failures:
        return [self.lease.epoch, self.lease.restore(None)]
    if kind == "try again":
        self.lease.checkpoint(self.lease.epoch)
        raise TryAgain(0.2, "not yet")
    raise ERRORS[kind](kind)
