"""`python -m celery_lease.testing.sqs`: the strict SQS as a process of its own."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from collections.abc import Sequence

from celery_lease.testing.sqs import MODES, StrictSQS


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT; the one line on stdout says that it is ready, and where."""
    parser = argparse.ArgumentParser(prog="python -m celery_lease.testing.sqs", description=__doc__)
    parser.add_argument("--port", type=int, default=0, help="0, the default, takes a free one")
    parser.add_argument(
        "--mode",
        choices=MODES,
        default="error",
        help="what happens with an expired or superseded receipt handle",
    )
    options = parser.parse_args(arguments)
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    with StrictSQS(port=options.port, mode=options.mode) as sqs:
        print(f"strict SQS ready at {sqs.url}", flush=True)
        ended.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
