"""The registry of deliveries that requests and the heartbeat share."""

from __future__ import annotations

import threading

from celery_lease.board import Board
from celery_lease.keeper import Keeper, Kept
from celery_lease.policy import Terms
from tests.waiting import wait_until


def _kept(terms: Terms, holder: str = "node/a", **changes: object) -> Kept:
    given: dict[str, object] = {
        "run_id": "r",
        "holder": holder,
        "task": "t",
        "terms": terms,
        "held": None,
        "slot": None,
        "extend_at": float("inf"),
    }
    return Kept(**{**given, **changes})  # type: ignore[arg-type]


def test_forget_waits_for_a_call_about_this_message_and_no_other(terms: Terms) -> None:
    keeper = Keeper(Board(slots=1))
    talked_about, other = _kept(terms, "node/a"), _kept(terms, "node/b")
    keeper.add(talked_about)
    keeper.add(other)
    busy = keeper.begin([talked_about])
    forgotten = threading.Event()

    def forget() -> None:
        keeper.forget("node/a")
        forgotten.set()

    keeper.forget("node/b")
    threading.Thread(target=forget, daemon=True).start()
    wait_until(lambda: len(keeper.all()) == 0, what="the entry to be taken out")
    assert not forgotten.is_set()
    keeper.end(busy)
    assert forgotten.wait(5)


def test_a_delivery_that_was_forgotten_is_not_talked_about(terms: Terms) -> None:
    keeper = Keeper(Board(slots=1))
    kept = _kept(terms)
    keeper.add(kept)
    snapshot = keeper.all()
    keeper.forget(kept.holder)
    assert keeper.begin(snapshot) == []


def test_forgetting_frees_the_slot_on_the_board(terms: Terms) -> None:
    board = Board(slots=1)
    keeper = Keeper(board)
    keeper.add(_kept(terms, slot=board.take("node/a")))
    assert board.take("node/b") is None
    keeper.forget("node/a")
    assert board.take("node/b") is not None


def test_delivered_outcomes_are_taken_once(terms: Terms) -> None:
    keeper = Keeper(Board(slots=1))
    keeper.delivered("run-1", "node/a")
    keeper.delivered("run-1", "node/a")
    assert keeper.take_delivered() == [("run-1", "node/a")]
    assert keeper.take_delivered() == []
    assert not keeper.has_delivered
