"""FIFO and fair queues: every trigger keeps its group, and a group never overlaps."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Mapping
from typing import Any

import kombu

from tests.workers import Shop, slowly

QUEUE = "orders.fifo"
TASKS = {"imports": ["tests.integration.apps.groups"]}
#: Older ones do not give a standard queue's messages a group.
HAS_FAIR_QUEUES = kombu.VERSION[:2] >= (5, 7)


def test_every_trigger_keeps_its_group_on_fifo_and_on_fair_queues(shop: Shop) -> None:
    """Case 42: stages, retries by a timer, and what follows the death of a pool process."""
    shop.queue(QUEUE)
    (worker,) = shop.start("w1", slots=4, queue=f"{QUEUE},celery", **TASKS)
    runs: dict[str, tuple[str, str]] = {}
    for queue in (QUEUE, "celery"):
        in_group = shop.send("in_group", "a", 2, "", 1, queue=queue, MessageGroupId="a")
        hold = shop.send("hold", "go", queue=queue, MessageGroupId="b")
        runs |= {in_group: (queue, "a"), hold: (queue, "b")}
    held = [run for run, (_, group) in runs.items() if group == "b"]
    for run in held:
        shop.entered(run)
    worker.kill_children()
    for run in held:
        shop.entered(run, times=2)
    shop.open("go")
    for run in runs:
        assert shop.outcome(run)[0] == "SUCCESS"
        # Celery 5.4 may lose the report of a child that is new: then it comes by a replay.
        shop.settled(run, timeout=90)

    for run, (queue, group) in runs.items():
        sent = _sendings(shop, queue, run)
        assert len(sent) >= (4 if group == "a" else 2)
        assert ("RETRY" in shop.told(run)) == (group == "a")
        ids = [one.get("MessageDeduplicationId") for one in sent]
        if queue == QUEUE:
            assert {one["MessageGroupId"] for one in sent} == {group}
            assert None not in ids
            assert len(set(ids)) == len(ids)
        else:
            carried = {one.get("MessageGroupId") for one in sent}
            assert carried == ({group} if HAS_FAIR_QUEUES else {None})
            assert set(ids) == {None}


def test_two_workers_never_execute_two_messages_of_a_group_at_once(shop: Shop) -> None:
    """Batches of one group, hand-offs between them, and a worker killed in a body."""
    shop.queue(QUEUE)
    first = shop.send("in_group", "a", 2, "go", queue=QUEUE, MessageGroupId="a")
    runs = [
        shop.send("in_group", group, 2, queue=QUEUE, MessageGroupId=group)
        for group in ("a", "b", "c")
        for _ in range(4)
    ]
    shop.start("w1", "w2", slots=2, queue=QUEUE, worker_prefetch_multiplier=5, **TASKS)
    victim = shop.of(shop.entered(first))
    slowly(lambda: len(shop.notes("leave")) >= 4, what="some bodies of other groups")
    killed, killed_at = [victim.pid, *victim.children()], time.time()
    victim.kill()
    shop.open("go")
    for run in [first, *runs]:
        assert shop.outcome(run, timeout=90)[0] == "SUCCESS"

    _assert_no_overlap(shop, killed, killed_at)
    assert shop.events(first, "reclaimed") or shop.run(first)["recoveries"] == 1
    for run in [first, *runs]:
        group = "a" if run == first else _group_of(shop, run)
        assert {one["MessageGroupId"] for one in _sendings(shop, QUEUE, run)} == {group}


def test_messages_of_a_group_that_one_receive_brought_wait_for_each_other(shop: Shop) -> None:
    """The pool has room for all of them; on shutdown those that wait go back at once."""
    shop.queue(QUEUE, hides=10)
    first, second, third = (
        shop.send("in_group", "a", 0, f"go-{n}", queue=QUEUE, MessageGroupId="a") for n in range(3)
    )
    (worker,) = shop.start("w1", slots=4, queue=QUEUE, worker_prefetch_multiplier=3, **TASKS)
    worker.logged("] received", times=3)
    other = shop.send("in_group", "b", 0, queue=QUEUE, MessageGroupId="b")
    assert shop.outcome(other) == ("SUCCESS", "b")
    assert [shop.bodies(run) for run in (first, second, third)] == [1, 0, 0]
    shop.open("go-0")
    shop.entered(second)
    assert shop.bodies(third) == 0
    worker.term()
    worker.logged("Warm shutdown")
    shop.open("go-1")
    assert worker.ended() == 0
    changes = [c.parameters for c in shop.sqs.calls_of("ChangeMessageVisibility", QUEUE)]
    assert 0 in [int(one["VisibilityTimeout"]) for one in changes]
    shop.open("go-2")
    shop.start("w2", queue=QUEUE, **TASKS)
    assert shop.outcome(third) == ("SUCCESS", "a")
    _assert_no_overlap(shop)


def test_a_worker_that_was_paused_does_not_begin_what_waited_in_it(shop: Shop) -> None:
    """Its messages are in other hands by then: the one before is executed there once more."""
    shop.queue(QUEUE)
    first, second = (
        shop.send("in_group", "a", 0, "go", queue=QUEUE, MessageGroupId="a") for _ in range(2)
    )
    # The message that comes back takes the run over, before a reaper gives it another one.
    options = {"slots": 2, "queue": QUEUE, "lease_reap_interval": 60, **TASKS}
    (paused,) = shop.start("w1", worker_prefetch_multiplier=2, **options)
    shop.entered(first)
    paused.logged("] received", times=2)
    shop.start("w2", worker_prefetch_multiplier=2, **options)
    shop.pause(paused)
    slowly(lambda: shop.run(first)["lease_left"] < 0, what="the end of the lease")
    shop.sqs.clock.advance(100)
    again = shop.entered(first, times=2)
    assert shop.of(again) is not paused
    paused.cont()
    paused.logged("lease lost")
    paused.logged("could not defer a message of")
    assert shop.bodies(second) == 0
    shop.open("go")
    assert shop.outcome(first) == ("SUCCESS", "a")
    assert shop.outcome(second) == ("SUCCESS", "a")
    assert shop.bodies(second) == 1
    left = [note["at"] for note in shop.notes("leave", first)]
    assert shop.notes("enter", second)[0]["at"] >= max(left)


def test_a_duplicate_on_a_fifo_queue_holds_its_group_back_as_long_as_its_run_is_held(
    shop: Shop,
) -> None:
    """Dropped at the third receive, as elsewhere, it would let the next one of the group begin."""
    shop.queue(QUEUE)
    holder, _ = shop.start("w1", "w2", queue=QUEUE, worker_prefetch_multiplier=4, **TASKS)
    shop.sqs.faults.ignore("ChangeMessageVisibilityBatch", times=None)
    first = shop.send("in_group", "a", 0, "go", queue=QUEUE, MessageGroupId="a")
    if shop.of(shop.entered(first)) is not holder:
        holder = shop.other(holder)
    holder.term()  # it takes no more messages, and goes on with its body
    holder.logged("Warm shutdown")
    second = shop.send("in_group", "a", 0, queue=QUEUE, MessageGroupId="a")
    for times in range(1, 5):
        shop.sqs.clock.advance(60)
        shop.event(first, "duplicate_deferred", times=times)
    assert shop.bodies(second) == 0
    shop.open("go")
    assert shop.outcome(first) == ("SUCCESS", "a")
    shop.sqs.clock.advance(60)
    assert shop.outcome(second) == ("SUCCESS", "a")
    _assert_no_overlap(shop)


def _sendings(shop: Shop, queue: str, run: str) -> list[Mapping[str, Any]]:
    """The parameters of every message of the run that was put into the queue."""
    calls = [c.parameters for c in shop.sqs.calls_of("SendMessage", queue) if c.status == 200]
    return [one for one in calls if _id(one["MessageBody"]) == run]


def _id(body: str) -> str:
    return str(json.loads(base64.b64decode(body))["headers"]["id"])


def _group_of(shop: Shop, run: str) -> str:
    return str(shop.notes("enter", run)[0]["group"])


def _assert_no_overlap(shop: Shop, killed: list[int] | None = None, killed_at: float = 0) -> None:
    """In each group somebody leaves before the next one enters."""
    inside: dict[str, dict[str, Any]] = {}
    notes = shop.notes("enter") + shop.notes("leave")
    for note in sorted(notes, key=lambda one: float(one["at"])):
        if note["what"] == "leave":
            del inside[note["group"]]
        elif note["what"] == "enter":
            before = inside.get(note["group"])
            if before is not None:
                assert before["pid"] in (killed or ()), f"{note} beside {before}"
                assert note["at"] >= killed_at
            inside[note["group"]] = note
    assert inside == {}
