from __future__ import annotations

import itertools

import pytest

from celery_lease.testing.sqs import limits
from celery_lease.testing.sqs.clock import ServerClock
from celery_lease.testing.sqs.faults import Faults, Plan
from celery_lease.testing.sqs.limits import Refusal
from celery_lease.testing.sqs.rules import MODES, Mode, QueueState, Standing, StoredMessage

DAY = 86_400.0
TWELVE_HOURS = 43_200


def queue_of(*names: str, fifo: bool = False, group: str | None = None) -> QueueState:
    handles = itertools.count(1)
    queue = QueueState(fifo=fifo, new_handle=lambda: f"h{next(handles)}")
    for name in names:
        queue.add(StoredMessage(message_id=name, sent_at=0, group=group))
    return queue


def names(queue: QueueState, now: float, **options: object) -> list[str]:
    received = queue.receive(now, **options)  # type: ignore[arg-type]
    return [delivery.message.message_id for delivery in received.deliveries]


def only(queue: QueueState) -> StoredMessage:
    (message,) = queue.messages
    return message


class TestTwelveHours:
    def test_they_are_counted_from_the_receive_not_from_the_send(self) -> None:
        queue = queue_of("m")
        queue.receive(2 * DAY)
        queue.change_visibility("h1", TWELVE_HOURS, 2 * DAY, mode="error")
        assert only(queue).hidden_until == 2 * DAY + TWELVE_HOURS

    def test_exactly_what_is_left_is_granted_and_a_second_more_is_refused(self) -> None:
        queue = queue_of("m")
        queue.receive(0)
        queue.change_visibility("h1", TWELVE_HOURS - 10, 10, mode="error")
        with pytest.raises(Refusal, match="beyond the limit \\[43200 seconds\\]") as refused:
            queue.change_visibility("h1", TWELVE_HOURS - 9, 10, mode="error")
        assert refused.value.code == "InvalidParameterValue"

    def test_a_refused_extension_leaves_the_hiding_as_it_was(self) -> None:
        queue = queue_of("m")
        queue.receive(0, hide_for=100)
        with pytest.raises(Refusal):
            queue.change_visibility("h1", TWELVE_HOURS, 50, mode="error")
        assert only(queue).hidden_until == 100

    def test_extending_does_not_start_them_again_but_a_new_receive_does(self) -> None:
        queue = queue_of("m")
        queue.receive(0, hide_for=TWELVE_HOURS)
        with pytest.raises(Refusal):
            queue.change_visibility("h1", 2, TWELVE_HOURS - 1, mode="error")
        assert names(queue, TWELVE_HOURS) == ["m"]
        queue.change_visibility("h2", TWELVE_HOURS - 1, TWELVE_HOURS + 1, mode="error")

    def test_an_old_handle_cannot_go_beyond_them_either(self) -> None:
        queue = queue_of("m")
        queue.receive(0, hide_for=10)
        queue.receive(20, hide_for=10)
        with pytest.raises(Refusal):
            queue.change_visibility("h1", TWELVE_HOURS, 25, mode="rehide")


class TestHandles:
    def test_a_handle_is_current_until_the_hiding_ends_or_the_next_receive(self) -> None:
        queue = queue_of("m")
        queue.receive(0, hide_for=10)
        message = only(queue)
        assert message.standing("h1", 9.9) is Standing.CURRENT
        assert message.standing("h1", 10) is Standing.EXPIRED
        queue.receive(10, hide_for=10)
        assert message.standing("h1", 11) is Standing.SUPERSEDED
        assert message.standing("h2", 11) is Standing.CURRENT

    def test_the_current_handle_deletes_in_every_mode(self) -> None:
        for mode in MODES:
            queue = queue_of("m")
            queue.receive(0)
            queue.delete("h1", 1, mode=mode)  # type: ignore[arg-type]
            assert queue.messages == []

    def test_deleting_twice_is_answered_as_done(self) -> None:
        queue = queue_of("m")
        queue.receive(0)
        queue.delete("h1", 1, mode="error")
        queue.delete("h1", 2, mode="error")

    def test_a_handle_nobody_gave_out_is_refused_by_every_verb(self) -> None:
        queue = queue_of("m")
        for mode in MODES:
            with pytest.raises(Refusal, match="ReceiptHandleIsInvalid"):
                queue.delete("forged", 0, mode=mode)  # type: ignore[arg-type]
            with pytest.raises(Refusal, match="ReceiptHandleIsInvalid"):
                queue.change_visibility("forged", 1, 0, mode=mode)  # type: ignore[arg-type]

    def test_changing_the_visibility_of_a_deleted_message_is_refused_in_every_mode(self) -> None:
        for mode in MODES:
            queue = queue_of("m")
            queue.receive(0)
            queue.delete("h1", 1, mode="error")
            with pytest.raises(Refusal, match="does not exist or is not available"):
                queue.change_visibility("h1", 5, 2, mode=mode)  # type: ignore[arg-type]

    @pytest.mark.parametrize("mode", ["silent", "rehide"])
    def test_an_old_handle_deletes_nothing_and_says_it_did(self, mode: Mode) -> None:
        queue = queue_of("m")
        queue.receive(0, hide_for=10)
        queue.delete("h1", 10, mode=mode)
        queue.receive(10, hide_for=10)
        queue.delete("h1", 11, mode=mode)
        assert only(queue).handle == "h2"

    def test_mode_error_refuses_to_delete_with_an_old_handle(self) -> None:
        queue = queue_of("m")
        queue.receive(0, hide_for=10)
        with pytest.raises(Refusal, match="The receipt handle has expired"):
            queue.delete("h1", 10, mode="error")

    def test_mode_error_tells_not_in_flight_from_held_by_somebody_else(self) -> None:
        queue = queue_of("m")
        queue.receive(0, hide_for=10)
        with pytest.raises(Refusal, match="MessageNotInflight"):
            queue.change_visibility("h1", 5, 10, mode="error")
        queue.receive(10, hide_for=10)
        with pytest.raises(Refusal, match="not available for visibility timeout change"):
            queue.change_visibility("h1", 5, 11, mode="error")

    def test_mode_silent_changes_no_visibility(self) -> None:
        queue = queue_of("m")
        queue.receive(0, hide_for=10)
        queue.change_visibility("h1", 500, 10, mode="silent")
        assert names(queue, 10) == ["m"]

    def test_mode_rehide_lets_the_old_holder_move_the_new_ones_hiding(self) -> None:
        queue = queue_of("m")
        queue.receive(0, hide_for=10)
        queue.receive(10, hide_for=100)
        queue.change_visibility("h1", 1, 20, mode="rehide")
        assert names(queue, 21) == ["m"]

    def test_mode_rehide_hides_a_visible_message_again(self) -> None:
        queue = queue_of("m")
        queue.receive(0, hide_for=10)
        queue.change_visibility("h1", 100, 10, mode="rehide")
        assert names(queue, 50) == []

    @pytest.mark.parametrize("mode", MODES)
    def test_fifo_refuses_old_handles_in_every_mode(self, mode: Mode) -> None:
        queue = queue_of("m", fifo=True, group="g")
        queue.receive(0, hide_for=10)
        with pytest.raises(Refusal, match="The receipt handle has expired"):
            queue.delete("h1", 10, mode=mode)
        with pytest.raises(Refusal, match="InvalidParameterValue"):
            queue.change_visibility("h1", 5, 10, mode=mode)


class TestReceiving:
    def test_a_received_message_is_hidden_and_counted(self) -> None:
        queue = queue_of("m")
        assert names(queue, 100, hide_for=30) == ["m"]
        assert names(queue, 129) == []
        assert names(queue, 130) == ["m"]
        assert (only(queue).receive_count, only(queue).first_received_at) == (2, 100)

    def test_visibility_zero_gives_the_message_back_at_once(self) -> None:
        queue = queue_of("m")
        queue.receive(0)
        queue.change_visibility("h1", 0, 1, mode="error")
        assert names(queue, 1) == ["m"]

    def test_a_delayed_message_waits(self) -> None:
        queue = queue_of()
        queue.add(StoredMessage(message_id="m", sent_at=0, delayed_until=60))
        assert names(queue, 59) == []
        assert queue.next_change(50) == 10
        assert names(queue, 60) == ["m"]

    def test_the_receive_after_the_last_allowed_one_buries_the_message(self) -> None:
        queue, dead = queue_of("m"), queue_of()
        queue.receive(0, hide_for=1, max_receive_count=2)
        queue.receive(10, hide_for=1, max_receive_count=2)
        received = queue.receive(20, max_receive_count=2)
        assert received.deliveries == []
        queue.move_to(dead, received.dead)
        assert queue.messages == []
        assert (only(dead).message_id, only(dead).receive_count) == ("m", 2)
        with pytest.raises(Refusal, match="ReceiptHandleIsInvalid"):
            dead.delete("h2", 21, mode="error")

    def test_a_duplicated_message_goes_to_the_next_receive_once(self) -> None:
        queue = queue_of("m")
        queue.receive(0, hide_for=10)
        only(queue).duplicated = True
        assert names(queue, 1, hide_for=10) == ["m"]
        assert names(queue, 2) == []

    def test_the_order_can_be_turned_round(self) -> None:
        assert names(queue_of("a", "b"), 0, count=10, newest_first=True) == ["b", "a"]

    def test_counts_tell_available_delayed_and_in_flight_apart(self) -> None:
        queue = queue_of("a", "b", "c")
        queue.add(StoredMessage(message_id="d", sent_at=0, delayed_until=60))
        queue.receive(0, hide_for=10)
        counts = queue.counts(5)
        assert (counts.available, counts.delayed, counts.in_flight) == (2, 1, 1)

    def test_old_messages_expire(self) -> None:
        queue = queue_of("m")
        queue.expire(4 * DAY - 1, 4 * DAY)
        assert len(queue.messages) == 1
        queue.expire(4 * DAY, 4 * DAY)
        assert queue.messages == []


class TestFifo:
    def test_a_group_in_flight_is_held_back_and_other_groups_are_not(self) -> None:
        queue = queue_of(fifo=True)
        for name, group in (("a1", "a"), ("a2", "a"), ("b1", "b")):
            queue.add(StoredMessage(message_id=name, sent_at=0, group=group))
        assert names(queue, 0, hide_for=10) == ["a1"]
        assert names(queue, 1, hide_for=10, count=10) == ["b1"]
        assert names(queue, 10, hide_for=10) == ["a1"]

    def test_one_receive_may_take_several_of_a_group_in_order(self) -> None:
        queue = queue_of("1", "2", "3", fifo=True, group="g")
        assert names(queue, 0, count=2) == ["1", "2"]
        assert names(queue, 0, count=2) == []

    def test_turning_the_order_round_is_ignored(self) -> None:
        queue = queue_of("1", "2", fifo=True, group="g")
        assert names(queue, 0, count=2, newest_first=True) == ["1", "2"]

    def test_a_deduplication_id_outlives_receive_and_delete_by_five_minutes(self) -> None:
        queue = queue_of(fifo=True)

        def send(name: str, at: float) -> str:
            message = StoredMessage(
                message_id=name, sent_at=at, group="g", deduplication_key=(None, "d")
            )
            return queue.add(message).message_id

        assert send("first", 0) == "first"
        queue.receive(1)
        queue.delete("h1", 2, mode="error")
        assert send("second", 299.9) == "first"
        assert queue.messages == []
        assert send("third", 300) == "third"


class TestLimits:
    @pytest.mark.parametrize("seconds", [0, 43_200])
    def test_a_visibility_timeout_may_be_all_of_twelve_hours(self, seconds: int) -> None:
        limits.check_visibility(seconds)

    @pytest.mark.parametrize("seconds", [-1, 43_201])
    def test_a_visibility_timeout_beyond_them_is_refused(self, seconds: int) -> None:
        with pytest.raises(Refusal, match="InvalidParameterValue"):
            limits.check_visibility(seconds)

    @pytest.mark.parametrize(("seconds", "fifo"), [(901, False), (-1, False), (1, True)])
    def test_delays_are_refused_above_900_and_on_fifo(self, seconds: int, fifo: bool) -> None:
        with pytest.raises(Refusal, match="DelaySeconds"):
            limits.check_delay(seconds, fifo=fifo)

    @pytest.mark.parametrize(("seconds", "fifo"), [(900, False), (0, True), (None, True)])
    def test_other_delays_are_accepted(self, seconds: int | None, fifo: bool) -> None:
        limits.check_delay(seconds, fifo=fifo)

    @pytest.mark.parametrize(
        ("ids", "code"),
        [
            ([], "EmptyBatchRequest"),
            ([str(n) for n in range(11)], "TooManyEntriesInBatchRequest"),
            (["a", "a"], "BatchEntryIdsNotDistinct"),
            (["a b"], "InvalidBatchEntryId"),
        ],
    )
    def test_unfit_batches_are_refused_as_a_whole(self, ids: list[str], code: str) -> None:
        with pytest.raises(Refusal) as refused:
            limits.check_batch("SendMessageBatch", ids)
        assert refused.value.code == code

    def test_the_size_is_counted_in_bytes_and_with_attributes(self) -> None:
        attributes = {"name": {"DataType": "String", "StringValue": "value"}}
        assert limits.message_size("é", None) == 2
        assert limits.message_size("", attributes) == len("name" + "String" + "value")

    def test_control_characters_are_refused_and_emoji_are_not(self) -> None:
        limits.check_body("tab\t and 🦊")
        with pytest.raises(Refusal, match="InvalidMessageContents"):
            limits.check_body("bell\a")


class TestFaults:
    def test_calls_are_counted_from_the_order(self) -> None:
        faults = Faults()
        faults.plan("DeleteMessage")
        fault = faults.fail("DeleteMessage", nth=2)
        plans = [faults.plan("DeleteMessage").failure for _ in range(3)]
        assert plans == [None, fault, None]
        assert fault.fired == 1

    def test_times_none_holds_until_cleared(self) -> None:
        faults = Faults()
        faults.ignore("DeleteMessage", times=None)
        assert [faults.plan("DeleteMessage").ignored for _ in range(3)] == [True] * 3
        faults.clear()
        assert faults.plan("DeleteMessage") == Plan()

    def test_denying_an_action_denies_its_batch_form(self) -> None:
        faults = Faults()
        faults.deny("ChangeMessageVisibility")
        assert faults.plan("ChangeMessageVisibilityBatch").denied
        assert not faults.plan("DeleteMessage").denied

    def test_several_faults_may_meet_in_one_call(self) -> None:
        faults = Faults()
        faults.delay("SendMessage", seconds=1)
        faults.delay("SendMessage", seconds=2)
        faults.drop_connection("SendMessage", after=True)
        assert faults.plan("SendMessage") == Plan(delay=3, drop_after=True)

    def test_duplicates_are_counted_by_delivery(self) -> None:
        faults = Faults()
        faults.duplicate(nth=2)
        faults.plan("ReceiveMessage")
        assert [faults.duplicates_next() for _ in range(3)] == [False, True, False]

    @pytest.mark.parametrize("nth", [0, -1])
    def test_calls_are_counted_from_one(self, nth: int) -> None:
        with pytest.raises(ValueError, match="counted from 1"):
            Faults().fail("SendMessage", nth=nth)

    def test_an_action_that_does_not_exist_is_refused_when_ordered(self) -> None:
        with pytest.raises(ValueError, match="not an action"):
            Faults().fail("DeleteMesage")
        with pytest.raises(ValueError, match="not an action"):
            Faults().deny("sqs:DeleteMessage")

    def test_only_actions_on_messages_can_be_ignored(self) -> None:
        with pytest.raises(ValueError, match="actions on messages"):
            Faults().ignore("CreateQueue")


class TestClock:
    def test_it_moves_by_what_is_added_and_tells_who_waits(self) -> None:
        woken: list[bool] = []
        clock = ServerClock(on_advance=lambda: woken.append(True))
        before = clock.now()
        clock.advance(60, hours=12)
        assert clock.now() - before >= TWELVE_HOURS + 60
        assert clock.added == TWELVE_HOURS + 60
        assert woken == [True]

    def test_it_does_not_go_back(self) -> None:
        with pytest.raises(ValueError, match="only goes forward"):
            ServerClock().advance(-1)
