from __future__ import annotations

import inspect
import pickle

import pytest

from celery_lease import errors
from celery_lease.errors import HandOff, LeaseControl, LeaseError, LeaseLost, SchemaMissing

CLASSES = [getattr(errors, name) for name in errors.__all__]


@pytest.mark.parametrize("error", CLASSES)
def test_every_error_stands_in_the_tree_at_the_top_of_the_module(error: type) -> None:
    assert errors.__doc__ is not None
    assert error.__name__ in errors.__doc__


def test_every_error_of_the_module_is_exported() -> None:
    defined = {
        name
        for name, value in vars(errors).items()
        if inspect.isclass(value) and value.__module__ == errors.__name__
    }
    assert defined == set(errors.__all__)


@pytest.mark.parametrize("error", [one for one in CLASSES if issubclass(one, LeaseError)])
def test_an_errors_docstring_is_its_default_message(error: type[LeaseError]) -> None:
    assert error.__doc__ is not None
    assert str(error()) == error.__doc__.strip().splitlines()[0]
    assert str(error("another")) == "another"


@pytest.mark.parametrize("control", [LeaseControl, LeaseLost, HandOff])
def test_control_flow_passes_an_except_exception_in_a_task(control: type) -> None:
    assert issubclass(control, LeaseControl)
    assert not issubclass(control, Exception)


def test_a_lost_lease_names_run_epoch_and_reason() -> None:
    lost = LeaseLost("revoked", "a-run", 7)
    assert (lost.reason, lost.run_id, lost.epoch) == ("revoked", "a-run", 7)
    assert str(lost) == "lease of run a-run at epoch 7 lost: revoked"


@pytest.mark.parametrize(
    "error", [LeaseLost("stalled", "a-run", 2), HandOff(), SchemaMissing(), SchemaMissing("no")]
)
def test_an_error_survives_the_way_from_child_to_parent(error: BaseException) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)


def test_a_missing_schema_names_the_command_that_makes_it() -> None:
    assert "celery -A yourapp lease init-db" in str(SchemaMissing())
