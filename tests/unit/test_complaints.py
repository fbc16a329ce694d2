"""What goes on being wrong is said once, and again after a while."""

from __future__ import annotations

import logging

import pytest

from celery_lease.complaints import Complaints


def test_the_same_thing_is_said_once_in_ten_minutes(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    complaints = Complaints(logging.getLogger("test.complaints"), now=lambda: now[0])
    for at in (0, 1, 599, 600, 601):
        now[0] = at
        complaints.say("a", logging.WARNING, "a at %s", at)
    complaints.say("b", logging.ERROR, "b")
    told = [(r.levelname, r.getMessage()) for r in caplog.records if r.levelno > logging.DEBUG]
    assert told == [("WARNING", "a at 0"), ("WARNING", "a at 600"), ("ERROR", "b")]


def test_names_that_never_come_again_do_not_pile_up() -> None:
    complaints = Complaints(logging.getLogger("test.complaints"))
    for number in range(1000):
        complaints.say(str(number), logging.DEBUG, "once")
    assert len(complaints._said) <= 200
