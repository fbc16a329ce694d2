"""One request from its arrival to its answer: faults, action, record."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, cast
from urllib.parse import unquote, urlsplit

from moto.core.request import Request

from celery_lease.testing.sqs.account import ACCOUNT_ID, REGION, Account
from celery_lease.testing.sqs.actions import DENIED_MESSAGE, StrictResponse
from celery_lease.testing.sqs.backend import StrictBackend
from celery_lease.testing.sqs.calls import Call
from celery_lease.testing.sqs.limits import Refusal
from celery_lease.testing.sqs.sts import Signer, parameters_of
from celery_lease.testing.sqs.wire import Answer

logger = logging.getLogger(__name__)

_FORM: Final = "application/x-www-form-urlencoded"


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """What the listener read from the connection."""

    method: str
    url: str
    headers: Mapping[str, str]
    body: bytes
    #: Whether the client is still connected; asked before a message is handed to a long poll.
    connected: Callable[[], bool]


class Service:
    """Answers requests on one account. One at a time, but waiting ones let others go on."""

    def __init__(self, account: Account) -> None:
        self._account = account

    def answer(self, request: HttpRequest) -> Answer | None:
        """The answer, or None to close the connection without one."""
        response = StrictResponse(_moto_request(request))
        signer = Signer.of(request.headers, request.url)
        try:
            return self._answer(request, response, signer)
        except Exception as error:  # noqa: BLE001 answered, as a server does
            return _broken(response, error)

    def _answer(
        self, request: HttpRequest, response: StrictResponse, signer: Signer
    ) -> Answer | None:
        try:
            action, queue, parameters = _read(request, response, signer)
        except Refusal as refusal:
            return response.refuse(refusal.code, refusal.message)
        with self._account.changed:
            place = self._account.calls.arrive(action)
            at = self._account.clock.now()
            try:
                answer = self._carry_out(request, response, action, queue, signer)
            except Exception as error:  # noqa: BLE001 answered, and recorded like any call
                answer = _broken(response, error)
            call = Call(
                action=action,
                queue=queue,
                parameters=parameters,
                at=at,
                status=answer.status if answer else 0,
                error=response.error if answer else "ConnectionDropped",
                entry_errors=response.entry_errors,
                access_key=signer.access_key,
            )
            self._account.calls.finish(place, call)
        return answer

    def _carry_out(
        self,
        request: HttpRequest,
        response: StrictResponse,
        action: str,
        queue: str | None,
        signer: Signer,
    ) -> Answer | None:
        plan = self._account.faults.plan(action)
        if plan.delay:
            self._account.changed.wait_for(lambda: self._account.closing, timeout=plan.delay)
        if self._account.closing:
            return None
        try:
            self._account.sessions.check(signer, self._account.clock.now())
        except Refusal as refusal:
            return response.refuse(refusal.code, refusal.message, status=403)
        if plan.denied:
            return _deny(response, action, queue)
        if plan.failure is not None:
            fault = plan.failure
            return response.refuse(fault.code, fault.message, status=fault.status)
        if plan.drop_before:
            return None
        if action == "AssumeRole":
            return self._assume_role(request, response)
        backend = StrictBackend(self._account, ignoring=plan.ignored, connected=request.connected)
        answer = response.act(backend)
        return None if plan.drop_after else answer

    def _assume_role(self, request: HttpRequest, response: StrictResponse) -> Answer:
        now, shortened = self._account.clock.now(), self._account.faults.session_seconds
        try:
            return self._account.sessions.begin(request.body, now, ends_after=shortened)
        except Refusal as refusal:
            return response.refuse(refusal.code, refusal.message)


def _read(
    request: HttpRequest, response: StrictResponse, signer: Signer
) -> tuple[str, str | None, dict[str, Any]]:
    """The action, the queue's name and the parameters, or a `Refusal`."""
    if signer.service != "sts":
        return response.read()
    parameters = parameters_of(request.body)
    if parameters.get("Action") != "AssumeRole":
        raise Refusal("InvalidAction", "Of STS there is only AssumeRole here.")
    return "AssumeRole", None, parameters


def _broken(response: StrictResponse, error: Exception) -> Answer:
    """A mistake of this server is logged, and looks like no rule of AWS."""
    logger.error("request failed", exc_info=error)
    return response.refuse("InternalFailure", "The strict SQS failed.", status=500)


def _deny(response: StrictResponse, action: str, queue: str | None) -> Answer:
    service = "sts" if action == "AssumeRole" else "sqs"
    permission = f"{service}:{action.removesuffix('Batch').lower()}"
    arn = f"arn:aws:{service}:{REGION}:{ACCOUNT_ID}:{queue or '*'}"
    message = DENIED_MESSAGE.format(action=permission, resource=arn)
    return response.refuse("AccessDenied", message, status=403)


def _moto_request(request: HttpRequest) -> Request:
    headers: dict[str, Any] = dict(request.headers)
    names = {name.lower() for name in headers}
    if "x-amz-target" not in names and "content-type" not in names:
        # A query request by GET: moto takes the protocol from this header.
        headers["Content-Type"] = _FORM
    parts = urlsplit(request.url)
    built = Request.from_values(
        method=request.method,
        base_url=f"{parts.scheme}://{parts.netloc}",
        path=unquote(parts.path),
        query_string=parts.query,
        data=request.body,
        headers=headers,
    )
    return cast("Request", built)  # werkzeug types it as its own class
