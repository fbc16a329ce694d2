"""Celery's ``replace`` under a lease: the replacement keeps the id and is a run of its own."""

from __future__ import annotations

import pytest
from celery import chain

from tests.workers import Shop


@pytest.mark.parametrize(("numbers", "total"), [((1, 2), 3), ((1, 2, 3), 6)])
def test_a_replacement_runs_once_and_its_result_is_the_tasks(
    shop: Shop, numbers: tuple[int, ...], total: int
) -> None:
    shop.start("w1")
    run = shop.send("replaced", *numbers)
    assert shop.outcome(run) == ("SUCCESS", total)
    assert shop.settled(run)["state"] == "succeeded"
    shop.empty()
    assert [note["name"] for note in shop.notes("body", run)] == [
        "shop.replaced",
        "shop.leased_add",
    ]


def test_what_follows_a_replaced_task_gets_the_replacements_result(shop: Shop) -> None:
    shop.start("w1")
    steps = chain(shop.signature("replaced", 1, 2), shop.signature("after"))
    steps.apply_async(queue="celery")
    note = shop.noted("after")
    assert note["args"] == [3]
