"""STS as far as assumed roles need it: sessions that begin, and that end by the server's clock.

A client finds it by `AWS_ENDPOINT_URL_STS`. Calls signed with a session's keys are refused with
`ExpiredToken` after its time, as AWS does; keys that are no session's are never looked at.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final
from urllib.parse import parse_qs, unquote
from xml.sax.saxutils import escape

from celery_lease.testing.sqs.limits import Refusal
from celery_lease.testing.sqs.wire import Answer

_SHORTEST, _LONGEST = 900, 43_200
_CREDENTIAL: Final = re.compile(r"Credential=([^/,\s&]+)/\d+/[^/]+/([a-z]+)/aws4_request")
#: AWS begins the key of every session with these letters, and no other key.
_SESSION_KEY: Final = "ASIA"


@dataclass(frozen=True, slots=True)
class Signer:
    """Who has signed a request, and for which service."""

    access_key: str = ""
    service: str = "sqs"

    @classmethod
    def of(cls, headers: Mapping[str, str], url: str) -> Signer:
        """Read from the header, or from the query of a presigned request."""
        lower = {name.lower(): value for name, value in headers.items()}
        found = _CREDENTIAL.search(lower.get("authorization", "")) or _CREDENTIAL.search(
            unquote(url)
        )
        return cls(*found.groups()) if found else cls()


@dataclass(slots=True)
class Sessions:
    """The sessions of assumed roles. Guarded by the server's condition."""

    _ends: dict[str, float] = field(default_factory=dict)

    def begin(self, body: bytes, now: float, *, ends_after: float | None) -> Answer:
        """Answer `AssumeRole`; `ends_after` is a fault, the session is shorter than asked for."""
        asked = parameters_of(body)
        seconds = int(asked.get("DurationSeconds", 3600))
        if not _SHORTEST <= seconds <= _LONGEST:
            raise Refusal(
                "ValidationError",
                f"DurationSeconds must be between {_SHORTEST} and {_LONGEST}, not {seconds}.",
            )
        key = f"{_SESSION_KEY}{uuid.uuid4().hex[:16].upper()}"
        end = self._ends[key] = now + (seconds if ends_after is None else ends_after)
        return _granted(asked.get("RoleArn", ""), key, end)

    def check(self, signer: Signer, now: float) -> None:
        """Refuse a call with the keys of a session that is over."""
        if signer.access_key.startswith(_SESSION_KEY) and now >= self._ends.get(
            signer.access_key, 0.0
        ):
            raise Refusal("ExpiredToken", "The security token included in the request is expired")

    def clear(self) -> None:
        """End every session."""
        self._ends.clear()


def parameters_of(body: bytes) -> dict[str, Any]:
    """The parameters of a query request."""
    return {name: values[0] for name, values in parse_qs(body.decode()).items()}


def _granted(role: str, key: str, end: float) -> Answer:
    expiration = datetime.fromtimestamp(end, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    assumed = escape(role.replace(":iam:", ":sts:").replace(":role/", ":assumed-role/"))
    return Answer(
        200,
        (
            '<AssumeRoleResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/">'
            "<AssumeRoleResult><Credentials>"
            f"<AccessKeyId>{key}</AccessKeyId>"
            f"<SecretAccessKey>{uuid.uuid4().hex}</SecretAccessKey>"
            f"<SessionToken>{uuid.uuid4().hex}</SessionToken>"
            f"<Expiration>{expiration}</Expiration></Credentials>"
            f"<AssumedRoleUser><Arn>{assumed}/Celery</Arn>"
            "<AssumedRoleId>AROASTRICT:Celery</AssumedRoleId></AssumedRoleUser>"
            "</AssumeRoleResult><ResponseMetadata>"
            f"<RequestId>{uuid.uuid4()}</RequestId></ResponseMetadata></AssumeRoleResponse>"
        ).encode(),
        {"Content-Type": "text/xml"},
    )
