"""Runs from outside the holder: registering, recovery, the outbox, settling, the operator."""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    Boolean,
    Double,
    Integer,
    LargeBinary,
    and_,
    case,
    delete,
    false,
    func,
    null,
    or_,
    select,
    update,
)
from sqlalchemy.dialects.postgresql import insert as upsert
from sqlalchemy.dialects.sqlite import insert as sqlite_upsert

from celery_lease.schema import lease, run, stage
from celery_lease.statements.clock import at_start, due, in_seconds, now
from celery_lease.statements.guards import live, not_overdue, this_run
from celery_lease.statements.parameters import p
from celery_lease.states import TERMINAL, RunState

__all__ = [
    "DROP_STAGES",
    "DUE",
    "ENQUEUE",
    "ENQUEUE_SQLITE",
    "ENVELOPE",
    "EXPIRE",
    "EXTEND_SETTLE",
    "FENCE",
    "HAND_OVER",
    "LOCK",
    "LOCK_SKIP",
    "NAMESPACE",
    "NEXT_DUE",
    "READ",
    "REPLAY",
    "RESERVE",
    "RESUME",
    "REVOKE",
    "SENT",
    "SETTLE",
    "UNFINISHED",
    "VIEW",
]

_TERMINAL = sorted(TERMINAL)

_REGISTERED: dict[str, Any] = {
    "run_id": p("run_id"),
    "namespace": p("namespace"),
    "task": p("task"),
    "policy": p("policy"),
    "state": p("state"),
    "epoch": 0,
    "attempt": p("attempt", Integer),
    "envelope": p("envelope", LargeBinary),
    "deliver": p("deliver", Boolean),
    "not_before": in_seconds("delay"),
    "trigger_due": case((p("due", Boolean), in_seconds("delay")), else_=null()),
    # A missing expiry is NULL plus now: NULL.
    "expires": in_seconds("expires_in"),
    "settled_at": case((p("settled", Boolean), now()), else_=null()),
    "finished_at": case((p("settled", Boolean), now()), else_=null()),
    "reason": p("reason"),
    "created_at": now(),
}

#: Registers a run under an unused id; otherwise nothing happens.
ENQUEUE = upsert(run).values(**_REGISTERED).on_conflict_do_nothing().returning(run.c.run_id)
ENQUEUE_SQLITE = (
    sqlite_upsert(run).values(**_REGISTERED).on_conflict_do_nothing().returning(run.c.run_id)
)

#: A run and its newest lease as one statement sees them, by the database's clock.
VIEW = (
    select(
        run.c.state,
        run.c.epoch,
        run.c.holder,
        run.c.attempt,
        run.c.policy,
        (run.c.trigger_due.is_not(None) & due(run.c.trigger_due)).label("untriggered"),
        (run.c.not_before - now()).label("due_in"),
        (~not_overdue()).label("overdue"),
        run.c.settled_at,
        (run.c.settle_by - now()).label("settle_in"),
        run.c.dead_letter,
        lease.c.status,
        (lease.c.expires_at - now()).label("lease_left"),
        (now() - lease.c.suspect_at).label("suspect_for"),
    )
    .select_from(
        run.outerjoin(lease, and_(lease.c.run_id == run.c.run_id, lease.c.epoch == run.c.epoch))
    )
    .where(this_run())
)

READ = select(run).where(this_run())
LOCK = READ.with_for_update()
#: The reaper and deliveries never wait for a busy run.
LOCK_SKIP = READ.with_for_update(skip_locked=True)

#: What the guard decided, on the row that ``LOCK`` holds and under the epoch it saw.
HAND_OVER = (
    update(run)
    .where(
        this_run(),
        run.c.epoch == p("epoch"),
        run.c.state == RunState.RUNNING,
    )
    .values(
        state=p("state"),
        recoveries=run.c.recoveries + 1,
        reason=p("reason"),
        triggers=0,
        checkpoint=case((p("restart", Boolean), null()), else_=run.c.checkpoint),
        not_before=in_seconds("delay"),
        trigger_due=case((p("due", Boolean), in_seconds("delay")), else_=null()),
        settle_by=case((p("ended", Boolean), now()), else_=null()),
        finished_at=case((p("ended", Boolean), now()), else_=null()),
    )
    .returning(run.c.run_id)
)
DROP_STAGES = delete(stage).where(stage.c.run_id == p("run_id"))

#: Sweep: the next unfinished runs, and whether each is held, or expired unclaimed.
#: The portion is cut first, so that the join never reads what lies outside of it.
_PORTION = (
    select(run.c.run_id, run.c.state, (~not_overdue()).label("overdue"))
    .where(
        run.c.finished_at.is_(None),
        run.c.namespace == p("namespace"),
        run.c.run_id > p("after"),
    )
    .order_by(run.c.run_id)
    .limit(p("most", Integer))
    .subquery("portion")
)
UNFINISHED = (
    select(_PORTION, lease.c.run_id.is_not(None).label("held"))
    .select_from(
        _PORTION.outerjoin(
            lease,
            and_(lease.c.run_id == _PORTION.c.run_id, lease.c.run_id > p("after"), live()),
        )
    )
    .order_by(_PORTION.c.run_id)
)

_REVOKED: dict[str, Any] = {
    "state": RunState.REVOKED,
    "reason": p("reason"),
    "finished_at": now(),
    "settle_by": now(),
    "triggers": 0,
    "trigger_due": case((run.c.envelope.is_not(None), now()), else_=null()),
}
EXPIRE = (
    update(run)
    .where(this_run(), run.c.state == RunState.READY, ~not_overdue())
    .values(**_REVOKED)
    .returning(run.c.run_id)
)
REVOKE = (
    update(run)
    .where(this_run(), run.c.finished_at.is_(None))
    .values(**_REVOKED)
    .returning(run.c.run_id, run.c.epoch)
)
RESUME = (
    update(run)
    .where(
        this_run(),
        run.c.state.in_([RunState.PARKED, RunState.FAILED, RunState.REVOKED]),
        run.c.envelope.is_not(None),
    )
    .values(
        state=RunState.READY,
        epoch=run.c.epoch + 1,
        # Whoever delivered the outcome before may not settle the next one.
        holder=null(),
        attempt=0,
        outcome=null(),
        dead_letter=false(),
        reason=p("reason"),
        settle_by=null(),
        settled_at=null(),
        finished_at=null(),
        replays=0,
        triggers=0,
        not_before=null(),
        trigger_due=now(),
    )
    .returning(run.c.epoch)
)

NAMESPACE = select(run.c.run_id).where(run.c.namespace == p("namespace"))
#: After a failover that lost commits: whatever epoch was given out is behind now.
FENCE = (
    update(run)
    .where(this_run())
    .values(
        epoch=run.c.epoch + p("raise_by", Integer),
        state=case((run.c.state == RunState.RUNNING, RunState.READY), else_=run.c.state),
        trigger_due=case(
            (run.c.state == RunState.RUNNING, now()),
            (run.c.state != RunState.READY, run.c.trigger_due),
            (run.c.not_before > now(), run.c.not_before),
            else_=now(),
        ),
        triggers=0,
    )
    .returning(run.c.epoch)
)

SETTLE = (
    update(run)
    .where(
        this_run(),
        run.c.holder == p("holder"),
        run.c.state.in_(_TERMINAL),
        run.c.settled_at.is_(None),
    )
    .values(settled_at=now(), settle_by=null(), trigger_due=null())
    .returning(run.c.run_id)
)
#: The holder, or the winner of a replay, is still sending callbacks.
EXTEND_SETTLE = (
    update(run)
    .where(
        this_run(),
        run.c.holder == p("holder"),
        run.c.state.in_(_TERMINAL),
        run.c.settled_at.is_(None),
    )
    .values(settle_by=in_seconds("settle_in"), trigger_due=in_seconds("settle_in"))
)
#: One winner: it moves ``settle_by`` on and becomes the holder that may settle.
REPLAY = (
    update(run)
    .where(
        this_run(),
        run.c.state.in_(_TERMINAL),
        run.c.settled_at.is_(None),
        due(run.c.settle_by),
    )
    .values(
        holder=p("holder"),
        replays=run.c.replays + 1,
        settle_by=in_seconds("settle_in"),
        trigger_due=in_seconds("settle_in"),
    )
    .returning(
        run.c.state,
        run.c.epoch,
        run.c.outcome,
        run.c.dead_letter,
        run.c.reason,
        run.c.envelope,
        run.c.replays,
    )
)
#: A settle that never succeeds ends here, for a person to look at.
UNDELIVERABLE = (
    update(run)
    .where(this_run(), run.c.settled_at.is_(None), run.c.state.in_(_TERMINAL))
    .values(settled_at=now(), settle_by=null(), trigger_due=null(), reason="undeliverable")
    .returning(run.c.run_id)
)

#: The outbox: ready runs and unsettled outcomes whose trigger is due.
DUE = (
    select(run.c.run_id, run.c.epoch)
    .where(
        run.c.namespace == p("namespace"),
        run.c.trigger_due <= at_start(),
        run.c.envelope.is_not(None),
    )
    .order_by(run.c.trigger_due)
    .limit(p("most", Integer))
)
#: When the next trigger is due of those that are not yet.
NEXT_DUE = select((func.min(run.c.trigger_due) - at_start()).label("due_in")).where(
    run.c.namespace == p("namespace"),
    run.c.trigger_due > at_start(),
    run.c.envelope.is_not(None),
)
#: One sender: the trigger is due again in 30 s if this one dies before it has sent it.
RESERVE = (
    update(run)
    .where(
        this_run(),
        run.c.epoch == p("epoch"),
        run.c.envelope.is_not(None),
        due(run.c.trigger_due),
    )
    .values(trigger_due=in_seconds("reserved_for"))
    .returning(run.c.envelope, run.c.triggers, run.c.task, run.c.policy, run.c.state)
)
#: Sent does not mean arrived. An outcome that somebody delivers already stays due at the end
#: of that try.
SENT = (
    update(run)
    .where(
        this_run(),
        run.c.epoch == p("epoch"),
        run.c.triggers == p("triggers"),
        run.c.trigger_due.is_not(None),
    )
    .values(
        trigger_due=case((run.c.settle_by > now(), run.c.settle_by), else_=in_seconds("again_in")),
        triggers=run.c.triggers + 1,
    )
)

ENVELOPE = select(run.c.envelope, run.c.epoch).where(this_run())

#: Pruning: old finished runs, oldest first.
PRUNABLE = (
    select(run.c.run_id)
    .where(
        run.c.namespace == p("namespace"),
        run.c.settled_at < now() - p("age", Double),
        or_(
            run.c.envelope.is_not(None),
            run.c.outcome.is_not(None),
            select(lease.c.run_id).where(lease.c.run_id == run.c.run_id).exists(),
        ),
    )
    .order_by(run.c.settled_at)
    .limit(p("most", Integer))
)
#: A tombstone keeps id, state and epoch, so that a late message cannot run it again.
EMPTY_RUN = (
    update(run)
    .where(this_run(), run.c.settled_at.is_not(None))
    .values(checkpoint=null(), envelope=null(), outcome=null(), note=null(), trigger_due=null())
    .returning(run.c.run_id)
)
DROP_LEASES = delete(lease).where(lease.c.run_id == p("run_id"), ~live())
FORGET = delete(run).where(
    run.c.namespace == p("namespace"),
    run.c.settled_at < now() - p("age", Double),
    run.c.envelope.is_(None),
    run.c.outcome.is_(None),
)
