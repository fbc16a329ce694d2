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
