"""What the broker may do to a message: lose, repeat, refuse, delay. The database decides."""

from __future__ import annotations

import pytest

from tests.workers import EVERY_POOL, Shop, slowly


@pytest.mark.parametrize(("database", "pool"), EVERY_POOL[:3])  # solo has one body at a time
def test_a_duplicate_delivery_changes_nothing_visible(shop: Shop, pool: str) -> None:
    """Case 36: no state, no result, no count; an event and one line of ours in the log."""
    (worker,) = shop.start("w1", slots=2, pool=pool)
    run = shop.send("hold", "go", 1, link=shop.signature("after"))
    shop.entered(run)
    before = _visible(shop, run)
    for _ in range(2):
        shop.send_again(run)
    shop.event(run, "duplicate_deferred", times=2)
    assert _visible(shop, run) == before
    shop.open("go")
    assert shop.outcome(run) == ("SUCCESS", [1, 1])
    shop.settled(run)
    done = _visible(shop, run)
    shop.send_again(run)
    shop.event(run, "finished_dropped")
    shop.empty()

    assert _visible(shop, run) == done
    assert shop.told(run) == ["STARTED", "SUCCESS"]
    assert shop.bodies(run) == 1
    shop.noted("after")
    assert len(shop.sent("after")) == 1
    lines = [line for line in worker.log.splitlines() if f"duplicate_deferred run={run}" in line]
    assert len(lines) == 2
    assert "Traceback" not in worker.log
    assert "WARNING" not in worker.log


def _visible(shop: Shop, run: str) -> list[object]:
    row = shop.run(run)
    names = ("state", "epoch", "holder", "attempt", "recoveries", "reason", "replays")
    return [row[name] for name in names] + [len(shop.store.leases(run)), shop.told(run)]


def test_two_messages_with_one_task_id_are_one_execution(shop: Shop) -> None:
    """Case 2, as far as it needs no business key: the id is the run."""
    shop.start("w1", "w2")
    run = shop.send("hold", "go", 1, task_id="the-same")
    assert shop.send("hold", "go", 2, task_id="the-same") == run
    shop.entered(run)
    shop.event(run, "duplicate_deferred")
    shop.open("go")
    assert shop.outcome(run)[0] == "SUCCESS"
    assert shop.bodies(run) == 1


def test_a_trigger_for_an_older_stage_is_dropped_before_its_payload_is_touched(
    shop: Shop,
) -> None:
    """Case 39: the run has moved on by two epochs; what the old message asks for is not done."""
    (worker,) = shop.start("w1", slots=2)
    run = shop.send("stages", "go", 3)
    for step in (0, 1):
        shop.open(f"go-{step}")
    assert shop.noted("stage", run, times=3)["epoch"] == 3
    shop.send("stages", "other", 99, "and too many arguments", task_id=run)
    shop.event(run, "stale_dropped")
    shop.empty_but(1)
    assert shop.bodies(run) == 3
    shop.open("go-2")
    assert shop.outcome(run) == ("SUCCESS", [0, 1, 4])
    assert [note["step"] for note in shop.notes("stage", run)] == [0, 1, 2]
    shop.empty()
    assert worker.alive


def test_a_delete_that_the_broker_did_not_do_converges(shop: Shop) -> None:
    """Case 16: ``DeleteMessage`` answers 200 and the message is still there."""
    shop.start("w1")
    ignored = shop.sqs.faults.ignore("DeleteMessage")
    run = shop.send("hold", "open", 1, link=shop.signature("after"))
    shop.open("open")
    assert shop.outcome(run) == ("SUCCESS", [1, 1])
    shop.event(run, "finished_dropped")
    shop.empty()
    shop.noted("after")
    assert ignored.fired == 1
    assert shop.bodies(run) == 1
    assert shop.receives(run) == [2]
    assert len(shop.notes("after")) == 1


def test_a_heartbeat_under_way_when_the_body_ends_is_awaited(shop: Shop) -> None:
    """Case 17: it takes 2 s; no call about the message follows its delete, and no error."""
    shop.queue("calm", hides=30)
    (worker,) = shop.start("w1", queue="calm", lease_statement_timeout=5, lease_grace=6)
    run = shop.send("hold", "go", 1, queue="calm")
    shop.entered(run)
    shop.sqs.faults.delay("ChangeMessageVisibilityBatch", seconds=2)
    slowly(lambda: shop.sqs.pending_of("ChangeMessageVisibilityBatch"), what="a slow heartbeat")
    shop.open("go")
    assert shop.outcome(run) == ("SUCCESS", [1, 1])
    shop.settled(run)
    shop.empty("calm")
    # One more message, so that everything of the first is over.
    following = shop.send("hold", "go", 2, queue="calm")
    assert shop.outcome(following) == ("SUCCESS", [2, 1])

    delete = shop.sqs.calls_of("DeleteMessage")[0]
    handle = delete.parameters["ReceiptHandle"]
    beats = [call for call in shop.sqs.calls if _about(call, handle)]
    assert beats
    assert all(call.error is None and not call.entry_errors for call in beats)
    slow = max(beats, key=lambda call: call.at)
    assert delete.at >= slow.at + 2
    assert "ERROR" not in worker.log
    assert "WARNING" not in worker.log


def _about(call: object, handle: str) -> bool:
    """Whether a call asks for a message to be hidden."""
    return getattr(call, "action", "").startswith("ChangeMessageVisibility") and handle in str(
        getattr(call, "parameters", "")
    )


@pytest.mark.parametrize("attributes", [["SenderId"], {"MessageAttributeNames": ["All"]}])
def test_without_a_receive_count_attempts_are_counted_in_the_run(
    shop: Shop, attributes: object
) -> None:
    """Case 19: the broker does not say how often; "unknown", and no crash."""
    options = {
        "wait_time_seconds": 1,
        "polling_interval": 0.05,
        "fetch_message_attributes": attributes,
    }
    (worker,) = shop.start("w1", slots=2, broker_transport_options=options, lease_max_attempts=2)
    run = shop.send("hold", "go", 1)
    shop.entered(run)
    for _ in range(3):
        shop.send_again(run)
    shop.event(run, "duplicate_deferred", times=3)
    shop.open("go")
    assert shop.outcome(run) == ("SUCCESS", [1, 1])

    dying = shop.send("dies", "child")
    status, error = shop.outcome(dying)
    assert (status, type(error).__name__) == ("FAILURE", "AttemptsExhausted")
    assert [note["attempt"] for note in shop.notes("body", dying)] == [1, 2]
    assert (
        "Traceback"
        not in worker.log.replace("raised unexpected: AttemptsExhausted", "").split(dying)[0]
    )


def test_the_connection_to_the_broker_is_lost_near_the_end_of_the_body(shop: Shop) -> None:
    """Case 8: the body completes and commits while the broker is away; the rest is dropped."""
    (worker,) = shop.start("w1", slots=2)
    run = shop.send("hold", "go", 1)
    shop.entered(run)
    port = shop.sqs.port
    shop.sqs.stop()
    shop.open("go")
    assert shop.until_state(run, "succeeded")["epoch"] == 1
    assert shop.outcome(run) == ("SUCCESS", [1, 1])
    shop.sqs.start(port)
    # kombu 5.7 stops polling after a lost connection: somebody else gets the redelivery.
    shop.start("w2")
    shop.settled(run)
    shop.empty()
    assert shop.bodies(run) == 1
    assert shop.told(run) == ["STARTED", "SUCCESS"]
    assert worker.alive


def test_the_broker_is_restarted_while_the_body_runs(shop: Shop) -> None:
    """Case 9: the first copy keeps its lease and completes; nothing has to be cancelled."""
    (worker,) = shop.start("w1", slots=2)
    run = shop.send("hold", "go", 1, link=shop.signature("after"))
    shop.entered(run)
    port = shop.sqs.port
    shop.sqs.stop()
    worker.logged("could not keep messages")
    shop.sqs.start(port)
    # kombu 5.7 stops polling after a lost connection: somebody else gets what comes next.
    shop.start("w2", slots=2)
    shop.renewed(run, beyond=shop.store.leases(run)[0]["expires_at"])
    shop.open("go")
    assert shop.outcome(run) == ("SUCCESS", [1, 1])
    row = shop.settled(run)
    assert (row["epoch"], row["recoveries"], row["replays"]) == (1, 0, 0)
    shop.noted("after")
    shop.empty()
    assert shop.bodies(run) == 1
    assert len(shop.notes("after")) == 1
    assert worker.alive


def test_on_a_fifo_queue_refused_handles_do_not_hurt_the_worker(shop: Shop) -> None:
    """Case 14: an expired handle in the heartbeat, in a defer and at shutdown."""
    queue = "orders.fifo"
    shop.queue(queue, ContentBasedDeduplication=True)
    (worker,) = shop.start("w1", slots=2, queue=queue, worker_prefetch_multiplier=2)
    run = shop.send("hold", "go", 1, queue=queue, MessageGroupId="a")
    shop.entered(run)

    # In the heartbeat: the message is hidden no longer, and comes back to wait for its turn. A
    # duplicate in another group does not wait; its deferral is refused as well.
    refused = shop.sqs.faults.fail(
        "ChangeMessageVisibility",
        code="InvalidParameterValue",
        message="Message does not exist or is not available for visibility timeout change.",
    )
    shop.sqs.clock.advance(60)
    worker.logged(f"[{run}] received", times=2)
    shop.send("hold", "go", 1, queue=queue, MessageGroupId="b", task_id=run)
    shop.event(run, "duplicate_deferred")
    slowly(lambda: refused.fired, what="the refused deferral")
    worker.logged("is not kept hidden any more")
    assert shop.run(run)["lease_status"] == "active"
    shop.open("go")
    assert shop.outcome(run) == ("SUCCESS", [1, 1])
    shop.settled(run)

    # At shutdown: messages that wait in the worker are given back with expired handles.
    held = [
        shop.send("hold", "later", n, queue=queue, MessageGroupId=f"group-{n}") for n in range(4)
    ]
    for one in held:
        worker.logged(f"[{one}] received")
    shop.sqs.clock.advance(60)
    worker.term()
    worker.logged("Warm shutdown")
    shop.open("later")
    assert worker.ended() == 0
    shop.start("w2", slots=2, queue=queue)
    for n, one in enumerate(held):
        assert shop.outcome(one) == ("SUCCESS", [n, 1])
        assert shop.bodies(one) == 1
    shop.empty(queue)
    assert shop.bodies(run) == 1
    assert shop.told(run) == ["STARTED", "SUCCESS"]


def test_on_a_fifo_queue_each_trigger_carries_its_group(shop: Shop) -> None:
    """The next stage's message is not taken for a repeat of the one before."""
    queue = "orders.fifo"
    shop.queue(queue)
    shop.start("w1", queue=queue)
    for step in range(3):
        shop.open(f"go-{step}")
    run = shop.send("stages", "go", 3, queue=queue, MessageGroupId="a")
    assert shop.outcome(run) == ("SUCCESS", [0, 1, 4])
    shop.settled(run)
    sent = [c.parameters for c in shop.sqs.calls_of("SendMessage", queue)]
    assert {one["MessageGroupId"] for one in sent} == {"a"}
    assert len({one["MessageDeduplicationId"] for one in sent}) == len(sent) == 4
