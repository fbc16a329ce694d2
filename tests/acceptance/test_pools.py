"""The three pools: what each promises when a body is lost, leaves, hangs or cannot be reached."""

from __future__ import annotations

import os

import pytest

from tests.workers import POOLS, Shop, slowly

IMPORTS = ["tests.integration.apps.pools"]
#: As short as a lease can be beside a heartbeat of a second.
HASTY = {"lease_duration": 3, "lease_statement_timeout": 1, "lease_grace": 2}
#: So long that nothing in a test comes of its running out.
PATIENT = {"lease_duration": 120, "lease_heartbeat": 5, "lease_grace": 7}


def _send(shop: Shop, task: str, *args: object, **options: object) -> str:
    return str(shop.client.send_task(f"pools.{task}", args, **options).id)


def test_two_bodies_in_one_process_do_not_see_each_others_lease(shop: Shop) -> None:
    """Threads: the lease, its retry and what may be told belong to one body alone."""
    shop.start("w1", pool="threads", slots=2, imports=IMPORTS)
    runs = {gate: _send(shop, "beside", gate) for gate in ("a", "b")}
    for run in runs.values():
        shop.entered(run)
    # Turn by turn, so that each verb of one comes between two of the other.
    for step in range(5):
        for gate, run in runs.items():
            if step == 3:
                shop.entered(run, times=2)  # after its retry
            shop.open(f"{gate}-{step}")
            slowly(lambda run=run, step=step: _steps(shop, run) > step, what="the step")
    for run in runs.values():
        assert shop.outcome(run) == ("SUCCESS", [[run], 2])
        shop.settled(run)
        assert shop.told(run)[-1] == "SUCCESS"
        assert [note["epoch"] for note in shop.notes("body", run)] == [1, 2]
        assert {value.decode().split('"')[1] for value in shop.store.stages(run).values()} == {run}


def _steps(shop: Shop, run: str) -> int:
    return len(shop.store.stages(run))


@pytest.mark.smoke
@pytest.mark.parametrize("pool", ["threads", "solo"])
def test_chains_callbacks_and_errbacks_follow_a_run_outside_of_prefork(
    shop: Shop, pool: str
) -> None:
    """Each is sent once, after the commit; the result is told by its run alone."""
    shop.start("w1", pool=pool, slots=2)
    chain = shop.signature("leased_add", 1, 2) | shop.signature("leased_add", 10)
    end = (chain | shop.signature("after", "end")).apply_async()
    bad = shop.send("leased_fail", 1, link_error=shop.signature("mourn"))
    assert shop.outcome(end.id) == ("SUCCESS", 13)
    assert shop.outcome(bad)[0] == "FAILURE"
    assert shop.noted("after")["args"] == [13, "end"]
    shop.noted("mourn")
    for run in (end.parent.parent.id, end.parent.id, bad):
        shop.settled(run)
        assert shop.bodies(run) == 1
    shop.empty()
    assert len(shop.notes("after")) == len(shop.notes("mourn")) == 1
    assert shop.told(end.parent.id) == ["STARTED", "SUCCESS"]
    assert shop.told(bad) == ["STARTED", "FAILURE"]


@pytest.mark.parametrize("pool", ["threads", "solo"])
def test_where_nothing_can_be_raised_the_next_verb_says_that_the_lease_is_lost(
    shop: Shop, pool: str
) -> None:
    """Revoked while it runs: the body is not interrupted, and its next checkpoint is refused."""
    (worker,) = shop.start("w1", pool=pool, imports=IMPORTS)
    run = shop.send("steps", "go", 3)
    shop.open("go-0")
    shop.noted("step", run, times=2)
    assert shop.store.revoke(run, "by the test")
    worker.logged(f"telling the body of run={run}")
    assert len(shop.notes("step", run)) == 2
    shop.open("go-1")
    assert shop.outcome(run)[0] == "REVOKED"
    following = shop.send("leased_add", 1, 2)
    assert shop.outcome(following) == ("SUCCESS", 3)
    shop.empty()
    assert len(shop.notes("step", run)) == 2
    assert worker.alive
    signals = [(note["name"], note["reason"]) for note in shop.notes("signal", run)]
    assert signals == [("lease_claimed", None), ("lease_lost", "revoked")]


@pytest.mark.parametrize(
    ("pool", "how"), [("prefork", "exit"), ("threads", "interrupt"), ("solo", "exit")]
)
def test_a_body_that_leaves_by_sys_exit_is_a_crash_and_goes_on_at_once(
    shop: Shop, pool: str, how: str
) -> None:
    """Celery loses such a task on threads, and its worker on solo; an attempt is charged."""
    (worker,) = shop.start("w1", pool=pool, imports=IMPORTS, **PATIENT)
    run = _send(shop, "leaves", how)
    assert shop.outcome(run) == ("SUCCESS", ["done", 2])
    assert shop.settled(run)["recoveries"] == 1
    assert [note["attempt"] for note in shop.notes("body", run)] == [1, 2]
    shop.event(run, "abandoned")
    shop.empty()
    assert worker.alive
    assert shop.told(run) == ["STARTED", "SUCCESS"]


@pytest.mark.parametrize("pool", POOLS)
def test_a_call_that_holds_the_interpreter_for_two_leases(shop: Shop, pool: str) -> None:
    """Case 48: prefork keeps the lease; elsewhere it is lost, fenced and reported."""
    os.mkfifo(shop.side / "gate")
    (first,) = shop.start("w1", pool=pool, imports=IMPORTS, **HASTY)
    run = _send(shop, "grip", "gate", "checkpoint" if pool == "solo" else "return")
    entered = shop.entered(run)
    (second,) = shop.start("w2", imports=IMPORTS, **HASTY)
    shop.passed_time(entered["at"] + 2 * HASTY["lease_duration"])
    if pool != "prefork":
        # Somebody else has done it meanwhile.
        assert shop.outcome(run) == ("SUCCESS", ["done", 2])
        shop.settled(run)
    (shop.side / "gate").write_bytes(b"")
    shop.noted("let go", run)
    if pool == "prefork":
        assert shop.outcome(run) == ("SUCCESS", ["done", 1])
        assert shop.events(run) == []
        assert shop.bodies(run) == 1
        return
    first.logged(f"lease lost run={run} epoch=1")
    assert [note["name"] for note in shop.notes("signal", run) if note["epoch"] == 1] == [
        "lease_claimed",
        "lease_lost",
    ]
    assert [one["status"] for one in shop.store.leases(run)] == ["reclaimed", "released"]
    assert shop.told(run) == ["STARTED", "SUCCESS"]
    # The frozen worker is as good as new.
    second.term()
    assert shop.outcome(shop.send("leased_add", 1, 2)) == ("SUCCESS", 3)


@pytest.mark.parametrize("pool", POOLS)
def test_a_body_that_hangs_is_taken_over(shop: Shop, pool: str) -> None:
    """``progress_timeout``: interrupted on prefork; else its lease is left to run out."""
    stuck = {"lease_progress_timeout": 2, **HASTY}
    (first,) = shop.start("w1", pool=pool, imports=IMPORTS, **stuck)
    run = _send(shop, "hangs", "gate")
    shop.entered(run)
    (second,) = shop.start("w2", imports=IMPORTS, **stuck)
    assert shop.outcome(run) == ("SUCCESS", ["done", 2])
    row = shop.settled(run)
    assert row["recoveries"] == 1
    if pool == "prefork":
        shop.event(run, "abandoned")
        first.logged(f"lease lost run={run} epoch=1")
    else:
        shop.event(run, "reclaimed")
        assert "lease lost" not in first.log  # it still hangs, and has asked nothing
        shop.open("gate")
        first.logged(f"lease lost run={run} epoch=1")
    assert shop.told(run) == ["STARTED", "SUCCESS"]
    second.term()
    assert shop.outcome(shop.send("leased_add", 1, 2)) == ("SUCCESS", 3)


@pytest.mark.parametrize("name", ["gevent", "eventlet"])
def test_a_pool_of_greenlets_is_refused_with_what_to_use_instead(shop: Shop, name: str) -> None:
    pytest.importorskip(name)
    # Untied: a thread that waits for the test's end would stop a process full of greenlets.
    worker = shop.launch("w1", pool=name, environment={"SHOP_TIED": ""})
    assert worker.ended() != 0
    assert f"worker pool '{name}'" in worker.log
    assert "use --pool=prefork, solo or threads" in worker.log
