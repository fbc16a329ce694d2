"""Claim: compare-and-swap on the epoch, and the grant that goes with it."""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    Boolean,
    Double,
    LargeBinary,
    Select,
    String,
    Text,
    false,
    insert,
    literal,
    null,
    select,
    union_all,
    update,
)
from sqlalchemy.dialects.postgresql import insert as upsert

from celery_lease.schema import lease, run
from celery_lease.statements.clock import in_seconds, now
from celery_lease.statements.guards import claimable
from celery_lease.statements.parameters import p
from celery_lease.states import LeaseStatus, RunState

__all__ = ["CLAIM_NEW_OR_NEXT", "CLAIM_NEXT", "GRANT", "INSERT_RUNNING", "TAKE"]

_GRANTED = (
    run.c.run_id,
    run.c.epoch,
    run.c.attempt,
    run.c.recoveries,
    run.c.checkpoint,
    run.c.progress,
)

_RUNNING: dict[str, Any] = {
    "state": RunState.RUNNING,
    "holder": p("holder"),
    "policy": p("policy"),
    "trigger_due": null(),
    "not_before": null(),
    "reason": null(),
}

#: What a first claim writes; a row that is there already makes it write nothing.
_NEW: dict[str, Any] = {
    "run_id": p("run_id"),
    "namespace": p("namespace"),
    "task": p("task"),
    "policy": p("policy"),
    "state": RunState.RUNNING,
    "epoch": 1,
    "attempt": 1,
    "holder": p("holder"),
    "envelope": p("envelope", LargeBinary),
    "deliver": p("deliver", Boolean),
    "created_at": now(),
}

_NEXT: dict[str, Any] = {
    **_RUNNING,
    "epoch": run.c.epoch + 1,
    "attempt": run.c.attempt + 1,
}

#: One step of the portable claim: take the ready run, or nothing.
TAKE = update(run).where(claimable()).values(**_NEXT).returning(*_GRANTED)

#: One step of the portable claim: the first claim of a run that has no row.
INSERT_RUNNING = insert(run).values(**_NEW)

#: The lease that goes with a claim.
GRANT = insert(lease).values(
    run_id=p("run_id"),
    epoch=p("epoch"),
    holder=p("holder"),
    node=p("node"),
    status=LeaseStatus.ACTIVE,
    duration=p("duration", Double),
    acquired_at=now(),
    heartbeat_at=now(),
    expires_at=in_seconds("duration"),
)


def _single(*, with_new: bool) -> Select[Any]:
    """Claim as one statement (PostgreSQL): run and lease, or no row at all.

    A busy row is skipped, not waited for; the condition is checked again on the row as it
    is once the lock is held. ``ON CONFLICT DO NOTHING`` keeps a refused duplicate from
    writing anything.
    """
    target = select(run.c.run_id).where(claimable()).with_for_update(skip_locked=True).cte("target")
    taken = (
        update(run)
        .where(run.c.run_id == target.c.run_id)
        .values(**_NEXT)
        .returning(*_GRANTED)
        .cte("taken")
    )
    rows = select(taken)
    if with_new:
        fresh = (
            upsert(run).values(**_NEW).on_conflict_do_nothing().returning(*_GRANTED).cte("fresh")
        )
        granted = union_all(rows, select(fresh)).cte("granted")
    else:
        granted = rows.cte("granted")
    grant = insert(lease).from_select(
        [
            "run_id",
            "epoch",
            "holder",
            "node",
            "status",
            "duration",
            "acquired_at",
            "heartbeat_at",
            "expires_at",
            "yield_requested",
        ],
        select(
            granted.c.run_id,
            granted.c.epoch,
            p("holder", String),
            p("node", String),
            literal(str(LeaseStatus.ACTIVE), Text),
            p("duration", Double),
            now(),
            now(),
            in_seconds("duration"),
            false(),
        ),
    )
    return select(granted).add_cte(grant.cte("granted_lease"))


#: A claim that expects epoch 0: of a new run, or of one that was registered before.
CLAIM_NEW_OR_NEXT = _single(with_new=True)
#: A claim that expects an epoch above 0 never inserts a run.
CLAIM_NEXT = _single(with_new=False)
