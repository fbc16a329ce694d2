"""One message in a worker, from its arrival to a grant: the delivery table, applied."""

from __future__ import annotations

import logging
import random
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from celery.exceptions import Ignore

from celery_lease import signals
from celery_lease.errors import LeaseError, NotSerializable, StoreBusy, StoreUnavailable
from celery_lease.moments import seconds_until
from celery_lease.results import Defer
from celery_lease.states import Decision, RunState, RunView, Step, decide
from celery_lease.store import Grant, Replay
from celery_lease.trigger import EPOCH_HEADER, RUN_HEADER, STORED_HEADER, Envelope

if TYPE_CHECKING:
    from celery_lease.application import Leasing
    from celery_lease.policy import Terms

__all__ = ["REQUEST_KEY", "Admission", "Delivery", "envelope_of", "is_unheld", "new_holder"]

logger = logging.getLogger(__name__)

#: Under this key the parent process hands its part of a delivery to the pool child.
REQUEST_KEY = "lease_delivery"

_BUSY_DELAY = 2.0
_BUSY_PAUSE = 0.05
_LONGEST_WAIT = 5.0
_TRIES = 6


def new_holder(node: str | None) -> str:
    """An id for one delivery: the node's name and a random part."""
    return f"{node or 'local'}/{uuid.uuid4().hex}"


@dataclass(frozen=True, slots=True)
class Delivery:
    """What the parent process knows of a message, as the child is told."""

    run_id: str
    holder: str
    expected: int = 0
    stored: bool = False
    receives: int | None = None
    received_at: float = 0.0
    can_defer: bool = False
    #: Seconds until it comes again when it is left for its queue's dead-letter policy;
    #: None: its queue has none.
    leave_delay: float | None = None
    #: A worker's main process keeps its lease and message.
    attended: bool = False
    interruptible: bool = False
    #: Its broker delivers nothing else of its group meanwhile.
    in_group: bool = False
    slot: int | None = None
    revoked: bool = False
    node: str | None = None
    content_type: str = "application/json"
    exchange: str = ""
    routing_key: str = ""
    headers: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of_message(
        cls, headers: Mapping[str, Any], info: Mapping[str, Any], **known: Any
    ) -> Delivery:
        """The delivery of a message with these headers and this delivery info."""
        return cls(
            run_id=str(headers.get(RUN_HEADER) or headers["id"]),
            expected=_whole(headers.get(EPOCH_HEADER)),
            stored=bool(headers.get(STORED_HEADER)),
            exchange=info.get("exchange") or "",
            routing_key=info.get("routing_key") or "",
            headers=dict(headers),
            **known,
        )

    @classmethod
    def of_request(
        cls, request: Any, *, queue: str, name: Callable[[str], str | None] = lambda task_id: None
    ) -> Delivery:
        """The delivery that a task's request belongs to; an eager one has no message.

        ``queue`` is where an eager run goes on if its process dies; ``name`` says which run
        it is if its task id is that of another one.
        """
        known = getattr(request, REQUEST_KEY, None)
        if known is not None:
            return cls(**known)
        headers = request.headers or {}
        return cls(
            run_id=str(headers.get(RUN_HEADER) or name(request.id) or request.id),
            holder=new_holder(request.hostname),
            expected=_whole(headers.get(EPOCH_HEADER)),
            received_at=time.monotonic(),
            routing_key=(request.delivery_info or {}).get("routing_key") or queue,
            headers={"id": request.id, "task": request.task or ""},
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain values, to travel to a pool child inside the request."""
        return {name: getattr(self, name) for name in self.__slots__}


class Admission:
    """Brings a delivery to a grant or a replay, or raises ``Ignore`` or ``Defer``."""

    def __init__(
        self, leasing: Leasing, task: Any, request: Any, delivery: Delivery, terms: Terms
    ) -> None:
        self._leasing = leasing
        self._store = leasing.store
        self._task = task
        self._request = request
        self._delivery = delivery
        self._terms = terms

    def admit(self) -> Grant | Replay:
        """Try until the store answers; a body never starts without its answer.

        The message stays hidden meanwhile, because the parent process keeps extending it.
        """
        wait = 0.2
        while True:
            if self._leasing.stopping and self._delivery.attended:
                self._defer("stopping", 0.0)
            try:
                with self._leasing.interrupts.shield():
                    return self._admit()
            except StoreBusy as exc:
                if not self._delivery.attended:
                    time.sleep(_BUSY_PAUSE)
                    continue
                logger.warning("run=%s is deferred: %s", self._delivery.run_id, exc)
                self._defer("busy", _BUSY_DELAY, quietly=True)
            except StoreUnavailable as exc:
                logger.warning("run=%s waits for the lease store: %s", self._delivery.run_id, exc)
                time.sleep(wait * random.uniform(0.8, 1.2))  # noqa: S311 - spreads load only
                wait = min(wait * 2, _LONGEST_WAIT)

    def _admit(self) -> Grant | Replay:
        expected = self._delivery.expected
        if self._delivery.revoked:
            self._pass_on_revoke()
        if expected == 0:
            self._before_a_first_claim()
            if self._ahead() > 0 and self._store.view(self._delivery.run_id) is None:
                self._act(None, expected)
        for _ in range(_TRIES):
            answer = self._claim(expected)
            if isinstance(answer, Grant):
                return answer
            if answer.busy:
                # Most often by the sender of this very trigger, which marks it as sent.
                time.sleep(_BUSY_PAUSE * random.uniform(0.5, 1.5))  # noqa: S311 - spreads load only
                continue
            step = self._act(answer.view, expected)
            if isinstance(step, Replay):
                return step
            expected = step
        self._defer("busy", _BUSY_DELAY)
        raise AssertionError("unreachable")

    def _pass_on_revoke(self) -> None:
        """A revoke that only Celery's workers know of, at any epoch, is put to the store.

        They remember it for hours: it must not end a run that an operator has resumed since.
        """
        run_id = self._delivery.run_id
        resumed = any(event["kind"] == "resumed" for event in self._store.events(run_id))
        if not resumed and is_unheld(self._store.view(run_id)):
            self._store.revoke(run_id, "revoked by Celery")

    def _before_a_first_claim(self) -> None:
        """A past ``expires`` that only Celery knows of is put to the store."""
        run_id = self._delivery.run_id
        left = seconds_until(self._request.expires)
        if left is not None and left <= 0:
            self._enqueue(expires_in=left)
            self._store.expire(run_id)

    def _ahead(self) -> float:
        """Seconds until the message's ETA; a trigger of the store has none."""
        return seconds_until(self._request.eta) or 0.0

    def _claim(self, expected: int) -> Any:
        return self._store.claim(
            self._delivery.run_id,
            expected,
            self._delivery.holder,
            task=self._task.name,
            terms=self._terms,
            node=self._delivery.node or self._request.hostname,
            envelope=self._first_envelope() if expected == 0 else None,
            deliver=self._task.has_to_deliver(self._request),
        )

    def _act(self, view: RunView | None, expected: int) -> Replay | int:
        """Do what the table says; returns the epoch to expect at the next try."""
        run_id, holder = self._delivery.run_id, self._delivery.holder
        decision = decide(
            view,
            expected=expected,
            holder=holder,
            runnable=self._ahead() <= 0,
            stored=self._delivery.stored,
            receives=self._delivery.receives,
            can_defer=self._delivery.can_defer,
            leave_delay=self._delivery.leave_delay,
            in_group=self._delivery.in_group,
            sweep=self._leasing.settings.reap_interval * random.uniform(1.0, 1.5),  # noqa: S311 - as above
        )
        match decision.step:
            case Step.DROP:
                self._drop(decision.reason)
            case Step.DEFER:
                self._put_off(decision)
            case Step.TRIGGER:
                self._trigger(view)
                self._drop(decision.reason)
            case Step.SUSPECT:
                assert view is not None
                self._store.suspect(run_id, view.epoch)
                self._put_off(decision)
            case Step.RECLAIM:
                assert view is not None
                handed = self._store.reclaim(run_id, view.epoch)
                if handed is not None and handed.state is RunState.READY:
                    return handed.epoch
            case Step.EXPIRE:
                self._store.expire(run_id)
            case Step.REPLAY:
                replay = self._store.replay(run_id, holder, self._terms)
                if replay is not None:
                    return replay
            case Step.ENQUEUE:
                self._enqueue(delay=self._ahead(), expires_in=seconds_until(self._request.expires))
                self._drop(decision.reason)
            case Step.CLAIM | Step.GO_ON:
                pass
        return expected

    def _trigger(self, view: RunView | None) -> None:
        assert view is not None
        try:
            self._leasing.sender.send(self._delivery.run_id, view.epoch)
        except LeaseError:
            raise
        except Exception as exc:  # noqa: BLE001 - a broker's errors share no base class
            logger.warning(
                "trigger of run=%s not sent, the reaper will: %s", self._delivery.run_id, exc
            )

    def _put_off(self, decision: Decision) -> None:
        """Without a broker that can hide a message again the reaper is the watch-dog.

        Nor is a run lost that the store does not know: there is nothing to go on with.
        """
        if self._delivery.can_defer:
            self._defer(decision.reason, decision.delay)
        self._drop(decision.reason)

    def _drop(self, reason: str) -> None:
        self._note(f"{reason}_dropped", reason)
        raise Ignore(f"lease: {reason}")

    def _defer(self, reason: str, delay: float, *, quietly: bool = False) -> None:
        if not quietly:
            self._note(f"{reason}_deferred", reason)
        raise Defer(delay, reason)

    def _note(self, kind: str, reason: str) -> None:
        delivery = self._delivery
        logger.info(
            "%s run=%s epoch=%s holder=%s task=%s",
            kind,
            delivery.run_id,
            delivery.expected,
            delivery.holder,
            self._task.name,
        )
        try:
            self._store.record(
                delivery.run_id, kind, reason, epoch=delivery.expected, holder=delivery.holder
            )
        except (StoreBusy, StoreUnavailable) as exc:
            logger.warning("event %s of run=%s not recorded: %s", kind, delivery.run_id, exc)
        signals.announce(
            signals.lease_dropped,
            self._task.name,
            run_id=delivery.run_id,
            epoch=delivery.expected,
            holder=delivery.holder,
            reason=kind,
        )

    def _enqueue(self, *, delay: float = 0.0, expires_in: float | None = None) -> None:
        self._store.enqueue(
            self._delivery.run_id,
            task=self._task.name,
            terms=self._terms,
            envelope=self._envelope(),
            deliver=self._task.has_to_deliver(self._request),
            delay=delay,
            expires_in=expires_in,
        )

    def _first_envelope(self) -> bytes | None:
        """An eager call takes any arguments, as in Celery; only here can it go on then."""
        try:
            return self._envelope()
        except NotSerializable:
            if self._request.is_eager:
                return None
            raise

    def _envelope(self) -> bytes:
        return envelope_of(self._request, self._delivery).dump()


def envelope_of(request: Any, delivery: Delivery) -> Envelope:
    """The envelope of a request: what its next trigger will say."""
    return Envelope.pack(
        args=request.args,
        kwargs=request.kwargs,
        embed={
            "callbacks": request.callbacks,
            "errbacks": request.errbacks,
            "chain": request.chain,
            "chord": request.chord,
        },
        content_type=delivery.content_type,
        headers=delivery.headers,
        properties=request.properties or {},
        exchange=delivery.exchange,
        routing_key=delivery.routing_key,
        compression=delivery.headers.get("compression"),
    )


def is_unheld(view: RunView | None) -> bool:
    """Whether nobody works on the run, so that a revoke of Celery's may end it.

    Celery itself leaves a task alone that runs already, unless it is to be terminated.
    """
    return view is None or view.state in (RunState.READY, RunState.WAITING, RunState.PARKED)


def _whole(value: Any) -> int:
    """The epoch in a header; what is not a number counts as none."""
    try:
        return max(0, int(value or 0))
    except (TypeError, ValueError):
        return 0
