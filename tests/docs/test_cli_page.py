from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import click
import pytest
from celery import Celery
from click.testing import CliRunner, Result

from celery_lease import LeasedTask
from celery_lease.application import Leasing
from celery_lease.cli import lease
from celery_lease.runs import RunInfo, Story
from celery_lease.testing.clock import advance_database_clock
from tests.docs.pages import page, rows

PAGE = page("reference/cli.md")
RUN = "dfa80a5d-12dd-4a84-81d6-9768c67d3274"


@pytest.fixture
def app(tmp_path: Path) -> Iterator[Celery]:
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.conf.lease_store_url = f"sqlite:///{tmp_path / 'leases.sqlite3'}"

    @app.task(base=LeasedTask, bind=True, name="shop.import_lines", shared=False)
    def import_lines(self: LeasedTask, count: int) -> int:
        self.lease.checkpoint(count, progress=1)
        return count

    yield app
    Leasing.of(app).store.dispose()
    app.close()


def call(app: Celery, *arguments: str) -> Result:
    return CliRunner().invoke(lease, arguments, obj=SimpleNamespace(app=app))


def shown(command: str) -> str:
    """What the page shows under ``$ celery -A shop <command>``."""
    found = re.search(
        rf"^\$ celery -A shop {re.escape(command)}\n(.*?)(?=^```|^\$ )",
        PAGE,
        re.MULTILINE | re.DOTALL,
    )
    assert found, command
    return found.group(1)


@pytest.mark.parametrize("arguments", ["init-db", "reap --once", "reap --once --json", "show nope"])
def test_the_page_shows_what_the_command_prints(app: Celery, arguments: str) -> None:
    assert call(app, *arguments.split()).output == shown(f"lease {arguments}")


def test_the_page_has_the_headings_of_the_list(app: Celery) -> None:
    run(app)
    assert (
        call(app, "runs").output.split("\n")[0].split()
        == shown("lease runs").split("\n")[0].split()
    )


def test_the_page_has_the_fields_of_a_listed_run(app: Celery) -> None:
    run(app)
    printed = json.loads(call(app, "runs", "--state", "succeeded", "--limit", "1", "--json").output)
    on_page = json.loads(shown("lease runs --state succeeded --limit 1 --json"))
    assert [*printed[0]] == [*on_page[0]] == [field.name for field in fields(RunInfo)]


def test_the_page_has_the_parts_of_a_run_that_is_shown(app: Celery) -> None:
    run(app)
    printed, on_page = call(app, "show", RUN).output, shown(f"lease show {RUN}")
    assert labels(printed) == labels(on_page)
    parts = [field.name for field in fields(Story)]
    assert [*json.loads(call(app, "show", RUN, "--json").output)] == parts
    assert ", ".join(f"`{part}`" for part in parts[1:-1]) + f" and `{parts[-1]}`" in PAGE


def test_the_page_shows_how_a_suspect_lease_is_listed(app: Celery) -> None:
    leasing = Leasing.of(app)
    leasing.store.claim(RUN, 0, "two@vm/1", task="t", terms=leasing.terms(None), node="two@vm")
    advance_database_clock(leasing.store, 109)
    leasing.store.suspect(RUN, 1)
    assert re.search(r"suspect, (19|20) s ago", call(app, "runs").output)
    assert "suspect, 19 s ago" in PAGE


def test_the_page_shows_what_becomes_of_a_revoked_run(app: Celery) -> None:
    fresh = "7b0c1c9e-29f5-4b0e-8f0c-0b7a3a4c9d10"
    asked = f'lease revoke {fresh} --reason "customer cancelled"'
    assert call(app, *shlex.split(asked)[1:]).output == shown(asked)
    assert call(app, "revoke", fresh, "--json").output.startswith(f'[{{"run_id": "{fresh}"')
    run(app)
    for asked in (f"revoke {RUN}", f"revoke {RUN} --json"):
        assert call(app, *asked.split()).output == shown(f"lease {asked}")


def test_only_what_is_not_settled_is_listed_if_asked(app: Celery) -> None:
    leasing = Leasing.of(app)
    run(app)
    leasing.store.claim("held", 0, "two@vm/1", task="t", terms=leasing.terms(None))
    leasing.store.claim("stopped", 0, "two@vm/2", task="t", terms=leasing.terms(None), envelope=b"")
    call(app, "revoke", "stopped", "never-seen")
    printed = json.loads(call(app, "runs", "--unsettled", "--json").output)
    assert {one["run_id"] for one in printed} == {"held", "stopped"}


@pytest.mark.parametrize("command", lease.commands.values(), ids=str)
def test_the_page_names_every_command_and_option(command: click.Command) -> None:
    assert re.search(rf"^## `{command.name}\b", PAGE, re.MULTILINE)
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            assert f"`{parameter.opts[0]}`" in PAGE


def test_the_exit_codes_are_those_of_the_page(app: Celery) -> None:
    codes = {code for code, _ in rows(PAGE, "exit code", "meaning")}
    seen = {
        "0": call(app, "runs"),
        "1": call(app, "runs", "--state", "gone"),
        "2": call(app, "no-such-command"),
        "3": call(app, "show", "nope"),
    }
    assert codes == {*seen}
    assert {code: str(result.exit_code) for code, result in seen.items()} == {c: c for c in seen}


def run(app: Celery) -> None:
    app.tasks["shop.import_lines"].apply(args=(3,), task_id=RUN).get()


def labels(text: str) -> list[str]:
    """The labels of the summary and the headings of the timeline."""
    summary, _, timeline = text.partition("\n\n")
    found = [re.split(r"\s{2,}", line)[0] for line in summary.splitlines()]
    return found + re.split(r"\s{2,}", timeline.splitlines()[0].strip())
