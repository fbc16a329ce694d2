"""The commit arrived, its answer did not: the repeat is accepted, another outcome is not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy.engine import make_url

from celery_lease.errors import LeaseLost
from celery_lease.policy import Terms
from celery_lease.states import RunState
from celery_lease.store import Grant, Store
from tests.runs import claim, complete, dump, enqueue, fail, kinds, live_leases, new_holder, row
from tests.tcp_proxy import TcpProxy
from tests.waiting import wait_until


@pytest.fixture
def proxy(postgresql_url: str) -> Iterator[TcpProxy]:
    url = make_url(postgresql_url)
    with TcpProxy(url.host or "127.0.0.1", url.port or 5432) as made:
        yield made


@pytest.fixture
def far(open_store: Callable[..., Store], proxy: TcpProxy, postgresql_url: str) -> Store:
    """A store whose answers can be lost on the way."""
    return open_store(proxy.url(postgresql_url))


@pytest.fixture
def losing_the_answer(store: Store, proxy: TcpProxy, background: Any) -> Callable[..., Any]:
    """Does a verb; its changes are committed, its answers lost, its connection cut.

    The verb repeats itself once on a new connection, and what it says then is returned.
    """

    def lose(run_id: str, verb: Callable[[], Any]) -> Any:
        before = dump(store, run_id)
        committed = _answers_held_until(store, proxy, background, run_id, before, verb)
        proxy.cut()
        proxy.resume()
        return committed.result(10)

    return lose


def _answers_held_until(
    store: Store,
    proxy: TcpProxy,
    background: Any,
    run_id: str,
    before: Any,
    verb: Callable[[], Any],
) -> Any:
    """Let the answers pass until the server has committed, and hold that one.

    A transaction has several answers. Each is held, and passed on if nothing is committed.
    """
    proxy.pause(requests=False)
    running = background.start(verb)
    while True:
        wait_until(lambda: proxy.holds("answers") or running.done(), what="an answer")
        assert not running.done(), "its answer was not lost"
        if dump(store, run_id) != before:
            return running
        proxy.pass_one("answers")


ENDINGS: dict[str, Callable[[Store, Grant], Any]] = {
    "complete": complete,
    "fail": fail,
    "hand_off": lambda far, grant: far.hand_off(grant, "budget"),
    "postpone": lambda far, grant: far.postpone(grant, b"new", 50.0, "retry"),
    "park": lambda far, grant: far.park(grant, "why"),
}


@pytest.mark.parametrize("name", ENDINGS)
def test_a_holder_whose_commit_was_not_answered_is_told_it_was_accepted(
    store: Store,
    far: Store,
    run_id: str,
    terms: Terms,
    losing_the_answer: Callable[..., Any],
    name: str,
) -> None:
    grant = claim(far, run_id, terms)
    losing_the_answer(run_id, lambda: ENDINGS[name](far, grant))
    assert live_leases(store, run_id) == 0
    assert "write_refused" not in kinds(store, run_id)
    before = dump(store, run_id)
    for other, verb in ENDINGS.items():
        if other != name:
            with pytest.raises(LeaseLost):
                verb(far, grant)
    assert dump(store, run_id) == before


def test_a_claim_that_was_not_answered_is_granted_once(
    store: Store, far: Store, run_id: str, terms: Terms, losing_the_answer: Callable[..., Any]
) -> None:
    far.view(run_id)
    holder = new_holder()
    grant = losing_the_answer(run_id, lambda: claim(far, run_id, terms, holder=holder))
    assert (grant.epoch, grant.holder) == (1, holder)
    assert len(store.leases(run_id)) == 1


def test_a_different_outcome_after_a_lost_answer_is_refused(
    store: Store, far: Store, run_id: str, terms: Terms, losing_the_answer: Callable[..., Any]
) -> None:
    grant = claim(far, run_id, terms)
    losing_the_answer(run_id, lambda: complete(far, grant, b"first"))
    with pytest.raises(LeaseLost):
        complete(far, grant, b"second")
    now = row(store, run_id)
    assert (now.state, now.outcome) == (RunState.SUCCEEDED, b"first")


def test_a_hand_off_is_a_repeat_though_the_next_holder_was_faster_than_the_news(
    store: Store, far: Store, run_id: str, terms: Terms, proxy: TcpProxy, background: Any
) -> None:
    grant = claim(far, run_id, terms)
    before = dump(store, run_id)
    handing = _answers_held_until(
        store, proxy, background, run_id, before, lambda: far.hand_off(grant, "budget")
    )
    claim(store, run_id, terms, expected=1)
    proxy.cut()
    proxy.resume()
    assert handing.result(10) == 1
    assert live_leases(store, run_id) == 1


def test_a_registration_that_was_not_answered_happened_once(
    store: Store, far: Store, run_id: str, terms: Terms, losing_the_answer: Callable[..., Any]
) -> None:
    far.view(run_id)
    losing_the_answer(run_id, lambda: enqueue(far, run_id, terms))
    assert kinds(store, run_id) == ["enqueued"]


def test_a_reclaim_that_was_not_answered_happened_once(
    store: Store,
    far: Store,
    run_id: str,
    terms: Terms,
    age: Callable[..., None],
    losing_the_answer: Callable[..., Any],
) -> None:
    grant = claim(far, run_id, terms)
    age(store, 91)
    far.suspect(run_id, grant.epoch)
    age(store, 36)
    losing_the_answer(run_id, lambda: far.reclaim(run_id, grant.epoch))
    now = row(store, run_id)
    assert (now.state, now.recoveries) == (RunState.READY, 1)
    assert kinds(store, run_id) == ["suspect", "reclaimed"]
    assert store.due() == [(run_id, 1)]
