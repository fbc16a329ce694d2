"""``LeasedTask``: one delivery from claim to settle.

Adoption is ``@app.task(base=LeasedTask)``, or ``Celery(task_cls=LeasedTask)`` for all tasks.
The class adds the worker's side by itself when the task is registered.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from billiard.einfo import ExceptionInfo
from celery import Task, states
from celery.app.trace import FAILURE, IGNORED, REJECTED, TraceInfo, trace_ok_t
from celery.backends.base import DisabledBackend
from celery.exceptions import Ignore, Reject, Retry, TaskRevokedError
from celery.result import EagerResult

from celery_lease import signals
from celery_lease.application import Leasing
from celery_lease.delays import DelayingProducer
from celery_lease.delivery import Admission, Delivery
from celery_lease.errors import InvalidSetting, LeaseError, LeaseLost
from celery_lease.execution import Execution
from celery_lease.exits import left
from celery_lease.fates import Fates, Kind, checked, fate_of
from celery_lease.interrupts import no_soft_limit
from celery_lease.lease import Lease, bound, current_lease
from celery_lease.local import (
    EagerRun,
    MemoryBacking,
    current_eager_run,
    eager_run,
    local_heartbeat,
    replacing,
    run_replaced,
)
from celery_lease.outcomes import REPLACED, recorded
from celery_lease.policy import LeasePolicy
from celery_lease.postpone import Catcher, captured_retry, caught_by, postpone
from celery_lease.replacement import Replaced, encode_replacement, send_replacement
from celery_lease.results import (
    Defer,
    LeasedBackend,
    Left,
    Told,
    Voice,
    speaking,
    until_claimed,
    voice_of,
)
from celery_lease.states import RunState, is_dead_letter
from celery_lease.store import Replay
from celery_lease.successors import fix_successors, name_member, steady_ids
from celery_lease.trigger import EPOCH_HEADER, Envelope

if TYPE_CHECKING:
    from celery import Celery

__all__ = ["LeasedTask"]

logger = logging.getLogger(__name__)

#: Seconds until a message comes back whose run could not be claimed, for no reason we know.
_UNCLAIMED_DELAY = 10.0
#: A lease means nothing if the message is gone before the work is done.
_REQUIRED = ("acks_late", "reject_on_worker_lost")
#: A request whose body is being executed; a call of the task inside it is a plain call.
_ENTERED = "_leased_execution"
_CELERY_STATES = {
    RunState.SUCCEEDED: states.SUCCESS,
    RunState.FAILED: states.FAILURE,
    RunState.REVOKED: states.REVOKED,
}


class LeasedTask(Task):
    """A task whose runs have one holder at a time, and one outcome.

    Set ``lease_policy`` (a :class:`~celery_lease.LeasePolicy`) as an option of ``@app.task``
    or as a class attribute. Inside the body ``self.lease`` is the handle of the run.

    Raises :class:`~celery_lease.errors.InvalidSetting` when the class is made with
    ``acks_late`` or ``reject_on_worker_lost`` off, and when the task is registered with a
    policy that cannot work.
    """

    abstract = True
    Request = "celery_lease.request:LeasedRequest"
    acks_late = True
    reject_on_worker_lost = True
    acks_on_failure_or_timeout = True
    acks_on_failure = True
    acks_on_timeout = True

    #: How long its leases last and what happens after a crash.
    lease_policy: LeasePolicy | None = None
    #: What becomes of the message after a failure: one fate, or one for each exception class.
    lease_fates: Fates | None = None

    _lease_tracer: Callable[..., Any] | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._refuse_early_acknowledgement()
        policy = cls.__dict__.get("lease_policy")
        if policy is not None and not isinstance(policy, LeasePolicy):
            raise InvalidSetting(
                f"{cls.__name__}.lease_policy = {policy!r}: give a LeasePolicy, "
                "for example LeasePolicy.long()"
            )
        checked(f"{cls.__name__}.lease_fates", cls.__dict__.get("lease_fates"))
        if "acks_on_failure_or_timeout" in cls.__dict__:
            # One attribute for both, before Celery 5.7.
            for name in ("acks_on_failure", "acks_on_timeout"):
                if name not in cls.__dict__:
                    setattr(cls, name, cls.acks_on_failure_or_timeout)
        if cls.before_start is not Task.before_start:
            cls.before_start = until_claimed(cls.before_start)

    @classmethod
    def _refuse_early_acknowledgement(cls) -> None:
        for name in _REQUIRED:
            if not getattr(cls, name):
                raise InvalidSetting(
                    f"{cls.__name__}.{name} = {getattr(cls, name)!r}: a leased task keeps its "
                    f"message until the run has ended; leave {name} out"
                )

    @classmethod
    def on_bound(cls, app: Celery) -> None:
        """Check the policy and add the worker's side; Celery calls this for each task."""
        from celery_lease.worker import LeaseConsumerStep, LeaseStep  # noqa: PLC0415 - workers' own

        cls._refuse_early_acknowledgement()  # annotations have been applied by now
        Leasing.of(app).terms(cls.lease_policy)
        app.steps["worker"].add(LeaseStep)
        app.steps["consumer"].add(LeaseConsumerStep)

    # -- for the body -------------------------------------------------------------------

    @property
    def lease(self) -> Lease:
        """The lease of the run that executes here."""
        return current_lease()

    # -- one delivery -------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Claim the run, execute the body, commit; what Celery sees has been committed."""
        body = self._body(args, kwargs)
        request = self.request
        leasing = Leasing.of(self.app)
        if request.called_directly or request.id is None or vars(request).get(_ENTERED):
            # A function call, perhaps from the task's own body: it gets a request of its own.
            request._protected = 1  # noqa: SLF001 - what Celery looks at
            with bound(Lease(MemoryBacking(None, lambda: leasing.values))):
                return super().__call__(*args, **kwargs)
        setattr(request, _ENTERED, True)
        if is_plain(leasing, vars(request)):
            with bound(Lease(MemoryBacking(request.id, lambda: leasing.values))):
                return body()
        delivery = Delivery.of_request(
            request, queue=self.app.conf.task_default_queue, name=run_replaced
        )
        forget_lease_headers(request)
        terms = leasing.terms(self.lease_policy)
        if delivery.interruptible:
            leasing.interrupts.install()
        asked_at = time.monotonic()
        admitted = Admission(leasing, self, request, delivery, terms).admit()
        if request.is_eager:
            eager = current_eager_run()
            eager.run_id, eager.holder = delivery.run_id, delivery.holder
        if isinstance(admitted, Replay):
            return self._replay(leasing, delivery, admitted)
        signals.announce(
            signals.lease_claimed,
            self.name,
            run_id=admitted.run_id,
            epoch=admitted.epoch,
            holder=admitted.holder,
        )
        execution = Execution(
            leasing, self, delivery=delivery, grant=admitted, terms=terms, asked_at=asked_at
        )
        if delivery.attended:
            return self._execute(execution, body)
        with local_heartbeat(leasing.store, admitted, self.name, terms):
            return self._execute(execution, body)

    def _body(self, args: Any, kwargs: Any) -> Callable[[], Any]:
        call = super().__call__
        if getattr(call, "__func__", None) is Task.__call__:
            # Celery's own would push an empty request over the one that is running.
            return lambda: self.run(*args, **kwargs)
        return lambda: call(*args, **kwargs)

    def _execute(self, execution: Execution, body: Callable[[], Any]) -> Any:
        voice = voice_of(self.request.id)
        voice.claimed = True
        voice.holds = execution.holds
        self._say_started(self.request)
        deliver = self.has_to_deliver(self.request)

        def prepared_body() -> Any:
            if voice.before_start is not None:
                voice.before_start()
            return body()

        try:
            with captured_retry() as caught:
                value = execution.run(prepared_body)
            if caught.replacement is not None:
                raise Replaced
            if caught.envelope is not None:
                raise Retry("retry(throw=False)")
            self._committed(execution, lambda: execution.complete(value, deliver=deliver))
        except Defer:
            raise
        except Retry as again:
            self._committed(execution, partial(postpone, execution, caught, again))
            voice.outcome = states.RETRY
            raise
        except Replaced:
            assert caught.replacement is not None
            self._committed(execution, partial(execution.replace, caught.replacement))
            voice.outcome = IGNORED
            send_replacement(self.app, execution.run_id, caught.replacement)
        except Ignore:
            if not execution.ended:
                self._committed(execution, execution.finish_ignored)
            raise
        except Reject as rejected:
            self._rejected(execution, rejected)
            raise
        except Exception as error:
            # Also a result that cannot be encoded: nothing was committed for it.
            self._failed(execution, error, voice, deliver=deliver)
            raise
        self._after_commit(execution.run_id, voice, states.SUCCESS)
        return value

    def _failed(
        self, execution: Execution, error: Exception, voice: Voice, *, deliver: bool
    ) -> None:
        """Commit what the error's fate says; raises Celery's ``Retry`` for another attempt."""
        fate = fate_of(self, error)
        if fate.kind is Kind.AGAIN and execution.may_try_again and not self.request.is_eager:
            self._committed(execution, partial(execution.try_again, error, fate.delay))
            voice.outcome = states.RETRY
            raise Retry(str(error), exc=error, when=fate.delay) from error
        leave = fate.kind is Kind.LEAVE
        self._committed(execution, partial(execution.fail, error, deliver=deliver, leave=leave))
        self._after_commit(execution.run_id, voice, states.FAILURE)
        voice.leaves = leave

    def _rejected(self, execution: Execution, rejected: Reject) -> None:
        """The body raised Celery's ``Reject``: again with a new message, or never."""
        if rejected.requeue:
            self._committed(execution, lambda: execution.hand_back("rejected"))
            if self.request.is_eager:
                return
            raise Ignore("rejected, to be tried again")
        self._committed(execution, partial(execution.fail, rejected, deliver=False))

    def _committed(self, execution: Execution, commit: Callable[[], None]) -> None:
        """Commit, or tell Celery that the lease is lost.

        A soft time limit comes too late from here on.
        """
        if not self.request.is_eager:
            voice_of(self.request.id).until_told.enter_context(no_soft_limit())
        try:
            commit()
        except LeaseLost as lost:
            raise execution.translated(lost) from None

    def _after_commit(self, run_id: str, voice: Voice, outcome: str) -> None:
        """From here on nothing but ``outcome`` may be told, and the same tasks are sent."""
        request = self.request
        voice.outcome = outcome
        fix_successors(run_id, request)
        if request.is_eager:
            current_eager_run().outcome = outcome
        else:
            voice.until_sent.enter_context(steady_ids(run_id))
        if outcome == states.SUCCESS:
            request.errbacks = []
        else:
            request.callbacks = []

    def _replay(self, leasing: Leasing, delivery: Delivery, replay: Replay) -> Any:
        """Hand the recorded outcome to Celery, without running the body."""
        request = self.request
        if replay.envelope is not None:
            _, _, embed = Envelope.load(replay.envelope).unpack()
            for name in ("callbacks", "errbacks", "chain", "chord"):
                setattr(request, name, embed.get(name))
        voice = voice_of(request.id)
        if not request.is_eager:
            voice.until_told.enter_context(no_soft_limit())
        if replay.reason == REPLACED and replay.outcome is not None:
            voice.outcome = IGNORED
            send_replacement(self.app, delivery.run_id, replay.outcome)
        outcome = recorded(leasing.results, self.app.backend, replay)
        self._after_commit(delivery.run_id, voice, _CELERY_STATES[outcome.state])
        voice.leaves = is_dead_letter(replay.dead_letter, replay.epoch, delivery.expected)
        if outcome.state is RunState.SUCCEEDED:
            return outcome.value
        assert outcome.error is not None
        if outcome.state is RunState.REVOKED and not request.is_eager:
            self._tell_revoked(request, outcome.error)
            raise Told(str(outcome.error))
        raise outcome.error

    def _tell_revoked(self, request: Any, error: BaseException) -> None:
        """REVOKED to the backend, the chord and the rest of the chain; then the errbacks."""
        self.backend.mark_as_failure(
            request.id,
            error,
            request=request,
            store_result=not self._ignores(request),
            state=states.REVOKED,
        )

    def retry(self, *args: Any, **kwargs: Any) -> Any:
        """Celery's ``retry``: under a lease the run is postponed with its new arguments."""
        catcher = caught_by()
        if catcher is None:
            return super().retry(*args, **kwargs)
        catcher.listening = True
        # Celery does not look at it: the retry would leave its FIFO group, or fair queue.
        group = (self.request.properties or {}).get("MessageGroupId")
        if group is not None:
            kwargs.setdefault("MessageGroupId", group)
        try:
            return super().retry(*args, **kwargs)
        finally:
            catcher.listening = False

    def apply_async(self, *args: Any, **kwargs: Any) -> Any:
        """Celery's ``apply_async``; what is due later waits in the broker or in the store.

        The message of a retry is caught, not sent.
        """
        catcher = caught_by()
        if catcher is not None and catcher.listening:
            kwargs["producer"] = catcher
        elif self._may_wait(kwargs):
            with self.app.producer_or_acquire(kwargs.pop("producer", None)) as producer:
                delaying = DelayingProducer(Leasing.of(self.app), self, producer)
                return super().apply_async(*args, producer=delaying, **kwargs)
        return super().apply_async(*args, **kwargs)

    def _may_wait(self, options: Mapping[str, Any]) -> bool:
        later = options.get("countdown") or options.get("eta")
        eager = self.app.conf.task_always_eager
        return bool(later) and not eager and Leasing.of(self.app).settings.enabled

    def apply(self, *args: Any, **kwargs: Any) -> Any:
        """Celery's ``apply``: when it returns the outcome was told, so that the run is settled."""
        run, told = EagerRun(), states.FAILURE
        try:
            with eager_run(run):
                result = super().apply(*args, **kwargs)
            if run.outcome == states.REVOKED and isinstance(result.result, TaskRevokedError):
                result = EagerResult(result.id, result.result, states.REVOKED, name=self.name)
            told = result.state
            return result
        except TaskRevokedError:
            told = states.REVOKED
            raise
        finally:
            if run.outcome is not None and run.outcome == told:
                self._settle(run)

    def _settle(self, run: EagerRun) -> None:
        try:
            Leasing.of(self.app).store.settle([(run.run_id, run.holder)])
        except LeaseError as exc:
            logger.warning("run=%s not settled, it will be replayed: %s", run.run_id, exc)

    def on_replace(self, sig: Any) -> Any:
        """Celery's ``replace``: this run ends, and its replacement is a run of its own."""
        request = self.request
        caught = self._caught()
        if caught is None:
            return super().on_replace(sig)
        if request.is_eager:
            self.lease.check()
            with replacing(request.id, self.lease.run_id):
                return super().on_replace(sig)
        caught.replacement = encode_replacement(self.app, self.lease.run_id, request.id, sig)
        raise Replaced("Replaced by new task")

    def add_to_chord(self, sig: Any, lazy: bool = False) -> Any:
        """Celery's ``add_to_chord``; what a redone body adds again counts once."""
        caught = self._caught()
        if caught is not None:
            self.lease.check()
            name_member(self.lease.run_id, sig, caught.added)
        return super().add_to_chord(sig, lazy)

    def _caught(self) -> Catcher | None:
        """The catcher, if the request is that of a leased execution, not of a call inside."""
        return caught_by() if vars(self.request).get(_ENTERED) else None

    # -- Celery's hooks -----------------------------------------------------------------

    @property
    def backend(self) -> Any:
        """The app's result backend, held to what this execution may say."""
        return LeasedBackend(super().backend)

    @backend.setter
    def backend(self, value: Any) -> None:
        self._backend = value

    @property
    def __trace__(self) -> Any:
        """Celery's tracer, within which only the outcome may be told."""
        return self._lease_tracer

    @__trace__.setter
    def __trace__(self, tracer: Callable[..., Any] | None) -> None:
        self._lease_tracer = None if tracer is None else self._leased(tracer)

    def _leased(self, tracer: Callable[..., Any]) -> Callable[..., Any]:
        def trace(uuid: str, args: Any, kwargs: Any, request: Any = None) -> Any:
            leasing = Leasing.of(self.app)
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

    def has_to_deliver(self, request: Any) -> bool:
        """Whether the outcome has to reach callbacks or a result backend."""
        if request.callbacks or request.errbacks or request.chain or request.chord:
            return True
        if request.is_eager and not self.app.conf.task_store_eager_result:
            return False  # its caller has it
        keeps_none = isinstance(self.app.backend, DisabledBackend)
        return not keeps_none and not self._ignores(request)

    def _ignores(self, request: Any) -> bool:
        asked = getattr(request, "ignore_result", None)
        return bool(self.ignore_result if asked is None else asked)

    def _say_started(self, request: Any) -> None:
        if self.track_started and not request.is_eager and not self._ignores(request):
            self.backend.store_result(
                request.id,
                {"pid": os.getpid(), "hostname": request.hostname},
                states.STARTED,
                request=request,
            )


def is_plain(leasing: Leasing, request: Mapping[str, Any]) -> bool:
    """Whether the task behaves as one of Celery's own: leases are switched off.

    Not for a trigger, also at epoch 0: its run is known to the store, and done without a
    lease it would be triggered, and done, once more.
    """
    return not leasing.settings.enabled and request.get(EPOCH_HEADER) is None


def forget_lease_headers(request: Any) -> None:
    """The body, and what it sends on, must not see the headers of this delivery."""
    for name in [name for name in vars(request) if name.startswith("lease_")]:
        delattr(request, name)
    if request.headers:
        request.headers = {
            name: value for name, value in request.headers.items() if not name.startswith("lease_")
        }
