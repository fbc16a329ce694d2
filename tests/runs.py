"""Runs brought into any state, and what the database holds of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import select, update

from celery_lease.policy import Terms
from celery_lease.schema import event, lease, run, stage
from celery_lease.states import LeaseStatus, RunState
from celery_lease.store import Grant, Store
from celery_lease.testing.clock import advance_database_clock

ENVELOPE = b"envelope"
#: Longer than a lease, than a grace, than a time to settle.
LONG = 100_000.0

_numbers = itertools.count(1)


def new_holder() -> str:
    """A holder id like that of a new delivery."""
    return f"node-{next(_numbers)}-{id(_numbers)}"


def claim(
    store: Store,
    run_id: str,
    terms: Terms,
    *,
    expected: int = 0,
    holder: str | None = None,
    deliver: bool = True,
) -> Grant:
    """A claim that has to be granted."""
    granted = store.claim(
        run_id,
        expected,
        holder or new_holder(),
        task="a.task",
        terms=terms,
        node="node",
        envelope=ENVELOPE,
        deliver=deliver,
    )
    assert isinstance(granted, Grant), granted
    return granted


def enqueue(store: Store, run_id: str, terms: Terms, **options: Any) -> bool:
    """Register a run with the envelope that ``claim`` would store."""
    return store.enqueue(run_id, task="a.task", terms=terms, envelope=ENVELOPE, **options)


def complete(store: Store, grant: Grant, outcome: bytes = b"result", **options: Any) -> None:
    """Complete with something to deliver."""
    store.complete(grant, outcome, **{"deliver": True, "settle_in": 60.0, **options})


def fail(store: Store, grant: Grant, outcome: bytes = b"error", **options: Any) -> None:
    """Fail with something to deliver."""
    given = {"reason": "ValueError", "deliver": True, "settle_in": 60.0, **options}
    store.fail(grant, outcome, **given)


def suspect(store: Store, grant: Grant) -> None:
    """Let the lease expire and mark it."""
    advance_database_clock(store, 91, run_id=grant.run_id)
    assert store.suspect(grant.run_id, grant.epoch)


def reclaim(store: Store, grant: Grant) -> Any:
    """Let the lease expire and its grace pass, and take the run back."""
    suspect(store, grant)
    advance_database_clock(store, 36, run_id=grant.run_id)
    handed = store.reclaim(grant.run_id, grant.epoch)
    assert handed is not None
    return handed


def dump(store: Store, run_id: str) -> dict[str, list[tuple[Any, ...]]]:
    """Everything the database holds of a run, but for its events."""

    def read(connection: Any) -> dict[str, list[tuple[Any, ...]]]:
        return {
            table.name: sorted(
                (tuple(row) for row in connection.execute(_rows_of(table, run_id))), key=repr
            )
            for table in (run, lease, stage)
        }

    return store.connections.run(read)


def row(store: Store, run_id: str) -> Any:
    """The run's row."""
    return store.connections.run(lambda c: c.execute(_rows_of(run, run_id)).one())


def lease_row(store: Store, grant: Grant) -> Any:
    """The row of one grant."""
    statement = _rows_of(lease, grant.run_id).where(lease.c.epoch == grant.epoch)
    return store.connections.run(lambda c: c.execute(statement).one())


def live_leases(store: Store, run_id: str) -> int:
    """How many leases of the run are live: 0 or 1, whatever happens."""
    return sum(one["status"] in ("active", "suspect") for one in store.leases(run_id))


def kinds(store: Store, run_id: str) -> list[str]:
    """The kinds of the run's events, in order."""
    return [one["kind"] for one in store.events(run_id)]


def alter(store: Store, table: Any, run_id: str, **values: Any) -> None:
    """Write into a table behind the library's back."""
    statement = update(table).where(table.c.run_id == run_id).values(**values)
    store.connections.transact(lambda c: c.execute(statement))


def _rows_of(table: Any, run_id: str) -> Any:
    return select(table).where(table.c.run_id == run_id)


@dataclass
class Stage:
    """A run in a state, and the last grant of it (a made-up one if there never was one)."""

    store: Store
    run_id: str
    terms: Terms
    grant: Grant = field(init=False)

    def __post_init__(self) -> None:
        self.grant = Grant(self.run_id, 0, new_holder(), 0, 0, None, None)

    @property
    def epoch(self) -> int:
        """The run's epoch, 0 if there is no run."""
        view = self.store.view(self.run_id)
        return 0 if view is None else view.epoch


def _nothing(_: Stage) -> None:
    pass


def _ready(stage_: Stage) -> None:
    assert enqueue(stage_.store, stage_.run_id, stage_.terms, expires_in=LONG / 2)


def _running(stage_: Stage) -> None:
    stage_.grant = claim(stage_.store, stage_.run_id, stage_.terms)


def _suspected(stage_: Stage) -> None:
    _running(stage_)
    suspect(stage_.store, stage_.grant)


def _waiting(stage_: Stage) -> None:
    _running(stage_)
    alter(stage_.store, run, stage_.run_id, state=RunState.WAITING)
    alter(stage_.store, lease, stage_.run_id, status=LeaseStatus.RELEASED, reason="suspended")


def _parked(stage_: Stage) -> None:
    _running(stage_)
    stage_.store.park(stage_.grant, "why")


def _succeeded(stage_: Stage) -> None:
    _running(stage_)
    complete(stage_.store, stage_.grant, b"first")


def _failed(stage_: Stage) -> None:
    _running(stage_)
    fail(stage_.store, stage_.grant, b"first")


def _revoked(stage_: Stage) -> None:
    _running(stage_)
    assert stage_.store.revoke(stage_.run_id)


#: Every state a run can be in, by name, with the state of the run and of its newest lease.
STATES: dict[str, tuple[Callable[[Stage], None], RunState | None, LeaseStatus | None]] = {
    "none": (_nothing, None, None),
    "ready": (_ready, RunState.READY, None),
    "running": (_running, RunState.RUNNING, LeaseStatus.ACTIVE),
    "suspected": (_suspected, RunState.RUNNING, LeaseStatus.SUSPECT),
    "waiting": (_waiting, RunState.WAITING, LeaseStatus.RELEASED),
    "parked": (_parked, RunState.PARKED, LeaseStatus.RELEASED),
    "succeeded": (_succeeded, RunState.SUCCEEDED, LeaseStatus.RELEASED),
    "failed": (_failed, RunState.FAILED, LeaseStatus.RELEASED),
    "revoked": (_revoked, RunState.REVOKED, LeaseStatus.REVOKED),
}


def bring(store: Store, run_id: str, terms: Terms, name: str) -> Stage:
    """A new run in the state that ``STATES`` calls ``name``."""
    staged = Stage(store, run_id, terms)
    STATES[name][0](staged)
    return staged


def trace(store: Store, run_id: str) -> list[tuple[str, str | None]]:
    """Kinds and reasons of the run's events."""
    statement = select(event.c.kind, event.c.reason).where(event.c.run_id == run_id)
    return store.connections.run(
        lambda c: [tuple(one) for one in c.execute(statement.order_by(event.c.id))]
    )
