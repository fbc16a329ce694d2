"""The run row is its own outbox: which triggers are due, who sends them, who replays."""

from __future__ import annotations

from sqlalchemy import Connection

from celery_lease.policy import Terms
from celery_lease.statements import runs
from celery_lease.states import RunState
from celery_lease.store.foundation import Foundation, add_event, ask
from celery_lease.store.results import Outgoing, Replay

__all__ = ["Outbox"]

_RESERVED_FOR = 30.0
_LONGEST = 6 * 3600.0


class Outbox(Foundation):
    """Triggers and outcomes on their way to the broker."""

    def due(self, most: int = 100) -> list[tuple[str, int]]:
        """Runs whose trigger is due, as (run, epoch), the longest waiting first."""
        given = {"namespace": self.namespace, "most": most}
        rows = self.connections.run(lambda c: ask(c, runs.DUE, given))
        return [(row.run_id, row.epoch) for row in rows]

    def next_due(self) -> float | None:
        """Seconds until the next trigger is due that is not due yet; None if there is none."""
        given = {"namespace": self.namespace}
        row = self.connections.run(lambda c: ask(c, runs.NEXT_DUE, given).first())
        return None if row is None or row.due_in is None else float(row.due_in)

    def reserve(self, run_id: str, epoch: int) -> Outgoing | None:
        """Become the one sender of a due trigger; None if it is not due, or taken."""
        given = {"run_id": run_id, "epoch": epoch, "reserved_for": _RESERVED_FOR}
        row = self.connections.run(lambda c: ask(c, runs.RESERVE, given).first())
        if row is None:
            return None
        terms = Terms.load(row.policy)
        return Outgoing(run_id, epoch, row.envelope, row.triggers, row.task, terms)

    def sent(self, outgoing: Outgoing) -> None:
        """The broker took the trigger; it is due again later, since sent is not arrived."""
        again = min(outgoing.terms.retrigger_after * 2.0**outgoing.triggers, _LONGEST)
        given = {
            "run_id": outgoing.run_id,
            "epoch": outgoing.epoch,
            "triggers": outgoing.triggers,
            "again_in": again,
        }
        self.connections.run(lambda c: ask(c, runs.SENT, given))

    def replay(self, run_id: str, holder: str, terms: Terms) -> Replay | None:
        """Win the right to deliver an outcome again; None for everybody but one.

        After ``max_replays`` tries the outcome counts as undeliverable: the run is settled
        with that reason, for a person to look at.
        """
        given = {"run_id": run_id, "holder": holder, "settle_in": terms.settle_timeout}

        def work(connection: Connection) -> Replay | None:
            row = ask(connection, runs.REPLAY, given).first()
            if row is None:
                return None
            if row.replays > terms.max_replays:
                ask(connection, runs.UNDELIVERABLE, {"run_id": run_id})
                add_event(connection, run_id, "undeliverable", epoch=row.epoch)
                return None
            add_event(
                connection, run_id, "replayed", str(row.state), epoch=row.epoch, holder=holder
            )
            return Replay(
                RunState(row.state),
                row.epoch,
                row.outcome,
                bool(row.dead_letter),
                row.reason,
                row.envelope,
                row.replays,
            )

        return self.connections.transact(work)
