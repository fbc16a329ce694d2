"""A pytest plugin with the strict SQS as fixtures; installed with the package.

- `strict_sqs`: a `StrictSQS` without queues, calls or faults, its clock at real time. Ask for
  another mode than `error` with `@pytest.mark.strict_sqs(mode="silent")`.
- `strict_sqs_in_every_mode`: the same, and the test runs once in each mode. Code that is right
  passes in all of them.
- `strict_sqs_server`: the server of the whole session behind both, not reset between tests.

moto is imported when the first of them is used; until then the plugin costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from celery_lease.testing.sqs import StrictSQS

# `celery_lease.testing.sqs.MODES`, which cannot be imported without moto.
_MODES = ("error", "silent", "rehide")


def pytest_configure(config: pytest.Config) -> None:
    """Make the marker known, for `--strict-markers`."""
    config.addinivalue_line(
        "markers",
        "strict_sqs(mode): what the `strict_sqs` fixture does with an old receipt handle, "
        '"error" (the default), "silent" or "rehide"',
    )


@pytest.fixture(scope="session")
def strict_sqs_server() -> Iterator[StrictSQS]:
    """One strict SQS for all tests of a run; prefer `strict_sqs`, clean for each test."""
    try:
        from celery_lease.testing.sqs import StrictSQS
    except ModuleNotFoundError as error:
        pytest.fail(
            f"the strict SQS needs celery-lease[testing]: {error.name} is not installed",
            pytrace=False,
        )
    with StrictSQS() as server:
        yield server


@pytest.fixture
def strict_sqs(request: pytest.FixtureRequest, strict_sqs_server: StrictSQS) -> Iterator[StrictSQS]:
    """A clean strict SQS in the mode of the `strict_sqs` marker."""
    marker = request.node.get_closest_marker("strict_sqs")
    strict_sqs_server.reset()
    if marker is not None:
        strict_sqs_server.mode = marker.kwargs["mode"]
    yield strict_sqs_server
    strict_sqs_server.reset()


@pytest.fixture(params=_MODES)
def strict_sqs_in_every_mode(
    request: pytest.FixtureRequest, strict_sqs_server: StrictSQS
) -> Iterator[StrictSQS]:
    """A clean strict SQS, in each mode in turn."""
    strict_sqs_server.reset()
    strict_sqs_server.mode = request.param
    yield strict_sqs_server
    strict_sqs_server.reset()
