"""Celery's tracer around a leased task.

It calls the task and tells the result backend what came of it. Within it only the outcome of
the run may be told; what is told instead of an outcome goes back to the broker.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from billiard.einfo import ExceptionInfo
from celery.app.trace import FAILURE, REJECTED, TraceInfo, trace_ok_t

from celery_lease.application import Leasing
from celery_lease.exits import left
from celery_lease.results import Defer, Left, Voice, speaking
from celery_lease.trigger import EPOCH_HEADER

__all__ = ["is_plain", "leased"]

logger = logging.getLogger(__name__)

#: Seconds until a message comes back whose run could not be claimed, for no reason we know.
_UNCLAIMED_DELAY = 10.0


def leased(task: Any, tracer: Callable[..., Any]) -> Callable[..., Any]:
    """``tracer`` for a leased task: whatever it meets, nothing but the outcome is told."""

    def trace(uuid: str, args: Any, kwargs: Any, request: Any = None) -> Any:
        leasing = Leasing.of(task.app)
        if is_plain(leasing, request or {}):
            return tracer(uuid, args, kwargs, request)
        with speaking(Voice(task_id=uuid)) as voice:
            try:
                traced = tracer(uuid, args, kwargs, request)
                failed = getattr(traced.info, "state", "") == FAILURE
                if voice.outcome is None and failed:
                    raise Defer(_UNCLAIMED_DELAY, "unexpected") from traced.info.retval
                if voice.leaves and failed:
                    raise Left(traced.retval)
            except Left as exc:
                info = ExceptionInfo(internal=True)
                return trace_ok_t(info, TraceInfo(FAILURE, exc), traced.runtime, traced.retstr)
            except Defer as exc:
                # On some pools it would end the worker.
                if exc.__cause__ is not None:
                    logger.error("run=%s has not begun, its message stays", uuid, exc_info=exc)
                info = ExceptionInfo(internal=True)
                return trace_ok_t(info, TraceInfo(REJECTED, exc), 0.0, None)
            except BaseException as exc:  # noqa: BLE001 - raised again where it belongs
                return left(exc, request)
            return traced

    return trace


def is_plain(leasing: Leasing, request: Mapping[str, Any]) -> bool:
    """Whether the task behaves as one of Celery's own: leases are switched off.

    Not for a trigger, also at epoch 0: its run is known to the store, and done without a
    lease it would be triggered, and done, once more.
    """
    return not leasing.settings.enabled and request.get(EPOCH_HEADER) is None
