"""Connections: time-outs that are really set, errors that say what to do, no half-open waits."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.engine import make_url

from celery_lease.errors import (
    InvalidSetting,
    SchemaMissing,
    StoreBusy,
    StoreUnavailable,
)
from celery_lease.policy import LeasePolicy, Terms
from celery_lease.settings import Settings
from celery_lease.statements import runs
from celery_lease.store import Grant, Store
from celery_lease.store.foundation import ask
from tests.runs import claim, complete, new_holder, row
from tests.tcp_proxy import TcpProxy
from tests.waiting import wait_until

#: Every kind of verb: single statements through the driver, single ones, transactions.
VERBS: dict[str, Callable[[Store, Grant], Any]] = {
    "claim": lambda store, grant: store.claim(
        grant.run_id, grant.epoch, new_holder(), task="a.task", terms=_terms()
    ),
    "renew": lambda store, grant: store.renew([grant.holder]),
    "complete": complete,
    "checkpoint": lambda store, grant: store.checkpoint(grant, b"1"),
    "view": lambda store, grant: store.view(grant.run_id),
    "reserve": lambda store, grant: store.reserve(grant.run_id, grant.epoch),
    "reclaim": lambda store, grant: store.reclaim(grant.run_id, grant.epoch),
    "settle": lambda store, grant: store.settle([(grant.run_id, grant.holder)]),
}
#: One of each kind is enough where each takes seconds.
DEAF = ("claim", "renew", "view", "checkpoint")
each_verb = pytest.mark.parametrize("verb", VERBS.values(), ids=VERBS)


def _terms() -> Terms:
    return LeasePolicy().terms(Settings.defaults())


def a_grant(run_id: str) -> Grant:
    return Grant(run_id, 1, new_holder(), 1, 0, None, None)


def shown(store: Store, setting: str) -> str:
    """What the server says of a setting in one of the store's own sessions."""
    return str(store.connections.run(lambda c: c.execute(text(f"SHOW {setting}")).scalar()))


class TestASessionOnPostgreSQL:
    @pytest.mark.parametrize(
        ("setting", "value"),
        [
            ("statement_timeout", "3s"),
            ("lock_timeout", "1500ms"),
            ("idle_in_transaction_session_timeout", "6s"),
            ("default_transaction_isolation", "read committed"),
            ("application_name", "celery_lease"),
        ],
    )
    def test_has_its_time_outs_set_on_the_server(
        self, open_store: Callable[..., Store], postgresql_url: str, setting: str, value: str
    ) -> None:
        store = open_store(postgresql_url, statement_timeout=3.0, lock_timeout=1.5)
        assert shown(store, setting) == value

    def test_has_them_also_in_a_transaction(
        self, open_store: Callable[..., Store], postgresql_url: str
    ) -> None:
        store = open_store(postgresql_url, statement_timeout=3.0)

        def ask(connection: Any) -> list[str]:
            names = ("statement_timeout", "transaction_isolation")
            return [connection.execute(text(f"SHOW {name}")).scalar() for name in names]

        assert store.connections.transact(ask) == ["3s", "read committed"]

    def test_keeps_them_whatever_the_user_passes_to_create_engine(
        self, open_store: Callable[..., Store], postgresql_url: str
    ) -> None:
        store = open_store(
            postgresql_url,
            options={"pool_size": 1, "connect_args": {"application_name": "mine"}},
        )
        assert shown(store, "application_name") == "mine"
        assert shown(store, "statement_timeout") == "5s"

    def test_ends_a_statement_at_its_time_out(
        self, open_store: Callable[..., Store], postgresql_url: str
    ) -> None:
        store = open_store(postgresql_url, statement_timeout=0.2, lock_timeout=0.1)
        with pytest.raises(StoreUnavailable, match="statement timeout"):
            store.connections.run(lambda c: c.execute(text("SELECT pg_sleep(30)")))

    def test_ends_a_wait_for_a_row_at_the_lock_time_out(
        self, open_store: Callable[..., Store], pg_store: Store, run_id: str, terms: Terms
    ) -> None:
        claim(pg_store, run_id, terms)
        hurried = open_store(
            pg_store.connections.url.render_as_string(hide_password=False), lock_timeout=0.1
        )

        def hold(connection: Any) -> None:
            connection.execute(
                text("SELECT 1 FROM celery_lease_run WHERE run_id = :id FOR UPDATE"),
                {"id": run_id},
            )
            with pytest.raises(StoreBusy):
                hurried.revoke(run_id)

        pg_store.connections.transact(hold)
        assert hurried.revoke(run_id)


class TestMissingTables:
    @each_verb
    def test_are_an_error_that_names_the_command_that_makes_them(
        self,
        open_store: Callable[..., Store],
        empty_postgresql_url: str,
        run_id: str,
        verb: Callable[[Store, Grant], Any],
    ) -> None:
        store = open_store(empty_postgresql_url)
        with pytest.raises(SchemaMissing, match="celery -A yourapp lease init-db"):
            verb(store, a_grant(run_id))

    def test_are_made_on_postgresql_when_asked_for_and_by_two_at_once(
        self, open_store: Callable[..., Store], empty_postgresql_url: str, terms: Terms
    ) -> None:
        stores = [open_store(empty_postgresql_url) for _ in range(4)]
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda store: store.create_schema(), stores))
        assert claim(stores[0], "a-run", terms).epoch == 1
        stores[0].create_schema()
        assert stores[0].view("a-run") is not None

    def test_are_made_on_sqlite_at_first_use(
        self, open_store: Callable[..., Store], sqlite_url: str, terms: Terms
    ) -> None:
        assert claim(open_store(sqlite_url), "a-run", terms).epoch == 1

    def test_are_made_on_sqlite_by_many_at_once(
        self, open_store: Callable[..., Store], sqlite_url: str, terms: Terms
    ) -> None:
        stores = [open_store(sqlite_url, lock_timeout=5.0) for _ in range(8)]
        with ThreadPoolExecutor(8) as pool:
            grants = list(
                pool.map(lambda n: claim(stores[n], f"run-{n}", terms, holder=f"h{n}"), range(8))
            )
        assert all(grant.epoch == 1 for grant in grants)


class TestSQLite:
    def test_writes_ahead_and_waits_for_a_lock(
        self, open_store: Callable[..., Store], sqlite_url: str
    ) -> None:
        store = open_store(sqlite_url, lock_timeout=1.5)

        def ask(connection: Any) -> list[Any]:
            return [
                connection.exec_driver_sql(f"PRAGMA {name}").scalar()
                for name in ("journal_mode", "busy_timeout", "synchronous")
            ]

        assert store.connections.run(ask) == ["wal", 1500, 2]

    def test_is_opened_while_somebody_else_opens_it(
        self, open_store: Callable[..., Store], sqlite_url: str, run_id: str, terms: Terms
    ) -> None:
        """It is not written ahead yet, and SQLite does not wait for who holds it."""
        file = str(make_url(sqlite_url).database)
        with contextlib.closing(sqlite3.connect(file, isolation_level=None)) as other:
            other.execute("CREATE TABLE theirs (n INTEGER)")
            other.execute("BEGIN IMMEDIATE")
            other.execute("INSERT INTO theirs VALUES (1)")
            store = open_store(sqlite_url, lock_timeout=5.0)
            with ThreadPoolExecutor(1) as pool:
                claimed = pool.submit(claim, store, run_id, terms)
                with pytest.raises(TimeoutError):
                    claimed.result(timeout=0.3)
                other.execute("COMMIT")
                assert claimed.result(timeout=10).epoch == 1

    def test_that_stays_locked_is_busy_and_not_unreachable(
        self, open_store: Callable[..., Store], sqlite_url: str, run_id: str, terms: Terms
    ) -> None:
        store = open_store(sqlite_url, lock_timeout=0.1)
        claim(store, run_id, terms)
        writer = create_engine(sqlite_url)
        with writer.connect() as connection:
            connection.exec_driver_sql("BEGIN IMMEDIATE")
            with pytest.raises(StoreBusy):
                store.revoke(run_id)
            assert store.view(run_id) is not None, "readers are not kept waiting"
            connection.rollback()
        writer.dispose()
        assert store.revoke(run_id)

    @pytest.mark.parametrize("url", ["sqlite://", "sqlite:///:memory:"])
    def test_in_memory_is_refused_since_one_process_only_would_see_it(self, url: str) -> None:
        with pytest.raises(InvalidSetting, match="memory"):
            Store(url)

    def test_in_a_folder_that_is_not_there_is_unavailable(
        self, open_store: Callable[..., Store], tmp_path: Path, run_id: str
    ) -> None:
        store = open_store(f"sqlite:///{tmp_path / 'missing' / 'leases.sqlite3'}")
        with pytest.raises(StoreUnavailable):
            store.view(run_id)


@pytest.mark.parametrize("url", ["", "no url", "nosuchdatabase://host/db"])
def test_a_url_that_cannot_be_one_is_refused_when_the_store_is_made(url: str) -> None:
    with pytest.raises(InvalidSetting, match="lease_store_url"):
        Store(url)


def test_a_store_opens_nothing_before_its_first_verb(tmp_path: Path) -> None:
    file = tmp_path / "leases.sqlite3"
    store = Store.from_settings(Settings.defaults(store_url=f"sqlite:///{file}"))
    assert not file.exists()
    store.view("a-run")
    assert file.exists()
    store.dispose()


class TestAnUnreachableServer:
    @each_verb
    def test_is_store_unavailable(
        self,
        open_store: Callable[..., Store],
        postgresql_url: str,
        run_id: str,
        verb: Callable[[Store, Grant], Any],
    ) -> None:
        nobody = make_url(postgresql_url).set(host="127.0.0.1", port=1)
        store = open_store(nobody.render_as_string(hide_password=False), connect_timeout=1.0)
        with pytest.raises(StoreUnavailable):
            verb(store, a_grant(run_id))

    def test_is_found_again_without_a_new_store(
        self, open_store: Callable[..., Store], proxy: TcpProxy, postgresql_url: str, run_id: str
    ) -> None:
        store = open_store(proxy.url(postgresql_url))
        assert store.view(run_id) is None
        proxy.cut(refuse=True)
        with pytest.raises(StoreUnavailable):
            store.view(run_id)
        proxy.resume()
        assert store.view(run_id) is None


@pytest.fixture
def proxy(postgresql_url: str) -> Iterator[TcpProxy]:
    url = make_url(postgresql_url)
    with TcpProxy(url.host or "127.0.0.1", url.port or 5432) as made:
        yield made


class TestAConnectionThatBroke:
    @each_verb
    def test_is_replaced_within_the_verb(
        self,
        open_store: Callable[..., Store],
        proxy: TcpProxy,
        postgresql_url: str,
        run_id: str,
        terms: Terms,
        verb: Callable[[Store, Grant], Any],
    ) -> None:
        store = open_store(proxy.url(postgresql_url))
        grant = claim(store, run_id, terms)
        proxy.cut()
        verb(store, grant)

    def test_takes_those_of_its_age_with_it(
        self,
        open_store: Callable[..., Store],
        proxy: TcpProxy,
        postgresql_url: str,
        run_id: str,
        terms: Terms,
    ) -> None:
        store = open_store(proxy.url(postgresql_url))
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(store.view, [run_id] * 16))
        proxy.cut()
        for _ in range(8):
            store.renew(["nobody"])
            store.view(run_id)


class TestABlackHole:
    """The network swallows packets; nobody is told anything."""

    @pytest.mark.parametrize("verb", [VERBS[name] for name in DEAF], ids=DEAF)
    @pytest.mark.parametrize("way", ["requests", "answers"])
    def test_ends_a_verb_soon_after_the_statement_time_out(
        self,
        open_store: Callable[..., Store],
        proxy: TcpProxy,
        postgresql_url: str,
        run_id: str,
        terms: Terms,
        verb: Callable[[Store, Grant], Any],
        way: str,
    ) -> None:
        store = open_store(
            proxy.url(postgresql_url), statement_timeout=0.5, lock_timeout=0.3, connect_timeout=1.0
        )
        grant = claim(store, run_id, terms)
        proxy.pause(requests=way == "requests", answers=way == "answers")
        started = time.monotonic()
        with pytest.raises(StoreUnavailable, match="did not answer within"):
            verb(store, grant)
        assert time.monotonic() - started < 0.5 + 2.0
        proxy.cut()
        proxy.resume()
        assert store.view(run_id) is not None

    def test_ends_an_attempt_to_connect_too(
        self, open_store: Callable[..., Store], proxy: TcpProxy, postgresql_url: str, run_id: str
    ) -> None:
        store = open_store(proxy.url(postgresql_url), connect_timeout=1.0)
        proxy.pause()
        started = time.monotonic()
        with pytest.raises(StoreUnavailable):
            store.view(run_id)
        assert time.monotonic() - started < 5.0

    def test_of_one_connection_does_not_end_the_others(
        self,
        open_store: Callable[..., Store],
        proxy: TcpProxy,
        postgresql_url: str,
        run_id: str,
        terms: Terms,
    ) -> None:
        through = open_store(proxy.url(postgresql_url), statement_timeout=0.5, lock_timeout=0.3)
        direct = open_store(postgresql_url)
        grant = claim(through, run_id, terms)
        proxy.pause()
        with ThreadPoolExecutor(1) as pool:
            blocked = pool.submit(through.renew, [grant.holder])
            wait_until(lambda: proxy.holds("requests"), what="the renewal to be swallowed")
            assert direct.renew([grant.holder]).kept == {grant.holder}
            with pytest.raises(StoreUnavailable):
                blocked.result(10)


class TestAFailureInTheMiddle:
    def test_of_a_transaction_leaves_nothing_half_written(
        self, store: Store, run_id: str, terms: Terms
    ) -> None:
        grant = claim(store, run_id, terms)

        def half(connection: Any) -> None:
            connection.execute(
                text("UPDATE celery_lease_run SET note = 'half' WHERE run_id = :id"),
                {"id": run_id},
            )
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            store.connections.transact(half)
        assert row(store, run_id).note is None
        store.checkpoint(grant, b"1")


def test_a_statement_is_over_when_its_connection_is_given_back(
    make_store: Callable[..., Store], store: Store, run_id: str, terms: Terms
) -> None:
    """On SQLite a statement whose rows were not read is not, and its write not committed.

    The next thread that got the connection could not commit, and both writes were undone.
    """
    grant = claim(store, run_id, terms)
    complete(store, grant)
    narrow = make_store(store, options={"pool_size": 1, "max_overflow": 0})
    given = {"run_id": run_id, "holder": grant.holder}
    answer = narrow.connections.run(lambda c: ask(c, runs.SETTLE, given))
    claim(narrow, f"{run_id}-next", terms)
    assert answer is not None
    view = store.view(run_id)
    assert view is not None
    assert view.settled
