"""What SQS's errors mean here: a missing permission, a message that is gone, or trouble."""

from __future__ import annotations

from typing import Final

__all__ = ["DENIED", "FINAL_CODES", "code_of", "is_denied"]

#: How ``Gone`` and the log name a permission that is missing.
DENIED: Final = "denied"
_DENIED_CODES: Final = {"AccessDenied", "AccessDeniedException", "403"}
#: Asking again about the same receive makes no sense.
FINAL_CODES: Final = {
    "InvalidParameterValue",
    "InvalidParameterValueException",
    "InvalidParameterCombination",
    "MessageNotInflight",
    "AWS.SimpleQueueService.MessageNotInflight",
    "ReceiptHandleIsInvalid",
    "AWS.SimpleQueueService.NonExistentQueue",
    "QueueDoesNotExist",
}


def code_of(exc: BaseException) -> str | None:
    """AWS's code of a botocore error; None if AWS did not answer."""
    response = getattr(exc, "response", None)
    if not isinstance(response, dict):
        return None
    code = response.get("Error", {}).get("Code")
    return None if code is None else str(code)


def is_denied(exc: BaseException) -> bool:
    """Whether a permission is missing; kombu has an exception of its own for deletes."""
    return code_of(exc) in _DENIED_CODES or type(exc).__name__ == "AccessDeniedQueueException"
