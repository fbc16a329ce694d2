"""Envelope in, message out."""

from __future__ import annotations

import pytest

from celery_lease.errors import NotSerializable
from celery_lease.trigger import Envelope

EMBED = {"callbacks": [{"task": "after"}], "errbacks": None, "chain": None, "chord": None}


def _pack(**changes: object) -> Envelope:
    given: dict[str, object] = {
        "args": (1, "two"),
        "kwargs": {"three": 3},
        "embed": EMBED,
        "content_type": "application/json",
        "headers": {
            "id": "run-1",
            "task": "t",
            "eta": "2026-01-01T00:00:00",
            "expires": "2026-01-01T00:00:00",
            "lease_epoch": 4,
            "mine": "kept",
        },
        "properties": {"correlation_id": "run-1", "delivery_tag": "x", "priority": 0},
        "exchange": "",
        "routing_key": "celery",
    }
    return Envelope.pack(**{**given, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("content_type", ["application/json", "application/x-python-serialize"])
def test_an_envelope_survives_the_store(content_type: str) -> None:
    envelope = Envelope.load(_pack(content_type=content_type).dump())
    args, kwargs, embed = envelope.unpack()
    assert list(args) == [1, "two"]
    assert kwargs == {"three": 3}
    assert embed["callbacks"] == [{"task": "after"}]


def test_a_trigger_carries_the_epoch_and_neither_eta_nor_expires() -> None:
    message = _pack().message_for("run-1", 5, 0)
    assert message["headers"]["lease_epoch"] == 5
    assert message["headers"]["mine"] == "kept"
    assert not {"eta", "expires", "lease_run"} & set(message["headers"])
    assert message["routing_key"] == "celery"
    assert message["correlation_id"] == "run-1"
    assert "delivery_tag" not in message


def test_a_run_whose_id_is_not_the_tasks_is_named_in_a_header() -> None:
    assert _pack().message_for("other-run", 1, 0)["headers"]["lease_run"] == "other-run"


def test_each_sending_to_a_fifo_queue_has_a_deduplication_id_of_its_own() -> None:
    envelope = _pack(
        routing_key="orders.fifo", properties={"MessageGroupId": "customer-7", "priority": 0}
    )
    first, second = (envelope.message_for("run-1", 1, sending) for sending in (0, 1))
    assert first["MessageGroupId"] == second["MessageGroupId"] == "customer-7"
    assert first["MessageDeduplicationId"] != second["MessageDeduplicationId"]
    assert len(first["MessageDeduplicationId"]) <= 128


def test_arguments_that_cannot_be_encoded_are_refused() -> None:
    with pytest.raises(NotSerializable, match="arguments"):
        _pack(args=(object(),))
