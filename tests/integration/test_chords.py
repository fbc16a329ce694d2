"""Chords of leased tasks: every member counts once, none is missing, the body runs once."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery, chain, chord
from celery.backends.database.models import ResultModelBase
from celery.result import AsyncResult
from celery.worker import state as worker_state
from sqlalchemy import create_engine

from celery_lease import LeasedTask, LeasePolicy
from celery_lease.runs import Runs
from celery_lease.store import Grant
from tests import services
from tests.integration.comparison import CanvasShop, Tasks, opened
from tests.integration.guest import Guest, app_of

BACKENDS = ("database", "redis")


@pytest.fixture(params=BACKENDS)
def guest(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Guest]:
    """A worker in this process, all of whose tasks are leased, Celery's own included."""
    results = f"sqlite:///{tmp_path / 'results.sqlite3'}"
    settings: dict[str, Any] = {"backend": f"db+{results}"}
    engine = create_engine(results)
    ResultModelBase.metadata.create_all(engine)
    engine.dispose()
    if request.param == "redis":
        try:
            url = services.find_broker("redis")
        except services.ServiceMissing as exc:
            services.missing(str(exc))
        prefix = f"celery-lease-{secrets.token_hex(6)}-"
        transport = {"global_keyprefix": prefix}
        settings = {"backend": url, "result_backend_transport_options": transport}
    app = app_of(tmp_path, task_cls=LeasedTask, **settings)
    bodies.clear()
    _add_tasks(app)
    yield Guest(app)
    app.close()
    if request.param == "redis":
        with redis.Redis.from_url(url) as client:
            for key in client.scan_iter(f"{prefix}*"):
                client.delete(key)


#: The arguments of every body that was entered.
bodies: list[Any] = []


def _add_tasks(app: Celery) -> None:
    @app.task(name="add", shared=False, lease_policy=LeasePolicy(max_attempts=1))
    def add(*numbers: int) -> int:
        bodies.append(("add", *numbers))
        return sum(numbers)

    @app.task(name="total", shared=False)
    def total(numbers: list[int]) -> int:
        bodies.append(("total", *numbers))
        return sum(numbers)

    @app.task(name="fails", shared=False)
    def fails(*numbers: int) -> None:
        bodies.append(("fails", *numbers))
        raise ValueError("no")

    @app.task(name="mourn", shared=False)
    def mourn(task_id: str) -> None:
        bodies.append(("mourn", task_id))


def _chord(guest: Guest, *members: Any) -> AsyncResult[Any]:
    """A chord of members and a total, with an errback."""
    tasks = guest.app.tasks
    body = tasks["total"].s().on_error(tasks["mourn"].s())
    return chord(list(members), body).apply_async()


def _messages(guest: Guest) -> list[Any]:
    """All messages that are in the queue now."""
    return list(iter(guest.message, None))


def _until_told(guest: Guest, result: Any) -> None:
    """Deliver what is there and what becomes due, until the chord's result is told."""
    for _ in range(40):
        message = guest.message()
        if message is not None:
            guest.deliver(message)
        elif result.ready():
            return
        else:
            guest.age(60)
            guest.reap()
    raise AssertionError(f"the chord hangs: {[dict(row) for row in guest.store.list_runs()]}")


def _entered(name: str) -> list[tuple[int, ...]]:
    return sorted(tuple(rest) for known, *rest in bodies if known == name)


# -- counted once ------------------------------------------------------------------------------


def test_a_member_that_is_delivered_three_times_counts_once(guest: Guest) -> None:
    """Also when its outcome was told, and nobody noted that it was."""
    add = guest.app.tasks["add"]
    result = _chord(guest, add.s(1), add.s(2), add.s(3))
    messages = _messages(guest)
    first = next(one for one in messages if one.headers["task"] == "add")
    messages.remove(first)
    for _ in range(2):
        guest.request(first).execute_using_pool(guest.pool)
        guest.side.keeper.take_delivered()  # the worker dies before it can settle
        guest.age(60)
    guest.deliver(first)
    assert guest.kinds(first.headers["id"]).count("replayed") == 2
    assert not result.ready()
    for message in messages:
        guest.deliver(message)
        guest.deliver(message)
    _until_told(guest, result)
    assert result.get(timeout=5) == 6
    assert _entered("add") == [(1,), (2,), (3,)]
    assert _entered("total") == [(1, 2, 3)]


def test_the_last_member_is_told_twice_and_the_body_runs_once(guest: Guest) -> None:
    """It has sent the body, or Celery's watcher has, and dies: the body is sent again."""
    add = guest.app.tasks["add"]
    result = _chord(guest, add.s(1), add.s(2))
    for message in _messages(guest):
        guest.request(message).execute_using_pool(guest.pool)
        guest.side.keeper.take_delivered()
    guest.age(60)
    guest.reap()
    _until_told(guest, result)
    assert result.get(timeout=5) == 3
    for message in _messages(guest):
        guest.deliver(message)
    assert _entered("total") == [(1, 2)]


def test_a_body_that_is_sent_twice_runs_once(guest: Guest) -> None:
    add, total = guest.app.tasks["add"], guest.app.tasks["total"]
    result = chord([add.s(1), add.s(2)], chain(total.s(), add.s(10)))()
    while True:
        message = guest.message()
        if message is None:
            guest.age(60)
            guest.reap()
        elif message.headers["task"] == "total":
            break
        else:
            guest.deliver(message)
    guest.deliver(message)
    guest.deliver(message)
    _until_told(guest, result)
    assert result.get(timeout=5) == 13
    assert _entered("total") == [(1, 2)]
    assert _entered("add") == [(1,), (2,), (3, 10)]


# -- none is missing ---------------------------------------------------------------------------


def _revoked_in_the_store(guest: Guest, message: Any) -> None:
    assert Runs(guest.app).revoke(message.headers["id"])
    guest.deliver(message)


def _revoked_before_its_message_is_lost(guest: Guest, message: Any) -> None:
    """The run is known, its message is not there any more: the reaper sends another."""
    guest.store.enqueue(
        message.headers["id"],
        task="add",
        terms=guest.leasing.terms(None),
        envelope=guest.request(message)._parent.envelope(),
    )
    assert Runs(guest.app).revoke(message.headers["id"])


def _revoked_by_celery(guest: Guest, message: Any) -> None:
    worker_state.revoked.add(message.headers["id"])
    try:
        guest.deliver(message)
    finally:
        worker_state.revoked.discard(message.headers["id"])


def _expired(guest: Guest, message: Any) -> None:
    message.headers["expires"] = "2020-01-01T00:00:00+00:00"
    guest.deliver(message)


def _exhausted(guest: Guest, message: Any) -> None:
    """Its worker dies; that was the only attempt."""
    request = guest.request(message)
    grant = guest.store.claim(
        message.headers["id"],
        0,
        request._holder,
        task="add",
        terms=request._terms,
        envelope=request._parent.envelope(),
    )
    assert isinstance(grant, Grant)


@pytest.mark.parametrize(
    ("end", "error"),
    [
        (_revoked_in_the_store, "TaskRevokedError"),
        (_revoked_before_its_message_is_lost, "TaskRevokedError"),
        (_revoked_by_celery, "TaskRevokedError"),
        (_expired, "TaskRevokedError"),
        (_exhausted, "AttemptsExhausted"),
    ],
)
def test_a_member_that_never_returns_reports_itself(
    guest: Guest, end: Callable[[Guest, Any], None], error: str
) -> None:
    """No chord hangs: its body fails, and its errback is called once."""
    add = guest.app.tasks["add"]
    result = _chord(guest, add.s(1), add.s(2))
    messages = _messages(guest)
    member = next(one for one in messages if one.headers["task"] == "add")
    messages.remove(member)
    end(guest, member)
    for message in messages:
        guest.deliver(message)
    _until_told(guest, result)
    assert result.state == "FAILURE"
    assert error in str(result.result)
    assert _entered("total") == []
    for message in _messages(guest):
        guest.deliver(message)
    assert _entered("mourn") == [(result.id,)]
    assert guest.row(member.headers["id"])["settled_at"] is not None


def test_a_member_that_fails_reports_itself(guest: Guest) -> None:
    add, fails = guest.app.tasks["add"], guest.app.tasks["fails"]
    result = _chord(guest, add.s(1), fails.s(2), add.s(3))
    _until_told(guest, result)
    assert result.state == "FAILURE"
    assert "ValueError" in str(result.result)
    for message in _messages(guest):
        guest.deliver(message)
    assert _entered("mourn") == [(result.id,)]


# -- real workers ------------------------------------------------------------------------------


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[CanvasShop]:
    """A shop of this test, with results in Redis."""
    with opened("redis", tmp_path) as shop:
        yield shop


def test_a_chord_survives_the_worker_of_a_member(shop: CanvasShop) -> None:
    """Killed between the member's commit and its part in the chord."""
    victim = shop.launch("w1", crash="worker: after complete")
    t = Tasks(shop, "leased", "")
    result = chord([t("a"), chain(t("b"), t("c"))], chain(t("d"), t("e"))).apply_async()
    assert victim.ended() != 0
    shop.start("w2", slots=2)
    assert shop.outcome(result.id)[0] == "SUCCESS"
    shop.empty()
    assert [len(shop.of_label(t.name(one))) for one in "abcde"] == [1] * 5


def test_a_body_that_is_redone_adds_its_members_once(shop: CanvasShop) -> None:
    """Killed after it has added two; the next holder adds the same two."""
    t = Tasks(shop, "leased", "")
    others = [t("x", 1), t("y", 2)]
    members = [t("a", task="more", other=others, gate="go"), t("b")]
    result = chord(members, t("body")).apply_async()
    (victim,) = shop.start("w1", slots=1)
    shop.labelled(t.name("a"))
    victim.kill()
    shop.start("w2", slots=2)
    shop.labelled(t.name("a"), times=2)
    shop.open("go")
    status, value = shop.outcome(result.id)
    shop.empty()
    assert status == "SUCCESS"
    assert [len(shop.of_label(t.name(one))) for one in ("x", "y", "b", "body")] == [1] * 4
    assert len(value[1]) == 4


@pytest.mark.parametrize("kind", ["plain", "leased"])
def test_members_that_a_body_adds_are_waited_for(shop: CanvasShop, kind: str) -> None:
    """As with plain tasks; the same one twice is two members."""
    shop.start("w1", slots=2)
    t = Tasks(shop, kind, "")
    others = [t("x", 1), t("x", 1), t("y", 2)]
    result = chord([t("a", task="more", other=others), t("b")], t("body")).apply_async()
    status, value = shop.outcome(result.id)
    assert status == "SUCCESS"
    returned = sorted(str(one) for one in value[1])
    x, y = ([t.name("x"), 1], [t.name("y"), 2])
    assert returned == sorted(str(one) for one in (t.name("a"), [t.name("b")], x, x, y))
