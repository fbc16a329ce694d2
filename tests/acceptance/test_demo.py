"""The demo, as `make demo` runs it."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.demo.proof import prove
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
FILE = [(1, "Ada", 100), (2, "Grace", 250), (3, "Ada", 100)]


@pytest.mark.timeout(180)
def test_the_demo_proves_that_each_line_was_imported_once_and_leaves_nothing(tmp_path):
    with started(tmp_path) as demo:
        output, _ = demo.communicate(timeout=150)

    assert demo.returncode == 0, output
    assert "4,000 input lines, 4,000 imported, each exactly once" in output
    assert re.search(
        r"refused: worker-\d wanted to commit lines [\d,]+ to [\d,]+ under epoch 2", output
    )
    for act in ("SIGKILL to worker-", "SIGSTOP to worker-", "SIGCONT to worker-"):
        assert act in output
    wait_until(lambda: not running_in(tmp_path), timeout=10, what="the last process to be gone")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.timeout(120)
def test_an_interrupted_demo_leaves_nothing(tmp_path):
    with started(tmp_path) as demo:
        wait_until(lambda: len(running_in(tmp_path)) > 3, timeout=60, what="the workers")
        demo.terminate()
        output, _ = demo.communicate(timeout=30)

    assert demo.returncode == 130, output
    wait_until(lambda: not running_in(tmp_path), timeout=10, what="the last process to be gone")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.timeout(120)
def test_a_demo_in_which_a_step_does_not_happen_fails_and_keeps_its_logs(tmp_path):
    with started(tmp_path) as demo:
        wait_until(lambda: list(tmp_path.rglob("worker-2.log")), timeout=60, what="a worker's log")
        for pid in running_in(tmp_path):
            if pid != demo.pid:
                os.kill(pid, 9)
        output, _ = demo.communicate(timeout=30)

    assert demo.returncode == 1, output
    assert "The demo failed: a process ended by itself, see " in output
    wait_until(lambda: not running_in(tmp_path), timeout=10, what="the last process to be gone")
    assert list(tmp_path.rglob("worker-1.log"))


def test_the_proof_holds_when_each_line_is_there_once_in_any_order():
    proof = prove(FILE, reversed(FILE))

    assert proof.holds
    assert str(proof) == "3 input lines, 3 imported, each exactly once"


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ([*FILE, FILE[1]], "1 more than once (first: line 2)"),
        (FILE[:2], "1 missing (first: line 3)"),
        ([*FILE, (4, "Tony", 1)], "1 not from the file (first: line 4)"),
        ([*FILE[:2], (3, "Ada", 999)], "1 missing (first: line 3), 1 not from the file"),
        ([FILE[0], FILE[0], FILE[2]], "1 missing (first: line 2), 1 more than once"),
    ],
)
def test_the_proof_fails_for_a_line_that_is_doubled_missing_or_foreign(table, says):
    proof = prove(FILE, table)

    assert not proof.holds
    assert says in str(proof)


def test_an_empty_file_proves_nothing():
    assert not prove([], []).holds


def test_a_proof_that_does_not_hold_is_exit_status_1(tmp_path):
    # As if the table had one of its orders twice.
    code = (
        "import sys; from examples.demo import __main__ as demo, orders; read = orders.read_table; "
        "orders.read_table = lambda: [*read(), read()[7]]; sys.exit(demo.main([]))"
    )
    with started(tmp_path, "-c", code) as demo:
        output, _ = demo.communicate(timeout=100)

    assert demo.returncode == 1, output
    assert "4,000 input lines, 4,001 imported: 1 more than once (first: line 8)" in output


def started(folder: Path, *command: str) -> subprocess.Popen[str]:
    """The demo, with its temporary files in `folder` of which everything it starts knows."""
    return subprocess.Popen(
        [sys.executable, *(command or ("-m", "examples.demo"))],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(folder)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def running_in(folder: Path) -> list[int]:
    """The processes whose environment names `folder` as their place for temporary files."""
    mark = re.compile(rf"TMPDIR={re.escape(str(folder))}[/\0 ]".encode())
    return [pid for pid, environment in environments() if mark.search(environment)]


def environments() -> Iterator[tuple[int, bytes]]:
    """Every process that can be looked at, and its environment."""
    if not Path("/proc/self/environ").exists():
        listed = subprocess.run(
            ["ps", "eww", "-A", "-o", "pid=,command="], capture_output=True, check=True
        )
        for line in listed.stdout.splitlines():
            yield int(line.split()[0]), line + b" "
        return
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended, or is somebody else's
            yield int(environ.parent.name), environ.read_bytes()
