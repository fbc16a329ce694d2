from __future__ import annotations

import datetime
import decimal
import uuid
from typing import Any

import pytest
from kombu.exceptions import ContentDisallowed

from celery_lease.codec import Codec
from celery_lease.errors import NotSerializable


@pytest.mark.parametrize(
    "value",
    [
        None,
        0,
        -1.5,
        "",
        "ünïcödé\n;",
        [1, [2, {"three": None}]],
        {"a": {"b": []}},
        "x" * 1_000_000,
        uuid.UUID(int=7),
        decimal.Decimal("1.10"),
        datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC),
    ],
)
def test_a_value_comes_back_as_the_apps_json_would_bring_it(value: Any) -> None:
    codec = Codec("json")
    assert codec.decode(codec.encode(value, what="a value")) == value


def test_equal_values_have_equal_blobs_so_that_a_repeat_is_no_new_progress() -> None:
    codec = Codec("json")
    assert codec.encode({"line": 7}, what="c") == codec.encode({"line": 7}, what="c")


@pytest.mark.parametrize("value", [object(), {1, 2}.__iter__(), {"deep": [object()]}, lambda: None])
def test_a_value_that_cannot_be_encoded_is_refused_with_the_place_it_was_given(value: Any) -> None:
    with pytest.raises(NotSerializable) as refused:
        Codec("json").encode(value, what="run r-1, stage 'load'")
    message = str(refused.value)
    assert message.startswith("run r-1, stage 'load': ")
    assert "'json'" in message
    assert type(value).__name__ in message


def test_a_value_that_refers_to_itself_is_refused_too() -> None:
    knot: list[Any] = []
    knot.append(knot)
    with pytest.raises(NotSerializable):
        Codec("json").encode(knot, what="checkpoint of run r-1")


def test_pickle_is_understood_where_the_app_accepts_it() -> None:
    codec = Codec("pickle", accept=["pickle"])
    assert codec.decode(codec.encode({1, 2}, what="a set")) == {1, 2}


def test_what_pickle_cannot_take_is_refused_in_the_same_way() -> None:
    with pytest.raises(NotSerializable, match="a lambda"):
        Codec("pickle", accept=["pickle"]).encode(lambda: None, what="a lambda")


def test_a_blob_names_its_own_content_type_and_outlives_a_change_of_the_setting() -> None:
    blob = Codec("json").encode([1], what="a list")
    assert Codec("pickle", accept=["json", "pickle"]).decode(blob) == [1]


def test_a_content_type_that_is_not_accepted_is_not_read() -> None:
    blob = Codec("pickle", accept=["pickle"]).encode([1], what="a list")
    with pytest.raises(ContentDisallowed):
        Codec("json").decode(blob)


def test_a_blob_may_come_back_as_a_memoryview() -> None:
    codec = Codec("json")
    assert codec.decode(memoryview(codec.encode("value", what="v"))) == "value"
