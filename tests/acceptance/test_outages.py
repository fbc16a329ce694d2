"""The store goes away, the worker is told to stop: nothing runs twice, nothing is lost."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy.engine import make_url

from tests.tcp_proxy import TcpProxy
from tests.workers import SMOKE_BOTH, Shop

pg_only = pytest.mark.parametrize("database", ["postgresql"])


@pytest.fixture
def proxy(shop: Shop) -> Iterator[TcpProxy]:
    """The network between a worker and the store."""
    url = make_url(shop.store_url)
    assert url.host is not None
    with TcpProxy(url.host, url.port or 5432) as proxy:
        yield proxy


@pg_only
@pytest.mark.parametrize(
    ("how", "pool"), [("refused", "prefork"), ("swallowed", "prefork"), ("refused", "threads")]
)
def test_while_the_store_is_away_no_body_starts_and_no_message_is_lost(
    shop: Shop, proxy: TcpProxy, how: str, pool: str
) -> None:
    """The worker stops consuming, and goes on by itself when the store is back."""
    (worker,) = shop.start("w1", store_url=proxy.url(shop.store_url), pool=pool)
    if how == "refused":
        proxy.cut(refuse=True)
    else:
        proxy.pause()
    worker.logged("takes no more messages")
    runs = [shop.send("hold", "open", n, link=shop.signature("after")) for n in range(3)]
    shop.open("open")
    seen = worker.log.count("this pass was cut short")
    worker.logged("this pass was cut short", times=seen + 2)
    assert shop.notes("body") == []
    # A long poll that was under way may have taken some; the others lie where they were.
    assert len(shop.sqs.messages("celery")) == len(runs)
    assert sum(m.receive_count == 0 for m in shop.sqs.messages("celery")) >= len(runs) - 1

    if how == "swallowed":
        proxy.cut()
    proxy.resume()
    worker.logged("takes messages again")
    for n, run in enumerate(runs):
        assert shop.outcome(run) == ("SUCCESS", [n, 1])
        assert shop.bodies(run) == 1
        shop.settled(run)
    shop.noted("after", times=len(runs))
    shop.empty()
    assert len(shop.notes("after")) == len(runs)


@pg_only
def test_a_body_outlives_a_short_outage_of_the_store(shop: Shop, proxy: TcpProxy) -> None:
    """No body is killed for a failover: a step that cannot be saved waits for the store."""
    (worker,) = shop.start("w1", store_url=proxy.url(shop.store_url))
    run = shop.send("steps", "go", 2)
    shop.entered(run)
    proxy.cut(refuse=True)
    shop.open("go-0")
    worker.logged(f"run={run} waits for the lease store")
    worker.logged("leases not renewed")
    proxy.resume()
    shop.noted("step", run, times=2)
    shop.open("go-1")
    assert shop.outcome(run) == ("SUCCESS", [2, 1])
    assert shop.bodies(run) == 1
    assert [lease["status"] for lease in shop.store.leases(run)] == ["released"]


@pg_only
def test_a_commit_whose_answer_was_lost_is_not_a_failure(shop: Shop, proxy: TcpProxy) -> None:
    """The outcome was written, its answer cut off; the repeat is answered as accepted."""
    shop.start("w1", store_url=proxy.url(shop.store_url))
    run = shop.send("hold", "go", 1, link=shop.signature("after"))
    shop.entered(run)
    proxy.pause(requests=False)
    shop.open("go")
    shop.until_state(run, "succeeded")
    proxy.cut()
    proxy.resume()
    assert shop.outcome(run) == ("SUCCESS", [1, 1])
    shop.settled(run)
    assert shop.told(run) == ["STARTED", "SUCCESS"]
    shop.noted("after")
    assert shop.bodies(run) == 1
    assert len(shop.sent("after")) == 1


@pytest.mark.parametrize("database", SMOKE_BOTH)
def test_a_worker_told_to_stop_hands_off_at_the_next_checkpoint(shop: Shop) -> None:
    """SIGTERM: the run goes on elsewhere at once, from its checkpoint, and nothing is charged."""
    first, other = shop.start("w1", "w2")
    run = shop.send("steps", "go", 2)
    if shop.of(shop.entered(run)) is not first:
        first, other = other, first
    first.term()
    first.logged("Warm shutdown")
    shop.open("go-0")
    again = shop.entered(run, times=2)
    assert shop.of(again) is other
    assert (again["epoch"], again["start"], again["attempt"]) == (2, 1, 1)
    assert first.ended() == 0
    shop.open("go-1")
    assert shop.outcome(run) == ("SUCCESS", [2, 2])
    row = shop.settled(run)
    assert row["recoveries"] == 0
    assert [lease["status"] for lease in shop.store.leases(run)] == ["released", "released"]
    assert [event["reason"] for event in shop.events(run, "handed_off")] == ["stopping"]
    assert [note["step"] for note in shop.notes("step", run)] == [0, 1]


def test_a_worker_told_to_stop_finishes_what_has_no_checkpoint(shop: Shop) -> None:
    """A warm shutdown waits, and the lease is renewed until the pool has drained."""
    (worker,) = shop.start("w1")
    run = shop.send("hold", "go", 1, link=shop.signature("after"))
    shop.entered(run)
    before = shop.store.leases(run)[0]["expires_at"]
    worker.term()
    worker.logged("Warm shutdown")
    # Beyond the lease it had when it was told to stop.
    shop.renewed(run, beyond=before)
    shop.open("go")
    assert worker.ended() == 0
    assert shop.outcome(run) == ("SUCCESS", [1, 1])
    assert shop.settled(run)["epoch"] == 1
