"""What becomes of the message of a task that failed: deleted, left, or tried again.

A task says so for kinds of exceptions, an exception for itself::

    @app.task(base=LeasedTask, lease_fates={ConnectionError: again(60), ValueError: LEAVE})
    def load(path): ...

    raise TryAgain(30, "the partner asked us to slow down")
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import Any

from celery_lease.errors import InvalidSetting

__all__ = [
    "DELETE",
    "LEAVE",
    "DeleteMessage",
    "Fate",
    "Fates",
    "Kind",
    "LeaveMessage",
    "TryAgain",
    "again",
    "checked",
    "fate_of",
]


_LONGEST = timedelta(days=3660).total_seconds()


class Kind(StrEnum):
    """The three fates of a failed task's message."""

    DELETE = "delete"
    LEAVE = "leave"
    AGAIN = "again"


@dataclass(frozen=True, slots=True)
class Fate:
    """What is done after a failure; ``delay`` is in seconds and belongs to ``again``."""

    kind: Kind
    delay: float = 0.0


#: The run has failed and its message is deleted: what happens without a word.
DELETE = Fate(Kind.DELETE)
#: The run has failed and its message stays for the queue's dead-letter policy.
LEAVE = Fate(Kind.LEAVE)

#: One fate for every failure, or one for each kind of exception.
Fates = Fate | Mapping[type[BaseException], Fate]


def again(delay: float | timedelta) -> Fate:
    """The run has not failed yet: it starts again ``delay`` (seconds) later.

    Each time counts as an attempt; after ``max_attempts`` without new progress the exception
    is the run's outcome. Raises :class:`~celery_lease.errors.InvalidSetting` for a delay that
    is no duration.
    """
    seconds = delay.total_seconds() if isinstance(delay, timedelta) else delay
    number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not number or not 0 <= seconds <= _LONGEST:
        raise InvalidSetting(f"again({delay!r}): give seconds or a timedelta, 0 to 10 years")
    return Fate(Kind.AGAIN, float(seconds))


class _Fated(Exception):
    """An exception that brings its own fate; any exception may, by ``lease_fate``."""

    lease_fate: Fate


class DeleteMessage(_Fated):
    """The run fails and its message is deleted, whatever the task says of other failures."""

    lease_fate = DELETE


class LeaveMessage(_Fated):
    """The run fails and its message is left for the queue's dead-letter policy."""

    lease_fate = LEAVE


class TryAgain(_Fated):
    """The run starts again after ``delay`` (seconds or a timedelta), as ``again`` says."""

    def __init__(self, delay: float | timedelta, reason: str = "") -> None:
        self.lease_fate = again(delay)
        super().__init__(self.lease_fate.delay, reason)


def fate_of(task: Any, error: BaseException) -> Fate:
    """The fate that the exception brings, else the task's for the nearest of its classes.

    Without either, Celery's own options decide: a task that does not acknowledge failures
    leaves its message, and one that does not acknowledge hard time limits is tried again.
    """
    own = getattr(error, "lease_fate", None)
    if isinstance(own, Fate):
        return own
    fates: Fates = task.lease_fates or {}
    if isinstance(fates, Fate):
        return fates
    for kind in type(error).__mro__:
        if kind in fates:
            return fates[kind]
    return _celerys(task, error)


def _celerys(task: Any, error: BaseException) -> Fate:
    if type(error).__name__ == "TimeLimitExceeded":
        return DELETE if task.acks_on_timeout else again(0)
    return DELETE if task.acks_on_failure else LEAVE


def checked(where: str, fates: Any) -> None:
    """Raise ``InvalidSetting`` unless ``fates`` is what a task may say."""
    if fates is None or isinstance(fates, Fate):
        return
    if not isinstance(fates, Mapping):
        raise InvalidSetting(
            f"{where} = {fates!r}: give a fate (DELETE, LEAVE, again(seconds)) or a mapping from "
            "exception classes to fates"
        )
    for kind, fate in fates.items():
        if not (isinstance(kind, type) and issubclass(kind, BaseException)):
            raise InvalidSetting(f"{where} has the key {kind!r}: give an exception class")
        if not isinstance(fate, Fate):
            raise InvalidSetting(
                f"{where}[{kind.__name__}] = {fate!r}: give DELETE, LEAVE or again(seconds)"
            )
