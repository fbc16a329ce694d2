"""moto's SQS backend with its messages kept by `rules`.

moto does what it does well: names, attributes and tags of queues, validation, the parts of a
message and their checksums. When a message may be received, and what a receipt handle is worth,
is decided by `QueueState`; moto's own message lists stay empty.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from moto.sqs.exceptions import SQSException
from moto.sqs.models import Message, Queue, SQSBackend

from celery_lease.testing.sqs import limits
from celery_lease.testing.sqs.account import ACCOUNT_ID, REGION, Account
from celery_lease.testing.sqs.limits import Refusal
from celery_lease.testing.sqs.rules import Delivery, HandleExpired, QueueState, StoredMessage

Failed = dict[str, Any]


class StrictBackend(SQSBackend):
    """The account as one request sees it. Used only while `account.changed` is held."""

    def __init__(
        self,
        account: Account,
        *,
        ignoring: bool = False,
        connected: Callable[[], bool] = lambda: True,
    ) -> None:
        super().__init__(REGION, ACCOUNT_ID)
        self.queues = account.queues
        self._account = account
        #: Answer as if it was done, but do not do it.
        self._ignoring = ignoring
        #: Whether the client is still there to take a message.
        self._connected = connected

    # -- queues ---------------------------------------------------------------------------

    def create_queue(self, name: str, tags: dict[str, str] | None = None, **kwargs: Any) -> Queue:
        limits.check_queue_attributes(kwargs)
        redrive = kwargs.pop("RedrivePolicy", None)
        policy = self._redrive_policy(redrive)
        queue = super().create_queue(name, tags, **kwargs)
        if name not in self._account.states:
            self._account.states[name] = QueueState(fifo=queue.fifo_queue)
        if redrive is not None:
            self._set_redrive_policy(queue, policy)
        return queue

    def delete_queue(self, queue_name: str) -> None:
        super().delete_queue(queue_name)
        del self._account.states[queue_name]
        self._account.changed.notify_all()

    def set_queue_attributes(self, queue_name: str, attributes: dict[str, Any]) -> Queue:
        limits.check_queue_attributes(attributes)
        others = dict(attributes)
        redrive = others.pop("RedrivePolicy", None)
        policy = self._redrive_policy(redrive)
        queue = super().set_queue_attributes(queue_name, others)
        if redrive is not None:
            self._set_redrive_policy(queue, policy)
        self._account.changed.notify_all()
        return queue

    def get_queue_attributes(self, queue_name: str, attribute_names: list[str]) -> dict[str, Any]:
        attributes = super().get_queue_attributes(queue_name, attribute_names)
        counts = self._state(queue_name).counts(self._now())
        exact = {
            "ApproximateNumberOfMessages": counts.available,
            "ApproximateNumberOfMessagesDelayed": counts.delayed,
            "ApproximateNumberOfMessagesNotVisible": counts.in_flight,
        }
        return attributes | {name: exact[name] for name in exact if name in attributes}

    def purge_queue(self, queue_name: str) -> None:
        state = self._state(queue_name)
        if not self._ignoring:
            state.purge()

    def _redrive_policy(self, text: str | Mapping[str, Any] | None) -> dict[str, Any] | None:
        """The policy with its numbers as numbers; None to have none."""
        if not text or text == "{}":
            return None
        try:
            policy = dict(json.loads(text) if isinstance(text, str) else text)
            target = str(policy["deadLetterTargetArn"])
            limit = int(policy["maxReceiveCount"])
        except (ValueError, TypeError, KeyError) as error:
            raise limits.invalid_value("RedrivePolicy", text, "Invalid value.") from error
        if not 1 <= limit <= 1000:
            raise limits.invalid_value(
                "RedrivePolicy",
                text,
                "Invalid value for maxReceiveCount: must be an integer from 1 to 1000.",
            )
        if not any(queue.queue_arn == target for queue in self.queues.values()):
            raise limits.invalid_value("RedrivePolicy", text, "Dead letter target does not exist.")
        return policy | {"maxReceiveCount": limit}

    def _set_redrive_policy(self, queue: Queue, policy: dict[str, Any] | None) -> None:
        targets = {q.queue_arn: q for q in self.queues.values()}
        queue.redrive_policy = policy
        queue.dead_letter_queue = targets[policy["deadLetterTargetArn"]] if policy else None

    # -- sending --------------------------------------------------------------------------

    def send_message(
        self,
        queue_name: str,
        message_body: str,
        message_attributes: dict[str, Any] | None = None,
        delay_seconds: int | None = None,
        deduplication_id: str | None = None,
        group_id: str | None = None,
        system_attributes: dict[str, Any] | None = None,
        validate_group_id: bool = True,
    ) -> Message:
        queue = self.get_queue(queue_name)
        limits.check_body(message_body)
        limits.check_size(
            limits.message_size(message_body, message_attributes),
            limit=_number(queue, "maximum_message_size"),
        )
        limits.check_delay(delay_seconds, fifo=queue.fifo_queue)
        limits.check_deduplication(deduplication_id, fifo=queue.fifo_queue)
        message = super().send_message(
            queue_name,
            message_body,
            message_attributes=message_attributes,
            delay_seconds=delay_seconds,
            deduplication_id=deduplication_id,
            group_id=group_id,
            system_attributes=system_attributes,
            validate_group_id=validate_group_id,
        )
        queue._messages.clear()
        if self._ignoring:
            return message
        delay = _number(queue, "delay_seconds") if delay_seconds is None else delay_seconds
        return self._store(queue, message, delay=delay)

    def _store(self, queue: Queue, message: Any, *, delay: int) -> Message:
        now = self._now()
        message.sent_timestamp = int(now * 1000)
        key: tuple[str | None, str] | None = None
        if queue.fifo_queue:
            message.sequence_number = f"{next(self._account.sequence):020d}"
        if queue.fifo_queue and message.deduplication_id is not None:
            by_group = getattr(queue, "deduplication_scope", None) == "messageGroup"
            key = (message.group_id if by_group else None, message.deduplication_id)
        stored = self._state(queue.name).add(
            StoredMessage(
                message_id=message.id,
                sent_at=now,
                payload=message,
                group=message.group_id,
                deduplication_key=key,
                delayed_until=now + delay,
            )
        )
        self._account.changed.notify_all()
        first: Message = stored.payload
        return first

    def send_message_batch(
        self, queue_name: str, entries: dict[str, dict[str, Any]]
    ) -> tuple[list[Message], list[Failed]]:
        listed = list(entries.values())
        limits.check_batch("SendMessageBatch", [entry["Id"] for entry in listed])
        limits.check_batch_size(
            sum(
                limits.message_size(entry["MessageBody"], entry.get("MessageAttributes"))
                for entry in listed
            )
        )
        self.get_queue(queue_name)
        sent: list[Message] = []

        def send(entry: Mapping[str, Any]) -> None:
            message = self.send_message(
                queue_name,
                entry["MessageBody"],
                message_attributes=entry.get("MessageAttributes"),
                delay_seconds=entry.get("DelaySeconds"),
                deduplication_id=entry.get("MessageDeduplicationId"),
                group_id=entry.get("MessageGroupId"),
                system_attributes=entry.get("MessageSystemAttributes"),
            )
            # Two entries may be answered with one message, if they deduplicate.
            answer: Any = copy.copy(message)
            answer.user_id = entry["Id"]
            sent.append(answer)

        _, failed = _each(listed, send)
        return sent, failed

    # -- receiving ------------------------------------------------------------------------

    def receive_message(
        self,
        queue_name: str,
        count: int,
        wait_seconds_timeout: int,
        visibility_timeout: int,
        message_attribute_names: list[str] | None = None,
    ) -> list[Message]:
        deadline = time.monotonic() + wait_seconds_timeout
        deliveries = self._receive(queue_name, count, visibility_timeout)
        while not deliveries and not self._account.closing:
            left = deadline - time.monotonic()
            if left <= 0:
                break
            due = self._state(queue_name).next_change(self._now())
            self._account.changed.wait(left if due is None else min(left, due))
            # A message handed to a dead client would be hidden from the living ones.
            if not self._connected():
                break
            deliveries = self._receive(queue_name, count, visibility_timeout)
        return [_answer(d, message_attribute_names or []) for d in deliveries]

    def _receive(self, queue_name: str, count: int, hide_for: int) -> list[Delivery]:
        queue = self.get_queue(queue_name)
        state = self._state(queue_name)
        if self._ignoring:
            return []
        faults = self._account.faults
        received = state.receive(
            self._now(),
            count=count,
            hide_for=hide_for,
            max_receive_count=(queue.redrive_policy or {}).get("maxReceiveCount"),
            newest_first=faults.reordered,
        )
        if received.dead and queue.dead_letter_queue is not None:
            state.move_to(self._state(queue.dead_letter_queue.name), received.dead)
            self._account.changed.notify_all()
        for delivery in received.deliveries:
            if not queue.fifo_queue and faults.duplicates_next():
                delivery.message.duplicated = True
                self._account.changed.notify_all()
        return received.deliveries

    # -- receipt handles ------------------------------------------------------------------

    def delete_message(self, queue_name: str, receipt_handle: str) -> None:
        state = self._state(queue_name)
        if self._ignoring:
            return
        state.delete(receipt_handle, self._now(), mode=self._account.mode)
        self._account.changed.notify_all()

    def delete_message_batch(
        self, queue_name: str, receipts: list[dict[str, Any]]
    ) -> tuple[list[str], list[Failed]]:
        limits.check_batch("DeleteMessageBatch", [entry["Id"] for entry in receipts])
        self.get_queue(queue_name)
        return _each(receipts, lambda e: self.delete_message(queue_name, e["ReceiptHandle"]))

    def change_message_visibility(
        self, queue_name: str, receipt_handle: str, visibility_timeout: int
    ) -> None:
        state = self._state(queue_name)
        if self._ignoring:
            return
        state.change_visibility(
            receipt_handle, int(visibility_timeout), self._now(), mode=self._account.mode
        )
        self._account.changed.notify_all()

    def change_message_visibility_batch(
        self, queue_name: str, entries: list[dict[str, Any]]
    ) -> tuple[list[str], list[Failed]]:
        limits.check_batch("ChangeMessageVisibilityBatch", [entry["Id"] for entry in entries])
        self.get_queue(queue_name)

        def change(entry: Mapping[str, Any]) -> None:
            timeout = entry.get("VisibilityTimeout")
            if timeout is None:
                raise Refusal(
                    "MissingParameter",
                    "The request must contain the parameter VisibilityTimeout.",
                )
            self.change_message_visibility(queue_name, entry["ReceiptHandle"], timeout)

        return _each(entries, change)

    # -- common to all --------------------------------------------------------------------

    def _now(self) -> float:
        return self._account.clock.now()

    def _state(self, queue_name: str) -> QueueState:
        queue = self.get_queue(queue_name)
        state = self._account.states[queue_name]
        state.expire(self._now(), _number(queue, "message_retention_period"))
        return state


def _number(queue: Queue, name: str) -> int:
    # moto sets these attributes by name, so a type checker does not know them.
    return int(getattr(queue, name))


def _each(
    entries: Iterable[Mapping[str, Any]], act: Callable[[Mapping[str, Any]], None]
) -> tuple[list[str], list[Failed]]:
    """Do it for every entry of a batch: the ids it was done for, and the failures."""
    done: list[str] = []
    failed: list[Failed] = []
    for entry in entries:
        try:
            act(entry)
        except HandleExpired:
            # In a batch AWS names this error differently.
            failed.append(
                _failure(entry, "ReceiptHandleIsInvalid", "The receipt handle has expired")
            )
        except (Refusal, SQSException) as error:
            failed.append(_failure(entry, error.code, error.message))
        else:
            done.append(entry["Id"])
    return done, failed


def _failure(entry: Mapping[str, Any], code: str, message: str) -> Failed:
    return {"Id": entry["Id"], "SenderFault": True, "Code": code, "Message": message}


def _answer(delivery: Delivery, wanted: list[str]) -> Message:
    """Moto's message as this delivery shows it, with the message attributes asked for."""
    message: Message = copy.copy(delivery.message.payload)
    message.receipt_handle = delivery.handle
    message.approximate_receive_count = delivery.receive_count
    message.approximate_first_receive_timestamp = int(delivery.first_received_at * 1000)
    prefixes = tuple(name.removesuffix("*") for name in wanted if name.endswith(".*"))
    everything = "All" in wanted or ".*" in wanted
    message.message_attributes = {
        name: value
        for name, value in message.message_attributes.items()
        if everything or name in wanted or name.startswith(prefixes)
    }
    return message
