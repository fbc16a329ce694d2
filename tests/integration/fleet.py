"""Workers of other kinds beside those of ``tests/workers.py``, and commands."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from tests.workers import ROOT, Shop, Worker

__all__ = ["TALLY", "command", "in_the_background", "produce", "start"]

TALLY = "tests.integration.apps.tally"
SHOP = "tests.integration.apps.shop"
#: ``celery``, where the library is not installed.
_WITHOUT = (
    "import sys; sys.modules['celery_lease'] = None; "
    "from celery.__main__ import main; sys.argv[0] = 'celery'; main()"
)


def start(
    shop: Shop, *names: str, app: str = TALLY, library: bool = True, **settings: Any
) -> list[Worker]:
    """Start workers of an app, with the library or without, and wait until they are ready."""
    launched = []
    for name in names:
        options = ["-c", "1", "-n", f"{name}@test", "-Q", "celery", "-l", "INFO"]
        quiet = ["--without-mingle", "--without-gossip", "--without-heartbeat"]
        program = ["-m", "celery"] if library else ["-c", _WITHOUT]
        launched.append(
            Worker(
                name,
                [sys.executable, *program, "-A", app, "worker", *options, *quiet],
                shop._environment(shop.store_url, "", settings),
                shop.folder / f"{name}.log",
            )
        )
    shop.workers += launched
    for worker in launched:
        shop.ready(worker)
    return launched


def command(shop: Shop, *arguments: str, app: str = SHOP, **settings: Any) -> str:
    """What ``celery -A app …`` prints; it must succeed."""
    done = subprocess.run(
        [sys.executable, "-m", "celery", "-A", app, *arguments],
        cwd=ROOT,
        env=_untied(shop, settings),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def in_the_background(shop: Shop, *arguments: str, app: str = SHOP, **settings: Any) -> Worker:
    """``celery -A app …`` as a process that ends with the test."""
    name = "-".join(arguments)
    process = Worker(
        name,
        [sys.executable, "-m", "celery", "-A", app, *arguments],
        shop._environment(shop.store_url, "", settings),
        shop.folder / f"{name}.log",
    )
    shop.workers.append(process)
    return process


def produce(shop: Shop, task: str, *args: Any) -> str:
    """Send a task from a process that cannot import the library; its id."""
    script = (
        "import sys; sys.modules['celery_lease'] = None; import json, celery; "
        "broker, task, args = json.loads(sys.argv[1]); "
        "print(celery.Celery('producer', broker=broker).send_task(task, args).id)"
    )
    given = json.dumps([shop.sqs.broker_url, task, args])
    done = subprocess.run(
        [sys.executable, "-c", script, given],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout.strip()


def _untied(shop: Shop, settings: dict[str, Any]) -> dict[str, str]:
    """A command that ends by itself reads no standard input."""
    environment = shop._environment(shop.store_url, "", settings)
    environment.pop("SHOP_TIED")
    return environment
