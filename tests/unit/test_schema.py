from __future__ import annotations

import re
from collections.abc import Iterator
from enum import StrEnum

import pytest
from sqlalchemy import CheckConstraint, Connection, Double, Table, create_engine, insert
from sqlalchemy.exc import IntegrityError

from celery_lease import schema
from celery_lease.schema import lease, metadata, run
from celery_lease.states import LIVE, TERMINAL, TRANSITIONS, LeaseStatus, RunState
from celery_lease.testing.clock import TIMES

#: Columns of numbers that are no times.
NO_TIMES = {"progress", "duration", "seconds"}


@pytest.fixture
def connection() -> Iterator[Connection]:
    """A database with nothing but the library's tables, in memory."""
    engine = create_engine("sqlite://")
    metadata.create_all(engine)
    with engine.connect() as made:
        yield made


def a_run(**changes: object) -> dict[str, object]:
    values: dict[str, object] = {
        "run_id": "a",
        "namespace": "n",
        "task": "t",
        "policy": "{}",
        "state": RunState.READY,
        "epoch": 0,
        "deliver": True,
        "created_at": 0.0,
    }
    return {**values, **changes}


def a_lease(**changes: object) -> dict[str, object]:
    values: dict[str, object] = {
        "run_id": "a",
        "epoch": 1,
        "holder": "h",
        "status": LeaseStatus.ACTIVE,
        "duration": 90.0,
        "acquired_at": 0.0,
        "expires_at": 90.0,
        "heartbeat_at": 0.0,
    }
    return {**values, **changes}


def checked_values(table: Table, name: str) -> set[str]:
    (constraint,) = (
        one
        for one in table.constraints
        if isinstance(one, CheckConstraint) and str(one.name).endswith(name)
    )
    return set(re.findall(r"'(\w+)'", str(constraint.sqltext)))


class TestEnumTableAndConstraintsHoldTogether:
    def test_in_the_states_of_a_run(self) -> None:
        in_transitions = {
            state for row in TRANSITIONS.values() for state in (row.sources | row.targets)
        } - {None}
        assert checked_values(run, "run_state") == {str(state) for state in RunState}
        assert in_transitions == set(RunState)

    def test_in_the_statuses_of_a_lease(self) -> None:
        in_transitions = {row.lease for row in TRANSITIONS.values()} - {None}
        assert checked_values(lease, "lease_status") == {str(status) for status in LeaseStatus}
        assert in_transitions == set(LeaseStatus)

    def test_in_what_counts_as_live(self) -> None:
        (index,) = (one for one in lease.indexes if str(one.name).endswith("lease_live"))
        where = str(index.dialect_options["postgresql"]["where"])
        assert set(re.findall(r"'(\w+)'", where)) == {str(status) for status in LIVE}
        assert index.unique

    @pytest.mark.parametrize("state", RunState)
    def test_as_the_database_takes_every_state_there_is(
        self, connection: Connection, state: StrEnum
    ) -> None:
        connection.execute(insert(run).values(a_run(state=state)))

    @pytest.mark.parametrize("state", ["", "done", "READY"])
    def test_as_the_database_refuses_every_other(self, connection: Connection, state: str) -> None:
        with pytest.raises(IntegrityError):
            connection.execute(insert(run).values(a_run(state=state)))

    @pytest.mark.parametrize("status", LeaseStatus)
    def test_as_the_database_takes_every_status_there_is(
        self, connection: Connection, status: StrEnum
    ) -> None:
        connection.execute(insert(lease).values(a_lease(status=status)))

    def test_as_the_database_refuses_an_unknown_status(self, connection: Connection) -> None:
        with pytest.raises(IntegrityError):
            connection.execute(insert(lease).values(a_lease(status="lost")))


class TestTheDatabaseItselfRefuses:
    def test_a_second_live_lease_of_a_run(self, connection: Connection) -> None:
        connection.execute(insert(lease).values(a_lease(status=LeaseStatus.SUSPECT)))
        with pytest.raises(IntegrityError):
            connection.execute(insert(lease).values(a_lease(epoch=2, holder="other")))

    def test_two_grants_of_one_epoch(self, connection: Connection) -> None:
        connection.execute(insert(lease).values(a_lease(status=LeaseStatus.RELEASED)))
        with pytest.raises(IntegrityError):
            connection.execute(insert(lease).values(a_lease(holder="other")))

    def test_two_grants_to_one_holder(self, connection: Connection) -> None:
        connection.execute(insert(lease).values(a_lease()))
        with pytest.raises(IntegrityError):
            connection.execute(insert(lease).values(a_lease(run_id="b")))

    def test_a_negative_epoch(self, connection: Connection) -> None:
        with pytest.raises(IntegrityError):
            connection.execute(insert(run).values(a_run(epoch=-1)))

    def test_two_rows_of_one_run(self, connection: Connection) -> None:
        connection.execute(insert(run).values(a_run()))
        with pytest.raises(IntegrityError):
            connection.execute(insert(run).values(a_run()))


def test_an_ended_lease_leaves_room_for_the_next(connection: Connection) -> None:
    for epoch, status in enumerate([*set(LeaseStatus) - LIVE, LeaseStatus.ACTIVE], start=1):
        values = a_lease(epoch=epoch, status=status, holder=f"h{epoch}")
        connection.execute(insert(lease).values(values))


def test_no_index_holds_a_column_that_a_renewal_changes() -> None:
    changed = {"heartbeat_at", "expires_at", "suspect_at", "yield_requested"}
    for index in lease.indexes:
        assert not changed & {column.name for column in index.columns}
        assert not changed & set(re.findall(r"\w+", str(index.dialect_options["postgresql"])))


def test_every_table_carries_the_prefix() -> None:
    assert all(name.startswith("celery_lease_") for name in metadata.tables)
    assert {getattr(schema, name) for name in schema.__all__ if name != "metadata"} == set(
        metadata.tables.values()
    )


def test_the_clock_for_tests_knows_every_column_that_holds_a_time() -> None:
    for table in metadata.tables.values():
        doubles = {column.name for column in table.columns if isinstance(column.type, Double)}
        assert doubles - NO_TIMES == set(TIMES[table.name])


def test_terminal_states_are_those_that_end() -> None:
    assert {RunState.SUCCEEDED, RunState.FAILED, RunState.REVOKED} == TERMINAL
