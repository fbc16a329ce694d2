"""Canvases of leased tasks: as Celery has them, with ids that stay.

Each form is played with plain tasks and with leased ones by the same worker, and all that can
be seen has to be equal: what bodies are given, parents, roots and groups, headers, states in
their order, results and errors.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from billiard.einfo import ExceptionInfo
from billiard.exceptions import TimeLimitExceeded
from celery import chain, chord, group
from celery.canvas import StampingVisitor
from kombu.exceptions import OperationalError

from celery_lease import LeasePolicy
from celery_lease.store import Grant
from tests.integration.comparison import KINDS, SHOPS, Form, Tasks, known, opened, play
from tests.integration.guest import Guest, app_of, leased
from tests.workers import Shop


class Marks(StampingVisitor):
    """A stamp of its own for each kind of signature."""

    def on_signature(self, sig: Any, **headers: Any) -> dict[str, Any]:
        return {"by": sig.kwargs["label"].rpartition("/")[2]}

    def on_callback(self, callback: Any, **headers: Any) -> dict[str, Any]:
        return {"as": "callback"}


def _linked(t: Tasks) -> Any:
    links = [t("b"), t("c", 7), group(t("d"), t("e")), chain(t("f"), t("g"))]
    return t("a", 1, link=links)


def _link_error(t: Tasks) -> Any:
    inline = t.shop.client.signature("shop.inline")
    errbacks = [t("m", task="errback"), t("n", task="errback"), inline]
    return t("a", 1, task="broken", link_error=errbacks, link=[t("never")])


def _failing_chain(t: Tasks) -> Any:
    steps = chain(t("a", 1), t("b", task="broken"), t("c"), t("d"))
    return steps.on_error(t("m", task="errback")) and steps


def _failing_chord(t: Tasks) -> Any:
    body = t("body", link_error=[t("m", task="errback")])
    return chord([t("a", 1), t("b", task="broken")], body)


def _failing_step_of_a_chord(t: Tasks) -> Any:
    body = t("body", link_error=[t("m", task="errback")])
    return chord([chain(t("a", 1), t("b", task="broken"), t("c")), t("d")], body)


def _options(t: Tasks) -> Any:
    known: dict[str, Any] = {
        "shadow": "another.name",
        "priority": 3,
        "headers": {"x-tenant": "7"},
        "soft_time_limit": 50,
        "time_limit": 60,
        "queue": "celery",
    }
    return chain(t("a", **known), t("b", priority=5, headers={"x-step": "b"}), t("c", shadow="s"))


def _stamped(t: Tasks) -> Any:
    canvas = chain(t("a", link=[t("linked")]), group(t("b"), t("c")), t("d"))
    canvas.stamp(visitor=Marks())
    canvas.stamp(order="1234", stamped_headers=["order"])
    return canvas


FORMS: Mapping[str, Form] = {
    "link": Form(_linked, "bcdeg"),
    "link_error": Form(_link_error, "mn"),
    "chain": Form(lambda t: chain(t("a", 1), t("b", 2), t("c")), "c"),
    "failing chain": Form(_failing_chain, "m"),
    "group": Form(lambda t: group(t("a"), t("b"), t("c")), "abc", waits=False),
    "chord": Form(lambda t: chord([t("a"), t("b")], t("c")), "c"),
    "failing chord": Form(_failing_chord, "abm"),
    "failing step of a chord": Form(_failing_step_of_a_chord, "bdm"),
    "group in chain": Form(lambda t: chain(t("a"), group(t("b"), t("c")), t("d")), "d"),
    "group at the end": Form(lambda t: chain(t("a"), group(t("b"), t("c"))), "bc", waits=False),
    "two groups": Form(lambda t: chain(group(t("a"), t("b")), group(t("c"), t("d")), t("e")), "e"),
    "chain in group": Form(
        lambda t: group(chain(t("a"), t("b")), chain(t("c"), t("d"))), "bd", waits=False
    ),
    "chord in chain": Form(lambda t: chain(t("a"), chord([t("b"), t("c")], t("d")), t("e")), "e"),
    "chord of chains": Form(
        lambda t: chord([chain(t("a"), t("b")), chain(t("c"), t("d"))], t("e")), "e"
    ),
    "chord in chord": Form(lambda t: chord([chord([t("a"), t("b")], t("c")), t("d")], t("e")), "e"),
    "chord with a chain": Form(lambda t: chord([t("a"), t("b")], chain(t("c"), t("d"))), "d"),
    "chord with a group": Form(
        lambda t: chord([t("a"), t("b")], group(t("c"), t("d"))), "cd", waits=False
    ),
    "ignore_result": Form(
        lambda t: chain(t("a", ignore_result=True), t("b", ignore_result=True)),
        "b",
        waits=False,
        since=(5, 7),
    ),
    "ignored": Form(
        lambda t: t("a", task="ends", how="ignore", link=[t("never")]), "a", waits=False
    ),
    "options": Form(_options, "c"),
    "stamps": Form(_stamped, ("linked", "d")),
}


@pytest.fixture(scope="module", params=list(SHOPS))
def played(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Every form once in both kinds, with this result backend."""
    folder: Path = tmp_path_factory.mktemp(f"canvas-{request.param}")
    with opened(request.param, folder) as shop:
        shop.start("w1", slots=3, worker_prefetch_multiplier=4)
        return play(shop, FORMS)


@pytest.mark.smoke
@pytest.mark.parametrize("form", known(FORMS))
def test_a_canvas_of_leased_tasks_does_what_one_of_plain_tasks_does(
    played: Mapping[str, Mapping[str, Any]], form: str
) -> None:
    """Everything that can be seen is the same."""
    plain, leased = (played[form][kind] for kind in KINDS)
    ran = {note["label"] for note in plain["tasks"]}
    assert ran >= set(FORMS[form].ends), "the plain canvas did not end"
    for what, seen in plain.items():
        assert leased[what] == seen, what


def test_the_same_callbacks_are_sent_again_after_a_crash(shop: Shop) -> None:
    """Ids come from the run: after a replay everybody sees the tasks it has seen before."""
    victim = shop.launch("w1", crash="worker: before acknowledge")
    chain = shop.signature("leased_add", 1, 2) | shop.signature("after", "end")
    run = chain.apply_async(
        link=shop.signature("after", "linked"),
    )
    first_run = run.parent.id
    assert victim.ended() != 0
    shop.start("w2")
    assert shop.settled(first_run)["replays"] == 1
    shop.outcome(run.id)
    shop.noted("after", times=2)
    shop.empty()
    once = {one["id"] for one in shop.sent("after")}
    assert run.id in once
    # The step of the chain, sent twice under its id, and the callback at its end.
    assert {note["run"] for note in shop.notes("after")} <= once
    steps = [one for one in shop.sent("after") if one["id"] == run.id]
    assert len(steps) == 2
    assert shop.bodies(first_run) == 1


def test_all_that_follows_is_sent_again_and_runs_once(tmp_path: Path) -> None:
    """Groups, chains and chords as callbacks; the worker died before it could settle."""
    with opened("redis", tmp_path) as shop:
        victim = shop.launch("w1", crash="worker: before acknowledge")
        t = Tasks(shop, "leased", "")
        links = [
            group(t("b"), chain(t("c"), t("d"))),
            chain(t("e"), group(t("f"), t("g")), t("h")),
            chord([t("i"), t("j")], group(t("k"), t("l"))),
            chain(group(t("m"), t("n")), chord([t("o"), t("p")], t("q")), t("r")),
        ]
        run = t("a", link=links).apply_async().id
        assert victim.ended() != 0
        shop.start("w2", slots=2)
        for last in "bdhklr":
            shop.labelled(t.name(last))
        shop.empty()
        assert shop.settled(run)["replays"] == 1
        entered = {label: len(shop.of_label(t.name(label))) for label in "abcdefghijklmnopqr"}
        assert entered == dict.fromkeys("abcdefghijklmnopqr", 1)


def _broken() -> None:
    raise ValueError("no")


def _mourn(task_id: str) -> str:
    return task_id


#: What ``_add`` was called with.
_added: list[tuple[int, ...]] = []


def _add(*numbers: int) -> int:
    _added.append(tuple(sorted(numbers)))
    return sum(numbers)


@pytest.mark.parametrize("by_its_parent", [False, True])
def test_the_same_errbacks_are_sent_again(tmp_path: Path, by_its_parent: bool) -> None:
    """By a replay, whether the child or its parent process had told of the failure."""
    app = app_of(tmp_path)
    task = leased(app, name="broken")(_broken)
    mourn = leased(app, name="mourn")(_mourn)
    guest = Guest(app)
    follows = chain(group(mourn.si("x"), mourn.si("y")), mourn.si("z"))
    result = task.apply_async(link_error=[mourn.s(), mourn.signature(link=[follows])])
    request = guest.request(guest.message())
    if by_its_parent:
        grant = guest.store.claim(
            result.id,
            0,
            request._holder,
            task="broken",
            terms=request._terms,
            envelope=request._parent.envelope(),
        )
        assert isinstance(grant, Grant)
        try:
            raise TimeLimitExceeded(1)
        except TimeLimitExceeded:
            request.on_failure(ExceptionInfo())
    else:
        request.execute_using_pool(guest.pool)
    first = list(iter(guest.message, None))
    guest.side.keeper.take_delivered()  # the worker dies before it can settle
    guest.age(120)
    guest.reap()
    guest.deliver()
    again = list(iter(guest.message, None))
    assert guest.row(result.id)["replays"] == 1
    assert len(first) == 2
    known, repeated = ([one.headers["id"] for one in sent] for sent in (first, again))
    assert known == repeated
    links, repeated = ([one.payload[2]["callbacks"] for one in sent] for sent in (first, again))
    assert _ids(links) == _ids(repeated)
    assert len(_ids(links)) == 4


def _ids(value: Any) -> set[str]:
    """Every id of a task or group in nested signatures."""
    if isinstance(value, Mapping):
        own = {value[name] for name in ("task_id", "group_id") if value.get(name)}
        return own.union(*map(_ids, value.values()))
    return set().union(*map(_ids, value)) if isinstance(value, list) else set()


def test_the_broker_goes_away_between_two_callbacks(tmp_path: Path) -> None:
    """The first was sent and the second was not: the replay sends both under the same ids."""
    _added.clear()
    app = app_of(tmp_path)
    add = leased(app, name="add")(_add)
    guest = Guest(app)
    steps = add.s(1, 2) | add.s(3)
    result = steps.apply_async(link=[add.s(10), group(add.s(20), add.s(30))])
    guest.deliver()
    message = guest.message()
    send = app.amqp.send_task_message
    sent = []

    def takes_two(*args: Any, **kwargs: Any) -> Any:
        if len(sent) == 2:
            raise OperationalError("the broker is away")
        sent.append(send(*args, **kwargs))
        return sent[-1]

    app.amqp.__dict__["send_task_message"] = takes_two
    app.conf.task_publish_retry_policy = {"max_retries": 0}
    guest.deliver(message)
    app.amqp.__dict__["send_task_message"] = send
    assert len(sent) == 2
    assert guest.row(result.id)["settled_at"] is None
    guest.age(60)
    guest.reap()
    messages = list(iter(guest.message, None))
    for one in messages:
        guest.deliver(one)
    for one in iter(guest.message, None):
        guest.deliver(one)
    assert guest.row(result.id)["replays"] == 1
    assert result.get(timeout=5) == 6
    assert sorted(_added) == [(1, 2), (3, 3), (6, 10), (6, 20), (6, 30)]


# -- what the next message brings ---------------------------------------------------------------


def _hand_off(self: Any) -> Any:
    return self.lease.stage("one", str)


def _retry(self: Any) -> Any:
    raise self.retry(countdown=0)


def _die(self: Any) -> Any:
    raise AssertionError("nobody runs this")


@pytest.mark.parametrize("body", [_hand_off, _retry, _die])
def test_the_next_message_brings_all_that_the_first_one_did(tmp_path: Path, body: Any) -> None:
    """After a hand-off, a retry and a reclaim: headers, stamps, priority, what follows."""
    app = app_of(tmp_path)
    policy = LeasePolicy(stage_handoff="always")
    task = leased(app, name="t", bind=True, lease_policy=policy)(body)
    guest = Guest(app)
    first = task.signature(
        shadow="another.name",
        priority=4,
        headers={"x-tenant": "7"},
        ignore_result=True,
        soft_time_limit=50,
        time_limit=60,
        link=[task.signature(task_id="linked")],
        link_error=[task.signature(task_id="on-error")],
    )
    first.stamp(order="1234", stamped_headers=["order"])
    canvas = chord([chain(first, task.si()), task.si()], task.si())
    run = canvas.apply_async().parent.results[0].parent.id
    message = next(one for one in iter(guest.message, None) if one.headers["id"] == run)
    if body is _die:
        request = guest.request(message)
        guest.store.claim(
            run, 0, "dead", task="t", terms=request._terms, envelope=request._parent.envelope()
        )
        for _ in range(2):
            guest.age(500)
            guest.reap()
    else:
        guest.deliver(message)
    following = next(one for one in iter(guest.message, None) if one.headers["id"] == run)
    assert following.headers["lease_epoch"] == 1
    # A retry is its task's own child for Celery, which forgot ``ignore_result`` for a while.
    own = {"parent_id", "ignore_result"} if body is _retry else set()
    assert _brought(following, own) == _brought(message, own)
    assert following.headers["stamps"] == {"order": "1234"}
    assert following.headers["x-tenant"] == "7"
    assert following.properties["priority"] == 4


def _brought(message: Any, own: set[str]) -> Any:
    """What a message brings, beside what is of one sending."""
    own = own | {"lease_epoch", "retries", "eta", "expires", "origin"}
    headers = {name: value for name, value in message.headers.items() if name not in own}
    kept = ("correlation_id", "reply_to", "priority")
    properties = {name: message.properties.get(name) for name in kept}
    return headers, properties, message.payload, message.content_type
