"""Signals that observers connect to, after the fact; an observer never decides.

Every signal is sent with ``sender`` = the task's name and the keywords ``run_id``,
``epoch``, ``holder`` and ``reason``. A receiver that raises is logged and ignored.
"""

from __future__ import annotations

from typing import Any

from celery.utils.dispatch import Signal

__all__ = [
    "announce",
    "lease_claimed",
    "lease_dropped",
    "lease_lost",
    "lease_released",
]

_ARGS = {"run_id", "epoch", "holder", "reason"}

#: A delivery was granted the run and its body is about to start.
lease_claimed = Signal(name="lease_claimed", providing_args=_ARGS)
#: The holder ended its lease itself: outcome, hand-off or postponement.
lease_released = Signal(name="lease_released", providing_args=_ARGS)
#: The holder found that its lease was ended by somebody else.
lease_lost = Signal(name="lease_lost", providing_args=_ARGS)
#: A delivery did not run the body: duplicate, stale, too early, unknown.
lease_dropped = Signal(name="lease_dropped", providing_args=_ARGS)


def announce(signal: Any, sender: str, **fields: Any) -> None:
    """Send ``signal``; Celery's dispatcher logs receivers that raise."""
    signal.send(sender=sender, **{name: fields.get(name) for name in _ARGS})
