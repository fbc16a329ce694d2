"""A fork copies sockets; a store must never use or close one that its parent uses."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest

from celery_lease.policy import Terms
from celery_lease.store import Store
from tests.runs import claim, complete

both = pytest.mark.parametrize("database", ["sqlite", "postgresql"], indirect=True)


@both
@pytest.mark.timeout(120)
def test_eight_children_claim_a_hundred_runs_each_while_their_parent_renews(
    store: Store, make_store: Callable[..., Store], run_id: str, terms: Terms
) -> None:
    """Case 47: the engine is made in the parent, and in use there at the moment of the fork."""
    # Twelve writers that never pause are too many for SQLite's unfair queue and two seconds.
    store = make_store(store, lock_timeout=30.0, statement_timeout=30.0)
    own = [claim(store, f"{run_id}-parent-{n}", terms) for n in range(4)]
    stop, beats = threading.Event(), []

    def beat(grant: Any) -> None:
        while not stop.is_set():
            beats.append(grant.holder in store.renew([grant.holder]).kept)

    threads = [threading.Thread(target=beat, args=(grant,)) for grant in own]
    for thread in threads:
        thread.start()
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    children = [
        context.Process(target=_child, args=(store, f"{run_id}-{n}", terms, answers))
        for n in range(8)
    ]
    for child in children:
        child.start()
    said = [answers.get(timeout=100) for _ in children]
    for child in children:
        child.join(30)
    stop.set()
    for thread in threads:
        thread.join(30)

    assert said == ["100 of 100"] * 8
    assert [child.exitcode for child in children] == [0] * 8
    assert all(beats)
    assert store.renew([grant.holder for grant in own]).kept == {grant.holder for grant in own}


def _child(store: Store, name: str, terms: Terms, answers: Any) -> None:
    try:
        done = 0
        for number in range(100):
            grant = claim(store, f"{name}-{number}", terms, holder=f"{name}-{number}")
            assert store.renew([grant.holder]).kept == {grant.holder}
            complete(store, grant)
            done += 1
        answers.put(f"{done} of 100")
    except BaseException as exc:
        answers.put(repr(exc))
        raise


def test_a_child_that_ends_leaves_its_parents_sessions_alone(
    store: Store, run_id: str, terms: Terms
) -> None:
    grant = claim(store, run_id, terms)

    def session() -> int:
        return int(
            store.connections.run(lambda c: c.exec_driver_sql("SELECT pg_backend_pid()").scalar())
        )

    before = session()
    for _ in range(3):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                store.check(grant)
                store.dispose()
                code = 0 if session() != before else 2
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
    assert session() == before
    store.check(grant)
