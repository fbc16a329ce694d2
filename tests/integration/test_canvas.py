"""Callbacks, errbacks and chains of leased tasks: as Celery has them, with ids that stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.workers import Shop


def _links(shop: Shop, task: str) -> dict[str, Any]:
    run = shop.send(
        task, 1, 2, link=[shop.signature("after", "first"), shop.signature("after", "second")]
    )
    shop.outcome(run)
    shop.noted("after", times=2)
    return _seen(shop, run)


def _errbacks(shop: Shop, task: str) -> dict[str, Any]:
    fails = task.replace("add", "fail")
    run = shop.send(fails, 1, 2, link_error=[shop.signature("mourn", "first")])
    shop.outcome(run)
    shop.noted("mourn")
    return _seen(shop, run)


def _chain(shop: Shop, task: str) -> dict[str, Any]:
    steps = [shop.signature(task, 1, 2), shop.signature(task, 10), shop.signature("after", "end")]
    result = (steps[0] | steps[1] | steps[2]).apply_async()
    shop.noted("after")
    assert shop.outcome(result.id)[0] == "SUCCESS"
    return _seen(shop, result.parent.parent.id) | {
        "values": [shop.outcome(one.id)[1] for one in (result.parent.parent, result.parent, result)]
    }


def _failing_chain(shop: Shop, task: str) -> dict[str, Any]:
    fails = task.replace("add", "fail")
    chain = shop.signature(fails, 1) | shop.signature("after", "never")
    result = chain.apply_async(link_error=shop.signature("mourn", "end"))
    assert shop.outcome(result.parent.id)[0] == "FAILURE"
    shop.noted("mourn")
    return _seen(shop, result.parent.id)


def _seen(shop: Shop, run: str) -> dict[str, Any]:
    """What callbacks and errbacks were given, in the order of their sending; ids left out."""
    notes = {note["run"]: note["args"] for note in shop.notes("after") + shop.notes("mourn")}
    sent = [one for one in shop.sent("after") + shop.sent("mourn") if one["id"] in notes]
    told = [state for state in shop.told(run) if state != "STARTED"]
    return {
        "args": [[_without(run, arg) for arg in notes[one["id"]]] for one in sent],
        "told": told,
        "parents": [one["parent_id"] == run for one in sent],
        "bodies": shop.bodies(run),
    }


def _without(run: str, value: Any) -> Any:
    return "the run" if value == run else value


@pytest.mark.parametrize(
    "form",
    [_links, _errbacks, pytest.param(_chain, marks=pytest.mark.smoke), _failing_chain],
)
def test_a_leased_task_calls_back_as_a_plain_one_does(
    shop: Shop, form: Callable[[Shop, str], dict[str, Any]]
) -> None:
    """Order and arguments are the same; only the ids are fixed beforehand."""
    shop.start("w1")
    plain = form(shop, "plain_add")
    shop.forget_notes()
    leased = form(shop, "leased_add")
    assert leased == plain
    assert leased["args"]
    shop.empty()


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
