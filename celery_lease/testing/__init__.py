"""Test help for projects that use `celery_lease`: a strict local SQS, stores and clocks.

Importing this package costs nothing: moto, boto3 and pytest are imported by the module that
needs them, when it is used.

- `celery_lease.testing.sqs.StrictSQS`: SQS over HTTP on loopback, with AWS's rules enforced.
- `celery_lease.testing.stores.fresh_store`: a lease store of a test's own.
- `celery_lease.testing.clock.advance_database_clock`: time passes for what is stored.
- `celery_lease.testing.plugin`: the strict SQS as pytest fixtures (`strict_sqs`).
"""

from __future__ import annotations
