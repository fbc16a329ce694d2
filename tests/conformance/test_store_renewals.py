"""Renew: one call for any number of leases, and what it learns about each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from celery_lease.policy import Terms
from celery_lease.states import LeaseStatus
from celery_lease.store import Renewal, Store
from tests.runs import (
    claim,
    complete,
    dump,
    kinds,
    lease_row,
    new_holder,
    reclaim,
    row,
    suspect,
)


class TestARenewal:
    def test_extends_each_lease_by_its_own_duration_from_now(
        self, store: Store, run_id: str, terms: Terms, age: Callable[..., None]
    ) -> None:
        short = claim(store, run_id + "-1", replace(terms, duration=30.0))
        long = claim(store, run_id + "-2", replace(terms, duration=300.0))
        age(store, 20)
        renewal = store.renew([short.holder, long.holder])
        assert renewal == Renewal(kept=frozenset({short.holder, long.holder}))
        for grant, duration in ((short, 30.0), (long, 300.0)):
            view = store.view(grant.run_id)
            assert view is not None
            assert view.lease_left == pytest.approx(duration, abs=2)

    def test_never_touches_the_run(self, store: Store, run_id: str, terms: Terms) -> None:
        grant = claim(store, run_id, terms)
        before = row(store, run_id)
        store.renew([grant.holder])
        assert row(store, run_id) == before

    def test_revives_a_suspect_and_records_it_as_recovered(
        self, store: Store, run_id: str, terms: Terms
    ) -> None:
        grant = claim(store, run_id, terms)
        suspect(store, grant)
        assert store.renew([grant.holder]).kept == {grant.holder}
        lease = lease_row(store, grant)
        assert (lease.status, lease.suspect_at) == (LeaseStatus.ACTIVE, None)
        assert kinds(store, run_id) == ["suspect", "recovered"]

    def test_of_an_expired_lease_that_nobody_suspected_is_accepted(
        self, store: Store, run_id: str, terms: Terms, age: Callable[..., None]
    ) -> None:
        grant = claim(store, run_id, terms)
        age(store, 100_000)
        assert store.renew([grant.holder]).kept == {grant.holder}
        assert store.expired() == []

    def test_never_revives_a_lease_that_was_handed_over(
        self, store: Store, run_id: str, terms: Terms
    ) -> None:
        grant = claim(store, run_id, terms)
        reclaim(store, grant)
        before = dump(store, run_id)
        assert store.renew([grant.holder]).lost == {grant.holder: "reclaimed"}
        assert dump(store, run_id) == before

    def test_tells_revoked_stalled_released_and_unknown_apart(
        self, store: Store, run_id: str, terms: Terms
    ) -> None:
        revoked, stalled, abandoned, done = (claim(store, f"{run_id}-{n}", terms) for n in range(4))
        store.revoke(revoked.run_id)
        store.abandon(stalled.run_id, 1, stalled.holder, "stalled")
        store.abandon(abandoned.run_id, 1, abandoned.holder, "child died")
        complete(store, done)
        nobody = new_holder()
        renewal = store.renew(
            [revoked.holder, stalled.holder, abandoned.holder, done.holder, nobody]
        )
        assert renewal == Renewal(
            lost={
                revoked.holder: "revoked",
                stalled.holder: "stalled",
                abandoned.holder: "reclaimed",
            },
            released=frozenset({done.holder}),
            unknown=frozenset({nobody}),
        )

    def test_of_nobody_asks_nothing(self, store: Store) -> None:
        assert store.renew([]) == Renewal()

    def test_may_name_a_holder_twice(self, store: Store, run_id: str, terms: Terms) -> None:
        grant = claim(store, run_id, terms)
        assert store.renew([grant.holder, grant.holder]).kept == {grant.holder}

    def test_of_many_leases_is_one_call(self, store: Store, run_id: str, terms: Terms) -> None:
        grants = [claim(store, f"{run_id}-{n}", terms) for n in range(30)]
        reclaim(store, grants[7])
        renewal = store.renew([grant.holder for grant in grants])
        assert renewal.kept == {grant.holder for grant in grants} - {grants[7].holder}
        assert set(renewal.lost) == {grants[7].holder}

    def test_of_a_stopping_worker_marks_its_leases_until_they_end(
        self, store: Store, run_id: str, terms: Terms
    ) -> None:
        grant, other = claim(store, run_id, terms), claim(store, run_id + "-2", terms)
        store.renew([grant.holder], yielding=True)
        store.renew([grant.holder, other.holder])
        assert lease_row(store, grant).yield_requested
        assert not lease_row(store, other).yield_requested


class TestSettling:
    def test_ends_what_is_to_be_delivered(
        self, store: Store, run_id: str, terms: Terms, age: Callable[..., None]
    ) -> None:
        grants = [claim(store, f"{run_id}-{n}", terms) for n in range(3)]
        for grant in grants:
            complete(store, grant)
        store.settle([(grant.run_id, grant.holder) for grant in grants])
        for grant in grants:
            view = store.view(grant.run_id)
            assert view is not None
            assert view.settled
        age(store, 100_000)
        assert store.due() == []

    def test_twice_keeps_the_first_time(
        self, store: Store, run_id: str, terms: Terms, age: Callable[..., None]
    ) -> None:
        grant = claim(store, run_id, terms)
        complete(store, grant)
        store.settle([(run_id, grant.holder)])
        age(store, 50)
        before = dump(store, run_id)
        store.settle([(run_id, grant.holder)])
        assert dump(store, run_id) == before

    def test_by_a_holder_that_lost_the_delivery_to_a_replay_changes_nothing(
        self, store: Store, run_id: str, terms: Terms, age: Callable[..., None]
    ) -> None:
        grant = claim(store, run_id, terms)
        complete(store, grant)
        age(store, 61)
        assert store.replay(run_id, new_holder(), terms) is not None
        store.settle([(run_id, grant.holder)])
        view = store.view(run_id)
        assert view is not None
        assert not view.settled

    def test_by_who_delivered_an_older_outcome_does_not_settle_the_next(
        self, store: Store, run_id: str, terms: Terms
    ) -> None:
        grant = claim(store, run_id, terms)
        store.fail(grant, b"error", reason="no", deliver=True, settle_in=60.0)
        store.resume(run_id)
        store.revoke(run_id)
        store.settle([(run_id, grant.holder)])
        view = store.view(run_id)
        assert view is not None
        assert not view.settled

    def test_moves_on_while_callbacks_are_being_sent(
        self, store: Store, run_id: str, terms: Terms, age: Callable[..., None]
    ) -> None:
        grant = claim(store, run_id, terms)
        complete(store, grant)
        age(store, 50)
        store.extend_settling([(run_id, grant.holder, 60.0)])
        age(store, 50)
        assert store.replay(run_id, new_holder(), terms) is None
        assert store.due() == []

    def test_does_not_move_on_for_anybody_else(
        self, store: Store, run_id: str, terms: Terms, age: Callable[..., None]
    ) -> None:
        complete(store, claim(store, run_id, terms))
        store.extend_settling([(run_id, new_holder(), 600.0)])
        age(store, 61)
        assert store.replay(run_id, new_holder(), terms) is not None

    def test_of_nobody_asks_nothing(self, store: Store) -> None:
        store.settle([])
        store.extend_settling([])
