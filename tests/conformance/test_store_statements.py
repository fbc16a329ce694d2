"""Guards that a verb checks before, too: the statement refuses by itself.

A verb looks at the row that it has locked, so these conditions never decide in practice.
They stand because a statement must be safe in whatever verb uses it next.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest

from celery_lease.policy import Terms
from celery_lease.schema import lease, run
from celery_lease.statements import holder as holding
from celery_lease.statements import leases, runs
from celery_lease.states import LeaseStatus, RunState
from celery_lease.store import Store
from celery_lease.store.foundation import ask
from tests.runs import (
    alter,
    claim,
    complete,
    dump,
    enqueue,
    fail,
    new_holder,
    reclaim,
    row,
    suspect,
)


def hits(store: Store, statement: Any, **given: Any) -> bool:
    """Whether the statement alone changes anything of the run."""
    before = dump(store, given["run_id"])
    store.connections.run(lambda c: ask(c, statement, given))
    return dump(store, given["run_id"]) != before


class TestHandOver:
    GIVEN: ClassVar = {
        "state": RunState.READY,
        "reason": "r",
        "restart": False,
        "delay": 0.0,
        "due": True,
        "ended": False,
    }

    def test_needs_the_epoch_that_was_seen(self, store: Store, run_id: str, terms: Terms) -> None:
        claim(store, run_id, terms)
        assert not hits(store, runs.HAND_OVER, run_id=run_id, epoch=2, **self.GIVEN)
        assert hits(store, runs.HAND_OVER, run_id=run_id, epoch=1, **self.GIVEN)

    def test_needs_a_running_run(self, store: Store, run_id: str, terms: Terms) -> None:
        complete(store, claim(store, run_id, terms))
        assert not hits(store, runs.HAND_OVER, run_id=run_id, epoch=1, **self.GIVEN)


HOLDER_STATEMENTS = {
    "CHECKPOINT": holding.CHECKPOINT,
    "STAGE_DONE": holding.STAGE_DONE,
    "HAND_OFF": holding.HAND_OFF,
    "POSTPONE": holding.POSTPONE,
    "PARK": holding.PARK,
    "OUTCOME": holding.OUTCOME,
}


@pytest.mark.parametrize("wrong", ["epoch", "holder", "state"])
@pytest.mark.parametrize("name", HOLDER_STATEMENTS)
def test_what_a_holder_writes_needs_epoch_holder_and_a_running_run(
    store: Store, run_id: str, terms: Terms, name: str, wrong: str
) -> None:
    grant = claim(store, run_id, terms)
    given: dict[str, Any] = {
        "run_id": run_id,
        "epoch": 1,
        "holder": grant.holder,
        "checkpoint": b"new",
        "progress": 0.5,
        "note": "note",
        "reason": "reason",
        "delay": 5.0,
        "charged": False,
        "envelope": b"new",
        "state": RunState.SUCCEEDED,
        "outcome": b"new",
        "deliver_outcome": True,
        "dead_letter": False,
        "settle_in": 60.0,
    }
    statement = HOLDER_STATEMENTS[name]
    if wrong == "state":
        alter(store, run, run_id, state=RunState.WAITING)
        assert not hits(store, statement, **given)
        alter(store, run, run_id, state=RunState.RUNNING)
    else:
        other = {"epoch": 2, "holder": new_holder()}[wrong]
        assert not hits(store, statement, **{**given, wrong: other})
    assert hits(store, statement, **given)


class TestEndingALease:
    def test_of_a_suspect_needs_one(
        self, store: Store, run_id: str, terms: Terms, age: Callable[..., None]
    ) -> None:
        grant = claim(store, run_id, terms)
        suspect(store, grant)
        age(store, 36)
        given = {"run_id": run_id, "grace": 35.0, "reason": "expired"}
        alter(store, lease, run_id, status=LeaseStatus.ACTIVE)
        assert not hits(store, leases.RECLAIM_LEASE, epoch=1, **given)
        alter(store, lease, run_id, status=LeaseStatus.SUSPECT)
        assert not hits(store, leases.RECLAIM_LEASE, epoch=2, **given)
        assert hits(store, leases.RECLAIM_LEASE, epoch=1, **given)

    @pytest.mark.parametrize("wrong", ["run_id", "epoch", "holder"])
    def test_of_a_dead_child_needs_run_epoch_and_holder(
        self, store: Store, run_id: str, terms: Terms, wrong: str
    ) -> None:
        grant = claim(store, run_id, terms)
        key = {"run_id": run_id, "epoch": 1, "holder": grant.holder, "reason": "died"}
        claim(store, run_id + "-2", terms)
        other = {"run_id": run_id + "-2", "epoch": 2, "holder": new_holder()}
        before = dump(store, run_id)
        given = {**key, wrong: other[wrong]}
        store.connections.run(lambda c: ask(c, leases.ABANDON_LEASE, given))
        assert dump(store, run_id) == before
        assert hits(store, leases.ABANDON_LEASE, **key)

    def test_leaves_the_history_of_earlier_leases_as_it_is(
        self, store: Store, run_id: str, terms: Terms
    ) -> None:
        reclaim(store, claim(store, run_id, terms))
        claim(store, run_id, terms, expected=1)
        store.revoke(run_id)
        statuses = [one["status"] for one in store.leases(run_id)]
        assert statuses == [LeaseStatus.RECLAIMED, LeaseStatus.REVOKED]


class TestAnOutcome:
    def test_of_a_finished_run_is_not_revoked(
        self, store: Store, run_id: str, terms: Terms
    ) -> None:
        complete(store, claim(store, run_id, terms))
        assert not hits(store, runs.REVOKE, run_id=run_id, reason="r")

    def test_is_replayed_of_a_finished_run_only(
        self, store: Store, run_id: str, terms: Terms
    ) -> None:
        claim(store, run_id, terms)
        alter(store, run, run_id, settle_by=0.0)
        assert store.replay(run_id, new_holder(), terms) is None

    def test_is_replayed_until_it_is_settled(self, store: Store, run_id: str, terms: Terms) -> None:
        complete(store, claim(store, run_id, terms))
        alter(store, run, run_id, settle_by=0.0, settled_at=1.0)
        assert store.replay(run_id, new_holder(), terms) is None

    def test_is_kept_back_while_the_run_is_running_by_nobody(
        self, store: Store, run_id: str, terms: Terms
    ) -> None:
        grant = claim(store, run_id, terms)
        before = dump(store, run_id)
        store.extend_settling([(run_id, grant.holder, 60.0)])
        assert dump(store, run_id) == before

    def test_is_kept_back_no_more_once_it_is_settled(
        self, store: Store, run_id: str, terms: Terms
    ) -> None:
        grant = claim(store, run_id, terms)
        complete(store, grant)
        store.settle([(run_id, grant.holder)])
        before = dump(store, run_id)
        store.extend_settling([(run_id, grant.holder, 60.0)])
        assert dump(store, run_id) == before

    def test_is_undeliverable_only_if_it_is_one_and_unsettled(
        self, store: Store, run_id: str, terms: Terms
    ) -> None:
        grant = claim(store, run_id, terms)
        assert not hits(store, runs.UNDELIVERABLE, run_id=run_id)
        complete(store, grant)
        store.settle([(run_id, grant.holder)])
        assert not hits(store, runs.UNDELIVERABLE, run_id=run_id)

    def test_is_emptied_only_once_it_is_settled(
        self, store: Store, run_id: str, terms: Terms
    ) -> None:
        fail(store, claim(store, run_id, terms))
        assert not hits(store, runs.EMPTY_RUN, run_id=run_id)


class TestATrigger:
    def test_without_an_envelope_is_not_reserved(
        self, store: Store, run_id: str, terms: Terms
    ) -> None:
        store.enqueue(run_id, task="a.task", terms=terms, envelope=None)
        assert store.reserve(run_id, 0) is None


class TestAnExpiry:
    def test_happens_once(
        self, store: Store, run_id: str, terms: Terms, age: Callable[..., None]
    ) -> None:
        enqueue(store, run_id, terms, expires_in=50.0)
        age(store, 51)
        assert store.expire(run_id)
        assert not store.expire(run_id)
        assert row(store, run_id).reason == "expired"


@pytest.mark.parametrize("left", ["envelope", "outcome"])
def test_a_tombstone_that_holds_anything_yet_is_not_forgotten(
    store: Store, run_id: str, terms: Terms, age: Callable[..., None], left: str
) -> None:
    complete(store, claim(store, run_id, terms), deliver=False)
    alter(store, run, run_id, **{"outcome" if left == "envelope" else "envelope": None})
    age(store, 100)
    store.prune(50.0, tombstone_age=50.0, most=0)
    assert store.view(run_id) is not None


class TestATombstone:
    def test_is_forgotten_only_once_it_is_empty(
        self, store: Store, run_id: str, terms: Terms, age: Callable[..., None]
    ) -> None:
        for number in range(3):
            complete(store, claim(store, f"{run_id}-{number}", terms), deliver=False)
        age(store, 100)
        store.prune(50.0, tombstone_age=50.0, most=1)
        left = [number for number in range(3) if store.view(f"{run_id}-{number}")]
        assert len(left) == 2
        assert all(store.leases(f"{run_id}-{number}") for number in left)

    def test_keeps_a_lease_that_has_not_ended(
        self, store: Store, run_id: str, terms: Terms, age: Callable[..., None]
    ) -> None:
        complete(store, claim(store, run_id, terms), deliver=False)
        alter(store, lease, run_id, status=LeaseStatus.ACTIVE)
        age(store, 100)
        store.prune(50.0, tombstone_age=1000.0)
        assert len(store.leases(run_id)) == 1
