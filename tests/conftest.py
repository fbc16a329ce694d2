"""Fixtures for every tier: stores on both databases, and the database's clock.

Tests are independent because each has a namespace and run ids of its own; a process of
pytest-xdist has a PostgreSQL database of its own, a test an SQLite file of its own.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from celery_lease.policy import LeasePolicy, Terms
from celery_lease.settings import Settings
from celery_lease.store import Store
from celery_lease.testing.clock import advance_database_clock
from tests import services

DATABASES = ("sqlite", "postgresql")
TIERS = ("unit", "conformance", "races", "integration", "acceptance")
_TESTS = Path(__file__).parent
#: A connection that cleans up, once this process has a PostgreSQL database.
_SWEEPER = pytest.StashKey[psycopg.Connection[Any]]()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test belongs to the tier whose folder it is in."""
    for item in items:
        if item.path.is_relative_to(_TESTS):
            tier = item.path.relative_to(_TESTS).parts[0]
            if tier in TIERS:
                item.add_marker(getattr(pytest.mark, tier))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Mutation tests are slow and asked for by their folder's name: `pytest tests/mutation`."""
    folder = _TESTS / "mutation"
    if collection_path != folder:
        return None
    return not any(
        Path(asked.split("::")[0]).resolve().is_relative_to(folder) for asked in config.args
    )


@pytest.fixture(scope="session")
def postgresql_server() -> str:
    """The URL of a PostgreSQL server on which databases may be made."""
    try:
        return services.find_postgresql()
    except services.ServiceMissing as exc:
        services.missing(str(exc))


@pytest.fixture(scope="session")
def postgresql_url(postgresql_server: str, pytestconfig: pytest.Config) -> Iterator[str]:
    """A PostgreSQL database of this test process, with the library's tables in it."""
    purpose = os.environ.get("PYTEST_XDIST_WORKER", "main")
    with services.fresh_postgresql_database(postgresql_server, purpose) as url:
        store = Store(url)
        store.create_schema()
        store.dispose()
        with psycopg.connect(services.libpq(url), autocommit=True) as connection:
            pytestconfig.stash[_SWEEPER] = connection
            yield url


@pytest.fixture
def empty_postgresql_url(postgresql_server: str) -> Iterator[str]:
    """A PostgreSQL database of this test alone, without any table."""
    with services.fresh_postgresql_database(postgresql_server, "empty") as url:
        yield url


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    """An SQLite file of this test, not made yet."""
    return f"sqlite:///{tmp_path / 'leases.sqlite3'}"


@pytest.fixture(params=DATABASES)
def database(request: pytest.FixtureRequest) -> str:
    """The database a test runs on; ``tests/races`` narrows it to PostgreSQL."""
    return str(request.param)


@pytest.fixture
def store_url(request: pytest.FixtureRequest, database: str) -> str:
    """The SQLAlchemy URL behind ``store``."""
    return str(request.getfixturevalue(f"{database}_url"))


@pytest.fixture
def namespace(pytestconfig: pytest.Config) -> Iterator[str]:
    """A namespace of this test alone; its rows on PostgreSQL end with the test."""
    name = f"test-{uuid.uuid4().hex[:12]}"
    yield name
    connection = pytestconfig.stash.get(_SWEEPER, None)
    if connection is not None and not connection.closed:
        for table in ("lease", "stage", "event", "run"):
            connection.execute(
                f"DELETE FROM celery_lease_{table} WHERE run_id IN"
                " (SELECT run_id FROM celery_lease_run WHERE namespace LIKE %s)",
                (f"{name}%",),
            )


@pytest.fixture
def run_id(namespace: str) -> str:
    """A run id of this test alone; more: ``f"{run_id}-2"``."""
    return f"run-of-{namespace}"


@pytest.fixture
def open_store(namespace: str) -> Iterator[Callable[..., Store]]:
    """``open_store(url, **options)``: a Store in this test's namespace, closed at its end."""
    opened: list[Store] = []

    def open_one(url: str, **options: Any) -> Store:
        store = Store(url, **{"namespace": namespace, **options})
        opened.append(store)
        return store

    yield open_one
    for store in opened:
        store.dispose()


@pytest.fixture
def store(open_store: Callable[..., Store], store_url: str) -> Store:
    """A store on SQLite, then on PostgreSQL, in a namespace of this test."""
    return open_store(store_url)


@pytest.fixture
def pg_store(open_store: Callable[..., Store], postgresql_url: str) -> Store:
    """A store on PostgreSQL, in a namespace of this test."""
    return open_store(postgresql_url)


@pytest.fixture
def make_store(open_store: Callable[..., Store]) -> Callable[..., Store]:
    """``make_store(store)``: one more Store on its database, with connections of its own."""

    def another(like: Store, **options: Any) -> Store:
        url = like.connections.url.render_as_string(hide_password=False)
        return open_store(url, **{"namespace": like.namespace, **options})

    return another


@pytest.fixture
def terms() -> Terms:
    """Terms with the default durations: 90 s, heartbeat 30 s, grace 35 s, five attempts."""
    return LeasePolicy().terms(Settings.defaults())


@pytest.fixture
def age() -> Callable[..., None]:
    """``age(store, seconds, run_id=None)``: the database's clock moves on by ``seconds``."""

    def advance(store: Store, seconds: float, run_id: str | None = None) -> None:
        advance_database_clock(store, seconds, run_id=run_id)

    return advance
