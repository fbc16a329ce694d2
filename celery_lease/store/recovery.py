"""Taking a run back from a dead holder: suspect, guard, reclaim, abandon, sweeps."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection

from celery_lease.policy import Terms
from celery_lease.statements import holder as holding
from celery_lease.statements import leases, runs
from celery_lease.states import TERMINAL, LeaseStatus, RunState, judge
from celery_lease.store.foundation import Foundation, add_event, ask
from celery_lease.store.results import Ended, HandedOver

__all__ = ["Recovery"]

#: Not every other state: one of a newer release may have a lease.
_NOT_RUNNING = frozenset(RunState) - {RunState.RUNNING}


class Recovery(Foundation):
    """Only these end somebody else's lease; all are safe to run at once, in any number."""

    #: Where the next sweep goes on.
    _after_run = ""
    _after_lease = ""

    def expired(self, most: int = 100) -> list[tuple[str, int]]:
        """Live leases of this namespace whose time is over, as (run, epoch)."""
        given = {"namespace": self.namespace, "most": most}
        rows = self.connections.run(lambda c: ask(c, leases.EXPIRED, given))
        return [(row.run_id, row.epoch) for row in rows]

    def suspect(self, run_id: str, epoch: int) -> bool:
        """Mark an expired lease; the grace counts from now. False if it is not expired."""
        given = {"run_id": run_id, "epoch": epoch}

        def work(connection: Connection) -> bool:
            if ask(connection, leases.LOCK_EXPIRED, given).first() is None:
                return False
            row = ask(connection, leases.SUSPECT_ONE, given).first()
            if row is None:
                return False
            add_event(connection, run_id, "suspect", epoch=epoch, holder=row.holder)
            return True

        return self.connections.transact(work)

    def overripe(self, most: int = 100) -> list[tuple[str, int]]:
        """Suspect leases whose grace is over, as (run, epoch)."""
        given = {"namespace": self.namespace, "most": most}
        rows = self.connections.run(lambda c: ask(c, leases.OVERRIPE, given))
        return [(row.run_id, row.epoch) for row in rows]

    def reclaim(self, run_id: str, epoch: int) -> HandedOver | None:
        """Take the run back from a suspect holder; None if somebody else was faster.

        The run's row is held while the guard looks; the old lease is ended with its
        condition checked again, and if that hits no row nothing happens.
        """

        def end(connection: Connection, run: Any) -> str | None:
            given = {
                "run_id": run_id,
                "epoch": epoch,
                "grace": Terms.load(run.policy).grace,
                "reason": "expired",
            }
            row = ask(connection, leases.RECLAIM_LEASE, given).first()
            return None if row is None else str(row.holder)

        return self.connections.transact(
            lambda c: _hand_over(
                c, runs.LOCK_SKIP, run_id, epoch, end=end, kind="reclaimed", why="expired"
            )
        )

    def abandon(
        self, run_id: str, epoch: int, holder: str, reason: str, *, delay: float = 0.0
    ) -> HandedOver | None:
        """The parent process saw its child die, or stall; None if the lease had ended.

        A run that goes on is due ``delay`` seconds from now.
        """

        def end(connection: Connection, _run: Any) -> str | None:
            given = {"run_id": run_id, "epoch": epoch, "holder": holder, "reason": reason}
            row = ask(connection, leases.ABANDON_LEASE, given).first()
            return None if row is None else str(row.holder)

        return self.connections.transact(
            lambda c: _hand_over(
                c, runs.LOCK, run_id, epoch, end=end, kind="abandoned", why=reason, delay=delay
            )
        )

    def give_up(
        self,
        run_id: str,
        epoch: int,
        holder: str,
        outcome: bytes | None,
        *,
        reason: str,
        deliver: bool,
        settle_in: float,
        dead_letter: bool = False,
    ) -> bool:
        """The parent process fails its child's run; False if the lease had ended.

        The lease ends as reclaimed, so that a late commit of the child is refused.
        """
        given = {
            "run_id": run_id,
            "epoch": epoch,
            "holder": holder,
            "state": RunState.FAILED,
            "outcome": outcome,
            "reason": reason,
            "deliver_outcome": deliver,
            "settle_in": settle_in,
            "dead_letter": dead_letter,
        }

        def work(connection: Connection) -> bool:
            # In the order of every verb: the run, then its lease.
            run = ask(connection, runs.LOCK, given).first()
            if run is None or ask(connection, leases.ABANDON_LEASE, given).first() is None:
                return False
            ask(connection, holding.OUTCOME, given)
            add_event(connection, run_id, "failed", reason, epoch=epoch, holder=holder)
            return True

        return self.connections.transact(work)

    def of_holder(self, holder: str) -> Ended | None:
        """The lease that was granted to ``holder``, if it ever claimed."""
        row = self.connections.run(lambda c: ask(c, leases.OF_HOLDER, {"holder": holder}).first())
        return None if row is None else Ended(row.run_id, row.epoch, row.status)

    def sweep(self, most: int = 500) -> int:
        """Mend what no single failure explains; returns how many rows were touched.

        A live lease of a run that is not running is ended; a running run without a live
        lease becomes ready; a ready run that expired before its first claim is revoked.
        Looks at the next ``most`` runs and leases and goes on from there at the next call,
        so that a pass costs the same however many there are.
        """
        orphaned = self._next_orphaned(most)
        unheld, overdue = self._next_unfinished(most)
        touched = [self._end_orphan(run_id) for run_id in orphaned]
        touched += [self._free(run_id) for run_id in unheld]
        touched += [self.expire(run_id) for run_id in overdue]
        return sum(touched)

    def _next_orphaned(self, most: int) -> list[str]:
        given = {"after": self._after_lease, "most": most}
        rows = self.connections.run(lambda c: ask(c, leases.SWEPT, given))
        self._after_lease = rows[-1].run_id if len(rows) == most else ""
        return [
            row.run_id
            for row in rows
            if row.namespace == self.namespace and row.state in _NOT_RUNNING
        ]

    def _next_unfinished(self, most: int) -> tuple[list[str], list[str]]:
        given = {"namespace": self.namespace, "after": self._after_run, "most": most}
        rows = self.connections.run(lambda c: ask(c, runs.UNFINISHED, given))
        self._after_run = rows[-1].run_id if len(rows) == most else ""
        unheld = [row.run_id for row in rows if row.state == RunState.RUNNING and not row.held]
        overdue = [row.run_id for row in rows if row.state == RunState.READY and row.overdue]
        return unheld, overdue

    def expire(self, run_id: str) -> bool:
        """Revoke a ready run whose ``expires`` passed before its first claim."""
        given = {"run_id": run_id, "reason": "expired"}

        def work(connection: Connection) -> bool:
            if ask(connection, runs.EXPIRE, given).first() is None:
                return False
            add_event(connection, run_id, "revoked", "expired", epoch=0)
            return True

        return self.connections.transact(work)

    def _end_orphan(self, run_id: str) -> bool:
        def work(connection: Connection) -> bool:
            run = ask(connection, runs.LOCK_SKIP, {"run_id": run_id}).first()
            if run is None or run.state not in _NOT_RUNNING:
                return False
            given = {"run_id": run_id, "ended": LeaseStatus.RECLAIMED, "reason": "swept"}
            return ask(connection, leases.END_LEASE, given).first() is not None

        return self.connections.transact(work)

    def _free(self, run_id: str) -> bool:
        def end(connection: Connection, run: Any) -> str | None:
            alive = ask(connection, leases.LIVE_LEASE, {"run_id": run_id}).first()
            return run.holder or "" if alive is None else None

        return (
            self.connections.transact(
                lambda c: _hand_over(
                    c, runs.LOCK_SKIP, run_id, None, end=end, kind="reclaimed", why="swept"
                )
            )
            is not None
        )


def _hand_over(
    connection: Connection,
    lock: Any,
    run_id: str,
    epoch: int | None,
    *,
    end: Any,
    kind: str,
    why: str,
    delay: float = 0.0,
) -> HandedOver | None:
    """Lock the run, end its lease, ask the guard, move the run: always in this order."""
    run = ask(connection, lock, {"run_id": run_id}).first()
    if run is None or run.state != RunState.RUNNING or epoch not in (None, run.epoch):
        return None
    holder = end(connection, run)
    if holder is None:
        return None
    terms = Terms.load(run.policy)
    state, reason = judge(
        attempt=run.attempt,
        max_attempts=terms.max_attempts,
        recoveries=run.recoveries + 1,
        max_recoveries=terms.max_recoveries,
        on_reclaim=terms.on_reclaim,
    )
    restart = terms.on_reclaim == "restart" and state is RunState.READY
    ended = state in TERMINAL
    ask(
        connection,
        runs.HAND_OVER,
        {
            "run_id": run_id,
            "epoch": run.epoch,
            "state": state,
            "reason": reason,
            "restart": restart,
            "due": state is RunState.READY or ended,
            "delay": 0.0 if ended else delay,
            "ended": ended,
        },
    )
    if restart:
        ask(connection, runs.DROP_STAGES, {"run_id": run_id})
    add_event(connection, run_id, kind, why, epoch=run.epoch, holder=holder or None)
    if state is not RunState.READY:
        add_event(connection, run_id, str(state), reason, epoch=run.epoch)
    return HandedOver(run_id, run.epoch, state, reason)
