"""What `import celery_lease` costs, and what it offers."""

from __future__ import annotations

import subprocess
import sys

import celery_lease

HEAVY = ("boto3", "botocore", "moto", "psycopg", "pytest", "rich")


def test_importing_the_library_loads_no_broker_driver_or_test_help() -> None:
    script = f"import celery_lease, sys; print([m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_every_public_name_is_there() -> None:
    for name in celery_lease.__all__:
        assert getattr(celery_lease, name).__doc__


def test_tasks_can_be_leased_without_the_client_of_a_result_backend() -> None:
    script = (
        "import sys; sys.modules['redis'] = None; "
        "from celery_lease import LeasedTask; print(LeasedTask.__name__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "LeasedTask"
