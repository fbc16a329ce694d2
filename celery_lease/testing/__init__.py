"""Test help for projects that use `celery_lease`: a strict local SQS and a pytest plugin.

Importing this package costs nothing: moto, boto3 and pytest are imported by the module that
needs them, when it is used.

- `celery_lease.testing.sqs.StrictSQS`: SQS over HTTP on loopback, with AWS's rules enforced.
- `celery_lease.testing.plugin`: the same as pytest fixtures (`strict_sqs`).
"""

from __future__ import annotations
