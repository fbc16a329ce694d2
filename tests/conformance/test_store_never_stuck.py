"""A run is never stuck: from every state that the verbs reach, reapers alone end it.

The walk starts from nothing and does every verb in every state it finds, to depth three; two states
are the same if a reaper could not tell them apart. From each of them the broker is
empty, every worker is fresh, and a reaper that also delivers what it sends has to bring the
run to a settled end, unless it waits for a person.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator

import pytest

from celery_lease.errors import IllegalTransition, LeaseLost, RunNotFound
from celery_lease.policy import Terms
from celery_lease.states import TERMINAL, RunState, Step, decide
from celery_lease.store import Grant, Store
from celery_lease.testing.clock import advance_database_clock
from tests.runs import LONG, Stage, complete, enqueue, fail, new_holder, row

DEPTH = 3


def _age(seconds: float) -> Callable[[Stage], object]:
    return lambda s: advance_database_clock(s.store, seconds, run_id=s.run_id)


def _claim(staged: Stage) -> None:
    answer = staged.store.claim(
        staged.run_id,
        staged.epoch,
        new_holder(),
        task="a.task",
        terms=staged.terms,
        envelope=b"envelope",
    )
    if isinstance(answer, Grant):
        staged.grant = answer


def _replay(staged: Stage) -> None:
    staged.store.replay(staged.run_id, new_holder(), staged.terms)


def _reserve_and_send(staged: Stage) -> None:
    outgoing = staged.store.reserve(staged.run_id, staged.epoch)
    if outgoing is not None:
        staged.store.sent(outgoing)


VERBS: dict[str, Callable[[Stage], object]] = {
    "enqueue": lambda s: enqueue(s.store, s.run_id, s.terms),
    "enqueue late": lambda s: enqueue(s.store, s.run_id, s.terms, delay=5000.0, expires_in=90.0),
    "claim": _claim,
    "checkpoint": lambda s: s.store.checkpoint(s.grant, b"half"),
    "hand off": lambda s: s.store.hand_off(s.grant, "budget"),
    "postpone": lambda s: s.store.postpone(s.grant, b"envelope", 5000.0, "retry"),
    "park": lambda s: s.store.park(s.grant, "why"),
    "complete": lambda s: complete(s.store, s.grant),
    "complete quietly": lambda s: complete(s.store, s.grant, deliver=False),
    "fail": lambda s: fail(s.store, s.grant),
    "abandon": lambda s: s.store.abandon(s.run_id, s.grant.epoch, s.grant.holder, "died"),
    "give up": lambda s: s.store.give_up(
        s.run_id,
        s.grant.epoch,
        s.grant.holder,
        b"error",
        reason="died",
        deliver=True,
        settle_in=60.0,
    ),
    "suspect": lambda s: (_age(91)(s), s.store.suspect(s.run_id, s.epoch)),
    "reclaim": lambda s: (_age(36)(s), s.store.reclaim(s.run_id, s.epoch)),
    "revoke": lambda s: s.store.revoke(s.run_id),
    "resume": lambda s: s.store.resume(s.run_id),
    "settle": lambda s: s.store.settle([(s.run_id, s.grant.holder)]),
    "reserve": lambda s: s.store.reserve(s.run_id, s.epoch),
    "send": _reserve_and_send,
    "replay": lambda s: (_age(61)(s), _replay(s)),
}


def looks(store: Store, run_id: str) -> tuple[object, ...]:
    """What a reaper could tell two runs apart by."""
    view = store.view(run_id)
    if view is None:
        return ()
    now = row(store, run_id)
    return (
        view.state,
        min(view.epoch, 1),
        view.lease_status,
        view.untriggered,
        now.trigger_due is None,
        now.not_before is None,
        view.settled,
        view.overdue,
        min(now.triggers, 1),
        now.envelope is None,
    )


def walk(store: Store, terms: Terms, run_ids: Iterator[str]) -> dict[tuple[object, ...], Stage]:
    """One run in each state that the verbs reach."""
    paths: dict[tuple[object, ...], tuple[str, ...]] = {(): ()}
    found: dict[tuple[object, ...], Stage] = {}
    for _ in range(DEPTH):
        for path, verb in itertools.product(list(paths.values()), VERBS):
            if (*path, verb) in paths.values():
                continue
            staged = Stage(store, next(run_ids), terms)
            for step in (*path, verb):
                _try(VERBS[step], staged)
            look = looks(store, staged.run_id)
            if look not in paths:
                paths[look] = (*path, verb)
                found[look] = staged
    return found


def _try(verb: Callable[[Stage], object], staged: Stage) -> None:
    with contextlib.suppress(LeaseLost, IllegalTransition, RunNotFound):
        verb(staged)


def reap(store: Store) -> list[tuple[str, int]]:
    """One pass of a reaper; what it sent."""
    for found in store.expired(10_000):
        store.suspect(*found)
    for found in store.overripe(10_000):
        store.reclaim(*found)
    store.sweep(10_000)
    sent = []
    for run_id, epoch in store.due(10_000):
        outgoing = store.reserve(run_id, epoch)
        if outgoing is not None:
            store.sent(outgoing)
            sent.append((run_id, epoch))
    return sent


def deliver(store: Store, run_id: str, epoch: int, terms: Terms) -> None:
    """What a fresh worker does with a trigger; its body completes."""
    holder = new_holder()
    decision = decide(store.view(run_id), expected=epoch, holder=holder)
    if decision.step is Step.CLAIM:
        grant = store.claim(run_id, epoch, holder, task="a.task", terms=terms)
        if isinstance(grant, Grant):
            complete(store, grant)
            store.settle([(run_id, holder)])
    elif decision.step is Step.REPLAY and store.replay(run_id, holder, terms):
        store.settle([(run_id, holder)])
    elif decision.step is Step.EXPIRE:
        store.expire(run_id)


@pytest.mark.timeout(240)
def test_reapers_alone_bring_every_reachable_state_to_a_settled_end(
    store: Store, run_id: str, terms: Terms
) -> None:
    reached = walk(store, terms, (f"{run_id}-{number}" for number in itertools.count()))
    assert {look[0] for look in reached} == set(RunState) - {RunState.WAITING}
    assert len(reached) > 20

    for _ in range(12):
        for sent in reap(store):
            deliver(store, *sent, terms)
        advance_database_clock(store, LONG)

    stuck = []
    for look, staged in reached.items():
        view = store.view(staged.run_id)
        assert view is not None
        needs_a_person = view.state is RunState.PARKED
        # An id revoked before its message came has nothing to send; the message will find it.
        without_envelope = row(store, staged.run_id).envelope is None
        done = view.state in TERMINAL and view.settled
        if not (done or needs_a_person or without_envelope):
            stuck.append((look, view))
    assert stuck == []


def test_a_trigger_that_is_lost_every_time_is_sent_again_for_ever(
    store: Store, run_id: str, terms: Terms
) -> None:
    enqueue(store, run_id, terms)
    for _ in range(20):
        assert reap(store) == [(run_id, 0)]
        advance_database_clock(store, 6 * 3600 + 1)


def test_the_last_passes_find_nothing_more_to_do(store: Store, run_id: str, terms: Terms) -> None:
    enqueue(store, run_id, terms)
    for _ in range(3):
        for sent in reap(store):
            deliver(store, *sent, terms)
        advance_database_clock(store, LONG)
    assert reap(store) == []
    assert store.sweep() == 0
