"""Celery's points of time, ``eta`` and ``expires``, as durations from now.

They are wall-clock times that a producer chose; Celery compares them with the clock of the
host that looks, and so do we. What is stored is the duration, by the database's clock.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from celery.utils.time import maybe_iso8601, maybe_make_aware

__all__ = ["seconds_until"]


def seconds_until(moment: Any) -> float | None:
    """Seconds from now until an ``eta`` or ``expires`` of a message; negative when it is past.

    ``None`` for none; a time without a zone is UTC, as in messages of Celery's.
    """
    if moment is None:
        return None
    aware = maybe_make_aware(maybe_iso8601(moment), UTC)
    return float((aware - datetime.now(UTC)).total_seconds())
