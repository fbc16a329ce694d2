"""The conditions under which a statement may change a run or a lease.

A write by a holder carries run, epoch *and* holder. The epoch alone would do between two
grants; the holder tells a message that was delivered twice under one epoch apart.
"""

from __future__ import annotations

from sqlalchemy import ColumnElement, String, and_, literal_column, or_

from celery_lease.schema import lease, run
from celery_lease.statements.clock import due, now
from celery_lease.statements.parameters import p
from celery_lease.states import LIVE, LeaseStatus, RunState

__all__ = [
    "ACTIVE",
    "SUSPECT",
    "claimable",
    "held",
    "its_lease",
    "live",
    "not_overdue",
    "this_lease",
    "this_run",
]


def _written(value: str) -> ColumnElement[str]:
    """A constant of ours, written out: a partial index is of no use to a parameter."""
    return literal_column(f"'{value}'", String)


ACTIVE = _written(LeaseStatus.ACTIVE)
SUSPECT = _written(LeaseStatus.SUSPECT)


def this_run() -> ColumnElement[bool]:
    """The run named by the parameter ``run_id``."""
    return run.c.run_id == p("run_id")


def held() -> ColumnElement[bool]:
    """The run is running under this epoch and this holder: the fence of every holder verb."""
    return and_(
        this_run(),
        run.c.epoch == p("epoch"),
        run.c.holder == p("holder"),
        run.c.state == RunState.RUNNING,
    )


def live() -> ColumnElement[bool]:
    """The lease has not ended: nobody else has been granted the run since."""
    return lease.c.status.in_([_written(status) for status in sorted(LIVE)])


def this_lease() -> ColumnElement[bool]:
    """The lease of the parameters ``run_id`` and ``epoch``."""
    return and_(
        lease.c.run_id == p("run_id"),
        lease.c.epoch == p("epoch"),
    )


def its_lease() -> ColumnElement[bool]:
    """The live lease of ``run_id`` and ``epoch`` that was granted to ``holder``."""
    return and_(this_lease(), lease.c.holder == p("holder"), live())


def not_overdue() -> ColumnElement[bool]:
    """Celery's ``expires`` is ahead, or counts no more because the run was claimed once."""
    return or_(run.c.expires.is_(None), run.c.epoch > 0, run.c.expires > now())


def claimable() -> ColumnElement[bool]:
    """The run is ready at the expected epoch, its time has come and it has not expired."""
    return and_(
        this_run(),
        run.c.state == RunState.READY,
        run.c.epoch == p("expected"),
        or_(run.c.not_before.is_(None), due(run.c.not_before)),
        not_overdue(),
    )
