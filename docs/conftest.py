"""Runs the Python blocks of these pages: each page in order, in one namespace.

A block marked ``python`` is run; blocks in other languages, and ``text``, are only shown.
"""

from __future__ import annotations

import os
from tempfile import TemporaryDirectory
from typing import Any

from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser


def _enter_empty_folder(namespace: dict[str, Any]) -> None:
    """A page may write files, such as the default SQLite store, into its working folder."""
    folder = TemporaryDirectory(prefix="celery-lease-docs-")
    namespace["_left"] = (os.getcwd(), folder)  # noqa: PTH109 - for os.chdir
    os.chdir(folder.name)


def _leave_folder(namespace: dict[str, Any]) -> None:
    previous, folder = namespace["_left"]
    os.chdir(previous)
    folder.cleanup()


pytest_collect_file = Sybil(
    parsers=[PythonCodeBlockParser(), SkipParser()],
    patterns=["*.md"],
    setup=_enter_empty_folder,
    teardown=_leave_folder,
).pytest()
