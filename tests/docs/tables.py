"""The tables of the reference that are made from the code.

``python -m tests.docs.tables`` prints them, to be pasted into their pages; tests compare the
pages with them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

from celery_lease.policy import LeasePolicy
from celery_lease.settings import PREFIX, SETTINGS
from celery_lease.states import TRANSITIONS, LeaseStatus, RunState, RunView, Step, decide

PRESETS = {
    "short": "calls of seconds",
    "steps": "work in several steps",
    "long": "tools and imports of minutes to days",
}


def settings_table() -> str:
    """Every setting with its default, unit and meaning."""
    return _table(
        ("setting", "default", "unit", "meaning"),
        [(f"`{PREFIX}{s.name}`", _default(s.default), s.unit, s.meaning) for s in SETTINGS],
    )


def presets_table() -> str:
    """The presets of ``LeasePolicy`` and what they set."""
    rows = []
    for name, purpose in PRESETS.items():
        policy = getattr(LeasePolicy, name)()
        rows.append(
            (
                f"`LeasePolicy.{name}()`",
                f"{policy.duration:g} s",
                f"{policy.heartbeat:g} s",
                purpose,
            )
        )
    return _table(("preset", "duration", "heartbeat", "for"), rows)


def transitions_table() -> str:
    """Every verb: who, from which states to which, and what becomes of the lease."""
    return _table(
        ("verb", "who", "from", "to", "lease"),
        [
            (
                f"`{verb}`",
                row.who,
                _states(row.sources),
                _states(row.targets),
                f"`{row.lease}`" if row.lease else "",
            )
            for verb, row in TRANSITIONS.items()
        ],
    )


def decisions() -> set[tuple[Step, str]]:
    """Every (step, reason) that the delivery table can answer with."""
    found = set()
    views = [None, *_views()]
    for view, expected, runnable, stored, receives, can_defer in product(
        views, (0, 1, 2, 3, 4), (True, False), (True, False), (None, 1, 3, 9), (True, False)
    ):
        decision = decide(
            view,
            expected=expected,
            holder="mine",
            runnable=runnable,
            stored=stored,
            receives=receives,
            can_defer=can_defer,
            leave_delay=1.0 if can_defer else None,
        )
        found.add((decision.step, decision.reason))
    return found


def _views() -> Iterable[RunView]:
    for state, status, holder, untriggered, flag, seconds in product(
        RunState, (None, *LeaseStatus), ("mine", "other"), (True, False), (True, False), (-1, 1)
    ):
        yield RunView(
            state=state,
            epoch=3,
            holder=holder,
            attempt=1,
            untriggered=untriggered,
            due_in=seconds,
            overdue=flag,
            settled=flag,
            dead_letter=untriggered,
            settle_in=seconds,
            lease_status=status,
            lease_left=seconds,
            grace_left=seconds,
            grace=35.0,
        )


def _default(value: Any) -> str:
    if value is None:
        return "unset"
    return f"`{value:.0f}`" if isinstance(value, float) else f"`{value!r}`"


def _states(states: frozenset[RunState | None]) -> str:
    if set(RunState) <= states:
        return "any"
    named = [f"`{state}`" for state in RunState if state in states]
    return ", ".join(["no run"] * (None in states) + named)


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines).replace("|  |", "| |")


if __name__ == "__main__":
    print(settings_table(), presets_table(), transitions_table(), sep="\n\n")
    print(*sorted(f"{step}: {reason}" for step, reason in decisions()), sep="\n")
