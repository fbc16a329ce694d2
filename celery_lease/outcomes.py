"""The outcome of a run: encoded before the commit, decoded for a replay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from celery.exceptions import TaskRevokedError

from celery_lease.errors import AttemptsExhausted
from celery_lease.states import RunState

if TYPE_CHECKING:
    from celery_lease.codec import Codec
    from celery_lease.store import Replay

__all__ = [
    "REPLACED",
    "Recorded",
    "RecordedFailure",
    "encode_failure",
    "encode_success",
    "recorded",
]

#: The reason of a run whose outcome is what was sent in its place.
REPLACED = "replaced"


@dataclass(frozen=True, slots=True)
class Recorded:
    """What a finished run hands to Celery: a value, or the exception that ended it."""

    state: RunState
    value: Any = None
    error: BaseException | None = None


class RecordedFailure(Exception):
    """A failure whose exception class cannot be imported here."""


def encode_success(codec: Codec, backend: Any, value: Any, run_id: str) -> bytes:
    """The result as it is stored; raises ``NotSerializable`` naming the run."""
    return codec.encode(backend.prepare_value(value), what=f"the result of run {run_id}")


def encode_failure(codec: Codec, backend: Any, error: BaseException, run_id: str) -> bytes:
    """The exception as Celery's result backends prepare one."""
    prepared = backend.prepare_exception(error, codec.serializer)
    return codec.encode(prepared, what=f"the error of run {run_id}")


def recorded(codec: Codec, backend: Any, replay: Replay) -> Recorded:
    """What ``replay`` says happened, as Celery is to be told."""
    if replay.state is RunState.REVOKED:
        return Recorded(replay.state, error=TaskRevokedError(replay.reason or "revoked"))
    if replay.state is RunState.SUCCEEDED:
        value = None if replay.outcome is None else codec.decode(replay.outcome)
        return Recorded(replay.state, value=value)
    if replay.outcome is None:
        return Recorded(replay.state, error=AttemptsExhausted(replay.reason))
    error = backend.exception_to_python(codec.decode(replay.outcome))
    if not isinstance(error, BaseException):
        error = RecordedFailure(replay.reason or "failed")
    return Recorded(replay.state, error=error)
