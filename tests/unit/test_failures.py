from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy.exc import DBAPIError, IntegrityError, OperationalError

from celery_lease.errors import SchemaMissing, StoreBusy, StoreUnavailable
from celery_lease.store.failures import Conflict, Repeat, translate, translate_driver


class DriverError(Exception):
    def __init__(self, text: str = "", sqlstate: str | None = None) -> None:
        super().__init__(text)
        self.sqlstate = sqlstate


class OperationalDriverError(DriverError):
    pass


OperationalDriverError.__name__ = "OperationalError"


def failure(orig: DriverError, *, broken: bool = False, kind: Any = OperationalError) -> DBAPIError:
    error: DBAPIError = kind("SELECT 1", {}, orig)
    error.connection_invalidated = broken
    return error


@pytest.mark.parametrize("sqlstate", ["40001", "40P01"])
def test_a_serialization_failure_and_a_deadlock_may_be_repeated(sqlstate: str) -> None:
    assert isinstance(translate(failure(DriverError("gave up", sqlstate))), Repeat)


def test_a_broken_connection_may_be_repeated_on_a_new_one() -> None:
    assert isinstance(translate(failure(DriverError("closed"), broken=True)), Repeat)
    assert isinstance(translate_driver(DriverError("closed"), broken=True), Repeat)


@pytest.mark.parametrize("error", [DriverError("x", "42P01"), DriverError("no such table: run")])
def test_a_missing_table_names_the_command_that_makes_it(error: DriverError) -> None:
    for meaning in (translate(failure(error)), translate_driver(error, broken=False)):
        assert isinstance(meaning, SchemaMissing)
        assert "celery -A yourapp lease init-db" in str(meaning)


@pytest.mark.parametrize(
    "error", [DriverError("lock timeout", "55P03"), OperationalDriverError("database is locked")]
)
def test_a_locked_row_or_file_is_busy_and_not_unreachable(error: DriverError) -> None:
    assert isinstance(translate(failure(error)), StoreBusy)
    assert isinstance(translate_driver(error, broken=False), StoreBusy)


@pytest.mark.parametrize("sqlstate", ["57014", "57P01", "53300", "08006", "25P03", "XX000"])
def test_a_server_that_cannot_serve_is_unavailable(sqlstate: str) -> None:
    assert isinstance(translate(failure(DriverError("sorry", sqlstate))), StoreUnavailable)


def test_a_connection_that_cannot_be_made_is_unavailable() -> None:
    error = OperationalDriverError("connection refused")
    assert isinstance(translate(failure(error)), StoreUnavailable)
    assert isinstance(translate_driver(error, broken=False), StoreUnavailable)


@pytest.mark.parametrize("sqlstate", ["22003", "23502", "42601", "42501"])
def test_a_mistake_of_ours_is_not_hidden(sqlstate: str) -> None:
    error = failure(DriverError("mistake", sqlstate), kind=IntegrityError)
    assert translate(error) is error
    driver = DriverError("mistake", sqlstate)
    assert translate_driver(driver, broken=False) is driver


@pytest.mark.parametrize(
    "error", [DriverError("duplicate key", "23505"), DriverError("UNIQUE constraint failed: run")]
)
def test_a_key_that_is_taken_means_that_somebody_was_first(error: DriverError) -> None:
    assert isinstance(translate(failure(error, kind=IntegrityError)), Conflict)
    assert isinstance(translate_driver(error, broken=False), Conflict)


def test_a_message_is_one_line() -> None:
    meaning = translate(failure(DriverError("first\nsecond", "57P01")))
    assert "first" in str(meaning)
    assert "second" not in str(meaning)
