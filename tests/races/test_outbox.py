"""Triggers and outcomes wanted by several at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from celery_lease.policy import Terms
from celery_lease.store import Store
from tests.runs import claim, complete, enqueue, kinds, row

both = pytest.mark.parametrize("database", ["sqlite", "postgresql"], indirect=True)

Collide = Callable[[int, Callable[[Store, int], Any]], list[Any]]


@both
def test_a_due_trigger_has_one_sender(
    store: Store, run_id: str, terms: Terms, at_once: Collide
) -> None:
    enqueue(store, run_id, terms)
    reserved = at_once(16, lambda own, _: own.reserve(run_id, 0))
    assert len([one for one in reserved if one]) == 1


@both
def test_a_replay_has_one_winner(
    store: Store, run_id: str, terms: Terms, age: Callable[..., None], at_once: Collide
) -> None:
    complete(store, claim(store, run_id, terms))
    age(store, 61)
    replays = at_once(16, lambda own, who: own.replay(run_id, f"{run_id}-{who}", terms))
    (winner,) = [number for number, one in enumerate(replays) if one]
    now = row(store, run_id)
    assert (now.holder, now.replays) == (f"{run_id}-{winner}", 1)
    assert kinds(store, run_id) == ["replayed"]


def test_a_settle_that_waited_for_a_replay_changes_nothing(
    store: Store,
    run_id: str,
    terms: Terms,
    age: Callable[..., None],
    session: Any,
    background: Any,
) -> None:
    grant = claim(store, run_id, terms)
    complete(store, grant)
    age(store, 61)
    session.begin(
        "UPDATE celery_lease_run SET holder = 'winner', settle_by = 1e12 WHERE run_id = %s", run_id
    )
    settling = background.start_blocked(store.settle, [(run_id, grant.holder)])
    session.commit()
    settling.result(10)
    assert row(store, run_id).settled_at is None


def test_a_replay_that_waited_for_a_settle_finds_it_done(
    store: Store,
    run_id: str,
    terms: Terms,
    age: Callable[..., None],
    session: Any,
    background: Any,
) -> None:
    complete(store, claim(store, run_id, terms))
    age(store, 61)
    session.begin("UPDATE celery_lease_run SET settled_at = 1 WHERE run_id = %s", run_id)
    replaying = background.start_blocked(store.replay, run_id, "late-" + run_id, terms)
    session.commit()
    assert replaying.result(10) is None
    assert kinds(store, run_id) == []


@both
def test_settle_and_replay_at_once_leave_one_deliverer(
    store: Store, run_id: str, terms: Terms, age: Callable[..., None], at_once: Collide
) -> None:
    for number in range(10):
        name = f"{run_id}-{number}"
        grant = claim(store, name, terms)
        complete(store, grant)
        age(store, 61, name)

        def one(own: Store, who: int, name: str = name, holder: str = grant.holder) -> Any:
            if who:
                return own.replay(name, f"{name}-replayer", terms)
            return own.settle([(name, holder)])

        _, replay = at_once(2, one)
        now = row(store, name)
        assert (now.settled_at is None) is (replay is not None)


def test_a_reservation_that_waited_for_a_claim_sends_nothing(
    store: Store, run_id: str, terms: Terms, session: Any, background: Any
) -> None:
    enqueue(store, run_id, terms)
    session.begin(
        "UPDATE celery_lease_run SET state = 'running', epoch = 1, trigger_due = NULL"
        " WHERE run_id = %s",
        run_id,
    )
    reserving = background.start_blocked(store.reserve, run_id, 0)
    session.commit()
    assert reserving.result(10) is None
