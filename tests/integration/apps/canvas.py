"""Tasks for canvases, each once leased and once plain; a worker gets them by ``imports``.

A task is known by its ``label``, whatever its id, and notes all that its message brought.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery import signature
from celery.exceptions import Ignore, Reject

from celery_lease import LeasedTask
from tests.integration.apps.shop import app, note, wait_for

LIBRARYS_OWN = "lease_"


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
