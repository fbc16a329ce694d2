"""What the verbs answer: small frozen values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from celery_lease.policy import Terms
from celery_lease.states import RunState, RunView

__all__ = ["Ended", "Grant", "HandedOver", "Outgoing", "Refusal", "Renewal", "Replay"]


@dataclass(frozen=True, slots=True)
class Grant:
    """A claim that was accepted: the right to run ``run_id`` under ``epoch``."""

    run_id: str
    epoch: int
    holder: str
    attempt: int
    recoveries: int
    checkpoint: bytes | None
    progress: float | None


@dataclass(frozen=True, slots=True)
class Refusal:
    """A claim that was not; ``view`` is what stood in the way, None if there is no run.

    ``busy`` says that the run looked claimable but somebody else held its row.
    """

    view: RunView | None
    busy: bool = False


@dataclass(frozen=True, slots=True)
class Renewal:
    """What a heartbeat learned about each holder it asked for."""

    kept: frozenset[str] = frozenset()
    #: Ended by somebody else: holder → reason.
    lost: Mapping[str, str] = field(default_factory=dict)
    #: Ended by the holder itself: its outcome may still be on its way.
    released: frozenset[str] = frozenset()
    #: Locked, or not claimed yet: neither kept nor lost.
    unknown: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class HandedOver:
    """Where the guard sent a run after its holder was gone."""

    run_id: str
    epoch: int
    state: RunState
    reason: str


@dataclass(frozen=True, slots=True)
class Ended:
    """What a parent process knows of one of its holders."""

    run_id: str
    epoch: int
    status: str


@dataclass(frozen=True, slots=True)
class Replay:
    """An outcome to be delivered again; this caller is the one winner."""

    state: RunState
    epoch: int
    outcome: bytes | None
    #: The message of the execution that failed is left for its queue's dead-letter policy.
    dead_letter: bool
    reason: str | None
    envelope: bytes | None
    replays: int


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A trigger that this sender has reserved."""

    run_id: str
    epoch: int
    envelope: bytes
    triggers: int
    task: str
    terms: Terms
