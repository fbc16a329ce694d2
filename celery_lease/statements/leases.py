"""Renewal, suspicion and hand-over of leases; ``lease`` only, and no index of it."""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    Boolean,
    Double,
    Integer,
    String,
    Text,
    and_,
    any_,
    func,
    insert,
    literal,
    or_,
    select,
    text,
    update,
)
from sqlalchemy.dialects.postgresql import ARRAY

from celery_lease.schema import event, lease, run
from celery_lease.statements.clock import at_start, due, now
from celery_lease.statements.guards import ACTIVE, SUSPECT, its_lease, live, this_lease
from celery_lease.statements.parameters import p
from celery_lease.statements.policies import grace
from celery_lease.states import LeaseStatus

__all__ = [
    "ABANDON_LEASE",
    "END_LEASE",
    "EXPIRED",
    "LIVE_LEASE",
    "LOCK_EXPIRED",
    "OF_HOLDER",
    "OVERRIPE",
    "RECLAIM_LEASE",
    "RENEW_IN_ONE",
    "RENEW_MANY",
    "STATUS_MANY",
    "SUSPECT_ONE",
]

_HOLDERS = p("holders", ARRAY(Text))

#: A renewal revives a suspect (nobody else was granted the run) and never an ended lease.
_EXTENDED: dict[str, Any] = {
    "status": LeaseStatus.ACTIVE,
    "heartbeat_at": now(),
    "expires_at": now() + lease.c.duration,
    "suspect_at": None,
    "yield_requested": or_(lease.c.yield_requested, p("yielding", Boolean)),
}


def _renew_in_one() -> Any:
    """Renew any number of leases and read back only those that were not (PostgreSQL).

    Rows are locked in holder order and locked ones are skipped, so that two heartbeats
    cannot deadlock and a busy run delays nobody. A lease that was skipped shows its old,
    live status: busy, which is not lost.
    """
    picked = (
        select(lease.c.run_id, lease.c.epoch, lease.c.status)
        .where(lease.c.holder == any_(_HOLDERS), live())
        .order_by(lease.c.holder)
        .with_for_update(skip_locked=True)
        .cte("picked")
    )
    renewed = (
        update(lease)
        .where(lease.c.run_id == picked.c.run_id, lease.c.epoch == picked.c.epoch, live())
        .values(**_EXTENDED)
        .returning(lease.c.holder, lease.c.run_id, lease.c.epoch, picked.c.status.label("before"))
        .cte("renewed")
    )
    recovered = insert(event).from_select(
        ["run_id", "epoch", "holder", "kind", "reason", "at"],
        select(
            renewed.c.run_id,
            renewed.c.epoch,
            renewed.c.holder,
            literal("recovered", String),
            literal("a renewal of a suspect holder", String),
            now(),
        ).where(renewed.c.before == LeaseStatus.SUSPECT),
    )
    asked = func.unnest(_HOLDERS).table_valued("holder").render_derived(name="asked")
    # NOT IN is hashed whatever the planner expects; it cannot know how many are asked for.
    return (
        select(asked.c.holder, _shown(asked, lease.c.status), _shown(asked, lease.c.reason))
        .where(asked.c.holder.not_in(select(renewed.c.holder)))
        .add_cte(recovered.cte("recovered"))
    )


def _shown(asked: Any, column: Any) -> Any:
    return (
        select(column).where(lease.c.holder == asked.c.holder).scalar_subquery().label(column.name)
    )


RENEW_IN_ONE = _renew_in_one()

_LISTED = lease.c.holder.in_(
    text("SELECT value FROM json_each(:p_holders)").columns(value=Text).scalar_subquery()
)
#: The portable pair: what the leases are, then the renewal, in one transaction.
STATUS_MANY = select(
    lease.c.holder, lease.c.run_id, lease.c.epoch, lease.c.status, lease.c.reason
).where(_LISTED)
RENEW_MANY = update(lease).where(_LISTED, live()).values(**_EXTENDED)

_EXPIRED = and_(lease.c.status == ACTIVE, due(lease.c.expires_at))
_SUSPECTED: dict[str, Any] = {"status": LeaseStatus.SUSPECT, "suspect_at": now()}

#: Live leases that ran out, of runs in one namespace; only the reaper scans.
#: Found first and joined then: the planner takes a third of all leases for expired.
_LATE = (
    select(lease.c.run_id, lease.c.epoch)
    .where(lease.c.expires_at <= at_start(), lease.c.status == ACTIVE)
    .cte("late")
    .prefix_with("MATERIALIZED", dialect="postgresql")
)
EXPIRED = (
    select(_LATE)
    .select_from(_LATE.join(run, run.c.run_id == _LATE.c.run_id))
    .where(run.c.namespace == p("namespace"))
    .limit(p("most", Integer))
)
SUSPECT_ONE = (
    update(lease).where(this_lease(), _EXPIRED).values(**_SUSPECTED).returning(lease.c.holder)
)
#: The same, skipping a lease that is being renewed at this moment (PostgreSQL).
LOCK_EXPIRED = (
    select(lease.c.run_id).where(this_lease(), _EXPIRED).with_for_update(skip_locked=True)
)

#: Suspects beyond the grace that their run's policy gives them, the longest waiting first.
OVERRIPE = (
    select(lease.c.run_id, lease.c.epoch)
    .select_from(lease.join(run, run.c.run_id == lease.c.run_id))
    .where(
        lease.c.status == SUSPECT,
        lease.c.suspect_at + grace() <= at_start(),
        run.c.namespace == p("namespace"),
    )
    .order_by(lease.c.suspect_at)
    .limit(p("most", Integer))
)

#: Ends a suspect beyond its grace. The condition is checked again: if a renewal came first,
#: no row is hit and nothing is handed over.
RECLAIM_LEASE = (
    update(lease)
    .where(
        this_lease(),
        lease.c.status == SUSPECT,
        due(lease.c.suspect_at + p("grace", Double)),
    )
    .values(status=LeaseStatus.RECLAIMED, ended_at=now(), reason=p("reason"))
    .returning(lease.c.holder)
)

#: Ends the live lease of a dead child: its parent knows, no grace is needed.
ABANDON_LEASE = (
    update(lease)
    .where(its_lease())
    .values(status=LeaseStatus.RECLAIMED, ended_at=now(), reason=p("reason"))
    .returning(lease.c.holder)
)

#: Ends whatever live lease a run has: revoke, fence-all, sweeps.
END_LEASE = (
    update(lease)
    .where(lease.c.run_id == p("run_id"), live())
    .values(status=p("ended"), ended_at=now(), reason=p("reason"))
    .returning(lease.c.holder, lease.c.epoch)
)

#: The run and epoch that were granted to a holder.
OF_HOLDER = select(lease.c.run_id, lease.c.epoch, lease.c.status).where(
    lease.c.holder == p("holder")
)

#: Sweep: the next live leases in the order of their run, and what that run says.
#: The portion is cut first, so that a join never reads what lies outside of it.
_PORTION = (
    select(lease.c.run_id)
    .where(live(), lease.c.run_id > p("after"))
    .order_by(lease.c.run_id)
    .limit(p("most", Integer))
    .subquery("portion")
)
SWEPT = (
    select(_PORTION.c.run_id, run.c.namespace, run.c.state)
    .select_from(_PORTION.outerjoin(run, run.c.run_id == _PORTION.c.run_id))
    .order_by(_PORTION.c.run_id)
)
#: The live lease of a run, if it has one.
LIVE_LEASE = select(lease.c.epoch).where(lease.c.run_id == p("run_id"), live())
