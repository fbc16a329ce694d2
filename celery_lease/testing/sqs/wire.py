"""Errors as SQS writes them, in both of its protocols.

moto could write them too, but not every code, and it warns about those it does not know.
"""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass, field
from typing import Final
from xml.sax.saxutils import escape

JSON_TYPE: Final = "application/x-amz-json-1.0"
_PREFIX: Final = "AWS.SimpleQueueService."

# Names of error shapes and the older codes that the query protocol, and so boto3, shows.
_QUERY_CODES: Final = {
    name: _PREFIX + name
    for name in (
        "BatchEntryIdsNotDistinct",
        "BatchRequestTooLong",
        "EmptyBatchRequest",
        "InvalidBatchEntryId",
        "MessageNotInflight",
        "PurgeQueueInProgress",
        "QueueDeletedRecently",
        "TooManyEntriesInBatchRequest",
        "UnsupportedOperation",
    )
} | {
    "AccessDeniedException": "AccessDenied",
    "QueueDoesNotExist": _PREFIX + "NonExistentQueue",
    "QueueNameExists": "QueueAlreadyExists",
}
_SHAPES: Final = {code: name for name, code in _QUERY_CODES.items()}


@dataclass(frozen=True, slots=True)
class Answer:
    """An HTTP answer."""

    status: int
    body: bytes
    headers: dict[str, str] = field(default_factory=dict)


def short_code(code: str) -> str:
    """The code as boto3 shows it, without its prefix."""
    return _QUERY_CODES.get(code, code).removeprefix(_PREFIX)


def error_answer(code: str, message: str, *, json_protocol: bool, status: int = 400) -> Answer:
    """The answer for an error, whose code may be given in either of its forms."""
    shape = _SHAPES.get(code, code)
    query_code = _QUERY_CODES.get(shape, shape)
    fault = "Receiver" if status >= 500 else "Sender"
    request_id = str(uuid.uuid4())
    headers = {"x-amzn-RequestId": request_id}
    if json_protocol:
        kind = f"com.amazonaws.sqs#{shape}"
        body = json.dumps({"__type": kind, "message": message})
        headers |= {"Content-Type": JSON_TYPE, "x-amzn-query-error": f"{query_code};{fault}"}
    else:
        body = (
            '<?xml version="1.0"?>'
            '<ErrorResponse xmlns="http://queue.amazonaws.com/doc/2012-11-05/">'
            f"<Error><Type>{fault}</Type><Code>{escape(query_code)}</Code>"
            f"<Message>{escape(message)}</Message><Detail/></Error>"
            f"<RequestId>{request_id}</RequestId></ErrorResponse>"
        )
        headers["Content-Type"] = "text/xml"
    return Answer(status, body.encode(), headers)
