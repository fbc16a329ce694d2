from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.synchronize import Barrier
from typing import Any

import pytest

from celery_lease.policy import Terms
from celery_lease.states import LeaseStatus, RunState
from celery_lease.store import Grant, Refusal, Store
from tests.runs import ENVELOPE, claim, enqueue, lease_row, live_leases, new_holder, reclaim, row

both = pytest.mark.parametrize("database", ["sqlite", "postgresql"], indirect=True)

Collide = Callable[[int, Callable[[Store, int], Any]], list[Any]]


def one_winner(answers: list[Any], epoch: int) -> Grant:
    grants = [answer for answer in answers if isinstance(answer, Grant)]
    assert len(grants) == 1
    assert all(isinstance(answer, Refusal) for answer in answers if answer is not grants[0])
    assert grants[0].epoch == epoch
    return grants[0]


@both
@pytest.mark.parametrize("kind", ["new", "registered", "handed over"])
def test_of_sixteen_claims_at_once_one_wins_and_fifteen_are_refused_cleanly(
    store: Store, run_id: str, terms: Terms, at_once: Collide, kind: str
) -> None:
    expected = 0
    if kind == "registered":
        enqueue(store, run_id, terms)
    elif kind == "handed over":
        reclaim(store, claim(store, run_id, terms))
        expected = 1

    answers = at_once(
        16,
        lambda own, number: own.claim(
            run_id, expected, f"{run_id}-h{number}", task="a.task", terms=terms, envelope=ENVELOPE
        ),
    )

    winner = one_winner(answers, expected + 1)
    assert live_leases(store, run_id) == 1
    assert row(store, run_id).holder == winner.holder
    assert lease_row(store, winner).holder == winner.holder


@both
def test_of_sixteen_processes_one_wins_and_none_sees_an_exception(
    store: Store, store_url: str, run_id: str, terms: Terms
) -> None:
    """Case 37."""
    context = multiprocessing.get_context("fork")
    barrier, answers = context.Barrier(16), context.Queue()
    processes = [
        context.Process(
            target=_claim_in_a_process,
            args=(store_url, store.namespace, run_id, terms, number, barrier, answers),
        )
        for number in range(16)
    ]
    for process in processes:
        process.start()
    said = [answers.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(60)

    assert sorted(said) == ["granted 1"] + ["refused"] * 15
    assert live_leases(store, run_id) == 1


def _claim_in_a_process(
    url: str,
    namespace: str,
    run_id: str,
    terms: Terms,
    number: int,
    barrier: Barrier,
    answers: Any,
) -> None:
    try:
        store = Store(url, namespace=namespace, lock_timeout=5.0)
        store.view("warm")
        barrier.wait(60)
        answer = store.claim(run_id, 0, f"{run_id}-h{number}", task="a.task", terms=terms)
        answers.put(f"granted {answer.epoch}" if isinstance(answer, Grant) else "refused")
    except BaseException as exc:
        answers.put(repr(exc))
        raise


@both
def test_of_sixteen_claims_by_one_holder_all_are_granted_the_same_lease(
    store: Store, run_id: str, terms: Terms, at_once: Collide
) -> None:
    holder = new_holder()
    answers = at_once(16, lambda own, _: own.claim(run_id, 0, holder, task="a.task", terms=terms))
    again = [store.claim(run_id, 0, holder, task="a.task", terms=terms)]
    grants = [answer for answer in answers + again if isinstance(answer, Grant)]
    assert grants
    assert {(grant.epoch, grant.holder) for grant in grants} == {(1, holder)}
    assert len(store.leases(run_id)) == 1


def test_a_claim_does_not_wait_for_a_run_that_is_busy(
    store: Store, run_id: str, terms: Terms, session: Any
) -> None:
    enqueue(store, run_id, terms)
    session.lock_run(run_id)
    answer = store.claim(run_id, 0, new_holder(), task="a.task", terms=terms)
    assert isinstance(answer, Refusal)
    assert answer.busy
    session.roll_back()
    claim(store, run_id, terms)


def test_a_first_claim_that_meets_another_one_uncommitted_is_refused_once_that_commits(
    store: Store, run_id: str, terms: Terms, session: Any, background: Any
) -> None:
    session.begin(
        "INSERT INTO celery_lease_run (run_id, namespace, task, policy, state, epoch, deliver,"
        " created_at) VALUES (%s, %s, 'a.task', %s, 'ready', 0, true, 0)",
        run_id,
        store.namespace,
        terms.dump(),
    )
    waiting = background.start_blocked(
        store.claim, run_id, 0, new_holder(), task="a.task", terms=terms
    )
    session.commit()
    assert isinstance(waiting.result(10), Refusal)
    assert store.leases(run_id) == []


class TestRevokeAndClaim:
    def test_a_revoke_that_waited_for_a_claim_ends_the_lease_of_that_claim(
        self, store: Store, run_id: str, terms: Terms, session: Any, background: Any
    ) -> None:
        enqueue(store, run_id, terms)
        session.begin(
            "UPDATE celery_lease_run SET state = 'running', epoch = 1, holder = %s"
            " WHERE run_id = %s",
            "h-" + run_id,
            run_id,
        )
        revoking = background.start_blocked(store.revoke, run_id)
        session.do(
            "INSERT INTO celery_lease_lease (run_id, epoch, holder, status, duration,"
            " acquired_at, expires_at, heartbeat_at) VALUES (%s, 1, %s, 'active', 90, 0, 1e12, 0)",
            run_id,
            "h-" + run_id,
        )
        session.commit()
        assert revoking.result(10) is True
        assert row(store, run_id).state == RunState.REVOKED
        assert [one["status"] for one in store.leases(run_id)] == [LeaseStatus.REVOKED]

    def test_a_revoke_of_an_unknown_id_that_meets_its_first_claim_revokes_it(
        self, store: Store, run_id: str, terms: Terms, session: Any, background: Any
    ) -> None:
        session.begin(
            "INSERT INTO celery_lease_run (run_id, namespace, task, policy, state, epoch, holder,"
            " deliver, created_at) VALUES (%s, %s, 'a.task', %s, 'running', 1, %s, true, 0)",
            run_id,
            store.namespace,
            terms.dump(),
            "h-" + run_id,
        )
        revoking = background.start_blocked(store.revoke, run_id)
        session.do(
            "INSERT INTO celery_lease_lease (run_id, epoch, holder, status, duration,"
            " acquired_at, expires_at, heartbeat_at) VALUES (%s, 1, %s, 'active', 90, 0, 1e12, 0)",
            run_id,
            "h-" + run_id,
        )
        session.commit()
        assert revoking.result(10) is True
        assert row(store, run_id).state == RunState.REVOKED
        assert live_leases(store, run_id) == 0

    @both
    def test_at_once_leave_a_revoked_run_without_a_live_lease(
        self, store: Store, run_id: str, terms: Terms, at_once: Collide
    ) -> None:
        for number in range(10):
            name = f"{run_id}-{number}"
            if number % 2:
                enqueue(store, name, terms)

            def one(own: Store, who: int, name: str = name) -> Any:
                if who == 0:
                    return own.revoke(name)
                return own.claim(name, 0, f"{name}-h{who}", task="a.task", terms=terms)

            answers = at_once(4, one)
            assert answers[0] is True
            assert sum(isinstance(answer, Grant) for answer in answers[1:]) <= 1
            assert row(store, name).state == RunState.REVOKED
            assert live_leases(store, name) == 0
