"""A claimed run in a pool child: the body under its lease, then one commit, then Celery.

The outcome is committed under the epoch *before* Celery sees it. What Celery does after
that (callbacks, result, chord) can fail and be done again; it cannot change the outcome.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar

from celery.exceptions import Ignore

from celery_lease import signals
from celery_lease.errors import (
    HandOff,
    LeaseLost,
    NotSerializable,
    StoreBusy,
    StoreUnavailable,
)
from celery_lease.lease import Lease, bound
from celery_lease.outcomes import REPLACED, encode_failure, encode_success
from celery_lease.results import Defer
from celery_lease.states import RunState

if TYPE_CHECKING:
    from celery_lease.application import Leasing
    from celery_lease.board import Slot
    from celery_lease.delivery import Delivery
    from celery_lease.policy import Terms
    from celery_lease.store import Grant

__all__ = ["Execution"]

logger = logging.getLogger(__name__)

T = TypeVar("T")
_LONGEST_WAIT = 2.0


class Execution:
    """The store behind a ``Lease``; also carries the run from body to outcome."""

    def __init__(
        self,
        leasing: Leasing,
        task: Any,
        *,
        delivery: Delivery,
        grant: Grant,
        terms: Terms,
        asked_at: float,
    ) -> None:
        self.run_id = grant.run_id
        self.epoch = grant.epoch
        self.attempt = grant.attempt
        self.holder = grant.holder
        #: The lease is over, by this holder's own commit or by somebody else.
        self.ended = False
        self._leasing = leasing
        self._store = leasing.store
        self._task = task
        self._delivery = delivery
        #: There is no message that could be followed by another one.
        self._eager = bool(task.request.is_eager)
        self._grant = grant
        self._terms = terms
        self._trust_until = asked_at + terms.duration
        self._checkpoint = grant.checkpoint
        self._stages: dict[str, bytes] | None = {} if grant.epoch == 1 else None
        self._yield_asked = False
        self._hand_off_due: Callable[[], bool] | None = None
        self._slot = self._find_slot()
        if self._slot is not None:
            # From here on, not from the arrival of its message, progress is waited for.
            self._slot.progressed()

    def _find_slot(self) -> Slot | None:
        board = self._leasing.board
        return None if board is None else board.slot(self._delivery.slot, self.holder)

    # -- the body -----------------------------------------------------------------------

    def run(self, body: Callable[[], T]) -> T:
        """The body under the lease; translates what ends it into what Celery understands."""
        lease = Lease(self)
        interrupts = self._leasing.interrupts
        try:
            with interrupts.watching(self._slot, self.run_id, self.epoch), bound(lease):
                return body()
        except HandOff as exc:
            raise Ignore(str(exc)) from None
        except LeaseLost as exc:
            raise self.translated(exc) from None

    def translated(self, exc: LeaseLost) -> Exception:
        """What a lost lease is to Celery: the message goes, or comes back if nothing is known."""
        self.ended = True
        logger.warning(
            "lease lost run=%s epoch=%s holder=%s task=%s reason=%s",
            self.run_id,
            self.epoch,
            self.holder,
            self._task.name,
            exc.reason,
        )
        self._announce(signals.lease_lost, exc.reason)
        if exc.reason == "unreachable":
            return Defer(0.0, "unreachable")
        ignored: Exception = Ignore(str(exc))
        return ignored

    # -- outcomes -----------------------------------------------------------------------

    def complete(self, value: Any, *, deliver: bool) -> None:
        """Commit the result; raises ``NotSerializable`` or ``LeaseLost``, nothing written."""
        blob = None
        if deliver:
            blob = encode_success(self._leasing.results, self._task.app.backend, value, self.run_id)
        self._end(
            lambda: self._store.complete(
                self._grant, blob, deliver=deliver, settle_in=self._terms.settle_timeout
            ),
            "succeeded",
        )

    def fail(self, error: BaseException, *, deliver: bool, leave: bool = False) -> None:
        """Commit a failure; raises ``LeaseLost``.

        ``leave``: the message stays for its queue's dead-letter policy.
        """
        blob = self._encoded(error) if deliver else None
        reason = f"{type(error).__name__}"
        self._end(
            lambda: self._store.fail(
                self._grant,
                blob,
                reason=reason,
                deliver=deliver,
                settle_in=self._terms.settle_timeout,
                dead_letter=leave,
            ),
            "failed",
        )

    def _encoded(self, error: BaseException) -> bytes | None:
        try:
            return encode_failure(self._leasing.results, self._task.app.backend, error, self.run_id)
        except NotSerializable:
            plain = RuntimeError(f"{type(error).__name__}: {error}")
            return encode_failure(self._leasing.results, self._task.app.backend, plain, self.run_id)

    def finish_ignored(self) -> None:
        """The body raised Celery's ``Ignore``: the run is over, and nobody is told."""
        self._end(
            lambda: self._store.complete(self._grant, None, deliver=False, settle_in=0.0),
            "ignored",
        )

    def replace(self, replacement: bytes) -> None:
        """Commit what goes on in the run's place; raises ``LeaseLost``."""
        self._end(
            lambda: self._store.complete(
                self._grant,
                replacement,
                deliver=True,
                settle_in=self._terms.settle_timeout,
                reason=REPLACED,
            ),
            REPLACED,
        )

    def hand_back(self, reason: str) -> None:
        """Leave the run ready for another delivery."""
        self._end(lambda: self._store.hand_off(self._grant, reason), reason)
        if not self._eager:
            logger.info(
                "handed off run=%s epoch=%s holder=%s task=%s reason=%s",
                self.run_id,
                self.epoch,
                self.holder,
                self._task.name,
                reason,
            )
            self.send_trigger()

    def release(self, reason: str) -> None:
        """Leave the run ready for the caller, who goes on with it in this process."""
        self._end(lambda: self._store.hand_off(self._grant, reason), reason)

    def postpone(self, envelope: bytes | None, delay: float, reason: str) -> None:
        """Leave the run ready ``delay`` seconds from now, with a new envelope if one is given."""
        self._end(lambda: self._store.postpone(self._grant, envelope, delay, reason), reason)

    @property
    def may_try_again(self) -> bool:
        """Whether the limit of attempts allows another one after this."""
        return self.attempt < self._terms.max_attempts

    def try_again(self, error: BaseException, delay: float) -> None:
        """Leave the run ready ``delay`` seconds from now; the attempt counts as failed."""
        reason = f"again: {type(error).__name__}"
        self._end(
            lambda: self._store.postpone(self._grant, None, delay, reason, charged=True), reason
        )

    def is_still_postponed(self) -> bool:
        """Whether nobody has claimed the run since; no answer counts as no."""
        try:
            view = self._store.view(self.run_id)
        except (StoreUnavailable, StoreBusy):
            return False
        return view is not None and view.state is RunState.READY and view.epoch == self.epoch

    def _end(self, commit: Callable[[], Any], reason: str) -> None:
        """Once a terminal commit is sent, nothing may interrupt or be taken for a loss."""
        self._raise_if_lost()
        self._leasing.interrupts.over()
        with self._shielded():
            self._ask(commit)
        self.ended = True
        self._announce(signals.lease_released, reason)

    # -- what a Lease asks --------------------------------------------------------------

    def restore(self) -> tuple[bool, Any]:
        """The last checkpoint."""
        if self._checkpoint is None:
            return False, None
        return True, self._leasing.values.decode(self._checkpoint)

    def checkpoint(self, value: Any, within: Any, progress: float | None, note: str | None) -> None:
        """Save progress, then hand off if it is time to."""
        what = f"the checkpoint of run {self.run_id}"
        blob = self._leasing.values.encode(value, what=what)
        self._hand_off_if_due()
        if within is not None:
            self._checkpoint_within(within, blob, progress, note)
            return
        asked = self._verb(
            lambda: self._store.checkpoint(self._grant, blob, progress=progress, note=note)
        )
        self._checkpoint = blob
        self._progressed(asked)
        self._hand_off_if_asked()

    def _checkpoint_within(
        self, within: Any, blob: bytes, progress: float | None, note: str | None
    ) -> None:
        with self._shielded():
            asked, over = self._store.checkpoint_within(
                within, self._grant, blob, progress=progress, note=note
            )
        self._progressed(asked)
        # The hand-off has to wait for the caller's commit; the next verb does it.
        self._hand_off_due = over

    def _hand_off_if_due(self) -> None:
        if self._hand_off_due is not None and self._hand_off_due():
            self._hand_off_due = None
            self._hand_off_if_asked()

    def load_stage(self, name: str) -> tuple[bool, Any]:
        """A saved stage; all are read at once when the first is asked for."""
        self._hand_off_if_due()
        if self._stages is None:
            self._stages = self._verb(lambda: self._store.stages(self.run_id))
        blob = self._stages.get(name)
        return (False, None) if blob is None else (True, self._leasing.values.decode(blob))

    def save_stage(self, name: str, value: Any, seconds: float) -> Any:
        """Save a stage, then hand off if it is time to."""
        what = f"the result of stage {name!r} of run {self.run_id}"
        blob = self._leasing.values.encode(value, what=what)
        asked = self._verb(lambda: self._store.save_stage(self._grant, name, blob, seconds=seconds))
        assert self._stages is not None
        self._stages[name] = blob
        self._progressed(asked)
        self._hand_off_if_asked(always=self._terms.stage_handoff == "always")
        return self._leasing.values.decode(blob)

    def fence(self, session: Any) -> None:
        """Lock and check the run in the caller's transaction."""
        with self._shielded():
            self._store.fence(session, self._grant)

    def check(self) -> None:
        """Ask the store whether the lease is still ours."""
        self._verb(lambda: self._store.check(self._grant))

    def remaining(self) -> float:
        """Seconds for which the lease is known to be ours."""
        return self._trusted_until() - time.monotonic()

    def holds(self) -> bool:
        """Whether the lease is ours: by its trust, else by the store; no answer counts as no.

        A holder that was paused must not report progress over its successor's outcome.
        """
        if self._slot is not None and self._slot.lost:
            return False
        if self.remaining() > 0:
            return True
        try:
            with self._shielded():
                self._store.check(self._grant)
        except (LeaseLost, StoreUnavailable, StoreBusy):
            return False
        return True

    def should_yield(self) -> bool:
        """The worker is stopping, somebody asked for it, or the budget is used up."""
        age = time.monotonic() - self._delivery.received_at
        return (
            self._yield_asked
            or self._leasing.stopping
            or (self._delivery.can_defer and age >= self._terms.stage_budget)
        )

    # -- within -------------------------------------------------------------------------

    def _trusted_until(self) -> float:
        renewed = self._slot.trust_until if self._slot is not None else 0.0
        return max(self._trust_until, renewed)

    def _progressed(self, asked: bool) -> None:
        self._yield_asked = self._yield_asked or asked
        if self._slot is not None:
            self._slot.progressed()

    def _hand_off_if_asked(self, *, always: bool = False) -> None:
        if self._eager or not (always or self.should_yield()):
            return
        reason = "stage" if always else "stopping" if self._leasing.stopping else "budget"
        self.hand_back(reason)
        raise HandOff

    def send_trigger(self) -> None:
        """The worker that made the change sends the trigger first; else the reaper does."""
        try:
            self._leasing.sender.send(self.run_id, self.epoch)
        except Exception as exc:  # noqa: BLE001 - a broker's errors share no base class
            logger.warning("trigger of run=%s not sent, the reaper will: %s", self.run_id, exc)

    def _verb(self, work: Callable[[], T]) -> T:
        self._raise_if_lost()
        with self._shielded():
            answer = self._ask(work)
        self._raise_if_lost()
        return answer

    def _shielded(self) -> AbstractContextManager[None]:
        return self._leasing.interrupts.shield()

    def _raise_if_lost(self) -> None:
        self._leasing.interrupts.check()

    def _ask(self, work: Callable[[], T]) -> T:
        """Ask until the store answers: it decides, and the body is not killed for an outage.

        Only a worker that was told to stop gives up; the run is then taken over by the
        reaper, or goes on here if the store heard us after all.
        """
        wait = 0.1
        while True:
            try:
                return work()
            except (StoreUnavailable, StoreBusy) as exc:
                logger.warning("run=%s waits for the lease store: %s", self.run_id, exc)
                if self._leasing.stopping:
                    raise LeaseLost("unreachable", self.run_id, self.epoch) from exc
                time.sleep(wait)
                wait = min(wait * 2, _LONGEST_WAIT)

    def _announce(self, signal: Any, reason: str) -> None:
        signals.announce(
            signal,
            self._task.name,
            run_id=self.run_id,
            epoch=self.epoch,
            holder=self.holder,
            reason=reason,
        )
