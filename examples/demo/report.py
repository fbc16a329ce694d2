"""What is shown at the end: the timeline, the refused stale write, and the proof."""

from __future__ import annotations

from collections.abc import Iterable

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from celery_lease.runs import Story
from examples.demo.app import BATCH
from examples.demo.proof import Proof
from examples.demo.view import colour_of
from examples.demo.watch import Watch, imported_by_epoch, short

__all__ = ["report"]

#: Time, epoch, what, who, why.
Row = tuple[float, int | None, str, str, str]

_SAID_ELSEWHERE = {"created", "reclaimed", "lease released", "settled"}
_STYLES = {
    "claimed": "green",
    "succeeded": "bold green",
    "suspect": "yellow",
    "lease reclaimed": "yellow",
    "write refused": "bold red",
}
_WHY = {
    "suspect": "expired without a renewal",
    "lease reclaimed": "nothing heard in the grace",
    "write refused": "its epoch is over",
    "SIGKILL": "the whole worker is gone",
    "SIGSTOP": "stopped beyond its lease",
    "SIGCONT": "wakes up and cannot know",
}


def report(watch: Watch, proof: Proof, result: dict[str, int]) -> list[RenderableType]:
    """All three; ``result`` is what the caller of the task got."""
    story = watch.story()
    return [timeline(watch, story), refusal(watch, story), verdict(proof, story, result)]


def timeline(watch: Watch, story: Story) -> RenderableType:
    """What the store has recorded about the run, and what the demo did."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, expand=True)
    table.add_column("time", justify="right", no_wrap=True)
    for name in ("epoch", "what", "who"):
        table.add_column(name, no_wrap=True)
    table.add_column("why", style="dim", ratio=1)
    for at, epoch, what, who, why in sorted(_rows(watch, story), key=lambda row: row[0]):
        colour = colour_of(epoch)
        style = "bold" if what.isupper() else _STYLES.get(what, "default")
        number = Text(str(epoch or ""), colour)
        table.add_row(f"{at:.1f} s", number, Text(what, style), Text(who, colour), why)
    return Panel(
        table,
        title="[bold]The timeline[/]",
        title_align="left",
        border_style="white",
        padding=(0, 2),
    )


def _rows(watch: Watch, story: Story) -> Iterable[Row]:
    holders = holders_of(story)
    for note in watch.notes:
        if note.act:
            yield note.at, note.epoch, note.act, note.worker, _WHY[note.act]
    for moment in story.timeline:
        what = moment.what.replace("_", " ")
        if what not in _SAID_ELSEWHERE:
            who = short(moment.who) or holders.get(moment.epoch or 0, "")
            at = watch.since_start(moment.at.timestamp())
            why = _goes_on(moment.epoch) if what == "claimed" else moment.why or ""
            if what.endswith("deferred"):
                why = "got a message, looks again"
            elif what.endswith("dropped"):
                why = "got a message of the past"
            yield at, moment.epoch, what, who, _WHY.get(what, why)


def _goes_on(epoch: int | None) -> str:
    done = sum(count for older, count in imported_by_epoch().items() if older < (epoch or 0))
    return f"goes on after line {done:,}" if done else "starts"


def holders_of(story: Story) -> dict[int, str]:
    """The worker of each epoch."""
    return {lease["epoch"]: short(lease["node"]) for lease in story.leases}


def refusal(watch: Watch, story: Story) -> RenderableType:
    """The write that a paused holder tried after the hand-over."""
    event = next(event for event in story.events if event["kind"] == "write_refused")
    stale = event["epoch"]
    # Its batch began after the last line that it had been able to commit.
    first = sum(count for epoch, count in imported_by_epoch().items() if epoch <= stale) + 1
    lines = f"lines {first:,} to {first + BATCH - 1:,}"
    holders = holders_of(story)
    paused = next(note.at for note in watch.notes if note.act == "SIGSTOP")
    slept = watch.since_start(event["at"]) - paused
    return Panel(
        Text.assemble(
            ("✗ refused: ", "bold red"),
            (holders[stale], colour_of(stale)),
            f" wanted to commit {lines} under ",
            (f"epoch {stale}", colour_of(stale)),
            "\n",
            (f"It had been stopped for {slept:.1f} s; the run was at epoch {stale + 1}: ", "dim"),
            ("all of it was rolled back.", "dim"),
        ),
        title="[bold]The stale write[/]",
        title_align="left",
        border_style="red",
        padding=(0, 2),
    )


def verdict(proof: Proof, story: Story, result: dict[str, int]) -> RenderableType:
    """The proof, and who imported what."""
    mark, colour = ("✓", "green") if proof.holds else ("✗", "red")
    shares = Table.grid(padding=(0, 2))
    first = 1
    for epoch, count in imported_by_epoch().items():
        shares.add_row(
            Text(f"epoch {epoch}", colour_of(epoch)),
            Text(holders_of(story)[epoch], colour_of(epoch)),
            f"lines {first:,} to {first + count - 1:,}",
        )
        first += count
    got = f"{result['orders']:,} orders, {result['cents'] / 100:,.2f} in all"
    shares.add_row("result", "of the task", got)
    return Panel(
        Group(Text(f"{mark} {proof}", f"bold {colour}"), shares),
        title="[bold]The proof[/]",
        title_align="left",
        border_style=colour,
        padding=(0, 2),
    )
