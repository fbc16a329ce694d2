"""Renew leases and messages together, in one batch a tick whatever the concurrency.

One tick: both kept, fine. Lease kept but not the message: go on, the message may come back
and will be deferred. Lease read as reclaimed or revoked: the holder has lost it and is
interrupted; a child that has not ended one duration later is killed. Not claimed yet, ended
by its own commit, or busy: none of these is lost. Store unreachable: keep the messages
hidden and let the holders' trust run out.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable, Iterable

from celery_lease.errors import LeaseError, StoreBusy, StoreUnavailable
from celery_lease.interrupts import INTERRUPT_SIGNAL
from celery_lease.keeper import Keeper, Kept
from celery_lease.store import Renewal, Store
from celery_lease.visibility import Gone, Visibility
from celery_lease.visibility.answers import DENIED

__all__ = ["Heartbeat"]

logger = logging.getLogger(__name__)

_SHORTEST_TICK = 1.0
_SETTLE_TICK = 0.2


class Heartbeat:
    """What a worker's main process does to keep its deliveries; ``run_once`` is one tick."""

    def __init__(
        self,
        store: Store,
        keeper: Keeper,
        visibility: Visibility | None,
        *,
        interval: float,
        on_store: Callable[[bool], None] = lambda reachable: None,
        on_abandoned: Callable[[], None] = lambda: None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.store = store
        self.keeper = keeper
        self.visibility = visibility
        self.interval = interval
        self._on_store = on_store
        self._on_abandoned = on_abandoned
        self._now = now
        self._renew_at = 0.0
        self._asked_to_yield = False

    def run_once(self) -> float:
        """Do what is due; returns the seconds until something is due again."""
        now = self._now()
        yielding = self.keeper.board.stopping and not self._asked_to_yield
        if now >= self._renew_at or yielding or self._someone_unconfirmed():
            self._renew_at = now + self._interval_now()
            self._renew()
        self._settle()
        self._extend(now)
        return self._next_delay()

    def _interval_now(self) -> float:
        return min((kept.terms.heartbeat for kept in self.keeper.all()), default=self.interval)

    def _someone_unconfirmed(self) -> bool:
        """A lease that is only just claimed may be shorter than the tick it just missed."""
        due = self._renew_at
        now = self._now()
        return any(
            kept.pid is not None and not kept.claimed and kept.terms.heartbeat < due - now
            for kept in self.keeper.all()
        )

    def _next_delay(self) -> float:
        delay = min(self._renew_at - self._now(), self.keeper.next_extension())
        if self.keeper.has_delivered:
            delay = min(delay, _SETTLE_TICK)
        return max(min(delay, self._interval_now(), _SHORTEST_TICK), 0.05)

    # -- leases -------------------------------------------------------------------------

    def _renew(self) -> None:
        running = [kept for kept in self.keeper.all() if kept.pid is not None]
        stalled = [kept for kept in running if self._stalled(kept)]
        for kept in stalled:
            self._end_stalled(kept)
        holders = {kept.holder: kept for kept in running if not kept.lost and kept not in stalled}
        asked_at = self._now()
        yielding = self.keeper.board.stopping
        try:
            renewal = self.store.renew(list(holders), yielding=yielding)
        except (StoreUnavailable, StoreBusy) as exc:
            logger.warning("heartbeat: %d leases not renewed: %s", len(holders), exc)
            self._on_store(isinstance(exc, StoreBusy))
            self._kill_overdue(running)
            return
        self._asked_to_yield = yielding
        if holders:
            self._on_store(True)
        self._take_in(renewal, holders, asked_at)
        self._kill_overdue(running)

    def _take_in(self, renewal: Renewal, holders: dict[str, Kept], asked_at: float) -> None:
        for holder in renewal.kept:
            kept = holders[holder]
            kept.claimed = True
            if kept.slot is not None:
                # From before the request: a slow answer must not extend trust.
                kept.slot.trust_until = asked_at + kept.terms.duration
        for holder, reason in renewal.lost.items():
            self._lose(holders[holder], reason)
        # Ended by their own commit, or without a lease because they replay an outcome: if
        # they are still here, callbacks are being sent.
        telling = [holders[holder] for holder in (*renewal.released, *renewal.unknown)]
        self._extend_settling(kept for kept in telling if self._still_telling(kept))

    def _still_telling(self, kept: Kept) -> bool:
        """Not for ever: a process that hangs in a callback must not keep the outcome to itself."""
        now = self._now()
        kept.telling_since = min(kept.telling_since, now)
        return now - kept.telling_since <= kept.terms.max_replays * kept.terms.settle_timeout

    def _extend_settling(self, telling: Iterable[Kept]) -> None:
        """What is being told is not to be told by somebody else meanwhile."""
        told = [(kept.run_id, kept.holder, kept.terms.settle_timeout) for kept in telling]
        if told:
            with contextlib.suppress(StoreUnavailable, StoreBusy):
                self.store.extend_settling(told)

    def _lose(self, kept: Kept, reason: str) -> None:
        logger.warning(
            "telling the body of run=%s that its lease is lost holder=%s task=%s reason=%s",
            kept.run_id,
            kept.holder,
            kept.task,
            reason,
        )
        kept.lost = reason
        kept.kill_at = self._now() + kept.terms.duration
        if kept.slot is not None:
            kept.slot.mark_lost(reason)
        self._signal(kept, INTERRUPT_SIGNAL)

    def _kill_overdue(self, running: list[Kept]) -> None:
        present = self.keeper.all()
        for kept in running:
            # A process whose delivery is gone may have begun another one.
            if kept.kill_at <= self._now() and kept in present:
                logger.error(
                    "killing pool process %s: it did not end one lease after losing run=%s",
                    kept.pid,
                    kept.run_id,
                )
                kept.kill_at = float("inf")
                self._signal(kept, signal.SIGKILL)

    @staticmethod
    def _signal(kept: Kept, number: int) -> None:
        if kept.interruptible and kept.pid is not None and kept.pid != os.getpid():
            with contextlib.suppress(ProcessLookupError):
                os.kill(kept.pid, number)

    def _stalled(self, kept: Kept) -> bool:
        limit = kept.terms.progress_timeout
        if limit is None or kept.slot is None or kept.lost or not kept.claimed:
            return False
        progress_at = kept.slot.progress_at
        return progress_at > 0 and self._now() - progress_at > limit

    def _end_stalled(self, kept: Kept) -> None:
        """A pool process can be interrupted; a body in this one only loses its renewals."""
        if kept.interruptible:
            self._abandon_stalled(kept)

    def _abandon_stalled(self, kept: Kept) -> None:
        try:
            ended = self.store.of_holder(kept.holder)
            if ended is not None:
                self.store.abandon(ended.run_id, ended.epoch, kept.holder, "stalled")
        except LeaseError as exc:
            logger.warning("a stalled holder could not be abandoned yet: %s", exc)
            return
        self._lose(kept, "stalled")
        self._on_abandoned()

    # -- outcomes -----------------------------------------------------------------------

    def _settle(self) -> None:
        pairs = self.keeper.take_delivered()
        if not pairs:
            return
        try:
            self.store.settle(pairs)
        except (StoreUnavailable, StoreBusy) as exc:
            logger.warning("%d outcomes not settled yet: %s", len(pairs), exc)
            for run_id, holder in pairs:
                self.keeper.delivered(run_id, holder)

    # -- messages -----------------------------------------------------------------------

    def _extend(self, now: float) -> None:
        if self.visibility is None:
            return
        soon = now + self._interval_now() / 2
        due = [one for one in self.keeper.all() if one.held is not None and one.extend_at <= soon]
        if not any(one.extend_at <= now for one in due):
            return
        present = self.keeper.begin(due)
        try:
            gone = self.visibility.extend(
                [(kept.held, kept.terms.duration) for kept in present if kept.held is not None]
            )
        finally:
            self.keeper.end(present)
        failed = {one.held.handle: one for one in gone}
        for kept in present:
            assert kept.held is not None
            kept.extend_at = now + kept.terms.heartbeat
            failure = failed.get(kept.held.handle)
            if failure is None:
                kept.hidden_until = now + kept.terms.duration
            else:
                self._not_kept(kept, failure)

    def _not_kept(self, kept: Kept, failure: Gone) -> None:
        if not failure.final:
            if failure.code != DENIED:  # a missing permission is not asked for every second
                kept.extend_at = self._now() + _SHORTEST_TICK
            return
        kept.extend_at = float("inf")
        capped = failure.code == "cap" or "Total VisibilityTimeout" in failure.message
        logger.info(
            "message of run=%s is not kept hidden any more (%s): %s; the lease goes on",
            kept.run_id,
            "visibility_cap" if capped else failure.code,
            failure.message,
        )
        if capped:
            with contextlib.suppress(StoreUnavailable, StoreBusy):
                self.store.record(kept.run_id, "visibility_cap", holder=kept.holder)
