"""Every error of the library, in one tree.

::

    LeaseError(Exception)                  something a caller may handle
      x  StoreUnavailable                  the database did not answer
      x  StoreBusy                         the database answered "later"
      x  SchemaMissing                     the tables are not there
      x  InvalidSetting                    a setting or policy that cannot work
      x  RunNotFound
      x  IllegalTransition                 the transition table does not know it
      x  DuplicateName                     one stage name used twice in one execution
      x  NotSerializable                   a value the configured serializer refuses
      x  AttemptsExhausted                 the outcome of a run that crashed too often
    LeaseControl(BaseException)            control flow, never caught by ``except Exception``
      x  LeaseLost                         this holder may not write any more
      x  HandOff                           the run goes on with a new message

The first line of a class's docstring is its default message.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "AttemptsExhausted",
    "DuplicateName",
    "HandOff",
    "IllegalTransition",
    "InvalidSetting",
    "LeaseControl",
    "LeaseError",
    "LeaseLost",
    "NotSerializable",
    "RunNotFound",
    "SchemaMissing",
    "StoreBusy",
    "StoreUnavailable",
]


def _default_message(cls: type) -> str:
    return (cls.__doc__ or cls.__name__).strip().splitlines()[0]


class LeaseError(Exception):
    """Base class of the library's errors."""

    def __init__(self, message: str | None = None) -> None:
        super().__init__(message if message is not None else _default_message(type(self)))


class StoreUnavailable(LeaseError):
    """The lease store cannot be reached, or did not answer within its time-out."""


class StoreBusy(LeaseError):
    """The lease store is reachable, but the row or file stayed locked."""


class SchemaMissing(LeaseError):
    """The tables of the lease store are missing: run `celery -A yourapp lease init-db`."""


class InvalidSetting(LeaseError):
    """A setting, or two settings together, cannot work."""


class RunNotFound(LeaseError):
    """There is no run with this id in the lease store."""


class IllegalTransition(LeaseError):
    """The run is in a state in which this cannot be done."""


class DuplicateName(LeaseError):
    """A stage name was used twice in one execution; tell rounds apart by a tuple."""


class NotSerializable(LeaseError):
    """The value cannot be encoded by the configured serializer."""


class AttemptsExhausted(LeaseError):
    """The run was interrupted too often without progress and is not tried again."""


class LeaseControl(BaseException):
    """Base class of control flow; it never leaves a leased task."""


class LeaseLost(LeaseControl):
    """This holder lost its lease; nothing it writes is accepted any more.

    ``reason`` is one of ``reclaimed`` (another delivery may run the run), ``revoked``
    (an operator ended it), ``stalled`` (no progress for too long) and ``unreachable``
    (the store could not be asked, so that nothing is known).
    """

    def __init__(self, reason: str = "reclaimed", run_id: str = "", epoch: int = 0) -> None:
        super().__init__(reason, run_id, epoch)
        self.reason = reason
        self.run_id = run_id
        self.epoch = epoch

    def __str__(self) -> str:
        return f"lease of run {self.run_id} at epoch {self.epoch} lost: {self.reason}"


class HandOff(LeaseControl):
    """The run was handed off: it goes on from its checkpoint with a new message."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args or (_default_message(type(self)),))
