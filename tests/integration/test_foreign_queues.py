"""Queues that are not ours: predefined, with other people's credentials, roles and permissions."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from typing import Any

import pytest
from kombu import Connection

from celery_lease.testing.clock import advance_database_clock
from celery_lease.testing.sqs import StrictSQS
from celery_lease.visibility.sqs import SQSVisibility
from tests.workers import Shop, slowly

ROLE = "arn:aws:iam::123456789012:role/shop"
#: What the shop's workers use in any case.
POLLING = {"wait_time_seconds": 1, "polling_interval": 0.05}
STATIC_KEYS = {"AWS_ACCESS_KEY_ID": "of-the-process", "AWS_SECRET_ACCESS_KEY": "secret"}
REGION = {"AWS_DEFAULT_REGION": "us-east-1"}


# -- kombu's channels and our calls, in this process ----------------------------------------


@pytest.fixture
def sqs() -> Iterator[StrictSQS]:
    """A broker without a worker."""
    with StrictSQS() as sqs:
        yield sqs


@contextlib.contextmanager
def channel_to(sqs: StrictSQS, **options: Any) -> Iterator[Any]:
    """A channel of kombu's SQS transport."""
    with Connection(sqs.broker_url, transport_options=POLLING | options) as connection:
        yield connection.channel()


# kombu 5.3 keeps the clients of predefined queues in its class: each test names its own queue.


def received(channel: Any, queue: str, **headers: Any) -> Any:
    """A message that was sent to the queue and received from it."""
    with channel.connection.client.Producer(channel) as producer:
        producer.publish({}, routing_key=queue, headers=headers)
    message = channel.basic_get(queue)
    assert message is not None
    return message


def hidden_for(sqs: StrictSQS, queue: str) -> float:
    """Seconds for which the one message of the queue is still hidden."""
    (message,) = sqs.messages(queue)
    return (message.hidden_until or 0.0) - sqs.clock.now()


def test_a_predefined_queue_is_asked_with_its_own_keys_and_without_its_backoff(
    sqs: StrictSQS,
) -> None:
    """A deferral is no failed try: kombu's ``backoff_policy`` does not count for it."""
    url = sqs.create_queue("theirs", VisibilityTimeout=30)
    predefined = {
        "theirs": {
            "url": url,
            "region": "eu-west-1",
            "access_key_id": "their-key",
            "secret_access_key": "secret",
            "backoff_policy": {1: 500, 2: 500},
            "backoff_tasks": ["shop.hold"],
        }
    }
    visibility = SQSVisibility()
    with channel_to(sqs, predefined_queues=predefined) as channel:
        message = received(channel, "theirs", task="shop.hold")
        held = visibility.hold(message)
        assert held is not None
        assert visibility.extend([(held, 90)]) == []
        assert hidden_for(sqs, "theirs") == pytest.approx(90, abs=5)
        visibility.defer(message, held, 7)
        assert hidden_for(sqs, "theirs") == pytest.approx(7, abs=5)
        assert held.client.meta.region_name == "eu-west-1"
        assert channel.qos.can_consume()
    ours = ("ChangeMessageVisibility", "ChangeMessageVisibilityBatch")
    assert {c.access_key for c in sqs.calls if c.action in ours} == {"their-key"}


def test_a_predefined_queue_is_found_by_its_url_whatever_the_routing_key(sqs: StrictSQS) -> None:
    url = sqs.create_queue("found-by-url", VisibilityTimeout=30)
    with channel_to(sqs, predefined_queues={"found-by-url": {"url": url}}) as channel:
        message = received(channel, "found-by-url")
        message.delivery_info["routing_key"] = "orders.new"
        held = SQSVisibility().hold(message)
        assert held is not None
        assert held.queue == url


def test_a_held_message_outlives_the_session_of_its_role(
    sqs: StrictSQS, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client follows new credentials, and no new client is made for them."""
    for name, value in (STATIC_KEYS | REGION | {"AWS_ENDPOINT_URL_STS": sqs.url}).items():
        monkeypatch.setenv(name, value)
    url = sqs.create_queue("of-a-role", VisibilityTimeout=30)
    sqs.faults.shorten_sessions(2)
    visibility = SQSVisibility()
    options = {"predefined_queues": {"of-a-role": {"url": url}}, "sts_role_arn": ROLE}
    with channel_to(sqs, **options) as channel:
        held = visibility.hold(received(channel, "of-a-role"))
        assert held is not None
        keys = set()
        ends = time.monotonic() + 3.5
        while time.monotonic() < ends:
            assert visibility.extend([(held, 60)]) == []
            keys.add(sqs.calls_of("ChangeMessageVisibilityBatch")[-1].access_key)
            again = visibility.hold(received(channel, "of-a-role"))
            assert again is not None
            assert again.client is held.client
            time.sleep(0.5)
    assert len(keys) >= 2
    assert all(key.startswith("ASIA") for key in keys)
    assert all(call.error is None for call in sqs.calls)


def test_a_queue_is_asked_once_and_what_does_not_fit_is_said(
    sqs: StrictSQS, caplog: pytest.LogCaptureFixture
) -> None:
    sqs.create_queue("dead")
    arn = "arn:aws:sqs:us-east-1:123456789012:dead"
    sqs.create_queue(
        "theirs",
        VisibilityTimeout=40,
        MessageRetentionPeriod=600,
        RedrivePolicy={"deadLetterTargetArn": arn, "maxReceiveCount": 2},
    )
    visibility = SQSVisibility(retrigger_after=900)
    with channel_to(sqs, visibility_timeout=30) as channel:
        visibility.introduce(channel, ["theirs"])
        held = visibility.hold(received(channel, "theirs"))
        assert held is not None
        facts = visibility.facts_of(held)
        visibility.introduce(channel, ["theirs"])
    assert (facts.dead_letters, facts.max_receives, facts.fifo) == (True, 2, False)
    assert (facts.retention, visibility.timeout_of(held)) == (600, 40)
    asked = [c for c in sqs.calls_of("GetQueueAttributes") if "All" in _attributes(c)]
    assert len(asked) == 1
    said = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(said) == 3
    assert "40 s, not for the visibility_timeout = 30 s" in said[0]
    assert "maxReceiveCount = 2" in said[1]
    assert "MessageRetentionPeriod = 600 s, less than lease_retrigger_after = 900 s" in said[2]


def _attributes(call: Any) -> list[str]:
    return list(call.parameters.get("AttributeNames", ()))


def test_a_queue_that_could_not_be_reached_is_asked_again_and_one_that_denies_is_not(
    sqs: StrictSQS, monkeypatch: pytest.MonkeyPatch
) -> None:
    sqs.create_queue("theirs", VisibilityTimeout=40)
    now = [1000.0]
    monkeypatch.setattr("celery_lease.visibility.sqs.time.monotonic", lambda: now[0])
    with channel_to(sqs) as channel:
        held = SQSVisibility().hold(received(channel, "theirs"))
        assert held is not None
        for fault, expected in (
            (lambda: sqs.faults.drop_connection("GetQueueAttributes", times=1), 40),
            (lambda: sqs.faults.deny("GetQueueAttributes"), 30),
        ):
            visibility = SQSVisibility()
            fault()
            assert visibility.facts_of(held).dead_letters is None
            assert visibility.timeout_of(held) == 30
            sqs.faults.clear()
            now[0] += 61
            assert visibility.timeout_of(held) == expected


# -- real workers ---------------------------------------------------------------------------


def _predefined(shop: Shop, queue: str, **options: Any) -> dict[str, Any]:
    shop.queue(queue, hides=3)
    url = shop.sqs.client().get_queue_url(QueueName=queue)["QueueUrl"]
    return {"predefined_queues": {queue: {"url": url, **options}}}


def _keys(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    return _predefined(
        shop,
        "theirs.fifo",
        region="eu-west-1",
        access_key_id="their-key",
        secret_access_key="secret",
        backoff_policy={},
        backoff_tasks=["shop.hold"],
    )


def _role(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setenv("AWS_ENDPOINT_URL_STS", shop.sqs.url)
    shop.sqs.faults.shorten_sessions(4)
    predefined = _predefined(shop, "theirs")
    return predefined | {"sts_role_arn": ROLE, "sts_token_timeout": 900}


def _prefix(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setenv("AWS_ENDPOINT_URL_SQS", shop.sqs.url)
    shop.queue("prod-theirs.fifo", hides=2)
    return {"queue_name_prefix": "prod-", "region": "eu-west-1", "is_secure": False}


@pytest.mark.parametrize(
    ("queue", "options_of", "broker", "signer"),
    [
        ("theirs.fifo", _keys, {}, "their-key"),
        ("theirs", _role, {}, "ASIA"),
        ("theirs.fifo", _prefix, {"broker_url": "sqs://"}, "of-the-process"),
    ],
    ids=["predefined", "assumed-role", "environment-and-prefix"],
)
def test_heartbeat_deferral_and_triggers_work_on_queues_that_are_not_ours(
    shop: Shop,
    monkeypatch: pytest.MonkeyPatch,
    queue: str,
    options_of: Any,
    broker: dict[str, str],
    signer: str,
) -> None:
    """Bodies longer than visibility and session; a duplicate; stages with messages of their own."""
    for name, value in (STATIC_KEYS | REGION).items():
        monkeypatch.setenv(name, value)
    options = POLLING | options_of(shop, monkeypatch)
    prefix = options.get("queue_name_prefix", "")
    shop.client.conf.broker_transport_options = POLLING | {"queue_name_prefix": prefix}
    (worker,) = shop.start("w1", slots=3, queue=queue, broker_transport_options=options, **broker)
    run = shop.send("hold", "go", 1, queue=queue, MessageGroupId="a")
    staged = shop.send("stages", "go", 2, queue=queue, MessageGroupId="b")
    entered = shop.entered(run)
    shop.send("hold", "go", 1, queue=queue, task_id=run, MessageGroupId="c")
    shop.event(run, "duplicate_deferred")
    for step in range(2):
        shop.noted("stage", staged, times=step + 1)
        shop.passed_time(entered["at"] + 2.5 * (step + 1))
        shop.open(f"go-{step}")
    shop.open("go")
    assert shop.outcome(run) == ("SUCCESS", [1, 1])
    assert shop.outcome(staged) == ("SUCCESS", [0, 1])
    real = f"{prefix}{queue}"
    first = min(shop.sqs.messages(real, deleted=True), key=lambda one: one.sent_at)
    assert first.receive_count == 1
    assert shop.receives(staged, real) == [1, 1, 1]
    ours = ("ChangeMessageVisibility", "ChangeMessageVisibilityBatch")
    calls = [call for call in shop.sqs.calls if call.action in ours]
    assert all(call.access_key.startswith(signer) for call in calls)
    assert [call.error for call in calls if call.error] == []
    assert "Traceback" not in worker.log


# -- permissions ----------------------------------------------------------------------------


def test_a_worker_that_may_neither_hide_nor_delete_says_so_once_and_goes_on(shop: Shop) -> None:
    """Every message comes back, and is put off or dropped; nothing runs twice, no slot is used up."""
    shop.queue("theirs", hides=2)
    for action in ("ChangeMessageVisibility", "DeleteMessage"):
        shop.sqs.faults.deny(action)
    (worker,) = shop.start("w1", slots=2, queue="theirs")
    long = shop.send("hold", "go", 1, queue="theirs")
    shop.event(long, "duplicate_deferred")
    slowly(
        lambda: len(shop.sqs.calls_of("ChangeMessageVisibilityBatch")) >= 3,
        what="three heartbeats",
    )
    shop.open("go")
    runs = [long, *(shop.send("hold", "go", 1, queue="theirs") for _ in range(3))]
    for run in runs:
        assert shop.outcome(run) == ("SUCCESS", [1, 1])
        shop.settled(run)
    shop.event(runs[-1], "finished_dropped", times=2)
    assert [shop.bodies(run) for run in runs] == [1, 1, 1, 1]
    assert worker.log.count("Allow sqs:ChangeMessageVisibility") == 1
    assert worker.log.count("Allow sqs:DeleteMessage") == 1
    shop.sqs.faults.clear()
    shop.empty("theirs")
    assert worker.alive


def test_a_worker_that_may_not_send_keeps_the_run_and_sends_it_later(shop: Shop) -> None:
    """The next trigger stays in the outbox; the log says it a few times, not at every pass."""
    (worker,) = shop.start("w1", slots=2)
    runs = [shop.send("stages", "go", 2) for _ in range(2)]
    for run in runs:
        shop.noted("stage", run)
    shop.sqs.faults.deny("SendMessage")
    shop.open("go-0")
    shop.open("go-1")
    for run in runs:
        shop.until_state(run, "ready")
    refused = "when calling the SendMessage operation"
    worker.logged(refused)
    for _ in range(3):  # not reserved for 30 s: each pass of the reaper tries it
        tried = len(shop.sqs.calls_of("SendMessage"))
        for run in runs:
            _make_due(shop, run)
        slowly(
            lambda before=tried: len(shop.sqs.calls_of("SendMessage")) >= before + 2,
            what="another pass of the reaper",
        )
    passes = [line for line in worker.log.splitlines() if "a later pass tries" in line]
    assert len(passes) == 1
    assert "sqs:sendmessage" in passes[0]
    shop.sqs.faults.clear()
    for run in runs:
        _make_due(shop, run)
        assert shop.outcome(run) == ("SUCCESS", [0, 1])


def _make_due(shop: Shop, run: str) -> None:
    """The reservation of a trigger that could not be sent is over."""
    advance_database_clock(shop.store, 31, run_id=run)


def test_without_the_permission_to_list_queues_they_have_to_be_predefined(shop: Shop) -> None:
    """Else kombu cannot find a queue: the worker ends, and AWS's message says what is missing.

    Predefined, and declared by nobody, they need no more than receive, send, delete and hide.
    """
    options = POLLING | _predefined(shop, "celery")
    run = shop.send("stages", "go", 2)
    shop.open("go-0")
    shop.open("go-1")
    for action in ("ListQueues", "CreateQueue", "GetQueueUrl", "GetQueueAttributes"):
        shop.sqs.faults.deny(action)
    refused = shop.launch("w1")
    (worker,) = shop.start(
        "w2", broker_transport_options=options, queues_are_declared_elsewhere=True
    )
    assert shop.outcome(run) == ("SUCCESS", [0, 1])
    assert len(shop.sent(run_id=run)) == 3
    assert worker.log.count("Allow sqs:GetQueueAttributes") == 1
    assert refused.ended() != 0
    assert "sqs:listqueues" in refused.log
