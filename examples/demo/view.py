"""The live view: a panel in a terminal, a line for each change anywhere else."""

from __future__ import annotations

from typing import Protocol, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from examples.demo.app import STAGES
from examples.demo.watch import Note, Snapshot

__all__ = ["WIDTH", "View", "colour_of", "panel", "view_on"]

#: Of all that is shown, at most.
WIDTH = 96
_BAR = 40
_NOTES = 10
_COLOURS = ("cyan", "bright_blue", "green", "yellow", "magenta")
_STATUS = {
    "starting": ("◌", "dim"),
    "running": ("●", "green"),
    "paused": ("‖", "yellow"),
    "killed": ("✗", "red"),
}


class View(Protocol):
    """Shows one snapshot after the other."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *exc: object) -> None: ...
    def show(self, now: Snapshot) -> None: ...


def view_on(console: Console) -> View:
    """What suits ``console``."""
    if console.is_terminal and not console.is_dumb_terminal:
        return LiveView(console)
    return PlainView(console)


class LiveView:
    """The panel, drawn again and again in its place."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, auto_refresh=False)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._live.stop()

    def show(self, now: Snapshot) -> None:
        self._live.update(panel(now), refresh=True)


class PlainView:
    """A line for each note, and for each change of the run or its lease."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._told = 0
        self._last: tuple[object, ...] = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def show(self, now: Snapshot) -> None:
        for note in now.notes[self._told :]:
            self._line(note.at, note.text)
        self._told = len(now.notes)
        tenth = int(now.progress * 10)
        lease = now.run.lease_status if now.run else None
        seen = (now.state, now.epoch, lease, now.stage, tenth)
        if now.run and seen != self._last:
            self._line(
                now.at,
                f"  {now.state}, holder {now.holder or 'nobody'}, epoch {now.epoch}, lease {lease}, "
                f"stage {now.stage}, {now.imported:,} of {now.lines:,} lines",
            )
        self._last = seen

    def _line(self, at: float, text: str) -> None:
        self._console.print(f"{at:5.1f} s  {text}", highlight=False, soft_wrap=True, markup=False)


def colour_of(epoch: int | None) -> str:
    """The colour of an epoch, wherever it is shown."""
    return _COLOURS[(epoch - 1) % len(_COLOURS)] if epoch else "default"


def panel(now: Snapshot) -> RenderableType:
    """Run, holder, epoch, stage, progress, lease left; the workers; what the demo does."""
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column(no_wrap=True)
    facts.add_row("run", _run(now))
    facts.add_row("holder", _holder(now))
    facts.add_row("stage", _stages(now))
    facts.add_row("progress", _progress(now))
    facts.add_row("lease", _lease(now))
    facts.add_row("workers", _workers(now))
    said = [_note(note) for note in now.notes[-_NOTES:]]
    return Panel(
        Group(facts, Rule(style="dim"), *said),
        title="[bold]celery_lease: one import, whatever happens to its workers[/]",
        title_align="left",
        subtitle=f"{now.at:.1f} s",
        subtitle_align="right",
        border_style="white",
        padding=(0, 2),
    )


def _run(now: Snapshot) -> Text:
    if now.run is None:
        return Text("not claimed yet", "dim")
    style = "bold green" if now.state == "succeeded" else "bold"
    return Text.assemble(now.run.run_id[:8], "  import_orders  ", (now.state, style))


def _holder(now: Snapshot) -> Text:
    if not now.holder:
        return Text("nobody", "dim")
    colour = colour_of(now.epoch)
    return Text.assemble((now.holder, f"bold {colour}"), "  epoch ", (str(now.epoch), "bold"))


def _stages(now: Snapshot) -> Text:
    at = {"": -1, "done": len(STAGES)}.get(now.stage)
    at = STAGES.index(now.stage) if at is None else at
    text = Text()
    for number, name in enumerate(STAGES):
        mark, style = (
            ("✓", "green") if number < at else ("●", "bold") if number == at else ("○", "dim")
        )
        text.append(f"{mark} {name}   ", style)
    return text


def _progress(now: Snapshot) -> Text:
    """A bar in the colours of those who imported; what a stale holder wrote would show."""
    bar = Text()
    total = 0
    for epoch, count in now.by_epoch.items():
        total += count
        cells = round(_BAR * total / now.lines) - len(bar)
        bar.append("━" * cells, colour_of(epoch))
    bar.append("━" * (_BAR - len(bar)), "bright_black")
    return bar.append(f"  {now.progress:4.0%}  {now.imported:,} / {now.lines:,}", "default")


def _lease(now: Snapshot) -> Text:
    left = now.run.lease_left if now.run else None
    if now.run is None or left is None:
        return Text(now.run.lease_status or "" if now.run else "", "dim")
    if left <= 0:
        why = "  suspect: it will be handed over" if now.run.lease_status == "suspect" else ""
        return Text(f"expired {-left:.1f} s ago{why}", "bold red")
    style = "green" if left > now.duration / 2 else "yellow"
    cells = round(20 * min(left / now.duration, 1))
    return Text.assemble(
        ("■" * cells, style), ("■" * (20 - cells), "bright_black"), (f"  {left:.1f} s left", style)
    )


def _workers(now: Snapshot) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    for name, status, pid in now.workers:
        mark, style = _STATUS[status]
        holds = f"holds epoch {now.epoch}" if name == now.holder else ""
        cells = (Text(f"{mark} {name}", style), Text(status, style), Text(f"pid {pid}", "dim"))
        table.add_row(*cells, Text(holds, colour_of(now.epoch)))
    return table


def _note(note: Note) -> Text:
    return Text.assemble(
        (f"{note.at:5.1f} s  ", "dim"), (note.text, "bold red" if note.act else "default")
    )
