"""What the demo imports: a file of orders, and the table that they go to.

The table is in the database of the lease store, so that orders and checkpoint are committed
together. It has no unique constraint: an order that is imported twice is there twice.
"""

from __future__ import annotations

import csv
import os
import random
from collections.abc import Iterator
from functools import cache
from itertools import islice
from pathlib import Path

from sqlalchemy import Column, Engine, Integer, MetaData, Table, Text, create_engine, select

#: Line of the file, customer, amount in cents.
Order = tuple[int, str, int]

metadata = MetaData()
imported = Table(
    "imported_order",
    metadata,
    Column("line", Integer, nullable=False),
    Column("customer", Text, nullable=False),
    Column("cents", Integer, nullable=False),
    Column("epoch", Integer, nullable=False),  # who imported it; only for people
)


def folder() -> Path:
    """Where everything of this demo is; the processes hear of it by the environment."""
    return Path(os.environ["DEMO_FOLDER"])


def database_url() -> str:
    """The one database: the application's orders and the library's leases."""
    return f"sqlite:///{folder() / 'demo.sqlite3'}"


@cache
def engine() -> Engine:
    """The application's own engine; made in the process that uses it, after the fork."""
    return create_engine(database_url())


def write_file(path: Path, lines: int) -> None:
    """A file of ``lines`` made-up orders, the same each time."""
    chance = random.Random(lines)
    customers = ("Ada", "Barbara", "Edsger", "Grace", "Leslie", "Lynn", "Margaret", "Tony")
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(
            (chance.choice(customers), chance.randrange(100, 100_000)) for _ in range(lines)
        )


def read_file(path: str | Path, start: int = 0) -> Iterator[Order]:
    """The orders after line ``start``."""
    with Path(path).open(newline="") as file:
        for line, (customer, cents) in enumerate(islice(csv.reader(file), start, None), start + 1):
            yield line, customer, int(cents)


def read_table() -> list[Order]:
    """The orders that were imported."""
    table = imported.c
    with engine().connect() as connection:
        rows = connection.execute(select(table.line, table.customer, table.cents))
        return [(row.line, row.customer, row.cents) for row in rows]
