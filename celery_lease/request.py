"""``LeasedRequest``: the main process's side of one delivery.

It gives the delivery its holder before the message reaches the pool, keeps the message
hidden until it is let go, and turns what happens to the child into verbs of the store
*before* anything is reported or acknowledged.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from typing import Any

from billiard.einfo import ExceptionInfo, ExceptionWithTraceback
from billiard.exceptions import Terminated, TimeLimitExceeded, WorkerLostError
from celery import states
from celery.exceptions import Ignore, Reject, Retry, TaskRevokedError
from celery.utils.functional import maybe_list
from celery.worker import state as worker_state
from celery.worker.request import Request

from celery_lease.application import Leasing
from celery_lease.delivery import REQUEST_KEY, Delivery, new_holder
from celery_lease.fates import Kind, fate_of
from celery_lease.moments import seconds_until
from celery_lease.parent import Parent
from celery_lease.results import Defer, Left, Told, Voice, speaking
from celery_lease.successors import fix_successors, steady_ids
from celery_lease.trigger import EPOCH_HEADER
from celery_lease.turns import Turn

__all__ = ["LeasedRequest"]

logger = logging.getLogger(__name__)

_RETRY_DELAY = 5.0


class LeasedRequest(Request):
    """Celery's request of a leased task; made once a delivery, in the main process."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Celery makes a class for each task, with a way into the pool of its own."""
        super().__init_subclass__(**options)
        if "execute_using_pool" in cls.__dict__:
            cls.execute_using_pool = _in_turn(cls.__dict__["execute_using_pool"])

    def __init__(self, message: Any, **options: Any) -> None:
        super().__init__(message, **options)
        self._settles = False
        self._handled = False
        self._returned = False
        #: What becomes of the message once the failure has been reported.
        self._fate: Kind | None = None
        self._passed_on = False
        self.acknowledged = False
        leasing = Leasing.of(self._app)
        # Switched off, the store is asked only for a trigger of a run that it knows.
        leased = leasing.settings.enabled or self._request_dict.get(EPOCH_HEADER) is not None
        worker = leasing.worker if leased else None
        self._side = worker
        if worker is None:
            return
        # Celery would hold the message until then; the child moves it to a timer in the store.
        self._eta = None
        self._terms = leasing.terms(self._task.lease_policy)
        self._holder = new_holder(self._hostname)
        held = worker.hold(message)
        slot = worker.board.take(self._holder)
        self._held = held
        self._delivery = Delivery.of_message(
            message.headers if "id" in message.headers else self._request_dict,
            message.delivery_info or {},
            holder=self._holder,
            receives=held.receives if held else None,
            received_at=time.monotonic(),
            can_defer=held is not None,
            leave_delay=worker.leave_delay(held),
            attended=True,
            interruptible=worker.forks,
            in_group=held is not None and held.group is not None,
            slot=slot.index if slot else None,
            node=self._hostname,
            content_type=self._content_type or "application/json",
        )
        self._settles = True
        self._parent = Parent(
            leasing, self._task, self._delivery, self._terms, lambda: self._context
        )
        worker.keep(
            self._delivery, self._task.name, self._terms, held=held, slot=slot, message=message
        )

    # -- on the way to the pool ---------------------------------------------------------

    def revoked(self) -> bool:
        """Never decides: what Celery knows of is passed on, and the claim decides."""
        if self._side is None:
            return bool(super().revoked())
        self._passed_on = self._known_revoked()
        self._request_dict[REQUEST_KEY] = self._delivery.as_dict() | {"revoked": self._passed_on}
        return False

    def _known_revoked(self) -> bool:
        if self.id in worker_state.revoked:
            return True
        revoked = worker_state.revoked_stamps
        return any(
            value in maybe_list(revoked[stamp])
            for stamp in self.stamped_headers
            if stamp in revoked
            for value in maybe_list(self.stamps.get(stamp)) or ()
        )

    def take_turn(self, execute: Callable[[], Any]) -> Any:
        """Go to the pool, but not beside another delivery of the same FIFO group."""
        group = self._group()
        if self._side is None or group is None:
            return execute()
        begin = functools.partial(self._side.process, self)
        give_back = functools.partial(self._defer, 0.0)
        if not self._side.turns.take(Turn(group, self._holder, begin, give_back)):
            # Celery then gives the pool's free place to the next delivery.
            raise TaskRevokedError("waits for another delivery of its group")
        if not self._side.keeper.is_hidden(self._holder):
            # After a pause: the message, and the one before it, may be in other hands by now.
            self._defer(0.0)
            raise TaskRevokedError("is not hidden any more")
        try:
            return execute()
        except BaseException:
            self._end_turn(gone=False)
            raise

    def _end_turn(self, *, gone: bool) -> None:
        group = self._group()
        if self._side is not None and group is not None:
            # Those behind it would not begin in a worker that stops.
            self._side.turns.end(group, self._holder, gone=gone and not self._side.board.stopping)

    def _group(self) -> tuple[str, str] | None:
        held = self._held if self._side is not None else None
        return None if held is None or held.group is None else (held.queue, held.group)

    def on_accepted(self, pid: int, time_accepted: float) -> None:
        """The pool has taken it: its lease is renewed from now on."""
        super().on_accepted(pid, time_accepted)
        if self._side is not None:
            self._side.accepted(self._delivery, self._task.name, self._terms, pid)
            if self._known_revoked() and not self._passed_on:
                self._revoke_quietly("revoked by Celery")  # while it waited for the pool

    def terminate(self, pool: Any, signal: Any = None) -> None:
        """Celery's ``revoke(terminate=True)``: the child is killed and its run revoked.

        A body in this very process cannot be killed: it ends at its next use of the lease.
        """
        if self._side is None or self._side.forks:
            super().terminate(pool, signal)
        else:
            self._revoke_quietly("terminated")

    def cancel(self, pool: Any, *args: Any, **kwargs: Any) -> None:
        """A cold shutdown: the child is killed and its run abandoned.

        A body in this very process cannot be killed, and must not fail for it: it hands off
        at its next checkpoint.
        """
        if self._side is None or self._side.forks:
            super().cancel(pool, *args, **kwargs)

    # -- what became of it --------------------------------------------------------------

    def on_failure(
        self, exc_info: Any, send_failed_event: bool = True, return_ok: bool = False
    ) -> Any:
        """Turn the end of the child's work into a verb, then let Celery report it."""
        if self._side is None:
            return super().on_failure(exc_info, send_failed_event, return_ok)
        exc = exc_info.exception
        exc = exc.exc if isinstance(exc, ExceptionWithTraceback) else exc
        if isinstance(exc, Defer):
            return self._defer(exc.delay)
        if isinstance(exc, Left):
            self._fate = self._fate_here(Kind.LEAVE)
            return super().on_failure(exc.failure, send_failed_event, return_ok)
        if isinstance(exc, Ignore | Reject | Retry):
            self._settles = isinstance(exc, Told)
            if isinstance(exc, Retry):
                self._side.expect_trigger(_seconds(exc.when))
            return super().on_failure(exc_info, send_failed_event, return_ok)
        if return_ok and not isinstance(exc, WorkerLostError | SystemExit | KeyboardInterrupt):
            # The child has committed this failure and reported it; it may be the replay of
            # an outcome that a parent process recorded.
            self._fate = Kind.DELETE
            return super().on_failure(exc_info, send_failed_event, return_ok)
        if isinstance(exc, TimeLimitExceeded):
            return self._hard_limit(exc_info, exc)
        if isinstance(exc, Terminated) and not self._already_cancelled:
            # Calls ``_announce_revoked``, which asks the store first.
            return super().on_failure(exc_info)
        return self._child_died(exc)

    def on_timeout(self, soft: bool, timeout: float) -> None:
        """A hard limit was dealt with by ``on_failure``, which billiard calls first."""
        if self._side is None or soft:
            super().on_timeout(soft, timeout)
            return
        logger.error("hard time limit (%ss) exceeded for %s[%s]", timeout, self.name, self.id)
        if not self._handled:
            try:
                raise TimeLimitExceeded(timeout)
            except TimeLimitExceeded as exc:
                self._hard_limit(ExceptionInfo(), exc)

    def acknowledge(self) -> None:
        """Let the message go: nothing is asked about it any more, then it is deleted."""
        if self._fate is Kind.LEAVE:
            self._leave()
            return
        if self._side is not None and not self.acknowledged:
            self._side.forget(self._holder)
            if self._settles:
                self._side.delivered(self._delivery.run_id, self._holder)
        try:
            super().acknowledge()
        finally:
            self._end_turn(gone=self.acknowledged)

    def reject(self, requeue: bool = False) -> None:
        """Give the message back to the broker, or leave it to its dead-letter queue."""
        if self._fate is not None:
            # Celery tells nobody of a failure whose message it gives back: a replay does.
            self._returned = self._returned or requeue
            self.acknowledge()
            return
        if self._side is not None and not self.acknowledged:
            self._side.forget(self._holder)
            if self._settles:
                # The outcome was told, perhaps by a replay: the message has nothing to bring.
                requeue = False
                self._side.delivered(self._delivery.run_id, self._holder)
        try:
            super().reject(requeue)
        finally:
            self._end_turn(gone=self.acknowledged and not requeue)

    def _fate_here(self, fate: Kind) -> Kind:
        """A message that would come back for ever is deleted instead of left."""
        assert self._side is not None
        if fate is not Kind.LEAVE or self._held is None or self._delivery.leave_delay is not None:
            return fate
        self._side.complaints.say(
            f"leave {self._held.queue}",
            logging.WARNING,
            "a failed message of %s should be left, but %s has no redrive policy: it is deleted",
            self._task.name,
            self._held.queue,
        )
        return Kind.DELETE

    def _leave(self) -> None:
        """The failure was told; the message is received again until its queue moves it away."""
        assert self._side is not None
        self._fate = None
        if self._settles:
            self._side.delivered(self._delivery.run_id, self._holder)
        self._defer(self._delivery.leave_delay or 0.0, requeue=False)

    def _defer(self, delay: float, *, requeue: bool = True) -> None:
        """Neither deleted nor sent again: hidden for ``delay`` seconds."""
        worker_state.task_ready(self)
        assert self._side is not None
        self._settles = False
        if self.acknowledged:
            return
        ours = self._side.forget(self._holder)
        if self._held is None:
            super().reject(requeue=requeue)
            return
        if ours:
            self._side.defer(self._message, self._held, delay)
        self.acknowledged = True
        self._end_turn(gone=False)
        self.send_event("lease-deferred", delay=delay)

    # -- verbs of the parent ------------------------------------------------------------

    def _child_died(self, exc: BaseException, delay: float = 0.0) -> None:
        """Abandon the run, so that it goes on elsewhere without waiting for expiry."""
        worker_state.task_ready(self)
        self._settles = False
        logger.error("the pool process of %s[%s] is gone: %r", self.name, self.id, exc)
        try:
            self._parent.abandon(f"child died: {exc!r}", delay)
        except Exception as unknown:  # noqa: BLE001 - it would end the worker
            # Nothing was written: the message stays, and so does the lease until it expires.
            logger.warning("run=%s not abandoned: %s", self._delivery.run_id, unknown)
            self._defer(_RETRY_DELAY)
            return
        assert self._side is not None
        self._side.wake_reaper()
        self.acknowledge()

    def _hard_limit(self, exc_info: Any, exc: TimeLimitExceeded) -> Any:
        """The run has failed, if it is still this holder's; only then is anybody told."""
        self._handled = True
        fate = fate_of(self._task, exc)
        accepted = None
        try:
            if fate.kind is not Kind.AGAIN:
                leave = fate.kind is Kind.LEAVE
                accepted = self._parent.fail(exc, "hard time limit", leave=leave)
        except Exception as unknown:  # noqa: BLE001 - it would end the worker
            logger.warning("run=%s not failed: %s", self._delivery.run_id, unknown)
            return self._defer(_RETRY_DELAY)
        if accepted is None:
            # To be tried again; or it waited for the store, or its turn, and has not begun.
            return self._child_died(exc, fate.delay)
        if not accepted:
            return self._let_go()
        self._fate = self._fate_here(fate.kind)
        report = super().on_failure
        self._tell(states.FAILURE, lambda: report(exc_info, return_ok=False))
        return self._parent.call_hooks(exc, exc_info)

    def _announce_revoked(self, reason: str, terminated: bool, signum: Any, expired: bool) -> Any:
        """Celery has terminated the child: REVOKED is told only if the store agrees."""
        report = super()._announce_revoked
        if self._side is None:
            return report(reason, terminated, signum, expired)
        try:
            accepted = self._parent.revoke(reason)
        except Exception as unknown:  # noqa: BLE001 - it would end the worker
            logger.warning("run=%s not revoked: %s", self._delivery.run_id, unknown)
            return self._defer(_RETRY_DELAY)
        if not accepted:
            return self._let_go()
        return self._tell(states.REVOKED, lambda: report(reason, terminated, signum, expired))

    def _revoke_quietly(self, reason: str) -> None:
        """The heartbeat tells the holder, and a replay everybody else."""
        try:
            self._parent.revoke(reason)
        except Exception as unknown:  # noqa: BLE001 - it would end the worker
            logger.warning("run=%s not revoked: %s", self._delivery.run_id, unknown)

    def _announce_cancelled(self, *args: Any, **kwargs: Any) -> Any:
        """The child is killed and the run goes on elsewhere, which is no RETRY of Celery's."""
        report = super()._announce_cancelled
        if self._side is None:
            return report(*args, **kwargs)
        with speaking(Voice(task_id=self.id)):
            return report(*args, **kwargs)

    def _tell(self, outcome: str, report: Callable[[], Any]) -> None:
        """Report a committed outcome; what cannot be told now is replayed."""
        assert self._side is not None
        self._settles = False
        run_id = self._delivery.run_id
        fix_successors(run_id, self._context)
        try:
            with (
                speaking(Voice(claimed=True, outcome=outcome, task_id=self.id)),
                steady_ids(run_id),
            ):
                report()
        except Exception:
            logger.exception("the outcome of run=%s is told later", self._delivery.run_id)
            self.acknowledge()
        else:
            # Celery tells nobody of a message that it gives back: it comes to a replay.
            if not self._returned:
                self._side.delivered(self._delivery.run_id, self._holder)

    def _let_go(self) -> None:
        worker_state.task_ready(self)
        self._settles = False
        self.acknowledge()


def _seconds(when: Any) -> float:
    """The delay of Celery's ``Retry``, which may name a time instead."""
    return float(when) if isinstance(when, int | float) else seconds_until(when) or 0.0


def _in_turn(execute: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(execute)
    def execute_in_turn(request: LeasedRequest, pool: Any, **options: Any) -> Any:
        return request.take_turn(functools.partial(execute, request, pool, **options))

    return execute_in_turn
