"""A worker forks whenever a pool process is replaced, while its loops use the store."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import pytest

from celery_lease.policy import Terms
from celery_lease.store import Grant, Store
from tests.workers import BOTH


@pytest.mark.parametrize("database", BOTH)
def test_a_child_forked_during_a_transaction_can_claim(
    store: Store, terms: Terms, run_id: str, make_store: Callable[[Store], Store]
) -> None:
    """SQLite would tell the child for ever that its parent's lock is held."""
    store.record(run_id, "noted")  # the tables are there, and a connection is open
    inside, leave = threading.Event(), threading.Event()

    def hold(_connection: object) -> None:
        inside.set()
        # The fork that follows may have to wait for us, so that nobody can let us go later.
        leave.wait(0.3)

    holder = threading.Thread(target=lambda: store.connections.transact(hold))
    holder.start()
    assert inside.wait(10)
    child = os.fork()
    if child == 0:
        os._exit(_claims(store, run_id, terms))
    leave.set()
    holder.join()
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    # The parent goes on with its own connections.
    for one in (store, make_store(store)):
        view = one.view(run_id)
        assert view is not None
        assert view.epoch == 1


def _claims(store: Store, run_id: str, terms: Terms) -> int:
    """The exit status of a child that tries to claim, with time enough for a busy store."""
    try:
        grant = store.claim(run_id, 0, "child/1", task="t", terms=terms, envelope=b"{}")
    except Exception:  # noqa: BLE001 - the status says it
        return 2
    return 0 if isinstance(grant, Grant) else 1
