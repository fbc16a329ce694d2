"""Holders that are paused or cut off and come back: fencing makes them harmless."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator

import pytest
from sqlalchemy.engine import make_url

from tests.tcp_proxy import TcpProxy
from tests.workers import Shop, slowly

#: How the body of the paused holder ends; "wait" leaves it to be interrupted.
ENDINGS = ("return", "raise", "retry", "checkpoint", "wait")


@pytest.mark.parametrize(
    ("database", "pool"),
    [("sqlite", "prefork"), ("postgresql", "prefork"), ("postgresql", "threads")],
)
def test_a_paused_holder_that_comes_back_changes_nothing(shop: Shop, pool: str) -> None:
    """Case 33: however its body ends, the result is its successor's, and nothing is published."""
    (old,) = shop.start("w1", slots=len(ENDINGS), pool=pool)
    runs = {
        ending: shop.send("hold", f"go-{ending}", ending, ending, link=shop.signature("after"))
        for ending in ENDINGS
    }
    for run in runs.values():
        assert shop.entered(run)["epoch"] == 1
    new = shop.launch("w2", slots=len(ENDINGS), pool=pool)
    shop.pause(old)
    for run in runs.values():
        assert shop.of(shop.entered(run, times=2)) is new
    for ending in ENDINGS:
        shop.open(f"go-{ending}-2")
    for ending, run in runs.items():
        assert shop.outcome(run) == ("SUCCESS", [ending, 2])
        shop.settled(run)

    # A thread cannot be interrupted: there the last body, too, has to come to its end.
    for ending in ENDINGS if pool == "threads" else ENDINGS[:-1]:
        shop.open(f"go-{ending}-1")
    old.cont()
    for run in runs.values():
        old.logged(f"lease lost run={run} epoch=1")
    old.term()
    assert old.ended() == 0

    for ending, run in runs.items():
        assert shop.outcome(run) == ("SUCCESS", [ending, 2])
        assert shop.told(run) == ["STARTED", "SUCCESS"]
        row = shop.run(run)
        assert (row["state"], row["epoch"]) == ("succeeded", 2)
        assert [lease["status"] for lease in shop.store.leases(run)] == ["reclaimed", "released"]
        # The first message, at most one trigger of the reclaim; no retry, no second hand-off.
        sent = [(one.get("lease_epoch", 0), one["retries"]) for one in shop.sent("hold", run)]
        assert sent in ([(0, 0)], [(0, 0), (1, 0)])
    shop.noted("after", times=len(ENDINGS))
    callbacks = [note["parent"] for note in shop.notes("after")]
    assert len(shop.sent("after")) == len(ENDINGS)
    assert sorted(callbacks) == sorted(runs.values())


class Outside:
    """Somebody outside who counts what is asked of it, and under which epoch."""

    def __init__(self) -> None:
        asked: list[tuple[str, str | None]] = []

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                asked.append((self.path, self.headers["X-Execution-Fence"]))
                self.send_response(204)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.asked = asked
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()


@pytest.fixture
def somebody() -> Iterator[Outside]:
    outside = Outside()
    yield outside
    outside.server.shutdown()
    outside.server.server_close()


@pytest.mark.parametrize("database", ["postgresql"])
def test_a_holder_cut_off_and_paused_can_neither_write_nor_ask_again(
    shop: Shop, somebody: Outside
) -> None:
    """The unpleasant one: paused, partitioned, replaced, continued, and only then connected."""
    url = make_url(shop.store_url)
    assert url.host is not None
    with TcpProxy(url.host, url.port or 5432) as proxy:
        (old,) = shop.start("w1", store_url=proxy.url(shop.store_url))
        run = shop.send("outside", somebody.url, "go", link=shop.signature("after"))
        assert shop.entered(run)["epoch"] == 1
        slowly(lambda: somebody.asked == [("/first", "1")], what="the first request")
        proxy.pause()
        shop.pause(old)

        (new,) = shop.start("w2")
        assert shop.of(shop.entered(run, times=2)) is new
        shop.open("go-2")
        assert shop.outcome(run) == ("SUCCESS", ["done", 2])
        shop.settled(run)
        shop.noted("after")
        finished = [("/first", "1"), ("/first", "2"), ("/second", "2")]
        assert somebody.asked == finished

        # Back, but still cut off: it cannot tell whether the run is its own, and waits.
        shop.open("go-1")
        old.cont()
        old.logged(f"run={run} waits for the lease store", times=2)
        old.logged("leases not renewed")
        assert somebody.asked == finished
        assert not shop.store.leases(run)[0]["heartbeat_at"] > shop.notes("body", run)[1]["at"]

        # Connected again, it learns what happened.
        proxy.cut()
        proxy.resume()
        old.logged(f"lease lost run={run} epoch=1")
        old.term()
        assert old.ended() == 0

    assert somebody.asked == finished
    assert shop.told(run) == ["STARTED", "SUCCESS"]
    assert shop.outcome(run) == ("SUCCESS", ["done", 2])
    assert [lease["status"] for lease in shop.store.leases(run)] == ["reclaimed", "released"]
    assert len(shop.sent("after")) == 1
    assert len(shop.notes("after")) == 1


def test_a_lost_holder_that_swallows_exceptions_is_interrupted(shop: Shop) -> None:
    """``LeaseLost`` is raised in the body, past ``except Exception``, within a heartbeat."""
    (worker,) = shop.start("w1")
    run = shop.send("stubborn", "never")
    pid = shop.entered(run)["pid"]
    slowly(lambda: shop.store.of_holder(shop.run(run)["holder"]), what="the lease")
    shop.store.revoke(run, "by the test")
    interrupted = shop.noted("interrupted", run)
    assert interrupted["error"] == "LeaseLost"
    assert "revoked" in interrupted["why"]
    assert shop.notes("swallowed") == []
    assert shop.outcome(run)[0] == "REVOKED"

    # The signal was for this run only: the same process goes on with the next one.
    following = shop.send("hold", "open", 1)
    shop.open("open")
    assert shop.outcome(following) == ("SUCCESS", [1, 1])
    assert shop.entered(following)["pid"] == pid
    assert worker.alive


def test_a_lost_holder_that_blocks_the_signal_is_killed_one_lease_later(shop: Shop) -> None:
    """It can hold up its pool process for one more lease, and no longer."""
    (worker,) = shop.start("w1")
    run = shop.send("deaf")
    pid = shop.entered(run)["pid"]
    shop.store.revoke(run, "by the test")
    worker.logged(f"killing pool process {pid}")
    assert shop.outcome(run)[0] == "REVOKED"
    following = shop.send("hold", "open", 1)
    shop.open("open")
    assert shop.outcome(following) == ("SUCCESS", [1, 1])
    assert shop.entered(following)["pid"] != pid
    assert shop.bodies(run) == 1
    assert shop.told(run)[-1] == "REVOKED"
    shop.empty()
