"""Faults to order: what the server shall do wrong, and at which call.

Every order counts the calls of its action from the moment it is given: `nth=1` is the next one.
`times` is for how many calls in a row it holds, None means until `clear`. Clients that repeat a
failed request by themselves (boto3 does, up to four times) reach the server as several calls.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Final, Literal

Kind = Literal["fail", "delay", "ignore", "drop", "duplicate"]

MESSAGE_ACTIONS: Final = frozenset(
    {
        "ChangeMessageVisibility",
        "ChangeMessageVisibilityBatch",
        "DeleteMessage",
        "DeleteMessageBatch",
        "PurgeQueue",
        "ReceiveMessage",
        "SendMessage",
        "SendMessageBatch",
    }
)
ACTIONS: Final = MESSAGE_ACTIONS | {
    "AddPermission",
    "AssumeRole",
    "CreateQueue",
    "DeleteQueue",
    "GetQueueAttributes",
    "GetQueueUrl",
    "ListDeadLetterSourceQueues",
    "ListQueueTags",
    "ListQueues",
    "RemovePermission",
    "SetQueueAttributes",
    "TagQueue",
    "UntagQueue",
}


@dataclass(slots=True, eq=False)
class Fault:
    """One order; `fired` says how often it has happened."""

    kind: Kind
    action: str
    nth: int = 1
    times: int | None = 1
    seconds: float = 0.0
    code: str = ""
    message: str = ""
    status: int = 0
    after: bool = False
    fired: int = 0
    seen: int = 0

    def meets(self) -> bool:
        """Count one call and say whether the fault falls on it."""
        self.seen += 1
        hit = self.seen >= self.nth and (self.times is None or self.seen < self.nth + self.times)
        self.fired += hit
        return hit


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to happen to one call, in this order."""

    delay: float = 0.0
    denied: bool = False
    failure: Fault | None = None
    drop_before: bool = False
    ignored: bool = False
    drop_after: bool = False


@dataclass(slots=True)
class Faults:
    """The orders in force. Tests give them from any thread; the server takes them."""

    _orders: list[Fault] = field(default_factory=list)
    _denied: set[str] = field(default_factory=set)
    _reordered: bool = False
    _session_seconds: float | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def fail(
        self,
        action: str,
        nth: int = 1,
        *,
        times: int | None = 1,
        code: str = "InternalError",
        status: int | None = None,
        message: str = "We encountered an internal error. Please try again.",
    ) -> Fault:
        """Answer with this error and do nothing. Codes with `Throttl` or `Internal` are typical.

        `status` is 500 for `InternalError`, `InternalFailure` and `ServiceUnavailable`, else 400.
        """
        if status is None:
            status = 500 if code.startswith(("Internal", "ServiceUnavailable")) else 400
        return self._order(
            Fault("fail", action, nth, times, code=code, status=status, message=message)
        )

    def delay(self, action: str, nth: int = 1, *, seconds: float, times: int | None = 1) -> Fault:
        """Do it, but only after these seconds of real time; other calls are not held up."""
        return self._order(Fault("delay", action, nth, times, seconds=seconds))

    def ignore(self, action: str, nth: int = 1, *, times: int | None = 1) -> Fault:
        """Answer 200 without doing it: a receive gets nothing, a send gets a message id.

        Only for actions on messages. Sizes and delays are still checked, handles are not.
        """
        if action not in MESSAGE_ACTIONS:
            raise ValueError(f"only actions on messages can be ignored, not {action!r}")
        return self._order(Fault("ignore", action, nth, times))

    def drop_connection(
        self, action: str, nth: int = 1, *, after: bool = False, times: int | None = 1
    ) -> Fault:
        """Close the connection without an answer, before or `after` doing it."""
        return self._order(Fault("drop", action, nth, times, after=after))

    def deny(self, action: str) -> None:
        """Answer as IAM does when the permission is missing, until `clear`.

        As in IAM, the permission for an action covers its batch form, so both are denied.
        """
        _check_action(action)
        with self._lock:
            self._denied.add(action.removesuffix("Batch"))

    def duplicate(self, nth: int = 1, *, times: int | None = 1) -> Fault:
        """Deliver a message twice: it stays receivable although the n-th delivery got it.

        Counts messages handed out, not calls, and standard queues only.
        """
        return self._order(Fault("duplicate", "ReceiveMessage", nth, times))

    def reorder(self) -> None:
        """Hand out the newest message first, until `clear`. FIFO queues keep their order."""
        with self._lock:
            self._reordered = True

    def shorten_sessions(self, seconds: float) -> None:
        """Let every session of an assumed role that begins from now on end after this time.

        AWS grants 900 s at least, which is long for a test.
        """
        self._session_seconds = seconds

    def clear(self) -> None:
        """End every fault."""
        with self._lock:
            self._orders.clear()
            self._denied.clear()
            self._reordered = False
            self._session_seconds = None

    @property
    def reordered(self) -> bool:
        """Whether `reorder` is in force."""
        return self._reordered

    @property
    def session_seconds(self) -> float | None:
        """How long new sessions last, if `shorten_sessions` is in force."""
        return self._session_seconds

    def plan(self, action: str) -> Plan:
        """Count one call of the action and say what is to happen to it."""
        with self._lock:
            met = [
                fault
                for fault in self._orders
                if fault.action == action and fault.kind != "duplicate" and fault.meets()
            ]
            denied = action.removesuffix("Batch") in self._denied
        return Plan(
            delay=sum(f.seconds for f in met if f.kind == "delay"),
            denied=denied,
            failure=next((f for f in met if f.kind == "fail"), None),
            drop_before=any(f.kind == "drop" and not f.after for f in met),
            ignored=any(f.kind == "ignore" for f in met),
            drop_after=any(f.kind == "drop" and f.after for f in met),
        )

    def duplicates_next(self) -> bool:
        """Count one delivery and say whether it is to be a duplicate."""
        with self._lock:
            met = [fault.meets() for fault in self._orders if fault.kind == "duplicate"]
        return any(met)

    def _order(self, fault: Fault) -> Fault:
        _check_action(fault.action)
        if fault.nth < 1 or (fault.times is not None and fault.times < 1):
            raise ValueError(f"calls are counted from 1, not nth={fault.nth}, times={fault.times}")
        with self._lock:
            self._orders.append(fault)
        return fault


def _check_action(action: str) -> None:
    if action not in ACTIONS:
        raise ValueError(f"not an action of SQS: {action!r}")
