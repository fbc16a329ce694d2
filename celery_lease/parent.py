"""What a worker's main process does to the run of a delivery whose child cannot.

The child was killed, hit its hard limit or was terminated. Each verb names run, epoch and
holder, so that a child which lives on, or has just committed, decides for itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from celery import states

from celery_lease import signals
from celery_lease.delivery import envelope_of, is_unheld
from celery_lease.moments import seconds_until
from celery_lease.outcomes import encode_failure
from celery_lease.states import LIVE, LeaseStatus
from celery_lease.store import Ended, Grant

if TYPE_CHECKING:
    from celery_lease.application import Leasing
    from celery_lease.delivery import Delivery
    from celery_lease.policy import Terms

__all__ = ["Parent"]

logger = logging.getLogger(__name__)

_LIVE = {str(status) for status in LIVE}


class Parent:
    """The verbs of the main process for one delivery; each may raise any ``LeaseError``.

    ``context`` makes the delivery's request as the task would see it, when it is needed.
    """

    def __init__(
        self,
        leasing: Leasing,
        task: Any,
        delivery: Delivery,
        terms: Terms,
        context: Callable[[], Any],
    ) -> None:
        self._leasing = leasing
        self._store = leasing.store
        self._task = task
        self._delivery = delivery
        self._terms = terms
        self._context = context

    def abandon(self, reason: str, delay: float = 0.0) -> None:
        """Let the run go on elsewhere, ``delay`` seconds from now, without waiting for expiry."""
        holder = self._delivery.holder
        ended = self._store.of_holder(holder)
        if ended is None:
            # It died before the claim. Claimed and abandoned, that counts as an attempt.
            granted = self._claim()
            if isinstance(granted, Grant):
                if not self._delivery.expected:  # its message may be due later
                    delay = max(delay, seconds_until(self._context().eta) or 0.0)
                self._abandon(granted, reason, delay)
            return
        abandoned = ended.status in _LIVE and self._abandon(ended, reason, delay)
        self._announce_lost(ended, abandoned, "child died")

    def _abandon(self, held: Grant | Ended, reason: str, delay: float) -> bool:
        holder = self._delivery.holder
        handed = self._store.abandon(held.run_id, held.epoch, holder, reason, delay=delay)
        if handed is not None:
            logger.warning(
                "abandoned run=%s epoch=%s: %s, %s",
                handed.run_id,
                handed.epoch,
                handed.state,
                handed.reason,
            )
        return handed is not None

    def envelope(self) -> bytes:
        """What a trigger of the run will say, as far as this delivery brought it."""
        return envelope_of(self._context(), self._delivery).dump()

    def _claim(self) -> Any:
        return self._store.claim(
            self._delivery.run_id,
            self._delivery.expected,
            self._delivery.holder,
            task=self._task.name,
            terms=self._terms,
            node=self._delivery.node,
            envelope=None if self._delivery.expected else self.envelope(),
            deliver=self._task.has_to_deliver(self._context()),
        )

    def fail(self, error: BaseException, reason: str, *, leave: bool) -> bool | None:
        """End the run as failed; None if it has not begun, False if it is not this holder's.

        ``leave``: its message stays for the queue's dead-letter policy.
        """
        ended = self._store.of_holder(self._delivery.holder)
        if ended is None:
            return None
        deliver = self._task.has_to_deliver(self._context(), failed=True)
        accepted = self._store.give_up(
            ended.run_id,
            ended.epoch,
            self._delivery.holder,
            self._encoded(error) if deliver else None,
            reason=reason,
            deliver=deliver,
            settle_in=self._terms.settle_timeout,
            dead_letter=leave,
        )
        self._announce_lost(ended, accepted, reason)
        return accepted

    def call_hooks(self, error: BaseException, einfo: Any) -> None:
        """The task's own, which its child did not live to call."""
        call = self._context()
        known = call.id, call.args, call.kwargs
        try:
            self._task.on_failure(error, *known, einfo)
            self._task.after_return(states.FAILURE, error, *known, None)
        except Exception:
            logger.exception("a hook of %s[%s] failed", self._task.name, call.id)

    def revoke(self, reason: str) -> bool:
        """End the run as revoked, if it is this holder's or nobody's."""
        run_id = self._delivery.run_id
        held = self._store.of_holder(self._delivery.holder)
        if held is None:
            return (
                self._store.revoke(run_id, reason) if is_unheld(self._store.view(run_id)) else False
            )
        revoked = self._store.revoke(run_id, reason, holder=self._delivery.holder)
        self._announce_lost(held, revoked, "terminated")
        return revoked

    def _announce_lost(self, ended: Ended, taken: bool, reason: str) -> None:
        """On behalf of a child that was killed, unless it had ended its lease itself."""
        if not taken and (ended.status in _LIVE or ended.status == LeaseStatus.RELEASED):
            return
        signals.announce(
            signals.lease_lost,
            self._task.name,
            run_id=self._delivery.run_id,
            epoch=ended.epoch,
            holder=self._delivery.holder,
            reason=reason,
        )

    def _encoded(self, error: BaseException) -> bytes:
        backend = self._leasing.app.backend
        return encode_failure(self._leasing.results, backend, error, self._delivery.run_id)
