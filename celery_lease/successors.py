"""The tasks that follow a run: which ids they have, so that a replay sends the same ones.

Celery gives a callback its id when it is sent. What is sent again would be another task then,
and a leased one would run twice. So everything that a finished run sends gets an id made of
the run's own, and of its place: the second sending finds the run of the first.

Groups and chords inside a chain get the id of the *group* only while Celery sends the chain,
whatever its signatures say. Members of one group that were sent twice, under two group ids,
would be counted apart, and a chord of leased ones would never be complete. So Celery's canvas
takes those ids from the run as well, for as long as the run's successors are sent.
"""

from __future__ import annotations

import contextlib
import json
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from hashlib import sha256
from itertools import count
from typing import Any

from celery import canvas

from celery_lease.trigger import RUN_HEADER

__all__ = [
    "fix_ids",
    "fix_successors",
    "name_member",
    "name_replacement",
    "replacement_of",
    "steady_ids",
]


def fix_successors(run_id: str, request: Any) -> None:
    """Fix the ids of all that a request's outcome may send.

    The body of a chord is sent by whichever member is the last one: its parts are named after
    the chord.
    """
    fix_ids(run_id, request.callbacks, "link")
    fix_ids(run_id, request.errbacks, "link_error")
    fix_ids(run_id, request.chain, "chain")
    fix_ids(request.group or run_id, request.chord, "chord")


def fix_ids(owner: str, signatures: Any, path: str) -> None:
    """Give signatures without an id a fixed one, made of ``owner`` and ``path``.

    Walks through groups, chains, chords and their callbacks; ids that are there stay.
    """
    if isinstance(signatures, Mapping):
        signatures = [signatures]
    for index, signature in enumerate(signatures or ()):
        _fix(owner, signature, f"{path}/{index}")


def _fix(owner: str, signature: Any, path: str) -> None:
    if not isinstance(signature, Mapping):
        return
    options = signature.setdefault("options", {})  # type: ignore[attr-defined]  # a dict
    nested = signature.get("kwargs") or {}
    kind = signature.get("subtask_type")
    # A chain has no id beside that of its last step.
    if kind != "chain" and not options.get("task_id"):
        options["task_id"] = _id(owner, path)
    if kind in ("group", "chain"):
        fix_ids(owner, nested.get("tasks"), f"{path}/tasks")
    elif kind == "chord":
        fix_ids(owner, nested.get("header"), f"{path}/header")
        fix_ids(owner, nested.get("body"), f"{path}/body")
    fix_ids(owner, options.get("link"), f"{path}/link")
    fix_ids(owner, options.get("link_error"), f"{path}/link_error")


def name_replacement(run_id: str, task_id: str, signature: Any) -> None:
    """Let the task that keeps its predecessor's id be a run of its own.

    In a chain or a chord it is one of the steps that keeps the id.
    """
    options = signature.setdefault("options", {})
    nested = signature.get("kwargs") or {}
    match signature.get("subtask_type"):
        case "chain" | "group":
            parts = nested.get("tasks") or ()
        case "chord":
            parts = [nested["body"]] if nested.get("body") else ()
        case _:
            parts = ()
            if options.get("task_id") == task_id:
                headers = options.get("headers") or {}
                options["headers"] = {**headers, RUN_HEADER: replacement_of(run_id)}
    for part in parts:
        name_replacement(run_id, task_id, part)


def replacement_of(run_id: str) -> str:
    """The run that goes on under the task id of ``run_id``."""
    return _id(run_id, "replacement")


def replacement_name(run_id: str, number: int = 1) -> str:
    """The run id of the ``number``-th replacement of a run; the same each time."""
    return _id(run_id, "replacement" if number == 1 else f"replacement/{number}")


def name_member(run_id: str, signature: Any, added: Counter[str]) -> None:
    """Give what a body adds to its chord an id that the redone body gives it too.

    It is made of the task and its arguments, because a body may go on from a checkpoint;
    ``added`` counts what this execution has added.
    """
    what = [signature.get(name) for name in ("task", "args", "kwargs")]
    digest = sha256(json.dumps(what, sort_keys=True, default=repr).encode()).hexdigest()
    fix_ids(run_id, signature, f"member/{digest}/{added[digest]}")
    added[digest] += 1


_STEADY: ContextVar[Iterator[str] | None] = ContextVar("celery_lease_steady_ids", default=None)
_random_id = canvas.uuid


@contextlib.contextmanager
def steady_ids(run_id: str) -> Iterator[None]:
    """The ids that Celery's canvas makes up in the block are the run's, in their order."""
    token = _STEADY.set(_id(run_id, f"canvas/{number}") for number in count())
    try:
        yield
    finally:
        _STEADY.reset(token)


def _next_id() -> str:
    steady = _STEADY.get()
    return str(_random_id()) if steady is None else next(steady)


# There is no other way to these ids; outside a sending they are what they were.
canvas.uuid = _next_id


def _id(owner: str, path: str) -> str:
    namespace = uuid.uuid5(uuid.NAMESPACE_URL, f"celery-lease:{owner}")
    return str(uuid.uuid5(namespace, path))
