"""Enqueue and claim: how a run comes into being and into somebody's hands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from celery_lease.policy import Terms
from celery_lease.states import LeaseStatus, RunState
from celery_lease.store import Grant, Refusal, Store
from tests.runs import (
    ENVELOPE,
    claim,
    complete,
    dump,
    enqueue,
    kinds,
    lease_row,
    live_leases,
    new_holder,
    reclaim,
    row,
)


def refused(
    store: Store, run_id: str, terms: Terms, expected: int, holder: str | None = None
) -> Refusal:
    answer = store.claim(run_id, expected, holder or new_holder(), task="a.task", terms=terms)
    assert isinstance(answer, Refusal)
    return answer


class TestAClaim:
    def test_of_an_unknown_run_at_epoch_0_grants_epoch_1(
        self, store: Store, run_id: str, terms: Terms
    ) -> None:
        grant = claim(store, run_id, terms, holder="h1-" + run_id)
        assert grant == Grant(run_id, 1, "h1-" + run_id, 1, 0, None, None)
        view = store.view(run_id)
        assert view is not None
        assert (view.state, view.epoch, view.holder) == (RunState.RUNNING, 1, grant.holder)
        assert view.lease_status is LeaseStatus.ACTIVE
        assert 85 < view.lease_left <= 90

    def test_stores_what_a_reaper_needs_without_the_tasks_code(
        self, store: Store, run_id: str, terms: Terms
    ) -> None:
        claim(store, run_id, terms, deliver=False)
        now = row(store, run_id)
        assert (now.namespace, now.task, now.envelope) == (store.namespace, "a.task", ENVELOPE)
        assert Terms.load(now.policy) == terms
        assert not now.deliver

    def test_of_an_unknown_run_at_a_later_epoch_never_inserts(
        self, store: Store, run_id: str, terms: Terms
    ) -> None:
        assert refused(store, run_id, terms, 3) == Refusal(None, busy=False)
        assert store.view(run_id) is None

    def test_of_a_registered_run_keeps_its_envelope(
        self, store: Store, run_id: str, terms: Terms
    ) -> None:
        store.enqueue(run_id, task="a.task", terms=terms, envelope=b"registered")
        assert claim(store, run_id, terms).epoch == 1
        assert row(store, run_id).envelope == b"registered"

    def test_clears_the_trigger_and_the_time_it_waited_for(
        self, store: Store, run_id: str, terms: Terms, age: Callable[..., None]
    ) -> None:
        enqueue(store, run_id, terms, delay=5.0)
        age(store, 6)
        claim(store, run_id, terms)
        now = row(store, run_id)
        assert (now.trigger_due, now.not_before) == (None, None)

    def test_takes_the_terms_of_the_task_as_it_is_now(
        self, store: Store, run_id: str, terms: Terms
    ) -> None:
        enqueue(store, run_id, terms)
        grant = claim(store, run_id, replace(terms, duration=200.0, max_attempts=9))
        assert Terms.load(row(store, run_id).policy).max_attempts == 9
        assert lease_row(store, grant).duration == 200.0

    def test_counts_attempts_and_gives_the_checkpoint_to_the_next_holder(
        self, store: Store, run_id: str, terms: Terms
    ) -> None:
        first = claim(store, run_id, terms)
        store.checkpoint(first, b"half", progress=0.5)
        reclaim(store, first)
        second = claim(store, run_id, terms, expected=1)
        assert (second.epoch, second.attempt, second.recoveries) == (2, 1, 1)
        assert (second.checkpoint, second.progress) == (b"half", 0.5)
        reclaim(store, second)
        assert claim(store, run_id, terms, expected=2).attempt == 2


class TestAClaimIsRefused:
    def test_while_somebody_else_holds_the_run(
        self, store: Store, run_id: str, terms: Terms
    ) -> None:
        grant = claim(store, run_id, terms)
        before = dump(store, run_id)
        for expected in (0, 1, 2):
            answer = refused(store, run_id, terms, expected)
            assert answer.view is not None
            assert answer.view.holder == grant.holder
            assert not answer.busy
        assert dump(store, run_id) == before

    def test_never_stealing_even_an_expired_lease(
        self, store: Store, run_id: str, terms: Terms, age: Callable[..., None]
    ) -> None:
        claim(store, run_id, terms)
        age(store, 100_000)
        answer = refused(store, run_id, terms, 1)
        assert answer.view is not None
        assert answer.view.lease_left < 0
        assert live_leases(store, run_id) == 1

    @pytest.mark.parametrize("expected", [0, 2])
    def test_at_another_epoch_than_the_runs(
        self, store: Store, run_id: str, terms: Terms, expected: int
    ) -> None:
        store.hand_off(claim(store, run_id, terms), "budget")
        answer = refused(store, run_id, terms, expected)
        assert answer.view is not None
        assert (answer.view.state, answer.busy) == (RunState.READY, False)

    def test_before_its_time(
        self, store: Store, run_id: str, terms: Terms, age: Callable[..., None]
    ) -> None:
        enqueue(store, run_id, terms, delay=50.0)
        answer = refused(store, run_id, terms, 0)
        assert answer.view is not None
        assert 45 < answer.view.due_in <= 50
        assert not answer.busy
        age(store, 51)
        assert claim(store, run_id, terms).epoch == 1

    def test_after_celerys_expires(
        self, store: Store, run_id: str, terms: Terms, age: Callable[..., None]
    ) -> None:
        enqueue(store, run_id, terms, expires_in=50.0)
        age(store, 51)
        answer = refused(store, run_id, terms, 0)
        assert answer.view is not None
        assert answer.view.overdue
        assert not answer.busy

    def test_not_after_celerys_expires_once_it_was_claimed(
        self, store: Store, run_id: str, terms: Terms, age: Callable[..., None]
    ) -> None:
        enqueue(store, run_id, terms, expires_in=50.0)
        store.hand_off(claim(store, run_id, terms), "budget")
        age(store, 51)
        assert claim(store, run_id, terms, expected=1).epoch == 2

    def test_for_a_finished_run(self, store: Store, run_id: str, terms: Terms) -> None:
        complete(store, claim(store, run_id, terms))
        answer = refused(store, run_id, terms, 1)
        assert answer.view is not None
        assert answer.view.state is RunState.SUCCEEDED

    def test_without_an_event_or_any_other_write(
        self, store: Store, run_id: str, terms: Terms
    ) -> None:
        claim(store, run_id, terms)
        before = kinds(store, run_id)
        refused(store, run_id, terms, 0)
        assert kinds(store, run_id) == before


class TestARepeatedClaim:
    def test_by_the_same_holder_is_granted_again(
        self, store: Store, run_id: str, terms: Terms
    ) -> None:
        grant = claim(store, run_id, terms)
        assert claim(store, run_id, terms, holder=grant.holder) == grant
        assert live_leases(store, run_id) == 1

    def test_by_the_same_holder_is_refused_once_it_was_handed_over(
        self, store: Store, run_id: str, terms: Terms
    ) -> None:
        grant = claim(store, run_id, terms)
        reclaim(store, grant)
        other = claim(store, run_id, terms, expected=1)
        answer = refused(store, run_id, terms, 0, grant.holder)
        assert answer.view is not None
        assert answer.view.holder == other.holder

    def test_by_a_holder_that_has_another_run_is_no_grant(
        self, store: Store, run_id: str, terms: Terms
    ) -> None:
        grant = claim(store, run_id, terms)
        refused(store, run_id + "-2", terms, 0, grant.holder)
        assert store.view(run_id + "-2") is None


class TestEnqueue:
    def test_registers_a_run_at_epoch_0_with_its_trigger(
        self, store: Store, run_id: str, terms: Terms
    ) -> None:
        assert enqueue(store, run_id, terms)
        view = store.view(run_id)
        assert view is not None
        assert (view.state, view.epoch, view.attempt) == (RunState.READY, 0, 0)
        assert view.untriggered
        assert store.due() == [(run_id, 0)]

    def test_of_a_delayed_run_is_due_at_its_time(
        self, store: Store, run_id: str, terms: Terms, age: Callable[..., None]
    ) -> None:
        enqueue(store, run_id, terms, delay=50.0)
        assert store.due() == []
        view = store.view(run_id)
        assert view is not None
        assert not view.untriggered
        age(store, 51)
        assert store.due() == [(run_id, 0)]

    @pytest.mark.parametrize("state", ["registered", "running", "finished"])
    def test_of_a_used_id_does_nothing(
        self, store: Store, run_id: str, terms: Terms, state: str
    ) -> None:
        if state == "registered":
            enqueue(store, run_id, terms)
        else:
            grant = claim(store, run_id, terms)
            if state == "finished":
                complete(store, grant)
        before, events = dump(store, run_id), kinds(store, run_id)
        assert not store.enqueue(run_id, task="other", terms=terms, envelope=b"other")
        assert dump(store, run_id) == before
        assert kinds(store, run_id) == events

    def test_charges_an_attempt_for_a_child_that_died_before_its_claim(
        self, store: Store, run_id: str, terms: Terms
    ) -> None:
        enqueue(store, run_id, terms, attempt=1)
        assert claim(store, run_id, terms).attempt == 2

    def test_leaves_an_event(self, store: Store, run_id: str, terms: Terms) -> None:
        enqueue(store, run_id, terms, reason="too_early")
        (event,) = store.events(run_id)
        assert (event["kind"], event["reason"], event["epoch"]) == ("enqueued", "too_early", 0)


class TestANamespace:
    def test_keeps_reapers_apart(
        self,
        store: Store,
        make_store: Callable[..., Store],
        run_id: str,
        terms: Terms,
        age: Callable[..., None],
    ) -> None:
        neighbour = make_store(store, namespace=store.namespace + "-2")
        enqueue(store, run_id + "-ready", terms, expires_in=1.0)
        grant = claim(store, run_id, terms)
        age(store, 91)
        assert neighbour.expired() == []
        assert neighbour.due() == []
        assert neighbour.sweep() == 0
        store.suspect(run_id, grant.epoch)
        age(store, 36)
        assert neighbour.overripe() == []
        assert neighbour.fence_all() == 0
        assert neighbour.list_runs() == []
        assert store.overripe() == [(run_id, 1)]
