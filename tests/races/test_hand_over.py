"""A holder that comes back late against those who take its run away."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import pytest

from celery_lease.errors import LeaseLost
from celery_lease.policy import Terms
from celery_lease.states import LeaseStatus, RunState
from celery_lease.store import Grant, Store
from tests.runs import (
    claim,
    complete,
    dump,
    fail,
    kinds,
    lease_row,
    live_leases,
    reclaim,
    row,
    suspect,
)

both = pytest.mark.parametrize("database", ["sqlite", "postgresql"], indirect=True)

Collide = Callable[[int, Callable[[Store, int], Any]], list[Any]]


def overripe(store: Store, run_id: str, terms: Terms, age: Callable[..., None]) -> Grant:
    """A run whose holder may be reclaimed at any moment."""
    grant = claim(store, run_id, terms)
    suspect(store, grant)
    age(store, 36)
    return grant


@both
def test_five_reapers_at_once_make_one_transition_one_event_and_one_trigger(
    store: Store, run_id: str, terms: Terms, age: Callable[..., None], at_once: Collide
) -> None:
    """Case 38."""
    grant = claim(store, run_id, terms)
    age(store, 91)
    suspected = at_once(5, lambda own, _: [own.suspect(*found) for found in own.expired()])
    assert sum(sum(one) for one in suspected) == 1
    age(store, 36)

    reclaimed = at_once(5, lambda own, _: [own.reclaim(*found) for found in own.overripe()])
    reserved = at_once(5, lambda own, _: [own.reserve(*found) for found in own.due()])

    assert len([one for many in reclaimed for one in many if one]) == 1
    assert len([one for many in reserved for one in many if one]) == 1
    assert kinds(store, run_id) == ["suspect", "reclaimed"]
    now = row(store, run_id)
    assert (now.state, now.recoveries) == (RunState.READY, 1)
    assert lease_row(store, grant).status == LeaseStatus.RECLAIMED


@both
def test_the_same_host_process_and_worker_name_gives_the_old_attempt_no_right(
    store: Store, run_id: str, terms: Terms
) -> None:
    """Case 34: `node` is the same; the holder and the epoch are not."""
    old = claim(store, run_id, terms)
    reclaim(store, old)
    new = claim(store, run_id, terms, expected=1)
    assert lease_row(store, old).node == lease_row(store, new).node
    before = dump(store, run_id)
    assert store.renew([old.holder]).lost == {old.holder: "reclaimed"}
    for write in (
        lambda: store.checkpoint(old, b"old"),
        lambda: store.save_stage(old, "old", b"old"),
        lambda: complete(store, old),
        lambda: fail(store, old),
        lambda: store.hand_off(old, "budget"),
    ):
        with pytest.raises(LeaseLost):
            write()
    assert dump(store, run_id) == before


@both
def test_a_late_renewal_does_not_steal_the_lease_back(
    store: Store, run_id: str, terms: Terms
) -> None:
    """Case 35."""
    old = claim(store, run_id, terms)
    reclaim(store, old)
    assert store.renew([old.holder]).lost == {old.holder: "reclaimed"}
    new = claim(store, run_id, terms, expected=1)
    assert store.renew([old.holder, new.holder]).kept == {new.holder}
    store.check(new)


class TestReclaimAndRenew:
    def test_a_reclaim_that_waited_for_a_renewal_hands_nothing_over(
        self,
        store: Store,
        run_id: str,
        terms: Terms,
        age: Callable[..., None],
        session: Any,
        background: Any,
    ) -> None:
        grant = overripe(store, run_id, terms, age)
        session.lock_lease(run_id)
        reclaiming = background.start_blocked(store.reclaim, run_id, 1)
        session.do(
            "UPDATE celery_lease_lease SET status = 'active', suspect_at = NULL,"
            " expires_at = 1e12 WHERE run_id = %s",
            run_id,
        )
        session.commit()
        assert reclaiming.result(10) is None
        store.check(grant)
        assert live_leases(store, run_id) == 1

    def test_a_renewal_skips_a_lease_that_is_being_reclaimed_and_calls_it_unknown(
        self, store: Store, run_id: str, terms: Terms, age: Callable[..., None], session: Any
    ) -> None:
        grant = overripe(store, run_id, terms, age)
        session.lock_run(run_id)
        session.do("UPDATE celery_lease_lease SET status = 'reclaimed' WHERE run_id = %s", run_id)
        assert store.renew([grant.holder]).unknown == {grant.holder}
        session.do("UPDATE celery_lease_run SET state = 'ready' WHERE run_id = %s", run_id)
        session.commit()
        assert store.renew([grant.holder]).lost == {grant.holder: "reclaimed"}

    @both
    def test_at_once_leave_the_run_with_one_of_them(
        self,
        store: Store,
        run_id: str,
        terms: Terms,
        age: Callable[..., None],
        at_once: Collide,
    ) -> None:
        for number in range(10):
            name = f"{run_id}-{number}"
            grant = overripe(store, name, terms, age)

            def one(own: Store, who: int, name: str = name, holder: str = grant.holder) -> Any:
                return own.renew([holder]) if who else own.reclaim(name, 1)

            handed, renewal = at_once(2, one)
            kept = grant.holder in renewal.kept
            assert kept is (handed is None)
            assert live_leases(store, name) == kept


class TestReclaimAndCommit:
    @pytest.mark.parametrize("end", [complete, fail])
    def test_a_commit_that_waited_for_a_reclaim_is_refused(
        self,
        store: Store,
        run_id: str,
        terms: Terms,
        age: Callable[..., None],
        session: Any,
        background: Any,
        end: Callable[..., None],
    ) -> None:
        grant = overripe(store, run_id, terms, age)
        session.lock_run(run_id)
        committing = background.start_blocked(end, store, grant)
        session.do("UPDATE celery_lease_lease SET status = 'reclaimed' WHERE run_id = %s", run_id)
        session.do("UPDATE celery_lease_run SET state = 'ready' WHERE run_id = %s", run_id)
        session.commit()
        with pytest.raises(LeaseLost, match="reclaimed"):
            committing.result(10)
        assert row(store, run_id).state == RunState.READY
        assert row(store, run_id).outcome is None

    def test_a_reclaim_does_not_wait_for_a_commit(
        self, store: Store, run_id: str, terms: Terms, age: Callable[..., None], session: Any
    ) -> None:
        overripe(store, run_id, terms, age)
        session.begin("UPDATE celery_lease_run SET state = 'succeeded' WHERE run_id = %s", run_id)
        assert store.reclaim(run_id, 1) is None
        session.do("UPDATE celery_lease_lease SET status = 'released' WHERE run_id = %s", run_id)
        session.commit()
        assert store.reclaim(run_id, 1) is None
        assert row(store, run_id).state == RunState.SUCCEEDED

    @both
    @pytest.mark.parametrize("verb", ["complete", "hand_off", "postpone", "checkpoint", "stage"])
    def test_at_once_leave_exactly_what_one_of_them_did(
        self,
        store: Store,
        run_id: str,
        terms: Terms,
        age: Callable[..., None],
        at_once: Collide,
        verb: str,
    ) -> None:
        writes: dict[str, Callable[[Store, Grant], Any]] = {
            "complete": complete,
            "hand_off": lambda own, grant: own.hand_off(grant, "budget"),
            "postpone": lambda own, grant: own.postpone(grant, b"new", 5.0, "retry"),
            "checkpoint": lambda own, grant: own.checkpoint(grant, b"late"),
            "stage": lambda own, grant: own.save_stage(grant, "late", b"late"),
        }
        for number in range(5):
            name = f"{run_id}-{number}"
            grant = overripe(store, name, terms, age)

            def one(own: Store, who: int, name: str = name, grant: Grant = grant) -> Any:
                if who:
                    return own.reclaim(name, 1)
                try:
                    writes[verb](own, grant)
                except LeaseLost:
                    return False
                return True

            wrote, handed = at_once(2, one)
            status = lease_row(store, grant).status
            now = row(store, name)
            if verb in ("checkpoint", "stage"):
                # A checkpoint may come before the reclaim, but never after it.
                assert (status == LeaseStatus.RECLAIMED) is (handed is not None)
                written = now.checkpoint == b"late" or "late" in store.stages(name)
                assert written is wrote
            else:
                assert wrote is (handed is None)
                assert status == (LeaseStatus.RELEASED if wrote else LeaseStatus.RECLAIMED)
                assert now.recoveries == (not wrote)


class TestRenewAndCommit:
    def test_a_commit_that_waited_for_a_renewal_is_accepted(
        self, store: Store, run_id: str, terms: Terms, session: Any, background: Any
    ) -> None:
        grant = claim(store, run_id, terms)
        session.begin(
            "UPDATE celery_lease_lease SET expires_at = expires_at + 1 WHERE run_id = %s", run_id
        )
        committing = background.start_blocked(complete, store, grant)
        session.commit()
        committing.result(10)
        assert row(store, run_id).state == RunState.SUCCEEDED
        assert lease_row(store, grant).status == LeaseStatus.RELEASED

    def test_a_renewal_does_not_wait_for_a_commit_and_calls_it_unknown(
        self, store: Store, run_id: str, terms: Terms, session: Any
    ) -> None:
        grant = claim(store, run_id, terms)
        session.lock_run(run_id)
        session.do("UPDATE celery_lease_lease SET status = 'released' WHERE run_id = %s", run_id)
        assert store.renew([grant.holder]).unknown == {grant.holder}
        session.commit()
        assert store.renew([grant.holder]).released == {grant.holder}

    @both
    def test_at_once_never_bring_a_released_lease_back_to_life(
        self, store: Store, run_id: str, terms: Terms, at_once: Collide
    ) -> None:
        for number in range(10):
            grant = claim(store, f"{run_id}-{number}", terms)

            def one(own: Store, who: int, grant: Grant = grant) -> Any:
                return own.renew([grant.holder]) if who else complete(own, grant)

            at_once(2, one)
            assert lease_row(store, grant).status == LeaseStatus.RELEASED
            assert not store.renew([grant.holder]).kept


class TestAbandonAndCommit:
    @both
    @pytest.mark.parametrize("parent", ["abandon", "give_up"])
    def test_at_once_give_the_run_one_end(
        self, store: Store, run_id: str, terms: Terms, at_once: Collide, parent: str
    ) -> None:
        for number in range(5):
            grant = claim(store, f"{run_id}-{number}", terms)

            def one(own: Store, who: int, grant: Grant = grant) -> bool:
                key = (grant.run_id, grant.epoch, grant.holder)
                if who and parent == "abandon":
                    return own.abandon(*key, "child died") is not None
                if who:
                    return own.give_up(*key, b"lost", reason="lost", deliver=True, settle_in=60.0)
                try:
                    complete(own, grant)
                except LeaseLost:
                    return False
                return True

            child, took = at_once(2, one)
            assert child is not took
            status = LeaseStatus.RELEASED if child else LeaseStatus.RECLAIMED
            assert lease_row(store, grant).status == status
            assert (row(store, grant.run_id).state == RunState.SUCCEEDED) is child


class TestNobodyWaitsForABusyRow:
    def test_a_renewal_skips_a_locked_lease_and_renews_the_others(
        self, store: Store, run_id: str, terms: Terms, session: Any
    ) -> None:
        locked, free = claim(store, run_id, terms), claim(store, run_id + "-2", terms)
        session.lock_lease(run_id)
        renewal = store.renew([locked.holder, free.holder])
        assert (renewal.kept, renewal.unknown) == ({free.holder}, {locked.holder})

    def test_a_renewal_is_not_held_up_by_the_holders_own_long_transaction(
        self, store: Store, run_id: str, terms: Terms, session: Any
    ) -> None:
        grant = claim(store, run_id, terms)
        session.lock_run(run_id)
        assert store.renew([grant.holder]).kept == {grant.holder}

    @pytest.mark.parametrize("lock", ["run", "lease"])
    def test_a_reaper_passes_by(
        self,
        store: Store,
        run_id: str,
        terms: Terms,
        age: Callable[..., None],
        session: Any,
        lock: str,
    ) -> None:
        claim(store, run_id, terms)
        overripe(store, run_id + "-2", terms, age)
        age(store, 91, run_id)
        for name in (run_id, run_id + "-2") if lock == "run" else (run_id,):
            (session.lock_run if lock == "run" else session.lock_lease)(name)
        assert store.expired() == [(run_id, 1)]
        assert store.suspect(run_id, 1) is (lock == "run")
        if lock == "run":
            assert store.reclaim(run_id + "-2", 1) is None
            assert store.sweep() == 0

    def test_a_delivery_sees_what_is_there_without_waiting(
        self, store: Store, run_id: str, terms: Terms, session: Any
    ) -> None:
        claim(store, run_id, terms)
        session.lock_run(run_id)
        view = store.view(run_id)
        assert view is not None
        assert view.state is RunState.RUNNING


def test_two_heartbeats_that_renew_the_same_leases_in_opposite_orders_never_deadlock(
    store: Store, run_id: str, terms: Terms, at_once: Collide
) -> None:
    holders = [claim(store, f"{run_id}-{n}", terms).holder for n in range(200)]

    def beat(own: Store, who: int) -> int:
        mine = holders if who % 2 else holders[::-1]
        return sum(len(own.renew(mine).kept) for _ in range(20))

    kept = at_once(4, beat)
    assert sum(kept) > 0
    assert store.renew(holders).kept == set(holders)


def test_settling_and_extending_the_same_outcomes_in_opposite_orders_never_deadlock(
    store: Store, run_id: str, terms: Terms, at_once: Collide
) -> None:
    grants = [claim(store, f"{run_id}-{n}", terms) for n in range(50)]
    for grant in grants:
        complete(store, grant)
    pairs = [(grant.run_id, grant.holder) for grant in grants]

    def one(own: Store, who: int) -> None:
        for _ in range(5):
            if who % 2:
                own.extend_settling([(*pair, 60.0) for pair in pairs[::-1]])
            else:
                own.settle(pairs)

    at_once(4, one)
    assert all(row(store, run).settled_at is not None for run, _ in pairs)


@both
def test_workers_whose_clocks_are_ten_minutes_apart_behave_the_same(
    store: Store, store_url: str, run_id: str, terms: Terms
) -> None:
    """Case 46: a client's clock is compared with nothing."""
    claim(store, run_id, terms)
    program = textwrap.dedent(
        """
        import datetime, sys, time
        ahead = float(sys.argv[1])
        real_time, real_ns = time.time, time.time_ns
        time.time = lambda: real_time() + ahead
        time.time_ns = lambda: real_ns() + int(ahead * 1e9)

        from celery_lease.policy import LeasePolicy
        from celery_lease.settings import Settings
        from celery_lease.store import Grant, Store

        _, _, url, namespace, run = sys.argv
        store = Store(url, namespace=namespace)
        terms = LeasePolicy().terms(Settings.defaults())
        assert store.expired() == [], "it took a live lease for expired"
        assert not store.suspect(run, 1)
        own = store.claim(f"{run}{ahead}", 0, f"{run}{ahead}", task="a.task", terms=terms)
        assert isinstance(own, Grant)
        left = store.view(own.run_id).lease_left
        assert 85 < left <= 90, left
        assert store.renew([own.holder]).kept == {own.holder}
        assert store.due() == []
        """
    )
    for ahead in ("600", "-600"):
        done = subprocess.run(
            [sys.executable, "-c", program, ahead, store_url, store.namespace, run_id],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    assert store.expired() == []
