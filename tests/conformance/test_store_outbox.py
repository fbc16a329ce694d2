"""The run is its own outbox: triggers and outcomes on their way to the broker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from celery_lease.policy import Terms
from celery_lease.states import RunState
from celery_lease.store import Grant, Store
from tests.runs import (
    ENVELOPE,
    claim,
    complete,
    dump,
    enqueue,
    fail,
    new_holder,
    row,
    trace,
)


class TestADueTrigger:
    def test_is_found_longest_waiting_first_and_in_portions(
        self, store: Store, run_id: str, terms: Terms, age: Callable[..., None]
    ) -> None:
        for number in range(3):
            enqueue(store, f"{run_id}-{number}", terms)
            age(store, 5)
        assert [found for found, _ in store.due()] == [f"{run_id}-{n}" for n in range(3)]
        assert [found for found, _ in store.due(most=1)] == [f"{run_id}-0"]

    def test_without_an_envelope_is_skipped_and_keeps_nobody_waiting(
        self, store: Store, run_id: str, terms: Terms, age: Callable[..., None]
    ) -> None:
        store.enqueue(run_id + "-empty", task="a.task", terms=terms, envelope=None)
        age(store, 5)
        enqueue(store, run_id, terms)
        assert store.due(most=1) == [(run_id, 0)]

    def test_that_is_still_to_come_is_announced(
        self, store: Store, run_id: str, terms: Terms, make_store: Callable[..., Store]
    ) -> None:
        others = make_store(store, namespace=f"{store.namespace}-other")
        enqueue(others, f"{run_id}-theirs", terms, delay=30.0)
        assert store.next_due() is None
        enqueue(store, f"{run_id}-later", terms, delay=300.0)
        enqueue(store, f"{run_id}-soon", terms, delay=60.0)
        enqueue(store, f"{run_id}-now", terms)
        store.enqueue(f"{run_id}-empty", task="a.task", terms=terms, envelope=None, delay=30.0)
        due_in = store.next_due()
        assert due_in is not None
        assert 55 < due_in <= 60


class TestAReservation:
    def test_gives_the_sender_all_it_needs(self, store: Store, run_id: str, terms: Terms) -> None:
        enqueue(store, run_id, terms)
        outgoing = store.reserve(run_id, 0)
        assert outgoing is not None
        assert (outgoing.run_id, outgoing.epoch, outgoing.envelope) == (run_id, 0, ENVELOPE)
        assert (outgoing.triggers, outgoing.task, outgoing.terms) == (0, "a.task", terms)

    def test_is_for_one_sender(self, store: Store, run_id: str, terms: Terms) -> None:
        enqueue(store, run_id, terms)
        assert store.reserve(run_id, 0) is not None
        assert store.reserve(run_id, 0) is None
        assert store.due() == []

    def test_of_a_sender_that_died_is_due_again_in_half_a_minute(
        self, store: Store, run_id: str, terms: Terms, age: Callable[..., None]
    ) -> None:
        enqueue(store, run_id, terms)
        store.reserve(run_id, 0)
        age(store, 29)
        assert store.reserve(run_id, 0) is None
        age(store, 2)
        assert store.reserve(run_id, 0) is not None

    def test_of_another_epoch_is_refused(self, store: Store, run_id: str, terms: Terms) -> None:
        enqueue(store, run_id, terms)
        before = dump(store, run_id)
        assert store.reserve(run_id, 1) is None
        assert dump(store, run_id) == before

    def test_before_its_time_is_refused(self, store: Store, run_id: str, terms: Terms) -> None:
        enqueue(store, run_id, terms, delay=50.0)
        assert store.reserve(run_id, 0) is None

    def test_of_a_running_run_is_refused(self, store: Store, run_id: str, terms: Terms) -> None:
        claim(store, run_id, terms)
        assert store.reserve(run_id, 1) is None


class TestASentTrigger:
    def test_is_sent_again_later_and_later_since_sent_is_not_arrived(
        self, store: Store, run_id: str, terms: Terms, age: Callable[..., None]
    ) -> None:
        enqueue(store, run_id, terms)
        for number, pause in enumerate((900, 1800, 3600, 7200, 14400, 21600, 21600)):
            outgoing = store.reserve(run_id, 0)
            assert outgoing is not None
            assert outgoing.triggers == number
            store.sent(outgoing)
            age(store, pause - 5)
            assert store.due() == []
            age(store, 10)

    def test_follows_the_tasks_own_interval(
        self, store: Store, run_id: str, terms: Terms, age: Callable[..., None]
    ) -> None:
        enqueue(store, run_id, replace(terms, retrigger_after=10.0))
        outgoing = store.reserve(run_id, 0)
        assert outgoing is not None
        store.sent(outgoing)
        age(store, 11)
        assert store.due() == [(run_id, 0)]

    def test_says_nothing_about_a_run_that_was_claimed_meanwhile(
        self, store: Store, run_id: str, terms: Terms
    ) -> None:
        enqueue(store, run_id, terms)
        outgoing = store.reserve(run_id, 0)
        assert outgoing is not None
        grant = claim(store, run_id, terms)
        before = dump(store, run_id)
        store.sent(outgoing)
        assert dump(store, run_id) == before
        store.hand_off(grant, "budget")
        before = dump(store, run_id)
        store.sent(outgoing)
        assert dump(store, run_id) == before

    def test_says_nothing_about_an_outcome_that_was_settled_meanwhile(
        self, store: Store, run_id: str, terms: Terms, age: Callable[..., None]
    ) -> None:
        complete(store, claim(store, run_id, terms))
        age(store, 61)
        outgoing = store.reserve(run_id, 1)
        assert outgoing is not None
        winner = new_holder()
        store.replay(run_id, winner, terms)
        store.settle([(run_id, winner)])
        store.sent(outgoing)
        age(store, 1_000_000)
        assert store.due() == []

    def test_counts_once(self, store: Store, run_id: str, terms: Terms) -> None:
        enqueue(store, run_id, terms)
        outgoing = store.reserve(run_id, 0)
        assert outgoing is not None
        store.sent(outgoing)
        before = dump(store, run_id)
        store.sent(outgoing)
        assert dump(store, run_id) == before

    def test_does_not_put_off_a_replay_that_has_begun(
        self, store: Store, run_id: str, terms: Terms, age: Callable[..., None]
    ) -> None:
        complete(store, claim(store, run_id, terms))
        age(store, 61)
        outgoing = store.reserve(run_id, 1)
        assert outgoing is not None
        assert store.replay(run_id, new_holder(), terms) is not None
        store.sent(outgoing)
        age(store, 61)
        assert store.due() == [(run_id, 1)]


@pytest.mark.parametrize(
    ("end", "state"), [(complete, RunState.SUCCEEDED), (fail, RunState.FAILED)]
)
class TestAReplay:
    def ended(
        self,
        store: Store,
        run_id: str,
        terms: Terms,
        age: Callable[..., None],
        end: Callable[..., None],
    ) -> Grant:
        grant = claim(store, run_id, terms)
        end(store, grant, b"outcome")
        assert store.due() == []
        age(store, 61)
        assert store.due() == [(run_id, 1)]
        return grant

    def test_gives_the_winner_the_recorded_outcome(
        self,
        store: Store,
        run_id: str,
        terms: Terms,
        age: Callable[..., None],
        end: Callable[..., None],
        state: RunState,
    ) -> None:
        self.ended(store, run_id, terms, age, end)
        replay = store.replay(run_id, new_holder(), terms)
        assert replay is not None
        assert (replay.state, replay.epoch, replay.outcome) == (state, 1, b"outcome")
        assert (replay.envelope, replay.replays) == (ENVELOPE, 1)
        assert trace(store, run_id) == [("replayed", str(state))]

    def test_has_one_winner_until_its_time_is_over(
        self,
        store: Store,
        run_id: str,
        terms: Terms,
        age: Callable[..., None],
        end: Callable[..., None],
        state: RunState,
    ) -> None:
        self.ended(store, run_id, terms, age, end)
        assert store.replay(run_id, new_holder(), terms) is not None
        assert store.replay(run_id, new_holder(), terms) is None
        age(store, 61)
        assert store.replay(run_id, new_holder(), terms) is not None

    def test_is_settled_by_its_winner_only(
        self,
        store: Store,
        run_id: str,
        terms: Terms,
        age: Callable[..., None],
        end: Callable[..., None],
        state: RunState,
    ) -> None:
        self.ended(store, run_id, terms, age, end)
        winner = new_holder()
        store.replay(run_id, winner, terms)
        store.settle([(run_id, new_holder())])
        view = store.view(run_id)
        assert view is not None
        assert not view.settled
        store.settle([(run_id, winner)])
        view = store.view(run_id)
        assert view is not None
        assert view.settled
        age(store, 100_000)
        assert store.replay(run_id, new_holder(), terms) is None

    def test_that_never_succeeds_ends_as_undeliverable(
        self,
        store: Store,
        run_id: str,
        terms: Terms,
        age: Callable[..., None],
        end: Callable[..., None],
        state: RunState,
    ) -> None:
        limited = replace(terms, max_replays=2)
        self.ended(store, run_id, limited, age, end)
        for _ in range(2):
            assert store.replay(run_id, new_holder(), limited) is not None
            age(store, 61)
        assert store.replay(run_id, new_holder(), limited) is None
        now = row(store, run_id)
        assert (now.state, now.reason) == (state, "undeliverable")
        assert now.settled_at is not None
        assert trace(store, run_id)[-1] == ("undeliverable", None)
        age(store, 100_000)
        assert store.due() == []


def test_a_replay_of_a_run_that_is_not_over_is_refused(
    store: Store, run_id: str, terms: Terms, age: Callable[..., None]
) -> None:
    claim(store, run_id, terms)
    age(store, 100_000)
    before = dump(store, run_id)
    assert store.replay(run_id, new_holder(), terms) is None
    assert dump(store, run_id) == before
