from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest

from celery_lease.errors import InvalidSetting
from celery_lease.policy import LeasePolicy, Terms, grace_of
from celery_lease.settings import Settings


def terms(settings: dict[str, Any] | None = None, **policy: Any) -> Terms:
    return LeasePolicy(**policy).terms(Settings.defaults(**(settings or {})))


def refused(settings: dict[str, Any] | None = None, **policy: Any) -> str:
    with pytest.raises(InvalidSetting) as error:
        terms(settings, **policy)
    return str(error.value)


@pytest.mark.parametrize(
    ("preset", "duration", "heartbeat"),
    [
        (LeasePolicy.short, 30.0, 10.0),
        (LeasePolicy.steps, 60.0, 20.0),
        (LeasePolicy.long, 90.0, 30.0),
    ],
)
def test_a_preset_works_with_the_default_settings(
    preset: Any, duration: float, heartbeat: float
) -> None:
    made = preset(max_attempts=3).terms(Settings.defaults())
    assert (made.duration, made.heartbeat, made.max_attempts) == (duration, heartbeat, 3)


def test_what_a_policy_leaves_open_comes_from_the_settings() -> None:
    made = terms({"duration": 120, "max_recoveries": 7, "settle_timeout": 9}, heartbeat=20)
    assert (made.duration, made.heartbeat) == (120.0, 20.0)
    assert (made.max_recoveries, made.settle_timeout) == (7, 9.0)


def test_a_policy_wins_over_the_settings() -> None:
    assert terms({"on_reclaim": "ask"}, on_reclaim="restart").on_reclaim == "restart"


def test_an_unset_grace_is_a_heartbeat_and_a_statement_timeout() -> None:
    assert terms({"statement_timeout": 7}, heartbeat=20).grace == 27.0


def test_a_policy_takes_timedeltas() -> None:
    made = terms(duration=timedelta(minutes=5), heartbeat=timedelta(minutes=1))
    assert (made.duration, made.heartbeat) == (300.0, 60.0)


@pytest.mark.parametrize(("name", "value"), [("duration", 0), ("missed", -1), ("on_reclaim", "x")])
def test_a_policys_values_are_checked_like_settings(name: str, value: Any) -> None:
    assert f"lease_{name} = {value!r}" in refused(**{name: value})


class TestADurationTooShortForItsHeartbeats:
    def test_is_refused_with_all_names_and_values(self) -> None:
        message = refused(duration=60, heartbeat=30)
        assert "lease_duration = 60 s" in message
        assert "lease_heartbeat = 30 s" in message
        assert "lease_missed = 1" in message
        assert "at least 72 s" in message

    @pytest.mark.parametrize(("duration", "heartbeat"), [(75, 30), (300, 140), (15, 6)])
    def test_ends_where_one_missed_beat_and_a_slow_renewal_fit_in(
        self, duration: int, heartbeat: int
    ) -> None:
        assert terms(duration=duration, heartbeat=heartbeat).duration == duration
        refused(duration=duration - 0.01, heartbeat=heartbeat)

    def test_depends_on_the_beats_that_may_be_missed(self) -> None:
        assert terms(duration=60, heartbeat=30, missed=0).missed == 0
        assert "lease_missed = 2" in refused(duration=90, heartbeat=30, missed=2)


class TestAGraceTooShort:
    def test_is_refused_with_all_names_and_values(self) -> None:
        message = refused(grace=34)
        assert "lease_grace = 34 s" in message
        assert "lease_heartbeat = 30 s" in message
        assert "lease_statement_timeout = 5 s" in message
        assert "35 s" in message

    def test_ends_at_a_heartbeat_and_a_statement_timeout(self) -> None:
        assert terms(grace=35).grace == 35.0


def test_a_progress_timeout_under_a_heartbeat_is_refused_with_both_values() -> None:
    assert terms(progress_timeout=30).progress_timeout == 30.0
    message = refused(progress_timeout=29)
    assert "lease_progress_timeout = 29 s" in message
    assert "lease_heartbeat = 30 s" in message


class TestTermsInARun:
    def test_come_back_as_they_were_stored(self) -> None:
        made = terms(progress_timeout=40)
        assert Terms.load(made.dump()) == made

    def test_ignore_what_a_newer_release_added(self) -> None:
        stored = json.dumps({**json.loads(terms().dump()), "novelty": 1})
        assert Terms.load(stored) == terms()

    def test_have_the_default_of_what_an_older_release_did_not_know(self) -> None:
        stored = json.loads(terms(max_attempts=2).dump())
        del stored["max_replays"]
        assert Terms.load(json.dumps(stored)) == terms(max_attempts=2)

    def test_give_the_grace_to_those_who_need_no_more(self) -> None:
        assert grace_of(terms().dump()) == 35.0
        assert grace_of("{}") == 0.0
