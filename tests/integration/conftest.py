"""What ``tests/workers.py`` offers, for this tier."""

from __future__ import annotations

from tests.workers import database, pytest_runtest_makereport, shop

__all__ = ["database", "pytest_runtest_makereport", "shop"]
