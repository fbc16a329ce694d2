"""What a holder may do, and what nobody else may do in its name."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import Connection, create_engine
from sqlalchemy.exc import InvalidRequestError

from celery_lease.errors import IllegalTransition, LeaseLost
from celery_lease.policy import Terms
from celery_lease.schema import lease
from celery_lease.states import LeaseStatus, RunState
from celery_lease.store import Grant, Store
from tests.runs import (
    alter,
    claim,
    complete,
    dump,
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

VERBS: dict[str, Callable[[Store, Grant], Any]] = {
    "check": lambda store, grant: store.check(grant),
    "checkpoint": lambda store, grant: store.checkpoint(grant, b"new"),
    "save_stage": lambda store, grant: store.save_stage(grant, "new", b"result"),
    "hand_off": lambda store, grant: store.hand_off(grant, "budget"),
    "postpone": lambda store, grant: store.postpone(grant, b"new", 5.0, "retry"),
    "park": lambda store, grant: store.park(grant, "why"),
    "complete": lambda store, grant: complete(store, grant, b"new"),
    "fail": lambda store, grant: fail(store, grant, b"new"),
}
WRITES = {name: verb for name, verb in VERBS.items() if name != "check"}
WITHIN: dict[str, Callable[[Store, Connection, Grant], Any]] = {
    "fence": lambda store, session, grant: store.fence(session, grant),
    "checkpoint": lambda store, session, grant: store.checkpoint_within(session, grant, b"1"),
}
ENDINGS = {name: verb for name, verb in WRITES.items() if name not in ("checkpoint", "save_stage")}


def lost(store: Store, grant: Grant, verb: Callable[[Store, Grant], Any]) -> str:
    with pytest.raises(LeaseLost) as error:
        verb(store, grant)
    assert (error.value.run_id, error.value.epoch) == (grant.run_id, grant.epoch)
    return error.value.reason


@pytest.mark.parametrize("verb", VERBS.values(), ids=VERBS)
class TestAHolderVerbIsRefused:
    def test_under_an_older_epoch(
        self, store: Store, run_id: str, terms: Terms, verb: Callable[[Store, Grant], Any]
    ) -> None:
        old = claim(store, run_id, terms)
        reclaim(store, old)
        new = claim(store, run_id, terms, expected=1)
        before = dump(store, run_id)
        assert lost(store, old, verb) == "reclaimed"
        assert lost(store, replace(old, holder=new.holder), verb) == "reclaimed"
        assert dump(store, run_id) == before

    def test_under_the_right_epoch_by_another_holder(
        self, store: Store, run_id: str, terms: Terms, verb: Callable[[Store, Grant], Any]
    ) -> None:
        grant = claim(store, run_id, terms)
        before = dump(store, run_id)
        assert lost(store, replace(grant, holder=new_holder()), verb) == "reclaimed"
        assert dump(store, run_id) == before

    def test_after_it_was_reclaimed_though_nobody_has_claimed_since(
        self, store: Store, run_id: str, terms: Terms, verb: Callable[[Store, Grant], Any]
    ) -> None:
        grant = claim(store, run_id, terms)
        reclaim(store, grant)
        before = dump(store, run_id)
        assert lost(store, grant, verb) == "reclaimed"
        assert dump(store, run_id) == before

    def test_after_the_run_was_revoked_with_that_reason(
        self, store: Store, run_id: str, terms: Terms, verb: Callable[[Store, Grant], Any]
    ) -> None:
        grant = claim(store, run_id, terms)
        store.revoke(run_id)
        before = dump(store, run_id)
        assert lost(store, grant, verb) == "revoked"
        assert dump(store, run_id) == before

    def test_after_its_parent_ended_it_as_stalled_with_that_reason(
        self, store: Store, run_id: str, terms: Terms, verb: Callable[[Store, Grant], Any]
    ) -> None:
        grant = claim(store, run_id, terms)
        store.abandon(run_id, grant.epoch, grant.holder, "stalled")
        assert lost(store, grant, verb) == "stalled"

    def test_after_every_epoch_was_raised(
        self, store: Store, run_id: str, terms: Terms, verb: Callable[[Store, Grant], Any]
    ) -> None:
        grant = claim(store, run_id, terms)
        store.fence_all()
        assert lost(store, grant, verb) == "reclaimed"

    def test_for_a_run_that_does_not_exist(
        self, store: Store, run_id: str, verb: Callable[[Store, Grant], Any]
    ) -> None:
        assert lost(store, Grant(run_id, 1, "h", 1, 0, None, None), verb) == "reclaimed"

    def test_with_an_event_that_names_the_epoch_and_the_holder(
        self, store: Store, run_id: str, terms: Terms, verb: Callable[[Store, Grant], Any]
    ) -> None:
        grant = claim(store, run_id, terms)
        reclaim(store, grant)
        lost(store, grant, verb)
        event = store.events(run_id)[-1]
        assert (event["kind"], event["reason"]) == ("write_refused", "reclaimed")
        assert (event["epoch"], event["holder"]) == (grant.epoch, grant.holder)


@pytest.mark.parametrize("verb", WRITES.values(), ids=WRITES)
def test_a_write_of_a_suspect_holder_is_accepted_and_recorded_as_recovered(
    store: Store, run_id: str, terms: Terms, verb: Callable[[Store, Grant], Any]
) -> None:
    grant = claim(store, run_id, terms)
    suspect(store, grant)
    verb(store, grant)
    assert kinds(store, run_id).count("recovered") == 1


@pytest.mark.parametrize("verb", WRITES.values(), ids=WRITES)
def test_a_write_without_a_live_lease_is_refused_and_changes_nothing(
    store: Store, run_id: str, terms: Terms, verb: Callable[[Store, Grant], Any]
) -> None:
    grant = claim(store, run_id, terms)
    alter(store, lease, run_id, status=LeaseStatus.RECLAIMED)
    before = dump(store, run_id)
    assert lost(store, grant, verb) == "reclaimed"
    assert dump(store, run_id) == before


@pytest.mark.parametrize("verb", ENDINGS.values(), ids=ENDINGS)
class TestAVerbThatEndsTheLease:
    def test_leaves_it_released(
        self, store: Store, run_id: str, terms: Terms, verb: Callable[[Store, Grant], Any]
    ) -> None:
        grant = claim(store, run_id, terms)
        verb(store, grant)
        granted = lease_row(store, grant)
        assert granted.status == LeaseStatus.RELEASED
        assert granted.ended_at is not None
        assert live_leases(store, run_id) == 0

    def test_is_accepted_again_after_a_lost_answer(
        self, store: Store, run_id: str, terms: Terms, verb: Callable[[Store, Grant], Any]
    ) -> None:
        grant = claim(store, run_id, terms)
        answer = verb(store, grant)
        before, events = dump(store, run_id), kinds(store, run_id)
        assert verb(store, grant) == answer
        assert dump(store, run_id) == before
        assert kinds(store, run_id) == events

    def test_of_the_parent_is_no_repeat_of_the_childs(
        self, store: Store, run_id: str, terms: Terms, verb: Callable[[Store, Grant], Any]
    ) -> None:
        grant = claim(store, run_id, terms)
        store.abandon(run_id, grant.epoch, grant.holder, "child died")
        lost(store, grant, verb)


@pytest.mark.parametrize(("first", "second"), list(itertools.permutations(ENDINGS, 2)))
def test_a_verb_that_ends_the_lease_admits_no_other_ending_after_it(
    store: Store, run_id: str, terms: Terms, first: str, second: str
) -> None:
    grant = claim(store, run_id, terms)
    ENDINGS[first](store, grant)
    before = dump(store, run_id)
    lost(store, grant, ENDINGS[second])
    assert dump(store, run_id) == before


class TestACheckpoint:
    def test_saves_the_value_with_progress_and_note(
        self, store: Store, run_id: str, terms: Terms
    ) -> None:
        grant = claim(store, run_id, terms)
        assert store.checkpoint(grant, b"line 7", progress=0.7, note="seven") is False
        now = row(store, run_id)
        assert (now.checkpoint, now.progress, now.note) == (b"line 7", 0.7, "seven")

    def test_of_a_new_value_is_progress_and_clears_the_attempts(
        self, store: Store, run_id: str, terms: Terms
    ) -> None:
        grant = claim(store, run_id, terms)
        store.checkpoint(grant, b"1")
        assert row(store, run_id).attempt == 0

    def test_of_the_same_value_is_none(self, store: Store, run_id: str, terms: Terms) -> None:
        first = claim(store, run_id, terms)
        store.checkpoint(first, b"1")
        reclaim(store, first)
        second = claim(store, run_id, terms, expected=1)
        store.checkpoint(second, b"1", progress=0.9)
        assert row(store, run_id).attempt == 1
        store.checkpoint(second, b"2")
        assert row(store, run_id).attempt == 0

    def test_asks_a_holder_of_a_stopping_worker_to_hand_off(
        self, store: Store, run_id: str, terms: Terms
    ) -> None:
        grant = claim(store, run_id, terms)
        store.renew([grant.holder], yielding=True)
        store.renew([grant.holder])
        assert store.checkpoint(grant, b"1") is True
        assert store.save_stage(grant, "a", b"1") is True

    def test_does_not_extend_the_lease(
        self, store: Store, run_id: str, terms: Terms, age: Callable[..., None]
    ) -> None:
        grant = claim(store, run_id, terms)
        age(store, 60)
        store.checkpoint(grant, b"1")
        view = store.view(run_id)
        assert view is not None
        assert view.lease_left < 31


class TestAStage:
    def test_is_saved_with_its_result_and_time(
        self, store: Store, run_id: str, terms: Terms
    ) -> None:
        grant = claim(store, run_id, terms)
        store.save_stage(grant, "load", b"rows", seconds=1.5)
        assert store.stages(run_id) == {"load": b"rows"}
        (saved,) = store.saved_stages(run_id)
        assert (saved["name"], saved["epoch"], saved["seconds"]) == ("load", 1, 1.5)

    def test_is_progress(self, store: Store, run_id: str, terms: Terms) -> None:
        store.save_stage(claim(store, run_id, terms), "load", b"rows")
        assert row(store, run_id).attempt == 0

    def test_that_is_saved_keeps_its_first_result(
        self, store: Store, run_id: str, terms: Terms
    ) -> None:
        grant = claim(store, run_id, terms)
        store.save_stage(grant, "load", b"first")
        store.save_stage(grant, "load", b"second")
        assert store.stages(run_id) == {"load": b"first"}

    def test_outlives_its_holder(self, store: Store, run_id: str, terms: Terms) -> None:
        grant = claim(store, run_id, terms)
        store.save_stage(grant, "load", b"rows")
        reclaim(store, grant)
        second = claim(store, run_id, terms, expected=1)
        store.save_stage(second, "send", b"sent")
        assert store.stages(run_id) == {"load": b"rows", "send": b"sent"}


class TestAHandOff:
    def test_leaves_the_run_ready_and_due_at_the_next_epoch(
        self, store: Store, run_id: str, terms: Terms
    ) -> None:
        grant = claim(store, run_id, terms)
        assert store.hand_off(grant, "budget") == 1
        view = store.view(run_id)
        assert view is not None
        assert (view.state, view.epoch, view.attempt) == (RunState.READY, 1, 0)
        assert view.untriggered
        assert store.due() == [(run_id, 1)]
        assert claim(store, run_id, terms, expected=1).epoch == 2

    def test_is_accepted_again_though_the_next_holder_runs_already(
        self, store: Store, run_id: str, terms: Terms
    ) -> None:
        grant = claim(store, run_id, terms)
        store.hand_off(grant, "budget")
        claim(store, run_id, terms, expected=1)
        before = dump(store, run_id)
        assert store.hand_off(grant, "budget") == 1
        assert dump(store, run_id) == before


class TestAPostponement:
    def test_leaves_the_run_ready_at_its_time_with_the_new_envelope(
        self, store: Store, run_id: str, terms: Terms, age: Callable[..., None]
    ) -> None:
        grant = claim(store, run_id, terms)
        store.postpone(grant, b"retry 1", 50.0, "retry")
        view = store.view(run_id)
        assert view is not None
        assert 45 < view.due_in <= 50
        assert store.due() == []
        age(store, 51)
        assert store.due() == [(run_id, 1)]
        assert row(store, run_id).envelope == b"retry 1"

    def test_into_the_past_is_due_now(self, store: Store, run_id: str, terms: Terms) -> None:
        store.postpone(claim(store, run_id, terms), b"e", -5.0, "retry")
        assert store.due() == [(run_id, 1)]


class TestAParkedRun:
    def test_waits_for_a_person_and_for_nobody_else(
        self, store: Store, run_id: str, terms: Terms, age: Callable[..., None]
    ) -> None:
        store.park(claim(store, run_id, terms), "effect in doubt")
        age(store, 1_000_000)
        assert (store.due(), store.expired(), store.sweep()) == ([], [], 0)
        run = store.run(run_id)
        assert run is not None
        assert (run["state"], run["reason"]) == ("parked", "effect in doubt")


class TestAnOutcome:
    @pytest.mark.parametrize(
        ("end", "state"), [(complete, RunState.SUCCEEDED), (fail, RunState.FAILED)]
    )
    def test_that_is_to_be_delivered_waits_to_be_settled(
        self, store: Store, run_id: str, terms: Terms, end: Any, state: RunState
    ) -> None:
        end(store, claim(store, run_id, terms), b"outcome")
        now = row(store, run_id)
        assert (now.state, now.outcome) == (state, b"outcome")
        assert now.settled_at is None
        assert now.settle_by == pytest.approx(now.trigger_due, abs=1)
        assert now.settle_by - now.finished_at == pytest.approx(60, abs=1)

    @pytest.mark.parametrize("end", [complete, fail])
    def test_with_nothing_to_deliver_is_settled_by_its_commit(
        self, store: Store, run_id: str, terms: Terms, end: Any
    ) -> None:
        end(store, claim(store, run_id, terms), deliver=False)
        now = row(store, run_id)
        assert now.settled_at is not None
        assert (now.settle_by, now.trigger_due) == (None, None)

    @pytest.mark.parametrize("end", [complete, fail])
    def test_that_differs_is_no_repeat(
        self, store: Store, run_id: str, terms: Terms, end: Any
    ) -> None:
        grant = claim(store, run_id, terms)
        end(store, grant, b"first")
        before = dump(store, run_id)
        with pytest.raises(LeaseLost):
            end(store, grant, b"second")
        assert dump(store, run_id) == before

    @pytest.mark.parametrize("end", [complete, fail])
    def test_is_repeated_although_it_was_settled_meanwhile(
        self, store: Store, run_id: str, terms: Terms, end: Any
    ) -> None:
        grant = claim(store, run_id, terms)
        end(store, grant)
        store.settle([(run_id, grant.holder)])
        end(store, grant)

    def test_may_be_nothing_at_all(self, store: Store, run_id: str, terms: Terms) -> None:
        grant = claim(store, run_id, terms)
        for _ in range(2):
            store.complete(grant, None, deliver=False, settle_in=60.0)

    def test_keeps_its_reason(self, store: Store, run_id: str, terms: Terms) -> None:
        fail(store, claim(store, run_id, terms), reason="ValueError: no")
        run = store.run(run_id)
        assert run is not None
        assert run["reason"] == "ValueError: no"


class TestWithinTheCallersTransaction:
    @pytest.fixture
    def session(self, store: Store) -> Iterator[Connection]:
        """A connection of the user's own to the same database."""
        engine = create_engine(store.connections.url)
        with engine.connect() as connection:
            yield connection
        engine.dispose()

    def test_a_checkpoint_counts_only_if_that_commits(
        self, store: Store, session: Connection, run_id: str, terms: Terms
    ) -> None:
        grant = claim(store, run_id, terms)
        transaction = session.begin()
        asked, over = store.checkpoint_within(session, grant, b"1", progress=0.1)
        assert asked is False
        assert not over()
        transaction.rollback()
        assert over()
        assert row(store, run_id).checkpoint is None
        with session.begin():
            store.checkpoint_within(session, grant, b"2", progress=0.1)
        assert row(store, run_id).checkpoint == b"2"

    @pytest.mark.parametrize("verb", WITHIN)
    def test_a_stale_holder_can_commit_nothing_even_if_its_error_is_swallowed(
        self, store: Store, session: Connection, run_id: str, terms: Terms, verb: str
    ) -> None:
        grant = claim(store, run_id, terms)
        reclaim(store, grant)
        transaction = session.begin()
        with pytest.raises(LeaseLost):
            WITHIN[verb](store, session, grant)
        with pytest.raises(InvalidRequestError):
            transaction.commit()
        assert row(store, run_id).checkpoint is None

    def test_a_fence_accepts_the_holder(
        self, store: Store, session: Connection, run_id: str, terms: Terms
    ) -> None:
        grant = claim(store, run_id, terms)
        with session.begin():
            store.fence(session, grant)

    def test_on_another_kind_of_database_it_is_refused_by_name(
        self, pg_store: Store, open_store: Callable[..., Store], sqlite_url: str, terms: Terms
    ) -> None:
        other = open_store(sqlite_url)
        grant = claim(pg_store, pg_store.namespace, terms)
        with (
            other.connections.engine.connect() as connection,
            pytest.raises(IllegalTransition, match=r"sqlite.*postgresql"),
        ):
            pg_store.fence(connection, grant)


def test_events_tell_the_story_without_payloads(store: Store, run_id: str, terms: Terms) -> None:
    grant = claim(store, run_id, terms)
    store.checkpoint(grant, b"secret checkpoint")
    store.hand_off(grant, "budget")
    grant = claim(store, run_id, terms, expected=1)
    reclaim(store, grant)
    complete(store, claim(store, run_id, terms, expected=2), b"secret result")
    assert trace(store, run_id) == [
        ("handed_off", "budget"),
        ("suspect", None),
        ("reclaimed", "expired"),
    ]
    assert "secret" not in repr(store.events(run_id))
