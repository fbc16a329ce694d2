"""Renewal: one call for any number of leases."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from sqlalchemy import Connection

from celery_lease.statements import leases, runs, stories
from celery_lease.states import LIVE, LeaseStatus
from celery_lease.store.foundation import Foundation, add_event, ask
from celery_lease.store.results import Renewal

__all__ = ["Renewals"]

_LIVE = {str(status) for status in LIVE}
_LOST = {str(LeaseStatus.RECLAIMED), str(LeaseStatus.REVOKED)}


class Renewals(Foundation):
    """What the heartbeat asks of the store."""

    def renew(self, holders: Collection[str], *, yielding: bool = False) -> Renewal:
        """Extend every live lease of ``holders`` by its own duration.

        A suspect lease is revived (nobody else was granted the run) and recorded as
        recovered; an ended one never. ``yielding`` asks the holders to hand off at their
        next checkpoint.
        """
        if not holders:
            return Renewal()
        if self.connections.single_statements:
            given: dict[str, Any] = {"holders": list(holders), "yielding": yielding}
            rows = self.connections.one(leases.RENEW_IN_ONE, given)
            return _sorted_out(holders, {row.holder: (row.status, row.reason) for row in rows})
        return self.connections.transact(lambda c: _renew(c, holders, yielding))

    def extend_settling(self, telling: Iterable[tuple[str, str, float]]) -> None:
        """The outcomes of these (run, holder, seconds left) are still being delivered."""
        pairs = [{"run_id": run, "holder": who, "settle_in": left} for run, who, left in telling]

        def work(connection: Connection) -> None:
            for pair in pairs:  # each its own commit: no two runs are locked together
                ask(connection, runs.EXTEND_SETTLE, pair)

        if pairs:
            self.connections.run(work)

    def settle(self, delivered: Iterable[tuple[str, str]]) -> None:
        """Callbacks were sent and the outcome stored for these (run, holder) pairs."""
        pairs = [{"run_id": run, "holder": holder} for run, holder in delivered]
        if pairs:
            # A commit each: no verb locks two runs.
            self.connections.run(lambda c: [ask(c, runs.SETTLE, pair) for pair in pairs])

    def worker_seen(self, **worker: Any) -> None:
        """Note that a worker is alive."""
        given = {"namespace": self.namespace, **worker}
        statement = (
            stories.WORKER_SEEN if self.dialect == "postgresql" else stories.WORKER_SEEN_SQLITE
        )
        self.connections.run(lambda c: ask(c, statement, given))


def _renew(connection: Connection, holders: Collection[str], yielding: bool) -> Renewal:
    given = {"holders": json.dumps(list(holders)), "yielding": yielding}
    before = ask(connection, leases.STATUS_MANY, given)
    ask(connection, leases.RENEW_MANY, given)
    for row in before:
        if row.status == LeaseStatus.SUSPECT:
            add_event(
                connection,
                row.run_id,
                "recovered",
                "a renewal of a suspect holder",
                epoch=row.epoch,
                holder=row.holder,
            )
    found = {row.holder: (row.status, row.reason) for row in before}
    shown = {holder: found.get(holder, (None, None)) for holder in holders}
    return _sorted_out(
        holders, {holder: row for holder, row in shown.items() if row[0] not in _LIVE}
    )


def _sorted_out(
    holders: Collection[str], unrenewed: Mapping[str, tuple[str | None, str | None]]
) -> Renewal:
    """``unrenewed`` holds status and reason of the leases that were not extended."""
    lost, released, unknown = {}, set(), set()
    for holder, (status, reason) in unrenewed.items():
        if status in _LOST:
            lost[holder] = "stalled" if reason == "stalled" else str(status)
        elif status == LeaseStatus.RELEASED:
            released.add(holder)
        else:
            unknown.add(holder)
    kept = frozenset(holders).difference(unrenewed)
    return Renewal(kept, lost, frozenset(released), frozenset(unknown))
