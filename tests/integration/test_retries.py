"""Celery's retries under a lease: a postponement of the run, and for everybody else a retry."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from celery import chain, chord
from celery.exceptions import MaxRetriesExceededError

from tests.integration.comparison import KINDS, CanvasShop, Form, Tasks, known, opened, play
from tests.integration.guest import Guest, app_of, leased, replaced


def _tries(t: Tasks, how: str, failures: int, **options: Any) -> Any:
    return t("a", 1, task="tries", how=how, failures=failures, **options)


def _around(t: Tasks) -> dict[str, Any]:
    """What may follow: exactly one of them does."""
    return {"link": [t("linked")], "link_error": [t("m", task="errback")]}


def _with_options(t: Tasks) -> Any:
    known: dict[str, Any] = {
        "shadow": "another.name",
        "priority": 3,
        "headers": {"x-tenant": "7"},
        "soft_time_limit": 50,
        "time_limit": 60,
    }
    one = _tries(t, "", 2, **known)
    one.stamp(order="1234")
    return one


FORMS: Mapping[str, Form] = {
    "retry": Form(lambda t: _tries(t, "", 2, **_around(t)), ("a", "linked")),
    "with an error": Form(lambda t: _tries(t, "exc", 1, **_around(t)), ("a", "linked")),
    "used up": Form(lambda t: _tries(t, "", 9, **_around(t)), "am"),
    "used up with an error": Form(lambda t: _tries(t, "exc", 9, **_around(t)), "am"),
    "more often": Form(lambda t: _tries(t, "often", 4, **_around(t)), ("a", "linked")),
    "other arguments": Form(lambda t: _tries(t, "args", 2, **_around(t)), ("a", "linked")),
    "another queue": Form(lambda t: _tries(t, "queue", 1, **_around(t)), ("a", "linked")),
    "eta": Form(lambda t: _tries(t, "eta", 1, **_around(t)), ("a", "linked")),
    "options": Form(_with_options, "a"),
    "ignored result": Form(
        lambda t: _tries(t, "", 1, ignore_result=True), "a", waits=False, since=(5, 7)
    ),
    "automatic": Form(
        lambda t: t("a", task="automatic", failures=2, **_around(t)), ("a", "linked")
    ),
    "automatic, used up": Form(lambda t: t("a", task="automatic", failures=9, **_around(t)), "am"),
    "not automatic": Form(
        lambda t: t("a", task="automatic", failures=9, how="key", **_around(t)), "am"
    ),
    "backoff": Form(lambda t: t("a", task="slower", failures=2), "a"),
    "a failure": Form(lambda t: _tries(t, "raise", 1, **_around(t)), "am"),
    "expected": Form(lambda t: t("a", task="expected", **_around(t)), "am"),
    "in a chain": Form(lambda t: chain(t("x"), _tries(t, "", 2), t("y")), "y"),
    "in a chord": Form(lambda t: chord([_tries(t, "", 2), t("b")], t("body")), ("body",)),
    "used up in a chord": Form(
        lambda t: chord([_tries(t, "", 9), t("b")], t("body", link_error=[t("m", task="errback")])),
        "abm",
    ),
    "replaced in between": Form(
        lambda t: t("s", task="swap", other=_tries(t, "", 1), link=[t("linked")]), ("a", "linked")
    ),
}


@pytest.fixture(scope="module", params=["database", "redis"])
def played(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Every form once in both kinds; with what was seen, the notes and the log."""
    folder: Path = tmp_path_factory.mktemp(f"retries-{request.param}")
    with opened(request.param, folder) as shop:
        (worker,) = shop.start("w1", slots=3, queue="celery,aside", worker_prefetch_multiplier=4)
        seen = play(shop, FORMS)
        return seen | {"nodes": shop.nodes, "log": worker.log}


@pytest.mark.smoke
@pytest.mark.parametrize("form", known(FORMS))
def test_a_leased_task_is_retried_as_a_plain_one_is(played: Mapping[str, Any], form: str) -> None:
    """States, arguments, counts, hooks, callbacks and errors are the same."""
    plain, leased_ = (played[form][kind] for kind in KINDS)
    ran = {note["label"] for note in plain["tasks"]}
    assert ran >= set(FORMS[form].ends), "the plain task did not end"
    for what, seen in plain.items():
        assert leased_[what] == seen, what


def test_a_retry_is_not_before_its_time(played: Mapping[str, Any]) -> None:
    for kind in KINDS:
        at = [n["at"] for n in played["nodes"] if n["label"] == f"{kind}/backoff/a"]
        first, second = at[1] - at[0], at[2] - at[1]
        assert first >= 0.9
        assert second >= 1.9


def test_an_expected_error_is_logged_as_one(played: Mapping[str, Any]) -> None:
    """``throws``: no traceback, and not as an error."""
    for kind in KINDS:
        line = re.search(rf"\[.*: (\w+)/.*\] Task shop.{kind}_expected\[.*raised.*", played["log"])
        assert line is not None
        assert (line[1], "expected: KeyError" in line[0]) == ("INFO", True)


# -- what only a lease has --------------------------------------------------------------------


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[CanvasShop]:
    """A shop of this test."""
    with opened("database", tmp_path) as shop:
        yield shop


def test_crashes_and_retries_are_counted_apart(shop: CanvasShop) -> None:
    """Two crashes charge two attempts and no retry; each try goes on from the checkpoint."""
    shop.start("w1")
    run = shop.send("climbs", 3, 1)
    assert shop.outcome(run) == ("SUCCESS", 3)
    shop.settled(run)
    seen = [(n["step"], n["epoch"], n["attempt"], n["retries"]) for n in shop.notes("climb")]
    assert seen == [
        (0, 1, 1, 0),
        (1, 2, 1, 1),
        (1, 3, 2, 1),
        (1, 4, 3, 1),
        (2, 5, 1, 2),
        (3, 6, 1, 3),
    ]
    assert shop.run(run)["recoveries"] == 2
    told = shop.told(run)
    assert told.count("RETRY") == 3
    assert "FAILURE" not in told


def test_a_retry_that_is_not_thrown_ends_the_execution_all_the_same(shop: CanvasShop) -> None:
    """Its return value is dropped: one run has one outcome, and one callback."""
    shop.start("w1")
    t = Tasks(shop, "leased", "")
    run = t("a", task="tries", how="quietly", failures=1, link=[t("linked")]).apply_async().id
    assert shop.outcome(run) == ("SUCCESS", [t.name("a")])
    shop.labelled(t.name("linked"))
    shop.empty()
    assert shop.told(run) == ["STARTED", "RETRY", "STARTED", "SUCCESS"]
    assert len(shop.sent("leased_node")) == 1


def _again(self: Any, tries: int) -> int:
    """Ask for another try, so many times."""
    if self.request.retries < tries:
        raise self.retry(countdown=0, max_retries=5)
    return int(self.request.retries)


def test_the_message_of_a_retry_is_sent_after_the_commit(tmp_path: Path) -> None:
    app = app_of(tmp_path)
    task = leased(app, name="again", bind=True)(_again)
    guest = Guest(app)
    result = task.delay(1)
    commit = guest.store.postpone
    waiting = []

    def postpone(*args: Any) -> int:
        waiting.append(guest.message())
        epoch = commit(*args)
        waiting.append(guest.message())
        return epoch

    with replaced(guest.store, "postpone", postpone):
        guest.deliver()
    assert waiting == [None, None]
    message = guest.message()
    assert message.headers["lease_epoch"] == 1
    guest.deliver(message)
    assert result.get(timeout=5) == 1


def test_a_holder_that_has_lost_its_run_publishes_no_retry(tmp_path: Path) -> None:
    """And tells nobody of one: the run is its successor's."""
    app = app_of(tmp_path)
    hooks = []

    def again(self: Any) -> Any:
        guest.store.revoke(self.request.id)
        raise self.retry(countdown=0)

    task = leased(app, name="again", bind=True, on_retry=lambda *_: hooks.append("on_retry"))(again)
    guest = Guest(app)
    result = task.delay()
    guest.deliver()
    assert guest.message() is None
    assert hooks == []
    assert result.state != "RETRY"


def test_a_retry_whose_arguments_cannot_be_stored_fails_the_run(tmp_path: Path) -> None:
    """As in Celery, where they cannot be sent."""
    app = app_of(tmp_path)

    def again(self: Any, what: Any) -> Any:
        raise self.retry(args=(object(),), countdown=0)

    task = leased(app, name="again", bind=True)(again)
    guest = Guest(app)
    result = task.delay(1)
    guest.deliver()
    assert guest.row(result.id)["state"] == "failed"
    assert guest.message() is None


def test_a_used_up_retry_of_an_eager_task_is_its_error(tmp_path: Path) -> None:
    app = app_of(tmp_path)
    task = leased(app, name="again", bind=True)(_again)
    guest = Guest(app)
    assert task.apply((2,)).get() == 2
    result = task.apply((9,))
    assert isinstance(result.result, MaxRetriesExceededError)
    ended = {row["run_id"]: row["state"] for row in guest.store.list_runs()}
    assert sorted(ended.values()) == ["failed", "succeeded"]
