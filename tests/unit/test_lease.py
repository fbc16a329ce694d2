"""The handle that task code uses, on a lease that lives in memory."""

from __future__ import annotations

import pytest

from celery_lease import current_lease
from celery_lease.codec import Codec
from celery_lease.errors import DuplicateName, IllegalTransition, NotSerializable
from celery_lease.lease import Lease, bound, stage_key
from celery_lease.local import MemoryBacking


@pytest.fixture
def lease() -> Lease:
    return Lease(MemoryBacking("run-1", lambda: Codec("json")))


def test_restore_gives_the_default_until_something_was_saved(lease: Lease) -> None:
    assert lease.restore(0) == 0
    lease.checkpoint({"offset": 7}, progress=0.5)
    assert lease.restore(0) == {"offset": 7}


def test_a_checkpoint_of_none_is_a_checkpoint(lease: Lease) -> None:
    lease.checkpoint(None)
    assert lease.restore("default") is None


def test_a_stage_comes_back_in_its_decoded_form_also_the_first_time(lease: Lease) -> None:
    assert lease.stage("pair", lambda: (1, 2)) == [1, 2]


def test_a_stage_name_used_twice_is_refused_and_says_how_to_tell_rounds_apart(
    lease: Lease,
) -> None:
    lease.stage(("page", 1), lambda: 1)
    lease.stage(("page", 2), lambda: 2)
    with pytest.raises(DuplicateName, match=r"\('page', n\)"):
        lease.stage(("page", 1), lambda: 1)


def test_verbs_inside_a_stage_are_refused_at_once(lease: Lease) -> None:
    with pytest.raises(IllegalTransition, match="inside the stage 'outer'"):
        lease.stage("outer", lambda: lease.checkpoint(1))
    with pytest.raises(IllegalTransition, match="inside the stage 'outer2'"):
        lease.stage("outer2", lambda: lease.stage("inner", int))


def test_a_value_that_cannot_be_serialised_names_run_and_stage(lease: Lease) -> None:
    with pytest.raises(NotSerializable, match="stage 'odd'"):
        lease.stage("odd", object)
    with pytest.raises(NotSerializable, match="run-1"):
        lease.checkpoint(object())


@pytest.mark.parametrize("progress", [-0.1, 1.5])
def test_progress_is_a_fraction(lease: Lease, progress: float) -> None:
    with pytest.raises(ValueError, match="from 0 to 1"):
        lease.checkpoint(1, progress=progress)


def test_headers_carry_run_and_epoch(lease: Lease) -> None:
    assert lease.headers == {"X-Execution-Run": "run-1", "X-Execution-Fence": "1"}


def test_string_and_tuple_names_never_collide() -> None:
    names = ["page", ("page",), ("page", 1), '["page",1]', '["page"]', ("page", "1"), '"page"']
    assert len({stage_key(name) for name in names}) == len(names)


@pytest.mark.parametrize("name", ["", "x" * 256, ("x" * 300,)])
def test_names_that_do_not_fit_are_refused(name: str | tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="255 characters"):
        stage_key(name)


@pytest.mark.parametrize("name", [3, None, ["page"], (object(),)])
def test_names_of_other_types_are_refused(name: object) -> None:
    with pytest.raises(TypeError, match="stage name"):
        stage_key(name)  # type: ignore[arg-type]


def test_the_current_lease_is_the_innermost_and_goes_with_its_block(lease: Lease) -> None:
    inner = Lease(MemoryBacking("run-2", lambda: Codec("json")))
    with bound(lease):
        assert current_lease() is lease
        with bound(inner):
            assert current_lease() is inner
        assert current_lease() is lease
    with pytest.raises(LookupError):
        current_lease()
