"""``sys.exit`` in a body, where parent and body are one process.

On the prefork pool a body that leaves by ``SystemExit`` or ``KeyboardInterrupt`` takes its
process with it, and the parent process notices. On the threads and solo pools Celery loses
track of the task: its message would stay with the worker, and its lease would be renewed, for
as long as the worker lives. So it is told what the parent of a process would have been told.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from billiard.einfo import ExceptionInfo
from billiard.exceptions import WorkerLostError
from celery.app.trace import FAILURE, TraceInfo, trace_ok_t
from celery.exceptions import WorkerShutdown, WorkerTerminate

from celery_lease.delivery import REQUEST_KEY

__all__ = ["left"]


def left(error: BaseException, request: Mapping[str, Any] | None) -> Any:
    """What the tracer returns for a body that left by ``error``; raises it where it belongs.

    An ordinary exception, the end of the worker itself, and the end of a process whose
    parent looks after it are nobody else's affair.
    """
    known = (request or {}).get(REQUEST_KEY)
    ends_its_process = known is None or known["interruptible"]
    if ends_its_process or isinstance(error, Exception | WorkerShutdown | WorkerTerminate):
        raise error
    try:
        raise WorkerLostError(repr(error)) from error
    except WorkerLostError as lost:
        return trace_ok_t(ExceptionInfo(), TraceInfo(FAILURE, lost), 0.0, None)
