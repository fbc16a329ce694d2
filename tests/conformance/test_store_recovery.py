"""Suspect, guard, reclaim, abandon, sweep: how a run gets away from a dead holder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from celery_lease.errors import LeaseLost
from celery_lease.policy import Terms
from celery_lease.schema import lease as lease_table
from celery_lease.schema import run as run_table
from celery_lease.states import LeaseStatus, RunState
from celery_lease.store import Store
from tests.runs import (
    alter,
    claim,
    complete,
    dump,
    enqueue,
    fail,
    kinds,
    lease_row,
    live_leases,
    new_holder,
    reclaim,
    row,
    suspect,
    trace,
)


class TestSuspicion:
    def test_falls_on_an_expired_lease_only(
        self, store: Store, run_id: str, terms: Terms, age: Callable[..., None]
    ) -> None:
        claim(store, run_id, terms)
        age(store, 80)
        assert store.expired() == []
        assert not store.suspect(run_id, 1)
        age(store, 11)
        assert store.expired() == [(run_id, 1)]
        assert store.suspect(run_id, 1)
        assert store.expired() == []

    def test_falls_once(self, store: Store, run_id: str, terms: Terms) -> None:
        grant = claim(store, run_id, terms)
        suspect(store, grant)
        before = dump(store, run_id)
        assert not store.suspect(run_id, 1)
        assert dump(store, run_id) == before
        assert kinds(store, run_id) == ["suspect"]

    def test_leaves_the_run_running(self, store: Store, run_id: str, terms: Terms) -> None:
        suspect(store, claim(store, run_id, terms))
        assert row(store, run_id).state == RunState.RUNNING

    def test_of_another_epoch_does_nothing(
        self, store: Store, run_id: str, terms: Terms, age: Callable[..., None]
    ) -> None:
        claim(store, run_id, terms)
        age(store, 100)
        assert not store.suspect(run_id, 0)
        assert not store.suspect(run_id, 2)

    def test_is_found_in_portions(
        self, store: Store, run_id: str, terms: Terms, age: Callable[..., None]
    ) -> None:
        for number in range(5):
            claim(store, f"{run_id}-{number}", terms)
        age(store, 100)
        found = store.expired(most=3)
        assert len(found) == 3
        for run, epoch in found:
            store.suspect(run, epoch)
        assert len(store.expired(most=3)) == 2


class TestAReclaim:
    def test_waits_for_the_grace_counted_from_the_suspicion(
        self, store: Store, run_id: str, terms: Terms, age: Callable[..., None]
    ) -> None:
        grant = claim(store, run_id, terms)
        age(store, 100_000)  # an outage: the first reaper must not take everything at once
        assert store.overripe() == []
        assert store.reclaim(run_id, 1) is None
        store.suspect(run_id, 1)
        assert store.reclaim(run_id, 1) is None
        age(store, 34)
        assert store.overripe() == []
        assert store.reclaim(run_id, 1) is None
        age(store, 2)
        assert store.overripe() == [(run_id, 1)]
        handed = store.reclaim(run_id, 1)
        assert handed is not None
        assert (handed.run_id, handed.epoch, handed.state) == (run_id, 1, RunState.READY)
        assert lease_row(store, grant).status == LeaseStatus.RECLAIMED

    def test_leaves_the_run_ready_and_due_under_its_epoch(
        self, store: Store, run_id: str, terms: Terms
    ) -> None:
        grant = claim(store, run_id, terms)
        store.checkpoint(grant, b"half")
        reclaim(store, grant)
        now = row(store, run_id)
        assert (now.state, now.epoch, now.checkpoint) == (RunState.READY, 1, b"half")
        assert now.recoveries == 1
        assert store.due() == [(run_id, 1)]

    def test_happens_once(self, store: Store, run_id: str, terms: Terms) -> None:
        reclaim(store, claim(store, run_id, terms))
        before = dump(store, run_id)
        assert store.reclaim(run_id, 1) is None
        assert dump(store, run_id) == before
        assert trace(store, run_id) == [("suspect", None), ("reclaimed", "expired")]

    def test_does_nothing_when_a_renewal_came_first(
        self, store: Store, run_id: str, terms: Terms, age: Callable[..., None]
    ) -> None:
        grant = claim(store, run_id, terms)
        suspect(store, grant)
        age(store, 36)
        store.renew([grant.holder])
        before = dump(store, run_id)
        assert store.overripe() == []
        assert store.reclaim(run_id, 1) is None
        assert dump(store, run_id) == before

    def test_of_another_epoch_does_nothing(
        self, store: Store, run_id: str, terms: Terms, age: Callable[..., None]
    ) -> None:
        reclaim(store, claim(store, run_id, terms))
        suspect(store, claim(store, run_id, terms, expected=1))
        age(store, 36)
        before = dump(store, run_id)
        assert store.reclaim(run_id, 1) is None
        assert dump(store, run_id) == before

    def test_never_overwrites_a_finished_run(
        self, store: Store, run_id: str, terms: Terms, age: Callable[..., None]
    ) -> None:
        grant = claim(store, run_id, terms)
        suspect(store, grant)
        complete(store, grant)
        age(store, 36)
        before = dump(store, run_id)
        assert store.reclaim(run_id, 1) is None
        assert dump(store, run_id) == before

    def test_is_not_kept_waiting_by_suspects_with_a_longer_grace(
        self, store: Store, run_id: str, terms: Terms, age: Callable[..., None]
    ) -> None:
        patient = replace(terms, grace=100_000.0)
        for number in range(5):
            suspect(store, claim(store, f"{run_id}-{number}", patient))
        suspect(store, claim(store, run_id, terms))
        age(store, 36)
        assert store.overripe(most=2) == [(run_id, 1)]


class TestTheGuardInTheStore:
    def test_fails_a_run_whose_attempts_are_used_up(
        self, store: Store, run_id: str, terms: Terms
    ) -> None:
        for epoch in range(5):
            grant = claim(store, run_id, terms, expected=epoch)
            handed = reclaim(store, grant)
        assert handed.state is RunState.FAILED
        assert "5 attempts" in handed.reason
        now = row(store, run_id)
        assert (now.state, now.reason) == (RunState.FAILED, handed.reason)
        assert now.finished_at is not None
        assert now.settle_by is not None
        assert store.due() == [(run_id, 5)]
        assert trace(store, run_id)[-2:] == [("reclaimed", "expired"), ("failed", handed.reason)]

    def test_does_not_count_attempts_that_made_progress(
        self, store: Store, run_id: str, terms: Terms
    ) -> None:
        for epoch in range(8):
            grant = claim(store, run_id, terms, expected=epoch)
            store.checkpoint(grant, b"%d" % epoch)
            assert reclaim(store, grant).state is RunState.READY

    def test_limits_recoveries_absolutely(self, store: Store, run_id: str, terms: Terms) -> None:
        limited = replace(terms, max_recoveries=3)
        for epoch in range(3):
            grant = claim(store, run_id, limited, expected=epoch)
            store.checkpoint(grant, b"%d" % epoch)
            handed = reclaim(store, grant)
        assert handed.state is RunState.FAILED
        assert "3 recoveries" in handed.reason

    def test_parks_a_run_whose_policy_asks_a_person(
        self, store: Store, run_id: str, terms: Terms, age: Callable[..., None]
    ) -> None:
        handed = reclaim(store, claim(store, run_id, replace(terms, on_reclaim="ask")))
        assert handed.state is RunState.PARKED
        age(store, 100_000)
        assert store.due() == []

    def test_starts_again_without_checkpoint_and_stages_where_the_policy_says_so(
        self, store: Store, run_id: str, terms: Terms
    ) -> None:
        grant = claim(store, run_id, replace(terms, on_reclaim="restart"))
        store.checkpoint(grant, b"half")
        store.save_stage(grant, "load", b"rows")
        reclaim(store, grant)
        second = claim(store, run_id, terms, expected=1)
        assert second.checkpoint is None
        assert store.stages(run_id) == {}


class TestAnAbandonment:
    def test_needs_no_expiry_and_no_grace(self, store: Store, run_id: str, terms: Terms) -> None:
        grant = claim(store, run_id, terms)
        handed = store.abandon(run_id, 1, grant.holder, "child died")
        assert handed is not None
        assert handed.state is RunState.READY
        lease = lease_row(store, grant)
        assert (lease.status, lease.reason) == (LeaseStatus.RECLAIMED, "child died")
        assert store.due() == [(run_id, 1)]
        assert trace(store, run_id) == [("abandoned", "child died")]

    def test_of_a_suspect_is_one_too(self, store: Store, run_id: str, terms: Terms) -> None:
        grant = claim(store, run_id, terms)
        suspect(store, grant)
        assert store.abandon(run_id, 1, grant.holder, "child died") is not None

    @pytest.mark.parametrize("what", ["holder", "epoch"])
    def test_by_anybody_else_does_nothing(
        self, store: Store, run_id: str, terms: Terms, what: str
    ) -> None:
        grant = claim(store, run_id, terms)
        before = dump(store, run_id)
        epoch = grant.epoch + (what == "epoch")
        holder = new_holder() if what == "holder" else grant.holder
        assert store.abandon(run_id, epoch, holder, "child died") is None
        assert dump(store, run_id) == before

    def test_after_the_childs_own_commit_does_nothing(
        self, store: Store, run_id: str, terms: Terms
    ) -> None:
        grant = claim(store, run_id, terms)
        complete(store, grant)
        before = dump(store, run_id)
        assert store.abandon(run_id, 1, grant.holder, "child died") is None
        assert dump(store, run_id) == before

    def test_counts_like_a_reclaim(self, store: Store, run_id: str, terms: Terms) -> None:
        for epoch in range(5):
            grant = claim(store, run_id, terms, expected=epoch)
            handed = store.abandon(run_id, grant.epoch, grant.holder, "child died")
        assert handed is not None
        assert handed.state is RunState.FAILED


class TestAParentsFailure:
    """A hard limit, or a lost child of a task that may not be tried again."""

    def give_up(self, store: Store, run_id: str, holder: str, epoch: int = 1) -> bool:
        return store.give_up(
            run_id, epoch, holder, b"timeout", reason="TimeLimit", deliver=True, settle_in=60.0
        )

    def test_fails_the_run_and_ends_the_lease_as_reclaimed(
        self, store: Store, run_id: str, terms: Terms
    ) -> None:
        grant = claim(store, run_id, terms)
        assert self.give_up(store, run_id, grant.holder)
        now = row(store, run_id)
        assert (now.state, now.outcome, now.reason) == (RunState.FAILED, b"timeout", "TimeLimit")
        assert lease_row(store, grant).status == LeaseStatus.RECLAIMED
        assert trace(store, run_id) == [("failed", "TimeLimit")]

    def test_refuses_the_childs_late_commit_even_of_the_same_outcome(
        self, store: Store, run_id: str, terms: Terms
    ) -> None:
        grant = claim(store, run_id, terms)
        self.give_up(store, run_id, grant.holder)
        with pytest.raises(LeaseLost):
            fail(store, grant, b"timeout", reason="TimeLimit")

    def test_after_the_childs_commit_does_nothing(
        self, store: Store, run_id: str, terms: Terms
    ) -> None:
        grant = claim(store, run_id, terms)
        complete(store, grant)
        before = dump(store, run_id)
        assert not self.give_up(store, run_id, grant.holder)
        assert dump(store, run_id) == before

    @pytest.mark.parametrize("what", ["holder", "epoch"])
    def test_of_another_holder_or_epoch_does_nothing(
        self, store: Store, run_id: str, terms: Terms, what: str
    ) -> None:
        grant = claim(store, run_id, terms)
        before = dump(store, run_id)
        holder = new_holder() if what == "holder" else grant.holder
        assert not self.give_up(store, run_id, holder, 1 + (what == "epoch"))
        assert dump(store, run_id) == before


class TestWhatAParentKnowsOfAHolder:
    def test_is_the_run_and_epoch_it_was_granted(
        self, store: Store, run_id: str, terms: Terms
    ) -> None:
        grant = claim(store, run_id, terms)
        ended = store.of_holder(grant.holder)
        assert ended is not None
        assert (ended.run_id, ended.epoch, ended.status) == (run_id, 1, LeaseStatus.ACTIVE)
        complete(store, grant)
        ended = store.of_holder(grant.holder)
        assert ended is not None
        assert ended.status == LeaseStatus.RELEASED

    def test_is_nothing_if_it_never_claimed(self, store: Store) -> None:
        assert store.of_holder(new_holder()) is None


class TestASweep:
    def test_finds_nothing_in_a_healthy_store(
        self, store: Store, run_id: str, terms: Terms, age: Callable[..., None]
    ) -> None:
        enqueue(store, run_id + "-ready", terms)
        running = claim(store, run_id + "-running", terms)
        suspect(store, claim(store, run_id + "-suspect", terms))
        complete(store, claim(store, run_id + "-done", terms))
        store.park(claim(store, run_id + "-parked", terms), "why")
        assert store.sweep() == 0
        store.check(running)

    def test_ends_a_live_lease_of_a_run_that_is_not_running(
        self, store: Store, run_id: str, terms: Terms
    ) -> None:
        grant = claim(store, run_id, terms)
        alter(store, run_table, run_id, state=RunState.READY)
        assert store.sweep() == 1
        assert lease_row(store, grant).status == LeaseStatus.RECLAIMED
        assert store.sweep() == 0

    def test_makes_a_running_run_without_a_live_lease_ready(
        self, store: Store, run_id: str, terms: Terms
    ) -> None:
        claim(store, run_id, terms)
        alter(store, lease_table, run_id, status=LeaseStatus.RELEASED)
        assert store.sweep() == 1
        now = row(store, run_id)
        assert (now.state, now.recoveries) == (RunState.READY, 1)
        assert store.due() == [(run_id, 1)]
        assert store.sweep() == 0

    def test_revokes_a_ready_run_that_expired_before_its_first_claim(
        self, store: Store, run_id: str, terms: Terms, age: Callable[..., None]
    ) -> None:
        enqueue(store, run_id, terms, expires_in=50.0)
        assert store.sweep() == 0
        age(store, 51)
        assert store.sweep() == 1
        now = row(store, run_id)
        assert (now.state, now.reason) == (RunState.REVOKED, "expired")
        assert now.settle_by is not None
        assert store.due() == [(run_id, 0)]
        assert store.sweep() == 0

    def test_leaves_a_run_alone_that_expired_after_its_first_claim(
        self, store: Store, run_id: str, terms: Terms, age: Callable[..., None]
    ) -> None:
        enqueue(store, run_id, terms, expires_in=50.0)
        store.hand_off(claim(store, run_id, terms), "budget")
        age(store, 51)
        assert store.sweep() == 0
        assert not store.expire(run_id)

    def test_looks_at_the_next_runs_each_time_and_begins_anew_at_the_end(
        self, store: Store, run_id: str, terms: Terms
    ) -> None:
        for number in range(5):
            claim(store, f"{run_id}-{number}", terms)
            alter(store, lease_table, f"{run_id}-{number}", status=LeaseStatus.RELEASED)
        assert [store.sweep(2) for _ in range(4)] == [2, 2, 1, 0]

    def test_leaves_no_two_live_leases_whatever_it_mends(
        self, store: Store, run_id: str, terms: Terms
    ) -> None:
        claim(store, run_id, terms)
        alter(store, run_table, run_id, state=RunState.READY)
        store.sweep()
        claim(store, run_id, terms, expected=1)
        assert live_leases(store, run_id) == 1
