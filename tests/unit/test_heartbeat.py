"""One tick of the heartbeat, on a real store, with a broker that records what it is asked."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from celery_lease.board import Board
from celery_lease.errors import StoreUnavailable
from celery_lease.heartbeat import Heartbeat
from celery_lease.keeper import Keeper, Kept
from celery_lease.policy import LeasePolicy, Terms
from celery_lease.settings import Settings
from celery_lease.store import Grant, Store
from celery_lease.visibility import Gone, Held
from celery_lease.visibility.answers import DENIED


class Clock:
    """A monotonic clock that the test moves."""

    def __init__(self) -> None:
        self.time = time.monotonic()

    def __call__(self) -> float:
        return self.time


class RecordingBroker:
    """Stands in for the broker's side: what was asked, and failures to order."""

    def __init__(self) -> None:
        self.asked: list[list[tuple[str, float]]] = []
        self.fail: Callable[[Held], Gone | None] = lambda held: None

    def extend(self, messages: Sequence[tuple[Held, float]]) -> list[Gone]:
        self.asked.append([(held.handle, seconds) for held, seconds in messages])
        return [gone for held, _ in messages if (gone := self.fail(held)) is not None]


@pytest.fixture
def database() -> str:
    return "sqlite"


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def broker() -> RecordingBroker:
    return RecordingBroker()


@pytest.fixture
def keeper() -> Keeper:
    return Keeper(Board(slots=8))


@pytest.fixture
def heartbeat(store: Store, keeper: Keeper, broker: RecordingBroker, clock: Clock) -> Heartbeat:
    visibility: Any = broker
    return Heartbeat(store, keeper, visibility, interval=30.0, now=clock)


@pytest.fixture
def keep(
    store: Store, keeper: Keeper, clock: Clock, terms: Terms
) -> Callable[..., tuple[Kept, Grant]]:
    def keep_one(run_id: str, *, terms: Terms = terms, pid: int | None = 1) -> tuple[Kept, Grant]:
        holder = f"node/{run_id}"
        grant = store.claim(run_id, 0, holder, task="t", terms=terms)
        assert isinstance(grant, Grant)
        held = Held(f"handle-{run_id}", "queue", clock.time, 1, None)
        slot = keeper.board.take(holder)
        kept = Kept(run_id, holder, "t", terms, held, slot, clock.time)
        kept.pid = pid
        keeper.add(kept)
        return kept, grant

    return keep_one


def test_a_tick_renews_all_leases_in_one_call_and_all_messages_in_another(
    heartbeat: Heartbeat,
    keep: Callable[..., tuple[Kept, Grant]],
    broker: RecordingBroker,
    run_id: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = [keep(f"{run_id}-{n}")[0] for n in range(5)]
    calls: list[int] = []
    renew = heartbeat.store.renew

    def counted(holders: Any, **kw: Any) -> Any:
        calls.append(len(holders))
        return renew(holders, **kw)

    monkeypatch.setattr(heartbeat.store, "renew", counted)
    heartbeat.run_once()
    assert calls == [5]
    assert len(broker.asked) == 1
    assert {handle for handle, _ in broker.asked[0]} == {
        one.held.handle for one in kept if one.held
    }
    assert all(seconds == 90 for _, seconds in broker.asked[0])


def test_trust_counts_from_before_the_request_was_sent(
    heartbeat: Heartbeat,
    keep: Callable[..., tuple[Kept, Grant]],
    clock: Clock,
    run_id: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept, _ = keep(run_id)
    asked_at = clock.time
    renew = heartbeat.store.renew

    def slow(holders: Any, **kw: Any) -> Any:
        answer = renew(holders, **kw)
        clock.time += 20
        return answer

    monkeypatch.setattr(heartbeat.store, "renew", slow)
    heartbeat.run_once()
    assert kept.slot is not None
    assert kept.slot.trust_until == pytest.approx(asked_at + 90)


def test_a_prefetched_message_is_kept_hidden_and_its_lease_not_asked_for(
    heartbeat: Heartbeat,
    keep: Callable[..., tuple[Kept, Grant]],
    broker: RecordingBroker,
    run_id: str,
) -> None:
    kept, _ = keep(run_id, pid=None)
    heartbeat.run_once()
    assert broker.asked
    assert not kept.claimed


def test_a_reclaimed_lease_is_lost_and_a_released_one_is_not(
    heartbeat: Heartbeat,
    keep: Callable[..., tuple[Kept, Grant]],
    store: Store,
    run_id: str,
) -> None:
    taken, grant = keep(f"{run_id}-taken")
    done, done_grant = keep(f"{run_id}-done")
    store.abandon(grant.run_id, grant.epoch, grant.holder, "test")
    store.complete(done_grant, None, deliver=False, settle_in=1)
    heartbeat.run_once()
    assert taken.lost == "reclaimed"
    assert taken.slot is not None
    assert taken.slot.lost == "reclaimed"
    assert done.lost == ""


def test_a_holder_that_has_not_claimed_yet_is_not_lost(
    heartbeat: Heartbeat, keeper: Keeper, terms: Terms, run_id: str
) -> None:
    kept = Kept(run_id, "node/new", "t", terms, None, None, float("inf"), pid=1)
    keeper.add(kept)
    heartbeat.run_once()
    assert kept.lost == ""


def test_while_the_store_is_away_messages_stay_hidden_and_nobody_is_lost(
    heartbeat: Heartbeat,
    keep: Callable[..., tuple[Kept, Grant]],
    broker: RecordingBroker,
    run_id: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept, _ = keep(run_id)
    seen: list[bool] = []
    heartbeat._on_store = seen.append

    def away(*_: Any, **__: Any) -> None:
        raise StoreUnavailable

    monkeypatch.setattr(heartbeat.store, "renew", away)
    heartbeat.run_once()
    assert seen == [False]
    assert broker.asked
    assert kept.lost == ""


def test_a_message_whose_twelve_hours_are_over_is_let_be_and_the_lease_goes_on(
    heartbeat: Heartbeat,
    keep: Callable[..., tuple[Kept, Grant]],
    broker: RecordingBroker,
    clock: Clock,
    store: Store,
    run_id: str,
) -> None:
    kept, _ = keep(run_id)
    broker.fail = lambda held: Gone(held, "cap", "used up", final=True)
    heartbeat.run_once()
    assert [event["kind"] for event in store.events(run_id)] == ["visibility_cap"]
    clock.time += 31
    heartbeat.run_once()
    assert len(broker.asked) == 1
    assert kept.lost == ""
    assert kept.claimed


def test_a_missing_permission_is_asked_for_with_each_heartbeat_and_not_each_second(
    heartbeat: Heartbeat,
    keep: Callable[..., tuple[Kept, Grant]],
    broker: RecordingBroker,
    clock: Clock,
    run_id: str,
) -> None:
    kept, _ = keep(run_id)
    broker.fail = lambda held: Gone(held, DENIED, "not authorized", final=False)
    heartbeat.run_once()
    clock.time += 2
    heartbeat.run_once()
    assert len(broker.asked) == 1
    clock.time += 30
    heartbeat.run_once()
    assert len(broker.asked) == 2
    assert kept.lost == ""


def test_a_failure_of_the_network_is_tried_again_a_second_later(
    heartbeat: Heartbeat,
    keep: Callable[..., tuple[Kept, Grant]],
    broker: RecordingBroker,
    clock: Clock,
    run_id: str,
) -> None:
    keep(run_id)
    broker.fail = lambda held: Gone(held, "network", "timed out", final=False)
    assert heartbeat.run_once() <= 1.0
    clock.time += 1.1
    heartbeat.run_once()
    assert len(broker.asked) == 2


def test_a_stalled_holder_is_abandoned_and_no_longer_renewed(
    heartbeat: Heartbeat,
    keep: Callable[..., tuple[Kept, Grant]],
    clock: Clock,
    store: Store,
    run_id: str,
) -> None:
    stuck = LeasePolicy(progress_timeout=60).terms(Settings.defaults())
    kept, _ = keep(run_id, terms=stuck, pid=os.getpid())
    kept.interruptible = True
    heartbeat.run_once()
    clock.time += 61
    heartbeat.run_once()
    assert kept.lost == "stalled"
    view = store.view(run_id)
    assert view is not None
    assert view.state == "ready"
    assert heartbeat.store.renew([kept.holder]).lost == {kept.holder: "stalled"}


def test_a_stalled_body_that_cannot_be_interrupted_only_loses_its_renewals(
    heartbeat: Heartbeat,
    keep: Callable[..., tuple[Kept, Grant]],
    clock: Clock,
    store: Store,
    run_id: str,
) -> None:
    stuck = LeasePolicy(progress_timeout=60).terms(Settings.defaults())
    kept, _ = keep(run_id, terms=stuck)
    heartbeat.run_once()
    before = store.leases(run_id)[0]["heartbeat_at"]
    clock.time += 61
    heartbeat.run_once()
    lease = store.leases(run_id)[0]
    assert (lease["status"], lease["heartbeat_at"]) == ("active", before)
    assert kept.lost == ""


def test_an_outcome_that_is_being_replayed_is_not_replayed_by_somebody_else(
    heartbeat: Heartbeat,
    keep: Callable[..., tuple[Kept, Grant]],
    clock: Clock,
    store: Store,
    terms: Terms,
    run_id: str,
    age: Callable[..., None],
) -> None:
    _, grant = keep(run_id)
    heartbeat.keeper.forget(grant.holder)
    store.complete(grant, b"x", deliver=True, settle_in=60)
    age(store, 61)
    assert store.replay(run_id, "node/replays", terms) is not None
    replaying = Kept(run_id, "node/replays", "t", terms, None, None, float("inf"), pid=1)
    heartbeat.keeper.add(replaying)
    age(store, 59)
    heartbeat.run_once()
    age(store, 59)
    assert store.replay(run_id, "node/another", terms) is None


def test_a_process_that_has_gone_on_to_its_next_delivery_is_not_killed(
    heartbeat: Heartbeat,
    keep: Callable[..., tuple[Kept, Grant]],
    run_id: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept, _ = keep(run_id)
    kept.kill_at = 0.0
    kept.interruptible = True
    killed: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, _number: killed.append(pid))
    renew = heartbeat.store.renew

    def slow(*args: Any, **kw: Any) -> Any:
        heartbeat.keeper.forget(kept.holder)
        return renew(*args, **kw)

    monkeypatch.setattr(heartbeat.store, "renew", slow)
    heartbeat.run_once()
    assert killed == []


def test_an_outcome_is_not_kept_back_for_ever_by_a_process_that_hangs_in_a_callback(
    heartbeat: Heartbeat,
    keep: Callable[..., tuple[Kept, Grant]],
    clock: Clock,
    store: Store,
    terms: Terms,
    age: Callable[..., None],
    run_id: str,
) -> None:
    _, grant = keep(run_id)
    store.complete(grant, b"x", deliver=True, settle_in=terms.settle_timeout)
    age(store, terms.settle_timeout + 1)
    heartbeat.run_once()
    assert store.replay(run_id, "node/other", terms) is None
    clock.time += terms.max_replays * terms.settle_timeout + 1
    age(store, terms.settle_timeout + 1)
    heartbeat.run_once()
    assert store.replay(run_id, "node/other", terms) is not None


def test_an_outcome_that_is_given_up_during_the_tick_waits_no_longer_than_its_task_says(
    heartbeat: Heartbeat,
    keep: Callable[..., tuple[Kept, Grant]],
    store: Store,
    terms: Terms,
    run_id: str,
    age: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The tick asked with the delivery in hand, and its message was given back meanwhile."""
    short = replace(terms, settle_timeout=5.0)
    kept, grant = keep(run_id, terms=short)
    store.complete(grant, b"x", deliver=True, settle_in=5.0)
    renew = heartbeat.store.renew

    def slow(*args: Any, **kw: Any) -> Any:
        heartbeat.keeper.forget(kept.holder)
        return renew(*args, **kw)

    monkeypatch.setattr(heartbeat.store, "renew", slow)
    heartbeat.run_once()
    age(store, 6)
    assert store.replay(run_id, "node/other", short) is not None


def test_a_stopping_worker_asks_its_holders_to_yield(
    heartbeat: Heartbeat,
    keep: Callable[..., tuple[Kept, Grant]],
    store: Store,
    run_id: str,
) -> None:
    _, grant = keep(run_id)
    heartbeat.run_once()
    assert store.checkpoint(grant, b"1") is False
    heartbeat.keeper.board.stopping = True
    heartbeat.run_once()
    assert store.checkpoint(grant, b"2") is True


def test_outcomes_that_could_not_be_settled_are_settled_by_a_later_tick(
    heartbeat: Heartbeat,
    keep: Callable[..., tuple[Kept, Grant]],
    store: Store,
    run_id: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept, grant = keep(run_id)
    store.complete(grant, b"x", deliver=True, settle_in=60)
    heartbeat.keeper.delivered(run_id, kept.holder)
    settle = heartbeat.store.settle

    def away(*_: Any) -> None:
        raise StoreUnavailable

    monkeypatch.setattr(heartbeat.store, "settle", away)
    heartbeat.run_once()
    monkeypatch.setattr(heartbeat.store, "settle", settle)
    heartbeat.run_once()
    view = store.view(run_id)
    assert view is not None
    assert view.settled


def test_a_short_policy_is_renewed_in_time_beside_a_long_interval(
    heartbeat: Heartbeat,
    keep: Callable[..., tuple[Kept, Grant]],
    clock: Clock,
    run_id: str,
) -> None:
    heartbeat.run_once()
    clock.time += 3
    kept, _ = keep(run_id, terms=LeasePolicy.short().terms(Settings.defaults()))
    heartbeat.run_once()
    assert kept.claimed
