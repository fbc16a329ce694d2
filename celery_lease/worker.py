"""The worker's main process: a Celery bootstep with one heartbeat and one reaper.

The loops end only after the pool has drained: from SIGTERM on they ask holders to hand off,
and keep renewing until the last one has.
"""

from __future__ import annotations

import logging
import os
import platform
from typing import TYPE_CHECKING, Any

import celery
from celery import bootsteps
from celery.signals import worker_ready, worker_shutdown, worker_shutting_down

from celery_lease.application import Leasing
from celery_lease.board import Board
from celery_lease.complaints import Complaints
from celery_lease.errors import InvalidSetting, LeaseError, StoreBusy, StoreUnavailable
from celery_lease.heartbeat import Heartbeat
from celery_lease.keeper import Keeper, Kept
from celery_lease.loop import Loop
from celery_lease.outage import Outage
from celery_lease.reaper import Reaper
from celery_lease.results import Defer
from celery_lease.turns import Turns
from celery_lease.visibility import Held, Visibility
from celery_lease.visibility.sqs import SQSVisibility

if TYPE_CHECKING:
    from celery_lease.board import Slot
    from celery_lease.delivery import Delivery
    from celery_lease.policy import Terms
    from celery_lease.store import Store

__all__ = ["LeaseConsumerStep", "LeaseStep", "WorkerSide"]

logger = logging.getLogger(__name__)


class WorkerSide:
    """Heartbeat, reaper and keeper of one worker; requests talk to it.

    Where leases are switched off it keeps what triggers of known runs bring, and no more:
    it sweeps nothing, and an outage of the store does not stop plain tasks.
    """

    def __init__(self, leasing: Leasing, worker: Any) -> None:
        self._leasing = leasing
        self._worker = worker
        self.board = leasing.board = Board()
        #: The pool has processes of its own, which can be signalled and killed.
        self.forks = _has_processes(worker.pool_cls)
        self.store: Store = leasing.store
        self.keeper = Keeper(self.board)
        self.visibility: Visibility = SQSVisibility(
            timeout=leasing.settings.statement_timeout,
            retrigger_after=leasing.settings.retrigger_after,
        )
        self.turns = Turns()
        self.complaints = Complaints(logger)
        self.outage = Outage(worker, self._probe)
        settings = leasing.settings
        tell = self.outage.tell if settings.enabled else _tell_nobody
        self.reaper = Reaper(
            self.store, leasing.sender.send, interval=settings.reap_interval, on_store=tell
        )
        self.heartbeat = Heartbeat(
            self.store,
            self.keeper,
            self.visibility,
            interval=settings.heartbeat,
            on_store=tell,
            on_abandoned=self.wake_reaper,
        )
        self._beats = Loop("lease-heartbeat", self._beat)
        self._reaps = Loop("lease-reaper", self._reap)

    # -- for requests -------------------------------------------------------------------

    def hold(self, message: Any) -> Held | None:
        """What keeps this message hidden, on brokers that can."""
        return self.visibility.hold(message)

    def leave_delay(self, held: Held | None) -> float | None:
        """Seconds until a message comes again that is left for its queue's dead-letter policy.

        None if the queue has none. Where that is not known it may come for days: seldom, then.
        """
        if held is None:
            return None
        return {True: 1.0, None: 60.0, False: None}[self.visibility.facts_of(held).dead_letters]

    def keep(
        self,
        delivery: Delivery,
        task: str,
        terms: Terms,
        *,
        held: Held | None = None,
        slot: Slot | None = None,
        message: Any = None,
    ) -> None:
        """Keep a delivery from now on: its message at once, its lease when it is accepted."""
        extend_at = hidden_until = float("inf")
        if held is not None:
            timeout = self.visibility.timeout_of(held)
            extend_at = held.received_at + min(timeout / 3, terms.heartbeat)
            hidden_until = held.received_at + timeout
        kept = Kept(delivery.run_id, delivery.holder, task, terms, held, slot, extend_at)
        kept.hidden_until, kept.message = hidden_until, message
        self.keeper.add(kept)
        self._beats.wake()

    def accepted(self, delivery: Delivery, task: str, terms: Terms, pid: int) -> None:
        """A pool process or thread has taken the delivery: from now on its lease is kept.

        Also one that was let go when the connection was lost: the pool may run it all the
        same, and its lease must not run out under it. Its message is the broker's again.
        """
        if not self.keeper.accepted(delivery.holder, pid, interruptible=self.forks):
            self.keep(delivery, task, terms)
            self.keeper.accepted(delivery.holder, pid, interruptible=self.forks)

    def process(self, request: Any) -> None:
        """Give a delivery to the pool, as Celery does, when there is a place."""
        self._worker.process_task(request)

    def forget(self, holder: str) -> bool:
        """Nothing more is asked about this delivery's message; whether it was still hidden."""
        kept = self.keeper.forget(holder)
        return kept is not None and kept.held is not None

    def disconnected(self) -> None:
        """The connection to the broker is given up, and with it what waited for the pool."""
        for kept in self.keeper.all():
            if kept.pid is None:
                self.keeper.forget(kept.holder)
        self.turns.keep_only({kept.holder for kept in self.keeper.all()})

    def give_back_waiting(self) -> None:
        """What waits for the pool goes back to the queue at once.

        Celery forgets it when it stops. kombu would send a copy of each such message and
        leave the message itself hidden for as long as it was asked to.
        """
        for kept in self.keeper.all():
            if kept.pid is None and kept.held is not None and self.forget(kept.holder):
                self.visibility.defer(kept.message, kept.held, 0.0)

    def delivered(self, run_id: str, holder: str) -> None:
        """The outcome of this run was reported."""
        self.keeper.delivered(run_id, holder)

    def defer(self, message: Any, held: Held, delay: float) -> None:
        """Hide the message for ``delay`` seconds and forget it."""
        self.visibility.defer(message, held, delay)

    def wake_reaper(self) -> None:
        """Something is due now."""
        self._reaps.wake()

    def expect_trigger(self, delay: float) -> None:
        """A run was postponed: let the reaper know, if it would not look in time."""
        if 0 < delay < 1.25 * self.reaper.interval:
            self._reaps.wake()

    # -- life ---------------------------------------------------------------------------

    def start(self) -> None:
        """Start both loops and listen for the end."""
        worker_shutting_down.connect(self._on_shutting_down, weak=False)
        worker_shutdown.connect(self._on_shutdown, weak=False)
        worker_ready.connect(self._on_ready, weak=False)
        self._tell_before_a_soft_shutdown()
        self._beats.start()
        if self._leasing.settings.enabled:
            self._reaps.start()

    def _tell_before_a_soft_shutdown(self) -> None:
        """Celery 5.5+ lets bodies go on for a while, and tells of its shutdown only then."""
        wait = getattr(self._worker, "wait_for_soft_shutdown", None)
        if wait is None:
            return

        def yield_and_wait() -> None:
            self.yield_leases()
            wait()

        self._worker.wait_for_soft_shutdown = yield_and_wait

    def yield_leases(self) -> None:
        """From now on every checkpoint hands off; the store is told with the next tick.

        Called by signal handlers, so it takes no lock: the thread that was interrupted may
        hold it.
        """
        self.board.stopping = True

    def close(self) -> None:
        """After the drain: end the loops, settle what is left."""
        worker_shutting_down.disconnect(self._on_shutting_down)
        worker_shutdown.disconnect(self._on_shutdown)
        worker_ready.disconnect(self._on_ready)
        self._reaps.stop()
        self._beats.stop()
        self._settle()

    def terminate(self) -> None:
        """A cold shutdown: say what is known now, for nobody may come to it later.

        The heartbeat goes on: threads cannot be killed, and end before the process does.
        """
        self._reaps.stop()
        self._settle()
        try:
            self.reaper.send_due()
        except LeaseError as exc:
            logger.warning("triggers are left to another worker's reaper: %s", exc)

    def _settle(self) -> None:
        pairs = self.keeper.take_delivered()
        if pairs:
            try:
                self.store.settle(pairs)
            except LeaseError as exc:
                logger.warning(
                    "%d outcomes not settled, they will be replayed: %s", len(pairs), exc
                )

    def _on_ready(self, **_: Any) -> None:
        consumer = getattr(self._worker.consumer, "task_consumer", None)
        if consumer is not None and self._leasing.settings.enabled:
            self.visibility.introduce(consumer.channel, [q.name for q in consumer.queues])

    def _on_shutting_down(self, **_: Any) -> None:
        self.yield_leases()

    def _on_shutdown(self, **_: Any) -> None:
        self.close()

    # -- loops --------------------------------------------------------------------------

    def _beat(self) -> float:
        delay = self.heartbeat.run_once()
        if self.board.stopping:
            # Not only before the pool drains: in a cold shutdown that may be much later.
            self.give_back_waiting()
        return 0.5 if self.outage.on else delay

    def _reap(self) -> float:
        delay = self.reaper.pass_and_wait()
        if not self.outage.on:
            self._seen()
        return min(delay, 2.0) if self.outage.on else delay

    def _seen(self) -> None:
        try:
            self.store.worker_seen(
                node=self._worker.hostname,
                host=platform.node(),
                pid=os.getpid(),
                pool=self._worker.pool_cls.__module__.rpartition(".")[2],
                queues=",".join(self._worker.app.amqp.queues.consume_from),
                versions=f"celery {celery.__version__}, python {platform.python_version()}",
            )
        except LeaseError as exc:
            logger.warning("this worker could not note that it is alive: %s", exc)

    def _probe(self) -> bool:
        try:
            self.store.due(1)
        except StoreBusy:
            return True
        except LeaseError:
            return False
        return True


class LeaseConsumerStep(bootsteps.StartStopStep):
    """Tells the worker's side when its connection to the broker is given up.

    Celery throws away what the pool has not begun then, since it cannot be acknowledged
    any more: the broker delivers it again, if nobody goes on hiding it.
    """

    requires = frozenset({"celery.worker.consumer.tasks:Tasks"})

    def start(self, consumer: Any) -> None:
        """Nothing: a delivery is kept from its arrival."""

    def stop(self, consumer: Any) -> None:
        """Forget the deliveries that Celery has forgotten; those in the pool go on."""
        leasing = Leasing.of(consumer.app)
        if leasing.worker is not None and not leasing.stopping:
            leasing.worker.disconnected()


class LeaseStep(bootsteps.StartStopStep):
    """Adds the worker's side to every worker of an app with leased tasks.

    Made before the pool forks, so that children share its board. Refuses to start where
    leases could not be kept; switched off, it stays out of such a worker.
    """

    requires = frozenset({"celery.worker.components:Pool"})

    def __init__(self, worker: Any, **options: Any) -> None:
        super().__init__(worker, **options)
        leasing = Leasing.of(worker.app)
        try:
            _refuse_what_cannot_work(worker)
        except InvalidSetting:
            self.enabled = False
            if leasing.settings.enabled:
                raise
            return
        # Before the fork, so that it holds in pool children too.
        logging.getLogger("celery.app.trace").addFilter(_not_a_deferral)
        self._leasing = leasing
        leasing.worker = WorkerSide(leasing, worker)

    def create(self, worker: Any) -> WorkerSide:  # noqa: ARG002 - Celery's signature
        """What ``start`` starts."""
        assert self._leasing.worker is not None
        return self._leasing.worker

    def start(self, worker: Any) -> None:  # noqa: ARG002 - Celery's signature
        """Check the schema and start the loops."""
        side = self._leasing.worker
        assert side is not None
        if self._leasing.settings.enabled:
            self._check_store(side)
        side.start()

    @staticmethod
    def _check_store(side: WorkerSide) -> None:
        try:
            side.store.due(1)
        except StoreBusy:
            pass  # another worker makes its tables at this moment
        except StoreUnavailable as exc:
            logger.error("the lease store is away, nothing runs until it is back: %s", exc)
            side.outage.tell(False)

    def stop(self, worker: Any) -> None:  # noqa: ARG002 - Celery's signature
        """Celery stops steps before the pool drains: ask the holders to yield, and let go of
        what waits for the pool.
        """
        if self._leasing.worker is not None:
            self._leasing.worker.yield_leases()
            self._leasing.worker.give_back_waiting()

    def terminate(self, worker: Any) -> None:
        """A cold shutdown, in which Celery has killed the bodies that can be killed."""
        self.stop(worker)
        if self._leasing.worker is not None:
            self._leasing.worker.terminate()


def _has_processes(pool_cls: type) -> bool:
    from celery.concurrency.prefork import TaskPool  # noqa: PLC0415 - not in a producer

    return issubclass(pool_cls, TaskPool)


def _tell_nobody(_reachable: bool) -> None:
    """Plain tasks need no store."""


def _not_a_deferral(record: logging.LogRecord) -> bool:
    """A deferral is routine and has its own line; Celery would warn with a traceback."""
    return not (record.exc_info and isinstance(record.exc_info[1], Defer))


def _refuse_what_cannot_work(worker: Any) -> None:
    if worker.pool_cls.is_green:
        pool = worker.pool_cls.__module__.rpartition(".")[2]
        raise InvalidSetting(
            f"worker pool {pool!r}: a body that does not yield would stop the heartbeat of "
            "every lease in the process; use --pool=prefork, solo or threads"
        )
    if worker.app.conf.worker_deduplicate_successful_tasks:
        raise InvalidSetting(
            "worker_deduplicate_successful_tasks = True: it answers a redelivered message "
            "before the lease store is asked; leased tasks need it off, and do better"
        )
