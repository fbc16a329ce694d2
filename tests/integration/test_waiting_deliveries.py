"""What has arrived in a worker and not begun: kept, let go, or begun after all."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from celery_lease.results import Defer
from tests.integration.guest import Guest, app_of, leased


@pytest.fixture
def guest(tmp_path: Path) -> Guest:
    app = app_of(tmp_path)

    @leased(app, bind=True, name="t")
    def task(self: Any, how: str = "") -> str:
        if how == "defer":
            raise Defer(5.0)
        if how == "raise":
            raise ValueError(how)
        if how == "exit":
            raise SystemExit(3)
        return str(self.lease.run_id)

    return Guest(app)


def _arrived(guest: Guest, *args: str) -> Any:
    """A delivery that waits for the pool."""
    guest.app.tasks["t"].apply_async(args)
    request = guest.request(guest.message())
    request.revoked()  # as before it is handed over
    return request


def test_what_begins_after_a_lost_connection_has_its_lease_kept(guest: Guest) -> None:
    """The threads pool runs what Celery has forgotten; its message is the broker's again."""
    request = _arrived(guest)
    guest.side.disconnected()
    assert guest.side.keeper.all() == []
    request.on_accepted(os.getpid(), time.monotonic())
    (kept,) = guest.side.keeper.all()
    assert (kept.run_id, kept.pid, kept.held) == (request.id, os.getpid(), None)
    request.acknowledge()
    assert guest.side.keeper.all() == []


def test_a_stopping_worker_gives_back_what_waits_and_keeps_what_runs(guest: Guest) -> None:
    waits, runs = _arrived(guest), _arrived(guest)
    runs.on_accepted(os.getpid(), time.monotonic())
    guest.side.give_back_waiting()
    assert [kept.run_id for kept in guest.side.keeper.all()] == [runs.id]
    assert guest.hidden.deferred == [(waits._held.handle, 0.0)]
    # If the pool begins it all the same, it is refused there, and not given back again.
    guest.side.yield_leases()
    waits.execute_using_pool(guest.pool)
    assert guest.hidden.deferred == [(waits._held.handle, 0.0)]
    assert guest.fates == []
    assert guest.store.view(waits.id) is None


def test_a_signal_handler_needs_no_lock_to_tell_bodies_to_yield(guest: Guest) -> None:
    """The main thread may hold any of them at the moment of the signal."""
    with guest.side.keeper._change, guest.side._beats._wake._cond:
        told = threading.Thread(target=guest.side._on_shutting_down, daemon=True)
        told.start()
        told.join(5)
        assert not told.is_alive()
    assert guest.leasing.stopping


@pytest.mark.parametrize("how", ["", "defer", "raise", "exit"])
def test_a_place_on_the_board_is_free_again_whatever_became_of_the_delivery(
    guest: Guest, how: str
) -> None:
    free = len(guest.side.board._free)
    request = _arrived(guest, how)
    assert len(guest.side.board._free) == free - 1
    request.execute_using_pool(guest.pool)
    assert len(guest.side.board._free) == free


def test_a_place_on_the_board_is_free_again_after_a_lost_connection(guest: Guest) -> None:
    free = len(guest.side.board._free)
    _arrived(guest)
    guest.side.disconnected()
    assert len(guest.side.board._free) == free


def test_leaving_by_sys_exit_is_a_crash_that_goes_on(guest: Guest) -> None:
    """Where parent and body are one process; the guest's pool is solo."""
    request = _arrived(guest, "exit")
    request.execute_using_pool(guest.pool)
    row = guest.row(request.id)
    assert (row["state"], row["recoveries"]) == ("ready", 1)
    assert guest.fates == ["ack"]
    assert guest.kinds(request.id) == ["abandoned"]
