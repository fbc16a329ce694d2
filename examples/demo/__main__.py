"""``python -m examples.demo``: start everything, play the story, show the proof, stop everything.

Exits with 0 if each line of the file was imported exactly once, with 1 if not or if a step did
not happen; then the logs are kept.
"""

from __future__ import annotations

import argparse
import io
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console, RenderableType
from rich.terminal_theme import MONOKAI

from examples.demo import orders
from examples.demo.processes import DemoFailed, Processes
from examples.demo.proof import prove
from examples.demo.report import report
from examples.demo.story import Story
from examples.demo.view import WIDTH, panel, view_on
from examples.demo.watch import Watch

LINES = 4000


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status; nothing is left running, whatever happens."""
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description=__doc__)
    parser.add_argument("--svg", type=Path, metavar="FILE", help="also draw what was shown")
    options = parser.parse_args(arguments)
    console = Console()
    console.width = min(console.width, WIDTH) if console.is_terminal else WIDTH
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    folder = Path(tempfile.mkdtemp(prefix="celery-lease-demo-"))
    status = 1
    try:
        status = run(folder, console, options.svg)
    except DemoFailed as failed:
        console.print(f"The demo failed: {failed}", style="bold red")
    except KeyboardInterrupt:
        console.print("Interrupted; nothing is left running.")
        status = 130
    finally:
        if status == 1:
            console.print(f"The logs are in {folder}")
        else:
            shutil.rmtree(folder)
    return status


def run(folder: Path, console: Console, svg: Path | None) -> int:
    """One demo with all its files in ``folder``; the exit status."""
    os.environ.update(surroundings(folder))
    file = folder / "orders.csv"
    orders.write_file(file, LINES)
    orders.metadata.create_all(orders.engine())
    with Processes(folder) as processes:
        os.environ["DEMO_BROKER"] = processes.start_broker()
        watch = Watch(processes.workers, LINES)
        with view_on(console) as view:
            story = Story(processes, watch, view)
            result = story.play(file)
        proof = prove(orders.read_file(file), orders.read_table())
        shown = report(watch, proof, result.get(timeout=10))
        console.print(*shown, sep="\n")
    console.print("All processes are stopped.", style="dim")
    if svg is not None:
        assert story.picture is not None
        draw(svg, panel(story.picture), *shown)
    return 0 if proof.holds else 1


def draw(svg: Path, *shown: RenderableType) -> None:
    """A picture of what was shown."""
    recorder = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    recorder.print(*shown, sep="\n")
    recorder.save_svg(str(svg), title="make demo", theme=MONOKAI)


def surroundings(folder: Path) -> dict[str, str]:
    """The environment of all processes: nothing of it may lead to a real account or a proxy."""
    return {
        "DEMO_FOLDER": str(folder),
        "TMPDIR": str(folder),  # a killed worker leaves its temporary files
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
    }


if __name__ == "__main__":
    sys.exit(main())
