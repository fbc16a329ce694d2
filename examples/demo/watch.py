"""What is to be seen of the run at one moment: the operator's API, and what the demo did."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from sqlalchemy import func, select

from celery_lease.errors import RunNotFound
from celery_lease.runs import RunInfo, Runs, Story
from celery_lease.states import RunState
from examples.demo import orders
from examples.demo.app import STAGES, app
from examples.demo.processes import Worker

__all__ = ["Note", "Snapshot", "Watch", "imported_by_epoch", "short"]


@dataclass(frozen=True, slots=True)
class Note:
    """A line about what happens; ``act`` and ``worker`` if the demo did it to somebody."""

    at: float
    text: str
    epoch: int | None = None
    act: str = ""
    worker: str = ""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The run, its lease and the workers at one moment."""

    at: float
    lines: int
    workers: tuple[tuple[str, str, int], ...]
    notes: tuple[Note, ...]
    run: RunInfo | None = None
    duration: float = 0.0
    stage: str = ""
    by_epoch: dict[int, int] = field(default_factory=dict)
    refused: bool = False

    @property
    def state(self) -> str:
        """Of the run; a message that nobody has claimed is none yet."""
        return self.run.state if self.run else "no run yet"

    @property
    def epoch(self) -> int:
        """The current one."""
        return self.run.epoch if self.run else 0

    @property
    def holder(self) -> str:
        """The worker that has the lease, though it may be expired; else nobody."""
        return short(self.run.node) if self.run else ""

    @property
    def imported(self) -> int:
        """Orders in the table."""
        return sum(self.by_epoch.values())

    @property
    def progress(self) -> float:
        """From 0 to 1."""
        return self.imported / self.lines


class Watch:
    """Reads; nothing here decides anything."""

    def __init__(self, workers: dict[str, Worker], lines: int) -> None:
        self.lines = lines
        self.run_id = ""
        self.notes: list[Note] = []
        self._runs = Runs(app)
        self._workers = workers
        self._started_at = time.time()

    def since_start(self, at: float) -> float:
        """A time of the store in seconds since the demo began; on SQLite its clock is ours."""
        return at - self._started_at

    def note(self, text: str, *, epoch: int | None = None, act: str = "", worker: str = "") -> None:
        """Add a line to what is shown."""
        self.notes.append(Note(self.since_start(time.time()), text, epoch, act, worker))

    def story(self) -> Story:
        """All that the store has recorded about the run."""
        return self._runs.story(self.run_id)

    def look(self) -> Snapshot:
        """Everything as it is now."""
        at = self.since_start(time.time())
        workers = tuple((w.name, w.status, w.pid) for w in self._workers.values())
        notes = tuple(self.notes)
        try:
            story = self.story()
        except RunNotFound:
            return Snapshot(at, self.lines, workers, notes)
        refused = any(event["kind"] == "write_refused" for event in story.events)
        return Snapshot(
            at,
            self.lines,
            workers,
            notes,
            story.run,
            max((lease["duration"] for lease in story.leases), default=0.0),
            stage_of(story),
            imported_by_epoch(),
            refused,
        )


def stage_of(story: Story) -> str:
    """Where the run is: the first stage that is neither saved nor passed."""
    saved = {stage["name"] for stage in story.stages}
    if story.run.state is RunState.SUCCEEDED:
        return "done"
    if STAGES[0] not in saved:
        return STAGES[0]
    return STAGES[2] if story.run.progress == 1 else STAGES[1]


def short(node: str | None) -> str:
    """``worker-1`` for Celery's ``worker-1@demo``."""
    return (node or "").partition("@")[0]


def imported_by_epoch() -> dict[int, int]:
    """How many orders each epoch has imported."""
    epoch = orders.imported.c.epoch
    counts = select(epoch, func.count()).group_by(epoch).order_by(epoch)
    with orders.engine().connect() as connection:
        return {row[0]: row[1] for row in connection.execute(counts)}
