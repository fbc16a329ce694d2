"""Enqueue and claim."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection

from celery_lease.policy import Terms
from celery_lease.statements import claims, runs
from celery_lease.states import LIVE, RunState
from celery_lease.store.failures import Conflict
from celery_lease.store.foundation import Foundation, add_event, ask
from celery_lease.store.results import Grant, Refusal

__all__ = ["Claims"]


class Claims(Foundation):
    """How a run comes into being and into somebody's hands."""

    def claim(
        self,
        run_id: str,
        expected: int,
        holder: str,
        *,
        task: str,
        terms: Terms,
        node: str | None = None,
        envelope: bytes | None = None,
        deliver: bool = True,
    ) -> Grant | Refusal:
        """Compare-and-swap on the epoch: one winner, the others get a :class:`Refusal`.

        Grants the run if it has no row and ``expected`` is 0, or if it is ready at
        ``expected`` and due. Never ends another lease. A repeat by the same ``holder`` is
        granted again. ``envelope`` is stored by the first claim; ``deliver`` says whether
        the outcome has to reach a result backend or callbacks.
        """
        given: dict[str, Any] = {
            "run_id": run_id,
            "expected": expected,
            "holder": holder,
            "node": node,
            "namespace": self.namespace,
            "task": task,
            "policy": terms.dump(),
            "duration": terms.duration,
            "envelope": envelope,
            "deliver": deliver,
        }
        try:
            row = self._claim_in_one(given) if self._one else self._claim_in_steps(given)
        except Conflict:
            row = None  # another claim was first, or the holder has another run
        if row is not None:
            return _grant(row, holder)
        return self._refused(given)

    @property
    def _one(self) -> bool:
        return self.connections.single_statements

    def _claim_in_one(self, given: dict[str, Any]) -> Any:
        statement = claims.CLAIM_NEXT if given["expected"] else claims.CLAIM_NEW_OR_NEXT
        return next(iter(self.connections.one(statement, given)), None)

    def _claim_in_steps(self, given: dict[str, Any]) -> Any:
        view = self.view(given["run_id"])
        if not _worth_a_write(view, given["expected"]):
            return None
        return self.connections.transact(lambda c: _take(c, given))

    def _refused(self, given: dict[str, Any]) -> Grant | Refusal:
        view = self.view(given["run_id"])
        if view is None:
            return Refusal(None, busy=given["expected"] == 0)
        if (
            view.holder == given["holder"]
            and view.state is RunState.RUNNING
            and view.lease_status in LIVE
        ):
            return self._granted_again(given["run_id"], view.epoch, given["holder"])
        claimable = (
            view.state is RunState.READY
            and view.epoch == given["expected"]
            and view.due_in <= 0
            and not view.overdue
        )
        return Refusal(view, busy=claimable)

    def _granted_again(self, run_id: str, epoch: int, holder: str) -> Grant | Refusal:
        row = self.connections.run(lambda c: ask(c, runs.READ, {"run_id": run_id}).first())
        if row is None or row.epoch != epoch or row.holder != holder:
            return Refusal(self.view(run_id), busy=True)
        return _grant(row, holder)

    def enqueue(
        self,
        run_id: str,
        *,
        task: str,
        terms: Terms,
        envelope: bytes | None,
        deliver: bool = True,
        delay: float = 0.0,
        expires_in: float | None = None,
        attempt: int = 0,
        reason: str | None = None,
    ) -> bool:
        """Register a run at epoch 0, due ``delay`` seconds from now; its trigger with it.

        Returns False, having done nothing, if the id is in use. ``attempt`` is 1 when a
        child died with the message before it could claim.
        """
        given = self._registered(
            run_id, task=task, terms=terms, envelope=envelope, deliver=deliver, reason=reason
        )
        given |= {"delay": delay, "expires_in": expires_in, "attempt": attempt, "due": True}
        return self.connections.transact(lambda c: self._register(c, given, "enqueued"))

    def _registered(
        self,
        run_id: str,
        *,
        task: str,
        terms: Terms | None,
        envelope: bytes | None,
        deliver: bool,
        reason: str | None,
    ) -> dict[str, Any]:
        return {
            "run_id": run_id,
            "namespace": self.namespace,
            "task": task,
            "policy": terms.dump() if terms is not None else "{}",
            "state": RunState.READY,
            "envelope": envelope,
            "deliver": deliver,
            "delay": 0.0,
            "expires_in": None,
            "attempt": 0,
            "due": False,
            "settled": False,
            "reason": reason,
        }

    def _register(self, connection: Connection, given: dict[str, Any], kind: str) -> bool:
        statement = runs.ENQUEUE if self.dialect == "postgresql" else runs.ENQUEUE_SQLITE
        if ask(connection, statement, given).first() is None:
            return False
        add_event(connection, given["run_id"], kind, given["reason"], epoch=0)
        return True


def _worth_a_write(view: Any, expected: int) -> bool:
    """A refused duplicate reads and writes nothing."""
    if view is None:
        return expected == 0
    return bool(view.state is RunState.READY and view.epoch == expected)


def _take(connection: Connection, given: dict[str, Any]) -> Any:
    row: Any = ask(connection, claims.TAKE, given).first()
    if row is None:
        known = ask(connection, runs.ENVELOPE, {"run_id": given["run_id"]}).first()
        if known is not None or given["expected"]:
            return None
        ask(connection, claims.INSERT_RUNNING, given)
        row = _First(given["run_id"])
    ask(connection, claims.GRANT, {**given, "epoch": row.epoch})
    return row


class _First:
    """The row of a first claim, as RETURNING would give it."""

    epoch = 1
    attempt = 1
    recoveries = 0
    checkpoint = None
    progress = None

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id


def _grant(row: Any, holder: str) -> Grant:
    return Grant(
        run_id=row.run_id,
        epoch=row.epoch,
        holder=holder,
        attempt=row.attempt,
        recoveries=row.recoveries,
        checkpoint=row.checkpoint,
        progress=row.progress,
    )
