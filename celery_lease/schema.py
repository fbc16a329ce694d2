"""The tables, their constraints and indexes.

Every time is a double: seconds since the epoch by the *database's* clock (see
``statements.clock``), so that arithmetic with durations is the same SQL on every database.
``to_timestamp(expires_at)`` shows one in psql.
"""

from __future__ import annotations

from sqlalchemy import (
    DDL,
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Double,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    text,
)
from sqlalchemy import event as event_api

from celery_lease.states import LeaseStatus, RunState

__all__ = ["event", "lease", "metadata", "run", "stage", "worker"]

_PREFIX = "celery_lease_"
_LIVE = "status IN ('active', 'suspect')"
_SUSPECT = "status = 'suspect'"

metadata = MetaData()


def _known(column: str, values: type[RunState | LeaseStatus]) -> str:
    return f"{column} IN ({', '.join(repr(str(value)) for value in values)})"


# SQLite gives INTEGER PRIMARY KEY its own row ids; BIGINT would not count up there.
_Id = BigInteger().with_variant(Integer(), "sqlite")

run = Table(
    _PREFIX + "run",
    metadata,
    Column("run_id", String(255), primary_key=True),
    Column("namespace", String(255), nullable=False),
    Column("task", String(255), nullable=False),
    Column("policy", Text, nullable=False),
    Column("state", String(16), nullable=False),
    Column("epoch", BigInteger, nullable=False),
    Column("holder", String(255)),
    Column("attempt", Integer, nullable=False, server_default="0"),
    Column("recoveries", Integer, nullable=False, server_default="0"),
    Column("checkpoint", LargeBinary),
    Column("progress", Double),
    Column("note", Text),
    Column("envelope", LargeBinary),
    Column("deliver", Boolean, nullable=False),
    Column("not_before", Double),
    Column("expires", Double),
    Column("trigger_due", Double),
    Column("triggers", Integer, nullable=False, server_default="0"),
    Column("outcome", LargeBinary),
    # The message of the failed execution stays, for its queue's dead-letter policy.
    Column("dead_letter", Boolean, nullable=False, server_default=text("false")),
    Column("reason", Text),
    Column("settle_by", Double),
    Column("replays", Integer, nullable=False, server_default="0"),
    Column("settled_at", Double),
    Column("created_at", Double, nullable=False),
    Column("finished_at", Double),
    CheckConstraint(_known("state", RunState), name=_PREFIX + "run_state"),
    CheckConstraint("epoch >= 0", name=_PREFIX + "run_epoch"),
    Index(
        _PREFIX + "run_due",
        "trigger_due",
        postgresql_where=text("trigger_due IS NOT NULL"),
        sqlite_where=text("trigger_due IS NOT NULL"),
    ),
    Index(
        _PREFIX + "run_unfinished",
        "run_id",
        postgresql_where=text("finished_at IS NULL"),
        sqlite_where=text("finished_at IS NULL"),
    ),
)

# Narrow, and updated by every renewal: no index holds a column that a renewal changes, and a
# third of each page stays free, so that renewals are heap-only on PostgreSQL.
lease = Table(
    _PREFIX + "lease",
    metadata,
    Column("run_id", String(255), primary_key=True),
    Column("epoch", BigInteger, primary_key=True, autoincrement=False),
    Column("holder", String(255), nullable=False, unique=True),
    Column("node", String(255)),
    Column("status", String(16), nullable=False),
    Column("duration", Double, nullable=False),
    Column("acquired_at", Double, nullable=False),
    Column("expires_at", Double, nullable=False),
    Column("heartbeat_at", Double, nullable=False),
    Column("suspect_at", Double),
    Column("yield_requested", Boolean, nullable=False, server_default=text("false")),
    Column("ended_at", Double),
    Column("reason", Text),
    CheckConstraint(_known("status", LeaseStatus), name=_PREFIX + "lease_status"),
    Index(
        _PREFIX + "lease_live",
        "run_id",
        unique=True,
        postgresql_where=text(_LIVE),
        sqlite_where=text(_LIVE),
    ),
    Index(
        _PREFIX + "lease_suspect",
        "run_id",
        postgresql_where=text(_SUSPECT),
        sqlite_where=text(_SUSPECT),
    ),
)

event_api.listen(
    lease,
    "after_create",
    DDL(  # type: ignore[no-untyped-call]  # SQLAlchemy leaves its constructor untyped
        f"ALTER TABLE {lease.name} SET (fillfactor = 70)"
    ).execute_if(dialect="postgresql"),
)

stage = Table(
    _PREFIX + "stage",
    metadata,
    Column("run_id", String(255), primary_key=True),
    Column("name", String(255), primary_key=True),
    Column("epoch", BigInteger, nullable=False),
    Column("result", LargeBinary, nullable=False),
    Column("saved_at", Double, nullable=False),
    Column("seconds", Double),
)

event = Table(
    _PREFIX + "event",
    metadata,
    Column("id", _Id, primary_key=True, autoincrement=True),
    Column("run_id", String(255), nullable=False),
    Column("epoch", BigInteger),
    Column("holder", String(255)),
    Column("kind", String(64), nullable=False),
    Column("reason", Text),
    Column("at", Double, nullable=False),
    Index(_PREFIX + "event_run", "run_id", "id"),
)

worker = Table(
    _PREFIX + "worker",
    metadata,
    Column("node", String(255), primary_key=True),
    Column("namespace", String(255), nullable=False),
    Column("host", String(255)),
    Column("pid", Integer),
    Column("pool", String(64)),
    Column("queues", Text),
    Column("versions", Text),
    Column("started_at", Double, nullable=False),
    Column("heartbeat_at", Double, nullable=False),
)
