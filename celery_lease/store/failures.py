"""What a database error means for the library."""

from __future__ import annotations

from sqlalchemy.exc import DBAPIError

from celery_lease.errors import LeaseError, SchemaMissing, StoreBusy, StoreUnavailable

__all__ = ["Conflict", "Repeat", "translate", "translate_driver"]

_REPEATABLE = {"40001", "40P01"}
_MISSING_TABLE = {"42P01", "3F000"}
_LOCKED = {"55P03"}
_TAKEN = {"23505"}
_NOT_OURS_TO_HIDE = ("22", "23", "42")


class Conflict(LeaseError):
    """Somebody else inserted a row with this key first."""


class Repeat(LeaseError):
    """The transaction was rolled back by the database and may be repeated at once."""


def translate(exc: DBAPIError) -> Exception:
    """The library's error for ``exc``, or ``exc`` itself if it shows a mistake of ours."""
    return _meaning(exc.orig, broken=exc.connection_invalidated) or exc


def translate_driver(exc: Exception, *, broken: bool) -> Exception:
    """The same for an error as the driver raised it; ``broken``: its connection is gone."""
    return _meaning(exc, broken=broken) or exc


def _meaning(orig: BaseException | None, *, broken: bool) -> LeaseError | None:
    code = getattr(orig, "sqlstate", None) or getattr(orig, "pgcode", None)
    text = str(orig)
    if code in _MISSING_TABLE or "no such table" in text:
        return SchemaMissing(
            "the tables of the lease store are missing; "
            f"make them with: celery -A yourapp lease init-db ({_first_line(text)})"
        )
    if code in _REPEATABLE or broken:
        return Repeat(f"the lease store gave up the transaction: {_first_line(text)}")
    if code in _LOCKED or "database is locked" in text or "database is busy" in text:
        return StoreBusy(f"the lease store stayed locked: {_first_line(text)}")
    if code in _TAKEN or text.startswith("UNIQUE constraint failed"):
        return Conflict(_first_line(text))
    if code and code.startswith(_NOT_OURS_TO_HIDE):
        return None
    if not code and not _is_operational(orig):
        return None
    return StoreUnavailable(f"the lease store cannot be reached: {_first_line(text)}")


def _is_operational(orig: BaseException | None) -> bool:
    """By name, since each driver has its own classes, with subclasses."""
    names = {kind.__name__ for kind in type(orig).__mro__}
    return bool(names & {"OperationalError", "InterfaceError", "InternalError"})


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else "no message"
