"""Named parameters. Inside INSERT and UPDATE a parameter may not be called like a column,
so all are prefixed; the store speaks the plain names and ``prefixed`` translates.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import BindParameter, bindparam

__all__ = ["p", "prefixed"]

_PREFIX = "p_"


def p(name: str, type_: Any = None) -> BindParameter[Any]:
    """The parameter that the store calls ``name``."""
    return bindparam(_PREFIX + name, type_=type_)


def prefixed(given: Mapping[str, Any]) -> dict[str, Any]:
    """The values of ``given`` under the names that the statements use."""
    return {_PREFIX + name: value for name, value in given.items()}
