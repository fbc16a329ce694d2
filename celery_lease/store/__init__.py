"""The verbs of the model, one method each; the only user of statements and connections.

``Store`` is put together from one class a topic. Every verb is one transaction or one
statement, and idempotent: a repeat after a lost answer is answered as accepted.
"""

from __future__ import annotations

from celery_lease.settings import Settings
from celery_lease.store.claims import Claims
from celery_lease.store.holder import HolderVerbs
from celery_lease.store.operator import Operator
from celery_lease.store.outbox import Outbox
from celery_lease.store.recovery import Recovery
from celery_lease.store.renewals import Renewals
from celery_lease.store.results import (
    Ended,
    Grant,
    HandedOver,
    Outgoing,
    Refusal,
    Renewal,
    Replay,
)

__all__ = [
    "Ended",
    "Grant",
    "HandedOver",
    "Outgoing",
    "Refusal",
    "Renewal",
    "Replay",
    "Store",
]


class Store(Operator, Claims, HolderVerbs, Renewals, Recovery, Outbox):
    """The lease store.

    >>> store = Store.from_settings(Settings.defaults(store_url="sqlite:////tmp/leases.db"))
    """

    @classmethod
    def from_settings(cls, settings: Settings) -> Store:
        """The store that ``settings`` name; nothing is opened before the first verb."""
        return cls(
            settings.store_url,
            namespace=settings.namespace,
            options=settings.store_options,
            statement_timeout=settings.statement_timeout,
            lock_timeout=settings.lock_timeout,
            connect_timeout=settings.connect_timeout,
        )
