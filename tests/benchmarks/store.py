"""The store against raw psycopg, in one run: ``python -m tests.benchmarks.store``.

Raw is what the verbs cannot be faster than: SQL of the same shape (two data-changing CTEs a
pair, one UPDATE for a batch), prepared and autocommitted.
Both take turns, and the median of the rounds counts, because a machine's mood changes.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import statistics
import sys
import time
import uuid
from multiprocessing.synchronize import Barrier

import psycopg

from celery_lease.policy import LeasePolicy
from celery_lease.settings import Settings
from celery_lease.store import Grant, Store
from tests import services

TERMS = LeasePolicy().terms(Settings.defaults())
BODY = b"x" * 500

RAW_SCHEMA = """
CREATE TABLE raw_run (
    run_id varchar(255) PRIMARY KEY, namespace varchar(255) NOT NULL, task varchar(255) NOT NULL,
    policy text NOT NULL, state varchar(16) NOT NULL, epoch bigint NOT NULL, holder varchar(255),
    attempt integer NOT NULL DEFAULT 0, envelope bytea, outcome bytea, trigger_due float8,
    settle_by float8, settled_at float8, created_at float8 NOT NULL, finished_at float8);
CREATE INDEX ON raw_run (trigger_due) WHERE trigger_due IS NOT NULL;
CREATE INDEX ON raw_run (state) WHERE finished_at IS NULL;
CREATE TABLE raw_lease (
    run_id varchar(255), epoch bigint, holder varchar(255) NOT NULL UNIQUE,
    status varchar(16) NOT NULL, duration float8 NOT NULL, acquired_at float8 NOT NULL,
    expires_at float8 NOT NULL, heartbeat_at float8 NOT NULL, ended_at float8,
    PRIMARY KEY (run_id, epoch)) WITH (fillfactor = 70);
CREATE UNIQUE INDEX ON raw_lease (run_id) WHERE status IN ('active', 'suspect');
"""
_NOW = "extract(epoch FROM clock_timestamp())::float8"
RAW_CLAIM = f"""
WITH granted AS (
    INSERT INTO raw_run
        (run_id, namespace, task, policy, state, epoch, holder, attempt, envelope, created_at)
    VALUES (%s, 'raw', 'task', %s, 'running', 1, %s, 1, %s, {_NOW})
    ON CONFLICT DO NOTHING RETURNING run_id, epoch, holder)
INSERT INTO raw_lease
    (run_id, epoch, holder, status, duration, acquired_at, heartbeat_at, expires_at)
SELECT run_id, epoch, holder, 'active', 90, {_NOW}, {_NOW}, {_NOW} + 90 FROM granted
RETURNING epoch
"""
RAW_COMPLETE = f"""
WITH ended AS (
    UPDATE raw_run
    SET state = 'succeeded', outcome = %s, finished_at = {_NOW}, settled_at = {_NOW}
    WHERE run_id = %s AND epoch = %s AND holder = %s AND state = 'running'
    RETURNING run_id, epoch)
UPDATE raw_lease l SET status = 'released', ended_at = {_NOW}
FROM ended WHERE l.run_id = ended.run_id AND l.epoch = ended.epoch
RETURNING l.run_id
"""
RAW_RENEW = f"""
UPDATE raw_lease SET heartbeat_at = {_NOW}, expires_at = {_NOW} + duration
WHERE holder = ANY(%s) AND status IN ('active', 'suspect')
"""


class Raw:
    """The same work through psycopg alone."""

    def __init__(self, url: str) -> None:
        self.connection = psycopg.connect(services.libpq(url), autocommit=True, prepare_threshold=1)

    def pair(self, run_id: str) -> None:
        policy, holder = TERMS.dump(), f"holder-{run_id}"
        row = self.connection.execute(RAW_CLAIM, (run_id, policy, holder, BODY)).fetchone()
        assert row is not None
        done = self.connection.execute(RAW_COMPLETE, (BODY, run_id, row[0], holder)).fetchone()
        assert done is not None

    def claim(self, run_id: str) -> None:
        given = (run_id, TERMS.dump(), f"holder-{run_id}", BODY)
        self.connection.execute(RAW_CLAIM, given)

    def renew(self, holders: list[str]) -> None:
        changed = self.connection.execute(RAW_RENEW, (holders,)).rowcount
        assert changed == len(holders)


class Ours:
    """The store's verbs."""

    def __init__(self, url: str) -> None:
        self.store = Store(url)

    def pair(self, run_id: str) -> None:
        self.store.complete(self.claim(run_id), BODY, deliver=False, settle_in=60.0)

    def claim(self, run_id: str) -> Grant:
        grant = self.store.claim(
            run_id, 0, f"holder-{run_id}", task="task", terms=TERMS, envelope=BODY, deliver=False
        )
        assert isinstance(grant, Grant)
        return grant

    def renew(self, holders: list[str]) -> None:
        assert len(self.store.renew(holders).kept) == len(holders)


def one_client(url: str, pairs: int, rounds: int) -> tuple[float, float]:
    """Median milliseconds of a claim and its complete: raw, ours."""
    clients = (Raw(url), Ours(url))
    taken: tuple[list[float], list[float]] = ([], [])
    for client in clients:
        _pairs(client, 50)
    for _ in range(rounds):
        for client, times in zip(clients, taken, strict=True):
            times.append(_pairs(client, pairs) / pairs * 1000)
    return statistics.median(taken[0]), statistics.median(taken[1])


def _pairs(client: Raw | Ours, count: int) -> float:
    batch = uuid.uuid4().hex[:12]
    started = time.perf_counter()
    for number in range(count):
        client.pair(f"{batch}-{number}")
    return time.perf_counter() - started


def many_clients(url: str, clients: int, pairs: int, rounds: int) -> tuple[float, float]:
    """Median pairs a second of ``clients`` processes: raw, ours."""
    context = multiprocessing.get_context("spawn")
    rates: tuple[list[float], list[float]] = ([], [])
    barrier = context.Barrier(clients + 1)
    workers = [
        context.Process(target=_client, args=(url, pairs, rounds, barrier), daemon=True)
        for _ in range(clients)
    ]
    for worker in workers:
        worker.start()
    for _ in range(rounds):
        for rate in rates:
            barrier.wait(120)
            started = time.perf_counter()
            barrier.wait(120)
            rate.append(clients * pairs / (time.perf_counter() - started))
    for worker in workers:
        worker.join(30)
    return statistics.median(rates[0]), statistics.median(rates[1])


def _client(url: str, pairs: int, rounds: int, barrier: Barrier) -> None:
    clients = (Raw(url), Ours(url))
    for client in clients:
        _pairs(client, 20)
    for client in itertools.chain.from_iterable(itertools.repeat(clients, rounds)):
        barrier.wait(120)
        _pairs(client, pairs)
        barrier.wait(120)


def renewals(url: str, leases: int, rounds: int) -> tuple[float, float]:
    """Median milliseconds to renew ``leases`` leases by one call: raw, ours."""
    batch = uuid.uuid4().hex[:12]
    names = [f"{batch}-{number}" for number in range(leases)]
    clients = (Raw(url), Ours(url))
    _fill(url, names)
    holders = [f"holder-{name}" for name in names]
    taken: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for client, times in zip(clients, taken, strict=True):
            _execute(url, "VACUUM raw_lease", "VACUUM celery_lease_lease")
            started = time.perf_counter()
            client.renew(holders)
            times.append((time.perf_counter() - started) * 1000)
    return statistics.median(taken[0]), statistics.median(taken[1])


def reaper_pass(url: str, leases: int, rounds: int) -> float:
    """Median milliseconds of a pass that finds nothing to do, its sweep included."""
    batch = uuid.uuid4().hex[:12]
    _fill(url, [f"{batch}-{number}" for number in range(leases)], raw=False)
    store = Store(url)
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        found = (store.expired(), store.overripe(), store.sweep(), store.due())
        times.append((time.perf_counter() - started) * 1000)
        assert found == ([], [], 0, []), found
    return statistics.median(times)


def heap_only_share(url: str, workers: int, leases: int, beats: int) -> float:
    """The share of renewals that PostgreSQL did without touching an index.

    ``workers`` heartbeats take turns, ``leases`` each, as those of a fleet do.
    """
    batch = uuid.uuid4().hex[:12]
    names = [f"{batch}-{number}" for number in range(workers * leases)]
    _fill(url, names, raw=False)
    store = Store(url)
    before = _updates(url)
    for _ in range(beats):
        for first in range(workers):
            store.renew([f"holder-{name}" for name in names[first::workers]])
    store.dispose()  # a session reports its statistics at its end
    after = _updates(url, at_least=before[0] + len(names) * beats)
    return (after[1] - before[1]) / (after[0] - before[0])


def _updates(url: str, at_least: int = 0) -> tuple[int, int]:
    deadline = time.monotonic() + 20
    while True:
        with psycopg.connect(services.libpq(url), autocommit=True) as connection:
            row = connection.execute(
                "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables "
                "WHERE relname = 'celery_lease_lease'"
            ).fetchone()
        assert row is not None
        if row[0] >= at_least or time.monotonic() > deadline:
            return int(row[0]), int(row[1])
        time.sleep(0.1)


def _fill(url: str, names: list[str], *, raw: bool = True) -> None:
    """Live leases in bulk, as claims would have left them."""
    with psycopg.connect(services.libpq(url), autocommit=True) as connection:
        connection.execute(
            "INSERT INTO celery_lease_run (run_id, namespace, task, policy, state, epoch, attempt,"
            " holder, envelope, deliver, created_at) SELECT name, 'default', 'task', %s,"
            f" 'running', 1, 1, 'holder-' || name, %s, false, {_NOW} FROM unnest(%s::text[]) name",
            (TERMS.dump(), BODY, names),
        )
        for table in ("celery_lease_lease", *(("raw_lease",) if raw else ())):
            connection.execute(
                f"INSERT INTO {table} (run_id, epoch, holder, status, duration, acquired_at,"
                f" heartbeat_at, expires_at) SELECT name, 1, 'holder-' || name, 'active', 900,"
                f" {_NOW}, {_NOW}, {_NOW} + 900 FROM unnest(%s::text[]) name",
                (names,),
            )
    _execute(url, "VACUUM ANALYZE celery_lease_run", "VACUUM ANALYZE celery_lease_lease")
    if raw:
        _execute(url, "VACUUM ANALYZE raw_lease")


def _empty(url: str) -> None:
    tables = "celery_lease_run, celery_lease_lease, celery_lease_event, raw_run, raw_lease"
    _execute(url, f"TRUNCATE {tables}")


def _execute(url: str, *statements: str) -> None:
    with psycopg.connect(services.libpq(url), autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement)  # type: ignore[arg-type]


def _row(what: str, raw: str, ours: str, ratio: float | None, target: str, ok: bool) -> str:
    shown = "" if ratio is None else f"{ratio:.2f}"
    return f"{what:<46}{raw:>14}{ours:>14}{shown:>8}  {target:<10}{'ok' if ok else 'MISSED'}"


def report(url: str, *, quick: bool = False) -> list[str]:
    """Measure everything on an empty database; one line a figure."""
    rounds = 3 if quick else 7
    Store(url).create_schema()
    _execute(url, RAW_SCHEMA)
    lines = [f"{'':<46}{'raw':>14}{'store':>14}{'ratio':>8}  target"]

    raw, ours = one_client(url, 150 if quick else 300, rounds)
    ratio = ours / raw
    what = "claim + complete, one client"
    lines.append(_row(what, f"{raw:.2f} ms", f"{ours:.2f} ms", ratio, "<= 1.7", ratio <= 1.7))

    raw, ours = many_clients(url, 8, 100 if quick else 300, rounds)
    ratio = raw / ours
    what = "claim + complete, eight clients"
    lines.append(_row(what, f"{raw:.0f}/s", f"{ours:.0f}/s", ratio, "<= 1.7", ratio <= 1.7))

    _empty(url)
    raw, ours = renewals(url, 10_000, rounds)
    ratio = ours / raw
    what = "10,000 leases renewed by one call"
    lines.append(_row(what, f"{raw:.0f} ms", f"{ours:.0f} ms", ratio, "<= 2", ratio <= 2))

    _empty(url)
    share = heap_only_share(url, workers=40, leases=50, beats=10)
    what = "renewals that touched no index"
    lines.append(_row(what, "", f"{share:.1%}", None, ">= 90 %", share >= 0.9))

    _empty(url)
    taken = reaper_pass(url, 100_000, rounds)
    what = "a reaper pass, 100,000 live leases, none expired"
    lines.append(_row(what, "", f"{taken:.1f} ms", None, "< 50 ms", taken < 50))
    return lines


def main(arguments: list[str] | None = None) -> int:
    """Print the table; the exit status says whether every target was met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    given = parser.parse_args(arguments)
    try:
        server = services.find_postgresql()
    except services.ServiceMissing as exc:
        print(exc, file=sys.stderr)
        return 2
    with services.fresh_postgresql_database(server, "benchmark") as url:
        lines = report(url, quick=given.quick)
    print("\n".join(lines))
    return 1 if any("MISSED" in line for line in lines) else 0


if __name__ == "__main__":
    raise SystemExit(main())
