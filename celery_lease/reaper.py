"""The loop that takes runs back and sends what is due; safe in any number.

A pass marks expired leases as suspect, hands over those whose grace is over, sweeps up what
no single failure explains and sends due triggers. No pass acts twice on the same thing: each
step is a conditional change of one run, and the second of two reapers finds it done.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from dataclasses import dataclass

from celery_lease.complaints import Complaints
from celery_lease.errors import LeaseError, StoreBusy
from celery_lease.store import Store
from celery_lease.visibility.answers import is_denied

__all__ = ["Reaped", "Reaper"]

logger = logging.getLogger(__name__)

_RESENDS = 100
_FAILURES = 3
#: Seconds after a trigger is due at which reapers come by, so that not all come at once.
_BEHIND = (0.02, 0.2)


@dataclass(frozen=True, slots=True)
class Reaped:
    """What one pass did."""

    suspected: int = 0
    reclaimed: int = 0
    swept: int = 0
    triggered: int = 0


class Reaper:
    """Progress when nobody else makes it; ``run_once`` is one pass."""

    def __init__(
        self,
        store: Store,
        send: Callable[[str, int], bool],
        *,
        interval: float = 10.0,
        on_store: Callable[[bool], None] = lambda reachable: None,
    ) -> None:
        self.store = store
        self.interval = interval
        self._send = send
        self._on_store = on_store
        self._complaints = Complaints(logger)

    def run_once(self) -> Reaped:
        """One pass over the namespace."""
        suspected = [self._suspect(*found) for found in self.store.expired()]
        reclaimed = [self.store.reclaim(*found) for found in self.store.overripe()]
        for handed in filter(None, reclaimed):
            logger.warning(
                "reclaimed run=%s epoch=%s: %s, %s",
                handed.run_id,
                handed.epoch,
                handed.state,
                handed.reason,
            )
        swept = self.store.sweep()
        return Reaped(
            sum(suspected), sum(one is not None for one in reclaimed), swept, self.send_due()
        )

    def _suspect(self, run_id: str, epoch: int) -> bool:
        marked = self.store.suspect(run_id, epoch)
        if marked:
            logger.warning(
                "suspect run=%s epoch=%s: its lease has run out; it is handed over after its "
                "grace, unless its holder renews",
                run_id,
                epoch,
            )
        return marked

    def send_due(self) -> int:
        """Send the triggers that are due; a broker that keeps failing ends the batch.

        One failure may be the trigger's own fault, and must not hold up the others.
        """
        sent = failed = 0
        for run_id, epoch in self.store.due(_RESENDS):
            try:
                sent += self._send(run_id, epoch)
                failed = 0
            except LeaseError:
                raise
            except Exception as exc:  # noqa: BLE001 - a broker's errors share no base class
                self._complaints.say(
                    f"{type(exc).__name__} {exc}",
                    logging.WARNING,
                    "trigger of run=%s not sent, a later pass tries: %s",
                    run_id,
                    exc,
                )
                # A permission is missing for one queue; the others may be all right.
                failed += not is_denied(exc)
                if failed == _FAILURES:
                    break
        return sent

    def pass_and_wait(self) -> float:
        """One pass for the loop; returns the seconds until the next one.

        Jittered, so that reapers spread out; sooner if a trigger will be due before.
        """
        wait = self.interval * random.uniform(0.75, 1.25)  # noqa: S311 - spreads load only
        try:
            reaped = self.run_once()
            due_in = self.store.next_due()
        except LeaseError as exc:
            logger.warning("reaper: this pass was cut short: %s", exc)
            self._on_store(isinstance(exc, StoreBusy))
        else:
            self._on_store(True)
            if reaped.triggered >= _RESENDS:
                return 0.0  # a full portion: more is due
            if due_in is not None:
                wait = min(wait, due_in + random.uniform(*_BEHIND))  # noqa: S311 - as above
        return wait
