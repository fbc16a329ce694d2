"""Tasks for canvases, each once leased and once plain; a worker gets them by ``imports``.

A task is known by its ``label``, whatever its id, and notes all that its message brought.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

from celery import Task, signature
from celery.exceptions import Ignore, Reject

from celery_lease import LeasedTask
from tests.integration.apps.shop import app
from tests.integration.apps.side import note, wait_for


def both(name: str, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Register a body as ``shop.leased_NAME`` and as ``shop.plain_NAME``."""

    def register(body: Callable[..., Any]) -> Any:
        plain = app.task(bind=True, name=f"shop.plain_{name}", **options)(body)
        leased = app.task(base=LeasedTask, bind=True, name=f"shop.leased_{name}", **options)(body)
        return plain, leased

    return register


def seen(task: Any, label: str, args: Any, what: str = "node") -> None:
    """Note what a body sees of itself."""
    request = task.request
    info = request.delivery_info or {}
    headers = request.headers or {}
    note(
        what,
        run=request.id,
        label=label,
        args=list(args),
        name=task.name.replace("leased_", "").replace("plain_", ""),
        parent=request.parent_id,
        root=request.root_id,
        group=request.group,
        index=request.group_index,
        chord=request.chord is not None,
        chain=len(request.chain or ()),
        retries=request.retries,
        shadow=request.shadow,
        stamped=sorted(request.stamped_headers or ()),
        stamps=request.stamps,
        nesting=request.replaced_task_nesting,
        ignore=request.ignore_result,
        limits=request.timelimit,
        priority=info.get("priority"),
        queue=info.get("routing_key"),
        correlated=request.correlation_id == request.id,
        mine={name: value for name, value in headers.items() if name.startswith("x-")},
    )


@both("node")
def node(self: Any, *args: Any, label: str, gate: str = "") -> Any:
    """Note it, and return what it was given under its own label."""
    seen(self, label, args)
    if gate:
        wait_for(gate)
    return [label, *args]


@both("broken")
def broken(self: Any, *args: Any, label: str) -> None:
    """Note it, and fail."""
    seen(self, label, args)
    raise ValueError(f"{label} is broken")


@both("errback")
def errback(self: Any, *args: Any, label: str) -> None:
    """What is sent when something has failed: note whose failure it was."""
    seen(self, label, args)


@both("swap")
def swap(self: Any, *args: Any, label: str, other: Any, gate: str = "") -> Any:
    """Let another canvas take this task's place."""
    seen(self, label, args)
    if gate:
        wait_for(gate)
    return self.replace(signature(other, app=app))


@both("more")
def more(self: Any, *args: Any, label: str, other: Any, gate: str = "") -> Any:
    """Add members to the chord that this task is one of."""
    seen(self, label, args)
    for one in other:
        self.add_to_chord(signature(one, app=app))
    if gate:
        wait_for(gate)
    return label


@both("ends")
def ends(self: Any, *args: Any, label: str, how: str) -> Any:
    """End as Celery lets a body end itself."""
    seen(self, label, args)
    if how == "ignore":
        raise Ignore
    raise Reject(how, requeue=False)


@app.task(name="shop.inline", shared=False)
def inline(request: Any, error: BaseException, traceback: Any) -> None:
    """An errback of the newer kind: called where the task has failed, not sent."""
    note("inline", run=request.id, error=f"{type(error).__name__}: {error}")


# -- retries ----------------------------------------------------------------------------------


class Hooks:
    """Celery's hooks, each of which notes that it was called."""

    def _note(self, hook: str, kwargs: Any, what: Any = None) -> None:
        note("hook", label=kwargs["label"], hook=hook, about=repr(what))

    def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
        self._note("before_start", kwargs)

    def on_success(self, retval: Any, task_id: str, args: Any, kwargs: Any) -> None:
        self._note("on_success", kwargs)

    def on_retry(self, exc: Any, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
        self._note("on_retry", kwargs, exc)

    def on_failure(self, exc: Any, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
        self._note("on_failure", kwargs, exc)

    def after_return(self, status: str, *args: Any) -> None:
        self._note(f"after_return {status}", args[3])


class HookedTask(Hooks, Task):
    abstract = True


class HookedLeasedTask(Hooks, LeasedTask):
    abstract = True


def hooked(name: str, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """As ``both``, with hooks."""

    def register(body: Callable[..., Any]) -> Any:
        for kind, base in (("plain", HookedTask), ("leased", HookedLeasedTask)):
            app.task(base=base, bind=True, name=f"shop.{kind}_{name}", **options)(body)

    return register


@hooked("tries", max_retries=2)
def tries(self: Any, *args: Any, label: str, failures: int, how: str, **more: Any) -> Any:
    """Ask for so many other tries, in one of the ways that Celery has."""
    seen(self, label, [*args, more])
    if self.request.retries >= failures:
        return [label, *args]
    match how:
        case "raise":
            raise LookupError(label)
        case "exc":
            raise self.retry(exc=ValueError("not yet"), countdown=0)
        case "args":
            kwargs = {**self.request.kwargs, "again": self.request.retries}
            raise self.retry(args=(*args, "more"), kwargs=kwargs, countdown=0)
        case "queue":
            raise self.retry(queue="aside", countdown=0, priority=7)
        case "eta":
            raise self.retry(eta=datetime.now(UTC) + timedelta(seconds=1))
        case "often":
            raise self.retry(countdown=0, max_retries=4)
        case "quietly":
            self.retry(countdown=0, throw=False)
            return "this is not the end"
    try:
        raise LookupError(label)
    except LookupError as error:
        raise self.retry(countdown=0) from error


@hooked(
    "automatic",
    autoretry_for=(LookupError,),
    dont_autoretry_for=(KeyError,),
    retry_kwargs={"max_retries": 2, "countdown": 0},
)
def automatic(self: Any, *args: Any, label: str, failures: int, how: str = "") -> Any:
    """Fail so many times, and be tried again by Celery."""
    seen(self, label, args)
    if self.request.retries >= failures:
        return [label, *args]
    raise KeyError(label) if how else LookupError(label)


@hooked(
    "slower",
    autoretry_for=(LookupError,),
    retry_backoff=1,
    retry_jitter=False,
    max_retries=2,
)
def slower(self: Any, *args: Any, label: str, failures: int) -> Any:
    """Fail so many times, and be tried again after one second, then after two."""
    seen(self, label, args)
    if self.request.retries >= failures:
        return [label, *args]
    raise LookupError(label)


@both("expected", throws=(KeyError,))
def expected(self: Any, *args: Any, label: str) -> Any:
    """Fail in a way that is no surprise."""
    seen(self, label, args)
    raise KeyError(label)


@app.task(base=LeasedTask, bind=True, name="shop.climbs", max_retries=9)
def climbs(self: Any, steps: int, dies_at: int) -> Any:
    """A checkpoint, then another try; at one step the process dies twice before it."""
    step = self.lease.restore(0)
    lease = self.lease
    note(
        "climb",
        run=self.request.id,
        step=step,
        epoch=lease.epoch,
        attempt=lease.attempt,
        retries=self.request.retries,
    )
    if step == dies_at and lease.attempt <= 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if step == steps:
        return step
    self.lease.checkpoint(step + 1)
    raise self.retry(countdown=0)
