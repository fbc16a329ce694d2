"""Revoke, resume, fence-all, prune and the listings: the store from outside any worker."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from celery_lease.errors import IllegalTransition, LeaseLost, RunNotFound
from celery_lease.policy import Terms
from celery_lease.states import LeaseStatus, RunState
from celery_lease.store import Refusal, Store
from tests.runs import (
    claim,
    complete,
    dump,
    enqueue,
    fail,
    lease_row,
    live_leases,
    new_holder,
    reclaim,
    row,
    trace,
)

DAY = 86400.0


class TestRevoking:
    def test_a_ready_run_means_that_it_never_starts(
        self, store: Store, run_id: str, terms: Terms
    ) -> None:
        enqueue(store, run_id, terms)
        assert store.revoke(run_id, "not wanted")
        answer = store.claim(run_id, 0, new_holder(), task="a.task", terms=terms)
        assert isinstance(answer, Refusal)
        assert row(store, run_id).reason == "not wanted"
        assert trace(store, run_id)[-1] == ("revoked", "not wanted")

    def test_a_running_run_ends_its_lease_with_it(
        self, store: Store, run_id: str, terms: Terms
    ) -> None:
        grant = claim(store, run_id, terms)
        assert store.revoke(run_id)
        assert lease_row(store, grant).status == LeaseStatus.REVOKED
        assert live_leases(store, run_id) == 0
        with pytest.raises(LeaseLost) as lost:
            complete(store, grant)
        assert lost.value.reason == "revoked"

    def test_makes_the_outcome_due_at_once(self, store: Store, run_id: str, terms: Terms) -> None:
        claim(store, run_id, terms)
        store.revoke(run_id)
        assert store.due() == [(run_id, 1)]
        replay = store.replay(run_id, new_holder(), terms)
        assert replay is not None
        assert replay.state is RunState.REVOKED

    @pytest.mark.parametrize("end", [complete, fail])
    def test_a_finished_run_does_nothing(
        self, store: Store, run_id: str, terms: Terms, end: Callable[..., None]
    ) -> None:
        end(store, claim(store, run_id, terms))
        before = dump(store, run_id)
        assert not store.revoke(run_id)
        assert dump(store, run_id) == before

    def test_an_unknown_id_leaves_a_row_that_the_late_message_finds(
        self, store: Store, run_id: str, terms: Terms
    ) -> None:
        assert store.revoke(run_id)
        now = row(store, run_id)
        assert (now.state, now.epoch, now.envelope) == (RunState.REVOKED, 0, None)
        assert store.due() == []  # nothing to send; the message itself replays it
        assert isinstance(store.claim(run_id, 0, new_holder(), task="a.task", terms=terms), Refusal)
        replay = store.replay(run_id, new_holder(), terms)
        assert replay is not None
        assert replay.state is RunState.REVOKED

    def test_in_the_name_of_a_holder_ends_that_holders_run_only(
        self, store: Store, run_id: str, terms: Terms
    ) -> None:
        grant = claim(store, run_id, terms)
        before = dump(store, run_id)
        assert not store.revoke(run_id, holder=new_holder())
        assert not store.revoke(run_id + "-unknown", holder=grant.holder)
        assert dump(store, run_id) == before
        assert store.revoke(run_id, holder=grant.holder)


class TestResuming:
    @pytest.mark.parametrize("how", ["parked", "failed", "revoked"])
    def test_makes_the_run_ready_under_a_new_epoch(
        self, store: Store, run_id: str, terms: Terms, how: str
    ) -> None:
        grant = claim(store, run_id, terms)
        store.checkpoint(grant, b"half")
        {
            "parked": lambda: store.park(grant, "why"),
            "failed": lambda: fail(store, grant),
            "revoked": lambda: store.revoke(run_id),
        }[how]()
        assert store.resume(run_id, "try again") == 2
        now = row(store, run_id)
        assert (now.state, now.epoch, now.attempt) == (RunState.READY, 2, 0)
        assert (now.outcome, now.finished_at, now.settle_by, now.settled_at) == (None,) * 4
        assert store.due() == [(run_id, 2)]
        again = claim(store, run_id, terms, expected=2)
        assert (again.epoch, again.checkpoint) == (3, b"half")

    def test_makes_a_late_trigger_of_the_old_epoch_stale(
        self, store: Store, run_id: str, terms: Terms
    ) -> None:
        store.park(claim(store, run_id, terms), "why")
        store.resume(run_id)
        answer = store.claim(run_id, 1, new_holder(), task="a.task", terms=terms)
        assert isinstance(answer, Refusal)

    def test_refuses_the_holder_of_before_for_ever(
        self, store: Store, run_id: str, terms: Terms
    ) -> None:
        grant = claim(store, run_id, terms)
        fail(store, grant)
        store.resume(run_id)
        with pytest.raises(LeaseLost):
            complete(store, grant)
        with pytest.raises(LeaseLost):
            fail(store, grant)

    def test_an_unknown_run_is_an_error(self, store: Store, run_id: str) -> None:
        with pytest.raises(RunNotFound, match=run_id):
            store.resume(run_id)

    def test_a_run_in_another_state_names_that_state(
        self, store: Store, run_id: str, terms: Terms
    ) -> None:
        complete(store, claim(store, run_id, terms))
        with pytest.raises(IllegalTransition, match="succeeded"):
            store.resume(run_id)

    def test_a_run_without_envelope_says_so(self, store: Store, run_id: str) -> None:
        store.revoke(run_id)
        with pytest.raises(IllegalTransition, match="envelope"):
            store.resume(run_id)


class TestFencingAll:
    def test_raises_every_epoch_and_ends_every_lease(
        self, store: Store, run_id: str, terms: Terms
    ) -> None:
        running = claim(store, run_id + "-running", terms)
        enqueue(store, run_id + "-ready", terms)
        complete(store, claim(store, run_id + "-done", terms))
        store.park(claim(store, run_id + "-parked", terms), "why")
        assert store.fence_all(raise_by=10) == 4
        states = {
            one: row(store, f"{run_id}-{one}") for one in ("running", "ready", "done", "parked")
        }
        assert {name: one.epoch for name, one in states.items()} == {
            "running": 11,
            "ready": 10,
            "done": 11,
            "parked": 11,
        }
        assert states["running"].state == RunState.READY
        assert states["done"].state == RunState.SUCCEEDED
        assert states["parked"].state == RunState.PARKED
        assert lease_row(store, running).status == LeaseStatus.RECLAIMED
        assert {found for found, _ in store.due()} == {run_id + "-running", run_id + "-ready"}

    def test_keeps_the_time_of_a_run_that_is_not_due(
        self, store: Store, run_id: str, terms: Terms, age: Callable[..., None]
    ) -> None:
        enqueue(store, run_id, terms, delay=50.0)
        store.fence_all()
        assert store.due() == []
        age(store, 51)
        assert store.due() == [(run_id, 1)]

    def test_makes_a_grant_given_out_before_worthless(
        self, store: Store, run_id: str, terms: Terms
    ) -> None:
        grant = claim(store, run_id, terms)
        store.fence_all()
        assert store.renew([grant.holder]).lost == {grant.holder: "reclaimed"}
        again = claim(store, run_id, terms, expected=2)
        assert again.epoch == 3


class TestPruning:
    def settled(self, store: Store, run_id: str, terms: Terms) -> None:
        grant = claim(store, run_id, terms)
        store.checkpoint(grant, b"half")
        store.save_stage(grant, "load", b"rows")
        complete(store, grant, deliver=False)

    def test_leaves_a_tombstone_that_a_late_message_cannot_run_again(
        self, store: Store, run_id: str, terms: Terms, age: Callable[..., None]
    ) -> None:
        self.settled(store, run_id, terms)
        age(store, 8 * DAY)
        assert store.prune(7 * DAY, tombstone_age=400 * DAY) == 1
        now = row(store, run_id)
        assert (now.state, now.epoch) == (RunState.SUCCEEDED, 1)
        assert (now.checkpoint, now.envelope, now.outcome) == (None, None, None)
        assert store.leases(run_id) == store.saved_stages(run_id) == store.events(run_id) == []
        for expected in (0, 1):
            answer = store.claim(run_id, expected, new_holder(), task="a.task", terms=terms)
            assert isinstance(answer, Refusal)
        view = store.view(run_id)
        assert view is not None
        assert view.settled

    def test_empties_a_run_once(
        self, store: Store, run_id: str, terms: Terms, age: Callable[..., None]
    ) -> None:
        self.settled(store, run_id, terms)
        age(store, 8 * DAY)
        store.prune(7 * DAY, tombstone_age=400 * DAY)
        assert store.prune(7 * DAY, tombstone_age=400 * DAY) == 0

    def test_forgets_a_tombstone_at_last(
        self, store: Store, run_id: str, terms: Terms, age: Callable[..., None]
    ) -> None:
        self.settled(store, run_id, terms)
        age(store, 401 * DAY)
        store.prune(7 * DAY, tombstone_age=400 * DAY)
        assert store.view(run_id) is None
        assert dump(store, run_id) == {
            f"celery_lease_{table}": [] for table in ("run", "lease", "stage")
        }

    def test_leaves_young_unsettled_parked_and_running_runs_alone(
        self, store: Store, run_id: str, terms: Terms, age: Callable[..., None]
    ) -> None:
        complete(store, claim(store, run_id + "-unsettled", terms))
        store.park(claim(store, run_id + "-parked", terms), "why")
        claim(store, run_id + "-running", terms)
        age(store, 1000 * DAY)
        self.settled(store, run_id + "-young", terms)
        before = {
            name: dump(store, f"{run_id}-{name}")
            for name in ("unsettled", "parked", "running", "young")
        }
        assert store.prune(7 * DAY, tombstone_age=400 * DAY) == 0
        for name, rows in before.items():
            assert dump(store, f"{run_id}-{name}") == rows

    def test_goes_in_portions_oldest_first(
        self, store: Store, run_id: str, terms: Terms, age: Callable[..., None]
    ) -> None:
        for number in range(3):
            self.settled(store, f"{run_id}-{number}", terms)
            age(store, 8 * DAY)
        assert store.prune(7 * DAY, tombstone_age=400 * DAY, most=2) == 2
        assert row(store, run_id + "-2").envelope is not None

    def test_forgets_old_events_of_messages_whose_run_was_never_known(
        self, store: Store, run_id: str, terms: Terms
    ) -> None:
        store.record(run_id, "dropped", "unknown_run", epoch=3)
        store.prune(7 * DAY, tombstone_age=400 * DAY)
        assert len(store.events(run_id)) == 1
        store.prune(-1.0, tombstone_age=400 * DAY)
        assert store.events(run_id) == []


class TestTheListings:
    def test_show_a_run_with_its_newest_lease(
        self, store: Store, run_id: str, terms: Terms
    ) -> None:
        grant = claim(store, run_id, terms)
        store.checkpoint(grant, b"secret", progress=0.5, note="half")
        shown = store.run(run_id)
        assert shown is not None
        assert (shown["state"], shown["epoch"], shown["holder"]) == ("running", 1, grant.holder)
        assert (shown["progress"], shown["note"], shown["node"]) == (0.5, "half", "node")
        assert shown["lease_status"] == "active"
        assert 85 < shown["lease_left"] <= 90
        assert "secret" not in repr(shown)

    def test_show_nothing_of_an_unknown_run(self, store: Store, run_id: str) -> None:
        assert store.run(run_id) is None
        assert store.leases(run_id) == store.events(run_id) == store.saved_stages(run_id) == []

    def test_list_the_newest_runs_first_by_state_and_task(
        self, store: Store, run_id: str, terms: Terms, age: Callable[..., None]
    ) -> None:
        for number in range(3):
            enqueue(store, f"{run_id}-{number}", terms)
            age(store, 1)
        claim(store, run_id + "-1", terms)
        store.enqueue(run_id + "-other", task="b.task", terms=terms, envelope=b"e")

        def listed(**filters: object) -> list[str]:
            runs = store.list_runs(**filters)  # type: ignore[arg-type]
            return [one["run_id"].removeprefix(run_id) for one in runs]

        assert listed() == ["-other", "-2", "-1", "-0"]
        assert listed(most=2) == ["-other", "-2"]
        assert listed(state="running") == ["-1"]
        assert listed(task="a.task") == ["-2", "-1", "-0"]
        assert listed(task="a.task", state="ready") == ["-2", "-0"]

    def test_list_what_is_still_to_come(self, store: Store, run_id: str, terms: Terms) -> None:
        enqueue(store, f"{run_id}-ready", terms)
        claim(store, f"{run_id}-running", terms)
        told = claim(store, f"{run_id}-told", terms)
        complete(store, told)
        store.settle([(told.run_id, told.holder)])
        complete(store, claim(store, f"{run_id}-untold", terms))
        store.revoke(f"{run_id}-ready-and-revoked")
        runs = store.list_runs(unsettled=True)
        listed = {one["run_id"].removeprefix(run_id) for one in runs}
        assert listed == {"-ready", "-running", "-untold"}

    def test_tell_the_history_of_ownership(self, store: Store, run_id: str, terms: Terms) -> None:
        first = claim(store, run_id, terms)
        reclaim(store, first)
        second = claim(store, run_id, terms, expected=1)
        history = [(one["epoch"], one["holder"], one["status"]) for one in store.leases(run_id)]
        assert history == [(1, first.holder, "reclaimed"), (2, second.holder, "active")]

    def test_show_the_workers_and_how_long_they_are_silent(
        self, store: Store, namespace: str, age: Callable[..., None]
    ) -> None:
        worker = {
            "node": f"w1@{namespace}",
            "host": "host",
            "pid": 1,
            "pool": "prefork",
            "queues": "a,b",
            "versions": "5.7",
        }
        store.worker_seen(**worker)
        age(store, 50)
        (seen,) = store.workers()
        assert seen["silent_for"] == pytest.approx(50, abs=2)
        store.worker_seen(**{**worker, "pid": 2})
        (seen,) = store.workers()
        assert (seen["pid"], seen["queues"]) == (2, "a,b")
        assert seen["silent_for"] < 2
        assert seen["heartbeat_at"] - seen["started_at"] == pytest.approx(50, abs=2)
