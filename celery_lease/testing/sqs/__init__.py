"""A local SQS that enforces AWS's rules: moto's SQS over HTTP, made strict.

Use `StrictSQS` in a test, or run `python -m celery_lease.testing.sqs --port 9324` and point
`broker_url` or `AWS_ENDPOINT_URL_SQS` at it.
"""

from __future__ import annotations

from celery_lease.testing.sqs.calls import Call, MessageInfo
from celery_lease.testing.sqs.faults import Fault
from celery_lease.testing.sqs.rules import MODES, Mode
from celery_lease.testing.sqs.server import StrictSQS

__all__ = ["MODES", "Call", "Fault", "MessageInfo", "Mode", "StrictSQS"]
