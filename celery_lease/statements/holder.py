"""What a holder writes: each under run, epoch and holder."""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    Boolean,
    Double,
    Integer,
    LargeBinary,
    String,
    Text,
    Update,
    case,
    func,
    insert,
    literal,
    null,
    or_,
    select,
    update,
)

from celery_lease.schema import event, lease, run, stage
from celery_lease.statements.clock import in_seconds, now
from celery_lease.statements.guards import held, its_lease, this_run
from celery_lease.statements.parameters import p
from celery_lease.states import LeaseStatus, RunState

__all__ = [
    "CHECK",
    "CHECKPOINT",
    "END_IN_ONE",
    "FENCE",
    "HAND_OFF",
    "LEASE_FLAGS",
    "OUTCOME",
    "PARK",
    "POSTPONE",
    "RELEASE",
    "STAGES",
    "STAGE_DONE",
    "STAGE_KNOWN",
    "STAGE_SAVE",
]

#: The value differs from the one that is stored: new progress.
_NEW_VALUE = or_(
    run.c.checkpoint.is_(None),
    run.c.checkpoint != p("checkpoint", LargeBinary),
)

CHECKPOINT = (
    update(run)
    .where(held())
    .values(
        checkpoint=p("checkpoint", LargeBinary),
        progress=p("progress", Double),
        note=p("note", Text),
        attempt=case((_NEW_VALUE, 0), else_=run.c.attempt),
    )
    .returning(run.c.run_id)
)

#: Locks the run's row in the caller's transaction: nobody else is granted it until the end.
FENCE = select(run.c.run_id).where(held()).with_for_update()
CHECK = select(run.c.run_id).where(held())

#: Read in the statement after the guard, never in the same one.
LEASE_FLAGS = select(lease.c.status, lease.c.yield_requested).where(
    lease.c.run_id == p("run_id"), lease.c.epoch == p("epoch")
)

STAGE_KNOWN = select(stage.c.name).where(stage.c.run_id == p("run_id"), stage.c.name == p("name"))
STAGES = select(stage.c.name, stage.c.result).where(stage.c.run_id == p("run_id"))

#: A stage that was saved is new progress.
STAGE_DONE = update(run).where(held()).values(attempt=0).returning(run.c.run_id)
STAGE_SAVE = insert(stage).values(
    run_id=p("run_id"),
    name=p("name"),
    epoch=p("epoch"),
    result=p("result", LargeBinary),
    saved_at=now(),
    seconds=p("seconds", Double),
)


def _leave(state: RunState, **values: Any) -> Update:
    return update(run).where(held()).values(state=state, **values)


#: Untriggered: whoever made the change sends the trigger first, the reaper if it dies.
HAND_OFF = _leave(
    RunState.READY, attempt=0, trigger_due=now(), triggers=0, reason=p("reason")
).returning(run.c.epoch)

#: Without an envelope the one that is there stays; a charged attempt is not forgotten.
POSTPONE = _leave(
    RunState.READY,
    attempt=case((p("charged", Boolean), run.c.attempt), else_=0),
    triggers=0,
    not_before=in_seconds("delay"),
    trigger_due=in_seconds("delay"),
    envelope=func.coalesce(p("envelope", LargeBinary), run.c.envelope),
    reason=p("reason"),
).returning(run.c.epoch)

PARK = _leave(RunState.PARKED, trigger_due=null(), reason=p("reason")).returning(run.c.epoch)

#: A run with nothing to deliver is settled by its commit.
_DELIVER = p("deliver_outcome", Boolean)
OUTCOME = (
    update(run)
    .where(held())
    .values(
        state=p("state"),
        outcome=p("outcome", LargeBinary),
        dead_letter=p("dead_letter", Boolean),
        reason=p("reason"),
        finished_at=now(),
        settle_by=case((_DELIVER, in_seconds("settle_in")), else_=null()),
        trigger_due=case((_DELIVER, in_seconds("settle_in")), else_=null()),
        settled_at=case((_DELIVER, null()), else_=now()),
        triggers=0,
    )
    .returning(run.c.run_id, run.c.epoch)
)

RELEASE = (
    update(lease)
    .where(its_lease())
    .values(status=LeaseStatus.RELEASED, ended_at=now(), reason=p("reason"))
    .returning(lease.c.run_id)
)


def _end_in_one() -> Any:
    """Outcome and release as one statement (PostgreSQL).

    Right under READ COMMITTED because the run row is updated first, and only a renewal can
    touch its live lease meanwhile. A run without one is left as it is.
    """
    alive = select(lease.c.run_id).where(its_lease()).exists()
    ended = OUTCOME.where(alive).cte("ended")
    before = lease.alias("before")
    # By its key, not through `ended` alone: the planner would scan the index of live leases.
    released = (
        update(lease)
        .where(its_lease(), lease.c.run_id == ended.c.run_id)
        .values(status=LeaseStatus.RELEASED, ended_at=now(), reason=p("reason"))
        .returning(lease.c.run_id)
        .cte("released")
    )
    recovered = insert(event).from_select(
        ["run_id", "epoch", "holder", "kind", "reason", "at"],
        select(
            before.c.run_id,
            before.c.epoch,
            before.c.holder,
            literal("recovered", String),
            literal("a commit of a suspect holder", String),
            now(),
        ).where(
            before.c.run_id == p("run_id"),
            before.c.epoch == p("epoch"),
            before.c.run_id == ended.c.run_id,
            before.c.status == LeaseStatus.SUSPECT,
        ),
    )
    return select(released.c.run_id).add_cte(recovered.cte("recovered"))


END_IN_ONE = _end_in_one()

#: What is known of a run and of one of its leases: how a refused write is explained.
STANDING = (
    select(
        run.c.state,
        run.c.epoch,
        run.c.outcome,
        run.c.task,
        lease.c.status,
        lease.c.holder,
        lease.c.reason,
    )
    .select_from(
        run.outerjoin(
            lease,
            (lease.c.run_id == run.c.run_id)
            & (lease.c.epoch == p("epoch", Integer))
            & (lease.c.holder == p("holder")),
        )
    )
    .where(this_run())
)
