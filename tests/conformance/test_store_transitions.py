"""Every verb in every state: allowed or refused as the transition table says, nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from celery_lease.errors import IllegalTransition, LeaseLost, RunNotFound
from celery_lease.policy import Terms
from celery_lease.states import LIVE, TRANSITIONS, LeaseStatus, RunState, Verb
from celery_lease.store import Grant, Store
from celery_lease.testing.clock import advance_database_clock
from tests.runs import LONG, STATES, Stage, bring, dump, enqueue, new_holder, row


@dataclass(frozen=True)
class Attempt:
    """How a test does a verb: True if the store accepted it."""

    do: Callable[[Stage], bool]
    #: What must have happened to the clock for the verb's own condition to hold.
    after: float = 0.0
    #: The lease statuses of a running run that the verb's own condition asks for.
    leases: frozenset[LeaseStatus] = LIVE


#: Only a claim and an operator do; nothing resets it.
RAISE_THE_EPOCH = {Verb.CLAIM, Verb.RESUME, Verb.FENCE_ALL}


def _holder(do: Callable[[Stage], object]) -> Attempt:
    def attempt(staged: Stage) -> bool:
        try:
            do(staged)
        except LeaseLost:
            return False
        return True

    return Attempt(attempt)


def _claim(staged: Stage) -> bool:
    answer = staged.store.claim(
        staged.run_id, staged.epoch, new_holder(), task="a.task", terms=staged.terms
    )
    return isinstance(answer, Grant)


def _resume(staged: Stage) -> bool:
    try:
        staged.store.resume(staged.run_id)
    except (IllegalTransition, RunNotFound):
        return False
    return True


def _settle(staged: Stage) -> bool:
    staged.store.settle([(staged.run_id, staged.grant.holder)])
    view = staged.store.view(staged.run_id)
    return view is not None and view.settled


def _abandon(staged: Stage) -> bool:
    grant = staged.grant
    return staged.store.abandon(grant.run_id, grant.epoch, grant.holder, "lost") is not None


ATTEMPTS: dict[Verb, Attempt] = {
    Verb.ENQUEUE: Attempt(lambda s: enqueue(s.store, s.run_id, s.terms)),
    Verb.CLAIM: Attempt(_claim),
    Verb.RENEW: Attempt(lambda s: bool(s.store.renew([s.grant.holder]).kept)),
    Verb.CHECKPOINT: _holder(lambda s: s.store.checkpoint(s.grant, b"new")),
    Verb.STAGE: _holder(lambda s: s.store.save_stage(s.grant, "new", b"result")),
    Verb.HAND_OFF: _holder(lambda s: s.store.hand_off(s.grant, "new reason")),
    Verb.POSTPONE: _holder(lambda s: s.store.postpone(s.grant, b"new", 5.0, "new reason")),
    Verb.PARK: _holder(lambda s: s.store.park(s.grant, "new reason")),
    Verb.COMPLETE: _holder(
        lambda s: s.store.complete(s.grant, b"new", deliver=True, settle_in=60.0)
    ),
    Verb.FAIL: _holder(
        lambda s: s.store.fail(s.grant, b"new", reason="new", deliver=True, settle_in=60.0)
    ),
    Verb.ABANDON: Attempt(_abandon),
    Verb.SUSPECT: Attempt(
        lambda s: s.store.suspect(s.run_id, s.epoch),
        after=LONG,
        leases=frozenset({LeaseStatus.ACTIVE}),
    ),
    Verb.RECLAIM: Attempt(
        lambda s: s.store.reclaim(s.run_id, s.epoch) is not None,
        after=LONG,
        leases=frozenset({LeaseStatus.SUSPECT}),
    ),
    Verb.EXPIRE: Attempt(lambda s: s.store.expire(s.run_id), after=LONG),
    Verb.REVOKE: Attempt(lambda s: s.store.revoke(s.run_id)),
    Verb.RESUME: Attempt(_resume),
    Verb.FENCE_ALL: Attempt(lambda s: s.store.fence_all() > 0),
    Verb.SETTLE: Attempt(_settle),
    Verb.REPLAY: Attempt(
        lambda s: s.store.replay(s.run_id, new_holder(), s.terms) is not None, after=LONG
    ),
}


def test_there_is_an_attempt_for_every_verb_and_a_way_into_every_state() -> None:
    assert set(ATTEMPTS) == set(Verb)
    assert {state for _, state, _ in STATES.values()} == {None, *RunState}


@pytest.mark.parametrize("name", STATES)
@pytest.mark.parametrize("verb", Verb)
def test_a_verb_does_what_the_table_says_and_a_repeat_harms_nothing(
    store: Store, run_id: str, terms: Terms, verb: Verb, name: str
) -> None:
    _, state, status = STATES[name]
    transition, attempt = TRANSITIONS[verb], ATTEMPTS[verb]
    staged = bring(store, run_id, terms, name)
    advance_database_clock(store, attempt.after)
    before, epoch = dump(store, run_id), staged.epoch
    allowed = state in transition.sources and (
        state is not RunState.RUNNING or status in attempt.leases
    )

    accepted = attempt.do(staged)

    assert accepted is allowed
    if accepted:
        assert row(store, run_id).state in transition.targets
        assert staged.epoch == epoch + (verb in RAISE_THE_EPOCH)
        if transition.lease is not None and status in LIVE:
            (lease,) = store.leases(run_id)
            assert lease["status"] == transition.lease
    else:
        assert dump(store, run_id) == before

    attempt.do(staged)

    view = store.view(run_id)
    live = [one["epoch"] for one in store.leases(run_id) if one["status"] in LIVE]
    running = view is not None and view.state is RunState.RUNNING
    assert live == ([staged.epoch] if running else [])
