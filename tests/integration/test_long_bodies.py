"""A body that runs longer than the broker waits: its lease and its message are kept."""

from __future__ import annotations

import kombu
import pytest

from celery_lease.testing.sqs import MODES
from tests.workers import DURATION, EVERY_POOL, Shop, slowly

#: Before that, no receive count reaches a worker: a duplicate is put off, and never dropped.
_COUNTS_RECEIVES = kombu.VERSION >= (5, 4)


@pytest.mark.parametrize(("database", "pool"), EVERY_POOL[:3])  # solo: see below
def test_a_body_longer_than_the_visibility_timeout_is_entered_once(shop: Shop, pool: str) -> None:
    """Case 1: V 2 s, two workers, and a body of more than 7 s; the receive count stays 1."""
    shop.queue("hasty", hides=2)
    shop.start("w1", "w2", queue="hasty", pool=pool)
    run = shop.send("hold", "go", 1, queue="hasty", link=shop.signature("after"))
    entered = shop.entered(run)
    shop.passed_time(entered["at"] + 7)
    assert [m.receive_count for m in shop.sqs.messages("hasty")] == [1]
    shop.open("go")
    assert shop.outcome(run) == ("SUCCESS", [1, 1])
    shop.settled(run)
    shop.empty("hasty")
    assert shop.bodies(run) == 1
    assert shop.receives(run, "hasty") == [1]
    assert shop.events(run) == []


def test_on_the_solo_pool_the_lease_is_renewed_by_its_own_thread(shop: Shop) -> None:
    """Case 3: pool solo, a body of three leases; nobody else runs it."""
    shop.start("w1", pool="solo")
    run = shop.send("hold", "go", 1)
    entered = shop.entered(run)
    shop.start("w2", pool="solo")
    shop.passed_time(entered["at"] + 3 * DURATION)
    shop.open("go")
    assert shop.outcome(run) == ("SUCCESS", [1, 1])
    assert shop.settled(run)["epoch"] == 1
    assert shop.bodies(run) == 1
    assert [event["kind"] for event in shop.events(run)] == []


def test_exclusion_does_not_rest_on_visibility(shop: Shop) -> None:
    """Case 4: V 1 s and a lease of 60 s, with the message never kept hidden."""
    shop.queue("open", hides=1)
    shop.sqs.faults.ignore("ChangeMessageVisibilityBatch", times=None)
    shop.start("w1", "w2", queue="open", lease_duration=60, lease_heartbeat=5, lease_grace=7)
    run = shop.send("hold", "go", 1, queue="open")
    shop.entered(run)
    shop.event(run, "duplicate_deferred")
    shop.open("go")
    assert shop.outcome(run) == ("SUCCESS", [1, 1])
    assert shop.bodies(run) == 1
    assert len(shop.store.leases(run)) == 1


def test_the_attributes_of_the_real_queue_are_followed(shop: Shop) -> None:
    """Case 6: Celery says an hour, the queue says 4 s; a body of 7 s is received once."""
    shop.queue("theirs", hides=4)
    options = {"wait_time_seconds": 1, "polling_interval": 0.05, "visibility_timeout": 3600}
    (worker,) = shop.start("w1", queue="theirs", broker_transport_options=options)
    run = shop.send("hold", "go", 1, queue="theirs")
    entered = shop.entered(run)
    shop.passed_time(entered["at"] + 7)
    shop.open("go")
    assert shop.outcome(run) == ("SUCCESS", [1, 1])
    shop.empty("theirs")
    assert shop.receives(run, "theirs") == [1]
    # What cannot be had is said once, with both numbers.
    warnings = [line for line in worker.log.splitlines() if "hides a received message" in line]
    assert len(warnings) == 1
    assert "for 4 s" in warnings[0]
    assert "3600 s" in warnings[0]


def test_without_the_permission_to_read_the_queue_there_is_one_warning(shop: Shop) -> None:
    """Case 6: without ``sqs:GetQueueAttributes`` it says so once, and goes on."""
    runs = [shop.send("hold", "open", n) for n in range(3)]
    shop.open("open")
    shop.sqs.faults.deny("GetQueueAttributes")
    # Without this kombu itself asks for the attributes, and does not start.
    (worker,) = shop.start("w1", slots=2, queues_are_declared_elsewhere=True)
    for n, run in enumerate(runs):
        assert shop.outcome(run) == ("SUCCESS", [n, 1])
    worker.logged("Allow sqs:GetQueueAttributes")
    assert worker.log.count("Allow sqs:GetQueueAttributes") == 1
    assert worker.log.count("cannot be read") == 1


@pytest.mark.parametrize(("hides", "pool"), [(1, "prefork"), (2, "prefork"), (2, "threads")])
def test_a_prefetched_message_is_kept_hidden_while_it_waits(
    shop: Shop, hides: int, pool: str
) -> None:
    """Case 13: the only slot is busy for 5 s, a second message waits in the worker."""
    shop.queue("hasty", hides=hides)
    (worker,) = shop.start("w1", queue="hasty", worker_prefetch_multiplier=2, pool=pool)
    first = shop.send("hold", "go", 1, queue="hasty")
    entered = shop.entered(first)
    second = shop.send("hold", "go", 2, queue="hasty")
    worker.logged(f"[{second}] received")
    shop.passed_time(entered["at"] + 5)
    if hides > 1:
        assert [m.receive_count for m in shop.sqs.messages("hasty")] == [1, 1]
    shop.send_again(first, "hasty")
    shop.send_again(second, "hasty")
    shop.open("go")
    assert shop.outcome(first) == ("SUCCESS", [1, 1])
    assert shop.outcome(second) == ("SUCCESS", [2, 1])
    shop.empty("hasty")
    assert [shop.bodies(first), shop.bodies(second)] == [1, 1]
    # Late copies found a finished run.
    assert shop.events(second, "finished_dropped") or shop.events(second, "settling_deferred")
    assert shop.told(second) == ["STARTED", "SUCCESS"]


def test_a_healthy_body_is_not_dead_lettered(shop: Shop) -> None:
    """Case 24: longer than V times maxReceiveCount, received once, nothing in the other queue."""
    _with_dead_letters(shop)
    shop.start("w1", "w2", queue="strict")
    run = shop.send("hold", "go", 1, queue="strict")
    entered = shop.entered(run)
    shop.passed_time(entered["at"] + 2 * 2 + 2)
    shop.open("go")
    assert shop.outcome(run) == ("SUCCESS", [1, 1])
    shop.empty("strict")
    assert shop.receives(run, "strict") == [1]
    assert shop.sqs.messages("dead") == []


def test_a_dead_lettered_trigger_does_not_end_the_run(shop: Shop) -> None:
    """Case 24: with the extension denied by IAM an error is logged at the first beat."""
    _with_dead_letters(shop)
    holder, other = shop.start("w1", "w2", queue="strict")
    shop.sqs.faults.deny("ChangeMessageVisibility")
    run = shop.send("hold", "go", 1, queue="strict", link=shop.signature("after"))
    if shop.of(shop.entered(run)) is not holder:
        holder, other = other, holder
    holder.logged("Allow sqs:ChangeMessageVisibility")
    errors = [line for line in holder.log.splitlines() if "sqs:ChangeMessageVisibility" in line]
    assert "ERROR" in errors[0]
    slowly(lambda: shop.sqs.messages("dead"), what="the trigger in the dead letters")
    assert shop.state(run) == "running"
    assert shop.run(run)["lease_left"] > 0
    shop.open("go")
    assert shop.outcome(run) == ("SUCCESS", [1, 1])
    assert shop.settled(run)["state"] == "succeeded"
    assert shop.bodies(run) == 1
    assert shop.told(run) == ["STARTED", "SUCCESS"]


def _with_dead_letters(shop: Shop) -> None:
    shop.queue("dead")
    arn = "arn:aws:sqs:us-east-1:123456789012:dead"
    policy = {"deadLetterTargetArn": arn, "maxReceiveCount": 2}
    shop.queue("strict", hides=2, RedrivePolicy=policy)


@pytest.mark.parametrize("mode", MODES)
def test_the_twelve_hours_pass_while_the_body_runs(shop: Shop, mode: str) -> None:
    """Case 15: committed under the epoch; the failing delete is no error of the task's."""
    shop.sqs.mode = mode  # type: ignore[assignment]
    (worker,) = shop.start("w1", slots=2)
    run = shop.send("hold", "go", 1, link=shop.signature("after"))
    shop.entered(run)
    shop.sqs.clock.advance(hours=12)
    shop.event(run, "duplicate_deferred")
    shop.open("go")
    assert shop.outcome(run) == ("SUCCESS", [1, 1])
    shop.settled(run)
    shop.sqs.clock.advance(hours=1)
    shop.empty()
    shop.noted("after")
    assert shop.bodies(run) == 1
    assert shop.told(run) == ["STARTED", "SUCCESS"]
    assert "Traceback" not in worker.log
    assert worker.alive


def test_the_broker_is_never_asked_for_more_than_what_is_left_of_twelve_hours(shop: Shop) -> None:
    """Case 18: a lease of a day; each extension asks for 43199 s less what has passed."""
    shop.start("w1", lease_duration=86400)
    run = shop.send("hold", "go", 1)
    shop.entered(run)
    slowly(lambda: len(_extensions(shop)) >= 3, what="three extensions")
    shop.open("go")
    assert shop.outcome(run) == ("SUCCESS", [1, 1])
    received = next(c.at for c in shop.sqs.calls if c.action == "ReceiveMessage" and c.status)
    assert [error for _, _, error in _extensions(shop) if error] == []
    for at, seconds, _ in _extensions(shop):
        assert 43000 < seconds <= 43199 - int(at - received)


def test_a_refusal_because_of_the_twelve_hours_does_not_end_the_run(shop: Shop) -> None:
    """Case 18: the broker's clock is ahead of ours; the answer is taken, and told."""
    shop.start("w1", lease_duration=42000)
    run = shop.send("hold", "go", 1)
    shop.entered(run)
    slowly(lambda: _extensions(shop), what="an extension")
    shop.sqs.clock.advance(2000)
    shop.event(run, "visibility_cap")
    shop.open("go")
    assert shop.outcome(run) == ("SUCCESS", [1, 1])
    shop.settled(run)
    shop.empty()
    assert shop.bodies(run) == 1


def _extensions(shop: Shop) -> list[tuple[float, int, str]]:
    """When how many seconds were asked for, and the error."""
    return [
        (call.at, int(entry["VisibilityTimeout"]), ",".join(call.entry_errors))
        for call in shop.sqs.calls_of("ChangeMessageVisibilityBatch")
        for entry in call.parameters["Entries"]
    ]


def _extended_again(shop: Shop) -> None:
    known = len(_extensions(shop))
    slowly(lambda: len(_extensions(shop)) > known, what="one more extension")


def test_thirty_hours_in_one_piece_complete_once(shop: Shop) -> None:
    """Case 40: after the cap the redelivered message is deferred, in the end dropped."""
    (worker,) = shop.start("w1", slots=2)
    run = shop.send("hold", "go", 1, link=shop.signature("after"))
    shop.entered(run)
    shop.sqs.clock.advance(hours=13)
    shop.event(run, "duplicate_deferred")
    shop.sqs.clock.advance(hours=13)
    if _COUNTS_RECEIVES:
        shop.event(run, "duplicate_dropped")
        shop.empty()
    else:
        shop.event(run, "duplicate_deferred", times=4)
    shop.sqs.clock.advance(hours=4)
    assert shop.run(run)["lease_status"] == "active"
    shop.open("go")
    assert shop.outcome(run) == ("SUCCESS", [1, 1])
    assert shop.settled(run)["epoch"] == 1
    assert shop.bodies(run) == 1
    assert len(shop.sent("after")) == 1
    shop.empty()
    assert worker.alive


def test_thirty_hours_in_stages_complete_once(shop: Shop) -> None:
    """Case 40: each stage is on a message of its own, none of them older than twelve hours."""
    shop.start("w1", lease_duration=4 * 3600)
    run = shop.send("stages", "go", 4)
    for step in range(4):
        shop.noted("stage", run, times=step + 1)
        # 7.5 hours a stage, with a heartbeat in between, as time would pass.
        for _ in range(2):
            _extended_again(shop)
            shop.sqs.clock.advance(hours=3.75)
        shop.open(f"go-{step}")
    assert shop.outcome(run) == ("SUCCESS", [0, 1, 4, 9])
    row = shop.settled(run)
    assert (row["epoch"], row["recoveries"]) == (5, 0)
    shop.empty()
    assert shop.sqs.clock.added >= 30 * 3600
    assert [note["step"] for note in shop.notes("stage", run)] == [0, 1, 2, 3]
    assert shop.receives(run) == [1] * 5
    assert shop.events(run, "visibility_cap") == []
