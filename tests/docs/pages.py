"""The pages as tests read them: tables, and code blocks by their title."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def page(name: str) -> str:
    """The text of a page of ``docs/``."""
    return (ROOT / "docs" / name).read_text()


def rows(text: str, *headings: str) -> list[list[str]]:
    """The cells of the table that has these headings."""
    wanted = list(headings)
    found: list[list[str]] | None = None
    for line in text.splitlines():
        cells = _cells(line)
        if found is None:
            found = [] if cells == wanted else None
        elif not cells:
            break
        elif not set("".join(cells)) <= set("-: "):
            found.append(cells)
    assert found, f"no table with the headings {wanted}"
    return found


def titled(text: str, title: str) -> str:
    """The code block with this title."""
    found = re.search(
        rf'^```\w+ title="{re.escape(title)}"\n(.*?)^```', text, re.MULTILINE | re.DOTALL
    )
    assert found, f"no code block with the title {title!r}"
    return found.group(1)


def _cells(line: str) -> list[str]:
    if not line.startswith("|"):
        return []
    return [cell.strip() for cell in line.strip().strip("|").split("|")]
