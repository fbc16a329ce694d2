"""Celery's ``replace`` under a lease: the replacement is the run's outcome, sent while settling."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import celery
import pytest
from celery import Celery, chain, chord, group
from celery.exceptions import Ignore, Reject

from tests.integration.comparison import KINDS, SHOPS, CanvasShop, Form, Tasks, known, opened, play
from tests.integration.guest import Guest, app_of, leased

#: What takes a task's place; the first task that it ends with, and all of its tasks.
PLACES: Mapping[str, Callable[[Tasks], Any]] = {
    "task": lambda t: t("b", 1),
    "chain": lambda t: chain(t("b", 1), t("c"), t("d")),
    "group": lambda t: group(t("b", 1), t("c")),
    "chord": lambda t: chord([t("b", 1), t("c")], t("d")),
    "chord in a chain": lambda t: chain(t("b"), group(t("c"), t("d")), t("e"), t("f")),
    "plain task": lambda t: t("b", 1, kind="plain"),
}


def _alone(place: Callable[[Tasks], Any]) -> Callable[[Tasks], Any]:
    return lambda t: t("a", task="swap", other=place(t), link=[t("linked")])


def _in_chain(place: Callable[[Tasks], Any]) -> Callable[[Tasks], Any]:
    return lambda t: chain(t("x"), t("a", task="swap", other=place(t)), t("y"), t("z"))


def _in_chord(place: Callable[[Tasks], Any]) -> Callable[[Tasks], Any]:
    return lambda t: chord([t("a", task="swap", other=place(t)), t("w")], t("body"))


def _twice(t: Tasks) -> Any:
    return t("a", task="swap", other=t("b", task="swap", other=t("c")), link=[t("linked")])


def _between(place: Callable[[Tasks], Any]) -> Callable[[Tasks], Any]:
    """A leased task, a plain one in its place, and leased ones in the place of that."""

    def make(t: Tasks) -> Any:
        plain = t("p", task="swap", kind="plain", other=place(t))
        return t("a", task="swap", other=plain, link=[t("linked")])

    return make


def _by_a_failure(t: Tasks) -> Any:
    other = chain(t("b"), t("c", task="broken"))
    return chord([t("a", task="swap", other=other), t("w")], t("body", link_error=[t("m")]))


FORMS: Mapping[str, Form] = {
    **{
        # Before, callbacks of the replaced task were called twice, or never.
        f"by a {name}": Form(_alone(place), ("linked",), since=(5, 7 if "chain" in name else 4))
        for name, place in PLACES.items()
    },
    **{f"in a chain by a {name}": Form(_in_chain(place), "z") for name, place in PLACES.items()},
    **{
        # Before, the results of such a group came in any order.
        f"in a chord by a {name}": Form(
            _in_chord(place), ["body"], since=(5, 7 if name in {"group", "chord"} else 4)
        )
        for name, place in PLACES.items()
    },
    "twice": Form(_twice, ("linked",)),
    **{
        f"by a plain task and then a {name}": Form(
            _between(place), ("linked",), since=(5, 7 if "chain" in name else 4)
        )
        for name, place in PLACES.items()
    },
    "by a failure": Form(_by_a_failure, "m"),
}


@pytest.fixture(scope="module", params=list(SHOPS))
def played(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Every form once in both kinds, with this result backend."""
    folder: Path = tmp_path_factory.mktemp(f"replace-{request.param}")
    with opened(request.param, folder) as shop:
        shop.start("w1", slots=3, worker_prefetch_multiplier=4)
        return play(shop, FORMS)


@pytest.mark.smoke
@pytest.mark.parametrize("form", known(FORMS))
def test_a_leased_task_is_replaced_as_a_plain_one_is(
    played: Mapping[str, Mapping[str, Any]], form: str
) -> None:
    """Alone, in a chain and in a chord; what follows gets the replacement's result."""
    plain, leased_ = (played[form][kind] for kind in KINDS)
    ran = {note["label"] for note in plain["tasks"]}
    assert ran >= set(FORMS[form].ends), "the plain canvas did not end"
    for what, seen in plain.items():
        assert leased_[what] == seen, what


# -- killed around the commit -----------------------------------------------------------------


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[CanvasShop]:
    """A shop of this test, with results on the database."""
    with opened("database", tmp_path) as shop:
        yield shop


def _replaced(shop: CanvasShop, gate: str = "") -> tuple[Tasks, str]:
    """Send a task that a group and what follows it take the place of; its id."""
    tasks = Tasks(shop, "leased", "")
    other = chain(group(tasks("b"), tasks("c")), tasks("d"))
    result = tasks("a", task="swap", other=other, gate=gate).apply_async()
    return tasks, str(result.id)


def _ran_once(shop: CanvasShop, tasks: Tasks, run: str) -> None:
    """The group and its body ran once, and the result is that of the last task."""
    assert shop.outcome(run)[0] == "SUCCESS"
    shop.settled(run)
    shop.empty()
    assert {label: len(shop.of_label(tasks.name(label))) for label in "bcd"} == dict.fromkeys(
        "bcd", 1
    )


@pytest.mark.parametrize(
    ("point", "bodies", "sendings"),
    [("before complete", 2, 1), ("after complete", 1, 1), ("before acknowledge", 1, 2)],
)
def test_a_worker_killed_around_a_replacement_neither_loses_nor_doubles_it(
    shop: CanvasShop, point: str, bodies: int, sendings: int
) -> None:
    """Before the commit the body is redone; after it a replay sends the same tasks."""
    victim = shop.launch("w1", crash=f"worker: {point}")
    tasks, run = _replaced(shop)
    assert victim.ended() != 0
    shop.start("w2", slots=2)
    _ran_once(shop, tasks, run)
    assert len(shop.of_label(tasks.name("a"))) == bodies
    members = [one for one in shop.sent("leased_node") if one["group"]]
    assert len(members) == 2 * sendings
    # One chord, however often it was sent.
    assert len({one["group"] for one in members}) == 1
    assert len({one["id"] for one in members}) == 2


def test_a_stale_holder_sends_no_replacement(shop: CanvasShop) -> None:
    """Paused in its body, it comes back when the run has been replaced by its successor."""
    shop.start("w1", "w2")
    tasks, run = _replaced(shop, gate="go")
    first = shop.of(shop.labelled(tasks.name("a")) | {"node": shop.run(run)["node"]})
    shop.pause(first)
    shop.labelled(tasks.name("a"), times=2)
    shop.open("go")
    _ran_once(shop, tasks, run)
    sent = len(shop.sent("leased_node"))
    first.cont()
    first.logged("lease lost")
    shop.empty()
    assert len(shop.sent("leased_node")) == sent


def test_the_broker_is_away_while_a_replacement_is_sent(shop: CanvasShop) -> None:
    """The run has ended as replaced; a replay sends what the broker did not take."""
    shop.start("w1", slots=2)
    tasks, run = _replaced(shop, gate="go")
    shop.labelled(tasks.name("a"))
    down = shop.sqs.faults.fail("SendMessage", times=None)
    shop.open("go")
    shop.until_state(run, "succeeded")
    shop.event(run, "settling_deferred")
    assert down.fired
    shop.sqs.faults.clear()
    _ran_once(shop, tasks, run)
    assert shop.run(run)["replays"] >= 1
    assert shop.run(run)["reason"] == "replaced"
    assert len(shop.of_label(tasks.name("a"))) == 1
    assert "FAILURE" not in shop.told(run)


# -- one delivery after the other -------------------------------------------------------------


def _swap(self: Any, other: Any, swallow: bool = False) -> Any:
    """Be replaced; or catch what Celery raises for it."""
    try:
        return self.replace(self.app.signature(other))
    except Ignore:
        if swallow:
            return "not replaced"
        raise


def _add(*numbers: int) -> int:
    """The sum."""
    return sum(numbers)


def _app(folder: Path) -> tuple[Celery, Any, Any]:
    app = app_of(folder)
    return app, leased(app, name="swap", bind=True)(_swap), leased(app, name="add")(_add)


def test_a_body_that_swallows_the_end_is_replaced_all_the_same(tmp_path: Path) -> None:
    app, swap, add = _app(tmp_path)
    guest = Guest(app)
    result = swap.delay(add.s(1, 2), swallow=True)
    guest.deliver()
    assert guest.row(result.id)["reason"] == "replaced"
    guest.deliver()
    assert result.get(timeout=5) == 3
    assert guest.message() is None


def test_a_replacement_that_cannot_be_stored_fails_the_run(tmp_path: Path) -> None:
    app, _, add = _app(tmp_path)

    def swap_for_an_object(self: Any) -> Any:
        return self.replace(add.s(object()))

    task = leased(app, name="t", bind=True)(swap_for_an_object)
    guest = Guest(app)
    result = task.delay()
    guest.deliver()
    assert guest.row(result.id)["state"] == "failed"
    assert result.state == "FAILURE"
    assert guest.message() is None


def test_arguments_in_a_serializer_of_their_own_are_replaced_in_it(tmp_path: Path) -> None:
    app = app_of(tmp_path, accept_content=["json", "pickle"])

    def size(raw: set[int]) -> int:
        return len(raw)

    def swap_for_a_set(self: Any) -> Any:
        return self.replace(app.signature("size", ({1, 2},), serializer="pickle"))

    leased(app, name="size")(size)
    task = leased(app, name="t", bind=True)(swap_for_a_set)
    guest = Guest(app)
    result = task.delay()
    guest.deliver()
    message = guest.message()
    message.accept = {message.content_type}
    assert message.content_type == "application/x-python-serialize"
    guest.deliver(message)
    assert result.get(timeout=5) == 2


def test_a_task_that_runs_eagerly_is_replaced_in_place(tmp_path: Path) -> None:
    """Both are runs of their own, though they share the task's id."""
    app, swap, add = _app(tmp_path)
    guest = Guest(app)
    result = swap.apply((add.s(1, 2) | add.s(3),), task_id="eager")
    assert (result.state, result.get()) == ("SUCCESS", 6)
    ended = [(row["task"], row["state"]) for row in guest.store.list_runs()]
    assert sorted(ended) == [("add", "succeeded")] * 2 + [("swap", "succeeded")]


def test_a_replacement_that_was_committed_is_sent_by_the_replay_alone(tmp_path: Path) -> None:
    """The holder could not send it, its message is gone: the reaper's trigger does."""
    app, swap, add = _app(tmp_path)
    guest = Guest(app)
    result = swap.delay(add.s(1, 2) | add.s(3))
    message = guest.message()
    away = app.amqp.send_task_message

    def unreachable(*_: Any, **__: Any) -> Any:
        raise ConnectionError("the broker is away")

    app.amqp.__dict__["send_task_message"] = unreachable
    guest.deliver(message)
    app.amqp.__dict__["send_task_message"] = away
    assert guest.message() is None
    assert guest.row(result.id)["reason"] == "replaced"
    assert guest.row(result.id)["settled_at"] is None
    guest.age(120)
    guest.reap()
    guest.deliver()
    assert guest.row(result.id)["settled_at"] is not None
    assert len([row for row in guest.store.list_runs() if row["task"] == "add"]) == 0
    guest.deliver()
    guest.deliver()
    assert result.get(timeout=5) == 6


# -- the ends that a body may choose ----------------------------------------------------------


@pytest.mark.parametrize(
    ("end", "state"),
    [(Ignore("enough"), "succeeded"), (Reject("again", requeue=True), "ready")],
)
def test_a_body_that_ends_itself_tells_nobody(tmp_path: Path, end: Exception, state: str) -> None:
    """``Ignore`` and ``Reject``: no result, no callbacks; given back, it is sent anew."""
    app, _, add = _app(tmp_path)

    def ends() -> None:
        raise end

    task = leased(app, name="t")(ends)
    guest = Guest(app)
    result = task.apply_async(link=[add.s(1)], link_error=[add.si(1)])
    guest.deliver()
    row = guest.row(result.id)
    assert row["state"] == state
    assert (row["settled_at"] is None) == (state == "ready")
    assert result.state == "PENDING"
    left = [(one.headers["id"], one.headers["lease_epoch"]) for one in iter(guest.message, None)]
    assert left == ([(result.id, 1)] if state == "ready" else [])


def test_a_body_that_rejects_its_message_for_good_fails(tmp_path: Path) -> None:
    """No callback; whether anybody is told of the failure is Celery's, and its version's."""
    app, _, add = _app(tmp_path)

    def ends() -> None:
        raise Reject("never", requeue=False)

    task = leased(app, name="t")(ends)
    guest = Guest(app)
    result = task.apply_async(link=[add.s(1)])
    guest.deliver()
    assert guest.fates == ["reject False"]
    assert guest.row(result.id)["state"] == "failed"
    assert guest.row(result.id)["settled_at"] is not None
    assert result.state == ("FAILURE" if celery.VERSION >= (5, 7) else "PENDING")
    assert guest.message() is None
