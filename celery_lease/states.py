"""States, the transition table and the delivery table: pure, no database, no Celery.

The two tables of the model stand here and nowhere else. ``TRANSITIONS`` says which verb
may move a run from where to where; the store implements exactly these, and a test walks
every verb through every state. ``decide`` says what a worker does with a delivery.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

__all__ = [
    "LIVE",
    "TERMINAL",
    "TRANSITIONS",
    "Decision",
    "LeaseStatus",
    "RunState",
    "RunView",
    "Step",
    "Transition",
    "Verb",
    "decide",
    "is_dead_letter",
    "judge",
]


class RunState(StrEnum):
    """How far the work is."""

    READY = "ready"  #: in: enqueue, hand_off, postpone, reclaim, resume; out: claim, revoke, expire
    RUNNING = "running"  #: in: claim; out: every verb of the holder, reclaim, abandon, revoke
    WAITING = "waiting"  #: in: suspend; out: answer, wake, revoke
    PARKED = "parked"  #: in: park, guard; out: resume, revoke
    SUCCEEDED = "succeeded"  #: in: complete; final
    FAILED = "failed"  #: in: fail, guard; out: resume
    REVOKED = "revoked"  #: in: revoke, expire; out: resume


class LeaseStatus(StrEnum):
    """Who may work on it: one row per grant."""

    ACTIVE = "active"  #: in: claim, renew; out: suspect, release, revoke
    SUSPECT = "suspect"  #: in: suspect (found expired); out: renew, reclaim, release
    RELEASED = "released"  #: ended by its own holder
    RECLAIMED = "reclaimed"  #: ended because the holder was dead or stalled
    REVOKED = "revoked"  #: ended by an operator


TERMINAL = frozenset({RunState.SUCCEEDED, RunState.FAILED, RunState.REVOKED})
LIVE = frozenset({LeaseStatus.ACTIVE, LeaseStatus.SUSPECT})
_HANDED_OVER = frozenset({RunState.READY, RunState.FAILED, RunState.PARKED})


class Verb(StrEnum):
    """Everything that can be done to a run or a lease."""

    ENQUEUE = "enqueue"
    CLAIM = "claim"
    RENEW = "renew"
    CHECKPOINT = "checkpoint"
    STAGE = "stage"
    HAND_OFF = "hand_off"
    POSTPONE = "postpone"
    PARK = "park"
    COMPLETE = "complete"
    FAIL = "fail"
    ABANDON = "abandon"
    SUSPECT = "suspect"
    RECLAIM = "reclaim"
    EXPIRE = "expire"
    REVOKE = "revoke"
    RESUME = "resume"
    FENCE_ALL = "fence_all"
    SETTLE = "settle"
    REPLAY = "replay"


@dataclass(frozen=True, slots=True)
class Transition:
    """One row of the table: from where, to where, and what becomes of the lease.

    ``None`` among the sources means "there is no such run"; ``lease`` is the status the
    live lease is left in, ``None`` when the verb does not touch it.
    """

    who: str
    sources: frozenset[RunState | None]
    targets: frozenset[RunState]
    lease: LeaseStatus | None = None


def _row(
    who: str,
    sources: set[RunState | None] | frozenset[RunState],
    targets: set[RunState] | frozenset[RunState],
    lease: LeaseStatus | None = None,
) -> Transition:
    return Transition(who, frozenset(sources), frozenset(targets), lease)


_S = RunState
_RUNNING: set[RunState | None] = {_S.RUNNING}

#: The only transitions there are.
TRANSITIONS: Mapping[Verb, Transition] = {
    Verb.ENQUEUE: _row("producer or worker", {None}, {_S.READY}),
    Verb.CLAIM: _row("worker", {None, _S.READY}, {_S.RUNNING}, LeaseStatus.ACTIVE),
    Verb.RENEW: _row("heartbeat", _RUNNING, {_S.RUNNING}, LeaseStatus.ACTIVE),
    Verb.CHECKPOINT: _row("holder", _RUNNING, {_S.RUNNING}),
    Verb.STAGE: _row("holder", _RUNNING, {_S.RUNNING}),
    Verb.HAND_OFF: _row("holder", _RUNNING, {_S.READY}, LeaseStatus.RELEASED),
    Verb.POSTPONE: _row("holder", _RUNNING, {_S.READY}, LeaseStatus.RELEASED),
    Verb.PARK: _row("holder", _RUNNING, {_S.PARKED}, LeaseStatus.RELEASED),
    Verb.COMPLETE: _row("holder", _RUNNING, {_S.SUCCEEDED}, LeaseStatus.RELEASED),
    Verb.FAIL: _row("holder", _RUNNING, {_S.FAILED}, LeaseStatus.RELEASED),
    Verb.ABANDON: _row("parent process", _RUNNING, _HANDED_OVER, LeaseStatus.RECLAIMED),
    Verb.SUSPECT: _row("reaper", _RUNNING, {_S.RUNNING}, LeaseStatus.SUSPECT),
    Verb.RECLAIM: _row("reaper", _RUNNING, _HANDED_OVER, LeaseStatus.RECLAIMED),
    Verb.EXPIRE: _row("reaper or worker", {_S.READY}, {_S.REVOKED}),
    Verb.REVOKE: _row(
        "operator",
        {None, _S.READY, _S.RUNNING, _S.WAITING, _S.PARKED},
        {_S.REVOKED},
        LeaseStatus.REVOKED,
    ),
    Verb.RESUME: _row("operator", {_S.PARKED, _S.FAILED, _S.REVOKED}, {_S.READY}),
    Verb.FENCE_ALL: _row("operator", set(RunState), set(RunState), LeaseStatus.RECLAIMED),
    Verb.SETTLE: _row("worker", TERMINAL, TERMINAL),
    Verb.REPLAY: _row("worker", TERMINAL, TERMINAL),
}


def judge(
    *, attempt: int, max_attempts: int, recoveries: int, max_recoveries: int, on_reclaim: str
) -> tuple[RunState, str]:
    """The guard between a dead holder and the next one: where the run goes, and why.

    ``attempt`` counts claims since the last new progress, ``recoveries`` the reclaims and
    abandons of the run including this one; the latter is never reset.
    """
    if attempt >= max_attempts:
        return RunState.FAILED, f"{attempt} attempts without progress (max_attempts)"
    if recoveries >= max_recoveries:
        return RunState.FAILED, f"{recoveries} recoveries (max_recoveries)"
    if on_reclaim == "ask":
        return RunState.PARKED, "the task's policy asks a person before it goes on"
    return RunState.READY, "goes on from its last checkpoint"


@dataclass(frozen=True, slots=True)
class RunView:
    """A run as one statement saw it; all durations in seconds by the database's clock."""

    #: A newer release beside this one may have states, and a status, of its own.
    state: RunState | str
    epoch: int
    holder: str | None
    attempt: int
    #: The run waits for a trigger that nobody has sent or reserved.
    untriggered: bool
    #: Seconds until the run may be claimed; zero or less: now.
    due_in: float
    #: Celery's ``expires`` has passed before the first claim.
    overdue: bool
    settled: bool
    #: Seconds until an unsettled outcome may be replayed.
    settle_in: float
    #: The message of the execution that failed is left for its queue's dead-letter policy.
    dead_letter: bool
    lease_status: LeaseStatus | str | None
    #: Seconds until the lease expires; negative once it has.
    lease_left: float
    #: Seconds until a suspect lease may be reclaimed.
    grace_left: float
    #: Seconds of grace the run's policy gives a suspect.
    grace: float


class Step(StrEnum):
    """What a worker does with a delivery."""

    CLAIM = "claim"
    GO_ON = "go_on"
    DROP = "drop"
    DEFER = "defer"
    REPLAY = "replay"
    TRIGGER = "trigger"
    SUSPECT = "suspect"
    RECLAIM = "reclaim"
    EXPIRE = "expire"
    ENQUEUE = "enqueue"


@dataclass(frozen=True, slots=True)
class Decision:
    """The step, the reason that goes into the event, and the delay of a deferral."""

    step: Step
    reason: str
    delay: float = 0.0


#: How often a trigger of a run we do not know is put off before it is dropped.
UNKNOWN_DEFERRALS = 3
_UNKNOWN_DELAY = 30.0


def decide(
    view: RunView | None,
    *,
    expected: int,
    holder: str,
    runnable: bool = True,
    stored: bool = False,
    receives: int | None = None,
    can_defer: bool = True,
    leave_delay: float | None = None,
    in_group: bool = False,
    sweep: float = 10.0,
) -> Decision:
    """The delivery table: what to do with a message that expects epoch ``expected``.

    ``runnable`` is False for a message that may not start now (its ETA is ahead),
    ``stored`` says that the message holds no arguments of its own, ``receives`` is the
    broker's count of deliveries if it is known, ``can_defer`` whether the broker can hide
    a message again, ``leave_delay`` when a message that is left for its queue's dead-letter policy is to come
    again (None: its queue has none),
    ``in_group`` that the broker delivers nothing else of the message's group meanwhile.
    """
    if view is None:
        return _without_a_run(expected, runnable, stored, receives)
    if not isinstance(view.state, RunState):
        return Decision(Step.DROP, "unknown_state")
    if expected > view.epoch:
        return _unknown(receives)
    if view.state in TERMINAL:
        return _finished(view, expected, leave_delay)
    if view.state in (RunState.WAITING, RunState.PARKED):
        return Decision(Step.DROP, view.state.value)
    if view.state is RunState.READY:
        return _ready(view, expected)
    if view.holder == holder and view.lease_status in LIVE:
        return Decision(Step.GO_ON, "repeat")
    if in_group:
        receives = None  # dropped, it would let the next of its group begin beside the running one
    return _running(view, expected, receives, can_defer=can_defer, sweep=sweep)


def is_dead_letter(dead_letter: bool, epoch: int, expected: int) -> bool:
    """Whether a message is the one of the execution that failed, and to be left.

    Triggers that only bring the outcome expect the epoch itself, older ones less.
    """
    return dead_letter and expected == epoch - 1


def _without_a_run(expected: int, runnable: bool, stored: bool, receives: int | None) -> Decision:
    if expected > 0 or stored:
        return _unknown(receives)
    if not runnable:
        return Decision(Step.ENQUEUE, "too_early")
    return Decision(Step.CLAIM, "new")


def _unknown(receives: int | None) -> Decision:
    if receives is not None and receives > UNKNOWN_DEFERRALS:
        return Decision(Step.DROP, "unknown_run")
    return Decision(Step.DEFER, "unknown_run", _UNKNOWN_DELAY)


def _finished(view: RunView, expected: int, leave_delay: float | None) -> Decision:
    if (
        view.settled
        and leave_delay is not None
        and is_dead_letter(view.dead_letter, view.epoch, expected)
    ):
        return Decision(Step.DEFER, "dead_letter", leave_delay)
    if view.settled:
        return Decision(Step.DROP, "finished")
    if view.settle_in > 0:
        return Decision(Step.DEFER, "settling", view.settle_in)
    return Decision(Step.REPLAY, "unsettled")


def _ready(view: RunView, expected: int) -> Decision:
    if expected < view.epoch:
        return Decision(Step.TRIGGER if view.untriggered else Step.DROP, "stale")
    if view.overdue:
        return Decision(Step.EXPIRE, "expired")
    if view.due_in > 0:
        return Decision(Step.DROP, "too_early")
    return Decision(Step.CLAIM, "ready")


def _running(
    view: RunView, expected: int, receives: int | None, *, can_defer: bool, sweep: float
) -> Decision:
    if view.lease_status is LeaseStatus.SUSPECT:
        if view.grace_left > 0:
            return Decision(Step.DEFER, "suspect", view.grace_left)
        return Decision(Step.RECLAIM, "suspect")
    if view.lease_status is LeaseStatus.ACTIVE and view.lease_left <= 0:
        return Decision(Step.SUSPECT, "expired", view.grace)
    if expected < view.epoch - 1:
        return Decision(Step.DROP, "stale")
    if not can_defer or (receives is not None and receives >= 3):
        return Decision(Step.DROP, "duplicate")
    return Decision(Step.DEFER, "duplicate", max(view.lease_left, 0.0) + view.grace + sweep)
