"""The operator's API: what runs where, what happened, and how to steer it.

Everything goes through the database, so it works on SQS, where Celery's remote control
does not, and with all workers offline.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from celery_lease.application import Leasing
from celery_lease.errors import InvalidSetting, RunNotFound
from celery_lease.loop import Loop
from celery_lease.reaper import Reaped, Reaper
from celery_lease.states import RunState

__all__ = ["Moment", "RunInfo", "Runs", "Story"]


@dataclass(frozen=True, slots=True)
class RunInfo:
    """A run and its newest lease; times in UTC by the database's clock."""

    run_id: str
    task: str
    #: A plain string if only a newer release has this state.
    state: RunState | str
    epoch: int
    attempt: int
    recoveries: int
    holder: str | None
    node: str | None
    lease_status: str | None
    #: Seconds until the lease expires; None unless the run is running.
    lease_left: float | None
    progress: float | None
    note: str | None
    reason: str | None
    #: Seconds until a trigger of the run is due; None if nothing has to be sent.
    trigger_in: float | None
    created_at: datetime
    finished_at: datetime | None
    settled_at: datetime | None

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {name: _plain(getattr(self, name)) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class Moment:
    """One line of a run's timeline."""

    at: datetime
    epoch: int | None
    what: str
    who: str | None = None
    why: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {name: _plain(getattr(self, name)) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class Story:
    """A run with all that is recorded about it; no payloads."""

    run: RunInfo
    leases: tuple[Mapping[str, Any], ...]
    stages: tuple[Mapping[str, Any], ...]
    events: tuple[Mapping[str, Any], ...]
    timeline: tuple[Moment, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "run": self.run.as_dict(),
            "leases": [dict(one) for one in self.leases],
            "stages": [dict(one) for one in self.stages],
            "events": [dict(one) for one in self.events],
            "timeline": [moment.as_dict() for moment in self.timeline],
        }


class Runs:
    """The runs of an app.

    >>> from celery import Celery
    >>> runs = Runs(Celery("shop"))
    """

    def __init__(self, app: Any) -> None:
        self._leasing = Leasing.of(app)
        self._store = self._leasing.store

    def init_db(self) -> None:
        """Make the tables that are missing in the lease store."""
        self._store.create_schema()

    def list(
        self,
        *,
        state: str | None = None,
        task: str | None = None,
        unsettled: bool = False,
        most: int = 50,
    ) -> list[RunInfo]:
        """The newest runs, optionally of one state or task.

        ``unsettled``: only runs that are not over, or whose outcome was not delivered yet.
        Raises ``InvalidSetting`` for a state that does not exist.
        """
        if state is not None and state not in set(RunState):
            raise InvalidSetting(f"state = {state!r}: give one of {', '.join(RunState)}")
        rows = self._store.list_runs(state=state, task=task, unsettled=unsettled, most=most)
        return [_info(row) for row in rows]

    def get(self, run_id: str) -> RunInfo:
        """One run; raises ``RunNotFound``."""
        row = self._store.run(run_id)
        if row is None:
            raise RunNotFound(f"there is no run {run_id!r} in the lease store")
        return _info(row)

    def story(self, run_id: str) -> Story:
        """One run with its leases, stages, events and timeline; raises ``RunNotFound``."""
        run = self.get(run_id)
        leases = self._store.leases(run_id)
        stages = self._store.saved_stages(run_id)
        events = self._store.events(run_id)
        moments = [
            *_of_run(run),
            *(moment for lease in leases for moment in _of_lease(lease)),
            *map(_of_stage, stages),
            *map(_of_event, events),
        ]
        moments.sort(key=lambda moment: moment.at)
        return Story(run, tuple(leases), tuple(stages), tuple(events), tuple(moments))

    def revoke(self, run_id: str, reason: str = "revoked by an operator") -> bool:
        """End a run before its outcome, also with all workers offline; False if it is over."""
        return self._store.revoke(run_id, reason)

    def resume(self, run_id: str, reason: str = "resumed by an operator") -> int:
        """Make a parked, failed or revoked run ready again; returns its new epoch.

        Raises ``RunNotFound``, ``IllegalTransition``.
        """
        return self._store.resume(run_id, reason)

    def reap(self) -> Reaped:
        """One pass of the reaper, for a cron job where workers scale to zero."""
        return self._reaper().run_once()

    def reap_for_ever(self) -> Loop:
        """A reaper on a thread of its own; stop it with ``stop()``."""
        loop = Loop("lease-reaper", self._reaper().pass_and_wait)
        loop.start()
        return loop

    def _reaper(self) -> Reaper:
        interval = self._leasing.settings.reap_interval
        return Reaper(self._store, self._leasing.sender.send, interval=interval)


def _info(row: Mapping[str, Any]) -> RunInfo:
    running = row["state"] == RunState.RUNNING
    return RunInfo(
        run_id=row["run_id"],
        task=row["task"],
        state=_state(row["state"]),
        epoch=row["epoch"],
        attempt=row["attempt"],
        recoveries=row["recoveries"],
        holder=row["holder"] if running else None,
        node=row["node"] if running else None,
        lease_status=row["lease_status"],
        lease_left=row["lease_left"] if running else None,
        progress=row["progress"],
        note=row["note"],
        reason=row["reason"],
        trigger_in=row["trigger_in"],
        created_at=_moment(row["created_at"]),
        finished_at=_maybe(row["finished_at"]),
        settled_at=_maybe(row["settled_at"]),
    )


def _state(word: str) -> RunState | str:
    return RunState(word) if word in set(RunState) else word


def _of_run(run: RunInfo) -> list[Moment]:
    moments = [Moment(run.created_at, None, "created", None, run.task)]
    if run.finished_at is not None:
        moments.append(Moment(run.finished_at, run.epoch, str(run.state), None, run.reason))
    if run.settled_at is not None:
        moments.append(Moment(run.settled_at, run.epoch, "settled"))
    return moments


def _of_lease(lease: Mapping[str, Any]) -> list[Moment]:
    who = lease["node"] or lease["holder"]
    moments = [Moment(_moment(lease["acquired_at"]), lease["epoch"], "claimed", who)]
    if lease["ended_at"] is not None:
        ended = _moment(lease["ended_at"])
        moments.append(
            Moment(ended, lease["epoch"], f"lease {lease['status']}", who, lease["reason"])
        )
    return moments


def _of_stage(stage: Mapping[str, Any]) -> Moment:
    return Moment(_moment(stage["saved_at"]), stage["epoch"], "stage saved", None, stage["name"])


def _of_event(event: Mapping[str, Any]) -> Moment:
    who = (event["holder"] or "").partition("/")[0] or None
    return Moment(_moment(event["at"]), event["epoch"], event["kind"], who, event["reason"])


def _moment(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def _maybe(seconds: float | None) -> datetime | None:
    return None if seconds is None else _moment(seconds)


def _plain(value: Any) -> Any:
    return value.isoformat() if isinstance(value, datetime) else value
