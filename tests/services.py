"""The services that tests need, where they are and what happens when they are not there.

PostgreSQL is named by ``CELERY_LEASE_TEST_POSTGRESQL`` (an SQLAlchemy URL of a role that may
create databases), Redis and RabbitMQ by ``CELERY_LEASE_TEST_REDIS`` and ``…_RABBITMQ``
(broker URLs), or they are found on the usual local ports. Without them the tests that need
them are skipped with the reason; ``CELERY_LEASE_REQUIRE_SERVICES=1`` makes that a failure.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import secrets
from collections.abc import Iterator
from typing import Any, NoReturn

import pytest
from kombu import Connection
from kombu.exceptions import OperationalError
from sqlalchemy import create_engine, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import DBAPIError

NAMED_BY = "CELERY_LEASE_TEST_POSTGRESQL"
BROKERS = {
    "redis": ("CELERY_LEASE_TEST_REDIS", "redis://127.0.0.1:6379/0"),
    "rabbitmq": ("CELERY_LEASE_TEST_RABBITMQ", "amqp://guest:guest@127.0.0.1:5672//"),
}
REQUIRED_BY = "CELERY_LEASE_REQUIRE_SERVICES"


class ServiceMissing(Exception):
    """A service that a test needs was not found; the message says where it was looked for."""


def missing(reason: str) -> NoReturn:
    """Skip the test, or fail it where services are required."""
    if os.environ.get(REQUIRED_BY) == "1":
        pytest.fail(f"{reason} ({REQUIRED_BY} is set)", pytrace=False)
    pytest.skip(reason)


def find_postgresql() -> str:
    """The URL of a server on which databases may be made; raises ``ServiceMissing``."""
    tried = []
    for url in _candidates():
        try:
            _ask(url, "SELECT 1")
        except (DBAPIError, ModuleNotFoundError) as exc:
            tried.append(f"{url!r}: {str(exc).strip().splitlines()[0]}")
        else:
            return url.render_as_string(hide_password=False)
    raise ServiceMissing(f"no PostgreSQL was found; set {NAMED_BY} ({'; '.join(tried)})")


def find_broker(name: str) -> str:
    """The URL of a Redis or a RabbitMQ that answers; raises ``ServiceMissing``."""
    named_by, usual = BROKERS[name]
    url = os.environ.get(named_by, usual)
    try:
        with Connection(url, connect_timeout=5) as connection:
            connection.ensure_connection(max_retries=1, interval_start=0, timeout=5)
    except (OSError, OperationalError, ImportError) as exc:
        raise ServiceMissing(f"no {name} was found; set {named_by} ({exc})") from exc
    return url


@contextlib.contextmanager
def fresh_postgresql_database(server: str, purpose: str) -> Iterator[str]:
    """The URL of a new, empty database on ``server``; dropped at the end."""
    name = f"celery_lease_test_{purpose}_{secrets.token_hex(4)}"
    url = make_url(server)
    _ask(url, f'CREATE DATABASE "{name}"')
    try:
        yield url.set(database=name).render_as_string(hide_password=False)
    finally:
        _ask(url, f'DROP DATABASE "{name}" WITH (FORCE)')


def libpq(url: str) -> str:
    """An SQLAlchemy URL in the form that psycopg itself takes."""
    return make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)


def _candidates() -> list[URL]:
    named = os.environ.get(NAMED_BY)
    if named:
        return [make_url(named)]
    users = dict.fromkeys(("postgres", getpass.getuser()))
    return [
        URL.create("postgresql+psycopg", user, host="127.0.0.1", port=5432, database="postgres")
        for user in users
    ]


def _ask(url: URL, statement: str) -> None:
    arguments: dict[str, Any] = {"connect_timeout": 5}
    engine = create_engine(url, isolation_level="AUTOCOMMIT", connect_args=arguments)
    try:
        with engine.connect() as connection:
            connection.execute(text(statement))
    finally:
        engine.dispose()
