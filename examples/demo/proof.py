"""The proof: the file and the table, line by line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from examples.demo.orders import Order

__all__ = ["Proof", "prove"]


@dataclass(frozen=True, slots=True)
class Proof:
    """How often each line of the file is in the table."""

    lines: int
    imported: int
    missing: tuple[Order, ...]
    doubled: tuple[Order, ...]
    foreign: tuple[Order, ...]

    @property
    def holds(self) -> bool:
        """Each line of the file is there exactly once, and nothing else is."""
        return self.lines > 0 and not (self.missing or self.doubled or self.foreign)

    def __str__(self) -> str:
        counts = f"{self.lines:,} input lines, {self.imported:,} imported"
        if self.holds:
            return f"{counts}, each exactly once"
        wrong = (
            f"{len(orders):,} {word} (first: line {orders[0][0]:,})"
            for word, orders in (
                ("missing", self.missing),
                ("more than once", self.doubled),
                ("not from the file", self.foreign),
            )
            if orders
        )
        return f"{counts}: {', '.join(wrong) or 'an empty file proves nothing'}"


def prove(file: Iterable[Order], table: Iterable[Order]) -> Proof:
    """Compare what was to be imported with what was; order does not matter."""
    wanted, found = Counter(file), Counter(table)
    return Proof(
        lines=wanted.total(),
        imported=found.total(),
        missing=tuple(sorted(wanted - found)),
        doubled=tuple(sorted(order for order in found if found[order] > wanted[order] > 0)),
        foreign=tuple(sorted(order for order in found if order not in wanted)),
    )
