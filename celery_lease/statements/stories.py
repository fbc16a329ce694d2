"""Events and the read side: what an operator sees of a run."""

from __future__ import annotations

from sqlalchemy import Boolean, Double, Integer, Text, and_, delete, insert, or_, select
from sqlalchemy.dialects.postgresql import insert as upsert
from sqlalchemy.dialects.sqlite import insert as sqlite_upsert

from celery_lease.schema import event, lease, run, stage, worker
from celery_lease.statements.clock import now
from celery_lease.statements.parameters import p

__all__ = [
    "ADD_EVENT",
    "DROP_EVENTS",
    "DROP_STRAY_EVENTS",
    "EVENTS",
    "LEASES",
    "RUN",
    "RUNS",
    "SAVED_STAGES",
    "WORKERS",
    "WORKER_SEEN",
    "WORKER_SEEN_SQLITE",
]

ADD_EVENT = insert(event).values(
    run_id=p("run_id"),
    epoch=p("epoch"),
    holder=p("holder"),
    kind=p("kind"),
    reason=p("reason"),
    at=now(),
)
DROP_EVENTS = delete(event).where(event.c.run_id == p("run_id"))
#: Old events of ids that are no run: forgotten ones, and messages of runs never known.
DROP_STRAY_EVENTS = delete(event).where(
    event.c.at < now() - p("age", Double),
    ~select(run.c.run_id).where(run.c.run_id == event.c.run_id).exists(),
)

_SUMMARY = (
    run.c.run_id,
    run.c.namespace,
    run.c.task,
    run.c.state,
    run.c.epoch,
    run.c.holder,
    run.c.attempt,
    run.c.recoveries,
    run.c.progress,
    run.c.note,
    run.c.reason,
    run.c.created_at,
    run.c.finished_at,
    run.c.settled_at,
    run.c.replays,
    lease.c.status.label("lease_status"),
    lease.c.node,
    (lease.c.expires_at - now()).label("lease_left"),
    (run.c.trigger_due - now()).label("trigger_in"),
    now().label("now"),
)
_WITH_LEASE = run.outerjoin(
    lease, and_(lease.c.run_id == run.c.run_id, lease.c.epoch == run.c.epoch)
)

#: Work, or an outcome to deliver; not the id of a revoked run whose message was never seen.
_TO_COME = and_(
    run.c.settled_at.is_(None), or_(run.c.finished_at.is_(None), run.c.envelope.is_not(None))
)

RUN = select(*_SUMMARY).select_from(_WITH_LEASE).where(run.c.run_id == p("run_id"))
#: The newest runs of a namespace, optionally of one state or task, or not settled yet.
RUNS = (
    select(*_SUMMARY)
    .select_from(_WITH_LEASE)
    .where(
        run.c.namespace == p("namespace"),
        or_(p("state", Text).is_(None), run.c.state == p("state")),
        or_(p("task", Text).is_(None), run.c.task == p("task")),
        or_(~p("unsettled", Boolean), _TO_COME),
    )
    .order_by(run.c.created_at.desc(), run.c.run_id)
    .limit(p("most", Integer))
)
LEASES = select(lease).where(lease.c.run_id == p("run_id")).order_by(lease.c.epoch)
SAVED_STAGES = (
    select(stage.c.name, stage.c.epoch, stage.c.saved_at, stage.c.seconds)
    .where(stage.c.run_id == p("run_id"))
    .order_by(stage.c.saved_at)
)
EVENTS = select(event).where(event.c.run_id == p("run_id")).order_by(event.c.id)

_SEEN = {
    "node": p("node"),
    "namespace": p("namespace"),
    "host": p("host"),
    "pid": p("pid", Integer),
    "pool": p("pool"),
    "queues": p("queues"),
    "versions": p("versions"),
    "started_at": now(),
    "heartbeat_at": now(),
}
_AGAIN = {name: value for name, value in _SEEN.items() if name not in ("node", "started_at")}
WORKER_SEEN = (
    upsert(worker).values(**_SEEN).on_conflict_do_update(index_elements=["node"], set_=_AGAIN)
)
WORKER_SEEN_SQLITE = (
    sqlite_upsert(worker)
    .values(**_SEEN)
    .on_conflict_do_update(index_elements=["node"], set_=_AGAIN)
)
WORKERS = (
    select(worker, (now() - worker.c.heartbeat_at).label("silent_for"))
    .where(worker.c.namespace == p("namespace"))
    .order_by(worker.c.node)
)
