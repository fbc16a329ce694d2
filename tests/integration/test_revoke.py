"""A revoked run never starts, or starts no more: by the store, and by Celery's own revoke."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from celery.result import AsyncResult, GroupResult
from celery.worker import state as worker_state

from celery_lease import LeaseLost, Runs
from tests import services
from tests.integration import fleet
from tests.integration.guest import Guest, app_of, leased
from tests.workers import HEARTBEAT, Shop


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    """What a worker in this process has been told of revokes ends with the test."""
    yield
    worker_state.revoked.clear()
    worker_state.revoked_stamps.clear()


def counted(calls: list[int]) -> Any:
    """A body that notes the epochs it was entered under, and retries at the first."""

    def body(self: Any) -> str:
        calls.append(self.lease.epoch)
        if self.lease.epoch == 1:
            raise self.retry(countdown=0)
        return "done"

    return body


def postponed(folder: Path) -> tuple[Guest, Any, list[int]]:
    """A worker, and a run at epoch 1 whose next trigger waits for it in the queue."""
    app, calls = app_of(folder), []
    task = leased(app, name="t", bind=True)(counted(calls))
    guest = Guest(app)
    result = task.delay()
    guest.deliver()
    assert guest.row(result.id)["state"] == "ready"
    return guest, result, calls


# -- what a worker knows of Celery's revoke -------------------------------------------------------


def test_a_revoke_that_only_a_worker_knows_of_reaches_the_store_at_any_epoch(
    tmp_path: Path,
) -> None:
    guest, result, calls = postponed(tmp_path)
    worker_state.revoked.add(result.id)
    guest.deliver()
    assert calls == [1]
    assert guest.row(result.id)["state"] == "revoked"
    assert guest.row(result.id)["reason"] == "revoked by Celery"
    assert result.state == "REVOKED"
    assert guest.row(result.id)["settled_at"] is not None


def test_a_run_that_an_operator_resumed_is_not_revoked_by_what_a_worker_remembers(
    tmp_path: Path,
) -> None:
    guest, result, calls = postponed(tmp_path)
    worker_state.revoked.add(result.id)
    guest.deliver()
    Runs(guest.app).resume(result.id)
    guest.reap()
    guest.deliver()
    assert calls == [1, 3]
    assert guest.row(result.id)["state"] == "succeeded"


def test_a_revoke_that_comes_while_the_delivery_waits_for_the_pool_is_passed_on(
    tmp_path: Path,
) -> None:
    guest, result, calls = postponed(tmp_path)
    request = guest.request(guest.message())
    request.revoked()  # on its way to the pool nothing was known
    worker_state.revoked.add(result.id)
    request.on_accepted(1, 0.0)
    assert guest.row(result.id)["state"] == "revoked"
    guest.deliver(request._message)
    assert calls == [1]
    assert result.state == "REVOKED"


def test_terminate_ends_a_body_that_cannot_be_killed_at_its_next_use_of_the_lease(
    tmp_path: Path,
) -> None:
    """On the threads pool Celery itself cannot terminate, and would answer with an error."""
    app = app_of(tmp_path)
    requests, lost = [], []

    def terminated(self: Any) -> str:
        requests[0].terminate(guest.pool)  # as the remote control does, in another thread
        try:
            self.lease.checkpoint(1)
        except LeaseLost as exc:
            lost.append(exc.reason)
            raise
        return "done"

    task = leased(app, name="t", bind=True)(terminated)
    guest = Guest(app)
    result = task.delay()
    requests.append(guest.request(guest.message()))
    requests[0].execute_using_pool(guest.pool)
    assert lost == ["revoked"]
    assert guest.row(result.id)["reason"] == "terminated"
    guest.reap()
    guest.deliver()
    assert result.state == "REVOKED"
    assert guest.row(result.id)["settled_at"] is not None


# -- by the store, on SQS -------------------------------------------------------------------------


def test_runs_that_are_revoked_while_no_worker_is_there_never_start(shop: Shop) -> None:
    """A late message replays REVOKED; callbacks hear nothing, errbacks do."""
    told = {"link": shop.signature("after"), "link_error": shop.signature("mourn")}
    queued = [shop.send("hold", "never", **told), shop.send("hold", "never")]
    printed = fleet.command(
        shop, "lease", "revoke", *queued, "not-sent-yet", "--reason", "not wanted", "--json"
    )
    assert [one["revoked"] for one in json.loads(printed)] == [True] * 3
    late = shop.send("hold", "never", task_id="not-sent-yet")

    shop.start("w1")
    for run in (*queued, late):
        assert shop.outcome(run)[0] == "REVOKED"
        assert shop.settled(run)["reason"] == "not wanted"
        assert shop.bodies(run) == 0
    shop.noted("mourn")
    assert shop.notes("after") == []

    running = shop.send("stubborn", "never")
    shop.entered(running)
    assert "was over already, revoked" in fleet.command(shop, "lease", "revoke", late)
    revoked_at = time.time()
    assert Runs(_operator(shop)).revoke(running, "stop it")
    note = shop.noted("interrupted", running)
    assert note["error"] == "LeaseLost"
    assert "revoked" in note["why"]
    assert note["at"] - revoked_at < HEARTBEAT + 8  # a beat, on a busy machine
    assert shop.outcome(running)[0] == "REVOKED"
    shop.settled(running)
    shop.empty()
    assert shop.bodies(running) == 1


def _operator(shop: Shop) -> Celery:
    app = Celery("operator", set_as_current=False)
    app.conf.update(lease_store_url=shop.store_url, lease_namespace=shop.namespace)
    return app


# -- by Celery's remote control -------------------------------------------------------------------


class Remote:
    """The shop on a broker with remote control, and its client there."""

    def __init__(self, shop: Shop, url: str) -> None:
        self.shop = shop
        self.queue = f"shop-{uuid.uuid4().hex}"
        self.settings = {
            "broker_url": url,
            "broker_transport_options": {},
            "task_default_queue": self.queue,
        }
        shop.client.close()
        shop.client = Celery("client", backend=shop.client.conf.result_backend)
        shop.client.conf.update(self.settings)
        self.control = shop.client.control

    def start(self, name: str, **options: Any) -> None:
        """A worker with a name of its own: remote control is shared by all of a broker."""
        name = f"{name}-{self.queue}"
        self.worker = self.shop.start(name, queue=self.queue, **self.settings, **options)[0]
        #: Waits for the worker's answer.
        self.heard = {"destination": [f"{name}@test"], "reply": True, "timeout": 20}

    def close(self) -> None:
        with self.shop.client.connection_for_write() as connection:
            connection.default_channel.queue_delete(self.queue)

    def result(self, run: str) -> AsyncResult[Any]:
        return AsyncResult(run, app=self.shop.client)

    def is_revoked(self, run: str, *, bodies: int) -> None:
        """Everybody says so: the result, the store and the body."""
        assert self.shop.outcome(run)[0] == "REVOKED"
        assert self.shop.settled(run)["state"] == "revoked"
        assert self.shop.bodies(run) == bodies


@pytest.fixture(params=["redis", "rabbitmq"])
def remote(request: pytest.FixtureRequest, shop: Shop) -> Iterator[Remote]:
    try:
        url = services.find_broker(request.param)
    except services.ServiceMissing as exc:
        services.missing(str(exc))
    remote = Remote(shop, url)
    yield remote
    for worker in shop.workers:
        worker.remove()
    remote.close()


def test_celerys_own_revoke_leaves_a_revoked_run_behind(remote: Remote) -> None:
    """Queued and running, by id, result, group and stamp, with ``terminate`` and without."""
    shop, control = remote.shop, remote.control
    remote.start("w1")
    running = shop.send("hold", "first")
    shop.entered(running)
    stamped = _stamp("customer", "c-1")
    by_id, by_result = (shop.send("hold", "never") for _ in range(2))
    by_stamp = shop.send("hold", "never", headers=stamped)
    members = [shop.send("hold", "never") for _ in range(2)]
    plain = shop.send("plain_add", 1, 2)

    control.revoke_by_stamped_headers({"customer": ["c-1"]}, **remote.heard)
    control.revoke([by_id, plain], **remote.heard)
    remote.result(by_result).revoke()
    GroupResult("g", [remote.result(run) for run in members], app=shop.client).revoke()
    remote.worker.logged("Tasks flagged as revoked", times=3)
    remote.result(running).revoke(terminate=True)

    remote.is_revoked(running, bodies=1)
    for run in (by_id, by_result, by_stamp, *members):
        remote.is_revoked(run, bodies=0)
    assert shop.outcome(plain)[0] == "REVOKED"

    stamped_too = shop.send("hold", "never", headers=_stamp("customer", "c-2"))
    shop.entered(stamped_too)
    control.revoke_by_stamped_headers({"customer": ["c-2"]}, terminate=True)
    remote.is_revoked(stamped_too, bodies=1)

    remote.start("w2")  # remembers nothing of it, and has a reaper
    after = shop.send("leased_add", 1, 2)
    assert shop.outcome(after) == ("SUCCESS", 3)
    assert shop.bodies(running) == shop.bodies(stamped_too) == 1


@pytest.mark.parametrize("remote", ["redis"], indirect=True)
def test_celerys_terminate_ends_a_body_on_the_threads_pool(remote: Remote) -> None:
    """At its next use of the lease; a plain task goes on there to its end."""
    shop = remote.shop
    remote.start("w1", pool="threads")
    run = shop.send("steps", "step", 2)
    shop.entered(run)
    remote.result(run).revoke(terminate=True)
    shop.until_state(run, "revoked")
    shop.open("step-0")
    shop.open("step-1")
    remote.is_revoked(run, bodies=1)
    assert [note["step"] for note in shop.notes("step", run)] == [0]


def _stamp(name: str, value: str) -> dict[str, Any]:
    return {"stamped_headers": [name], "stamps": {name: value}}
