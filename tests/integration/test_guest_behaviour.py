"""What Celery promises of a task holds under a lease, and nothing that was accepted is lost."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from billiard.einfo import ExceptionInfo
from billiard.exceptions import SoftTimeLimitExceeded, Terminated, TimeLimitExceeded
from celery import Celery, chord
from celery.backends.database.models import ResultModelBase
from celery.worker import state as worker_state
from sqlalchemy import create_engine

from celery_lease import LeasedTask, LeasePolicy, Runs, current_lease
from celery_lease.errors import InvalidSetting, SchemaMissing
from celery_lease.execution import Execution
from celery_lease.fates import DELETE
from celery_lease.settings import Settings
from celery_lease.worker import LeaseConsumerStep
from tests.integration.guest import Guest, app_of, leased, replaced


def info_of(error: BaseException) -> ExceptionInfo:
    """What billiard hands to a request for an error."""
    try:
        raise error
    except BaseException:  # noqa: BLE001 - any kind
        return ExceptionInfo()


def done() -> str:
    """A body with nothing to do."""
    return "done"


def fails() -> None:
    """A body that fails."""
    raise ValueError("no")


def length(text: str) -> int:
    """A body with a large argument."""
    return len(text)


def arguments(self: Any, n: int) -> Any:
    """What a body sees of its own call."""
    return self.request.args, n


def epoch_and(self: Any, n: int) -> Any:
    """The epoch, and the argument."""
    return [self.lease.epoch, n]


# -- before the claim -----------------------------------------------------------------------


def test_a_soft_limit_while_the_store_is_awaited_loses_no_message(tmp_path: Path) -> None:
    app = app_of(tmp_path)
    task = leased(app, name="t")(done)
    guest = Guest(app)
    run_id = task.delay().id

    def away(*_: Any, **__: Any) -> Any:
        raise SoftTimeLimitExceeded

    with replaced(guest.store, "claim", away):
        guest.deliver()
    assert guest.fates == []
    assert len(guest.hidden.deferred) == 1
    assert guest.row(run_id) == {}


def test_an_unexpected_error_before_the_claim_loses_no_message(tmp_path: Path) -> None:
    app = app_of(tmp_path)
    task = leased(app, name="t")(done)
    guest = Guest(app)
    task.delay()

    def broken(*_: Any, **__: Any) -> Any:
        raise SchemaMissing

    with replaced(guest.store, "claim", broken):
        guest.deliver()
    assert guest.fates == []
    assert len(guest.hidden.deferred) == 1


def test_before_start_fails_the_run_as_in_celery(tmp_path: Path) -> None:
    app = app_of(tmp_path)

    class Base(LeasedTask):
        abstract = True

        def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
            raise ValueError(f"no start for {self.lease.run_id}")

    task = app.task(base=Base, name="t", shared=False)(done)
    guest = Guest(app)
    result = task.delay()
    guest.deliver()
    assert guest.fates == ["ack"]
    assert guest.row(result.id)["state"] == "failed"
    assert result.state == "FAILURE"


def test_before_start_is_not_called_for_a_duplicate(tmp_path: Path) -> None:
    app = app_of(tmp_path)
    calls = []

    class Base(LeasedTask):
        abstract = True

        def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
            calls.append(task_id)

    task = app.task(base=Base, name="t", shared=False)(done)
    guest = Guest(app)
    task.delay()
    message = guest.message()
    guest.deliver(message)
    guest.deliver(message)
    assert len(calls) == 1


def test_a_hard_limit_before_the_claim_loses_no_run(tmp_path: Path) -> None:
    app = app_of(tmp_path)
    task = leased(app, name="t")(done)
    guest = Guest(app)
    result = task.delay()
    request = guest.request(guest.message())
    request.on_accepted(1, 0.0)
    request.on_failure(info_of(TimeLimitExceeded(1)))
    request.on_timeout(False, 1)
    assert guest.row(result.id)["state"] == "ready"
    guest.reap()
    guest.deliver()
    assert result.get(timeout=1) == "done"


# -- ended by the parent ----------------------------------------------------------------------


def test_a_replayed_hard_limit_settles(tmp_path: Path) -> None:
    app = app_of(tmp_path)
    task = leased(app, name="t")(done)
    guest = Guest(app)
    result = task.delay()
    request = guest.claimed()

    def gone(*_: Any, **__: Any) -> Any:
        raise OSError("the result backend is away")

    with replaced(app.backend, "store_result", gone):
        request.on_failure(info_of(TimeLimitExceeded(1)))
    guest.side.heartbeat._settle()
    assert guest.row(result.id)["state"] == "failed"
    assert guest.row(result.id)["settled_at"] is None
    guest.age(120)
    guest.reap()
    guest.deliver()
    assert result.state == "FAILURE"
    assert guest.row(result.id)["settled_at"] is not None


def test_terminate_tells_revoked_only_if_the_store_agreed(tmp_path: Path) -> None:
    app = app_of(tmp_path)
    task = leased(app, name="t")(fails)
    guest = Guest(app)
    guest.side.forks = True  # only a process of its own can be killed
    result = task.delay()
    message = guest.message()
    request = guest.request(message)
    request.on_accepted(1, 0.0)
    guest.deliver(message)  # somebody else has finished the run
    killed = []
    pool: Any = type("Pool", (), {"terminate_job": lambda self, pid, sig: killed.append(pid)})()
    request.terminate(pool)
    request.on_failure(info_of(Terminated(15)))
    assert killed == [1]
    assert result.state == "FAILURE"
    assert guest.row(result.id)["state"] == "failed"


def test_terminate_revokes_a_run_before_its_claim(tmp_path: Path) -> None:
    app = app_of(tmp_path)
    task = leased(app, name="t")(done)
    guest = Guest(app)
    guest.side.forks = True  # only a process of its own can be killed
    result = task.delay()
    request = guest.request(guest.message())
    request.on_accepted(1, 0.0)
    pool: Any = type("Pool", (), {"terminate_job": lambda self, pid, sig: None})()
    request.terminate(pool)
    request.on_failure(info_of(Terminated(15)))
    guest.side.heartbeat._settle()
    assert result.state == "REVOKED"
    assert guest.row(result.id)["state"] == "revoked"


def test_a_cancelled_request_tells_no_retry(tmp_path: Path) -> None:
    app = app_of(tmp_path)
    task = leased(app, name="t")(fails)
    guest = Guest(app)
    result = task.delay()
    message = guest.message()
    request = guest.request(message)
    request.on_accepted(1, 0.0)
    guest.deliver(message)
    pool: Any = type("Pool", (), {"terminate_job": lambda self, pid, sig: None})()
    request.cancel(pool)
    assert result.state == "FAILURE"


def test_a_cold_shutdown_fails_no_body_that_runs_in_the_main_process(tmp_path: Path) -> None:
    app = app_of(tmp_path)
    requests = []

    def interrupted(self: Any) -> str:
        requests[0].cancel(guest.pool)  # as Celery's handler of SIGQUIT does
        self.lease.checkpoint(1)
        return "done"

    task = leased(app, name="t", bind=True)(interrupted)
    guest = Guest(app)
    result = task.delay()
    requests.append(guest.request(guest.message()))
    requests[0].execute_using_pool(guest.pool)
    assert guest.row(result.id)["state"] == "succeeded"


def test_a_revoked_run_is_told_once_and_settles(tmp_path: Path) -> None:
    app = app_of(tmp_path)
    task = leased(app, name="t")(done)
    guest = Guest(app)
    result = task.delay()
    assert guest.store.revoke(result.id)
    guest.deliver()
    assert result.state == "REVOKED"
    assert guest.row(result.id)["settled_at"] is not None
    assert guest.kinds(result.id).count("replayed") == 1


def test_a_revoke_that_celery_knows_of_leaves_a_running_run_alone(tmp_path: Path) -> None:
    app = app_of(tmp_path)
    task = leased(app, name="t")(done)
    guest = Guest(app)
    result = task.delay()
    message = guest.message()
    request = guest.request(message)
    guest.store.claim(result.id, 0, "somebody", task="t", terms=request._terms)
    worker_state.revoked.add(result.id)
    try:
        guest.deliver(message)
    finally:
        worker_state.revoked.discard(result.id)
    assert guest.row(result.id)["state"] == "running"


def test_a_parent_that_cannot_ask_the_store_lives_on(tmp_path: Path) -> None:
    app = app_of(tmp_path)
    task = leased(app, name="t")(done)
    guest = Guest(app)
    task.delay()
    request = guest.request(guest.message())

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("value too long")

    with replaced(guest.store, "claim", broken):
        request.on_failure(info_of(SystemExit(1)))
    assert guest.fates == []
    assert len(guest.hidden.deferred) == 1


def test_a_message_that_is_left_for_the_dead_letter_queue_settles_its_run(tmp_path: Path) -> None:
    app = app_of(tmp_path)
    task = leased(app, name="t", acks_on_failure_or_timeout=False)(fails)
    guest = Guest(app)
    result = task.delay()
    guest.deliver()
    assert guest.fates == []
    assert guest.hidden.deferred != []
    assert result.state == "FAILURE"
    assert guest.row(result.id)["settled_at"] is not None


def test_hooks_of_a_child_that_hit_its_hard_limit_are_called_for_it(tmp_path: Path) -> None:
    called: list[Any] = []

    class Hooked(LeasedTask):
        abstract = True

        def on_failure(self, *args: Any) -> None:
            called.append(("on_failure", type(args[0]).__name__, *args[1:4]))

        def after_return(self, *args: Any) -> None:
            called.append(("after_return", args[0], *args[2:5]))

    app = app_of(tmp_path)
    task = app.task(base=Hooked, shared=False, name="t")(length)
    guest = Guest(app)
    result = task.delay("text")
    request = guest.claimed()
    request.on_failure(info_of(TimeLimitExceeded(1)))
    assert called == [
        ("on_failure", "TimeLimitExceeded", result.id, ["text"], {}),
        ("after_return", "FAILURE", result.id, ["text"], {}),
    ]


def test_a_hard_limit_that_is_not_acknowledged_is_tried_again(tmp_path: Path) -> None:
    """As Celery does with ``acks_on_timeout`` off, but within the limit of attempts."""
    app = app_of(tmp_path)
    task = leased(app, name="t", acks_on_failure_or_timeout=False)(done)
    guest = Guest(app)
    result = task.delay()
    request = guest.claimed()
    request.on_failure(info_of(TimeLimitExceeded(1)))
    assert guest.row(result.id)["state"] == "ready"
    assert guest.fates == ["ack"]
    guest.reap()
    guest.deliver()
    assert result.get(timeout=1) == "done"


def test_a_failure_that_is_told_by_a_replay_ends_its_message(tmp_path: Path) -> None:
    """Celery 5.7 gives the message of a hard limit back, and then tells nobody of the failure."""
    app = app_of(tmp_path)
    options = {"acks_on_failure_or_timeout": False, "lease_fates": DELETE}
    task = leased(app, name="t", **options)(done)
    guest = Guest(app)
    result = task.delay()
    request = guest.claimed()
    request.on_failure(info_of(TimeLimitExceeded(1)))
    guest.side.heartbeat._settle()
    guest.age(120)
    guest.reap()
    again = guest.message()
    if again is not None:
        guest.deliver(again)
    assert result.state == "FAILURE"
    assert set(guest.fates) == {"ack"}
    assert guest.message() is None
    assert guest.row(result.id)["settled_at"] is not None


def test_an_error_that_is_kept_of_ignored_results_is_replayed_too(tmp_path: Path) -> None:
    app = app_of(tmp_path)
    options = {"ignore_result": True, "store_errors_even_if_ignored": True}
    task = leased(app, name="t", **options)(fails)
    guest = Guest(app)
    result = task.delay()
    with replaced(app.backend, "store_result", lambda *_, **__: None):  # it was away
        request = guest.request(guest.message())
        request.on_failure = lambda *_, **__: None  # and the main process died
        request.execute_using_pool(guest.pool)
    guest.age(120)
    guest.reap()
    guest.deliver()
    assert app.AsyncResult(result.id).state == "FAILURE"
    assert guest.row(result.id)["settled_at"] is not None


# -- what is kept -----------------------------------------------------------------------------


def test_what_celery_forgets_with_its_connection_is_hidden_no_more(tmp_path: Path) -> None:
    app = app_of(tmp_path)
    task = leased(app, name="t")(done)
    guest = Guest(app)
    for _ in range(2):
        task.delay()
    begun = guest.request(guest.message())
    waiting = guest.request(guest.message())
    begun.on_accepted(1, 0.0)
    step = LeaseConsumerStep(SimpleNamespace(app=app))
    step.stop(SimpleNamespace(app=app))
    assert [kept.holder for kept in guest.side.keeper.all()] == [begun._holder]
    assert waiting._holder != begun._holder


def test_progress_is_waited_for_from_the_claim_not_from_the_arrival(tmp_path: Path) -> None:
    app = app_of(tmp_path)
    ages = []

    def look() -> None:
        slot = guest.side.keeper.all()[0].slot
        assert slot is not None
        ages.append(time.monotonic() - slot.progress_at)

    task = leased(app, name="t")(look)
    guest = Guest(app)
    task.delay()
    request = guest.request(guest.message())
    kept = guest.side.keeper.all()[0]
    assert kept.slot is not None
    guest.side.board.write_double(kept.slot.index, 56, time.monotonic() - 1000)
    request.execute_using_pool(guest.pool)
    assert ages[0] < 10


def test_a_holder_that_was_paused_reports_no_progress_over_its_successor(tmp_path: Path) -> None:
    app = app_of(tmp_path)

    def paused(self: Any) -> str:
        if self.lease.epoch > 1:
            raise ValueError("the successor's outcome")
        self.update_state(state="PROGRESS")
        assert self.AsyncResult(self.request.id).state == "PROGRESS"
        guest.age(1000)
        guest.reap()
        guest.age(1000)
        guest.reap()
        guest.deliver()
        with replaced(Execution, "remaining", lambda _self: -1.0):
            self.update_state(state="PROGRESS")
        return "too late"

    task = leased(app, name="t", bind=True)(paused)
    guest = Guest(app)
    result = task.delay()
    guest.deliver()
    assert result.state == "FAILURE"
    assert guest.row(result.id)["state"] == "failed"


# -- one body and another -----------------------------------------------------------------------


def test_a_body_may_call_its_own_task_directly(tmp_path: Path) -> None:
    app = app_of(tmp_path)
    seen = []

    def factorial(self: Any, n: int) -> int:
        mine = current_lease().run_id
        value = 1 if n < 2 else n * self(n - 1)
        seen.append((n, self.request.id, current_lease().run_id == mine))
        return value

    task = leased(app, name="t", bind=True)(factorial)
    guest = Guest(app)
    result = task.delay(3)
    guest.deliver()
    assert result.get(timeout=1) == 6
    assert [(n, same) for n, _, same in seen] == [(1, True), (2, True), (3, True)]
    assert seen[-1][1] == result.id


def test_a_direct_call_has_a_request_of_its_own(tmp_path: Path) -> None:
    app = app_of(tmp_path)
    task = leased(app, name="t", bind=True)(arguments)
    assert task(3) == ((3,), 3)


def test_an_eager_task_inside_a_body_says_nothing_for_it(tmp_path: Path) -> None:
    app = app_of(tmp_path, task_store_eager_result=True)
    inner = leased(app, name="inner")(done)

    def outer(self: Any) -> str:
        eager = inner.apply()
        assert inner.AsyncResult(eager.id).state == "SUCCESS"
        self.update_state(state="PROGRESS", meta={"n": 1})
        assert self.AsyncResult(self.request.id).state == "PROGRESS"
        return eager.get()

    task = leased(app, name="outer", bind=True)(outer)
    guest = Guest(app)
    result = task.delay()
    guest.deliver()
    assert result.get(timeout=1) == "done"


def test_an_eager_retry_goes_on_under_the_next_epoch(tmp_path: Path) -> None:
    app = app_of(tmp_path, task_always_eager=True)
    epochs = []

    def again(self: Any, n: int) -> int:
        epochs.append(self.lease.epoch)
        if self.request.retries < 2:
            raise self.retry(args=(n + 1,), countdown=5)
        return n

    task = leased(app, name="t", bind=True)(again)
    assert task.delay(1).get() == 3
    assert epochs == [1, 2, 3]


# -- messages -----------------------------------------------------------------------------------


def test_a_compressed_message_stays_compressed_in_its_triggers(tmp_path: Path) -> None:
    app = app_of(tmp_path, task_compression="gzip")
    task = leased(app, name="t")(length)
    guest = Guest(app)
    result = task.delay("x" * 100_000)
    message = guest.message()
    small = len(message.body)
    request = guest.request(message)
    request.on_failure(info_of(SystemExit(1)))  # the child died
    guest.reap()
    trigger = guest.message()
    assert len(trigger._raw_body if hasattr(trigger, "_raw_body") else trigger.body) < 10 * small
    guest.deliver(trigger)
    assert result.get(timeout=1) == 100_000


def test_the_timeline_names_what_a_child_died_of(tmp_path: Path) -> None:
    guest = Guest(app := app_of(tmp_path))
    result = leased(app, name="t")(length).delay("x")
    guest.request(guest.message()).on_failure(info_of(SystemExit(1)))
    reasons = [moment.why for moment in Runs(app).story(result.id).timeline]
    assert "child died: SystemExit(1)" in reasons


def test_the_log_says_why_celery_ignores_a_delivery(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Celery's own line is ``Task … ignored``, for a hand-off and for a replayed revoke."""
    caplog.set_level("INFO")
    app = app_of(tmp_path)

    def in_stages(self: LeasedTask) -> None:
        self.lease.stage("one", str, 1)

    staged = leased(app, name="s", bind=True, lease_policy=LeasePolicy(stage_handoff="always"))
    task = staged(in_stages)
    guest = Guest(app)
    result = task.delay()
    guest.deliver()
    assert f"handed off run={result.id} epoch=1 " in caplog.text
    Runs(app).revoke(result.id, "customer cancelled")
    guest.reap()
    guest.deliver()
    guest.deliver()
    assert f"replaying the outcome of run={result.id} epoch=1 " in caplog.text
    assert "state=revoked reason=customer cancelled" in caplog.text


def test_a_message_of_protocol_one_is_leased_and_triggered_again(tmp_path: Path) -> None:
    app = app_of(tmp_path, task_protocol=1)
    task = leased(app, name="t", bind=True)(epoch_and)
    guest = Guest(app)
    result = task.delay(3)
    request = guest.request(guest.message())
    request.on_failure(info_of(SystemExit(1)))
    guest.reap()
    trigger = guest.message()
    assert "args" not in trigger.headers
    guest.deliver(trigger)
    assert result.get(timeout=1) == [2, 3]


def test_a_retry_under_protocol_one_is_a_postponement(tmp_path: Path) -> None:
    app = app_of(tmp_path, task_protocol=1)

    def again(self: Any, n: int) -> int:
        if self.request.retries < 1:
            raise self.retry(args=(n + 1,), countdown=0)
        return n

    task = leased(app, name="t", bind=True)(again)
    guest = Guest(app)
    result = task.delay(3)
    guest.deliver()
    guest.deliver()
    assert result.get(timeout=1) == 4


def test_one_trigger_that_cannot_be_sent_does_not_hold_up_the_others(tmp_path: Path) -> None:
    app = app_of(tmp_path)
    task = leased(app, name="t")(done)
    guest = Guest(app)
    good = task.apply_async(task_id=f"good-{tmp_path}")
    request = guest.request(guest.message())
    envelope = request._parent.envelope()
    for name, blob in ((f"bad-{tmp_path}", b"{}"), (good.id, envelope)):
        guest.store.enqueue(name, task="t", terms=request._terms, envelope=blob)
    guest.reap()
    guest.deliver()
    assert good.get(timeout=1) == "done"


# -- settings -----------------------------------------------------------------------------------


def test_annotations_may_not_take_late_acknowledgement_away(tmp_path: Path) -> None:
    app = app_of(tmp_path, task_annotations={"*": {"acks_late": False}})
    leased(app, name="t")(done)
    with pytest.raises(InvalidSetting, match="acks_late"):
        app.finalize()


def test_settings_of_others_beside_a_namespace_are_not_ours(tmp_path: Path) -> None:
    class Django:
        CELERY_LEASE_DURATION = 120
        LEASE_AGREEMENT_TEMPLATE = "flats/lease.html"

    app = Celery("django", set_as_current=False)
    app.config_from_object(Django, namespace="CELERY")
    app.conf.lease_heartbeat = 20
    settings = Settings.read(app.conf, app.namespace)
    assert (settings.duration, settings.heartbeat) == (120, 20)


# -- built-in tasks ------------------------------------------------------------------------------


def _results_in(folder: Path) -> str:
    """A result backend that overwrites any state with any other."""
    results = f"sqlite:///{folder / 'results'}"
    # Celery 5.4 makes the tables for the first database of a process only.
    ResultModelBase.metadata.create_all(create_engine(results))
    return f"db+{results}"


def test_builtin_tasks_are_leased_too_where_every_task_is(tmp_path: Path) -> None:
    app = app_of(tmp_path, task_cls=LeasedTask, backend=_results_in(tmp_path))

    @app.task(shared=False)
    def add(*numbers: Any) -> Any:
        return sum(numbers[0]) if isinstance(numbers[0], list) else sum(numbers)

    guest = Guest(app)
    result = chord([add.s(1, 2), add.s(3, 4)])(add.s())
    for _ in range(20):
        message = guest.message()
        if message is None:
            guest.age(2)
            guest.reap()
            if guest.row(result.id).get("settled_at"):
                break
            continue
        guest.deliver(message)
    assert result.get(timeout=1) == 10


def test_the_cleanup_of_results_runs_under_a_lease(tmp_path: Path) -> None:
    app = app_of(tmp_path, task_cls=LeasedTask)
    guest = Guest(app)
    result = app.tasks["celery.backend_cleanup"].apply_async(expires=43200)
    guest.deliver()
    assert guest.row(result.id)["state"] == "succeeded"


def test_a_retry_is_not_told_over_what_its_next_holder_told(tmp_path: Path) -> None:
    """The first holder was paused between its commit and the result backend."""
    app = app_of(tmp_path, backend=_results_in(tmp_path))

    def again(self: Any) -> None:
        if self.request.retries < 1:
            raise self.retry(countdown=0)
        raise ValueError("no")

    task = leased(app, name="t", bind=True)(again)
    guest = Guest(app)
    result = task.delay()
    postpone = Execution.postpone

    def slow(execution: Execution, *args: Any) -> None:
        postpone(execution, *args)
        guest.reap()
        guest.deliver()
        assert app.AsyncResult(result.id).state == "FAILURE"

    with replaced(Execution, "postpone", slow):
        guest.deliver()
    assert app.AsyncResult(result.id).state == "FAILURE"
    assert guest.message() is None
