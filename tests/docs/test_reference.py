from __future__ import annotations

import inspect
import re
from dataclasses import fields

import pytest

from celery_lease import errors, signals
from celery_lease.codec import Codec
from celery_lease.lease import Lease
from celery_lease.local import MemoryBacking
from celery_lease.policy import LeasePolicy
from celery_lease.states import LeaseStatus, RunState, Step, Verb
from celery_lease.testing import plugin
from celery_lease.trigger import EPOCH_HEADER, RUN_HEADER, STORED_HEADER
from tests.docs import tables
from tests.docs.pages import page, rows

#: The word of the page for each step of the delivery table.
WORDS = {
    Step.CLAIM: "claim",
    Step.GO_ON: "go on",
    Step.DROP: "drop",
    Step.DEFER: "defer",
    Step.REPLAY: "replay",
    Step.TRIGGER: "trigger",
    Step.SUSPECT: "suspect",
    Step.RECLAIM: "reclaim",
    Step.EXPIRE: "expire",
    Step.ENQUEUE: "enqueue",
}


def deliveries() -> list[tuple[str, str]]:
    """(what it does, reason) of each row of the delivery table."""
    text = page("reference/delivery.md")
    found = rows(text, "what it finds", "what it does", "reason")
    return [(does.lower(), reason.strip("`")) for _, does, reason in found]


@pytest.mark.parametrize(
    ("name", "table"),
    [
        ("settings", tables.settings_table()),
        ("settings", tables.presets_table()),
        ("states", tables.transitions_table()),
    ],
    ids=["settings", "presets", "transitions"],
)
def test_a_table_of_the_reference_is_the_one_that_the_code_makes(name: str, table: str) -> None:
    assert f"\n\n{table}\n\n" in page(f"reference/{name}.md"), "python -m tests.docs.tables"


def test_the_settings_page_names_every_field_of_a_policy() -> None:
    text = page("reference/settings.md")
    sentence = text[text.index("`LeasePolicy` takes") :].partition("Three presets")[0]
    assert re.findall(r"`(\w+)`", sentence)[1:] == [field.name for field in fields(LeasePolicy)]


def test_the_states_page_names_every_state_and_status() -> None:
    text = page("reference/states.md")
    states = [state.strip("`") for state, *_ in rows(text, "state", "meaning", "who moves it on")]
    assert states == list(RunState)
    assert [status.strip("`") for status, _ in rows(text, "status", "meaning")] == list(LeaseStatus)


def test_the_error_page_draws_every_error_in_its_place() -> None:
    text = page("reference/errors.md")
    tree = text[text.index("```text") :].partition("\n```\n")[0]
    drawn = {}
    for line in tree.splitlines()[1:]:
        found = re.match(r"(?:[├└]── )?(\w+)", line)
        if found is None:
            continue
        if not line.startswith(("├", "└")):
            parent = found.group(1)
        drawn[found.group(1)] = parent
    defined = {
        name: getattr(errors, name).__bases__[0].__name__
        for name in errors.__all__
        if name not in {"LeaseError", "LeaseControl"}
    }
    assert drawn == {**defined, "LeaseError": "LeaseError", "LeaseControl": "LeaseControl"}


def test_the_error_page_says_where_every_error_is_met() -> None:
    text = page("reference/errors.md")
    met = {
        name
        for cell, *_ in rows(text, "error", "where you meet it", "what to do")
        for name in re.findall(r"`(\w+)`", cell)
    }
    leaves = {
        name
        for name in errors.__all__
        if issubclass(getattr(errors, name), errors.LeaseError) and name != "LeaseError"
    }
    assert met == leaves


def test_the_error_page_names_the_reasons_of_a_lost_lease() -> None:
    text = page("reference/errors.md")
    named = [cell.strip("`") for cell, *_ in rows(text, "reason", "meaning", "the message")]
    written = inspect.getdoc(errors.LeaseLost) or ""
    assert named == re.findall(r"``(\w+)``", written.partition("is one of")[2])


@pytest.mark.parametrize(("step", "reason"), sorted(tables.decisions()))
def test_the_delivery_table_has_each_decision_with_its_reason(step: Step, reason: str) -> None:
    assert [does for does, why in deliveries() if why == reason and WORDS[step] in does]


def test_the_delivery_table_has_no_reason_that_is_never_given() -> None:
    assert {why for _, why in deliveries()} == {reason for _, reason in tables.decisions()}


def test_the_delivery_page_names_the_headers_of_a_message() -> None:
    named = [
        cell.strip("`") for cell, _ in rows(page("reference/delivery.md"), "header", "meaning")
    ]
    assert named == [EPOCH_HEADER, RUN_HEADER, STORED_HEADER]


def test_the_lease_page_has_everything_that_a_lease_offers() -> None:
    named = {
        re.sub(r"\(.*", "", cell.strip("`"))
        for cell, _ in rows(page("reference/lease.md"), "name", "what it is")
    }
    assert named == {name for name in vars(Lease) if not name.startswith("_")}


def test_the_lease_page_names_the_http_headers() -> None:
    named = {cell.strip("`") for cell, _ in rows(page("reference/lease.md"), "header", "value")}
    lease = Lease(MemoryBacking("a-run", Codec))
    assert named == set(lease.headers)


def test_the_test_page_names_every_fixture() -> None:
    text = page("how-to/test-your-tasks.md")
    named = [cell.strip("`") for cell, _ in rows(text, "fixture", "what it gives")]
    offered = {name for name in vars(plugin) if name.startswith("strict_sqs")}
    assert set(named) == offered


def test_the_operators_page_names_signals_that_exist() -> None:
    text = page("how-to/operate.md")
    named = {cell.strip("`") for cell, _ in rows(text, "signal", "sent when")}
    assert named < set(signals.__all__)


def test_the_glossary_and_the_states_page_know_every_verb() -> None:
    text = page("reference/states.md")
    verbs = [cell.strip("`") for cell, *_ in rows(text, "verb", "who", "from", "to", "lease")]
    assert verbs == list(Verb)
