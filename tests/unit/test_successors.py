"""Which ids the tasks have that follow a run: the same ones, however often they are sent."""

from __future__ import annotations

import json
import uuid
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery, chain, chord, group, signature

from celery_lease.successors import (
    fix_ids,
    fix_successors,
    name_member,
    name_replacement,
    steady_ids,
)
from celery_lease.trigger import RUN_HEADER


@pytest.fixture
def app() -> Celery:
    """An app whose messages stay in this process."""
    app = Celery(
        f"successors-{uuid.uuid4().hex}",
        broker="memory://",
        backend="cache+memory://",
        set_as_current=False,
    )
    app.conf.task_default_queue = f"queue-{uuid.uuid4().hex}"

    @app.task(name="t", shared=False)
    def t(*args: Any) -> Any:
        """Anything."""

    return app


def _sent(app: Celery, callback: Any) -> list[Any]:
    """Send a callback as a worker does; ids and groups of its messages, with all within."""
    signature(json.loads(json.dumps(callback)), app=app).apply_async((1,))
    messages = []
    channel = app.connection_for_read().channel()
    while message := channel.basic_get(app.conf.task_default_queue):
        _, _, embed = message.payload
        embed["chord"] and embed["chord"]["options"].pop("reply_to", None)
        names = ("id", "group", "group_index", "parent_id")
        messages.append(([message.headers[name] for name in names], embed))
    return messages


def _nested(t: Callable[[], Any]) -> dict[str, Any]:
    """Every form that may follow a run; none has an id yet."""
    linked = t()
    linked.link(t())
    linked.link_error(chain(t(), group(t(), t()), t()))
    return {
        "task": t(),
        "linked": linked,
        "chain": chain(t(), t(), t()),
        "group": group(t(), chain(t(), t())),
        "chord": chord([t(), t()], t()),
        "group in a chain": chain(t(), group(t(), t()), t()),
        "chain that begins with a group": chain(group(t(), t()), t()),
        "two groups in a chain": chain(group(t(), t()), group(t(), t()), t()),
        "chain that ends with a group": chain(t(), group(t(), t())),
        "chord in a chain": chain(t(), chord([t(), t()], t()), t()),
        "chord of chains": chord([chain(t(), t()), chain(t(), group(t(), t()), t())], t()),
        "chord of chords": chord([chord([t(), t()], t()), t()], t()),
        "chord before a chain": chord([t(), t()], chain(t(), group(t(), t()), t())),
        "chord before a group": chord([t(), t()], group(t(), t())),
        "group of chords": group(chord([t(), t()], t()), chain(t(), chord([t()], t()))),
    }


@pytest.mark.parametrize("form", [*_nested(lambda: signature("t"))])
def test_what_is_sent_twice_is_the_same_both_times(app: Celery, form: str) -> None:
    """Ids of tasks, of groups, and of all that they carry for later."""
    callback = _nested(lambda: app.signature("t"))[form]
    sendings = []
    for run in ("run-1", "run-1", "run-2"):
        copy = json.loads(json.dumps(callback))
        fix_ids(run, copy, "link")
        with steady_ids(run):
            sendings.append(_sent(app, copy))
    first, again, other = sendings
    assert first
    assert first == again
    of_run = [{headers[0] for headers, _ in sending} for sending in (first, other)]
    assert not of_run[0] & of_run[1]


def test_ids_that_are_there_stay() -> None:
    given = [{"task": "a", "options": {"task_id": "mine"}}, {"task": "b"}]
    fix_ids("run-1", given, "link")
    assert given[0]["options"] == {"task_id": "mine"}
    assert given[1]["options"]["task_id"]  # type: ignore[index]


def test_the_ids_of_different_places_differ() -> None:
    def request() -> Any:
        one: dict[str, Any] = {"task": "t", "options": {"link": [{"task": "t"}]}}
        parts = (json.loads(json.dumps([one, one])) for _ in range(3))
        callbacks, errbacks, steps = parts
        return SimpleNamespace(
            callbacks=callbacks, errbacks=errbacks, chain=steps, chord=one, group="g"
        )

    asked = request()
    fix_successors("run-1", asked)
    ids = []
    for one in (*asked.callbacks, *asked.errbacks, *asked.chain, asked.chord):
        ids += [one["options"]["task_id"], one["options"]["link"][0]["options"]["task_id"]]
    assert len(ids) == len(set(ids)) == 14


def test_the_body_of_a_chord_has_the_same_parts_for_every_member() -> None:
    def told_by(run: str) -> Any:
        body = {"task": "t", "options": {"task_id": "body", "link": [{"task": "u"}]}}
        asked = SimpleNamespace(callbacks=None, errbacks=None, chain=None, chord=body, group="g")
        fix_successors(run, asked)
        return body

    assert told_by("run-1") == told_by("run-2")


def test_outside_a_sending_ids_are_random() -> None:
    with steady_ids("run-1"):
        inside = group(signature("t")).freeze().id
    assert inside != group(signature("t")).freeze().id


def test_only_the_task_that_keeps_the_id_is_named_after_the_replaced_run(app: Celery) -> None:
    steps = chain(app.signature("t"), app.signature("t"))
    steps.freeze("the-task")
    name_replacement("run-1", "the-task", steps)
    first, last = steps.tasks
    assert "headers" not in first.options
    named = last.options["headers"][RUN_HEADER]
    other = app.signature("t", task_id="the-task", headers={"mine": 1})
    name_replacement("run-1", "the-task", other)
    assert other.options["headers"] == {"mine": 1, RUN_HEADER: named}


def test_a_member_that_is_added_again_is_the_same_one(app: Celery) -> None:
    """A redone body adds it again; another one, or the same a second time, is one more."""

    def added(*arguments: Any) -> list[str]:
        counted: Counter[str] = Counter()
        ids = []
        for argument in arguments:
            member = app.signature("t", (argument,))
            name_member("run-1", member, counted)
            ids.append(member.options["task_id"])
        return ids

    first = added(1, 2, 2)
    assert len(set(first)) == 3
    assert added(1, 2, 2) == first
    # It goes on from a checkpoint behind the first.
    assert added(2) == first[1:2]
    assert added(3)[0] not in first
