"""What may reach the result backend, and outcomes on their way through the store."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from celery import Celery, states
from celery.exceptions import TaskRevokedError

from celery_lease.codec import Codec
from celery_lease.errors import AttemptsExhausted, NotSerializable
from celery_lease.outcomes import encode_failure, encode_success, recorded
from celery_lease.results import Defer, LeasedBackend, Voice, speaking
from celery_lease.states import RunState
from celery_lease.store import Replay


class Recorder:
    """A result backend that remembers what it was told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str]] = []

    def store_result(self, task_id: str, result: Any, state: str, *_: Any, **__: Any) -> Any:
        self.told.append(("store", state))
        return result

    def mark_as_done(self, task_id: str, *_: Any) -> None:
        self.told.append(("done", states.SUCCESS))

    def mark_as_failure(self, task_id: str, exc: Any, *_: Any, **__: Any) -> None:
        self.told.append(("failure", states.FAILURE))

    def mark_as_revoked(self, task_id: str, *_: Any, **__: Any) -> None:
        self.told.append(("revoked", states.REVOKED))

    def mark_as_retry(self, task_id: str, exc: Any, *_: Any, **__: Any) -> None:
        self.told.append(("retry", states.RETRY))

    def on_chord_part_return(self, request: Any, state: str, result: Any, **__: Any) -> None:
        self.told.append(("chord", state))

    def get_result(self, task_id: str) -> str:
        return f"result of {task_id}"


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def backend(recorder: Recorder) -> LeasedBackend:
    return LeasedBackend(recorder)


def test_outside_an_execution_everything_goes_through(
    backend: LeasedBackend, recorder: Recorder
) -> None:
    backend.store_result("id", 1, states.SUCCESS)
    assert backend.get_result("id") == "result of id"
    assert recorder.told == [("store", states.SUCCESS)]


def test_before_the_claim_nothing_is_said(backend: LeasedBackend, recorder: Recorder) -> None:
    with speaking(Voice()):
        backend.store_result("id", {}, states.STARTED)
        backend.mark_as_started("id", pid=1)
        backend.mark_as_done("id", 1)
        backend.mark_as_failure("id", ValueError())
    assert recorder.told == []


def test_the_body_may_report_its_own_states_but_no_outcome(
    backend: LeasedBackend, recorder: Recorder
) -> None:
    with speaking(Voice(claimed=True)):
        backend.store_result("id", {}, states.STARTED)
        backend.store_result("id", {"done": 3}, "PROGRESS")
        backend.mark_as_done("id", 1)
    assert recorder.told == [("store", states.STARTED), ("store", "PROGRESS")]


def test_after_the_commit_only_the_outcome_is_told(
    backend: LeasedBackend, recorder: Recorder
) -> None:
    with speaking(Voice(claimed=True, outcome=states.SUCCESS)):
        backend.mark_as_done("id", 1)
        backend.on_chord_part_return(None, states.SUCCESS, 1)
    assert recorder.told == [("done", states.SUCCESS), ("chord", states.SUCCESS)]


def test_a_state_that_contradicts_the_outcome_defers_the_delivery(
    backend: LeasedBackend, recorder: Recorder
) -> None:
    with speaking(Voice(claimed=True, outcome=states.SUCCESS)), pytest.raises(Defer):
        backend.mark_as_failure("id", ConnectionError("the broker is away"))
    assert recorder.told == []


def test_a_deferral_travels_between_processes_with_its_delay() -> None:
    defer = pickle.loads(pickle.dumps(Defer(12.5, "busy")))
    assert (defer.delay, defer.reason, defer.requeue) == (12.5, "busy", True)


@pytest.fixture
def app() -> Celery:
    return Celery("test", set_as_current=False)


def _replay(state: RunState, outcome: bytes | None, reason: str | None = None) -> Replay:
    return Replay(state, 1, outcome, False, reason, None, 1)


def test_a_result_comes_back_as_it_was_committed(app: Celery) -> None:
    codec = Codec("json")
    blob = encode_success(codec, app.backend, {"rows": 3}, "r")
    assert recorded(codec, app.backend, _replay(RunState.SUCCEEDED, blob)).value == {"rows": 3}


@pytest.mark.parametrize("serializer", ["json", "pickle"])
def test_a_failure_comes_back_with_its_class_and_message(app: Celery, serializer: str) -> None:
    app.conf.result_serializer = serializer
    codec = Codec(serializer)
    blob = encode_failure(codec, app.backend, KeyError("no such row"), "r")
    error = recorded(codec, app.backend, _replay(RunState.FAILED, blob)).error
    assert isinstance(error, KeyError)
    assert "no such row" in str(error)


def test_a_run_that_the_guard_ended_fails_with_attempts_exhausted(app: Celery) -> None:
    outcome = recorded(
        Codec("json"), app.backend, _replay(RunState.FAILED, None, "5 attempts without progress")
    )
    assert isinstance(outcome.error, AttemptsExhausted)
    assert "5 attempts" in str(outcome.error)


def test_a_revoked_run_says_why(app: Celery) -> None:
    outcome = recorded(Codec("json"), app.backend, _replay(RunState.REVOKED, None, "expired"))
    assert isinstance(outcome.error, TaskRevokedError)
    assert "expired" in str(outcome.error)


def test_a_result_that_cannot_be_encoded_names_the_run(app: Celery) -> None:
    with pytest.raises(NotSerializable, match="run r-7"):
        encode_success(Codec("json"), app.backend, object(), "r-7")
