"""The strict SQS's sessions of assumed roles; docstrings name the page of AWS behind a check."""

from __future__ import annotations

from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError

from celery_lease.testing.sqs import StrictSQS

ROLE = "arn:aws:iam::123456789012:role/shop"


@pytest.fixture
def url(strict_sqs: StrictSQS) -> str:
    return strict_sqs.create_queue("jobs", VisibilityTimeout=30)


def client(sqs: StrictSQS, service: str, key: str = "user", token: str | None = None) -> Any:
    return boto3.session.Session().client(
        service,
        endpoint_url=sqs.url,
        region_name="us-east-1",
        aws_access_key_id=key,
        aws_secret_access_key="secret",
        aws_session_token=token,
    )


def assumed(sqs: StrictSQS, seconds: int = 900) -> dict[str, Any]:
    answer = client(sqs, "sts").assume_role(
        RoleArn=ROLE, RoleSessionName="Celery", DurationSeconds=seconds
    )
    return dict(answer["Credentials"])


def refusal(call: Any) -> str:
    with pytest.raises(ClientError) as caught:
        call()
    return str(caught.value.response["Error"]["Code"])


def test_a_session_opens_the_queues_until_it_ends(strict_sqs: StrictSQS, url: str) -> None:
    """IAM guide, "Request temporary security credentials": calls fail after the expiration."""
    session = assumed(strict_sqs)
    left = session["Expiration"].timestamp() - strict_sqs.clock.now()
    assert left == pytest.approx(900, abs=5)
    mine = client(strict_sqs, "sqs", session["AccessKeyId"], session["SessionToken"])
    mine.send_message(QueueUrl=url, MessageBody="m")
    assert strict_sqs.calls_of("SendMessage")[0].access_key == session["AccessKeyId"]
    strict_sqs.clock.advance(901)
    assert refusal(lambda: mine.send_message(QueueUrl=url, MessageBody="m")) == "ExpiredToken"
    client(strict_sqs, "sqs").send_message(QueueUrl=url, MessageBody="m")
    assert len(strict_sqs.messages("jobs")) == 2


@pytest.mark.parametrize("seconds", [899, 43_201])
def test_a_session_lasts_a_quarter_of_an_hour_to_twelve_hours(
    strict_sqs: StrictSQS, seconds: int
) -> None:
    """STS API, "AssumeRole": DurationSeconds from 900 seconds to 12 hours."""
    # boto3 refuses less than 900 by itself.
    sts = client(strict_sqs, "sts")
    sts.meta.events.register(
        "before-call.sts.AssumeRole",
        lambda params, **_: params["body"].update(DurationSeconds=seconds),
    )
    call = lambda: sts.assume_role(RoleArn=ROLE, RoleSessionName="Celery")  # noqa: E731
    assert refusal(call) == "ValidationError"


def test_a_test_may_shorten_sessions_and_deny_them(strict_sqs: StrictSQS, url: str) -> None:
    strict_sqs.faults.shorten_sessions(5)
    session = assumed(strict_sqs)
    mine = client(strict_sqs, "sqs", session["AccessKeyId"], session["SessionToken"])
    mine.send_message(QueueUrl=url, MessageBody="m")
    strict_sqs.clock.advance(6)
    assert refusal(lambda: mine.send_message(QueueUrl=url, MessageBody="m")) == "ExpiredToken"
    strict_sqs.faults.deny("AssumeRole")
    assert refusal(lambda: assumed(strict_sqs)) == "AccessDenied"
    assert [call.error for call in strict_sqs.calls_of("AssumeRole")] == [None, "AccessDenied"]


def test_of_sts_there_is_nothing_else(strict_sqs: StrictSQS) -> None:
    assert refusal(client(strict_sqs, "sts").get_caller_identity) == "InvalidAction"
