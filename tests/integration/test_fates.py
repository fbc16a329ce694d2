"""What becomes of a failed task's message: deleted, left for the dead-letter queue, or again."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from celery_lease.fates import DELETE, LEAVE, Fate, LeaveMessage, TryAgain, again
from tests.integration.guest import Guest, app_of, leased
from tests.workers import Shop, headers_of, slowly

FATED = {"include": ["tests.integration.apps.fated"]}


@pytest.fixture
def jobs(shop: Shop) -> Shop:
    """A queue ``jobs`` that moves a message to ``dead`` when it was received three times."""
    shop.queue("dead")
    client = shop.sqs.client()
    url = client.get_queue_url(QueueName="dead")["QueueUrl"]
    asked = client.get_queue_attributes(QueueUrl=url, AttributeNames=["QueueArn"])
    policy = {"deadLetterTargetArn": asked["Attributes"]["QueueArn"], "maxReceiveCount": 3}
    shop.queue("jobs", RedrivePolicy=json.dumps(policy))
    return shop


def _send(shop: Shop, kind: str, *args: Any) -> str:
    return shop.send("fated", kind, *args, queue="jobs", link_error=shop.signature("mourn"))


def _dead(shop: Shop) -> list[str]:
    """The runs whose message lies in the dead-letter queue."""
    return [headers_of(m.body)["id"] for m in shop.sqs.messages("dead")]


@pytest.mark.parametrize("pool", ["prefork", "threads", "solo"])
def test_a_message_that_is_left_goes_to_the_dead_letter_queue(jobs: Shop, pool: str) -> None:
    """Case 22: its failure is told once, and it does not hold up the good ones behind it."""
    jobs.start("w1", queue="jobs", pool=pool, **FATED)
    left = _send(jobs, "unreadable")
    good = jobs.send("hold", "go", queue="jobs")
    jobs.open("go")
    assert jobs.outcome(left)[0] == "FAILURE"
    assert jobs.outcome(good)[0] == "SUCCESS"
    jobs.settled(left)
    slowly(lambda: _dead(jobs) == [left], timeout=60, what="the message in the dead-letter queue")
    jobs.empty("jobs")
    assert jobs.bodies(left) == 1
    assert jobs.told(left) == ["STARTED", "FAILURE"]
    assert len(jobs.sent("mourn")) == 1
    assert jobs.run(left)["state"] == "failed"


@pytest.mark.parametrize("pool", ["prefork", "threads", "solo"])
def test_a_failure_that_is_tried_again_counts_as_an_attempt(jobs: Shop, pool: str) -> None:
    """Case 22: again after a delay; in the end the exception itself is the outcome."""
    jobs.start("w1", queue="jobs", pool=pool, **FATED)
    luckily = _send(jobs, "unreachable", 2)
    never = _send(jobs, "slow")
    assert jobs.outcome(luckily) == ("SUCCESS", [3, None])
    status, error = jobs.outcome(never)
    assert (status, type(error).__name__) == ("FAILURE", "Slow")
    for run in (luckily, never):
        jobs.settled(run)
        notes = jobs.notes("body", run)
        assert [note["epoch"] for note in notes] == [1, 2, 3]
        assert [note["attempt"] for note in notes] == [1, 2, 3]
        assert [note["retries"] for note in notes] == [0, 0, 0]
        gaps = [after["at"] - before["at"] for before, after in itertools.pairwise(notes)]
        assert min(gaps) >= 0.2
    assert jobs.told(never)[-1] == "FAILURE"
    assert "RETRY" in jobs.told(never)
    jobs.empty("jobs")
    assert _dead(jobs) == []
    assert len(jobs.sent("mourn")) == 1


def test_a_short_delay_does_not_wait_for_the_reapers_round(jobs: Shop) -> None:
    """The worker that postpones a run knows when its trigger is due."""
    jobs.start("w1", queue="jobs", lease_reap_interval=300, **FATED)
    run = _send(jobs, "slow", 2)
    assert jobs.outcome(run, timeout=30) == ("SUCCESS", [3, None])
    assert [note["epoch"] for note in jobs.notes("body", run)] == [1, 2, 3]


def test_an_exception_may_bring_its_own_fate(jobs: Shop) -> None:
    jobs.start("w1", queue="jobs", **FATED)
    left, deleted, ordinary = (_send(jobs, kind) for kind in ("leave", "delete", "plain"))
    assert jobs.outcome(_send(jobs, "try again", 4)) == ("SUCCESS", [5, 4])
    for run in (left, deleted, ordinary):
        assert jobs.outcome(run)[0] == "FAILURE"
        jobs.settled(run)
    slowly(lambda: _dead(jobs) == [left], timeout=60, what="the message in the dead-letter queue")
    jobs.empty("jobs")


# -- what no subprocess is needed for ---------------------------------------------------------


def _fails(error: BaseException) -> Any:
    def body() -> None:
        raise error

    return body


def test_a_message_whose_worker_died_before_it_was_left_is_left_by_the_next_one(
    tmp_path: Path,
) -> None:
    """The replay that its redelivery wins tells the failure, and leaves the message too."""
    app = app_of(tmp_path)
    task = leased(app, name="t", lease_fates=LEAVE)(_fails(ValueError("no")))
    guest = Guest(app)
    result = task.delay()
    message = guest.message()
    request = guest.request(message)
    request.on_failure = lambda *_, **__: None  # the main process dies here
    request.execute_using_pool(guest.pool)
    assert result.state == "FAILURE"
    assert guest.row(result.id)["settled_at"] is None
    guest.age(120)
    guest.deliver(message)
    assert guest.row(result.id)["settled_at"] is not None
    assert guest.hidden.deferred != []
    assert guest.fates == []


def test_a_trigger_that_only_brings_the_failure_is_not_left(tmp_path: Path) -> None:
    app = app_of(tmp_path)
    task = leased(app, name="t", lease_fates=LEAVE)(_fails(ValueError("no")))
    guest = Guest(app)
    result = task.delay()
    request = guest.request(guest.message())
    request.on_failure = lambda *_, **__: None
    request.execute_using_pool(guest.pool)
    guest.age(120)
    guest.reap()
    guest.deliver()
    assert guest.row(result.id)["settled_at"] is not None
    assert guest.hidden.deferred == []
    assert guest.fates == ["ack"]


def test_a_resumed_run_does_not_leave_what_it_left_before(tmp_path: Path) -> None:
    app = app_of(tmp_path)
    task = leased(app, name="t", lease_fates=LEAVE)(_fails(ValueError("no")))
    guest = Guest(app)
    result = task.delay()
    message = guest.message()
    guest.deliver(message)
    assert guest.hidden.deferred != []
    guest.store.resume(result.id)
    guest.deliver(message)
    assert guest.fates == ["ack"]


@pytest.mark.parametrize("known", [False, None])
def test_a_queue_that_would_bring_it_back_for_ever_keeps_no_message(
    tmp_path: Path, known: bool | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a redrive policy it is deleted, and said; where that is unknown it is left."""
    app = app_of(tmp_path)
    task = leased(app, name="t", lease_fates=LEAVE)(_fails(ValueError("no")))
    guest = Guest(app)
    guest.hidden.dead_letters = known
    result = task.delay()
    message = guest.message()
    guest.deliver(message)
    assert result.state == "FAILURE"
    left = known is None
    assert ("no redrive policy" in caplog.text) is not left
    assert (len(guest.hidden.deferred), guest.fates) == ((1, []) if left else (0, ["ack"]))
    guest.deliver(message)  # a copy that comes later
    assert (len(guest.hidden.deferred), guest.fates) == ((2, []) if left else (0, ["ack", "ack"]))


def test_the_log_says_when_a_failure_is_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    app = app_of(tmp_path)
    task = leased(app, name="t", lease_fates=again(7))(_fails(ValueError("away")))
    guest = Guest(app)
    task.delay()
    guest.deliver()
    assert "retry: Retry in 7" in caplog.text
    assert "ValueError('away')" in caplog.text


def test_an_eager_run_has_no_message_and_simply_fails(tmp_path: Path) -> None:
    app = app_of(tmp_path)
    task = leased(app, name="t")(_fails(TryAgain(5, "later")))
    assert task.apply().state == "FAILURE"


def test_a_result_names_the_exception_and_its_reason(tmp_path: Path) -> None:
    """Both travel through a serializer that knows only classes and their arguments."""
    app = app_of(tmp_path, result_serializer="json")
    task = leased(app, name="t")(_fails(LeaveMessage("not a picture")))
    guest = Guest(app)
    result = task.delay()
    guest.deliver()
    with pytest.raises(LeaveMessage, match="not a picture"):
        result.get(timeout=1)


def test_celerys_own_options_are_fates(tmp_path: Path) -> None:
    """What is not acknowledged after a failure is left; an explicit fate decides first."""
    app = app_of(tmp_path)
    explicit: dict[type[BaseException], Fate] = {ValueError: DELETE}
    unacknowledged = leased(app, name="a", acks_on_failure_or_timeout=False)
    overruled = leased(app, name="b", acks_on_failure_or_timeout=False, lease_fates=explicit)
    guest = Guest(app)
    unacknowledged(_fails(ValueError("no"))).delay()
    guest.deliver()
    assert (len(guest.hidden.deferred), guest.fates) == (1, [])
    overruled(_fails(ValueError("no"))).delay()
    guest.deliver()
    assert (len(guest.hidden.deferred), guest.fates) == (1, ["ack"])


def test_a_task_that_has_failed_too_often_leaves_its_message_if_it_says_so(tmp_path: Path) -> None:
    """``again`` ends with the error's failure; the message is deleted then."""
    app = app_of(tmp_path)
    fates = {ValueError: again(0)}
    task = leased(app, name="t", lease_fates=fates)(_fails(ValueError("no")))
    guest = Guest(app)
    result = task.delay()
    for _ in range(5):
        guest.deliver()
        guest.reap()
    assert result.state == "FAILURE"
    assert guest.message() is None
    assert guest.kinds(result.id).count("postponed") == 4
