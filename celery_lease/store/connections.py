"""Connections to the store: one engine a process, time-outs always set, errors translated."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine, Executable, create_engine, event
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from celery_lease.errors import InvalidSetting, LeaseError, StoreUnavailable
from celery_lease.schema import metadata
from celery_lease.statements.parameters import prefixed
from celery_lease.store.deadlines import Deadlines
from celery_lease.store.driver import Direct
from celery_lease.store.failures import Repeat, translate, translate_driver
from celery_lease.store.forks import ForkGate

__all__ = ["Connections"]

T = TypeVar("T")
#: Seconds between two tries to make SQLite write ahead.
_LOOK_AGAIN = 0.01

#: Every connection commits each statement by itself; a transaction is begun in words, which
#: saves the pool from switching its connections to and fro.
_BEGIN = {
    "postgresql": "BEGIN ISOLATION LEVEL READ COMMITTED",
    # A deferred transaction that turns into a writer later is refused without waiting.
    "sqlite": "BEGIN IMMEDIATE",
}


class Connections:
    """Runs work on a connection of this process.

    A connection that was inherited through a fork is kept referenced and never used or
    closed: closing it would end the parent's session.
    """

    def __init__(
        self,
        url: str,
        *,
        options: Mapping[str, Any] | None = None,
        statement_timeout: float = 5.0,
        lock_timeout: float = 2.0,
        connect_timeout: float = 5.0,
    ) -> None:
        self.url = _checked(url)
        self.dialect = self.url.get_backend_name()
        self._options = dict(options or {})
        self.statement_timeout = statement_timeout
        self.lock_timeout = lock_timeout
        self.connect_timeout = connect_timeout
        self._lock = threading.Lock()
        self._pid = 0
        self._engine: Engine | None = None
        self._direct = Direct()
        self._deadlines = Deadlines(statement_timeout + 1.0)
        self._inherited: list[object] = []
        sqlite = self.dialect == "sqlite"
        self._gate = ForkGate(self.dispose) if sqlite else contextlib.nullcontext()

    @property
    def single_statements(self) -> bool:
        """Whether a verb may be one statement: data-changing CTEs with RETURNING."""
        return self.dialect == "postgresql"

    @property
    def engine(self) -> Engine:
        """The engine of this process."""
        if self._engine is None or self._pid != os.getpid():
            with self._gate, self._lock_of_this_process():
                if self._engine is None or self._pid != os.getpid():
                    self._open()
        assert self._engine is not None
        return self._engine

    def run(self, work: Callable[[Connection], T]) -> T:
        """``work(connection)`` where each statement is its own commit."""

        def once() -> T:
            with self._guarded() as connection:
                return work(connection)

        return self._with_repeat(once)

    def one(self, statement: Executable, given: Mapping[str, Any]) -> list[Any]:
        """The rows of one statement that is its own commit, as fast as the driver can."""
        if not self._direct.understands(self.engine.dialect):
            return self.run(lambda c: list(c.execute(statement, prefixed(given))))
        return self._with_repeat(lambda: self._through_driver(statement, given))

    def transact(self, work: Callable[[Connection], T]) -> T:
        """``work(connection)`` in one READ COMMITTED transaction.

        A serialization failure, a deadlock and a connection that broke are repeated once:
        every verb answers a repeat as accepted.
        """

        def once() -> T:
            with self._guarded() as connection:
                connection.exec_driver_sql(_BEGIN.get(self.dialect, "START TRANSACTION"))
                try:
                    answer = work(connection)
                except BaseException:
                    _roll_back(connection)
                    raise
                connection.exec_driver_sql("COMMIT")
                return answer

        return self._with_repeat(once)

    def dispose(self) -> None:
        """Close this process's connections."""
        if self._engine is not None and self._pid == os.getpid():
            self._engine.dispose()

    def _lock_of_this_process(self) -> threading.Lock:
        # A fork may have copied the lock while another thread of the parent held it.
        if self._pid not in (0, os.getpid()) and self._engine is not None:
            self._inherited.extend((self._engine, self._deadlines))
            self._engine = None
            self._lock = threading.Lock()
            self._deadlines = Deadlines(self.statement_timeout + 1.0)
        return self._lock

    def _open(self) -> None:
        engine = create_engine(self.url, **self._engine_arguments())
        if self.dialect == "sqlite":
            _prepare_sqlite(engine, self.lock_timeout)
            with _translated(), engine.connect() as connection:
                connection.exec_driver_sql(_BEGIN["sqlite"])
                metadata.create_all(connection)
                connection.exec_driver_sql("COMMIT")
        self._pid = os.getpid()
        self._engine = engine

    def _engine_arguments(self) -> dict[str, Any]:
        connect: dict[str, Any] = {}
        if self.dialect == "postgresql":
            connect = self._postgresql_arguments()
        elif self.dialect == "sqlite":
            connect = {"timeout": self.lock_timeout, "check_same_thread": False}
        given = dict(self._options)
        return {
            "pool_timeout": self.connect_timeout,
            **given,
            "connect_args": {**connect, **given.get("connect_args", {})},
            "isolation_level": "AUTOCOMMIT",
            "pool_reset_on_return": None,  # no transaction is left open
        }

    def _postgresql_arguments(self) -> dict[str, Any]:
        settings = {
            "statement_timeout": f"{int(self.statement_timeout * 1000)}",
            "lock_timeout": f"{int(self.lock_timeout * 1000)}",
            "idle_in_transaction_session_timeout": f"{int(self.statement_timeout * 2000)}",
            "default_transaction_isolation": "read\\ committed",
        }
        return {
            "connect_timeout": max(1, round(self.connect_timeout)),
            "options": " ".join(f"-c {name}={value}" for name, value in settings.items()),
            "keepalives_idle": 10,
            "tcp_user_timeout": int(self.statement_timeout * 1000),
            "application_name": "celery_lease",
        }

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[Connection]:
        with (
            self._gate,
            _translated(),
            self.engine.connect() as connection,
            self._deadlines.watch(connection.connection.dbapi_connection),
        ):
            try:
                yield connection
            except (DBAPIError, LeaseError):
                raise
            except BaseException:
                # A signal's, perhaps in the middle of a statement whose answer is to come.
                connection.invalidate()
                raise

    def _through_driver(self, statement: Executable, given: Mapping[str, Any]) -> list[Any]:
        engine = self.engine
        errors = engine.dialect.loaded_dbapi.Error
        pooled = None
        try:
            with _translated():
                pooled = engine.raw_connection()
            driver = pooled.dbapi_connection
            with self._deadlines.watch(driver):
                return self._direct.execute(engine.dialect, driver, statement, given)
        except (errors, StoreUnavailable) as exc:
            raise self._after_failure(engine, pooled, exc) from exc
        except BaseException:
            if pooled is not None:
                pooled.invalidate()
            raise
        finally:
            if pooled is not None:
                pooled.close()

    def _after_failure(self, engine: Engine, pooled: Any, exc: Any) -> Exception:
        """What a failure means; a broken connection, and those as old as it, are dropped."""
        late = isinstance(exc, StoreUnavailable)
        driver = None if pooled is None else pooled.dbapi_connection
        broken = driver is not None and (late or engine.dialect.is_disconnect(exc, driver, None))
        if broken:
            pooled.invalidate(exc)
            engine.dispose()
        return exc if late else translate_driver(exc, broken=broken)

    def _with_repeat(self, once: Callable[[], T]) -> T:
        try:
            return once()
        except Repeat:
            pass
        try:
            return once()
        except Repeat as again:
            raise StoreUnavailable(str(again)) from again


def _roll_back(connection: Connection) -> None:
    try:
        connection.exec_driver_sql("ROLLBACK")
    except DBAPIError:
        connection.invalidate()


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except LeaseError:
        raise
    except DBAPIError as exc:
        raise translate(exc) from exc
    except PoolTimeout as exc:
        raise StoreUnavailable(f"no connection to the lease store was free: {exc}") from exc


def _checked(url: str) -> URL:
    try:
        parsed = make_url(url)
        parsed.get_dialect().import_dbapi()  # needed only later, but known now
    except (ArgumentError, NoSuchModuleError, ModuleNotFoundError) as exc:
        raise InvalidSetting(
            f"lease_store_url = {url!r}: {exc}; give an SQLAlchemy URL such as "
            "postgresql+psycopg://user@host/database"
        ) from exc
    if parsed.get_backend_name() == "sqlite" and parsed.database in (None, "", ":memory:"):
        raise InvalidSetting(
            f"lease_store_url = {url!r}: a store in memory is seen by one process only; "
            "give a file, for example sqlite:///celery-lease.sqlite3"
        )
    return parsed


def _write_ahead(cursor: Any, patience: float) -> None:
    """Where another process opens the file at this moment, SQLite refuses without waiting."""
    deadline = time.monotonic() + patience
    while True:
        try:
            cursor.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(_LOOK_AGAIN)


def _prepare_sqlite(engine: Engine, lock_timeout: float) -> None:
    @event.listens_for(engine, "connect")
    def _configure(dbapi_connection: Any, _record: Any) -> None:
        dbapi_connection.isolation_level = None
        cursor = dbapi_connection.cursor()
        cursor.execute(f"PRAGMA busy_timeout = {int(lock_timeout * 1000)}")
        _write_ahead(cursor, lock_timeout)
        cursor.execute("PRAGMA synchronous = FULL")
        cursor.close()
