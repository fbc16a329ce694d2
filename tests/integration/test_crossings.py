"""Where one feature meets another: delays, retries, replacements, signals, FIFO turns."""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from billiard.einfo import ExceptionInfo
from billiard.exceptions import SoftTimeLimitExceeded, WorkerLostError
from celery.exceptions import Retry
from celery.signals import after_task_publish, before_task_publish
from kombu import Exchange, Queue
from kombu.exceptions import EncodeError

from celery_lease.visibility import Held
from tests.integration.guest import Guest, app_of, leased, replaced
from tests.services import ServiceMissing, find_broker, missing
from tests.workers import slowly

HOUR = 3600.0


def _identity(value: Any = None) -> Any:
    return value


@pytest.fixture
def guest(tmp_path: Path) -> Guest:
    """A guest whose app has a task ``t`` that returns its argument."""
    app = app_of(tmp_path)
    leased(app, name="t")(_identity)
    return Guest(app)


def test_a_producer_may_be_given_in_celerys_place_for_it(guest: Guest) -> None:
    task = guest.app.tasks["t"]
    with guest.app.producer_pool.acquire() as producer:
        later = task.apply_async((1,), None, "later", producer, countdown=HOUR)
        task.apply_async((2,), None, "now", producer)
    assert guest.row(later.id)["state"] == "ready"
    assert guest.deliver().id == "now"


def test_a_replacement_that_is_due_later_runs_then(guest: Guest) -> None:
    other = guest.app.tasks["t"].s(7).set(countdown=HOUR)

    def swap(self: Any) -> None:
        self.replace(other)

    result = leased(guest.app, name="swap", bind=True)(swap).delay()
    guest.deliver()
    assert guest.message() is None
    guest.age(HOUR + 1)
    guest.reap()
    guest.deliver()
    assert result.get(timeout=1) == 7


@pytest.mark.parametrize("when", [before_task_publish, after_task_publish])
def test_what_a_signal_handler_sends_is_not_taken_for_the_retry(guest: Guest, when: Any) -> None:
    def once_more(self: Any) -> int:
        if self.request.retries == 0:
            raise self.retry(countdown=HOUR)
        return 3

    task = leased(guest.app, name="r", bind=True)(once_more)
    result = task.delay()

    def audit(**_: Any) -> None:
        guest.app.tasks["t"].apply_async(("audit",), task_id="audit")

    when.connect(audit, sender="r")
    try:
        guest.deliver()
    finally:
        when.disconnect(audit, sender="r")
    assert guest.deliver().id == "audit"
    guest.age(HOUR + 1)
    guest.reap()
    guest.deliver()
    assert result.get(timeout=1) == 3


def test_a_child_that_dies_with_a_message_of_later_does_not_make_it_due(guest: Guest) -> None:
    app = guest.app
    app.send_task("t", (1,), task_id="later", countdown=HOUR)
    request = guest.request(guest.message())
    try:
        raise WorkerLostError("killed")
    except WorkerLostError:
        request.on_failure(ExceptionInfo())
    guest.reap()
    assert guest.message() is None
    guest.age(HOUR + 1)
    guest.reap()
    guest.deliver()
    assert guest.row("later")["state"] == "succeeded"


@pytest.mark.parametrize(
    "url",
    [
        "postgresql+psycopg://nobody@127.0.0.1:1/nowhere",
        "sqlite:////proc/nowhere/leases.sqlite3",
        "mysql+no_such_driver://nobody@127.0.0.1:1/nowhere",
        "postgresql+pg8000://nobody@127.0.0.1:1/nowhere",
    ],
)
def test_a_producer_whose_store_does_not_work_sends_as_celery_does(
    tmp_path: Path, url: str
) -> None:
    app = app_of(tmp_path, lease_store_url=url)
    task = leased(app, name="t")(_identity)
    task.apply_async((1,), countdown=HOUR)
    with app.connection_for_read() as connection:
        message = connection.channel().basic_get(app.conf.task_default_queue)
    assert message.headers["eta"] is not None


def test_a_soft_time_limit_waits_until_a_timer_is_written(guest: Guest) -> None:
    """Raised inside, it would leave a connection in the middle of a statement."""
    known = signal.getsignal(signal.SIGUSR1)
    enqueue = guest.store.enqueue
    written: list[bool] = []

    def late(*args: Any, **options: Any) -> bool:
        os.kill(os.getpid(), signal.SIGUSR1)
        written.append(enqueue(*args, **options))
        return written[0]

    def limit(*_: Any) -> None:
        raise SoftTimeLimitExceeded

    signal.signal(signal.SIGUSR1, limit)
    try:
        with replaced(guest.store, "enqueue", late), pytest.raises(SoftTimeLimitExceeded):
            guest.app.tasks["t"].apply_async((1,), countdown=HOUR)
    finally:
        signal.signal(signal.SIGUSR1, known)
    assert written == [True]


@pytest.fixture
def grouped(guest: Guest) -> Iterator[Guest]:
    """All messages belong to one FIFO group."""
    hold = guest.hidden.hold

    def of_a_group(message: Any) -> Held:
        held = hold(message)
        return Held(held.handle, "jobs.fifo", held.received_at, 1, None, group="a group")

    with replaced(guest.hidden, "hold", of_a_group):
        yield guest


def test_a_message_that_cannot_be_deleted_does_not_hold_up_its_group(grouped: Guest) -> None:
    task = grouped.app.tasks["t"]
    for name in ("one", "two"):
        task.apply_async((1,), task_id=name)
    first, second = (grouped.request(grouped.message()) for _ in "12")

    def denied(*_: Any) -> None:
        raise RuntimeError("no network")

    first._on_ack = denied
    first.take_turn(lambda: None)
    with pytest.raises(RuntimeError):
        first.acknowledge()
    second.execute_using_pool(grouped.pool)
    assert grouped.row("two")["state"] == "succeeded"


def test_points_of_time_mean_what_they_mean_in_celery(tmp_path: Path) -> None:
    app = app_of(tmp_path, enable_utc=False, timezone="Asia/Tokyo")
    task = leased(app, name="t")(_identity)
    guest = Guest(app)
    soon = datetime.now(UTC) + timedelta(seconds=HOUR)
    ways = {
        "aware": soon,
        "naive": soon.replace(tzinfo=None),
        "text": soon.isoformat(),
        "zulu": soon.replace(tzinfo=None).isoformat() + "Z",
    }
    for name, eta in ways.items():
        task.apply_async((1,), task_id=name, eta=eta)
    task.apply_async((1,), task_id="countdown", countdown=HOUR)
    for name in (*ways, "countdown"):
        assert HOUR - 30 < guest.row(name)["trigger_in"] <= HOUR, name
    task.apply_async((1,), task_id="past", eta=datetime.now(UTC) - timedelta(seconds=5))
    task.apply_async((1,), task_id="at once", countdown=0)
    guest.deliver(), guest.deliver()
    assert [guest.row(name)["state"] for name in ("past", "at once")] == ["succeeded"] * 2


def test_a_retry_over_a_connection_of_ones_own_is_caught_too(guest: Guest) -> None:
    def once_more(self: Any, number: int) -> int:
        if self.request.retries == 0:
            with guest.app.connection_for_write() as connection:
                raise self.retry(args=(number + 1,), connection=connection, countdown=0)
        return number

    result = leased(guest.app, name="r", bind=True)(once_more).delay(1)
    guest.deliver()
    guest.deliver()
    assert guest.message() is None
    assert result.get(timeout=1) == 2


@pytest.mark.parametrize("when", [60, timedelta(seconds=60), None])
def test_a_retry_that_the_body_raises_by_itself_comes_at_its_time(guest: Guest, when: Any) -> None:
    """Before, its lease was left to expire, and each such retry was an attempt."""
    seen: list[str] = []

    def twice() -> int:
        seen.append("")
        if len(seen) == 1:
            moment = datetime.now(UTC) + when if isinstance(when, timedelta) else when
            raise Retry("later", when=moment)
        return 3

    task = leased(guest.app, name="r", default_retry_delay=60)(twice)
    result = task.delay()
    guest.deliver()
    assert result.state == "RETRY"
    guest.reap()
    assert guest.message() is None
    guest.age(61)
    guest.reap()
    guest.deliver()
    assert result.get(timeout=1) == 3
    assert guest.row(result.id)["recoveries"] == 0


def test_arguments_that_cannot_be_sent_are_refused_as_by_celery(guest: Guest) -> None:
    for options in ({"countdown": HOUR}, {}):
        with pytest.raises(EncodeError):
            guest.app.tasks["t"].apply_async((object(),), **options)


def test_a_hard_limit_that_only_its_timer_tells_of_ends_the_run(guest: Guest) -> None:
    result = guest.app.tasks["t"].delay(1)
    request = guest.request(guest.message())
    guest.store.claim(
        result.id, 0, request._holder, task="t", terms=request._terms, node=None, envelope=None
    )
    request.on_timeout(False, 1)
    assert result.state == "FAILURE"
    assert guest.fates == ["ack"]


@pytest.fixture
def quorum(tmp_path: Path) -> Iterator[Guest]:
    """A guest on RabbitMQ with a quorum queue, for which Celery uses the broker's own delay."""
    delays = pytest.importorskip("kombu.transport.native_delayed_delivery")
    try:
        url = find_broker("rabbitmq")
    except ServiceMissing as exc:
        missing(str(exc))
    name = f"quorum-{uuid.uuid4().hex}"
    queue = Queue(
        name, Exchange(name, "topic"), routing_key=name, queue_arguments={"x-queue-type": "quorum"}
    )
    app = app_of(tmp_path, broker_url=url, task_default_queue=name, task_queues=[queue])
    with app.connection_for_write() as connection:
        queue(connection.channel()).declare()
        delays.declare_native_delayed_delivery_exchanges_and_queues(connection, "quorum")
        delays.bind_queue_to_native_delayed_delivery_exchange(connection, queue)
        yield Guest(app)
        queue(connection.channel()).delete()
        queue.exchange(connection.channel()).delete()


def test_a_retry_waits_in_the_store_and_not_in_rabbitmq_once_more(quorum: Guest) -> None:
    def once_more(self: Any) -> int:
        if self.request.retries == 0:
            raise self.retry(countdown=HOUR)
        return 3

    queue = quorum.app.amqp.queues[quorum.app.conf.task_default_queue]
    bound = queue(quorum.app.connection_for_read().channel())

    def arrived() -> Any:
        return slowly(bound.get, timeout=20, what="a message")

    result = leased(quorum.app, name="r", bind=True)(once_more).delay()
    quorum.deliver(arrived())
    quorum.age(HOUR + 1)
    quorum.reap()
    quorum.deliver(arrived())
    assert result.get(timeout=1) == 3
