"""Clients of our own, made like kombu's, for calls that a heartbeat makes.

A heartbeat must not wait for a network as patiently as kombu does, and it goes on while kombu
receives nothing: kombu refreshes the credentials of an assumed role only when it asks for
messages. So ours refresh themselves.
"""

from __future__ import annotations

import threading
from datetime import UTC, datetime
from typing import Any

__all__ = ["Clients"]

_DEFAULT_SESSION_SECONDS = 900


class Clients:
    """One client for each queue with credentials of its own, one for all others.

    Safe to use from several threads. ``timeout`` bounds each call, in seconds.
    """

    def __init__(self, *, timeout: float) -> None:
        self._timeout = timeout
        self._clients: dict[tuple[Any, ...], Any] = {}
        self._roles: dict[tuple[str, int], Any] = {}
        self._lock = threading.Lock()

    def of(self, channel: Any, url: str, name: str | None) -> Any:
        """The client for a queue, whose credentials stay valid however long it is used."""
        queue = _predefined(channel, url, name)
        original = channel.sqs(queue=queue)
        key = (
            queue,
            original.meta.endpoint_url,
            original.meta.region_name,
            channel.conninfo.userid,
        )
        with self._lock:
            client = self._clients.get(key)
            if client is None:
                client = self._clients[key] = self._copy(
                    original, self._credentials(channel, queue, original)
                )
        return client

    def _credentials(self, channel: Any, queue: str | None, original: Any) -> Any:
        options = channel.transport_options
        role = options.get("sts_role_arn")
        if not role or queue is None:  # kombu assumes the role for predefined queues only
            return original._request_signer._credentials  # noqa: SLF001 - it keeps them nowhere else
        seconds = int(options.get("sts_token_timeout") or _DEFAULT_SESSION_SECONDS)
        known = self._roles.get((role, seconds))
        if known is None:
            known = self._assumed(role, seconds, original.meta.region_name)
            self._roles[role, seconds] = known
        return known

    def _assumed(self, role: str, seconds: int, region: str) -> Any:
        """Credentials of the role, new ones in the last quarter of their time."""
        from botocore.credentials import DeferredRefreshableCredentials  # noqa: PLC0415 - as below
        from botocore.session import get_session  # noqa: PLC0415

        session = get_session()  # not boto3's default one, which is not safe in two threads
        region = session.get_config_variable("region") or region
        sts = session.create_client("sts", region_name=region, config=self._config())

        def assume() -> dict[str, str]:
            answer = sts.assume_role(
                RoleArn=role, RoleSessionName="Celery", DurationSeconds=seconds
            )["Credentials"]
            left = (answer["Expiration"] - datetime.now(UTC)).total_seconds()
            # botocore's own limits, ten and fifteen minutes, are as long as a whole session.
            credentials._advisory_refresh_timeout = left / 4  # noqa: SLF001
            credentials._mandatory_refresh_timeout = 0  # noqa: SLF001
            return {
                "access_key": answer["AccessKeyId"],
                "secret_key": answer["SecretAccessKey"],
                "token": answer["SessionToken"],
                "expiry_time": answer["Expiration"].isoformat(),
            }

        credentials = DeferredRefreshableCredentials(assume, "sts-assume-role")
        return credentials

    def _copy(self, original: Any, credentials: Any) -> Any:
        from botocore.session import get_session  # noqa: PLC0415 - loaded when SQS is used

        session = get_session()
        session._credentials = credentials  # noqa: SLF001 - its parameters take plain keys only
        return session.create_client(
            "sqs",
            region_name=original.meta.region_name,
            endpoint_url=original.meta.endpoint_url,
            config=original.meta.config.merge(self._config()),
        )

    def _config(self) -> Any:
        from botocore.client import Config  # noqa: PLC0415 - loaded when SQS is used

        return Config(
            connect_timeout=min(2.0, self._timeout),
            read_timeout=self._timeout,
            retries={"total_max_attempts": 1},
        )


def _predefined(channel: Any, url: str, name: str | None) -> str | None:
    """The queue's name in ``predefined_queues``; None if kombu has one client for all.

    By its URL: a message's routing key need not be the name of its queue.
    """
    if not channel.predefined_queues:
        return None
    for queue, options in channel.predefined_queues.items():
        if options.get("url") == url:
            return str(queue)
    return str(channel.canonical_queue_name(name)) if name else None
