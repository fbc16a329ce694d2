"""Celery's ``replace`` under a lease: an outcome of the run.

``Task.replace`` sends other tasks in the place of the one that runs, at once. Sent by the body,
they would be sent again by a body that is redone, and by a holder that has lost its run. So
they become the run's outcome under the epoch, and sending them is part of settling: whoever
settles, be it the holder or a replay, sends the same tasks.
"""

from __future__ import annotations

import logging
from typing import Any, NoReturn

from celery import signature
from celery.exceptions import Ignore

from celery_lease.codec import Codec
from celery_lease.results import Defer, Told
from celery_lease.successors import fix_ids, name_replacement, steady_ids

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
