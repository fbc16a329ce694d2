"""Killed between a commit and what has to follow it: the run row is its own outbox."""

from __future__ import annotations

import pytest

from celery_lease.testing.clock import advance_database_clock
from tests.workers import BOTH, Shop, slowly

#: The reservation of a sender that died is over after so many seconds.
RESERVED_FOR = 30


@pytest.mark.parametrize("database", BOTH)
@pytest.mark.parametrize("point", ["before reserve", "before publish", "after publish"])
def test_a_worker_killed_around_a_trigger_runs_the_next_stage_once(shop: Shop, point: str) -> None:
    """Case 30: the stage is committed; its trigger was not sent, or was, and nobody noted it."""
    victim = shop.launch("w1", crash=f"worker: {point}")
    run = shop.send("stages", "go", 2)
    shop.open("go-0")
    assert victim.ended() != 0
    assert shop.run(run)["state"] == "ready"
    shop.start("w2")
    if point == "before publish":
        advance_database_clock(shop.store, RESERVED_FOR, run_id=run)
    shop.noted("stage", run, times=2)
    shop.open("go-1")
    assert shop.outcome(run) == ("SUCCESS", [0, 1])
    assert [note["step"] for note in shop.notes("stage", run)] == [0, 1]
    assert [note["epoch"] for note in shop.notes("stage", run)] == [1, 2]
    assert shop.settled(run)["recoveries"] == 0


@pytest.mark.parametrize("point", ["before reserve", "after publish"])
def test_a_pool_process_killed_around_a_trigger_runs_each_stage_once(
    shop: Shop, point: str
) -> None:
    """Case 30 for the pool process alone: its parent lives on and nothing is charged."""
    shop.start("w1", crash=point)
    for step in range(3):
        shop.open(f"go-{step}")
    run = shop.send("stages", "go", 3)
    assert shop.outcome(run) == ("SUCCESS", [0, 1, 4])
    assert [note["step"] for note in shop.notes("stage", run)] == [0, 1, 2]
    assert shop.settled(run)["recoveries"] == 0


@pytest.mark.parametrize("who", ["", "worker: "])
def test_killed_after_the_commit_the_outcome_is_replayed_without_the_body(
    shop: Shop, who: str
) -> None:
    """Between commit and acknowledgement: the callback and the result follow, once."""
    victim = shop.launch("w1", crash=f"{who}after complete")
    run = shop.send("hold", "open", 7, link=shop.signature("after"))
    shop.open("open")
    shop.until_state(run, "succeeded")
    if who:
        assert victim.ended() != 0
    assert shop.status(run) == "STARTED"
    assert shop.sent("after") == []
    # By somebody who is not killed there.
    victim.remove()
    shop.start("w2")
    assert shop.outcome(run) == ("SUCCESS", [7, 1])
    assert shop.settled(run)["replays"] == 1
    assert shop.noted("after")["args"] == [[7, 1]]
    assert shop.bodies(run) == 1
    assert shop.told(run) == ["STARTED", "SUCCESS"]


def test_killed_while_outcomes_are_told_the_callback_has_the_same_id_again(shop: Shop) -> None:
    """The result was stored, the callback sent, and the message not yet let go."""
    victim = shop.launch("w1", crash="worker: before acknowledge")
    run = shop.send("leased_add", 2, 3, link=shop.signature("after", 1))
    assert victim.ended() != 0
    assert shop.outcome(run) == ("SUCCESS", 5)
    shop.start("w2")
    assert shop.settled(run)["replays"] == 1
    shop.noted("after", times=2)
    first, again = shop.sent("after")
    assert first["id"] == again["id"]
    assert shop.told(run) == ["STARTED", "SUCCESS"]
    assert shop.bodies(run) == 1


def test_a_trigger_that_the_broker_swallowed_is_sent_again(shop: Shop) -> None:
    """Sent does not mean arrived: after ``lease_retrigger_after`` it is sent again."""
    shop.start("w1", lease_retrigger_after=1)
    swallowed = shop.sqs.faults.ignore("SendMessage", nth=2)
    run = shop.send("stages", "go", 2)
    shop.open("go-0")
    shop.open("go-1")
    assert shop.outcome(run) == ("SUCCESS", [0, 1])
    assert swallowed.fired == 1
    slowly(lambda: shop.settled(run), what="the end")
    assert [note["step"] for note in shop.notes("stage", run)] == [0, 1]
