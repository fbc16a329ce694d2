"""The database's clock for tests: time passes for stored rows, and nobody sleeps.

The library compares stored times with the database's clock only, so moving every stored time
back has the effect of moving that clock forward.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from celery_lease.schema import event, lease, run, stage, worker

if TYPE_CHECKING:
    from celery_lease.store import Store

__all__ = ["TIMES", "advance_database_clock"]

#: Every column that holds a time, by table.
TIMES: Mapping[str, tuple[str, ...]] = {
    run.name: (
        "not_before",
        "expires",
        "trigger_due",
        "settle_by",
        "settled_at",
        "created_at",
        "finished_at",
    ),
    lease.name: ("acquired_at", "expires_at", "heartbeat_at", "suspect_at", "ended_at"),
    stage.name: ("saved_at",),
    event.name: ("at",),
    worker.name: ("started_at", "heartbeat_at"),
}


def advance_database_clock(store: Store, seconds: float, *, run_id: str | None = None) -> None:
    """Let ``seconds`` pass for the rows of the store's namespace, or for one of its runs.

    Waits for rows that are locked, so nobody should hold one. A worker that is alive renews
    its lease again at its next heartbeat: stop or pause it first to see its lease expire.

    >>> advance_database_clock(store, 91)
    >>> store.suspect("a-run", 1)
    True
    """
    runs = run.select().with_only_columns(run.c.run_id).where(run.c.namespace == store.namespace)
    if run_id is not None:
        runs = runs.where(run.c.run_id == run_id)

    def move(connection: Any) -> None:
        for table in (run, lease, stage, event):
            connection.execute(_moved(table, seconds).where(table.c.run_id.in_(runs)))
        if run_id is None:
            of_namespace = worker.c.namespace == store.namespace
            connection.execute(_moved(worker, seconds).where(of_namespace))

    store.connections.transact(move)


def _moved(table: Any, seconds: float) -> Any:
    return table.update().values({name: table.c[name] - seconds for name in TIMES[table.name]})
