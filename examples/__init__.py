"""Examples that run from a checkout of this repository."""

from __future__ import annotations
