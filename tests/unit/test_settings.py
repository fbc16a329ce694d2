from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from celery import Celery

from celery_lease.errors import InvalidSetting
from celery_lease.settings import PREFIX, SETTINGS, Settings, seconds


def refused(**given: Any) -> str:
    with pytest.raises(InvalidSetting) as error:
        Settings.read({PREFIX + name: value for name, value in given.items()})
    return str(error.value)


def test_the_defaults_are_those_of_the_reference() -> None:
    settings = Settings.defaults()
    assert (settings.duration, settings.heartbeat, settings.missed) == (90.0, 30.0, 1)
    assert (settings.max_attempts, settings.max_recoveries, settings.max_replays) == (5, 50, 10)
    assert settings.retrigger_after == 15 * 60
    assert settings.statement_timeout == 5.0
    assert settings.tombstone_age == 400 * 86400


def test_every_setting_has_a_unit_and_a_meaning_for_the_reference() -> None:
    for setting in SETTINGS:
        assert setting.unit, setting.name
        assert setting.meaning.endswith("."), setting.name


def test_every_default_passes_its_own_check() -> None:
    for setting in SETTINGS:
        setting.check(PREFIX + setting.name, setting.default)


@pytest.mark.parametrize("value", [timedelta(minutes=2), 120, 120.0])
def test_a_duration_is_a_timedelta_or_a_number_of_seconds(value: Any) -> None:
    assert Settings.defaults(duration=value).duration == 120.0
    assert isinstance(Settings.defaults(duration=value).duration, float)


@pytest.mark.parametrize(
    "value", [0, -1, timedelta(seconds=-1), float("nan"), float("inf"), True, "90", None, [90]]
)
def test_a_duration_that_is_none_is_refused_with_name_and_value(value: Any) -> None:
    message = refused(duration=value)
    assert message.startswith(f"lease_duration = {value!r}: ")


def test_zero_is_a_duration_only_where_it_is_asked_for() -> None:
    assert seconds("delay", 0, zero=True) == 0.0
    with pytest.raises(InvalidSetting):
        seconds("delay", 0)


@pytest.mark.parametrize("name", ["grace", "progress_timeout"])
def test_an_optional_duration_may_be_unset(name: str) -> None:
    assert getattr(Settings.defaults(**{name: None}), name) is None
    assert f"lease_{name} = 0" in refused(**{name: 0})


@pytest.mark.parametrize("name", ["max_attempts", "max_recoveries", "max_replays"])
@pytest.mark.parametrize("value", [0, -1, 1.0, "1", True, None])
def test_a_limit_is_a_whole_number_of_at_least_1(name: str, value: Any) -> None:
    assert f"lease_{name} = {value!r}" in refused(**{name: value})


@pytest.mark.parametrize("value", [-1, 1.5, True, "1"])
def test_missed_heartbeats_are_counted_from_0(value: Any) -> None:
    assert Settings.defaults(missed=0).missed == 0
    assert f"lease_missed = {value!r}" in refused(missed=value)


@pytest.mark.parametrize("value", [1, "yes", None])
def test_a_flag_is_true_or_false(value: Any) -> None:
    assert f"lease_enabled = {value!r}" in refused(enabled=value)


@pytest.mark.parametrize("name", ["store_url", "namespace"])
@pytest.mark.parametrize("value", ["", "  ", None, 7])
def test_a_name_is_a_string_that_says_something(name: str, value: Any) -> None:
    assert f"lease_{name} = {value!r}" in refused(**{name: value})


@pytest.mark.parametrize("name", ["on_reclaim", "stage_handoff"])
def test_a_choice_names_what_there_is_to_choose(name: str) -> None:
    message = refused(**{name: "never"})
    assert f"lease_{name} = 'never'" in message
    assert "'resume'" in message or "'budget'" in message


def test_store_options_are_a_dictionary() -> None:
    assert Settings.defaults(store_options={"pool_size": 3}).store_options == {"pool_size": 3}
    assert "lease_store_options" in refused(store_options=["pool_size"])


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("duraton", "lease_duration"),
        ("heart_beat", "lease_heartbeat"),
        ("store", "lease_store_url"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_known_name(typed: str, meant: str) -> None:
    message = refused(**{typed: 1})
    assert message.startswith(f"lease_{typed} = 1: there is no such setting")
    assert f"did you mean {meant}?" in message


def test_an_unknown_key_like_no_other_is_refused_without_a_guess() -> None:
    assert "did you mean" not in refused(zzzzzzzz=1)


def test_a_stage_budget_over_eleven_hours_is_refused_because_of_sqs() -> None:
    assert Settings.defaults(stage_budget=timedelta(hours=11)).stage_budget == 39600
    message = refused(stage_budget=timedelta(hours=12))
    assert "lease_stage_budget = 43200 s" in message
    assert "39600 s" in message


def test_a_lock_timeout_beyond_the_statement_timeout_is_refused_with_both_values() -> None:
    message = refused(lock_timeout=10, statement_timeout=4)
    assert "lease_lock_timeout = 10 s" in message
    assert "lease_statement_timeout = 4 s" in message


class TestSettingsOfACeleryApp:
    def test_are_read_from_its_configuration(self) -> None:
        app = Celery("configured")
        app.conf.update(lease_duration=60, lease_heartbeat=20)
        settings = Settings.read(app.conf)
        assert (settings.duration, settings.heartbeat) == (60.0, 20.0)

    def test_may_be_written_as_django_projects_do(self) -> None:
        class Module:
            CELERY_LEASE_DURATION = 60
            CELERY_LEASE_HEARTBEAT = 20
            CELERY_TASK_SERIALIZER = "json"

        app = Celery("django")
        app.config_from_object(Module, namespace="CELERY")
        settings = Settings.read(app.conf, app.namespace)
        assert (settings.duration, settings.heartbeat) == (60.0, 20.0)

    def test_leave_every_other_key_alone(self) -> None:
        assert Settings.read({"task_serializer": "json", "released": 1}) == Settings.defaults()

    def test_are_frozen(self) -> None:
        with pytest.raises(AttributeError):
            Settings.defaults().duration = 1.0  # type: ignore[misc]
