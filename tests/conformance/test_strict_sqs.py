"""The strict SQS keeps AWS's rules; each test's docstring names the page that states its rule.

"Guide" is the Amazon SQS Developer Guide, "API" the Amazon SQS API Reference.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from botocore.exceptions import ClientError

from celery_lease.testing.sqs import StrictSQS

TWELVE_HOURS = 43_200


class Queue:
    """One queue with the few calls these tests need."""

    def __init__(self, sqs: StrictSQS, name: str, **attributes: Any) -> None:
        self.sqs, self.name, self.client = sqs, name, sqs.client()
        self.url = sqs.create_queue(name, **attributes)

    def send(self, body: str = "m", **options: Any) -> str:
        answer = self.client.send_message(QueueUrl=self.url, MessageBody=body, **options)
        return str(answer["MessageId"])

    def receive(self, count: int = 1, **options: Any) -> list[dict[str, Any]]:
        answer = self.client.receive_message(
            QueueUrl=self.url, MaxNumberOfMessages=count, **options
        )
        return list(answer.get("Messages", []))

    def bodies(self, count: int = 10, **options: Any) -> list[str]:
        return [message["Body"] for message in self.receive(count, **options)]

    def handle(self, **options: Any) -> str:
        (message,) = self.receive(**options)
        return str(message["ReceiptHandle"])

    def hide(self, handle: str, seconds: int) -> None:
        self.client.change_message_visibility(
            QueueUrl=self.url, ReceiptHandle=handle, VisibilityTimeout=seconds
        )

    def delete(self, handle: str) -> None:
        self.client.delete_message(QueueUrl=self.url, ReceiptHandle=handle)

    def only(self) -> Any:
        (message,) = self.sqs.messages(self.name)
        return message


@contextmanager
def refused(code: str, text: str | None = None) -> Iterator[None]:
    with pytest.raises(ClientError, match=text) as caught:
        yield
    assert caught.value.response["Error"]["Code"] == code


@pytest.fixture
def queue(strict_sqs: StrictSQS) -> Queue:
    return Queue(strict_sqs, "jobs", VisibilityTimeout=30)


@pytest.fixture
def fifo(strict_sqs: StrictSQS) -> Queue:
    return Queue(strict_sqs, "jobs.fifo", VisibilityTimeout=30)


class TestVisibility:
    def test_twelve_hours_are_refused_however_soon_after_the_receive(self, queue: Queue) -> None:
        """Guide, "Amazon SQS visibility timeout": 12 hours from the ReceiveMessage request."""
        queue.send()
        handle = queue.handle()
        with refused("InvalidParameterValue", "beyond the limit .43200 seconds."):
            queue.hide(handle, TWELVE_HOURS)
        queue.hide(handle, TWELVE_HOURS - 1)

    def test_the_time_since_the_send_does_not_count(self, queue: Queue) -> None:
        """Guide, "Amazon SQS visibility timeout": from the receive, not from the send."""
        queue.send()
        queue.sqs.clock.advance(hours=36)
        queue.hide(queue.handle(), TWELVE_HOURS - 1)

    def test_extending_does_not_reset_the_twelve_hours(self, queue: Queue) -> None:
        """Guide, "Amazon SQS visibility timeout": extending does not reset the maximum."""
        queue.send()
        handle = queue.handle()
        for _ in range(11):
            queue.hide(handle, 4000)
            queue.sqs.clock.advance(hours=1)
        with refused("InvalidParameterValue", "Value 4000 .* beyond the limit"):
            queue.hide(handle, 4000)
        queue.hide(handle, 3500)

    def test_a_new_receive_starts_new_twelve_hours(self, queue: Queue) -> None:
        """Guide, "Amazon SQS visibility timeout": a receive begins a new timeout."""
        queue.send()
        queue.handle()
        queue.sqs.clock.advance(hours=12)
        queue.hide(queue.handle(), TWELVE_HOURS - 1)
        assert queue.only().receive_count == 2

    def test_a_refused_extension_changes_nothing(self, queue: Queue) -> None:
        """API, "ChangeMessageVisibility": more than what is left is an error, not a clamp."""
        queue.send()
        handle = queue.handle(VisibilityTimeout=100)
        before = queue.only().hidden_until
        with refused("InvalidParameterValue"):
            queue.hide(handle, TWELVE_HOURS)
        assert queue.only().hidden_until == before

    @pytest.mark.parametrize("seconds", [-1, TWELVE_HOURS + 1])
    def test_values_outside_0_to_43200_are_refused(self, queue: Queue, seconds: int) -> None:
        """API, "ChangeMessageVisibility" and "ReceiveMessage": values from 0 to 43200."""
        queue.send()
        with refused("InvalidParameterValue"):
            queue.receive(VisibilityTimeout=seconds)
        handle = queue.handle()
        with refused("InvalidParameterValue"):
            queue.hide(handle, seconds)

    def test_zero_makes_the_message_visible_at_once(self, queue: Queue) -> None:
        """Guide, "Amazon SQS visibility timeout": terminating the visibility timeout."""
        queue.send()
        queue.hide(queue.handle(), 0)
        assert queue.bodies() == ["m"]

    def test_the_new_timeout_counts_from_the_change(self, queue: Queue) -> None:
        """API, "ChangeMessageVisibility": the timeout starts when the action is called."""
        queue.send()
        handle = queue.handle()
        queue.sqs.clock.advance(20)
        queue.hide(handle, 60)
        queue.sqs.clock.advance(59)
        assert queue.bodies() == []
        queue.sqs.clock.advance(1)
        assert queue.bodies() == ["m"]

    def test_the_queues_own_timeout_is_used_without_another(self, strict_sqs: StrictSQS) -> None:
        """API, "ReceiveMessage": without VisibilityTimeout the queue's overall one."""
        queue = Queue(strict_sqs, "short", VisibilityTimeout=5)
        queue.send()
        queue.handle()
        strict_sqs.clock.advance(5)
        assert queue.bodies() == ["m"]

    def test_receives_are_counted_and_the_first_one_is_remembered(self, queue: Queue) -> None:
        """API, "ReceiveMessage": ApproximateReceiveCount and ApproximateFirstReceiveTimestamp."""
        queue.send()
        (first,) = queue.receive(MessageSystemAttributeNames=["All"])
        queue.sqs.clock.advance(hours=1)
        (second,) = queue.receive(AttributeNames=["All"])
        counts = [m["Attributes"]["ApproximateReceiveCount"] for m in (first, second)]
        times = {m["Attributes"]["ApproximateFirstReceiveTimestamp"] for m in (first, second)}
        assert counts == ["1", "2"]
        assert times == {str(int(queue.only().first_received_at * 1000))}

    def test_attributes_come_only_when_asked_for(self, queue: Queue) -> None:
        """API, "ReceiveMessage": AttributeNames, MessageSystemAttributeNames."""
        queue.send(MessageAttributes={"a": {"DataType": "String", "StringValue": "1"}})
        (message,) = queue.receive(VisibilityTimeout=0)
        assert not {"Attributes", "MessageAttributes"} & set(message)
        (message,) = queue.receive(
            MessageAttributeNames=["a"], MessageSystemAttributeNames=["SenderId"]
        )
        assert set(message["Attributes"]) == {"SenderId"}
        assert set(message["MessageAttributes"]) == {"a"}


def expired(queue: Queue) -> str:
    """A handle whose hiding is over."""
    handle = queue.handle()
    queue.sqs.clock.advance(30)
    return handle


class TestHandles:
    def test_each_receive_gives_another_handle(self, queue: Queue) -> None:
        """Guide, "Amazon SQS queue and message identifiers": the most recent handle counts."""
        queue.send()
        assert expired(queue) != queue.handle()

    def test_a_malformed_handle_is_refused(self, strict_sqs_in_every_mode: StrictSQS) -> None:
        """API, "DeleteMessage" and "ChangeMessageVisibility": ReceiptHandleIsInvalid."""
        queue = Queue(strict_sqs_in_every_mode, "jobs")
        with refused("ReceiptHandleIsInvalid"):
            queue.delete("nonsense")
        with refused("ReceiptHandleIsInvalid"):
            queue.hide("nonsense", 1)

    def test_a_handle_of_another_queue_is_refused(self, queue: Queue) -> None:
        """Guide, "Amazon SQS queue and message identifiers": a handle is of one receive."""
        queue.send()
        with refused("ReceiptHandleIsInvalid"):
            Queue(queue.sqs, "other").delete(queue.handle())

    def test_deleting_a_deleted_message_succeeds(self, queue: Queue) -> None:
        """API, "DeleteMessage": deleting again is answered 200."""
        queue.send()
        handle = queue.handle()
        queue.delete(handle)
        queue.delete(handle)
        assert queue.sqs.messages("jobs") == []
        assert queue.sqs.messages("jobs", deleted=True)[0].deleted

    def test_a_message_that_is_not_in_flight_cannot_be_hidden(self, queue: Queue) -> None:
        """API, "ChangeMessageVisibility": MessageNotInflight."""
        queue.send()
        handle = expired(queue)
        with pytest.raises(queue.client.exceptions.MessageNotInflight):
            queue.hide(handle, 10)

    def test_the_handle_before_the_last_cannot_hide_what_another_holds(self, queue: Queue) -> None:
        """API, "ChangeMessageVisibility": the handle of the message's latest receive."""
        queue.send()
        old = expired(queue)
        queue.handle()
        with refused("InvalidParameterValue", "not available for visibility timeout change"):
            queue.hide(old, 10)

    def test_an_old_handle_never_deletes(self, strict_sqs_in_every_mode: StrictSQS) -> None:
        """API, "DeleteMessage": with an old handle the message might not be deleted."""
        queue = Queue(strict_sqs_in_every_mode, "jobs", VisibilityTimeout=30)
        queue.send()
        old = expired(queue)
        queue.handle()
        if strict_sqs_in_every_mode.mode == "error":
            with refused("InvalidParameterValue", "The receipt handle has expired"):
                queue.delete(old)
        else:
            queue.delete(old)
        assert queue.only().receive_count == 2

    @pytest.mark.strict_sqs(mode="silent")
    def test_in_mode_silent_an_old_handle_hides_nothing(self, queue: Queue) -> None:
        """API, "ChangeMessageVisibility": nothing is promised for an old handle."""
        queue.send()
        queue.hide(expired(queue), 1000)
        assert queue.bodies() == ["m"]

    @pytest.mark.strict_sqs(mode="rehide")
    def test_in_mode_rehide_an_old_handle_moves_the_new_holders_timeout(self, queue: Queue) -> None:
        """Guide, "Amazon SQS visibility timeout": nothing is promised for an old handle."""
        queue.send()
        old = expired(queue)
        queue.handle()
        queue.hide(old, 0)
        assert queue.bodies() == ["m"]

    def test_fifo_refuses_old_handles(self, strict_sqs_in_every_mode: StrictSQS) -> None:
        """Guide, "Exactly-once processing in Amazon SQS": an expired handle is an error."""
        queue = Queue(strict_sqs_in_every_mode, "jobs.fifo", VisibilityTimeout=30)
        queue.send(MessageGroupId="g", MessageDeduplicationId="1")
        old = expired(queue)
        with refused("InvalidParameterValue", "The receipt handle has expired"):
            queue.delete(old)
        with refused("InvalidParameterValue"):
            queue.hide(old, 10)


class TestBatches:
    def test_each_entry_of_a_visibility_batch_has_its_own_outcome(self, queue: Queue) -> None:
        """API, "ChangeMessageVisibilityBatch": the result of each is reported individually."""
        queue.send("old")
        old = expired(queue)
        queue.send("new")
        new = next(m["ReceiptHandle"] for m in queue.receive(10) if m["Body"] == "new")
        seconds = {"good": 60, "long": TWELVE_HOURS}
        entries = [
            {"Id": name, "ReceiptHandle": new, "VisibilityTimeout": seconds[name]}
            for name in seconds
        ]
        entries.append({"Id": "old", "ReceiptHandle": old, "VisibilityTimeout": 60})
        answer = queue.client.change_message_visibility_batch(QueueUrl=queue.url, Entries=entries)
        assert [entry["Id"] for entry in answer["Successful"]] == ["good"]
        assert {entry["Id"] for entry in answer["Failed"]} == {"long", "old"}
        assert "beyond the limit" in answer["Failed"][0]["Message"]
        (call,) = queue.sqs.calls_of("ChangeMessageVisibilityBatch")
        assert (call.status, call.entry_errors) == (200, ("InvalidParameterValue",) * 2)

    def test_each_entry_of_a_delete_batch_has_its_own_outcome(self, queue: Queue) -> None:
        """API, "DeleteMessageBatch": the result of each is reported individually."""
        queue.send()
        old = expired(queue)
        handles = {"old": old, "current": queue.handle(), "forged": "nonsense"}
        entries = [{"Id": name, "ReceiptHandle": handles[name]} for name in handles]
        answer = queue.client.delete_message_batch(QueueUrl=queue.url, Entries=entries)
        assert [entry["Id"] for entry in answer["Successful"]] == ["current"]
        assert {entry["Code"] for entry in answer["Failed"]} == {"ReceiptHandleIsInvalid"}

    def test_each_entry_of_a_send_batch_has_its_own_outcome(self, queue: Queue) -> None:
        """API, "SendMessageBatch": the result of each is reported individually."""
        entries = [
            {"Id": "good", "MessageBody": "m", "DelaySeconds": 900},
            {"Id": "late", "MessageBody": "m", "DelaySeconds": 901},
        ]
        answer = queue.client.send_message_batch(QueueUrl=queue.url, Entries=entries)
        assert [entry["Id"] for entry in answer["Successful"]] == ["good"]
        assert [entry["Code"] for entry in answer["Failed"]] == ["InvalidParameterValue"]

    @pytest.mark.parametrize("count", [0, 11])
    def test_no_entry_and_eleven_entries_are_refused(self, queue: Queue, count: int) -> None:
        """API, "DeleteMessageBatch": EmptyBatchRequest, TooManyEntriesInBatchRequest."""
        error = "EmptyBatchRequest" if count == 0 else "TooManyEntriesInBatchRequest"
        ids = [str(n) for n in range(count)]
        handles: list[dict[str, Any]] = [{"Id": n, "ReceiptHandle": "h"} for n in ids]
        calls = {
            "delete_message_batch": handles,
            "change_message_visibility_batch": [h | {"VisibilityTimeout": 1} for h in handles],
            "send_message_batch": [{"Id": n, "MessageBody": "m"} for n in ids],
        }
        for name, entries in calls.items():
            with refused(f"AWS.SimpleQueueService.{error}"):
                getattr(queue.client, name)(QueueUrl=queue.url, Entries=entries)


class TestSending:
    def test_a_delay_of_900_seconds_is_kept_and_more_is_refused(self, queue: Queue) -> None:
        """Guide, "Amazon SQS message timers": at most 15 minutes."""
        queue.send(DelaySeconds=900)
        with refused("InvalidParameterValue", "DelaySeconds"):
            queue.send(DelaySeconds=901)
        queue.sqs.clock.advance(899)
        assert queue.bodies() == []
        queue.sqs.clock.advance(1)
        assert queue.bodies() == ["m"]

    def test_the_queues_own_delay_is_used_without_another(self, strict_sqs: StrictSQS) -> None:
        """Guide, "Amazon SQS delay queues"."""
        queue = Queue(strict_sqs, "late", DelaySeconds=60)
        queue.send("late")
        queue.send("now", DelaySeconds=0)
        assert queue.bodies() == ["now"]

    def test_a_fifo_message_has_no_delay_of_its_own(self, fifo: Queue) -> None:
        """Guide, "Amazon SQS message timers": FIFO queues do not support them."""
        with refused("InvalidParameterValue", "DelaySeconds"):
            fifo.send(MessageGroupId="g", MessageDeduplicationId="1", DelaySeconds=1)

    def test_a_message_may_have_one_mebibyte_with_its_attributes(self, queue: Queue) -> None:
        """Guide, "Amazon SQS message quotas": 1 MiB."""
        queue.send("x" * 1_048_576)
        attributes = {"a": {"DataType": "String", "StringValue": "b"}}
        with refused("InvalidParameterValue", "shorter than 1048576 bytes"):
            queue.send("x" * 1_048_576, MessageAttributes=attributes)

    def test_a_standard_queue_refuses_deduplication_ids(self, queue: Queue) -> None:
        """API, "SendMessage": MessageDeduplicationId applies only to FIFO queues."""
        with refused("InvalidParameterValue", "MessageDeduplicationId"):
            queue.send(MessageDeduplicationId="1")

    def test_a_queue_that_does_not_exist_is_an_error(self, queue: Queue) -> None:
        """API, "SendMessage": QueueDoesNotExist."""
        with pytest.raises(queue.client.exceptions.QueueDoesNotExist):
            queue.client.send_message(QueueUrl=queue.url + "x", MessageBody="m")


class TestFifo:
    def send(self, fifo: Queue, *bodies: str, group: str = "g") -> None:
        for body in bodies:
            fifo.send(body, MessageGroupId=group, MessageDeduplicationId=body)

    def test_a_group_waits_while_one_of_its_messages_is_in_flight(self, fifo: Queue) -> None:
        """Guide, "FIFO queue delivery logic in Amazon SQS": no more of the same group."""
        self.send(fifo, "1", "2")
        self.send(fifo, "other", group="h")
        handle = fifo.handle()
        assert fifo.bodies() == ["other"]
        fifo.delete(handle)
        assert fifo.bodies() == ["2"]

    def test_one_receive_may_bring_several_of_a_group_in_order(self, fifo: Queue) -> None:
        """Guide, "FIFO queue delivery logic in Amazon SQS": as many of one group as possible."""
        self.send(fifo, "1", "2")
        assert fifo.bodies(2) == ["1", "2"]

    def test_a_hidden_successor_blocks_its_group_too(self, fifo: Queue) -> None:
        """Guide, "FIFO queue delivery logic in Amazon SQS": until it is deleted or visible."""
        self.send(fifo, "1", "2")
        first, second = (str(message["ReceiptHandle"]) for message in fifo.receive(2))
        fifo.hide(first, 0)
        assert fifo.bodies() == []
        fifo.hide(second, 0)
        assert fifo.bodies(2) == ["1", "2"]

    def test_a_message_that_comes_back_goes_before_its_successors(self, fifo: Queue) -> None:
        """Guide, "FIFO queue delivery logic in Amazon SQS": the order in a group is kept."""
        self.send(fifo, "1", "2")
        fifo.handle()
        fifo.sqs.clock.advance(30)
        assert fifo.bodies(1) == ["1"]

    def test_a_deduplication_id_outlives_receive_and_delete(self, fifo: Queue) -> None:
        """Guide, "Using the message deduplication ID in Amazon SQS": 5 minutes, whatever."""
        first = fifo.send("a", MessageGroupId="g", MessageDeduplicationId="1")
        fifo.delete(fifo.handle())
        again = fifo.send("b", MessageGroupId="g", MessageDeduplicationId="1")
        assert (again, fifo.sqs.messages(fifo.name)) == (first, [])
        fifo.sqs.clock.advance(300)
        assert fifo.send("c", MessageGroupId="g", MessageDeduplicationId="1") != first

    def test_a_group_is_required(self, fifo: Queue) -> None:
        """API, "SendMessage": MessageGroupId is required for FIFO queues."""
        with refused("MissingParameter", "MessageGroupId"):
            fifo.send(MessageDeduplicationId="1")


class TestFairQueues:
    def test_a_standard_queue_keeps_the_group_and_holds_nothing_back(self, queue: Queue) -> None:
        """Guide, "Amazon SQS fair queues": a tenant's id, which orders and blocks nothing."""
        for body in ("1", "2"):
            queue.send(body, MessageGroupId="tenant")
        assert [message.group for message in queue.sqs.messages(queue.name)] == ["tenant"] * 2
        first = queue.receive(MessageSystemAttributeNames=["MessageGroupId"])
        assert first[0]["Attributes"] == {"MessageGroupId": "tenant"}
        assert queue.bodies() == ["2"]

    def test_it_takes_no_deduplication_id(self, queue: Queue) -> None:
        """API, "SendMessage": MessageDeduplicationId applies only to FIFO queues."""
        with refused("InvalidParameterValue", "not valid for this queue type"):
            queue.send(MessageGroupId="tenant", MessageDeduplicationId="1")


class TestQueues:
    def test_the_receive_beyond_the_limit_goes_to_the_dead_letter_queue(
        self, strict_sqs: StrictSQS
    ) -> None:
        """Guide, "Using dead-letter queues in Amazon SQS": maxReceiveCount."""
        dead = Queue(strict_sqs, "dead")
        arn = "arn:aws:sqs:us-east-1:123456789012:dead"
        redrive = {"deadLetterTargetArn": arn, "maxReceiveCount": 2}
        queue = Queue(strict_sqs, "jobs", VisibilityTimeout=30, RedrivePolicy=redrive)
        message_id = queue.send()
        for _ in range(2):
            expired(queue)
        assert len(strict_sqs.messages("jobs")) == 1
        assert queue.bodies() == []
        assert dead.only().message_id == message_id
        answer = queue.client.get_queue_attributes(
            QueueUrl=queue.url, AttributeNames=["RedrivePolicy"]
        )
        assert json.loads(answer["Attributes"]["RedrivePolicy"]) == redrive

    def test_a_redrive_policy_needs_an_existing_target(self, strict_sqs: StrictSQS) -> None:
        """API, "SetQueueAttributes": RedrivePolicy."""
        queue = Queue(strict_sqs, "jobs")
        policy = json.dumps({"deadLetterTargetArn": "arn:of:nothing", "maxReceiveCount": 2})
        with refused("InvalidParameterValue", "Dead letter target does not exist"):
            queue.client.set_queue_attributes(
                QueueUrl=queue.url, Attributes={"RedrivePolicy": policy}
            )

    def test_the_numbers_of_a_queue_follow_its_messages(self, queue: Queue) -> None:
        """API, "GetQueueAttributes": the three approximate numbers."""
        queue.send("flying")
        queue.handle()
        queue.send("late", DelaySeconds=60)
        for _ in range(3):
            queue.send()
        answer = queue.client.get_queue_attributes(QueueUrl=queue.url, AttributeNames=["All"])
        prefix = "ApproximateNumberOfMessages"
        numbers = [answer["Attributes"][prefix + end] for end in ("", "Delayed", "NotVisible")]
        assert numbers == ["3", "1", "1"]

    @pytest.mark.parametrize("seconds", ["-1", "43201", "soon"])
    def test_a_queue_hides_for_twelve_hours_at_most(self, queue: Queue, seconds: str) -> None:
        """API, "CreateQueue" and "SetQueueAttributes": VisibilityTimeout from 0 to 43200."""
        attributes = {"VisibilityTimeout": seconds}
        with refused("InvalidAttributeValue"):
            queue.client.create_queue(QueueName="other", Attributes=attributes)
        with refused("InvalidAttributeValue"):
            queue.client.set_queue_attributes(QueueUrl=queue.url, Attributes=attributes)

    def test_messages_are_kept_for_the_retention_period(self, queue: Queue) -> None:
        """Guide, "Amazon SQS message quotas": four days by default, received or not."""
        queue.send()
        queue.handle()
        queue.sqs.clock.advance(hours=96)
        assert queue.bodies() == []
        assert queue.sqs.messages("jobs") == []
