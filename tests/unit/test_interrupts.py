"""How a lost lease reaches the body that runs in a pool child."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from celery_lease.board import Board, Slot
from celery_lease.errors import LeaseLost
from celery_lease.interrupts import INTERRUPT_SIGNAL, Interrupts, no_soft_limit


@pytest.fixture
def slot() -> Slot:
    taken = Board(slots=1).take("node/a")
    assert taken is not None
    return taken


@pytest.fixture
def interrupts() -> Iterator[Interrupts]:
    before = signal.getsignal(INTERRUPT_SIGNAL)
    made = Interrupts()
    made.install()
    yield made
    signal.signal(INTERRUPT_SIGNAL, before)


def _signal_myself() -> None:
    os.kill(os.getpid(), INTERRUPT_SIGNAL)


def test_the_signal_raises_lease_lost_in_the_body_that_lost(
    interrupts: Interrupts, slot: Slot
) -> None:
    slot.mark_lost("revoked")
    with (
        pytest.raises(LeaseLost) as lost,
        interrupts.watching(slot, "r", 3),
    ):
        _signal_myself()
    assert (lost.value.reason, lost.value.run_id, lost.value.epoch) == ("revoked", "r", 3)


def test_a_late_signal_does_not_hit_the_next_task(interrupts: Interrupts) -> None:
    board = Board(slots=1)
    old = board.take("node/old")
    assert old is not None
    old.mark_lost("reclaimed")
    board.give_back(old)
    new = board.take("node/new")
    with interrupts.watching(new, "r2", 1):
        _signal_myself()
    _signal_myself()


def test_after_an_eager_task_in_the_body_its_own_loss_counts_again(
    interrupts: Interrupts, slot: Slot
) -> None:
    with interrupts.watching(slot, "outer", 3):
        with interrupts.watching(None, "eager", 1):
            slot.mark_lost("reclaimed")
            _signal_myself()
        with pytest.raises(LeaseLost) as lost:
            interrupts.check()
    assert (lost.value.run_id, lost.value.epoch) == ("outer", 3)


def test_inside_a_shield_the_signal_waits_for_the_next_check(
    interrupts: Interrupts, slot: Slot
) -> None:
    slot.mark_lost("reclaimed")
    with interrupts.watching(slot, "r", 1):
        with interrupts.shield():
            _signal_myself()
        with pytest.raises(LeaseLost):
            interrupts.check()


def test_after_its_own_commit_nothing_interrupts_a_holder(
    interrupts: Interrupts, slot: Slot
) -> None:
    with interrupts.watching(slot, "r", 1):
        interrupts.over()
        slot.mark_lost("reclaimed")
        _signal_myself()
        interrupts.check()


def test_lease_lost_passes_by_an_except_exception(interrupts: Interrupts, slot: Slot) -> None:
    def body() -> None:
        try:
            _signal_myself()
        except Exception:  # noqa: BLE001 - what task code does
            pytest.fail("LeaseLost must not be an Exception")

    slot.mark_lost("reclaimed")
    with pytest.raises(LeaseLost), interrupts.watching(slot, "r", 1):
        body()


def test_each_thread_watches_the_slot_of_its_own_body(slot: Slot) -> None:
    shared = Interrupts()
    lost: list[str] = []
    both = threading.Barrier(2, timeout=10)

    def body(mine: Slot | None) -> None:
        with shared.watching(mine, "r", 1):
            both.wait()
            try:
                shared.check()
            except LeaseLost as exc:
                lost.append(exc.reason)
            both.wait()

    slot.mark_lost("revoked")
    threads = [threading.Thread(target=body, args=(one,)) for one in (slot, None)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert lost == ["revoked"]


def test_a_soft_limit_after_the_commit_is_thrown_away() -> None:
    hits: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _frame: hits.append(number))
    try:
        with no_soft_limit():
            os.kill(os.getpid(), signal.SIGUSR1)
        assert hits == []
        os.kill(os.getpid(), signal.SIGUSR1)
        assert hits == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_soft_limit_inside_a_verb_is_raised_at_its_end() -> None:
    hits: list[str] = []
    before = signal.signal(signal.SIGUSR1, lambda _number, _frame: hits.append("limit"))
    try:
        with Interrupts().shield():
            os.kill(os.getpid(), signal.SIGUSR1)
            hits.append("verb")
        assert hits == ["verb", "limit"]
        os.kill(os.getpid(), signal.SIGUSR1)
        assert hits == ["verb", "limit", "limit"]
    finally:
        signal.signal(signal.SIGUSR1, before)
