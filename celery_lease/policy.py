"""The policy of a task: how long its leases last and what happens after a crash.

A :class:`LeasePolicy` belongs to the task class, never to a message: a caller cannot choose
how long a lease lasts. What it leaves unset comes from the ``lease_*`` settings; the result
is :class:`Terms`, checked once, and stored in every run so that a reaper needs no task code.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from typing import Any

from celery_lease.errors import InvalidSetting
from celery_lease.settings import Settings

__all__ = ["LeasePolicy", "Terms", "grace_of"]

Duration = timedelta | float | int


@dataclass(frozen=True, slots=True)
class Terms:
    """A policy with every value settled; durations in seconds."""

    duration: float
    heartbeat: float
    missed: int
    grace: float
    stage_budget: float
    stage_handoff: str
    max_attempts: int
    max_recoveries: int
    max_replays: int
    progress_timeout: float | None
    on_reclaim: str
    settle_timeout: float
    retrigger_after: float

    def dump(self) -> str:
        """The form stored in the run."""
        return json.dumps({f: getattr(self, f) for f in self.__slots__}, separators=(",", ":"))

    @classmethod
    def load(cls, text: str) -> Terms:
        """What ``dump`` wrote; keys of newer releases are ignored.

        What an older release did not know has its default.
        """
        given = json.loads(text)
        known = {f.name: given[f.name] for f in fields(cls) if f.name in given}
        if len(known) == len(fields(cls)):
            return cls(**known)
        return replace(LeasePolicy().terms(Settings.defaults()), **known)


def grace_of(text: str) -> float:
    """The grace in what ``Terms.dump`` wrote; 0 for a run that was never claimable."""
    return float(json.loads(text).get("grace", 0.0))


@dataclass(frozen=True, slots=True)
class LeasePolicy:
    """What a task asks of its lease; unset values come from the ``lease_*`` settings.

    Durations are ``timedelta`` or seconds. ``duration`` must leave room for ``missed``
    failed heartbeats: ``duration >= (missed + 1) * heartbeat + min(20 s, duration / 5)``.

    >>> LeasePolicy.long(max_attempts=3).duration
    90
    """

    duration: Duration | None = None
    heartbeat: Duration | None = None
    missed: int | None = None
    grace: Duration | None = None
    stage_budget: Duration | None = None
    stage_handoff: str | None = None
    max_attempts: int | None = None
    max_recoveries: int | None = None
    progress_timeout: Duration | None = None
    on_reclaim: str | None = None

    @classmethod
    def short(cls, **changes: Any) -> LeasePolicy:
        """For calls of seconds: a lease of 30 s, renewed every 10 s."""
        return replace(cls(duration=30, heartbeat=10), **changes)

    @classmethod
    def steps(cls, **changes: Any) -> LeasePolicy:
        """For work in several steps: a lease of 60 s, renewed every 20 s."""
        return replace(cls(duration=60, heartbeat=20), **changes)

    @classmethod
    def long(cls, **changes: Any) -> LeasePolicy:
        """For tools and imports of minutes to days: 90 s, renewed every 30 s."""
        return replace(cls(duration=90, heartbeat=30), **changes)

    def terms(self, settings: Settings) -> Terms:
        """The policy over ``settings``, cross-checked.

        Raises :class:`InvalidSetting` with both names and both values if two of them
        cannot work together.
        """
        given = {
            f.name: value for f in fields(self) if (value := getattr(self, f.name)) is not None
        }
        checked = Settings.defaults(**given)
        values = {
            f.name: getattr(checked if f.name in given else settings, f.name) for f in fields(self)
        }
        if values["grace"] is None:
            values["grace"] = values["heartbeat"] + settings.statement_timeout
        terms = Terms(
            **values,
            max_replays=settings.max_replays,
            settle_timeout=settings.settle_timeout,
            retrigger_after=settings.retrigger_after,
        )
        _cross_check(terms, settings)
        return terms


def _cross_check(terms: Terms, settings: Settings) -> None:
    needed = (terms.missed + 1) * terms.heartbeat + min(20.0, terms.duration / 5)
    if terms.duration < needed:
        raise InvalidSetting(
            f"lease_duration = {terms.duration:g} s is too short for lease_heartbeat = "
            f"{terms.heartbeat:g} s with lease_missed = {terms.missed}: it needs at least "
            f"{needed:g} s (a fifth of it, at most 20 s, is kept for a slow renewal); raise "
            "lease_duration or lower lease_heartbeat"
        )
    shortest = terms.heartbeat + settings.statement_timeout
    if terms.grace < shortest:
        raise InvalidSetting(
            f"lease_grace = {terms.grace:g} s is shorter than lease_heartbeat = "
            f"{terms.heartbeat:g} s + lease_statement_timeout = {settings.statement_timeout:g} s: "
            f"a holder that is only slow would be handed over; give at least {shortest:g} s"
        )
    if terms.progress_timeout is not None and terms.progress_timeout < terms.heartbeat:
        raise InvalidSetting(
            f"lease_progress_timeout = {terms.progress_timeout:g} s is shorter than "
            f"lease_heartbeat = {terms.heartbeat:g} s, which looks for it; give at least that"
        )
