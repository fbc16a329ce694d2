"""A lease store of a test's own, for tests that execute tasks with ``apply``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from celery_lease.application import Leasing
from celery_lease.runs import Runs

if TYPE_CHECKING:
    from celery import Celery

__all__ = ["fresh_store"]


@contextlib.contextmanager
def fresh_store(app: Celery | Any, url: str | None = None) -> Iterator[Runs]:
    """In the block the leased tasks of ``app`` have an empty store, whose runs are yielded.

    An SQLite file that ends with the block; or the database at ``url``, in which the missing
    tables are made and nothing is removed. Other settings are those of the app. Nothing is
    changed for processes that were started before.

    >>> with fresh_store(app) as runs:
    ...     import_file.apply(("a.csv",), task_id="one")
    ...     assert runs.get("one").state == "succeeded"
    """
    with TemporaryDirectory(prefix="celery-lease-") as folder:
        file = Path(folder) / "leases.sqlite3"
        leasing = Leasing(app)
        leasing.settings = replace(leasing.settings, store_url=url or f"sqlite:///{file}")
        with leasing.in_place_of_the_apps():
            leasing.store.create_schema()
            try:
                yield Runs(app)
            finally:
                leasing.store.dispose()
