"""The ``lease_*`` settings: default, unit, validation and cross-checks, in one place.

A Celery app's configuration is read once into a frozen :class:`Settings`. Wrong types,
unknown ``lease_*`` keys and combinations that cannot work raise
:class:`~celery_lease.errors.InvalidSetting`, which names the key, the value and the remedy.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any

from celery_lease.errors import InvalidSetting

__all__ = ["PREFIX", "SETTINGS", "Setting", "Settings", "seconds"]

PREFIX = "lease_"
#: SQS hides a received message for twelve hours at most; an hour is kept in reserve.
LONGEST_STAGE = 11 * 3600.0


def seconds(name: str, value: Any, *, zero: bool = False) -> float:
    """``value`` (a ``timedelta`` or a number of seconds) as a float.

    Raises :class:`InvalidSetting` naming ``name`` for anything else, for NaN, infinity and
    negative durations, and for zero unless ``zero`` is true.
    """
    if isinstance(value, timedelta):
        number = value.total_seconds()
    elif isinstance(value, int | float) and not isinstance(value, bool):
        number = float(value)
    else:
        raise InvalidSetting(
            f"{name} = {value!r}: give a timedelta or a number of seconds, "
            f"not {type(value).__name__}"
        )
    if not math.isfinite(number) or number < 0 or (number == 0 and not zero):
        raise InvalidSetting(f"{name} = {value!r}: give a positive, finite duration")
    return number


def _optional_seconds(name: str, value: Any) -> float | None:
    return None if value is None else seconds(name, value)


def _positive(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidSetting(f"{name} = {value!r}: give a whole number of at least 1")
    return value


def _count(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InvalidSetting(f"{name} = {value!r}: give a whole number of at least 0")
    return value


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidSetting(f"{name} = {value!r}: give True or False")
    return value


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise InvalidSetting(f"{name} = {value!r}: give a non-empty string")
    return value


def _options(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidSetting(f"{name} = {value!r}: give a dictionary")
    return dict(value)


def _one_of(*allowed: str) -> Callable[[str, Any], str]:
    def check(name: str, value: Any) -> str:
        if value not in allowed:
            raise InvalidSetting(f"{name} = {value!r}: give one of {', '.join(map(repr, allowed))}")
        return str(value)

    return check


@dataclass(frozen=True, slots=True)
class Setting:
    """One key: its default, its check and its meaning (the reference is made from these)."""

    name: str
    default: Any
    check: Callable[[str, Any], Any]
    unit: str
    meaning: str


_DEFAULT_STORE = "sqlite:///celery-lease.sqlite3"

SETTINGS: tuple[Setting, ...] = (
    Setting(
        "store_url",
        _DEFAULT_STORE,
        _text,
        "SQLAlchemy URL",
        "The database that decides. PostgreSQL in production; the SQLite default is for one host.",
    ),
    Setting("store_options", {}, _options, "dictionary", "Passed to SQLAlchemy's `create_engine`."),
    Setting(
        "enabled",
        True,
        _flag,
        "flag",
        "False: leased tasks behave as plain ones. The first step of a roll-out.",
    ),
    Setting(
        "namespace",
        "default",
        _text,
        "name",
        "Separates deployments that share tables; a reaper touches only its own.",
    ),
    Setting("duration", 90.0, seconds, "seconds", "How long a lease lasts without a renewal."),
    Setting("heartbeat", 30.0, seconds, "seconds", "How often leases and messages are renewed."),
    Setting("missed", 1, _count, "number", "Heartbeats that may fail before a lease expires."),
    Setting(
        "grace",
        None,
        _optional_seconds,
        "seconds",
        "From suspect to hand-over. Unset: heartbeat + statement_timeout.",
    ),
    Setting(
        "stage_budget",
        3600.0,
        seconds,
        "seconds",
        "Age of a message at which the next checkpoint hands off. At most 11 hours.",
    ),
    Setting(
        "stage_handoff",
        "budget",
        _one_of("budget", "always"),
        "choice",
        "`budget`: hand off when the budget is used up; `always`: after each stage.",
    ),
    Setting(
        "on_reclaim",
        "resume",
        _one_of("resume", "ask", "restart"),
        "choice",
        "After a dead holder: go on, park for a person, or start without the checkpoint.",
    ),
    Setting("max_attempts", 5, _positive, "number", "Claims without new progress, then failed."),
    Setting("max_recoveries", 50, _positive, "number", "Reclaims and abandons of a run in all."),
    Setting("max_replays", 10, _positive, "number", "Tries to deliver an outcome."),
    Setting(
        "progress_timeout",
        None,
        _optional_seconds,
        "seconds",
        "Longest time without new progress before the holder counts as stalled. Unset: off.",
    ),
    Setting("reap_interval", 10.0, seconds, "seconds", "Mean time between two reaper passes."),
    Setting(
        "retrigger_after",
        900.0,
        seconds,
        "seconds",
        "A sent trigger is sent again after this time; doubled each time, at most 6 h.",
    ),
    Setting(
        "settle_timeout",
        60.0,
        seconds,
        "seconds",
        "How long the holder has to deliver an outcome before it is replayed.",
    ),
    Setting("statement_timeout", 5.0, seconds, "seconds", "Longest time of one SQL statement."),
    Setting("lock_timeout", 2.0, seconds, "seconds", "Longest wait for one row lock."),
    Setting("connect_timeout", 5.0, seconds, "seconds", "Longest time to reach the database."),
    Setting(
        "tombstone_age",
        400 * 86400.0,
        seconds,
        "seconds",
        "How long a pruned run's id is remembered, so that a late message cannot run it again.",
    ),
)


@dataclass(frozen=True, slots=True)
class Settings:
    """The checked settings of one app; all durations in seconds."""

    store_url: str
    store_options: Mapping[str, Any]
    enabled: bool
    namespace: str
    duration: float
    heartbeat: float
    missed: int
    grace: float | None
    stage_budget: float
    stage_handoff: str
    on_reclaim: str
    max_attempts: int
    max_recoveries: int
    max_replays: int
    progress_timeout: float | None
    reap_interval: float
    retrigger_after: float
    settle_timeout: float
    statement_timeout: float
    lock_timeout: float
    connect_timeout: float
    tombstone_age: float

    @property
    def names_a_store(self) -> bool:
        """Whether a store was chosen: the default is a file of this host, and of this folder.

        What a producer wrote into a file of its own, no worker would ever read.
        """
        return self.store_url != _DEFAULT_STORE

    @classmethod
    def read(cls, conf: Mapping[str, Any], namespace: str = "") -> Settings:
        """The settings in ``conf``; keys may carry a Django-style ``namespace`` prefix.

        Raises :class:`InvalidSetting` for wrong values and unknown ``lease_*`` keys.
        """
        given = _given(conf, namespace)
        _refuse_unknown(given)
        values = {s.name: s.check(PREFIX + s.name, given.get(s.name, s.default)) for s in SETTINGS}
        settings = cls(**values)
        _cross_check(settings)
        return settings

    @classmethod
    def defaults(cls, **changes: Any) -> Settings:
        """The defaults with ``changes`` (names without prefix), checked like any other."""
        return cls.read({PREFIX + name: value for name, value in changes.items()})


def _given(conf: Mapping[str, Any], namespace: str) -> dict[str, Any]:
    lead = f"{namespace}_".lower() if namespace else ""
    given: dict[str, Any] = {}
    for key in _keys(conf):
        if lead and key.isupper() and not key.lower().startswith(lead):
            continue  # a setting of the project's own: LEASE_… is ours as CELERY_LEASE_… only
        name = key.lower().removeprefix(lead)
        if name.startswith(PREFIX):
            given[name.removeprefix(PREFIX)] = conf[key]
    return given


def _keys(conf: Mapping[str, Any]) -> Iterable[str]:
    return [key for key in conf if isinstance(key, str)]


def _refuse_unknown(given: Mapping[str, Any]) -> None:
    known = [f.name for f in fields(Settings)]
    for name, value in given.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"; did you mean {PREFIX}{near[0]}?" if near else ""
            raise InvalidSetting(f"{PREFIX}{name} = {value!r}: there is no such setting{hint}")


def _cross_check(settings: Settings) -> None:
    if settings.stage_budget > LONGEST_STAGE:
        raise InvalidSetting(
            f"lease_stage_budget = {settings.stage_budget:g} s: SQS hides a message for 12 hours "
            f"at most; give at most {LONGEST_STAGE:g} s (11 hours)"
        )
    if settings.lock_timeout > settings.statement_timeout:
        raise InvalidSetting(
            f"lease_lock_timeout = {settings.lock_timeout:g} s is longer than "
            f"lease_statement_timeout = {settings.statement_timeout:g} s: a lock is waited for "
            "inside a statement; lower the first or raise the second"
        )
