"""Waiting for a condition, never for a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_LOOK_EVERY = 0.01


def wait_until(condition: Callable[[], T], *, timeout: float = 10.0, what: str = "") -> T:
    """The first true value of ``condition()``; fails the test after ``timeout`` seconds.

    ``what`` says in the failure what was waited for, as in "waited 10 s for the reclaim".
    """
    deadline = time.monotonic() + timeout
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            name = what or getattr(condition, "__name__", "a condition")
            raise AssertionError(f"waited {timeout:g} s for {name}; last seen: {value!r}")
        time.sleep(_LOOK_EVERY)
