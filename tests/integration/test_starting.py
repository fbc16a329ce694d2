"""A worker that could not keep its promises does not start, and says why."""

from __future__ import annotations

import pytest
from celery import Celery

from celery_lease import LeasedTask
from celery_lease.errors import InvalidSetting
from tests.workers import Shop


def _body() -> None:
    """A task's function."""


@pytest.mark.parametrize("option", ["acks_late", "reject_on_worker_lost"])
def test_a_leased_task_that_lets_its_message_go_early_is_refused(option: str) -> None:
    """Case 27: as a class attribute, as an option of ``task``, in a base class."""
    with pytest.raises(InvalidSetting, match=option):
        type("Careless", (LeasedTask,), {option: False})
    app = Celery("refused", set_as_current=False)
    with pytest.raises(InvalidSetting, match=option):
        app._task_from_fun(_body, name="refused.task", base=LeasedTask, **{option: False})


@pytest.mark.parametrize("option", ["acks_late", "reject_on_worker_lost"])
def test_an_annotation_cannot_let_the_message_go_early_either(option: str) -> None:
    """Case 27, by ``task_annotations``, which Celery applies when the task is bound."""
    app = Celery("refused", set_as_current=False)
    app.conf.task_annotations = {"*": {option: False}}
    with pytest.raises(InvalidSetting, match=option):
        app._task_from_fun(_body, name="refused.task", base=LeasedTask)


@pytest.mark.parametrize("option", ["task_acks_late", "task_reject_on_worker_lost"])
def test_celerys_own_defaults_do_not_matter(option: str) -> None:
    """Case 27: they are off unless somebody turns them on, and mean plain tasks."""
    app = Celery("refused", set_as_current=False)
    app.conf[option] = False
    task = app._task_from_fun(_body, name="refused.task", base=LeasedTask)
    assert task.acks_late
    assert task.reject_on_worker_lost


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"lease_graze": 3}, "did you mean lease_grace?"),
        ({"lease_duration": "long"}, "lease_duration = 'long'"),
        ({"lease_duration": 2, "lease_heartbeat": 1.5}, "lease_heartbeat = 1.5 s"),
        ({"worker_deduplicate_successful_tasks": True}, "worker_deduplicate_successful_tasks"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_at_start(
    shop: Shop, settings: dict[str, object], said: str
) -> None:
    """Wrong types, unknown keys with the nearest name, impossible combinations."""
    worker = shop.launch("w1", **settings)
    assert worker.ended() != 0
    assert said in worker.log
    assert "InvalidSetting" in worker.log


@pytest.mark.smoke
def test_without_leases_enabled_a_leased_task_is_a_plain_one(shop: Shop) -> None:
    """The first step of a roll-out: no row, no event, Celery's own way with the message."""
    shop.start("w1", slots=2, lease_enabled=False)
    run = shop.send("hold_plainly", "go", link=shop.signature("after"))
    failing = shop.send("leased_fail", 1, link_error=shop.signature("mourn"))
    assert shop.outcome(failing)[0] == "FAILURE"
    shop.noted("mourn")
    shop.open("go")
    assert shop.outcome(run) == ("SUCCESS", "done")
    shop.noted("after")
    shop.empty()
    assert shop.store.list_runs() == []
    assert shop.told(run) == ["STARTED", "SUCCESS"]
    assert [one.get("lease_epoch") for one in shop.sent("hold_plainly")] == [None]


@pytest.mark.parametrize("database", ["empty_postgresql"])
def test_missing_tables_are_an_error_that_names_the_command(shop: Shop) -> None:
    """PostgreSQL tables are made by a person; SQLite's make themselves."""
    worker = shop.launch("w1")
    worker.logged("celery -A yourapp lease init-db")
    assert worker.ended() != 0
