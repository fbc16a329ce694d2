"""Workers and pool processes that are killed: the run goes on elsewhere, once."""

from __future__ import annotations

import pytest
from sqlalchemy import create_engine, text

from celery_lease.testing.clock import advance_database_clock
from tests.workers import BOTH, DURATION, EVERY_POOL, GRACE, TAKEN_OVER, Shop, slowly


@pytest.mark.parametrize(("database", "pool"), EVERY_POOL[:3])  # solo: see test_limits
def test_a_killed_workers_run_is_finished_elsewhere_within_lease_and_grace(
    shop: Shop, pool: str
) -> None:
    """Case 26: SIGKILL of parent and children; the queue would hide the message for an hour."""
    shop.queue("patient", hides=3600)
    victim, other = shop.start("w1", "w2", queue="patient", pool=pool)
    run = shop.send("steps", "go", 2, queue="patient", link=shop.signature("after"))
    shop.open("go-0")
    note = shop.noted("step", run, times=2)
    assert note["step"] == 1
    if shop.of(shop.entered(run)) is not victim:
        victim, other = other, victim
    victim.kill()
    again = shop.entered(run, times=2)
    assert shop.of(again) is other
    assert (again["epoch"], again["start"]) == (2, 1)
    old, new = shop.store.leases(run)
    assert GRACE <= new["acquired_at"] - old["expires_at"] <= TAKEN_OVER
    shop.open("go-1")
    assert shop.outcome(run) == ("SUCCESS", [2, 2])
    assert shop.settled(run)["recoveries"] == 1
    # The step that was saved is not redone; the one that was not is.
    assert [note["step"] for note in shop.notes("step", run)] == [0, 1, 1]
    assert shop.told(run) == ["STARTED", "SUCCESS"]
    # At most one receipt of the watch-dog a lease and grace: no hot loop.
    assert sum(shop.receives(run, "patient")) <= 5


def test_the_run_is_taken_over_although_the_broker_never_redelivers(shop: Shop) -> None:
    """Case 7: the owner is dead and its message is gone; the reaper does it alone."""
    shop.start("w1", "w2")
    run = shop.send("hold", "go", 1)
    shop.of(shop.entered(run)).kill()
    shop.purge()
    assert shop.entered(run, times=2)["epoch"] == 2
    old, new = shop.store.leases(run)
    assert GRACE <= new["acquired_at"] - old["expires_at"] <= TAKEN_OVER
    shop.open("go")
    assert shop.outcome(run) == ("SUCCESS", [1, 2])


def test_a_killed_pool_process_is_noticed_without_waiting_for_expiry(shop: Shop) -> None:
    """Its parent abandons the run, which goes on at once under the next epoch."""
    (worker,) = shop.start("w1", lease_duration=60, lease_heartbeat=5, lease_grace=7)
    run = shop.send("steps", "go", 2)
    shop.open("go-0")
    shop.noted("step", run, times=2)
    worker.kill_children()
    again = shop.entered(run, times=2)
    assert (again["epoch"], again["start"], again["attempt"]) == (2, 1, 1)
    shop.open("go-1")
    assert shop.outcome(run) == ("SUCCESS", [2, 2])
    assert shop.events(run, "abandoned")
    assert [lease["status"] for lease in shop.store.leases(run)] == ["reclaimed", "released"]


@pytest.mark.parametrize("database", BOTH)
def test_a_child_that_dies_at_every_attempt_fails_after_three(shop: Shop) -> None:
    """Case 20: three starts, then failed with ``AttemptsExhausted``; one errback."""
    shop.start("w1", lease_max_attempts=3)
    run = shop.send("dies", "child", link_error=shop.signature("mourn"))
    _fails_after_three_attempts(shop, run)


def test_a_worker_that_dies_at_every_attempt_fails_after_three(shop: Shop) -> None:
    """Case 20 for the whole worker: the count is in the run, not in any process."""
    run = shop.send("dies", "worker", link_error=shop.signature("mourn"))
    for attempt in (1, 2, 3):
        worker = shop.launch(f"w{attempt}", lease_max_attempts=3)
        if attempt > 1:
            # Its predecessor's lease ran out long ago, as soon as somebody looks.
            shop.event(run, "suspect", times=attempt - 1)
            advance_database_clock(shop.store, GRACE, run_id=run)
        assert worker.ended() != 0
        assert shop.bodies(run) == attempt
        advance_database_clock(shop.store, DURATION, run_id=run)
    shop.launch("w4", lease_max_attempts=3)
    shop.event(run, "suspect", times=3)
    _fails_after_three_attempts(shop, run)


def _fails_after_three_attempts(shop: Shop, run: str) -> None:
    status, error = shop.outcome(run)
    assert status == "FAILURE"
    assert type(error).__name__ == "AttemptsExhausted"
    assert "3 attempts" in str(error)
    row = shop.settled(run)
    assert (row["state"], row["epoch"], row["recoveries"]) == ("failed", 3, 3)
    notes = shop.notes("body", run)
    assert [note["attempt"] for note in notes] == [1, 2, 3]
    shop.noted("mourn")
    shop.empty()
    assert len(shop.notes("mourn")) == 1
    assert shop.told(run) == ["STARTED", "FAILURE"]


@pytest.mark.parametrize("database", BOTH)
def test_each_recipient_of_a_mailing_has_one_row(shop: Shop) -> None:
    """Case 5: 200 recipients, four forced redeliveries and one kill."""
    recipients = 200
    engine = create_engine(shop.store_url)
    with engine.begin() as connection:
        connection.execute(text("DROP TABLE IF EXISTS mail"))
        connection.execute(text("CREATE TABLE mail (run_id VARCHAR(64), recipient INTEGER)"))
    rows = text("SELECT recipient FROM mail")

    def written() -> list[int]:
        with engine.connect() as connection:
            return sorted(connection.execute(rows).scalars())

    shop.start("w1", "w2", slots=2)
    run = shop.send("mailing", recipients, "late")
    victim = shop.of(shop.entered(run))
    slowly(lambda: len(written()) >= recipients // 4, what="a quarter of the rows")
    for _ in range(4):
        shop.send_again(run)
    shop.event(run, "duplicate_deferred", times=4)
    victim.kill()
    shop.open("late")
    assert shop.outcome(run) == ("SUCCESS", recipients)
    assert written() == list(range(recipients))
    assert 0 < shop.notes("body", run)[-1]["start"] < recipients
    assert shop.bodies(run) == 2
    engine.dispose()


def test_a_double_interrupt_lets_nobody_else_run_before_the_lease_has_ended(shop: Shop) -> None:
    """Case 28: Ctrl-C twice ends the worker and its pool; the next epoch begins after it."""
    (first,) = shop.start("w1")
    run = shop.send("hold", "go", "x")
    shop.entered(run)
    other = shop.launch("w2")
    first.interrupt()
    first.logged("shutdown")
    first.interrupt()
    first.ended()
    assert shop.of(shop.entered(run, times=2)) is shop.ready(other)
    old, new = shop.store.leases(run)
    assert (old["epoch"], new["epoch"]) == (1, 2)
    assert old["ended_at"] <= new["acquired_at"]
    shop.open("go")
    assert shop.outcome(run) == ("SUCCESS", ["x", 2])
    assert shop.bodies(run) == 2
    assert shop.told(run) == ["STARTED", "SUCCESS"]
