"""What an operator does and sees: schema, revoke, resume, fence-all, prune, listings."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from celery_lease.errors import IllegalTransition, RunNotFound
from celery_lease.schema import metadata
from celery_lease.statements import leases, runs, stories
from celery_lease.states import TERMINAL, LeaseStatus
from celery_lease.store.claims import Claims
from celery_lease.store.failures import Conflict
from celery_lease.store.foundation import add_event, ask

__all__ = ["Operator"]

Row = dict[str, Any]


class Operator(Claims):
    """The store from outside any worker."""

    def create_schema(self) -> None:
        """Make the tables that are missing; those that are there stay as they are."""
        try:
            self.connections.transact(metadata.create_all)
        except (DBAPIError, Conflict):
            # Somebody else made a table between the look and the CREATE; or it fails again.
            self.connections.transact(metadata.create_all)

    def revoke(self, run_id: str, reason: str = "revoked", *, holder: str | None = None) -> bool:
        """End a run before its outcome; an unknown id becomes a revoked row.

        The live lease ends with it, so that the holder can write nothing more. Returns
        False if the run had finished. With ``holder`` only that holder's run is revoked.
        """

        def work(connection: Connection) -> bool:
            run = ask(connection, runs.LOCK, {"run_id": run_id}).first()
            if holder is not None and (run is None or run.holder != holder):
                return False
            if run is None:
                if self._tombstone(connection, run_id, reason):
                    return True
                # A claim inserted the run since: a new statement sees it.
                run = ask(connection, runs.LOCK, {"run_id": run_id}).first()
            if run is None or run.state in TERMINAL:
                return False
            # A new statement, after the lock: the lease as it is now, not as it was.
            ended = {"run_id": run_id, "ended": LeaseStatus.REVOKED, "reason": reason}
            ask(connection, leases.END_LEASE, ended)
            ask(connection, runs.REVOKE, {"run_id": run_id, "reason": reason})
            add_event(connection, run_id, "revoked", reason, epoch=run.epoch, holder=run.holder)
            return True

        return self.connections.transact(work)

    def _tombstone(self, connection: Connection, run_id: str, reason: str) -> bool:
        given = self._registered(
            run_id, task="", terms=None, envelope=None, deliver=True, reason=reason
        )
        if not self._register(connection, given, "revoked"):
            return False
        ask(connection, runs.REVOKE, {"run_id": run_id, "reason": reason})
        return True

    def resume(self, run_id: str, reason: str = "resumed") -> int:
        """Make a parked, failed or revoked run ready under a new epoch, which is returned.

        Raises ``RunNotFound``, or ``IllegalTransition`` for another state or for a run
        whose envelope is gone.
        """

        def work(connection: Connection) -> int:
            run = ask(connection, runs.LOCK, {"run_id": run_id}).first()
            if run is None:
                raise RunNotFound(f"there is no run {run_id!r} in the lease store")
            row = ask(connection, runs.RESUME, {"run_id": run_id, "reason": reason}).first()
            if row is None:
                why = "its envelope is gone" if run.envelope is None else f"it is {run.state}"
                raise IllegalTransition(f"run {run_id!r} cannot be resumed: {why}")
            add_event(connection, run_id, "resumed", reason, epoch=row.epoch)
            return int(row.epoch)

        return self.connections.transact(work)

    def fence_all(self, raise_by: int = 1) -> int:
        """After a failover that lost commits: raise every epoch and end every lease.

        ``raise_by`` must exceed the number of grants per run that may have been lost.
        Returns the number of runs. Each run is a transaction of its own.
        """
        given = {"namespace": self.namespace}
        names = self.connections.run(
            lambda c: [row.run_id for row in ask(c, runs.NAMESPACE, given)]
        )
        return sum(self._fence_one(run_id, raise_by) for run_id in names)

    def _fence_one(self, run_id: str, raise_by: int) -> int:
        def work(connection: Connection) -> int:
            if ask(connection, runs.LOCK, {"run_id": run_id}).first() is None:
                return 0
            ended = {"run_id": run_id, "ended": LeaseStatus.RECLAIMED, "reason": "fenced"}
            ask(connection, leases.END_LEASE, ended)
            row = ask(connection, runs.FENCE, {"run_id": run_id, "raise_by": raise_by}).first()
            if row is not None:
                add_event(connection, run_id, "fenced", epoch=row.epoch)
            return 1

        return self.connections.transact(work)

    def prune(self, age: float, *, tombstone_age: float, most: int = 1000) -> int:
        """Empty runs settled longer than ``age`` seconds ago; their ids stay as tombstones."""
        given = {"namespace": self.namespace, "age": age, "most": most}
        names = self.connections.run(lambda c: [row.run_id for row in ask(c, runs.PRUNABLE, given)])
        pruned = sum(self._prune_one(name) for name in names)
        forget = {"namespace": self.namespace, "age": tombstone_age}
        self.connections.run(lambda c: ask(c, runs.FORGET, forget))
        self.connections.run(lambda c: ask(c, stories.DROP_STRAY_EVENTS, {"age": age}))
        return pruned

    def _prune_one(self, run_id: str) -> int:
        return self.connections.transact(lambda c: _empty(c, run_id))

    def run(self, run_id: str) -> Row | None:
        """One run with its newest lease; times in seconds since the epoch."""
        rows = self._rows(stories.RUN, {"run_id": run_id})
        return rows[0] if rows else None

    def list_runs(
        self,
        *,
        state: str | None = None,
        task: str | None = None,
        unsettled: bool = False,
        most: int = 50,
    ) -> list[Row]:
        """The newest runs of the namespace."""
        given = {
            "namespace": self.namespace,
            "state": state,
            "task": task,
            "unsettled": unsettled,
            "most": most,
        }
        return self._rows(stories.RUNS, given)

    def leases(self, run_id: str) -> list[Row]:
        """Every grant of a run, oldest first."""
        return self._rows(stories.LEASES, {"run_id": run_id})

    def saved_stages(self, run_id: str) -> list[Row]:
        """The saved stages of a run, without their results."""
        return self._rows(stories.SAVED_STAGES, {"run_id": run_id})

    def events(self, run_id: str) -> list[Row]:
        """Every recorded event of a run, oldest first."""
        return self._rows(stories.EVENTS, {"run_id": run_id})

    def workers(self) -> list[Row]:
        """The workers that were seen, with the seconds since."""
        return self._rows(stories.WORKERS, {"namespace": self.namespace})

    def _rows(self, statement: Any, given: Row) -> list[Row]:
        return self.connections.run(
            lambda c: [dict(row._mapping) for row in ask(c, statement, given)]
        )


def _empty(connection: Connection, run_id: str) -> int:
    if ask(connection, runs.EMPTY_RUN, {"run_id": run_id}).first() is None:
        return 0
    given = {"run_id": run_id}
    for statement in (runs.DROP_STAGES, runs.DROP_LEASES, stories.DROP_EVENTS):
        ask(connection, statement, given)
    return 1
