"""Workers with leases beside workers without, beside other releases, and the way there and back."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import pytest
from billiard.einfo import ExceptionInfo
from billiard.exceptions import WorkerLostError
from celery import Celery
from celery.concurrency.asynpool import ResultHandler
from sqlalchemy import create_engine, text

from celery_lease import Runs
from celery_lease.policy import LeasePolicy
from celery_lease.settings import Settings
from celery_lease.trigger import EPOCH_HEADER, Envelope
from tests.integration import fleet
from tests.integration.guest import Guest, app_of, leased
from tests.workers import BOTH, Shop, Worker, headers_of, slowly

#: Otherwise the message comes back without its epoch, and a switched-off worker does it again.
needs_every_result = pytest.mark.skipif(
    not hasattr(ResultHandler, "_finish_partial_read"),
    reason="this Celery loses what a child tells it just when the worker is told to stop",
)


@pytest.fixture
def store_url(request: pytest.FixtureRequest, database: str) -> str:
    """A database of this test alone: its tables are changed."""
    fixture = {"sqlite": "sqlite_url", "postgresql": "empty_postgresql_url"}[database]
    return str(request.getfixturevalue(fixture))


# -- switched-off workers ---------------------------------------------------------------------


@needs_every_result
def test_a_switched_off_worker_goes_on_with_a_run_that_began_under_a_lease(shop: Shop) -> None:
    """Its trigger carries an epoch: the run is claimed, and its checkpoint is not lost."""
    leased = shop.start("leased")[0]
    run = shop.send("steps", "step", 3)
    shop.entered(run)
    shop.open("step-0")
    leased.term()
    shop.event(run, "handed_off")
    leased.ended()
    shop.start("plain", lease_enabled=False)
    for step in range(1, 3):
        shop.open(f"step-{step}")
    assert shop.outcome(run) == ("SUCCESS", [3, 2])
    assert [note["start"] for note in shop.notes("body", run)] == [0, 1]
    assert shop.state(run) == "succeeded"


def both_kinds(folder: Path, body: Callable[..., Any]) -> tuple[Guest, Guest, Any]:
    """A switched-on and a switched-off worker on one queue and store, and the task."""
    on, off = (
        Guest(app_of(folder, task_default_queue=f"queue-of-{folder.name}", lease_enabled=enabled))
        for enabled in (True, False)
    )
    task = leased(on.app, name="t", bind=True)(body)
    leased(off.app, name="t", bind=True)(body)
    return on, off, task


def enqueued(guest: Guest, task: Any, *args: Any) -> str:
    """A run that the store knows and nobody has claimed, in place of its message."""
    run_id = str(task.delay(*args).id)
    request = guest.request(guest.message())
    guest.store.enqueue(run_id, task="t", terms=request._terms, envelope=request._parent.envelope())
    return run_id


def epoch_of(self: Any) -> int:
    """The epoch of its lease; in a plain execution 1 as well."""
    return int(self.lease.epoch)


def test_a_switched_off_worker_takes_a_trigger_at_epoch_0_under_a_lease(tmp_path: Path) -> None:
    on, off, task = both_kinds(tmp_path, epoch_of)
    run = enqueued(on, task)
    on.reap()
    message = off.message()
    assert message.headers[EPOCH_HEADER] == 0
    off.deliver(message)
    assert on.row(run)["state"] == "succeeded"
    assert on.row(run)["settled_at"] is not None
    assert off.fates == ["ack"]


def test_a_switched_off_worker_abandons_the_leased_run_of_a_dead_child(tmp_path: Path) -> None:
    """Celery would give the trigger back, to be dropped as long as the dead child's lease lives."""
    on, off, task = both_kinds(tmp_path, epoch_of)
    run = enqueued(on, task)
    on.reap()
    request = off.request(off.message())
    request.on_accepted(1, 0.0)
    on.store.claim(run, 0, request._holder, task="t", terms=request._terms)
    request.on_failure(info_of(WorkerLostError("killed")))
    assert on.row(run)["state"] == "ready"
    assert off.fates == ["ack"]


def info_of(error: BaseException) -> ExceptionInfo:
    """What billiard hands to a request for an error."""
    try:
        raise error
    except BaseException:  # noqa: BLE001 - any kind
        return ExceptionInfo()


def test_a_switched_off_worker_asks_no_store_for_a_message_without_an_epoch(
    tmp_path: Path,
) -> None:
    _, off, task = both_kinds(tmp_path, epoch_of)
    result = task.delay()
    off.deliver()
    assert result.get(timeout=1) == 1
    assert not (tmp_path / "leases.sqlite3").exists()


def test_stored_runs_come_to_their_end_by_switched_off_workers_and_the_reap_command(
    shop: Shop,
) -> None:
    """Nobody sweeps but the command; what it triggers is done once, under a lease."""
    terms = LeasePolicy().terms(Settings.defaults())
    for number in range(3):
        headers = {"id": f"run-{number}", "task": "shop.leased_add", "lang": "py"}
        envelope = Envelope.pack(
            args=[number, 1],
            kwargs={},
            embed={},
            content_type="application/json",
            headers=headers,
            properties={"correlation_id": f"run-{number}"},
            exchange="",
            routing_key="celery",
        )
        shop.store.enqueue(
            f"run-{number}", task="shop.leased_add", terms=terms, envelope=envelope.dump()
        )
    waiting = fleet.command(shop, "lease", "runs", "--unsettled", "--json", lease_enabled=False)
    assert len(json.loads(waiting)) == 3
    reaper = fleet.in_the_background(shop, "lease", "reap", lease_enabled=False)
    shop.start("off", lease_enabled=False)
    for number in range(3):
        assert shop.outcome(f"run-{number}") == ("SUCCESS", number + 1)
        shop.settled(f"run-{number}")
        assert shop.run(f"run-{number}")["epoch"] == 1
        assert shop.bodies(f"run-{number}") == 1
    assert reaper.alive
    shop.empty()
    waiting = fleet.command(shop, "lease", "runs", "--unsettled", "--json", lease_enabled=False)
    assert json.loads(waiting) == []


# -- producers without the library, workers without the task ------------------------------------


def test_a_producer_needs_neither_the_library_nor_the_task(shop: Shop) -> None:
    run = fleet.produce(shop, "shop.leased_add", 1, 2)
    shop.start("w1")
    assert shop.outcome(run) == ("SUCCESS", 3)
    assert shop.settled(run)["epoch"] == 1
    shop.empty()


def test_a_worker_without_the_task_neither_claims_nor_charges_an_attempt(shop: Shop) -> None:
    """Celery rejects what it does not know; a run that the store knows is triggered again.

    A first message is as lost as Celery loses it: not at all behind a redrive policy, which
    makes kombu 5.7 leave it in the queue, where it comes back, as older releases always do.
    """
    dead = shop.sqs.create_queue("dead")
    arn = shop.sqs.client().get_queue_attributes(QueueUrl=dead, AttributeNames=["QueueArn"])
    policy = {"deadLetterTargetArn": arn["Attributes"]["QueueArn"], "maxReceiveCount": "20"}
    url = shop.sqs.client().get_queue_url(QueueName="celery")["QueueUrl"]
    shop.sqs.client().set_queue_attributes(
        QueueUrl=url, Attributes={"RedrivePolicy": json.dumps(policy)}
    )
    known = shop.start("w1", lease_retrigger_after=2)[0]
    begun = shop.send("steps", "step", 2)
    shop.entered(begun)
    shop.open("step-0")
    known.term()
    shop.event(begun, "handed_off")
    known.ended()
    attempt = shop.run(begun)["attempt"]
    first = shop.send("leased_add", 1, 2)

    ignorant = fleet.start(shop, "ignorant", app=fleet.TALLY)[0]
    ignorant.logged("Received unregistered task of type", times=2)
    for run in (begun, first):
        assert shop.outcome(run)[0] == "FAILURE"
    ignorant.term()
    ignorant.ended()
    assert shop.run(begun)["attempt"] == attempt
    assert shop.state(begun) == "ready"
    assert len(shop.store.leases(begun)) == 1
    assert shop.state(first) is None
    assert shop.events(first) == []

    shop.open("step-1")
    shop.start("w2")
    assert shop.settled(begun)["epoch"] == 2
    assert shop.settled(first)["attempt"] == 1
    assert shop.told(begun)[-1] == "SUCCESS"
    assert shop.outcome(first) == ("SUCCESS", 3)


# -- an older release beside a newer one ----------------------------------------------------------


def of_a_newer_release(shop: Shop) -> None:
    """Columns, keys, states and events that this release does not know."""
    shop.store.create_schema()
    known = LeasePolicy().terms(Settings.defaults())
    policy = json.dumps({**json.loads(known.dump()), "urgency": {"level": 3}})
    headers = {"id": "stored", "task": "shop.leased_add", "lang": "py", "x_new": [1]}
    envelope = Envelope.pack(
        args=[40, 2],
        kwargs={},
        embed={},
        content_type="application/json",
        headers=headers,
        properties={"correlation_id": "stored"},
        exchange="",
        routing_key="celery",
    )
    blob = json.dumps({**json.loads(envelope.dump()), "tenant": "north"}).encode()
    engine = create_engine(shop.store_url)
    insert = text(
        "INSERT INTO celery_lease_run (run_id, namespace, task, policy, state, epoch, envelope,"
        " deliver, trigger_due, created_at, colour)"
        " VALUES (:run, :namespace, 'shop.leased_add', :policy, :state, 0, :envelope, true,"
        " :due, 1, 'red')"
    )
    row = {"namespace": shop.namespace, "policy": policy, "envelope": blob, "due": 1.0}
    with engine.begin() as connection:
        for table in ("run", "lease", "stage", "event", "worker"):
            connection.execute(text(f"ALTER TABLE celery_lease_{table} ADD COLUMN colour TEXT"))
            connection.execute(text(f"ALTER TABLE celery_lease_{table} ADD COLUMN weight INTEGER"))
        _allow_every_word(connection)
        connection.execute(insert, row | {"run": "stored", "state": "ready"})
        connection.execute(insert, row | {"run": "frozen", "state": "frozen"})
        connection.execute(
            text(
                "INSERT INTO celery_lease_lease (run_id, epoch, holder, status, duration,"
                " acquired_at, expires_at, heartbeat_at, colour)"
                " VALUES ('frozen', 0, 'new/1', 'active', 1, 1, 9e9, 1, 'red'),"
                " ('stored', 0, 'new/2', 'melting', 1, 1, 2, 1, 'red')"
            )
        )
        connection.execute(
            text(
                "INSERT INTO celery_lease_event (run_id, kind, reason, at, colour)"
                " VALUES ('stored', 'teleported', 'to the north', 1, 'red')"
            )
        )
    engine.dispose()


def _allow_every_word(connection: Any) -> None:
    """As a newer release's own CHECK would."""
    if connection.dialect.name == "sqlite":
        connection.execute(text("PRAGMA ignore_check_constraints = ON"))
        return
    for table, name in (("run", "state"), ("lease", "status")):
        connection.execute(
            text(f"ALTER TABLE celery_lease_{table} DROP CONSTRAINT celery_lease_{table}_{name}")
        )


@pytest.mark.parametrize("database", BOTH)
def test_an_older_release_works_on_what_a_newer_one_has_written(shop: Shop) -> None:
    """It does what it knows and leaves alone what it does not; nothing ends its loops."""
    of_a_newer_release(shop)
    worker = shop.start("w1")[0]
    fresh = shop.send("leased_add", 1, 2)
    assert shop.outcome("stored") == ("SUCCESS", 42)
    assert shop.outcome(fresh) == ("SUCCESS", 3)
    shop.settled("stored")
    shop.event("frozen", "unknown_state_dropped")
    assert shop.state("frozen") == "frozen"
    assert [lease["status"] for lease in shop.store.leases("frozen")] == ["active"]
    assert "a pass failed" not in worker.log
    assert "Traceback" not in worker.log

    app = Celery("operator", set_as_current=False)
    app.conf.update(lease_store_url=shop.store_url, lease_namespace=shop.namespace)
    runs = Runs(app)
    assert {run.run_id: run.state for run in runs.list()} == {
        "stored": "succeeded",
        "frozen": "frozen",
        fresh: "succeeded",
    }
    assert "teleported" in [moment.what for moment in runs.story("stored").timeline]
    assert "frozen" in fleet.command(shop, "lease", "runs")
    assert "frozen" in fleet.command(shop, "lease", "show", "frozen")


# -- the way there and back -----------------------------------------------------------------------


class Producer:
    """Sends a task again and again, as long as the block lasts."""

    def __init__(self, shop: Shop, steps: int) -> None:
        self._shop = shop
        self._steps = steps
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._send, daemon=True)
        self.sent: list[str] = []

    def _send(self) -> None:
        while not self._ended.wait(0.7):
            arguments = (len(self.sent), self._steps)
            self.sent.append(str(self._shop.client.send_task("tally.count", arguments).id))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(20)


@pytest.fixture
def patient(shop: Shop) -> Shop:
    """A queue that hides a message for longer than a plain task takes."""
    url = shop.sqs.client().get_queue_url(QueueName="celery")["QueueUrl"]
    shop.sqs.client().set_queue_attributes(QueueUrl=url, Attributes={"VisibilityTimeout": "20"})
    return shop


@needs_every_result
@pytest.mark.timeout(240)
def test_a_deployment_gets_leases_and_loses_them_again_and_no_task_is_lost_or_doubled(
    patient: Shop,
) -> None:
    """Plain, switched off, leased, switched off, plain: worker by worker, under load."""
    shop, steps = patient, 5
    with Producer(shop, steps) as producer:
        _replace(shop, "plain", library=False)
        _replace(shop, "off", lease_enabled=False)
        _replace(shop, "leased")
        slowly(lambda: shop.store.list_runs(state="succeeded"), what="a leased run")
        _replace(shop, "off-again", lease_enabled=False)
        fleet.in_the_background(shop, "lease", "reap", app=fleet.TALLY, lease_enabled=False)
        _nothing_is_left_to_the_library(shop)
        _replace(shop, "plain-again", library=False)
    for number, task_id in enumerate(producer.sent):
        assert shop.outcome(task_id) == ("SUCCESS", number)
    shop.empty()
    begun = shop.notes("begun")
    kinds = {note["epoch"] is None for note in begun}
    assert kinds == {True, False}, "plain and leased executions"
    assert any((note["epoch"] or 0) > 1 for note in begun), "a run that was handed off"
    counted = Counter((note["number"], note["step"]) for note in shop.notes("counted"))
    assert counted == Counter(
        {(number, step): 1 for number in range(len(producer.sent)) for step in range(steps)}
    )


def _replace(shop: Shop, kind: str, **options: Any) -> None:
    """New workers of a kind beside the old ones, which then end one by one; tasks go on."""
    old = [worker for worker in shop.workers if worker.alive and "reap" not in worker.name]
    fleet.start(shop, f"{kind}-1", f"{kind}-2", **options)
    for worker in old:
        _begins_a_task(shop, worker)
        worker.term()
        assert worker.ended() == 0


def _begins_a_task(shop: Shop, worker: Worker) -> None:
    """Wait until the worker has just begun another task, to be told to stop in its middle."""

    def begun() -> int:
        node = f"{worker.name}@test"
        return len([note for note in shop.notes("begun") if note["node"] == node])

    before = begun()
    slowly(lambda: begun() > before, what=f"worker {worker.name} to begin a task")


def _nothing_is_left_to_the_library(shop: Shop) -> None:
    """What the page says is to be true before the library is taken out."""
    slowly(lambda: not shop.store.list_runs(unsettled=True), what="runs to be settled")
    slowly(lambda: not _triggers(shop), what="triggers to be taken from the queue")


def _triggers(shop: Shop) -> list[str]:
    """Messages in the queue that belong to leased runs."""
    return [m.body for m in shop.sqs.messages("celery") if EPOCH_HEADER in headers_of(m.body)]
