"""What SQS refuses by looking at the request alone, with AWS's codes and words."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

MAX_HIDDEN_SECONDS: Final = 43_200
MAX_DELAY_SECONDS: Final = 900
MAX_BATCH_ENTRIES: Final = 10
MAX_MESSAGE_BYTES: Final = 1_048_576

_ATTRIBUTE_RANGES: Final = {
    "DelaySeconds": (0, MAX_DELAY_SECONDS),
    "MessageRetentionPeriod": (60, 1_209_600),
    "ReceiveMessageWaitTimeSeconds": (0, 20),
    "VisibilityTimeout": (0, MAX_HIDDEN_SECONDS),
}
_ENTRY_ID: Final = re.compile(r"[A-Za-z0-9_-]{1,80}")
# The characters of XML 1.0; everything else is refused by SQS.
_FORBIDDEN: Final = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


class Refusal(Exception):
    """SQS refuses the request; `code` is AWS's name of the error, `message` its text."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message


def invalid_value(parameter: str, value: object, reason: str) -> Refusal:
    """The refusal AWS writes for a parameter with an impossible value."""
    return Refusal(
        "InvalidParameterValue",
        f"Value {value} for parameter {parameter} is invalid. Reason: {reason}",
    )


def check_visibility(seconds: int) -> None:
    """Refuse a visibility timeout that no message could have."""
    if not 0 <= seconds <= MAX_HIDDEN_SECONDS:
        raise invalid_value(
            "VisibilityTimeout",
            seconds,
            f"VisibilityTimeout must be an integer between 0 and {MAX_HIDDEN_SECONDS}.",
        )


def check_delay(seconds: int | None, *, fifo: bool) -> None:
    """Refuse a message's own delay: none at all on FIFO queues, else 15 minutes at most."""
    if not seconds:
        return
    if fifo:
        raise invalid_value(
            "DelaySeconds",
            seconds,
            "The request include parameter that is not valid for this queue type.",
        )
    if not 0 < seconds <= MAX_DELAY_SECONDS:
        raise invalid_value(
            "DelaySeconds", seconds, f"DelaySeconds must be >= 0 and <= {MAX_DELAY_SECONDS}."
        )


def check_deduplication(deduplication_id: str | None, *, fifo: bool) -> None:
    """Refuse a deduplication id on a standard queue, which would silently not deduplicate."""
    if deduplication_id is not None and not fifo:
        raise invalid_value(
            "MessageDeduplicationId",
            deduplication_id,
            "The request includes a parameter that is not valid for this queue type.",
        )


def check_body(body: str | None) -> None:
    """Refuse a missing or empty body, and characters that SQS does not carry."""
    if not body:
        raise Refusal("MissingParameter", "The request must contain the parameter MessageBody.")
    if _FORBIDDEN.search(body):
        raise Refusal(
            "InvalidMessageContents",
            "Invalid characters found. Valid unicode characters are "
            "#x9 | #xA | #xD | #x20 to #xD7FF | #xE000 to #xFFFD | #x10000 to #x10FFFF.",
        )


def message_size(body: str, attributes: Mapping[str, Mapping[str, Any]] | None) -> int:
    """Bytes that AWS counts: the body and the name, type and value of every attribute."""
    size = len(body.encode())
    for name, attribute in (attributes or {}).items():
        value = attribute.get("StringValue") or attribute.get("BinaryValue") or ""
        for part in (name, attribute.get("DataType") or "", value):
            size += len(part.encode() if isinstance(part, str) else bytes(part))
    return size


def check_size(size: int, *, limit: int = MAX_MESSAGE_BYTES) -> None:
    """Refuse a message that is larger than the queue allows."""
    if size > limit:
        raise Refusal(
            "InvalidParameterValue",
            "One or more parameters are invalid. "
            f"Reason: Message must be shorter than {limit} bytes.",
        )


def check_batch_size(size: int) -> None:
    """Refuse a batch whose messages together are larger than one message may be."""
    if size > MAX_MESSAGE_BYTES:
        raise Refusal(
            "BatchRequestTooLong",
            f"Batch requests cannot be longer than {MAX_MESSAGE_BYTES} bytes. "
            f"You have sent {size} bytes.",
        )


def check_batch(action: str, ids: Sequence[str]) -> None:
    """Refuse a whole batch: empty, more than ten entries, or ids that are unfit or repeated."""
    if not ids:
        raise Refusal(
            "EmptyBatchRequest",
            f"There should be at least one {action}RequestEntry in the request.",
        )
    if len(ids) > MAX_BATCH_ENTRIES:
        raise Refusal(
            "TooManyEntriesInBatchRequest",
            f"Maximum number of entries per request are {MAX_BATCH_ENTRIES}. "
            f"You have sent {len(ids)}.",
        )
    for entry_id, times in Counter(ids).items():
        if not _ENTRY_ID.fullmatch(entry_id):
            raise Refusal(
                "InvalidBatchEntryId",
                "A batch entry id can only contain alphanumeric characters, "
                "hyphens and underscores. It can be at most 80 letters long.",
            )
        if times > 1:
            raise Refusal("BatchEntryIdsNotDistinct", f"Id {entry_id} repeated.")


def check_queue_attributes(attributes: Mapping[str, Any]) -> None:
    """Refuse queue attributes outside the ranges of the CreateQueue page."""
    for name, (low, high) in _ATTRIBUTE_RANGES.items():
        if name not in attributes:
            continue
        try:
            fits = low <= int(attributes[name]) <= high
        except (TypeError, ValueError):
            fits = False
        if not fits:
            raise Refusal("InvalidAttributeValue", f"Invalid value for the parameter {name}.")
