"""What a statement reads in the policy that a run stores as JSON."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Double
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement

from celery_lease.schema import run

__all__ = ["grace"]


class grace(FunctionElement[float]):  # noqa: N801 - reads as the SQL function it is
    """Seconds from suspect to hand-over, by the policy in the run's row."""

    type = Double()
    inherit_cache = True
    name = "grace"

    def __init__(self) -> None:
        super().__init__(run.c.policy)


@compiles(grace, "postgresql")
def _postgresql(element: grace, compiler: Any, **kw: Any) -> str:
    policy = compiler.process(element.clauses, **kw)
    return f"CAST(CAST({policy} AS JSON) ->> 'grace' AS DOUBLE PRECISION)"


@compiles(grace, "sqlite")
@compiles(grace, "mysql")
@compiles(grace, "mariadb")
def _json_extract(element: grace, compiler: Any, **kw: Any) -> str:
    return f"JSON_EXTRACT({compiler.process(element.clauses, **kw)}, '$.grace')"
