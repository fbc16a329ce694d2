"""Named points at which a worker of a test is killed: the code around them knows nothing.

``arm("before publish")`` kills the pool process that reaches the point, ``arm("worker: before
publish")`` the worker's whole process group, whichever of its processes does.
"""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable
from typing import Any

from celery_lease.request import LeasedRequest
from celery_lease.store import Store
from celery_lease.trigger import Sender

__all__ = ["POINTS", "arm"]

#: Name → class, method, and whether the point is before or after the call.
POINTS: dict[str, tuple[type, str, str]] = {
    "before reserve": (Store, "reserve", "before"),
    "before publish": (Sender, "_publish", "before"),
    "after publish": (Sender, "_publish", "after"),
    "before complete": (Store, "complete", "before"),
    "after complete": (Store, "complete", "after"),
    "before acknowledge": (LeasedRequest, "acknowledge", "before"),
}


def arm(point: str) -> None:
    """Kill this worker at ``point``, when it first gets there; an empty name does nothing."""
    if not point:
        return
    whole, _, name = point.rpartition(": ")
    owner, method, when = POINTS[name]
    setattr(owner, method, _fatal(getattr(owner, method), when, _worker if whole else _child()))


def _fatal(original: Callable[..., Any], when: str, end: Callable[[], None]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if when == "before":
            end()
            return original(*args, **kwargs)
        answer = original(*args, **kwargs)
        end()
        return answer

    return call


def _child() -> Callable[[], None]:
    main = os.getpid()  # the app is loaded before the pool is forked

    def end() -> None:
        if os.getpid() != main:
            os.kill(os.getpid(), signal.SIGKILL)

    return end


def _worker() -> None:
    os.killpg(0, signal.SIGKILL)
