"""``LeasedTask``: one delivery from claim to settle.

Adoption is ``@app.task(base=LeasedTask)``, or ``Celery(task_cls=LeasedTask)`` for all tasks.
The class adds the worker's side by itself when the task is registered.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from celery import Task, states
from celery.backends.base import DisabledBackend
from celery.exceptions import TaskRevokedError
from celery.result import EagerResult

from celery_lease import signals
from celery_lease.application import Leasing
from celery_lease.conclusion import Conclusion
from celery_lease.delays import DelayingProducer
from celery_lease.delivery import Admission, Delivery
from celery_lease.errors import InvalidSetting, LeaseError
from celery_lease.execution import Execution
from celery_lease.fates import Fates, checked
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
from celery_lease.policy import LeasePolicy
from celery_lease.postpone import Catcher, caught_by
from celery_lease.replacement import Replaced, encode_replacement
from celery_lease.results import (
    LeasedBackend,
    until_claimed,
)
from celery_lease.store import Replay
from celery_lease.successors import name_member
from celery_lease.tracing import is_plain, leased

if TYPE_CHECKING:
    from celery import Celery

__all__ = ["LeasedTask"]

logger = logging.getLogger(__name__)

#: A lease means nothing if the message is gone before the work is done.
_REQUIRED = ("acks_late", "reject_on_worker_lost")
#: A request whose body is being executed; a call of the task inside it is a plain call.
_ENTERED = "_leased_execution"


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
        conclusion = Conclusion(self, leasing)
        if isinstance(admitted, Replay):
            return conclusion.of_record(delivery, admitted)
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
            return conclusion.of_body(execution, body)
        with local_heartbeat(leasing.store, admitted, self.name, terms):
            return conclusion.of_body(execution, body)

    def _body(self, args: Any, kwargs: Any) -> Callable[[], Any]:
        call = super().__call__
        if getattr(call, "__func__", None) is Task.__call__:
            # Celery's own would push an empty request over the one that is running.
            return lambda: self.run(*args, **kwargs)
        return lambda: call(*args, **kwargs)

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

    def apply_async(
        self,
        args: Any = None,
        kwargs: Any = None,
        task_id: str | None = None,
        producer: Any = None,
        *more: Any,
        **options: Any,
    ) -> Any:
        """Celery's ``apply_async``; what is due later waits in the broker or in the store.

        The message of a retry is caught, not sent.
        """
        send = super().apply_async
        catcher = caught_by()
        if catcher is not None and catcher.listening:
            # No longer: the handlers of Celery's signals may send tasks of their own.
            catcher.listening = False
            options.pop("connection", None)  # Celery would make a producer of it
            return send(args, kwargs, task_id, catcher, *more, **options)
        if not self._may_wait(options):
            return send(args, kwargs, task_id, producer, *more, **options)
        with self.app.producer_or_acquire(producer) as real:
            delaying = DelayingProducer(Leasing.of(self.app), self, real)
            return send(args, kwargs, task_id, delaying, *more, **options)

    def _may_wait(self, options: Mapping[str, Any]) -> bool:
        later = options.get("countdown") or options.get("eta")
        if not later or self.app.conf.task_always_eager:
            return False
        settings = Leasing.of(self.app).settings
        return settings.enabled and settings.names_a_store

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
        self._lease_tracer = None if tracer is None else leased(self, tracer)

    def has_to_deliver(self, request: Any, *, failed: bool = False) -> bool:
        """Whether the outcome, if ``failed`` a failure, has to reach callbacks or a result backend."""
        if request.callbacks or request.errbacks or request.chain or request.chord:
            return True
        if request.is_eager and not self.app.conf.task_store_eager_result:
            return False  # its caller has it
        keeps_none = isinstance(self.app.backend, DisabledBackend)
        wanted = not self.ignores_result(request) or (failed and self.store_errors_even_if_ignored)
        return not keeps_none and wanted

    def ignores_result(self, request: Any) -> bool:
        """Whether nobody wants the result of this call."""
        asked = getattr(request, "ignore_result", None)
        return bool(self.ignore_result if asked is None else asked)


def forget_lease_headers(request: Any) -> None:
    """The body, and what it sends on, must not see the headers of this delivery."""
    for name in [name for name in vars(request) if name.startswith("lease_")]:
        delattr(request, name)
    if request.headers:
        request.headers = {
            name: value for name, value in request.headers.items() if not name.startswith("lease_")
        }
