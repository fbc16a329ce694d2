"""The database's clock, the only one that decides.

``now()`` stands still during a transaction, and in a statement that waited for a row it is
the time before the wait; so each dialect's moving clock is asked for.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import ColumnElement, Double, literal_column, select
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement

from celery_lease.statements.parameters import p

__all__ = ["at_start", "due", "in_seconds", "now"]


class now(FunctionElement[float]):  # noqa: N801 - reads as the SQL function it is
    """Seconds since the epoch by the database's clock, at the moment of evaluation."""

    type = Double()
    inherit_cache = True
    name = "now"


@compiles(now, "postgresql")
def _postgresql(element: now, compiler: Any, **kw: Any) -> str:
    return "CAST(EXTRACT(EPOCH FROM clock_timestamp()) AS DOUBLE PRECISION)"


@compiles(now, "sqlite")
def _sqlite(element: now, compiler: Any, **kw: Any) -> str:
    return "((julianday('now') - 2440587.5) * 86400.0)"


@compiles(now, "mysql")
@compiles(now, "mariadb")
def _mysql(element: now, compiler: Any, **kw: Any) -> str:
    return "UNIX_TIMESTAMP(SYSDATE(6))"


def in_seconds(parameter: str) -> ColumnElement[float]:
    """The database's time ``parameter`` seconds from now (a bound parameter)."""
    return now() + p(parameter, Double)


def at_start() -> ColumnElement[float]:
    """The database's time once a statement, for scans: a moving clock is asked at each row,
    and no index can be searched for it.
    """
    return select(now()).scalar_subquery()


def due(column: ColumnElement[Any]) -> ColumnElement[bool]:
    """``column`` holds a time that has come."""
    return column <= now()


#: SQL's null, typed as a time.
NEVER: ColumnElement[float] = literal_column("NULL", Double)
