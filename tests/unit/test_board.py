"""The board that a worker's main process and its pool children share."""

from __future__ import annotations

import os

import pytest

from celery_lease.board import Board


def test_a_slot_tells_its_own_holder_what_the_parent_wrote() -> None:
    board = Board(slots=2)
    slot = board.take("node/a", trust_until=5.0)
    assert slot is not None
    seen_by_child = board.slot(slot.index, "node/a")
    assert seen_by_child is not None
    slot.trust_until = 12.5
    slot.mark_lost("revoked")
    assert seen_by_child.trust_until == 12.5
    assert seen_by_child.lost == "revoked"


def test_a_slot_says_nothing_to_a_holder_it_no_longer_belongs_to() -> None:
    board = Board(slots=1)
    old = board.take("node/old")
    assert old is not None
    board.give_back(old)
    new = board.take("node/new", trust_until=9.0)
    assert new is not None
    assert new.index == old.index
    new.mark_lost("reclaimed")
    assert old.lost == ""
    assert old.trust_until == 0.0
    old.progressed()
    assert new.lost == "reclaimed"


def test_a_full_board_gives_no_slot_and_a_freed_one_is_used_again() -> None:
    board = Board(slots=1)
    first = board.take("node/1")
    assert first is not None
    assert board.take("node/2") is None
    board.give_back(first)
    assert board.take("node/3") is not None


def test_holders_with_long_node_names_are_told_apart_by_their_random_part() -> None:
    board = Board(slots=1)
    node = "celery@" + "x" * 200
    slot = board.take(f"{node}/{'a' * 32}")
    assert slot is not None
    slot.mark_lost("reclaimed")
    other = board.slot(slot.index, f"{node}/{'b' * 32}")
    assert other is not None
    assert other.lost == ""


def test_an_unknown_reason_counts_as_reclaimed() -> None:
    board = Board(slots=1)
    slot = board.take("node/a")
    assert slot is not None
    slot.mark_lost("something new")
    assert slot.lost == "reclaimed"


def test_what_is_written_late_about_a_holder_does_not_hit_the_next_one_in_its_slot() -> None:
    board = Board(slots=1)
    gone = board.take("node/gone")
    assert gone is not None
    board.give_back(gone)
    following = board.take("node/next")
    assert following is not None
    gone.mark_lost("reclaimed")
    gone.trust_until = 1e12
    assert following.lost == ""
    assert following.trust_until == 0.0


@pytest.mark.parametrize("writer", ["parent", "child"])
def test_both_sides_of_a_fork_see_what_the_other_wrote(writer: str) -> None:
    board = Board(slots=1)
    slot = board.take("node/a")
    assert slot is not None
    before = slot.progress_at
    pid = os.fork()
    if pid == 0:
        if writer == "child":
            slot.progressed()
            os._exit(0)
        while not board.stopping:
            pass
        os._exit(7 if slot.lost == "stalled" else 1)
    if writer == "parent":
        slot.mark_lost("stalled")
        board.stopping = True
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if writer == "child":
        assert slot.progress_at > before
    else:
        assert code == 7
