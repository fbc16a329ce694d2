"""A run is never stuck: an empty broker, a fresh worker, and its reaper alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from celery_lease.policy import LeasePolicy, Terms
from celery_lease.settings import Settings
from celery_lease.states import RunState
from celery_lease.store import Grant, Store
from celery_lease.testing.clock import advance_database_clock
from celery_lease.trigger import Envelope
from tests.workers import BOTH, DURATION, GRACE, HEARTBEAT, Shop

HOUR = 3600.0
OUTCOME = b"application/json;utf-8\n[5, 1]"


class Situation:
    """Runs of ``shop.hold`` as dead workers may leave them, made with the store's verbs."""

    def __init__(self, store: Store) -> None:
        self.store = store
        policy = LeasePolicy(duration=DURATION, heartbeat=HEARTBEAT, grace=GRACE)
        settings = Settings.defaults(
            statement_timeout=2, lock_timeout=1, settle_timeout=5, retrigger_after=1
        )
        self.terms: Terms = policy.terms(settings)

    def claimed(self, run_id: str, *, register: bool = False) -> Grant:
        """A run in the hands of a holder that no longer exists."""
        if register:
            self.enqueued(run_id)
        grant = self.store.claim(
            run_id,
            0,
            f"ghost/{run_id}",
            task="shop.hold",
            terms=self.terms,
            envelope=_envelope(run_id),
        )
        assert isinstance(grant, Grant)
        return grant

    def enqueued(self, run_id: str) -> None:
        self.store.enqueue(run_id, task="shop.hold", terms=self.terms, envelope=_envelope(run_id))

    def handed_off(self, run_id: str) -> None:
        self.store.hand_off(self.claimed(run_id), "budget")

    def postponed(self, run_id: str) -> None:
        self.store.postpone(self.claimed(run_id), _envelope(run_id), 1.0, "retry")

    def reserved(self, run_id: str) -> None:
        """Its sender died between the reservation and the broker."""
        self.store.hand_off(self.claimed(run_id), "budget")
        assert self.store.reserve(run_id, 1)
        advance_database_clock(self.store, 30, run_id=run_id)

    def sent(self, run_id: str) -> None:
        """Its trigger was sent and has not arrived."""
        self.store.hand_off(self.claimed(run_id), "budget")
        outgoing = self.store.reserve(run_id, 1)
        assert outgoing is not None
        self.store.sent(outgoing)

    def suspected(self, run_id: str) -> None:
        self.claimed(run_id)
        advance_database_clock(self.store, DURATION, run_id=run_id)
        assert self.store.suspect(run_id, 1)

    def unheld(self, run_id: str) -> None:
        """Running, and no lease says by whom: no verb leaves it so, a restored backup may."""
        self.claimed(run_id)
        with self.store.connections.engine.begin() as connection:
            connection.exec_driver_sql(f"DELETE FROM celery_lease_lease WHERE run_id = '{run_id}'")

    def orphaned(self, run_id: str) -> None:
        """Ready, and a live lease stands in the way of the next claim; likewise."""
        self.claimed(run_id)
        with self.store.connections.engine.begin() as connection:
            connection.exec_driver_sql(
                "UPDATE celery_lease_run SET state = 'ready', trigger_due = 0 "
                f"WHERE run_id = '{run_id}'"
            )

    def succeeded(self, run_id: str) -> None:
        """Committed, and its holder died before anybody was told."""
        self.store.complete(self.claimed(run_id), OUTCOME, deliver=True, settle_in=1)

    def failed(self, run_id: str) -> None:
        self.store.fail(self.claimed(run_id), None, reason="ghosts", deliver=True, settle_in=1)

    def revoked(self, run_id: str) -> None:
        self.enqueued(run_id)
        assert self.store.revoke(run_id, "by the test")

    def expired(self, run_id: str) -> None:
        """Celery's ``expires`` passed before its first claim."""
        self.store.enqueue(
            run_id,
            task="shop.hold",
            terms=self.terms,
            envelope=_envelope(run_id),
            expires_in=-1.0,
        )

    def resumed(self, run_id: str) -> None:
        """It was parked, which is for a person; the person has resumed it."""
        self.store.park(self.claimed(run_id), "a question")
        self.store.resume(run_id)


#: Name → how the run gets there, its state then, and Celery's state at the end.
SITUATIONS: dict[str, tuple[Callable[[Situation, str], object], RunState, str]] = {
    "enqueued": (Situation.enqueued, RunState.READY, "SUCCESS"),
    "handed-off": (Situation.handed_off, RunState.READY, "SUCCESS"),
    "postponed": (Situation.postponed, RunState.READY, "SUCCESS"),
    "reserved": (Situation.reserved, RunState.READY, "SUCCESS"),
    "sent": (Situation.sent, RunState.READY, "SUCCESS"),
    "resumed": (Situation.resumed, RunState.READY, "SUCCESS"),
    "orphaned": (Situation.orphaned, RunState.READY, "SUCCESS"),
    "claimed": (Situation.claimed, RunState.RUNNING, "SUCCESS"),
    "suspected": (Situation.suspected, RunState.RUNNING, "SUCCESS"),
    "unheld": (Situation.unheld, RunState.RUNNING, "SUCCESS"),
    "succeeded": (Situation.succeeded, RunState.SUCCEEDED, "SUCCESS"),
    "failed": (Situation.failed, RunState.FAILED, "FAILURE"),
    "revoked": (Situation.revoked, RunState.REVOKED, "REVOKED"),
    "expired": (Situation.expired, RunState.READY, "REVOKED"),
}
#: Runs that were finished before the worker came: only their outcome is delivered.
FINISHED = {"succeeded", "failed", "revoked", "expired"}


def test_the_situations_reach_every_state_that_ends_without_a_person() -> None:
    """What waits for a person or an answer ends when it comes, which is "resumed" here."""
    for_a_person = {RunState.WAITING, RunState.PARKED}
    assert {state for _, state, _ in SITUATIONS.values()} == set(RunState) - for_a_person


@pytest.mark.parametrize("database", BOTH)
def test_the_reaper_alone_brings_a_run_in_any_state_to_its_end(shop: Shop) -> None:
    """Case 32 and beyond: no message is left, every holder is gone, and a worker starts."""
    situation = Situation(shop.store)
    runs = {name: f"{shop.namespace}-{name}" for name in SITUATIONS}
    for name, (arrange, state, _) in SITUATIONS.items():
        arrange(situation, runs[name])
        assert shop.state(runs[name]) == state
    assert shop.sqs.messages("celery") == []
    shop.open("open")

    shop.start("w1", slots=2, lease_retrigger_after=1)
    for name, (_, _, status) in SITUATIONS.items():
        assert shop.outcome(runs[name])[0] == status, name
        shop.settled(runs[name])
        assert shop.bodies(runs[name]) == (name not in FINISHED), name
    assert shop.outcome(runs["succeeded"]) == ("SUCCESS", [5, 1])
    for run in runs.values():
        assert all(lease["ended_at"] for lease in shop.store.leases(run))
    assert [row["kind"] for row in shop.events(runs["claimed"])][:2] == ["suspect", "reclaimed"]


def _envelope(run_id: str) -> bytes:
    return Envelope.pack(
        args=("open", "x"),
        kwargs={},
        embed={},
        content_type="application/json",
        headers={"lang": "py", "task": "shop.hold", "id": run_id, "root_id": run_id},
        properties={"correlation_id": run_id},
        exchange="",
        routing_key="celery",
    ).dump()
