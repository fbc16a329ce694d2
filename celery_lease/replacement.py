"""Celery's ``replace`` under a lease: an outcome of the run.

``Task.replace`` sends other tasks in the place of the one that runs, at once. Sent by the body,
they would be sent again by a body that is redone, and by a holder that has lost its run. So
they become the run's outcome under the epoch, and sending them is part of settling: whoever
settles, be it the holder or a replay, sends the same tasks.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, NoReturn

from celery import current_task, signature
from celery.exceptions import Ignore
from celery.signals import before_task_publish

from celery_lease.codec import Codec
from celery_lease.results import Defer, Told
from celery_lease.successors import fix_ids, name_replacement, replacement_of, steady_ids
from celery_lease.trigger import RUN_HEADER

__all__ = ["Replaced", "encode_replacement", "send_replacement"]

logger = logging.getLogger(__name__)


class Replaced(Ignore):
    """The body has put other tasks in the place of its own."""


def encode_replacement(app: Any, run_id: str, task_id: str, replacement: Any) -> bytes:
    """What ``replace`` would send, with its ids; raises ``NotSerializable``."""
    name_replacement(run_id, task_id, replacement)
    fix_ids(run_id, replacement, "replacement")
    serializer = replacement.options.get("serializer") or app.conf.task_serializer
    return Codec(serializer).encode(replacement, what=f"the replacement of run {run_id}")


def send_replacement(app: Any, run_id: str, blob: bytes) -> NoReturn:
    """Send it; raises ``Told``, or ``Defer`` if the broker did not take it: a replay will."""
    # Written by a holder of the run: read in whatever form it chose.
    codec = Codec(accept=[bytes(blob).partition(b";")[0].decode()])
    replacement = signature(codec.decode(blob), app=app)
    try:
        with steady_ids(run_id):
            replacement.apply_async()
    except Exception as exc:
        logger.warning("the replacement of run=%s is not sent yet: %s", run_id, exc)
        raise Defer(0.0, "replacement") from exc
    raise Told("Replaced by new task")


@before_task_publish.connect
def _name_the_next(headers: Any = None, body: Any = None, **_: Any) -> None:
    """A plain task that took a run's place may be replaced by a leased one in turn.

    That one has the same task id again, and would be taken for the run that is over. It is
    the task that is sent here, or a later one that the message brings.
    """
    request = current_task.request if current_task else None
    run_id = (getattr(request, "headers", None) or {}).get(RUN_HEADER)
    if request is None or run_id is None or headers is None or RUN_HEADER in headers:
        return
    if headers.get("id") == request.id:
        headers[RUN_HEADER] = replacement_of(run_id)
    if isinstance(body, tuple):
        args, _, embed = body
        # Celery's watcher of a chord is given the body as an argument.
        for later in (*args, *(embed.get("chain") or ()), embed.get("chord")):
            if isinstance(later, Mapping) and "task" in later:
                name_replacement(run_id, request.id, later)
