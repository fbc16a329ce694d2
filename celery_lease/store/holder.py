"""What a holder may do; every write is fenced by run, epoch and holder."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NoReturn

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from celery_lease.errors import (
    IllegalTransition,
    LeaseError,
    LeaseLost,
    StoreBusy,
    StoreUnavailable,
)
from celery_lease.statements import holder as holding
from celery_lease.states import LIVE, LeaseStatus, RunState
from celery_lease.store.failures import translate
from celery_lease.store.foundation import Foundation, add_event, ask
from celery_lease.store.results import Grant

__all__ = ["HolderVerbs"]

_LIVE = {str(status) for status in LIVE}


class HolderVerbs(Foundation):
    """Checkpoint, stage, and the ways a holder ends its own lease.

    All raise :class:`~celery_lease.errors.LeaseLost` when the run is no longer this
    holder's; nothing has been written then. A repeat of the verb that ended the lease, with
    the same outcome, is answered as accepted.
    """

    def check(self, grant: Grant) -> None:
        """Raise ``LeaseLost`` unless the run is still this holder's."""
        key = _key(grant)
        if self.connections.run(lambda c: ask(c, holding.CHECK, key).first()) is None:
            raise self._lost(grant)

    def checkpoint(
        self, grant: Grant, blob: bytes, *, progress: float | None = None, note: str | None = None
    ) -> bool:
        """Save progress under the epoch; True if the holder is asked to hand off."""
        given = {**_key(grant), "checkpoint": blob, "progress": progress, "note": note}

        def work(connection: Connection) -> bool:
            if ask(connection, holding.CHECKPOINT, given).first() is None:
                raise _Refused
            return _after_progress(connection, grant, "checkpoint")

        return bool(self._fenced(grant, work))

    def save_stage(
        self, grant: Grant, name: str, result: bytes, *, seconds: float | None = None
    ) -> bool:
        """Save a stage's result once; True if the holder is asked to hand off."""
        given = {**_key(grant), "name": name, "result": result, "seconds": seconds}

        def work(connection: Connection) -> bool:
            if ask(connection, holding.STAGE_DONE, given).first() is None:
                raise _Refused
            if ask(connection, holding.STAGE_KNOWN, given).first() is None:
                ask(connection, holding.STAGE_SAVE, given)
            return _after_progress(connection, grant, "stage")

        return bool(self._fenced(grant, work))

    def stages(self, run_id: str) -> dict[str, bytes]:
        """The saved stages of a run: name → encoded result."""
        return self.connections.run(
            lambda c: {row.name: row.result for row in ask(c, holding.STAGES, {"run_id": run_id})}
        )

    def hand_off(self, grant: Grant, reason: str) -> int:
        """End this lease and leave the run ready for its next message; returns the epoch."""
        return self._leave(grant, holding.HAND_OFF, RunState.READY, "handed_off", reason)

    def postpone(
        self,
        grant: Grant,
        envelope: bytes | None,
        delay: float,
        reason: str,
        *,
        charged: bool = False,
    ) -> int:
        """Leave the run ready ``delay`` seconds from now, with a new envelope if one is given.

        ``charged``: it was an attempt that failed, and counts as one.
        """
        given = {"envelope": envelope, "delay": max(delay, 0.0), "charged": charged}
        return self._leave(grant, holding.POSTPONE, RunState.READY, "postponed", reason, **given)

    def park(self, grant: Grant, reason: str) -> int:
        """Leave the run to a person."""
        return self._leave(grant, holding.PARK, RunState.PARKED, "parked", reason)

    def complete(
        self,
        grant: Grant,
        outcome: bytes | None,
        *,
        deliver: bool,
        settle_in: float,
        reason: str = "completed",
    ) -> None:
        """Commit the result; the run's only outcome until an operator resumes it."""
        self._end(
            grant,
            RunState.SUCCEEDED,
            outcome,
            reason=reason,
            deliver=deliver,
            settle_in=settle_in,
        )

    def fail(
        self,
        grant: Grant,
        outcome: bytes | None,
        *,
        reason: str,
        deliver: bool,
        settle_in: float,
        dead_letter: bool = False,
    ) -> None:
        """Commit a failure; the run's only outcome until an operator resumes it.

        ``dead_letter``: its message is left for the queue's dead-letter policy.
        """
        self._end(
            grant,
            RunState.FAILED,
            outcome,
            reason=reason,
            deliver=deliver,
            settle_in=settle_in,
            dead_letter=dead_letter,
        )

    def fence(self, session: Any, grant: Grant) -> None:
        """Lock and check the run in the caller's own transaction, before its COMMIT.

        Nobody else is granted the run until that transaction ends. Raises ``LeaseLost`` if
        it is not this holder's; the transaction cannot be committed then.
        """
        connection = self._joined(session)
        row = self._in_theirs(connection, holding.FENCE, _key(grant))
        if row is None:
            self._refuse(connection, grant)

    def checkpoint_within(
        self,
        session: Any,
        grant: Grant,
        blob: bytes,
        *,
        progress: float | None = None,
        note: str | None = None,
    ) -> tuple[bool, Callable[[], bool]]:
        """``checkpoint`` as a part of the caller's own transaction.

        Returns whether the holder is asked to hand off, and a function that tells whether
        that transaction is over.
        """
        connection = self._joined(session)
        given = {**_key(grant), "checkpoint": blob, "progress": progress, "note": note}
        if self._in_theirs(connection, holding.CHECKPOINT, given) is None:
            self._refuse(connection, grant)
        transaction = connection.get_transaction()
        try:
            asked = _after_progress(connection, grant, "checkpoint")
        except _Refused:
            self._refuse(connection, grant)
        return asked, lambda: transaction is None or not transaction.is_active

    def _joined(self, session: Any) -> Connection:
        """The connection of the caller's transaction, with limits set inside it.

        A stopped holder must not keep the run's row: PostgreSQL ends a transaction that is
        idle for longer than the statement time-out.
        """
        connection: Connection = (
            session if isinstance(session, Connection) else session.connection()
        )
        if connection.dialect.name != self.dialect:
            raise IllegalTransition(
                f"the session is on {connection.dialect.name}, the lease store on "
                f"{self.dialect}: `within` and `fence` need a transaction on the same database"
            )
        if self.dialect == "postgresql":
            lock = int(self.connections.lock_timeout * 1000)
            idle = int(self.connections.statement_timeout * 1000)
            connection.exec_driver_sql(
                f"SELECT set_config('lock_timeout', '{lock}', true), "
                f"set_config('idle_in_transaction_session_timeout', '{idle}', true)"
            )
        return connection

    def _in_theirs(self, connection: Connection, statement: Any, given: dict[str, Any]) -> Any:
        try:
            return ask(connection, statement, given).first()
        except DBAPIError as exc:
            raise translate(exc) from exc

    def _refuse(self, connection: Connection, grant: Grant) -> NoReturn:
        # A savepoint that swallows the error must not let the rows before it be committed.
        connection.invalidate()
        raise self._lost(grant)

    def _leave(
        self,
        grant: Grant,
        statement: Any,
        target: RunState,
        kind: str,
        reason: str,
        **values: Any,
    ) -> int:
        given = {**_key(grant), "reason": reason, **values}

        def work(connection: Connection) -> int:
            if ask(connection, statement, given).first() is None:
                raise _Refused
            _after_progress(connection, grant, kind)
            _release(connection, given)
            add_event(
                connection, grant.run_id, kind, reason, epoch=grant.epoch, holder=grant.holder
            )
            return grant.epoch

        def repeated(standing: Any) -> int | None:
            # The same verb leaves the same reason; the run may have gone on since.
            same = standing.state == target and standing.epoch == grant.epoch
            gone_on = target is RunState.READY and standing.epoch > grant.epoch
            return grant.epoch if standing.reason == reason and (same or gone_on) else None

        return int(self._fenced(grant, work, repeated))

    def _end(
        self,
        grant: Grant,
        state: RunState,
        outcome: bytes | None,
        *,
        reason: str,
        deliver: bool,
        settle_in: float,
        dead_letter: bool = False,
    ) -> None:
        given = {
            **_key(grant),
            "state": state,
            "outcome": outcome,
            "reason": reason,
            "deliver_outcome": deliver,
            "settle_in": settle_in,
            "dead_letter": dead_letter,
        }

        def work(connection: Connection) -> bool:
            if ask(connection, holding.OUTCOME, given).first() is None:
                raise _Refused
            _after_progress(connection, grant, "commit")
            _release(connection, given)
            return True

        def repeated(standing: Any) -> bool | None:
            same = standing.state == state and standing.epoch == grant.epoch
            return True if same and standing.outcome == outcome else None

        self._fenced(grant, work, repeated, holding.END_IN_ONE, given)

    def _fenced(
        self,
        grant: Grant,
        work: Callable[[Connection], Any],
        repeated: Callable[[Any], Any] | None = None,
        single: Any = None,
        given: Any = None,
    ) -> Any:
        """Do the work, or find out why it was refused: a repeat, or a lost lease."""
        try:
            if single is not None and self.connections.single_statements:
                if not self.connections.one(single, given):
                    raise _Refused
                return True
            return self.connections.transact(work)
        except _Refused:
            pass
        standing = self._standing(grant)
        if repeated is not None and standing is not None:
            answer = repeated(standing) if standing.status == LeaseStatus.RELEASED else None
            if answer is not None:
                return answer
        raise self._lost(grant, standing)

    def _standing(self, grant: Grant) -> Any:
        key = _key(grant)
        return self.connections.run(lambda c: ask(c, holding.STANDING, key).first())

    def _lost(self, grant: Grant, standing: Any = None) -> LeaseLost:
        if standing is None:
            standing = self._standing(grant)
        revoked = standing is not None and standing.status == LeaseStatus.REVOKED
        stalled = standing is not None and standing.reason == "stalled"
        reason = "revoked" if revoked else "stalled" if stalled else "reclaimed"
        # Without it the refusal stands; only its trace is missing.
        with contextlib.suppress(StoreUnavailable, StoreBusy):
            self.record(
                grant.run_id, "write_refused", reason, epoch=grant.epoch, holder=grant.holder
            )
        return LeaseLost(reason, grant.run_id, grant.epoch)


class _Refused(LeaseError):
    """The guard hit no row; the transaction is rolled back."""


def _key(grant: Grant) -> dict[str, Any]:
    return {"run_id": grant.run_id, "epoch": grant.epoch, "holder": grant.holder}


def _release(connection: Connection, given: dict[str, Any]) -> None:
    if ask(connection, holding.RELEASE, given).first() is None:
        raise _Refused


def _after_progress(connection: Connection, grant: Grant, what: str) -> bool:
    """Read the lease after the guard: is a yield asked for, was the holder a suspect?"""
    flags = ask(connection, holding.LEASE_FLAGS, _key(grant)).first()
    if flags is None or flags.status not in _LIVE:
        raise _Refused
    if flags.status == LeaseStatus.SUSPECT:
        add_event(
            connection,
            grant.run_id,
            "recovered",
            f"a {what} of a suspect holder",
            epoch=grant.epoch,
            holder=grant.holder,
        )
    return bool(flags.yield_requested)
