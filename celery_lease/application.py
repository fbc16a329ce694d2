"""What one Celery app needs to lease its tasks, made once from its configuration."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any

from celery_lease.board import Board
from celery_lease.codec import Codec
from celery_lease.interrupts import Interrupts
from celery_lease.policy import LeasePolicy, Terms
from celery_lease.settings import Settings
from celery_lease.store import Store
from celery_lease.trigger import Sender

if TYPE_CHECKING:
    from celery import Celery

    from celery_lease.worker import WorkerSide

__all__ = ["Leasing"]

_ATTRIBUTE = "_celery_lease"


class Leasing:
    """Settings, store and sender of an app; ``Leasing.of(app)`` is the only way to get it."""

    #: What the main process of a worker adds: heartbeat, reaper, keeper.
    worker: WorkerSide | None = None

    def __init__(self, app: Celery) -> None:
        self.app = app
        #: Shared with pool children; the worker's bootstep makes it before the fork.
        self.board: Board | None = None
        self.interrupts = Interrupts()
        self._terms: dict[LeasePolicy | None, Terms] = {}

    @classmethod
    def of(cls, app: Any) -> Leasing:
        """The one instance of ``app``."""
        app = _unwrapped(app)
        leasing: Leasing | None = app.__dict__.get(_ATTRIBUTE)
        if leasing is None:
            leasing = app.__dict__.setdefault(_ATTRIBUTE, cls(app))
        return leasing

    @contextlib.contextmanager
    def in_place_of_the_apps(self) -> Iterator[None]:
        """``Leasing.of`` gives this one in the block; for tests."""
        app = _unwrapped(self.app)
        known = app.__dict__.get(_ATTRIBUTE)
        app.__dict__[_ATTRIBUTE] = self
        try:
            yield
        finally:
            if known is None:
                del app.__dict__[_ATTRIBUTE]
            else:
                app.__dict__[_ATTRIBUTE] = known

    @cached_property
    def settings(self) -> Settings:
        """The ``lease_*`` settings; raises ``InvalidSetting``."""
        return Settings.read(self.app.conf, self.app.namespace or "")

    @cached_property
    def store(self) -> Store:
        """The lease store."""
        return Store.from_settings(self.settings)

    @cached_property
    def sender(self) -> Sender:
        """Sends triggers through the app's broker."""
        return Sender(self.app, self.store)

    @cached_property
    def values(self) -> Codec:
        """Checkpoints and stages: as task arguments are."""
        return Codec(self.app.conf.task_serializer, self.app.conf.accept_content)

    @cached_property
    def results(self) -> Codec:
        """Outcomes: as results are."""
        conf = self.app.conf
        return Codec(conf.result_serializer, conf.result_accept_content or conf.accept_content)

    def terms(self, policy: LeasePolicy | None) -> Terms:
        """The policy over the settings, cross-checked; raises ``InvalidSetting``."""
        known = self._terms.get(policy)
        if known is None:
            known = self._terms[policy] = (policy or LeasePolicy()).terms(self.settings)
        return known

    @property
    def stopping(self) -> bool:
        """The worker around this process was told to stop."""
        return self.board is not None and self.board.stopping


def _unwrapped(app: Any) -> Any:
    """The app behind a proxy of Celery's, or the app itself."""
    return app._get_current_object() if hasattr(app, "_get_current_object") else app
