"""How a delivery ends: first the commit, then what Celery is told of it.

Whatever a body does (return, fail, retry, replace itself, hand off) is committed under the
epoch before Celery sees it. An outcome that was committed and not told is told by a replay.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from celery import states
from celery.app.trace import IGNORED
from celery.exceptions import Ignore, Reject, Retry

from celery_lease.errors import LeaseLost
from celery_lease.fates import Kind, fate_of
from celery_lease.interrupts import no_soft_limit
from celery_lease.local import current_eager_run
from celery_lease.outcomes import REPLACED, recorded
from celery_lease.postpone import captured_retry, postpone
from celery_lease.replacement import Replaced, send_replacement
from celery_lease.results import Defer, Told, voice_of
from celery_lease.states import RunState, is_dead_letter
from celery_lease.successors import fix_successors, steady_ids
from celery_lease.trigger import Envelope

if TYPE_CHECKING:
    from celery_lease.application import Leasing
    from celery_lease.delivery import Delivery
    from celery_lease.execution import Execution
    from celery_lease.store import Replay

__all__ = ["Conclusion"]

logger = logging.getLogger(__name__)

_CELERY_STATES = {
    RunState.SUCCEEDED: states.SUCCESS,
    RunState.FAILED: states.FAILURE,
    RunState.REVOKED: states.REVOKED,
}


class Conclusion:
    """What becomes of one delivery of ``task``, in the process that runs its body."""

    def __init__(self, task: Any, leasing: Leasing) -> None:
        self._task = task
        self._leasing = leasing
        self._request = task.request
        self._voice = voice_of(task.request.id)

    def of_body(self, execution: Execution, body: Callable[[], Any]) -> Any:
        """Run the body under its lease; what it returns or raises has been committed."""
        voice = self._voice
        voice.claimed = True
        voice.holds = execution.holds
        self._say_started()

        def prepared_body() -> Any:
            if voice.before_start is not None:
                voice.before_start()
            return body()

        try:
            with captured_retry() as caught:
                value = execution.run(prepared_body)
            if caught.replacement is not None:
                raise Replaced
            if caught.envelope is not None:
                raise Retry("retry(throw=False)")
            deliver = self._task.has_to_deliver(self._request)
            self._committed(execution, lambda: execution.complete(value, deliver=deliver))
        except Defer:
            raise
        except Retry as again:
            self._committed(execution, partial(postpone, self._task, execution, caught, again))
            self._after_postponing(execution, at_once=caught.delay <= 0)
            raise
        except Replaced:
            assert caught.replacement is not None
            self._committed(execution, partial(execution.replace, caught.replacement))
            voice.outcome = IGNORED
            send_replacement(self._task.app, execution.run_id, caught.replacement)
        except Ignore:
            if not execution.ended:
                self._committed(execution, execution.finish_ignored)
            raise
        except Reject as rejected:
            self._rejected(execution, rejected)
            raise
        except Exception as error:
            # Also a result that cannot be encoded: nothing was committed for it.
            self._failed(execution, error)
            raise
        self._after_commit(execution.run_id, states.SUCCESS)
        return value

    def _failed(self, execution: Execution, error: Exception) -> None:
        """Commit what the error's fate says; raises Celery's ``Retry`` for another attempt."""
        fate = fate_of(self._task, error)
        if fate.kind is Kind.AGAIN and execution.may_try_again and not self._request.is_eager:
            self._committed(execution, partial(execution.try_again, error, fate.delay))
            self._after_postponing(execution, at_once=fate.delay <= 0)
            raise Retry(exc=error, when=fate.delay) from error
        leave = fate.kind is Kind.LEAVE
        deliver = self._task.has_to_deliver(self._request, failed=True)
        self._committed(execution, partial(execution.fail, error, deliver=deliver, leave=leave))
        self._after_commit(execution.run_id, states.FAILURE)
        self._voice.leaves = leave

    def _after_postponing(self, execution: Execution, *, at_once: bool) -> None:
        """RETRY is told before the next holder can begin, and not once it has begun."""
        self._voice.outcome = states.RETRY
        self._voice.holds = execution.is_still_postponed
        if at_once and not self._request.is_eager:
            self._voice.until_told.callback(execution.send_trigger)

    def _rejected(self, execution: Execution, rejected: Reject) -> None:
        """The body raised Celery's ``Reject``: again with a new message, or never."""
        if rejected.requeue:
            self._committed(execution, lambda: execution.hand_back("rejected"))
            if self._request.is_eager:
                return
            raise Ignore("rejected, to be tried again")
        self._committed(execution, partial(execution.fail, rejected, deliver=False))

    def _committed(self, execution: Execution, commit: Callable[[], None]) -> None:
        """Commit, or tell Celery that the lease is lost.

        A soft time limit comes too late from here on.
        """
        if not self._request.is_eager:
            self._voice.until_told.enter_context(no_soft_limit())
        try:
            commit()
        except LeaseLost as lost:
            raise execution.translated(lost) from None

    def _after_commit(self, run_id: str, outcome: str) -> None:
        """From here on nothing but ``outcome`` may be told, and the same tasks are sent."""
        request = self._request
        self._voice.outcome = outcome
        fix_successors(run_id, request)
        if request.is_eager:
            current_eager_run().outcome = outcome
        else:
            self._voice.until_sent.enter_context(steady_ids(run_id))
        if outcome == states.SUCCESS:
            request.errbacks = []
        else:
            request.callbacks = []

    def of_record(self, delivery: Delivery, replay: Replay) -> Any:
        """Hand the recorded outcome to Celery, without running the body."""
        request, voice = self._request, self._voice
        logger.info(
            "replaying the outcome of run=%s epoch=%s holder=%s task=%s state=%s reason=%s",
            delivery.run_id,
            replay.epoch,
            delivery.holder,
            self._task.name,
            replay.state,
            replay.reason,
        )
        if replay.envelope is not None:
            _, _, embed = Envelope.load(replay.envelope).unpack()
            for name in ("callbacks", "errbacks", "chain", "chord"):
                setattr(request, name, embed.get(name))
        if not request.is_eager:
            voice.until_told.enter_context(no_soft_limit())
        if replay.reason == REPLACED and replay.outcome is not None:
            voice.outcome = IGNORED
            send_replacement(self._task.app, delivery.run_id, replay.outcome)
        outcome = recorded(self._leasing.results, self._task.app.backend, replay)
        self._after_commit(delivery.run_id, _CELERY_STATES[outcome.state])
        voice.leaves = is_dead_letter(replay.dead_letter, replay.epoch, delivery.expected)
        if outcome.state is RunState.SUCCEEDED:
            return outcome.value
        assert outcome.error is not None
        if outcome.state is RunState.REVOKED and not request.is_eager:
            self._tell_revoked(outcome.error)
            raise Told(str(outcome.error))
        raise outcome.error

    def _tell_revoked(self, error: BaseException) -> None:
        """REVOKED to the backend, the chord and the rest of the chain; then the errbacks."""
        self._task.backend.mark_as_failure(
            self._request.id,
            error,
            request=self._request,
            store_result=not self._task.ignores_result(self._request),
            state=states.REVOKED,
        )

    def _say_started(self) -> None:
        task, request = self._task, self._request
        if task.track_started and not request.is_eager and not task.ignores_result(request):
            task.backend.store_result(
                request.id,
                {"pid": os.getpid(), "hostname": request.hostname},
                states.STARTED,
                request=request,
            )
