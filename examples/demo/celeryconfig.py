"""An ordinary Celery configuration; the last three lines are about leases.

Celery reads it at the first use of the app: then the environment says where broker and files are.
"""

from __future__ import annotations

import os

from examples.demo import orders

broker_url = os.environ["DEMO_BROKER"]
broker_transport_options = {
    "region": "us-east-1",
    "visibility_timeout": 10,
    "wait_time_seconds": 1,
    "polling_interval": 0.1,
}
result_backend = f"db+sqlite:///{orders.folder() / 'results.sqlite3'}"
task_track_started = True
worker_prefetch_multiplier = 1

lease_store_url = orders.database_url()
lease_reap_interval = 1
lease_statement_timeout = 2
