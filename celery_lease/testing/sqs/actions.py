"""moto's SQS actions on the strict backend: one object for one request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from botocore.model import OperationNotFoundError
from moto.core.exceptions import ServiceException
from moto.core.request import Request
from moto.core.responses import ActionResult
from moto.sqs.responses import SQSResponse

from celery_lease.testing.sqs.backend import StrictBackend
from celery_lease.testing.sqs.limits import Refusal
from celery_lease.testing.sqs.wire import Answer, error_answer, short_code

DENIED_MESSAGE = (
    "User: arn:aws:iam::123456789012:user/strict is not authorized to perform: {action} "
    "on resource: {resource} because no identity-based policy allows the {action} action"
)


class StrictResponse(SQSResponse):
    """Reads one request, does its action, and remembers which error it was answered with."""

    def __init__(self, request: Request) -> None:
        super().__init__()
        self.error: str | None = None
        self.entry_errors: tuple[str, ...] = ()
        self.json_protocol = "X-Amz-Target" in request.headers
        self._request = request
        self._strict_backend: StrictBackend | None = None

    def read(self) -> tuple[str, str | None, dict[str, Any]]:
        """The action, the queue's name and the parameters, or a `Refusal`."""
        try:
            self.setup_class(self._request, self._request.url, self._request.headers)
            action = self._get_action()
            if not action:
                raise Refusal("MissingAction", "The request must contain an action.")
            parameters = _plain(self.params)
        except OperationNotFoundError as error:
            raise Refusal("InvalidAction", "The action is not valid for this endpoint.") from error
        except (ValueError, UnicodeDecodeError) as error:
            raise Refusal("SerializationException", f"The request is malformed: {error}") from error
        queue = parameters.get("QueueUrl") or parameters.get("QueueName")
        if queue is None and self.path.strip("/"):
            queue = self.path
        return action, (str(queue).rsplit("/", 1)[-1] if queue else None), parameters

    def act(self, backend: StrictBackend) -> Answer:
        """Do the action; every error that AWS knows becomes an answer."""
        self._strict_backend = backend
        try:
            status, headers, body = self.call_action()
        except Refusal as refusal:
            return self.refuse(refusal.code, refusal.message)
        except NotImplementedError:
            return self.refuse("UnsupportedOperation", "The strict SQS does not do this.")
        encoded = body.encode() if isinstance(body, str) else bytes(body)
        return Answer(int(status), encoded, {name: str(headers[name]) for name in headers})

    def refuse(self, code: str, message: str, *, status: int = 400) -> Answer:
        """Answer with an error."""
        self.error = short_code(code)
        return error_answer(code, message, json_protocol=self.json_protocol, status=status)

    @property
    def sqs_backend(self) -> StrictBackend:
        assert self._strict_backend is not None  # set by `act`
        return self._strict_backend

    def _authenticate_and_authorize_normal_action(self, resource: str = "*") -> None:
        """Any credentials do; `faults.deny` is how a permission is taken away."""

    def serialized(self, action_result: ActionResult) -> Any:
        error = action_result.result
        if not isinstance(error, ServiceException):
            return super().serialized(action_result)
        answer = self.refuse(error.code, error.message)
        return answer.status, dict(answer.headers), answer.body.decode()

    # moto checks these requests less than AWS does, or answers them as a whole.

    def change_message_visibility(self) -> ActionResult:
        timeout = self._get_param("VisibilityTimeout")
        if timeout is None:
            raise Refusal(
                "MissingParameter", "The request must contain the parameter VisibilityTimeout."
            )
        self.sqs_backend.change_message_visibility(
            self._get_queue_name(), str(self._get_param("ReceiptHandle")), int(timeout)
        )
        return ActionResult(None)

    def change_message_visibility_batch(self) -> ActionResult:
        done, failed = self.sqs_backend.change_message_visibility_batch(
            self._get_queue_name(), self._get_param("Entries", [])
        )
        return self._batch_result([{"Id": entry_id} for entry_id in done], failed)

    def delete_message_batch(self) -> ActionResult:
        done, failed = self.sqs_backend.delete_message_batch(
            self._get_queue_name(), self._get_param("Entries", [])
        )
        return self._batch_result([{"Id": entry_id} for entry_id in done], failed)

    def send_message_batch(self) -> ActionResult:
        entries = self._get_param("Entries", [])
        sent, failed = self.sqs_backend.send_message_batch(
            self._get_queue_name(), {str(place): entry for place, entry in enumerate(entries)}
        )
        return self._batch_result([_sent_entry(message) for message in sent], failed)

    def _batch_result(
        self, done: list[dict[str, Any]], failed: list[dict[str, Any]]
    ) -> ActionResult:
        self.entry_errors = tuple(short_code(entry["Code"]) for entry in failed)
        return ActionResult({"Successful": done, "Failed": failed})


def _sent_entry(message: Any) -> dict[str, Any]:
    entry = {
        "Id": message.user_id,
        "MessageId": message.id,
        "MD5OfMessageBody": message.body_md5,
    }
    if message.message_attributes:
        entry["MD5OfMessageAttributes"] = message.attribute_md5
    if message.sequence_number:
        entry["SequenceNumber"] = message.sequence_number
    return entry


def _plain(value: Any) -> Any:
    """A copy of moto's parsed parameters as ordinary dicts and lists."""
    if isinstance(value, Mapping):
        return {key: _plain(value[key]) for key in value}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value
