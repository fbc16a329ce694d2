"""The lease: the right to work on a run, and the handle that task code uses.

The model in short
------------------
A *run* is one unit of work; its id is the Celery task id. A message is only a *trigger*: it
says "this run may be claimable at epoch N" and decides nothing. A worker *claims* the run in
the database: compare-and-swap on the epoch, of any number of claims one wins. The claim is a
*lease*. It expires unless the heartbeat renews it, and it carries the *epoch*, a fencing
token that grows by one with every claim and is never reset or used again.

What identifies a holder is the epoch together with the *holder* id, new for every delivery.
It is not the worker's name (the same process may claim the run again), not the attempt
(which is reset by progress) and not Celery's ``retries``.

Who is authoritative: the database, and its clock. A holder *trusts* its lease until the
moment it sent the last accepted renewal plus the lease's duration, on its own monotonic
clock. When that is over and the store cannot be asked, nothing is known: verbs wait for the
store. A holder that was paused and comes back finds its writes refused, because

* every write carries run, epoch and holder in its condition, and a condition that hits no
  row raises :class:`~celery_lease.errors.LeaseLost`;
* a lease is handed over in two steps, *suspect* and *reclaim*, and the second re-checks the
  first; until then a late renewal is accepted, for nobody else was granted the run;
* after it, the old holder's renewal, checkpoint and outcome are refused, always.

What is not promised: that the body runs once, or that a paused holder stops in time. Fencing
makes it harmless, not absent. What the body does to the outside world needs an idempotency
key or the epoch (``lease.headers``) to be safe.

The body starts from the top after a hand-off or a crash. What was saved is not done again:
a *checkpoint* is the newest progress value, a *stage* is a named result.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, Protocol, TypeVar

from celery_lease.errors import DuplicateName, IllegalTransition

__all__ = ["Backing", "Lease", "bound", "current_lease", "stage_key"]

T = TypeVar("T")
Name = str | tuple[Any, ...]


class Backing(Protocol):
    """Where a lease keeps its state: the store, or memory for a direct call."""

    run_id: str
    epoch: int
    attempt: int
    holder: str

    def restore(self) -> tuple[bool, Any]:
        """(True, the last checkpoint), or (False, None)."""

    def checkpoint(self, value: Any, within: Any, progress: float | None, note: str | None) -> None:
        """Save progress; may end the execution by raising ``HandOff``."""

    def load_stage(self, name: str) -> tuple[bool, Any]:
        """(True, the saved result), or (False, None)."""

    def save_stage(self, name: str, value: Any, seconds: float) -> Any:
        """Save a result and return it as it will be read; may raise ``HandOff``."""

    def fence(self, session: Any) -> None:
        """Lock and check the run in the caller's transaction."""

    def check(self) -> None:
        """Ask the store whether the lease is still ours."""

    def remaining(self) -> float:
        """Seconds for which the lease is known to be ours; negative: not known."""

    def should_yield(self) -> bool:
        """Whether the next checkpoint hands off."""


class Lease:
    """What a task may know and do about its own run: ``self.lease``."""

    def __init__(self, backing: Backing) -> None:
        self._backing = backing
        self._names: set[str] = set()
        self._inside: str | None = None

    @property
    def run_id(self) -> str:
        """The id of the run: the Celery task id."""
        return self._backing.run_id

    @property
    def epoch(self) -> int:
        """The fencing token: grows with every claim of the run, never reset."""
        return self._backing.epoch

    @property
    def attempt(self) -> int:
        """Claims since the last new progress, this one included."""
        return self._backing.attempt

    @property
    def holder(self) -> str:
        """The opaque id of this delivery."""
        return self._backing.holder

    @property
    def headers(self) -> dict[str, str]:
        """HTTP headers that let a receiver refuse a stale holder.

        ``X-Execution-Fence`` is the epoch, ``X-Execution-Run`` the run.
        """
        return {"X-Execution-Run": self.run_id, "X-Execution-Fence": str(self.epoch)}

    @property
    def should_yield(self) -> bool:
        """True when the next checkpoint or stage hands the run off.

        The worker is stopping, or the message's stage budget is used up.
        """
        return self._backing.should_yield()

    def remaining(self) -> float:
        """Seconds for which the lease is known to be ours.

        Zero or less: the last renewal is too old to tell; ``check`` asks the store.
        """
        return self._backing.remaining()

    def check(self) -> None:
        """Ask the store now; raises ``LeaseLost`` if the run is no longer ours."""
        self._backing.check()

    def restore(self, default: T) -> T:
        """The last checkpoint of the run, or ``default`` if there is none."""
        found, value = self._backing.restore()
        return value if found else default

    def checkpoint(
        self,
        value: Any,
        *,
        within: Any = None,
        progress: float | None = None,
        note: str | None = None,
    ) -> None:
        """Save ``value`` as the run's progress, under the epoch.

        After it the run may go on here, or be handed off to a new message: then nothing
        after this call is executed, and the next execution starts from the top with
        ``restore``. ``within`` is the caller's own open transaction on the same database (a
        SQLAlchemy session or connection): rows and checkpoint are committed together, or
        not at all; make it the last call before the commit. ``progress`` is a fraction from
        0 to 1 and ``note`` a short text, both for people.

        Raises ``LeaseLost``, ``NotSerializable``.
        """
        self._not_inside("checkpoint")
        self._backing.checkpoint(value, within, _fraction(progress), note)

    def stage(self, name: Name, fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """The result of ``fn(*args, **kwargs)``, saved under ``name`` and never redone.

        The result comes back in its decoded serialised form, also the first time. ``name``
        is a string or a tuple; using one twice in one execution raises ``DuplicateName``.
        After a stage the run may be handed off, as after a checkpoint.
        """
        self._not_inside("stage")
        key = stage_key(name)
        if key in self._names:
            raise DuplicateName(
                f"the stage {name!r} was used twice in one execution of run {self.run_id}; "
                "tell rounds apart by a tuple, for example ('page', n)"
            )
        self._names.add(key)
        found, value = self._backing.load_stage(key)
        if found:
            return value  # type: ignore[no-any-return]  # what fn returned, decoded
        started = time.monotonic()
        self._inside = key
        try:
            value = fn(*args, **kwargs)
        finally:
            self._inside = None
        saved: T = self._backing.save_stage(key, value, time.monotonic() - started)
        return saved

    def fence(self, session: Any) -> None:
        """Lock and check the run in the caller's own open transaction.

        Call it last before the commit: if it returns, nobody else is granted the run until
        that transaction ends. Raises ``LeaseLost`` if the run is no longer ours; the
        transaction cannot be committed then.
        """
        self._backing.fence(session)

    def _not_inside(self, verb: str) -> None:
        if self._inside is not None:
            raise IllegalTransition(
                f"lease.{verb} inside the stage {self._inside!r}: a stage is saved as a whole"
            )

    def __repr__(self) -> str:
        return f"<Lease run={self.run_id} epoch={self.epoch} holder={self.holder}>"


def stage_key(name: Name) -> str:
    """The stored form of a stage's name: a string as it is, a tuple as JSON."""
    if isinstance(name, str):
        key = json.dumps(name) if name[:1] in ("[", '"') else name
    elif isinstance(name, tuple):
        try:
            key = json.dumps(name, separators=(",", ":"))
        except TypeError as exc:
            raise TypeError(f"stage name {name!r}: a tuple of strings and numbers") from exc
    else:
        raise TypeError(f"stage name {name!r}: give a string or a tuple, not {type(name)}")
    if not key or len(key) > 255:
        raise ValueError(f"stage name {name!r}: give between 1 and 255 characters")
    return key


def _fraction(progress: float | None) -> float | None:
    if progress is None:
        return None
    if not 0 <= progress <= 1:
        raise ValueError(f"progress = {progress!r}: give a fraction from 0 to 1")
    return float(progress)


_CURRENT: ContextVar[Lease | None] = ContextVar("celery_lease_current", default=None)


def current_lease() -> Lease:
    """The lease of the leased task that runs here, for helpers that are not given it.

    Raises ``LookupError`` outside a leased task.
    """
    lease = _CURRENT.get()
    if lease is None:
        raise LookupError("no leased task is running here")
    return lease


@contextlib.contextmanager
def bound(lease: Lease) -> Iterator[Lease]:
    """Make ``lease`` the current one for the block."""
    token = _CURRENT.set(lease)
    try:
        yield lease
    finally:
        _CURRENT.reset(token)
