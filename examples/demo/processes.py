"""The processes of the demo: a local SQS server and Celery workers, and what is done to them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

__all__ = ["DemoFailed", "Processes", "Worker"]

_ROOT = Path(__file__).parents[2]
_STOP_WITHIN = 8.0
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class DemoFailed(Exception):
    """A step of the demo did not happen; the message says which."""


@dataclass(slots=True)
class Worker:
    """A ``celery worker`` process, with a pool of one process, in a session of its own."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    status: str = "starting"

    @property
    def pid(self) -> int:
        """Of its main process; also the id of its process group."""
        return self.process.pid


class Processes:
    """Starts them, harms them, and leaves none of them behind when the block ends."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.workers: dict[str, Worker] = {}
        self._started: list[tuple[subprocess.Popen[bytes], Path]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """End all: after a success as one asks a worker to stop, else at once."""
        handlers = [signal.signal(number, signal.SIG_IGN) for number in _ENDING]
        workers = [worker.process for worker in self.workers.values()]
        if kind is None:
            _ask_to_stop(workers)
        for process, _ in reversed(self._started):  # the broker last
            _send(process.pid, signal.SIGKILL)
            process.wait()
        for number, handler in zip(_ENDING, handlers, strict=True):
            signal.signal(number, handler)

    def start_broker(self) -> str:
        """Start the SQS server; returns the broker URL."""
        server = self._start("sqs", "celery_lease.testing.sqs", stdout=subprocess.PIPE)
        assert server.stdout is not None
        ready = server.stdout.readline().decode().strip()  # "strict SQS ready at http://…"
        if not ready:
            raise DemoFailed("the local SQS server did not start; see sqs.log")
        host = ready.rpartition("//")[2]
        return f"sqs://user:secret@{host}//"

    def start_worker(self) -> Worker:
        """One more worker; it is ready a few seconds later."""
        name = f"worker-{len(self.workers) + 1}"
        options = f"-A examples.demo.app worker -n {name}@demo --pool prefork --concurrency 1"
        quiet = "--loglevel INFO --without-mingle --without-gossip --without-heartbeat"
        process = self._start(name, "celery", *options.split(), *quiet.split())
        self.workers[name] = Worker(name, process, self.folder / f"{name}.log")
        return self.workers[name]

    def kill(self, worker: Worker) -> None:
        """SIGKILL to the worker and its pool process: the machine is gone."""
        worker.status = "killed"
        _send(worker.pid, signal.SIGKILL)

    def pause(self, worker: Worker) -> None:
        """SIGSTOP to the worker and its pool process: the machine hangs."""
        worker.status = "paused"
        _send(worker.pid, signal.SIGSTOP)

    def resume(self, worker: Worker) -> None:
        """SIGCONT to the worker and its pool process."""
        worker.status = "running"
        _send(worker.pid, signal.SIGCONT)

    def check(self) -> None:
        """See who is ready; raise ``DemoFailed`` if a process ended by itself."""
        for worker in self.workers.values():
            if worker.status == "starting" and b" ready." in worker.log.read_bytes():
                worker.status = "running"
        killed = [w.process for w in self.workers.values() if w.status == "killed"]
        for process, log in self._started:
            if process.poll() is not None and process not in killed:
                raise DemoFailed(f"a process ended by itself, see {log.name}")

    def _start(
        self, name: str, module: str, *options: str, stdout: int | None = None
    ) -> subprocess.Popen[bytes]:
        path = f"{_ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        log = self.folder / f"{name}.log"
        with log.open("wb") as file, _in_one_piece():
            process = subprocess.Popen(
                [sys.executable, "-m", module, *options],
                cwd=self.folder,
                env={**os.environ, "PYTHONPATH": path},
                stdin=subprocess.DEVNULL,
                stdout=stdout or file,
                stderr=file,
                start_new_session=True,
            )
            self._started.append((process, log))
        return process


@contextlib.contextmanager
def _in_one_piece() -> Iterator[None]:
    """Between a process and our knowledge of it no signal may end us: it is told afterwards."""
    came: list[int] = []
    handlers = [signal.signal(number, lambda n, _: came.append(n)) for number in _ENDING]
    try:
        yield
    finally:
        for number, handler in zip(_ENDING, handlers, strict=True):
            signal.signal(number, handler)
    if came:
        raise KeyboardInterrupt


def _ask_to_stop(workers: list[subprocess.Popen[bytes]]) -> None:
    deadline = time.monotonic() + _STOP_WITHIN
    for process in workers:
        _send(process.pid, signal.SIGTERM)
    for process in workers:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))


def _send(group: int, number: signal.Signals) -> None:
    # Of a group of zombies some systems say that it is not ours.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)
