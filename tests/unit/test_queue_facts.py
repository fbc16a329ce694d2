"""What is known of a queue, and which of it does not fit the settings."""

from __future__ import annotations

import json

import pytest

from celery_lease.visibility.facts import QueueFacts, shortcomings

URL = "https://sqs.eu-west-1.amazonaws.com/1/jobs"
REDRIVE = json.dumps({"deadLetterTargetArn": "arn:aws:sqs:eu-west-1:1:dead", "maxReceiveCount": 3})
PLAIN = {"VisibilityTimeout": "30", "MessageRetentionPeriod": "345600"}


def said(attributes: dict[str, str], asked: float | None = None) -> list[str]:
    facts = QueueFacts.of(URL, PLAIN | attributes)
    return list(shortcomings("jobs", facts, asked=asked, retrigger_after=900))


def test_facts_are_what_the_queue_has() -> None:
    assert QueueFacts.of(URL, PLAIN) == QueueFacts(30.0, False, None, 345600.0, False)
    facts = QueueFacts.of(f"{URL}.fifo", PLAIN | {"RedrivePolicy": REDRIVE, "FifoQueue": "true"})
    assert facts == QueueFacts(30.0, True, 3, 345600.0, True)


@pytest.mark.parametrize("count", ["3", 3])
def test_aws_writes_the_receive_count_in_two_ways(count: object) -> None:
    policy = json.dumps({"deadLetterTargetArn": "arn", "maxReceiveCount": count})
    assert QueueFacts.of(URL, PLAIN | {"RedrivePolicy": policy}).max_receives == 3


def test_without_the_permission_only_the_name_speaks() -> None:
    unknown = QueueFacts.unknown(f"{URL}.fifo")
    assert (unknown.dead_letters, unknown.max_receives, unknown.fifo) == (None, None, True)
    assert unknown.visibility_timeout == 30


def test_a_queue_that_fits_is_not_spoken_of() -> None:
    policy = json.dumps({"deadLetterTargetArn": "arn", "maxReceiveCount": 5})
    assert said({"RedrivePolicy": policy}, asked=30) == []


@pytest.mark.parametrize(
    ("attributes", "numbers"),
    [
        ({"VisibilityTimeout": "40"}, ("40 s", "visibility_timeout = 30 s")),
        ({"RedrivePolicy": REDRIVE}, ("maxReceiveCount = 3", "put off 3 times")),
        ({"MessageRetentionPeriod": "600"}, ("600 s", "lease_retrigger_after = 900 s")),
        (
            {"MessageRetentionPeriod": "3600", "VisibilityTimeout": "7200"},
            ("3600 s", "VisibilityTimeout = 7200 s"),
        ),
    ],
)
def test_what_does_not_fit_is_said_with_both_numbers(
    attributes: dict[str, str], numbers: tuple[str, str]
) -> None:
    *_, text = said(attributes, asked=30)
    assert all(number in text for number in numbers)


def test_a_queue_that_hides_for_too_short_is_said() -> None:
    (text,) = said({"VisibilityTimeout": "2"})
    assert "only 2 s" in text
