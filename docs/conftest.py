"""Runs the Python blocks of these pages: each page in order, in one namespace.

A block marked ``python`` is run; blocks in other languages, and ``text``, are only shown.
"""

from __future__ import annotations

import itertools
import os
from tempfile import TemporaryDirectory
from typing import Any

from celery import _state
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser

_pages = itertools.count(1)


def _enter_empty_folder(namespace: dict[str, Any]) -> None:
    """A page may write files, such as the default SQLite store, into its working folder."""
    folder = TemporaryDirectory(prefix="celery-lease-docs-")
    shared = _state._on_app_finalizers  # noqa: SLF001 - no other way to take tasks back
    namespace["_left"] = (os.getcwd(), folder, shared)  # noqa: PTH109 - for os.chdir
    os.chdir(folder.name)
    # Celery shares tasks among the apps of a process, by the names of their modules. Those of
    # a page, some of them wrong on purpose, are of no use to the apps of other tests.
    namespace["__name__"] = f"page_{next(_pages)}"
    _state._on_app_finalizers = set(shared)  # noqa: SLF001


def _leave_folder(namespace: dict[str, Any]) -> None:
    previous, folder, shared = namespace["_left"]
    _state._on_app_finalizers = shared  # noqa: SLF001
    os.chdir(previous)
    folder.cleanup()


pytest_collect_file = Sybil(
    parsers=[PythonCodeBlockParser(), SkipParser()],
    patterns=["*.md"],
    setup=_enter_empty_folder,
    teardown=_leave_folder,
).pytest()
