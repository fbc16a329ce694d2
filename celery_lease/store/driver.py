"""One statement straight through the driver, for the verbs that every run needs.

SQLAlchemy builds and compiles the statement once; its execution machinery would cost more
than the database does for a claim. The pool, its connections and their settings are the
same as for every other verb.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from sqlalchemy import Dialect, Executable

from celery_lease.statements.parameters import prefixed

__all__ = ["Direct"]


@dataclass(slots=True)
class _Compiled:
    text: str
    constants: Mapping[str, Any]
    row: Callable[..., Any] | None = None


class Direct:
    """Executes the library's statements on a driver's own connection."""

    def __init__(self) -> None:
        self._compiled: dict[Executable, _Compiled] = {}

    @staticmethod
    def understands(dialect: Dialect) -> bool:
        """Whether parameters go to the driver by name, as the statements have them."""
        return dialect.paramstyle == "pyformat"

    def execute(
        self, dialect: Dialect, connection: Any, statement: Executable, given: Mapping[str, Any]
    ) -> list[Any]:
        """The rows of ``statement``, with their columns as attributes."""
        compiled = self._compiled.get(statement)
        if compiled is None:
            compiled = self._compiled[statement] = _compile(statement, dialect)
        with connection.cursor() as cursor:
            cursor.execute(compiled.text, {**compiled.constants, **prefixed(given)})
            if compiled.row is None:
                compiled.row = _row_type([column[0] for column in cursor.description])
            return [compiled.row(*values) for values in cursor.fetchall()]


def _row_type(names: list[str]) -> Callable[..., Any]:
    return namedtuple("Row", names)  # noqa: PYI024 - known at run time


def _compile(statement: Any, dialect: Dialect) -> _Compiled:
    compiled = statement.compile(dialect=dialect)
    constants = {
        name: value.value if isinstance(value, Enum) else value
        for name, value in compiled.params.items()
    }
    return _Compiled(str(compiled), constants)
