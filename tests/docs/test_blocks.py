"""Blocks that the pages' own runner cannot run: the README's, and a test with a real worker."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from celery import Celery, _state
from sqlalchemy import Column, Integer, MetaData, Table, create_engine, insert, select
from sqlalchemy.orm import sessionmaker
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser

from celery_lease import LeasedTask
from tests.docs.pages import ROOT, page, titled


def batches(path: str, start: int) -> Iterator[tuple[int, list[dict[str, int]]]]:
    """What the reader of the README is expected to have: lines of a file, in batches."""
    for line in range(start, 3):
        yield line + 1, [{"line": line}]


@pytest.fixture
def readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The README's names after its blocks have run, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    # Celery shares tasks among the apps of a process; the README's are not for other tests.
    monkeypatch.setattr(_state, "_on_app_finalizers", set(_state._on_app_finalizers))
    engine = create_engine("sqlite:///leases.sqlite3")
    items = Table("items", MetaData(), Column("line", Integer, primary_key=True))
    items.metadata.create_all(engine)
    document = Sybil(parsers=[PythonCodeBlockParser()]).parse(ROOT / "README.md")
    document.namespace.update(
        app=Celery("before", broker="memory://", set_as_current=False),
        LeasedTask=LeasedTask,
        Session=sessionmaker(engine),
        batches=batches,
        insert=insert,
        items=items,
        fetch=lambda customer: {"customer": customer},
        render=lambda data: f"report for {data['customer']}",
    )
    for number, example in enumerate(document.examples()):
        document.namespace["__name__"] = f"{tmp_path.name}_{number}"
        example.evaluate()
    yield document.namespace | {"engine": engine}
    engine.dispose()


def test_the_task_of_the_readme_imports_every_row_once(readme: dict[str, Any]) -> None:
    readme["app"].conf.lease_store_url = "sqlite:///leases.sqlite3"
    readme["import_file"].apply(args=("orders.csv",)).get()
    with readme["engine"].connect() as connection:
        assert connection.scalars(select(readme["items"].c.line)).all() == [0, 1, 2]


def test_the_staged_task_of_the_readme_renders_what_it_fetched(readme: dict[str, Any]) -> None:
    assert readme["report"]("ada") == "report for ada"


@pytest.mark.integration
def test_the_test_with_a_worker_passes_as_it_is_printed(tmp_path: Path) -> None:
    text = page("how-to/test-your-tasks.md")
    for name in ("shop.py", "test_shop.py"):
        (tmp_path / name).write_text(titled(text, name))
    with without(os.environ, "PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER") as environment:
        done = subprocess.run(  # noqa: PLW1510 - the assertion shows what it printed
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *plugin()],
            cwd=tmp_path,
            env={**environment, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=110,
        )
    assert done.returncode == 0, done.stdout + done.stderr


def plugin() -> Iterable[str]:
    """The plugin by name, where the installed package does not announce it."""
    from importlib.metadata import entry_points

    name = "celery_lease.testing.plugin"
    known = any(point.value == name for point in entry_points(group="pytest11"))
    return [] if known else ["-p", name]


@contextmanager
def without(environment: Any, *names: str) -> Iterator[dict[str, str]]:
    yield {name: value for name, value in environment.items() if name not in names}
