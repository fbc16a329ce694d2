"""What every group of verbs stands on: connections, events, one run seen by one statement."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from sqlalchemy import Connection, Executable

from celery_lease.policy import grace_of
from celery_lease.statements import runs, stories
from celery_lease.statements.parameters import prefixed
from celery_lease.states import LeaseStatus, RunState, RunView
from celery_lease.store.connections import Connections

__all__ = ["Foundation", "Rows", "add_event", "ask"]

T = TypeVar("T")
_NEVER = 0.0


class Foundation:
    """A namespace of a store and its connections."""

    def __init__(
        self,
        url: str,
        *,
        namespace: str = "default",
        options: Mapping[str, Any] | None = None,
        statement_timeout: float = 5.0,
        lock_timeout: float = 2.0,
        connect_timeout: float = 5.0,
    ) -> None:
        self.namespace = namespace
        self.connections = Connections(
            url,
            options=options,
            statement_timeout=statement_timeout,
            lock_timeout=lock_timeout,
            connect_timeout=connect_timeout,
        )

    @property
    def dialect(self) -> str:
        """SQLAlchemy's name of the database: ``postgresql``, ``sqlite``."""
        return self.connections.dialect

    def dispose(self) -> None:
        """Close the connections that this process opened."""
        self.connections.dispose()

    def view(self, run_id: str) -> RunView | None:
        """The run as one statement sees it now, or None; locks nothing."""
        row = self.connections.run(
            lambda connection: ask(connection, runs.VIEW, {"run_id": run_id}).first()
        )
        return None if row is None else _as_view(row)

    def record(
        self,
        run_id: str,
        kind: str,
        reason: str | None = None,
        *,
        epoch: int | None = None,
        holder: str | None = None,
    ) -> None:
        """Append one event; ids and reasons only, never a payload."""
        self.connections.run(
            lambda connection: add_event(
                connection, run_id, kind, reason, epoch=epoch, holder=holder
            )
        )


class Rows(list[Any]):
    """All rows of a statement."""

    def first(self) -> Any:
        """The first row, or None."""
        return self[0] if self else None


def ask(connection: Connection, statement: Executable, given: Mapping[str, Any]) -> Rows:
    """The rows of one of the library's statements, with plainly named parameters.

    They are read at once, also where nobody looks at them: a statement of SQLite's is not
    over before, and what it wrote is not committed.
    """
    result = connection.execute(statement, prefixed(given))
    return Rows(result.all()) if result.returns_rows else Rows()


def add_event(
    connection: Connection,
    run_id: str,
    kind: str,
    reason: str | None = None,
    *,
    epoch: int | None = None,
    holder: str | None = None,
) -> None:
    """Append an event in the transaction of ``connection``."""
    ask(
        connection,
        stories.ADD_EVENT,
        {"run_id": run_id, "epoch": epoch, "holder": holder, "kind": kind, "reason": reason},
    )


def _as_view(row: Any) -> RunView:
    grace = grace_of(row.policy)
    return RunView(
        state=_known(RunState, row.state),
        epoch=row.epoch,
        holder=row.holder,
        attempt=row.attempt,
        untriggered=bool(row.untriggered),
        due_in=_or_never(row.due_in),
        overdue=bool(row.overdue),
        settled=row.settled_at is not None,
        settle_in=_or_never(row.settle_in),
        dead_letter=bool(row.dead_letter),
        lease_status=None if row.status is None else _known(LeaseStatus, row.status),
        lease_left=_or_never(row.lease_left),
        grace_left=grace - row.suspect_for if row.suspect_for is not None else grace,
        grace=grace,
    )


def _known(words: Callable[[str], T], word: str) -> T | str:
    """The member of an enum, or the word itself if only a newer release has it."""
    try:
        return words(word)
    except ValueError:
        return word


def _or_never(value: float | None) -> float:
    return _NEVER if value is None else value
