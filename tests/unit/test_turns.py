"""Deliveries of one FIFO group in one worker: one at a time, in their order."""

from __future__ import annotations

import pytest

from celery_lease.turns import Turn, Turns

GROUP = ("queue", "a")


class Log:
    """What was begun and what was given back, in order."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def take(self, turns: Turns, holder: str, group: tuple[str, str] = GROUP) -> None:
        """As a worker does: a delivery that is told to begin asks once more."""
        turn = Turn(
            group,
            holder,
            lambda: self.take(turns, holder, group),
            lambda: self.said.append(f"back {holder}"),
        )
        if turns.take(turn):
            self.said.append(f"begin {holder}")


@pytest.fixture
def log() -> Log:
    return Log()


@pytest.fixture
def turns(log: Log) -> Turns:
    """Three of one group have come."""
    turns = Turns()
    for holder in ("1", "2", "3"):
        log.take(turns, holder)
    return turns


def test_the_first_of_a_group_begins_and_the_others_wait(turns: Turns, log: Log) -> None:
    assert log.said == ["begin 1"]


def test_the_next_begins_when_the_message_before_it_is_gone(turns: Turns, log: Log) -> None:
    turns.end(GROUP, "1", gone=True)
    assert log.said == ["begin 1", "begin 2"]
    turns.end(GROUP, "2", gone=True)
    turns.end(GROUP, "3", gone=True)
    log.take(turns, "4")
    assert log.said == ["begin 1", "begin 2", "begin 3", "begin 4"]


def test_those_behind_a_message_that_comes_back_are_given_back_too(turns: Turns, log: Log) -> None:
    turns.end(GROUP, "1", gone=False)
    assert log.said == ["begin 1", "back 2", "back 3"]
    log.take(turns, "4")
    assert log.said[-1] == "begin 4"


def test_only_who_is_at_work_ends_a_turn(turns: Turns, log: Log) -> None:
    for holder in ("2", "of another connection"):
        turns.end(GROUP, holder, gone=True)
    turns.end(GROUP, "1", gone=True)
    turns.end(GROUP, "1", gone=True)
    assert log.said == ["begin 1", "begin 2"]


def test_other_groups_do_not_wait(turns: Turns, log: Log) -> None:
    log.take(turns, "b", ("queue", "b"))
    log.take(turns, "other", ("other queue", "a"))
    assert log.said == ["begin 1", "begin b", "begin other"]


def test_what_waits_is_forgotten_with_the_connection_and_who_works_goes_on(
    turns: Turns, log: Log
) -> None:
    turns.keep_only({"1"})
    log.take(turns, "2 again")
    assert log.said == ["begin 1"]
    turns.end(GROUP, "1", gone=True)
    assert log.said == ["begin 1", "begin 2 again"]
    turns.keep_only(())  # it was thrown away on its way to the pool
    log.take(turns, "3 again")
    assert log.said[-1] == "begin 3 again"
