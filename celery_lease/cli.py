"""``celery -A app lease …``: the operator's API on Celery's own command line.

Exit codes: 0 done, 1 an error of the store or the settings, 2 wrong usage, 3 no such run.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any, TypeVar

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from celery_lease.errors import LeaseError, RunNotFound
from celery_lease.runs import RunInfo, Runs, Story
from celery_lease.states import RunState

__all__ = ["lease"]

F = TypeVar("F", bound=Callable[..., Any])

_COLOURS = {
    RunState.READY: "cyan",
    RunState.RUNNING: "bold green",
    RunState.WAITING: "blue",
    RunState.PARKED: "yellow",
    RunState.SUCCEEDED: "green",
    RunState.FAILED: "red",
    RunState.REVOKED: "magenta",
}
_as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON for scripts.")


def _console() -> Console:
    """A terminal's own width; a pipe gets lines that are not folded."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=160)


def _command(function: F) -> F:
    """Give the command the app's runs; turn the library's errors into exit codes."""

    @functools.wraps(function)
    @click.pass_context
    def run(context: click.Context, *args: Any, **kwargs: Any) -> Any:
        try:
            return function(Runs(context.obj.app), *args, **kwargs)
        except RunNotFound as exc:
            click.echo(f"Error: {exc}", err=True)
            context.exit(3)
        except LeaseError as exc:
            click.echo(f"Error: {exc}", err=True)
            context.exit(1)

    return run  # type: ignore[return-value]  # click's decorator hides the signature


@click.group()
def lease() -> None:
    """See and steer leased runs, through the lease store."""


@lease.command("init-db")
@_as_json
@_command
def init_db(runs: Runs, as_json: bool) -> None:
    """Make the tables of the lease store that are missing."""
    runs.init_db()
    _say({"initialised": True}, "The tables of the lease store are there.", as_json)


@lease.command("runs")
@click.option("--state", help=f"Only runs in this state: {', '.join(RunState)}.")
@click.option("--task", help="Only runs of this task.")
@click.option("--unsettled", is_flag=True, help="Only runs with work or an outcome to come.")
@click.option("--limit", default=50, show_default=True, help="At most so many, newest first.")
@_as_json
@_command
def list_runs(
    runs: Runs, *, state: str | None, task: str | None, unsettled: bool, limit: int, as_json: bool
) -> None:
    """List the newest runs: state, holder, epoch, progress, lease left."""
    found = runs.list(state=state, task=task, unsettled=unsettled, most=limit)
    if as_json:
        click.echo(json.dumps([info.as_dict() for info in found], indent=2))
        return
    table = Table(box=None, pad_edge=False)
    for heading in ("RUN", "STATE", "EPOCH", "PROGRESS", "LEASE", "HOLDER", "TASK"):
        table.add_column(heading, no_wrap=heading != "TASK", overflow="fold")
    for info in found:
        table.add_row(*_cells(info))
    _console().print(table if found else "No runs.")


@lease.command("show")
@click.argument("run_id", metavar="RUN")
@_as_json
@_command
def show(runs: Runs, run_id: str, as_json: bool) -> None:
    """Show one run: state, holder, leases, stages and events as a timeline."""
    story = runs.story(run_id)
    if as_json:
        click.echo(json.dumps(story.as_dict(), indent=2))
        return
    console = _console()
    console.print(_summary(story.run))
    console.print()
    console.print(_timeline(story))


@lease.command("revoke")
@click.argument("run_ids", metavar="RUN...", nargs=-1, required=True)
@click.option("--reason", default="revoked by an operator", show_default=True, help="For the log.")
@_as_json
@_command
def revoke(runs: Runs, run_ids: tuple[str, ...], reason: str, as_json: bool) -> None:
    """End runs before their outcome, also runs that no worker has seen yet."""
    done = []
    for run_id in run_ids:
        revoked = runs.revoke(run_id, reason)
        state = str(runs.get(run_id).state)
        done.append({"run_id": run_id, "revoked": revoked, "state": state})
        if not as_json:
            click.echo(f"{run_id}: {'revoked' if revoked else f'was over already, {state}'}")
    if as_json:
        click.echo(json.dumps(done))


@lease.command("reap")
@click.option("--once", is_flag=True, help="One pass, for cron; else until interrupted.")
@_as_json
@_command
def reap(runs: Runs, once: bool, as_json: bool) -> None:
    """Take runs back from dead holders and send due triggers."""
    if once:
        done = runs.reap()
        counts = {name: getattr(done, name) for name in done.__slots__}
        text = ", ".join(f"{name} {count}" for name, count in counts.items())
        _say(counts, text, as_json)
        return
    loop = runs.reap_for_ever()
    _say({"reaping": True}, "Reaping; stop with Ctrl-C.", as_json)
    try:
        while loop.alive:
            loop.join(1.0)
    except KeyboardInterrupt:
        loop.stop()


def _say(data: dict[str, Any], text: str, as_json: bool) -> None:
    click.echo(json.dumps(data) if as_json else text)


def _cells(info: RunInfo) -> list[Text]:
    return [
        Text(info.run_id),
        Text(info.state, style=_colour(info.state)),
        Text(str(info.epoch)),
        Text(_percent(info.progress)),
        _left(info),
        Text(info.node or "-"),
        Text(info.task),
    ]


def _colour(state: str) -> str:
    return _COLOURS[RunState(state)] if state in set(RunState) else ""


def _percent(progress: float | None) -> str:
    return "-" if progress is None else f"{progress:.0%}"


def _left(info: RunInfo) -> Text:
    if info.lease_left is None:
        return Text("-")
    if info.lease_left <= 0:
        return Text(f"{info.lease_status}, {-info.lease_left:.0f} s ago", style="red")
    return Text(f"{info.lease_left:.0f} s")


def _summary(info: RunInfo) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column()
    rows: list[tuple[str, str | Text]] = [
        ("run", info.run_id),
        ("task", info.task),
        ("state", Text(info.state, style=_colour(info.state))),
        ("reason", info.reason or "-"),
        ("epoch", f"{info.epoch} (attempt {info.attempt}, {info.recoveries} recoveries)"),
        ("holder", info.holder or "-"),
        ("progress", " ".join(filter(None, [_percent(info.progress), info.note]))),
        ("lease left", _left(info)),
    ]
    for row in rows:
        table.add_row(*row)
    return table


def _timeline(story: Story) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("TIME (UTC)", "EPOCH", "WHAT", "WHO", "WHY"):
        table.add_column(heading, no_wrap=heading == "TIME (UTC)")
    for moment in story.timeline:
        table.add_row(
            moment.at.strftime("%Y-%m-%d %H:%M:%S.%f")[:-3],
            "-" if moment.epoch is None else str(moment.epoch),
            moment.what,
            moment.who or "-",
            moment.why or "-",
        )
    return table
