"""What reaches the result backend, callbacks and errbacks: the run's outcome, nothing else."""

from __future__ import annotations

import time

import pytest

from tests.workers import BOTH, EVERY_POOL, SMOKE_BOTH, Shop


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_states_are_told_by_the_current_holder_only(shop: Shop, pool: str) -> None:
    """STARTED after the claim, then the outcome; a delivery that is dropped says nothing."""
    shop.start("w1", slots=2, pool=pool)
    good = shop.send("hold", "go", 1)
    bad = shop.send("leased_fail", 1, link_error=shop.signature("mourn"))
    shop.entered(good)
    shop.send_again(good)
    shop.event(good, "duplicate_deferred")
    assert shop.told(good) == ["STARTED"]
    shop.open("go")
    assert shop.outcome(good) == ("SUCCESS", [1, 1])
    status, error = shop.outcome(bad)
    assert (status, str(error)) == ("FAILURE", "no sum of [1]")
    shop.settled(good)
    shop.settled(bad)
    shop.noted("mourn")
    shop.send_again(bad)
    shop.event(bad, "finished_dropped")
    assert shop.told(good) == ["STARTED", "SUCCESS"]
    assert shop.told(bad) == ["STARTED", "FAILURE"]
    assert len(shop.notes("mourn")) == 1
    assert shop.run(bad)["state"] == "failed"


def test_a_run_with_nothing_to_deliver_is_settled_by_its_commit(shop: Shop) -> None:
    """Nobody wants the result, so nobody has to be told."""
    shop.start("w1")
    run = shop.send("ignored", ignore_result=True)
    row = shop.settled(run)
    assert (row["state"], row["settled_at"]) == ("succeeded", row["finished_at"])
    assert shop.told(run) == []


@pytest.mark.parametrize("database", SMOKE_BOTH)
def test_a_hard_time_limit_fails_the_run_and_lets_the_message_go(shop: Shop) -> None:
    """The parent process commits the failure before it is told; the errback is sent once."""
    (worker,) = shop.start("w1")
    run = shop.send("hold", "never", 1, time_limit=3, link_error=shop.signature("mourn"), retries=0)
    status, error = shop.outcome(run)
    assert (status, type(error).__name__) == ("FAILURE", "TimeLimitExceeded")
    row = shop.settled(run)
    assert (row["state"], row["reason"]) == ("failed", "hard time limit")
    assert {lease["status"] for lease in shop.store.leases(run)} == {"reclaimed"}
    shop.noted("mourn")
    shop.empty()
    assert len(shop.sent("mourn")) == 1
    assert shop.told(run) == ["STARTED", "FAILURE"]
    assert shop.bodies(run) == 1
    # The worker goes on with a new pool process.
    following = shop.send("hold", "open", 2)
    shop.open("open")
    assert shop.outcome(following) == ("SUCCESS", [2, 1])
    assert worker.alive


def test_a_soft_time_limit_is_an_error_of_the_body(shop: Shop) -> None:
    """It is raised in the body, and fails the run like any other exception."""
    shop.start("w1")
    run = shop.send("hold", "never", 1, soft_time_limit=3)
    status, error = shop.outcome(run)
    assert (status, type(error).__name__) == ("FAILURE", "SoftTimeLimitExceeded")
    row = shop.settled(run)
    assert (row["state"], row["reason"]) == ("failed", "SoftTimeLimitExceeded")
    shop.empty()
    assert shop.told(run) == ["STARTED", "FAILURE"]
    assert shop.bodies(run) == 1


def test_a_result_that_cannot_be_encoded_is_a_failure_that_names_the_run(shop: Shop) -> None:
    """Refused before anything is committed; Celery never sees the value."""
    shop.start("w1")
    run = shop.send(
        "unserializable", link=shop.signature("after"), link_error=shop.signature("mourn")
    )
    status, error = shop.outcome(run)
    assert (status, type(error).__name__) == ("FAILURE", "NotSerializable")
    assert run in str(error)
    shop.settled(run)
    shop.noted("mourn")
    assert shop.run(run)["state"] == "failed"
    assert shop.told(run) == ["STARTED", "FAILURE"]
    assert shop.sent("after") == []


@pytest.mark.parametrize("database", BOTH)
def test_the_broker_is_down_while_callbacks_are_sent(shop: Shop) -> None:
    """No FAILURE for a run that has succeeded: it is replayed, and the callback follows."""
    shop.start("w1")
    run = shop.send("hold", "go", 1, link=shop.signature("after", 9))
    shop.entered(run)
    down = shop.sqs.faults.fail("SendMessage", times=None)
    shop.open("go")
    shop.until_state(run, "succeeded")
    # Celery has given up, and the message came back.
    shop.event(run, "settling_deferred")
    assert down.fired
    assert shop.told(run) == ["STARTED"]
    shop.sqs.faults.clear()
    assert shop.outcome(run) == ("SUCCESS", [1, 1])
    assert shop.settled(run)["replays"] >= 1
    assert shop.noted("after")["args"] == [[1, 1], 9]
    assert shop.told(run) == ["STARTED", "SUCCESS"]
    assert len({one["id"] for one in shop.sent("after")}) == 1
    assert shop.bodies(run) == 1
    assert shop.run(run)["state"] == "succeeded"


@pytest.mark.parametrize(("database", "pool"), [EVERY_POOL[0], *EVERY_POOL[2:]])
def test_a_retry_of_celerys_is_a_postponement_under_the_epoch(shop: Shop, pool: str) -> None:
    """The next try has the next epoch and Celery's own count; RETRY is told in between."""
    shop.start("w1", pool=pool)
    run = shop.send("unlucky", 2, link=shop.signature("after"))
    assert shop.outcome(run) == ("SUCCESS", "after 2")
    shop.settled(run)
    notes = shop.notes("body", run)
    assert [(note["epoch"], note["retries"]) for note in notes] == [(1, 0), (2, 1), (3, 2)]
    assert shop.told(run) == ["STARTED", "RETRY", "STARTED", "RETRY", "STARTED", "SUCCESS"]
    shop.noted("after")
    assert len(shop.sent("after")) == 1


def test_a_retry_that_is_used_up_is_the_last_error(shop: Shop) -> None:
    """``max_retries`` is Celery's, and so is the exception at its end."""
    shop.start("w1")
    run = shop.send("unlucky", 9, link_error=shop.signature("mourn"))
    status, error = shop.outcome(run)
    assert (status, str(error)) == ("FAILURE", "not yet")
    assert shop.settled(run)["state"] == "failed"
    assert shop.bodies(run) == 3
    shop.noted("mourn")
    assert len(shop.sent("mourn")) == 1


def test_a_run_revoked_in_the_store_while_all_workers_are_away_never_starts(shop: Shop) -> None:
    """Its late message finds a revoked row, and the caller is told."""
    run = shop.send("hold", "open", 1)
    shop.open("open")
    assert shop.store.revoke(run, "by the test")
    shop.start("w1")
    assert shop.outcome(run)[0] == "REVOKED"
    shop.settled(run)
    shop.empty()
    assert shop.bodies(run) == 0


def test_an_expired_message_is_revoked_by_the_claim(shop: Shop) -> None:
    """Celery's ``expires`` counts until the first claim, and the store decides it."""
    late = shop.send("hold", "open", 1, expires=0.2)
    shop.passed_time(time.time() + 0.2)
    shop.open("open")
    shop.start("w1")
    assert shop.outcome(late)[0] == "REVOKED"
    assert shop.settled(late)["state"] == "revoked"
    shop.empty()
    assert shop.bodies(late) == 0
