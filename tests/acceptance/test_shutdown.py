"""Every way to end a worker: its runs go on elsewhere, from their checkpoints, one at a time."""

from __future__ import annotations

import os
import signal
from collections import Counter

import pytest
from celery.worker import WorkController

from tests.workers import POOLS, Shop, Worker, slowly

IMPORTS = ["tests.integration.apps.pools"]
#: So long that nothing in a test comes of its running out.
PATIENT = {"lease_duration": 120, "lease_heartbeat": 5, "lease_grace": 7}
HASTY = {"lease_duration": 3, "lease_statement_timeout": 1, "lease_grace": 2}
#: Since Celery 5.5; before that a cold shutdown waits for nothing.
HAS_SOFT_SHUTDOWN = hasattr(WorkController, "wait_for_soft_shutdown")


def _balance(shop: Shop, run: str) -> list[tuple[int, str]]:
    """(epoch, last word) of each claim of the run; a claim nobody has ended is ``claimed``."""
    notes = shop.notes("signal", run)
    claims = Counter(note["epoch"] for note in notes if note["name"] == "lease_claimed")
    assert all(count == 1 for count in claims.values())
    ends = {note["epoch"]: note["name"] for note in notes if note["name"] != "lease_claimed"}
    assert ends.keys() <= claims.keys()
    return [(epoch, ends.get(epoch, "lease_claimed")[6:]) for epoch in sorted(claims)]


def _at_its_second_step(shop: Shop, gate: str = "go") -> str:
    """A run of ``steps`` that has saved its first step and waits in the second."""
    run = shop.send("steps", gate, 3)
    shop.open(f"{gate}-0")
    shop.noted("step", run, times=2)
    return run


def _goes_on_in(shop: Shop, other: Worker, run: str, *, start: int, gate: str = "go") -> None:
    """The second holder is ``other``, and begins where the first has saved its work."""
    again = shop.entered(run, times=2)
    assert shop.of(again) is other
    assert (again["epoch"], again["start"]) == (2, start)
    for step in range(3):
        shop.open(f"{gate}-{step}")
    assert shop.outcome(run) == ("SUCCESS", [3, 2])
    shop.settled(run)
    assert shop.bodies(run) == 2
    old, new = shop.store.leases(run)
    assert old["ended_at"] <= new["acquired_at"]
    assert shop.told(run) == ["STARTED", "SUCCESS"]


@pytest.mark.smoke
@pytest.mark.parametrize("pool", POOLS)
def test_a_warm_shutdown_hands_over_what_runs_and_gives_back_what_waits(
    shop: Shop, pool: str
) -> None:
    """Case 29: SIGTERM; neither the lease nor the queue would let go for minutes."""
    shop.queue("patient", hides=3600)
    shop.client.conf.task_default_queue = "patient"
    options = {"pool": pool, "queue": "patient", "imports": IMPORTS, **PATIENT}
    (first,) = shop.start("w1", worker_prefetch_multiplier=3, **options)
    run = _at_its_second_step(shop)
    waiting = []
    if pool != "solo":  # which takes no message while a body runs
        waiting = [shop.send("hold", "open", n) for n in range(2)]
        for one in waiting:
            first.logged(f"[{one}] received")
    (second,) = shop.start("w2", **options)
    first.term()
    first.logged("Warm shutdown")
    shop.open("open")
    for n, one in enumerate(waiting):
        assert shop.outcome(one) == ("SUCCESS", [n, 1])
        assert shop.of(shop.entered(one)) is second
        # The message itself came back, not a copy of kombu's.
        assert len(shop.sent("hold", one)) == 1
        assert shop.receives(one, "patient") == [2]
    assert shop.bodies(run) == 1
    shop.open("go-1")
    _goes_on_in(shop, second, run, start=2)
    assert first.ended() == 0
    shop.empty("patient")
    assert _balance(shop, run) == [(1, "released"), (2, "released")]
    assert [note["reason"] for note in shop.notes("signal", run) if note["epoch"] == 1] == [
        None,
        "stopping",
    ]


@pytest.mark.parametrize("pool", POOLS)
def test_a_cold_shutdown_ends_what_it_can_kill_at_once(shop: Shop, pool: str) -> None:
    """SIGQUIT: prefork kills the body and abandons its run; elsewhere it yields in time."""
    killed = pool == "prefork"
    (first,) = shop.start("w1", pool=pool, imports=IMPORTS, worker_prefetch_multiplier=2, **PATIENT)
    run = _at_its_second_step(shop)
    if pool != "solo":
        waiting = shop.send("hold", "open", 1)
        first.logged(f"[{waiting}] received")
    (second,) = shop.start("w2", slots=2, imports=IMPORTS, **PATIENT)
    shop.open("open")
    os.kill(first.pid, signal.SIGQUIT)
    if pool != "solo":
        assert shop.outcome(waiting) == ("SUCCESS", [1, 1])
        assert len(shop.sent("hold", waiting)) == 1
    if not killed:
        first.logged("Ctrl+C" if HAS_SOFT_SHUTDOWN else "shutdown")
        assert shop.bodies(run) == 1
        shop.open("go-1")
    _goes_on_in(shop, second, run, start=1 if killed else 2)
    first.ended()
    if pool != "threads" or HAS_SOFT_SHUTDOWN:  # else Celery ends before it has acknowledged
        shop.empty()
    assert _balance(shop, run) == [(1, "lost" if killed else "released"), (2, "released")]


@pytest.mark.skipif(not HAS_SOFT_SHUTDOWN, reason="soft shutdown came with Celery 5.5")
@pytest.mark.parametrize(("pool", "remapped"), [("prefork", True), ("threads", False)])
def test_a_soft_shutdown_gives_bodies_time_to_hand_over(
    shop: Shop, pool: str, remapped: bool
) -> None:
    """They are told before Celery waits; who has not come to a checkpoint then is killed."""
    (first,) = shop.start(
        "w1",
        pool=pool,
        slots=2,
        imports=IMPORTS,
        environment={"REMAP_SIGTERM": "SIGQUIT"} if remapped else {},
        worker_soft_shutdown_timeout=4,
        **PATIENT,
    )
    good = _at_its_second_step(shop)
    slow = _at_its_second_step(shop, "slow")
    (second,) = shop.start("w2", slots=2, imports=IMPORTS, **PATIENT)
    os.kill(first.pid, signal.SIGTERM if remapped else signal.SIGQUIT)
    first.logged("Initiating Soft Shutdown")
    shop.open("go-1")
    _goes_on_in(shop, second, good, start=2)
    assert first.alive
    if pool == "threads":
        slowly(lambda: shop.run(slow)["lease_left"] > 0, what="the lease of the slow one")
        shop.open("slow-1")
    _goes_on_in(shop, second, slow, start=1 if pool == "prefork" else 2, gate="slow")
    first.ended()
    shop.empty()
    assert [lease["status"] for lease in shop.store.leases(good)] == ["released", "released"]
    assert _balance(shop, good) == [(1, "released"), (2, "released")]
    end = "lost" if pool == "prefork" else "released"
    assert _balance(shop, slow) == [(1, end), (2, "released")]


def test_sigkill_after_the_grace_period_of_kubernetes(shop: Shop) -> None:
    """Released runs have gone on at once; the others do when their lease has run out."""
    (first,) = shop.start("w1", slots=2, imports=IMPORTS, **HASTY)
    good = _at_its_second_step(shop)
    slow = _at_its_second_step(shop, "slow")
    (second,) = shop.start("w2", slots=2, imports=IMPORTS, **HASTY)
    first.term()
    first.logged("Warm shutdown")
    shop.open("go-1")
    _goes_on_in(shop, second, good, start=2)
    # Held beyond its duration: the heartbeat goes on until the very end.
    shop.renewed(slow, beyond=shop.store.leases(slow)[0]["expires_at"])
    first.kill()
    _goes_on_in(shop, second, slow, start=1, gate="slow")
    old, new = shop.store.leases(slow)
    assert new["acquired_at"] - old["expires_at"] >= HASTY["lease_grace"]
    shop.empty()
    assert _balance(shop, good) == [(1, "released"), (2, "released")]
    # Nobody was left to say it.
    assert _balance(shop, slow) == [(1, "claimed"), (2, "released")]
