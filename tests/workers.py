"""Real workers on the strict SQS: what the integration and acceptance tests stand on.

A test gets a ``Shop``: a strict SQS, a lease store, a result backend and a client of its own.
It starts ``celery worker`` processes of ``tests/integration/apps/shop.py``, each in a session of
its own, kills, pauses and continues them, and sees what happened from outside: what bodies
noted, what the store and the result backend hold, which messages were sent. Everything is
waited for by a condition. Workers end with the test, whatever becomes of it.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest
from celery import Celery
from celery.backends.database.models import ResultModelBase
from sqlalchemy import create_engine

from celery_lease.store import Store
from celery_lease.testing.sqs import StrictSQS
from tests.waiting import wait_until

T = TypeVar("T")

ROOT = Path(__file__).parent.parent
APP = "tests.integration.apps.shop"
BOTH = ("sqlite", "postgresql")
POOLS = ("prefork", "threads", "solo")
#: The same for tests that also run on the lowest supported versions.
SMOKE_BOTH = (pytest.param("sqlite", marks=pytest.mark.smoke), "postgresql")
#: ("database", "pool"): the pool that most people use on both, the others on one.
EVERY_POOL = (
    pytest.param("sqlite", "prefork", marks=pytest.mark.smoke),
    ("postgresql", "prefork"),
    pytest.param("sqlite", "threads", marks=pytest.mark.smoke),
    ("sqlite", "solo"),
)

#: What the app sets, for arithmetic in tests.
DURATION, HEARTBEAT, GRACE, SWEEP = 4, 1, 3, 0.5
#: From the expiry of a lease to the next claim: grace, sweeps, and a busy machine.
TAKEN_OVER = GRACE + 3 * SWEEP + 5

_LOOK_EVERY = 0.03
_TRIGGERS = """
CREATE TABLE told (id INTEGER PRIMARY KEY, task_id TEXT, status TEXT);
CREATE TRIGGER told_first AFTER INSERT ON celery_taskmeta BEGIN
    INSERT INTO told (task_id, status) VALUES (NEW.task_id, NEW.status); END;
CREATE TRIGGER told_again AFTER UPDATE ON celery_taskmeta BEGIN
    INSERT INTO told (task_id, status) VALUES (NEW.task_id, NEW.status); END;
"""


class Worker:
    """One ``celery worker`` process with its pool, in a process group of its own."""

    def __init__(
        self, name: str, command: list[str], environment: Mapping[str, str], log: Path
    ) -> None:
        self.name = name
        self.log_file = log
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=dict(environment),
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """The main process, whose number is the group's too."""
        return self.process.pid

    @property
    def log(self) -> str:
        """What it has written so far."""
        return self.log_file.read_text(errors="replace")

    @property
    def alive(self) -> bool:
        """The main process is there."""
        return self.process.poll() is None

    def children(self) -> list[int]:
        """The pool processes."""
        return [pid for pid, parent in _parents().items() if parent == self.pid]

    def kill(self) -> None:
        """SIGKILL to the main process and its pool at once."""
        self._to_group(signal.SIGKILL)
        self.process.wait(10)

    def kill_children(self) -> None:
        """SIGKILL to the pool only."""
        for pid in self.children():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def stop(self) -> None:
        """SIGSTOP to all: paused, as by a hypervisor."""
        self._to_group(signal.SIGSTOP)

    def cont(self) -> None:
        """SIGCONT to all."""
        self._to_group(signal.SIGCONT)

    def term(self) -> None:
        """SIGTERM to the main process: a warm shutdown."""
        self.process.terminate()

    def interrupt(self) -> None:
        """SIGINT to all, as a terminal sends for Ctrl-C."""
        self._to_group(signal.SIGINT)

    def ended(self, timeout: float = 40.0) -> int:
        """Wait for the end of the main process; its exit status."""
        wait_until(lambda: not self.alive, timeout=timeout, what=f"the end of worker {self.name}")
        return int(self.process.returncode)

    def logged(self, text: str, *, times: int = 1, timeout: float = 40.0) -> str:
        """Wait until ``text`` stands in the log so many times; returns the whole log."""

        def found() -> str:
            log = self.log
            return log if log.count(text) >= times else ""

        return slowly(found, timeout=timeout, what=f"{text!r} in the log of {self.name}")

    def remove(self) -> None:
        """End it in any case; also one that is paused."""
        self._to_group(signal.SIGKILL)
        self.process.wait(10)
        if self.process.stdin is not None:
            self.process.stdin.close()

    def _to_group(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)


class Shop:
    """Broker, store, results, client and workers of one test."""

    def __init__(self, sqs: StrictSQS, store_url: str, namespace: str, folder: Path) -> None:
        self.sqs = sqs
        self.store_url = store_url
        self.namespace = namespace
        self.folder = folder
        self.side = folder / "side"
        self.side.mkdir()
        self.workers: list[Worker] = []
        self.results = folder / "results.sqlite3"
        self.client = Celery(
            "client", broker=sqs.broker_url, backend=f"db+sqlite:///{self.results}"
        )
        self.client.conf.broker_transport_options = {"wait_time_seconds": 1}
        self.store = Store(store_url, namespace=namespace)
        self._write_down_what_results_are_told()

    # -- workers --------------------------------------------------------------------------

    def queue(self, name: str = "celery", *, hides: int = 3, **attributes: Any) -> None:
        """Make a queue that hides a received message for so many seconds."""
        self.sqs.create_queue(name, VisibilityTimeout=hides, **attributes)

    def launch(
        self,
        name: str = "w1",
        *,
        pool: str = "prefork",
        slots: int = 1,
        queue: str = "celery",
        store_url: str | None = None,
        crash: str = "",
        options: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        **settings: Any,
    ) -> Worker:
        """Start a worker without waiting for it; ``settings`` are Celery's and ours.

        ``options`` go to the command line, ``environment`` to its process.
        """
        worker = Worker(
            name,
            [*self._command(name, pool, slots, queue), *options],
            {
                **self._environment(store_url or self.store_url, crash, settings),
                **(environment or {}),
            },
            self.folder / f"{name}.log",
        )
        self.workers.append(worker)
        return worker

    def start(self, *names: str, **options: Any) -> list[Worker]:
        """Start workers and wait until they take messages."""
        launched = [self.launch(name, **options) for name in names]
        for worker in launched:
            self.ready(worker)
        return launched

    def ready(self, worker: Worker) -> Worker:
        """Wait until a launched worker takes messages."""

        def taking() -> bool:
            assert worker.alive, f"worker {worker.name} ended:\n{worker.log[-2000:]}"
            return any(note["pid"] == worker.pid for note in self.notes("ready"))

        slowly(taking, timeout=60, what=f"worker {worker.name} to be ready")
        return worker

    def pause(self, worker: Worker) -> None:
        """SIGSTOP, at a moment at which the worker has no file locked.

        PostgreSQL ends the transaction of a paused client; a lock of SQLite's stays with it,
        and everybody would wait for the end of the pause.
        """
        files = [str(self.results)]
        if self.store_url.startswith("sqlite"):
            files.append(str(self.store.connections.url.database))
        for _ in range(100):
            worker.stop()
            if all(_unlocked(file) for file in files):
                return
            worker.cont()
            time.sleep(_LOOK_EVERY)
        raise AssertionError(f"worker {worker.name} never let go of {files}")

    def of(self, note: Mapping[str, Any]) -> Worker:
        """The worker whose body wrote this note."""
        name = note["node"].split("@")[0]
        return next(worker for worker in reversed(self.workers) if worker.name == name)

    def other(self, than: Worker) -> Worker:
        """The other of two workers."""
        return next(worker for worker in self.workers if worker is not than)

    def _command(self, name: str, pool: str, slots: int, queue: str) -> list[str]:
        options = {"-P": pool, "-c": str(slots), "-n": f"{name}@test", "-Q": queue, "-l": "INFO"}
        quiet = ["--without-mingle", "--without-gossip", "--without-heartbeat"]
        flat = [part for option in options.items() for part in option]
        return [sys.executable, "-m", "celery", "-A", APP, "worker", *flat, *quiet]

    def _environment(
        self, store_url: str, crash: str, settings: Mapping[str, Any]
    ) -> dict[str, str]:
        return {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "PYTHONWARNINGS": "ignore",
            "SHOP_BROKER": self.sqs.broker_url,
            "SHOP_STORE": store_url,
            "SHOP_RESULTS": f"db+sqlite:///{self.results}",
            "SHOP_SIDE": str(self.side),
            "SHOP_CRASH": crash,
            "SHOP_TIED": "1",
            "SHOP_SETTINGS": json.dumps({"lease_namespace": self.namespace, **settings}),
        }

    # -- the client's side ----------------------------------------------------------------

    def send(self, task: str, *args: Any, **options: Any) -> str:
        """Send a task by its short name; its id, which is the run's."""
        return str(self.client.send_task(f"shop.{task}", args, **options).id)

    def signature(self, task: str, *args: Any, **options: Any) -> Any:
        """A signature of a task by its short name."""
        return self.client.signature(f"shop.{task}", args=args, **options)

    def open(self, gate: str) -> None:
        """Let every body pass that waits for ``gate``."""
        (self.side / gate).touch()

    def outcome(self, run_id: str, *, timeout: float = 60.0) -> tuple[str, Any]:
        """Wait for the result; Celery's state and the value or the exception."""
        final = ("SUCCESS", "FAILURE", "REVOKED")
        slowly(
            lambda: self.status(run_id) in final, timeout=timeout, what=f"the result of {run_id}"
        )
        meta = self.client.backend.get_task_meta(run_id, cache=False)
        return meta["status"], meta["result"]

    def status(self, run_id: str) -> str | None:
        """The state in the result backend."""
        told = self.told(run_id)
        return told[-1] if told else None

    def told(self, run_id: str) -> list[str]:
        """Every state that was ever stored for this run, in order, repeats left out."""
        with contextlib.closing(sqlite3.connect(self.results, timeout=10)) as connection:
            rows = connection.execute(
                "SELECT status FROM told WHERE task_id = ? AND status <> 'PENDING' ORDER BY id",
                (run_id,),
            )
            states = [row[0] for row in rows]
        return [state for i, state in enumerate(states) if i == 0 or state != states[i - 1]]

    def sent(self, task: str = "", run_id: str = "") -> list[dict[str, Any]]:
        """The headers of every message that was put into a queue, in order."""
        bodies = [
            entry["MessageBody"]
            for call in self.sqs.calls
            if call.action in ("SendMessage", "SendMessageBatch") and call.status == 200
            for entry in call.parameters.get("Entries", [call.parameters])
        ]
        headers = [headers_of(body) for body in bodies]
        wanted = [one for one in headers if one["task"] == f"shop.{task}" or not task]
        return [one for one in wanted if run_id in (one["id"], "")]

    # -- what happened --------------------------------------------------------------------

    def notes(self, what: str, run_id: str = "") -> list[dict[str, Any]]:
        """What bodies have noted."""
        try:
            lines = (self.side / "notes.jsonl").read_text().splitlines()
        except FileNotFoundError:
            return []
        notes = [json.loads(line) for line in lines]
        return [n for n in notes if n["what"] == what and run_id in ("", n.get("run"))]

    def forget_notes(self) -> None:
        """Begin to count bodies and callbacks again."""
        (self.side / "notes.jsonl").unlink()

    def entered(self, run_id: str, *, times: int = 1, timeout: float = 60.0) -> dict[str, Any]:
        """Wait until the body was entered so many times; the last note of it."""
        return self.noted("body", run_id, times=times, timeout=timeout)

    def noted(
        self, what: str, run_id: str = "", *, times: int = 1, timeout: float = 60.0
    ) -> dict[str, Any]:
        """Wait for a note; the last of ``times``."""

        def found() -> list[dict[str, Any]]:
            notes = self.notes(what, run_id)
            return notes if len(notes) >= times else []

        name = f"{times} x {what!r} of run {run_id or 'any'}"
        return slowly(found, timeout=timeout, what=name)[times - 1]

    def bodies(self, run_id: str) -> int:
        """How often the body was entered."""
        return len(self.notes("body", run_id))

    def run(self, run_id: str) -> dict[str, Any]:
        """The run's row, empty if there is none."""
        return self.store.run(run_id) or {}

    def state(self, run_id: str) -> str | None:
        """The run's state, None if there is no row."""
        return self.run(run_id).get("state")

    def settled(self, run_id: str, *, timeout: float = 60.0) -> dict[str, Any]:
        """Wait until the run is over and its outcome delivered; its row."""

        def over() -> dict[str, Any]:
            row = self.run(run_id)
            return row if row.get("settled_at") is not None else {}

        return slowly(over, timeout=timeout, what=f"run {run_id} to be settled")

    def until_state(self, run_id: str, state: str, *, timeout: float = 60.0) -> dict[str, Any]:
        """Wait for a state of the run; its row."""

        def there() -> dict[str, Any]:
            row = self.run(run_id)
            return row if row.get("state") == state else {}

        return slowly(there, timeout=timeout, what=f"run {run_id} to be {state}")

    def events(self, run_id: str, kind: str = "") -> list[dict[str, Any]]:
        """The run's events, of one kind if given."""
        return [e for e in self.store.events(run_id) if kind in ("", e["kind"])]

    def event(self, run_id: str, kind: str, *, times: int = 1, timeout: float = 60.0) -> Any:
        """Wait for an event of the run."""

        def found() -> list[dict[str, Any]]:
            events = self.events(run_id, kind)
            return events if len(events) >= times else []

        return slowly(found, timeout=timeout, what=f"{times} x event {kind!r} of {run_id}")[-1]

    @staticmethod
    def passed_time(at: float) -> None:
        """Wait until this machine's clock is past ``at``, for what depends on time alone."""
        slowly(lambda: time.time() >= at, timeout=at - time.time() + 10, what=f"the time {at}")

    def renewed(self, run_id: str, *, beyond: float, timeout: float = 40.0) -> None:
        """Wait until the database's clock is past ``beyond`` and the lease still live."""
        slowly(
            lambda: self.run(run_id)["now"] > beyond,
            timeout=timeout,
            what=f"the clock to pass {beyond}",
        )
        assert self.run(run_id)["lease_left"] > 0

    def empty(self, queue: str = "celery", *, timeout: float = 40.0) -> None:
        """Wait until no message is left in the queue."""
        self.empty_but(0, queue, timeout=timeout)

    def empty_but(self, left: int, queue: str = "celery", *, timeout: float = 40.0) -> None:
        """Wait until so many messages are left in the queue, received ones included."""
        slowly(
            lambda: len(self.sqs.messages(queue)) == left,
            timeout=timeout,
            what=f"{left} messages in queue {queue}",
        )

    def receives(self, run_id: str, queue: str = "celery") -> list[int]:
        """How often each message of the run was received, deleted ones included."""
        messages = self.sqs.messages(queue, deleted=True)
        return [m.receive_count for m in messages if headers_of(m.body)["id"] == run_id]

    def purge(self, queue: str = "celery") -> None:
        """Throw every message of a queue away."""
        url = self.sqs.client().get_queue_url(QueueName=queue)["QueueUrl"]
        self.sqs.client().purge_queue(QueueUrl=url)

    def send_again(self, run_id: str, queue: str = "celery") -> None:
        """Put a copy of the run's first message into the queue: a duplicate of the broker's."""
        bodies = (m.body for m in self.sqs.messages(queue, deleted=True))
        body = next(body for body in bodies if headers_of(body)["id"] == run_id)
        url = self.sqs.client().get_queue_url(QueueName=queue)["QueueUrl"]
        self.sqs.client().send_message(QueueUrl=url, MessageBody=body)

    def close(self) -> None:
        """End every worker and every connection."""
        for worker in self.workers:
            worker.remove()
        self.client.close()
        self.store.dispose()

    def _write_down_what_results_are_told(self) -> None:
        engine = create_engine(self.client.backend.url)
        ResultModelBase.metadata.create_all(engine)
        engine.dispose()
        with contextlib.closing(sqlite3.connect(self.results)) as connection:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.executescript(_TRIGGERS)


def slowly(condition: Callable[[], T], *, timeout: float = 40.0, what: str = "") -> T:
    """``wait_until`` for conditions that cost something: a file read, a query."""

    def look() -> T:
        value = condition()
        if not value:
            time.sleep(_LOOK_EVERY)
        return value

    return wait_until(look, timeout=timeout, what=what)


def _unlocked(file: str) -> bool:
    with contextlib.closing(sqlite3.connect(file, timeout=0.2)) as connection:
        try:
            connection.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            return False
        connection.execute("ROLLBACK")
        return True


@pytest.fixture
def database() -> str:
    """The store of these tests, unless a test is parametrized with ``BOTH``."""
    return "sqlite"


@pytest.fixture
def shop(store_url: str, namespace: str, tmp_path: Path) -> Iterator[Shop]:
    """A broker, a store, results and a client of this test; the queue ``celery`` is there."""
    with StrictSQS() as sqs:
        shop = Shop(sqs, store_url, namespace, tmp_path)
        try:
            shop.queue()
            yield shop
        finally:
            shop.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Iterator[pytest.TestReport]:
    """A test that fails shows what its workers wrote and its runs' events."""
    report = yield
    shop = getattr(item, "funcargs", {}).get("shop")
    if report.failed and call.when == "call" and isinstance(shop, Shop):
        for worker in shop.workers:
            report.sections.append((f"worker {worker.name}", worker.log[-20000:]))
        with contextlib.suppress(Exception):
            report.sections.append(("runs", _story(shop)))
    return report


def _story(shop: Shop) -> str:
    lines = []
    for row in shop.store.list_runs():
        lines.append(f"{row['run_id']} {row['task']} {row['state']} epoch={row['epoch']}")
        lines += [
            f"    {e['at']:.2f} {e['epoch']} {e['holder']} {e['kind']} {e['reason']}"
            for e in shop.events(row["run_id"])
        ]
    return "\n".join(lines)


def headers_of(body: str) -> dict[str, Any]:
    """The headers of a Celery message as it lies in the queue."""
    payload = json.loads(base64.b64decode(body))
    return dict(payload["headers"])


def _parents() -> dict[int, int]:
    """Every process with its parent."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            found[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    return found
