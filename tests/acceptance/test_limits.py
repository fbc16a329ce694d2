"""Case 23: what becomes of run, result and message is what the page on limits says."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from celery import Celery

from tests.docs.pages import page, rows
from tests.workers import POOLS, Shop, Worker, slowly

IMPORTS = ["tests.integration.apps.pools"]
HASTY = {"lease_duration": 3, "lease_statement_timeout": 1, "lease_grace": 2, "worker_lost_wait": 1}
QUEUE = "limits"
LIMIT = 1.0

RAISES = "the body raises"
SOFT = "the soft time limit passes"
HARD = "the hard time limit passes"
LEAVES = "`sys.exit` in the body"
CHILD = "SIGKILL of the pool process"
WORKER = "SIGKILL of the worker"
TERMINATE = "Celery's `revoke(terminate=True)`"
UNCLAIMED = "`expires` passes before the first claim"
CLAIMED = "`expires` passes after the first claim"


@dataclass(frozen=True)
class Row:
    """What the page promises."""

    what: str
    run: str
    result: str
    message: str
    attempts: int


def table(pool: str) -> dict[str, Row]:
    """The rows of one pool, by what happens."""
    headings = ("what happens", "pool", "run", "result", "message", "attempts charged")
    found = {}
    for what, pools, run, result, message, attempts in rows(page("reference/limits.md"), *headings):
        if pool in pools.split(", "):
            found[what] = Row(what, run.strip("`"), result.strip("`"), message, int(attempts))
    return found


def _send(shop: Shop, how: str, **options: object) -> str:
    mourn = shop.signature("mourn").set(queue=QUEUE)
    sent = shop.client.send_task("pools.ends", [how], queue=QUEUE, link_error=mourn, **options)
    return str(sent.id)


def _raises(shop: Shop, worker: Worker) -> str:
    return _send(shop, "raise")


def _soft(shop: Shop, worker: Worker) -> str:
    return _send(shop, "soft", soft_time_limit=LIMIT)


def _hard(shop: Shop, worker: Worker) -> str:
    return _send(shop, "hard", time_limit=LIMIT)


def _leaves(shop: Shop, worker: Worker) -> str:
    return _send(shop, "exit")


def _child(shop: Shop, worker: Worker) -> str:
    run = _send(shop, "child")
    os.kill(shop.entered(run)["pid"], signal.SIGKILL)
    return run


def _worker(shop: Shop, worker: Worker) -> str:
    run = _send(shop, "worker")
    shop.entered(run)
    worker.kill()
    shop.start("w2", queue=QUEUE, imports=IMPORTS, **HASTY)
    return run


def _unclaimed(shop: Shop, worker: Worker) -> str:
    return _send(shop, "never", expires=-1)


def _claimed(shop: Shop, worker: Worker) -> str:
    return _send(shop, "claimed", expires=LIMIT)


#: What is done for each row, in this order: the last one leaves no worker of that pool.
DOINGS: dict[str, Callable[[Shop, Worker], str]] = {
    RAISES: _raises,
    SOFT: _soft,
    HARD: _hard,
    LEAVES: _leaves,
    UNCLAIMED: _unclaimed,
    CLAIMED: _claimed,
    CHILD: _child,
    WORKER: _worker,
}
GATES = {SOFT: "soft", HARD: "hard", CLAIMED: "claimed", TERMINATE: "terminate"}


@pytest.mark.parametrize("pool", POOLS)
def test_each_row_of_the_table_is_what_a_real_worker_does(shop: Shop, pool: str) -> None:
    shop.queue(QUEUE, hides=4)
    promised = table(pool)
    assert set(promised) - {TERMINATE} == set(DOINGS) - ({CHILD} if pool != "prefork" else set())
    (worker,) = shop.start("w1", pool=pool, queue=QUEUE, imports=IMPORTS, **HASTY)
    for what, do in DOINGS.items():
        if what in promised:
            _judge(shop, do(shop, worker), promised[what])
    if pool != "prefork":
        # Why there is no row for it.
        mine = [note for note in shop.notes("body") if shop.of(note) is worker]
        assert {note["pid"] for note in mine} == {worker.pid}


def _judge(shop: Shop, run: str, row: Row) -> None:
    match row.run:
        case "failed" | "revoked":
            assert shop.outcome(run)[0] == row.result, row
            over = shop.settled(run)
            assert (over["state"], over["recoveries"]) == (row.run, row.attempts), row
            assert shop.bodies(run) == (0 if row.what == UNCLAIMED else 1), row
            assert row.message == "deleted", row
            assert shop.receives(run, QUEUE) == [1], row
        case "ready":
            assert row.result == "STARTED", row
            assert shop.outcome(run) == ("SUCCESS", ["done", 2, 1 + row.attempts]), row
            assert shop.settled(run)["recoveries"] == row.attempts, row
            assert shop.told(run) == ["STARTED", "SUCCESS"], row
            sent = [one.get("lease_epoch", 0) for one in shop.sent("", run)]
            received = shop.receives(run, QUEUE)
            if row.message == "deleted, a new one is sent":
                assert (sent, received) == ([0, 1], [1, 1]), row
            else:
                assert row.message == "comes back", row
                slowly(lambda: max(shop.receives(run, QUEUE)) > 1, what="the message to come back")
        case "running":
            _goes_on(shop, run, row)
        case unknown:
            pytest.fail(f"{unknown} is no state of a run in {row}")
    shop.empty(QUEUE)


def _goes_on(shop: Shop, run: str, row: Row) -> None:
    entered = shop.entered(run)
    shop.passed_time(entered["at"] + LIMIT + 0.7)
    assert (shop.state(run), shop.status(run)) == (row.run, row.result), row
    assert row.message == "kept", row
    assert [m.receive_count for m in shop.sqs.messages(QUEUE)] == [1], row
    shop.open(GATES[row.what])
    assert shop.outcome(run) == ("SUCCESS", ["done", 1, 1 + row.attempts]), row
    shop.settled(run)


@pytest.mark.parametrize("pool", POOLS)
def test_terminating_by_remote_control_is_what_the_table_says(shop: Shop, pool: str) -> None:
    """SQS has no remote control; a folder of files has, and shows what becomes of a message."""
    row = table(pool)[TERMINATE]
    folders = [shop.folder / name for name in ("messages", "control")]
    for folder in folders:
        folder.mkdir()
    messages, control = map(str, folders)
    broker = {
        "data_folder_in": messages,
        "data_folder_out": messages,
        "control_folder": control,
    }
    client = Celery("client", broker="filesystem://")
    client.conf.broker_transport_options = broker
    (worker,) = shop.start(
        "w1",
        pool=pool,
        slots=2,
        imports=IMPORTS,
        environment={"SHOP_BROKER": "filesystem://"},
        broker_transport_options=broker,
        **HASTY,
    )
    run = client.send_task("pools.ends", ["terminate"]).id
    shop.entered(run)
    client.control.revoke(run, terminate=True)
    if row.run == "revoked":
        assert shop.outcome(run)[0] == row.result
        over = shop.settled(run)
        assert (over["state"], over["recoveries"]) == (row.run, row.attempts)
        assert [lease["status"] for lease in shop.store.leases(run)] == ["revoked"]
        shop.open("terminate")  # for the thread, which nobody can end
        slowly(lambda: shop.notes("signal", run)[-1]["name"] == "lease_lost", what="the signal")
    else:
        shop.passed_time(shop.entered(run)["at"] + 2)
        assert (shop.state(run), shop.status(run)) == (row.run, row.result)
        shop.open("terminate")
        assert shop.outcome(run) == ("SUCCESS", ["done", 1, 1])
    assert shop.bodies(run) == 1
    # With one more message everything about the first is over.
    shop.open("following")
    assert shop.outcome(client.send_task("pools.ends", ["following"]).id)[0] == "SUCCESS"
    worker.term()
    assert worker.ended() == 0
    client.close()
    # Had it not been acknowledged, it would have been put back; a later trigger may lie there.
    assert (run, None) not in _in_queue(folders[0])


def _in_queue(folder: Path) -> list[tuple[str, int | None]]:
    """The task and the epoch of each message that lies in the queue."""
    messages = [json.loads(path.read_text()) for path in folder.glob("*.celery.msg")]
    headers = [message["headers"] for message in messages]
    return [(one["id"], one.get("lease_epoch")) for one in headers]


def test_expires_does_not_count_after_the_first_claim(shop: Shop) -> None:
    """Neither for a hand-off nor for a retry: their triggers carry none."""
    shop.start("w1", slots=2, imports=IMPORTS)
    staged = shop.send("stages", "go", 2, expires=1.5)
    tried = shop.client.send_task("pools.slow_retry", ["late"], expires=1.5).id
    shop.noted("stage", staged)
    shop.entered(tried)
    shop.passed_time(time.time() + 1.6)
    for gate in ("go-0", "go-1", "late"):
        shop.open(gate)
    assert shop.outcome(staged) == ("SUCCESS", [0, 1])
    assert shop.outcome(tried) == ("SUCCESS", 1)
    assert [shop.settled(run)["epoch"] for run in (staged, tried)] == [3, 2]
    assert all("expires" not in one or one["expires"] is None for one in shop.sent()[2:])


def test_what_waits_for_its_rate_stays_hidden_and_runs_once(shop: Shop) -> None:
    """Two a second: the last of eight begins when its message would have come back long ago."""
    shop.queue("hasty", hides=2)
    sent = [str(shop.client.send_task("pools.quick", [n], queue="hasty").id) for n in range(8)]
    shop.start("w1", queue="hasty", slots=2, worker_prefetch_multiplier=5, imports=IMPORTS)
    for n, run in enumerate(sent):
        assert shop.outcome(run) == ("SUCCESS", n)
    shop.empty("hasty")
    begun = sorted(note["at"] for note in shop.notes("body"))
    assert begun[-1] - begun[0] > 2.2
    assert [shop.bodies(run) for run in sent] == [1] * len(sent)
    assert [shop.receives(run, "hasty") for run in sent] == [[1]] * len(sent)
    assert [shop.events(run) for run in sent] == [[]] * len(sent)


@pytest.mark.parametrize(
    ("limit", "count"), [("worker_max_tasks_per_child", 6), ("worker_max_memory_per_child", 3)]
)
def test_a_replaced_process_neither_loses_nor_doubles_a_run(
    shop: Shop, limit: str, count: int
) -> None:
    """A process for each body: replaced after one task, or for having more than a kilobyte."""
    shop.start("w1", slots=2, worker_prefetch_multiplier=3, **{limit: 1})
    sent = [shop.send("hold", "open", n, link=shop.signature("after")) for n in range(count)]
    shop.open("open")
    for n, run in enumerate(sent):
        assert shop.outcome(run) == ("SUCCESS", [n, 1])
        shop.settled(run)
    shop.noted("after", times=len(sent))
    shop.empty()
    assert len({note["pid"] for note in shop.notes("body")}) == len(sent)
    assert [shop.bodies(run) for run in sent] == [1] * len(sent)
    assert len(shop.sent("after")) == len(sent)
    assert [shop.run(run)["recoveries"] for run in sent] == [0] * len(sent)


def test_autoscale_adds_and_takes_away_processes_around_the_bodies(shop: Shop) -> None:
    """Bodies in new processes can be interrupted, and none is taken away with its process."""
    (worker,) = shop.start(
        "w1",
        options=["--autoscale=4,1"],
        environment={"AUTOSCALE_KEEPALIVE": "1"},
        worker_prefetch_multiplier=1,
    )
    runs = [shop.send("hold", f"go-{n}", n) for n in range(3)]
    lost = shop.send("stubborn", "never")
    entered = [shop.entered(run) for run in [*runs, lost]]
    assert len({note["pid"] for note in entered}) == 4
    assert shop.store.revoke(lost, "by the test")
    assert shop.noted("interrupted", lost)["error"] == "LeaseLost"
    for n in (1, 2):
        shop.open(f"go-{n}")
        assert shop.outcome(runs[n]) == ("SUCCESS", [n, 1])
    slowly(lambda: len(_living(worker)) == 1, what="one process to be left")
    shop.renewed(runs[0], beyond=shop.store.leases(runs[0])[0]["expires_at"])
    shop.open("go-0")
    assert shop.outcome(runs[0]) == ("SUCCESS", [0, 1])
    assert [shop.bodies(run) for run in [*runs, lost]] == [1] * 4
    assert shop.entered(runs[0])["pid"] in worker.children()


def _living(worker: Worker) -> list[int]:
    """The pool processes, without those that ended and were not yet looked after."""
    return [pid for pid in worker.children() if _state(pid) != "Z"]


def _state(pid: int) -> str:
    with contextlib.suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return "Z"
