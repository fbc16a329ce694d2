"""What may reach the result backend: states of the current holder, and the run's outcome."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from celery import states
from celery.exceptions import Ignore, Reject

__all__ = [
    "Defer",
    "LeasedBackend",
    "Left",
    "Told",
    "Voice",
    "speaking",
    "until_claimed",
    "voice_of",
]

#: Celery only adds one to a number, whoever asks for it.
_ADD_ONCE = """
if redis.call('SADD', KEYS[1], ARGV[1]) == 1 then
    redis.call('EXPIRE', KEYS[1], ARGV[2])
    redis.call('INCR', KEYS[2])
end
"""
#: Seconds for which Redis knows what was added, where results do not expire.
_ADDED_KEPT = 7 * 86400


class Defer(Reject):
    """Give the message back for ``delay`` seconds: neither deleted nor sent again.

    Raised in a pool child; the parent process turns it into the broker's own means.
    """

    def __init__(self, delay: float = 0.0, reason: str = "deferred") -> None:
        super().__init__(reason, requeue=True)
        self.delay = delay

    def __reduce__(self) -> tuple[type[Defer], tuple[float, str]]:
        return type(self), (self.delay, self.reason)


class Left(Reject):
    """A failure that was reported as Celery does, and whose message stays where it is.

    Raised in no body: it carries Celery's record of the failure from a pool child to its
    parent process, which leaves the message to its queue's dead-letter policy.
    """

    def __init__(self, failure: Any) -> None:
        super().__init__("left for the dead-letter policy", requeue=False)
        self.failure = failure

    def __reduce__(self) -> tuple[type[Left], tuple[Any]]:
        return type(self), (self.failure,)


class Told(Ignore):
    """The outcome was told to the backend already: Celery only lets the message go."""


@dataclass(slots=True)
class Voice:
    """What this execution may say to the result backend.

    ``None`` as outcome: the body runs under the lease and may report any state but a final
    one. Before the claim, and for a delivery that is dropped, nothing may be said.
    """

    claimed: bool = False
    outcome: str | None = None
    #: The message stays for its queue's dead-letter policy.
    leaves: bool = False
    #: Whose states it holds back; None: any task's. A body may run another one eagerly.
    task_id: str | None = None
    #: Whether the lease is still ours, as far as can be known.
    holds: Callable[[], bool] = lambda: True
    #: Celery's ``before_start``, put off until the claim.
    before_start: Callable[[], Any] | None = None
    #: What must be undone when callbacks, result and chord have been told.
    until_sent: ExitStack = field(default_factory=ExitStack)
    #: What must be undone when Celery is done with this execution.
    until_told: ExitStack = field(default_factory=ExitStack)

    def may_say(self, state: str) -> bool:
        """Whether ``state`` may be stored now."""
        if self.outcome in states.UNREADY_STATES:
            return state == self.outcome and self.holds()
        if self.outcome is not None:
            return state == self.outcome
        return self.claimed and state not in states.READY_STATES and self.holds()

    def is_about(self, task_id: str | None) -> bool:
        """Whether it holds back what is said about this task."""
        return self.task_id is None or self.task_id == task_id


_VOICE: ContextVar[Voice | None] = ContextVar("celery_lease_voice", default=None)


@contextmanager
def speaking(voice: Voice) -> Iterator[Voice]:
    """What the block says to the backend of a leased task is held to ``voice``."""
    token = _VOICE.set(voice)
    try:
        with voice.until_told, voice.until_sent:
            yield voice
    finally:
        _VOICE.reset(token)


def voice_of(task_id: str | None) -> Voice:
    """What the execution here may say; an eager one, with no tracer of ours, may say all."""
    voice = _VOICE.get()
    return voice if voice is not None and voice.is_about(task_id) else Voice()


def until_claimed(hook: Callable[..., Any]) -> Callable[..., Any]:
    """A ``before_start`` that waits for the claim: a duplicate must not be prepared for."""

    @functools.wraps(hook)
    def before_start(task: Any, task_id: str, *args: Any, **kwargs: Any) -> Any:
        voice = _VOICE.get()
        if voice is None or voice.claimed or not voice.is_about(task_id):
            return hook(task, task_id, *args, **kwargs)
        voice.before_start = functools.partial(hook, task, task_id, *args, **kwargs)
        return None

    return before_start


class LeasedBackend:
    """The app's result backend, for one leased task.

    A state that contradicts the run's outcome is not stored and not told to a chord; the
    delivery is deferred instead and the recorded outcome is replayed. Everything else goes
    through.
    """

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        if name == "_backend":  # not there yet: it is being copied
            raise AttributeError(name)
        return getattr(self._backend, name)

    def store_result(self, task_id: str, result: Any, state: str, *args: Any, **kw: Any) -> Any:
        """Store ``state`` if this execution may say it."""
        if self._silenced(task_id, state):
            return result
        return self._backend.store_result(task_id, result, state, *args, **kw)

    def mark_as_started(self, task_id: str, **meta: Any) -> Any:
        """Store STARTED if the run is held."""
        return self.store_result(task_id, meta, states.STARTED)

    def mark_as_done(
        self,
        task_id: str,
        result: Any,
        request: Any = None,
        store_result: bool = True,
        state: str = states.SUCCESS,
    ) -> Any:
        """Store the result and tell the chord, if that is the outcome."""
        if self._silenced(task_id, state):
            return None
        done = self._backend.mark_as_done(task_id, result, request, store_result, state)
        voice_of(task_id).until_sent.close()
        return done

    def mark_as_failure(self, task_id: str, exc: BaseException, *args: Any, **kw: Any) -> Any:
        """Store the failure, tell the chord and call the errbacks, if that is the outcome."""
        if self._silenced(task_id, kw.get("state", states.FAILURE)):
            return None
        failed = self._backend.mark_as_failure(task_id, exc, *args, **kw)
        voice_of(task_id).until_sent.close()
        return failed

    def mark_as_revoked(self, task_id: str, *args: Any, **kw: Any) -> Any:
        """Store REVOKED and tell the chord, if that is the outcome."""
        if not self._silenced(task_id, kw.get("state", states.REVOKED)):
            return self._backend.mark_as_revoked(task_id, *args, **kw)
        return None

    def mark_as_retry(self, task_id: str, exc: BaseException, *args: Any, **kw: Any) -> Any:
        """Store RETRY if this execution postponed its run."""
        if not self._silenced(task_id, kw.get("state", states.RETRY)):
            return self._backend.mark_as_retry(task_id, exc, *args, **kw)
        return None

    def on_chord_part_return(self, request: Any, state: str, result: Any, **kw: Any) -> Any:
        """Tell the chord, if that is the outcome."""
        if not self._silenced(getattr(request, "id", None), state):
            return self._backend.on_chord_part_return(request, state, result, **kw)
        return None

    def add_to_chord(self, group_id: str, result: Any) -> None:
        """Count one more member of a chord; the same one, added by a redone body, only once."""
        if "RedisBackend" not in (kind.__name__ for kind in type(self._backend).__mro__):
            self._backend.add_to_chord(group_id, result)  # no other knows how to
            return
        keys = [self._backend.get_key_for_group(group_id, end) for end in (".lease", ".t")]
        kept = int(self._backend.expires or _ADDED_KEPT)
        self._backend.client.eval(_ADD_ONCE, len(keys), *keys, result.id, kept)

    @staticmethod
    def _silenced(task_id: str | None, state: str) -> bool:
        voice = _VOICE.get()
        if voice is None or not voice.is_about(task_id) or voice.may_say(state):
            return False
        if voice.outcome is not None and state in states.READY_STATES:
            raise Defer(0.0, f"{state} would contradict the outcome {voice.outcome}")
        return True
