"""Every epoch guard has a test that fails without it.

Each guard is taken out of a copy of the library, one at a time, and the tests named for it
run on that copy: at least one has to fail. ``make mutation`` runs this; it is slow.

A condition is not deleted but made always true, so that a mutant still takes its parameters
and fails for its missing guard only.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HOLDER = "tests/conformance/test_store_holder.py"
CLAIMS = "tests/conformance/test_store_claims.py"
RECOVERY = "tests/conformance/test_store_recovery.py"
RENEWALS = "tests/conformance/test_store_renewals.py"
OUTBOX = "tests/conformance/test_store_outbox.py"
OPERATOR = "tests/conformance/test_store_operator.py"
STATEMENTS = "tests/conformance/test_store_statements.py"
HAND_OVER = "tests/races/test_hand_over.py"
RACING_CLAIMS = "tests/races/test_claims.py"

_OFF = '__import__("sqlalchemy").or_({}, __import__("sqlalchemy").text("1 = 1"))'
_NEVER = '__import__("sqlalchemy").and_({}, __import__("sqlalchemy").text("1 = 0"))'


@dataclass(frozen=True)
class Guard:
    """A condition, where it stands, and the test that needs it."""

    name: str
    file: str
    #: Text just before the condition, which makes its place unique.
    after: str
    condition: str
    #: A file, and parts of the names of its tests.
    killed_by: str
    #: What stands in its place; ``{}`` is the condition itself.
    instead: str = _OFF

    def mutate(self, source: str) -> str:
        """``source`` without the guard."""
        start = source.index(self.after) + len(self.after)
        place = source.index(self.condition, start)
        changed = self.instead.format(self.condition)
        return source[:place] + changed + source[place + len(self.condition) :]


def _in_guards(function: str, condition: str, killed_by: str, instead: str = _OFF) -> Guard:
    name = f"{function}: {condition}"
    return Guard(name, "guards.py", f"def {function}(", condition, killed_by, instead)


TRANSITIONS = "tests/conformance/test_store_transitions.py"
BY_ITSELF = f"{STATEMENTS}::test_what_a_holder_writes_needs"
REFUSED = f"{HOLDER}::TestAHolderVerbIsRefused::"
GUARDS = [
    _in_guards(
        "this_run",
        'run.c.run_id == p("run_id")',
        f"{CLAIMS}::TestARepeatedClaim::test_by_a_holder_that_has_another_run",
    ),
    _in_guards("held", 'run.c.epoch == p("epoch")', REFUSED + "test_under_an_older_epoch"),
    _in_guards(
        "held",
        'run.c.holder == p("holder")',
        REFUSED + "test_under_the_right_epoch_by_another_holder",
    ),
    _in_guards(
        "held",
        "run.c.state == RunState.RUNNING",
        REFUSED + "test_after_it_was_reclaimed_though_nobody_has_claimed_since",
    ),
    _in_guards(
        "live",
        "lease.c.status.in_([_written(status) for status in sorted(LIVE)])",
        f"{RENEWALS}::TestARenewal::test_never_revives_a_lease_that_was_handed_over",
    ),
    _in_guards(
        "this_lease",
        'lease.c.run_id == p("run_id")',
        f"{STATEMENTS}::TestEndingALease::test_of_a_dead_child_needs_run_epoch_and_holder",
    ),
    _in_guards(
        "this_lease",
        'lease.c.epoch == p("epoch")',
        f"{RECOVERY}::TestSuspicion::test_of_another_epoch_does_nothing",
    ),
    _in_guards(
        "its_lease",
        'lease.c.holder == p("holder")',
        f"{RECOVERY}::TestAnAbandonment::test_by_anybody_else_does_nothing",
    ),
    _in_guards(
        "its_lease",
        "live()",
        f"{HOLDER}::test_a_write_without_a_live_lease_is_refused_and_changes_nothing",
    ),
    _in_guards(
        "not_overdue",
        "run.c.expires.is_(None)",
        f"{CLAIMS}::test_of_a_registered_run_keeps_its_envelope",
        _NEVER,
    ),
    _in_guards(
        "not_overdue",
        "run.c.epoch > 0",
        f"{CLAIMS}::TestAClaimIsRefused::test_not_after_celerys_expires_once_it_was_claimed",
        _NEVER,
    ),
    _in_guards(
        "not_overdue",
        "run.c.expires > now()",
        f"{CLAIMS}::TestAClaimIsRefused::test_after_celerys_expires",
    ),
    _in_guards(
        "claimable",
        "run.c.state == RunState.READY",
        f"{TRANSITIONS}::claim::parked",
    ),
    _in_guards(
        "claimable",
        'run.c.epoch == p("expected")',
        f"{CLAIMS}::TestAClaimIsRefused::test_at_another_epoch_than_the_runs",
    ),
    _in_guards(
        "claimable",
        "or_(run.c.not_before.is_(None), due(run.c.not_before))",
        f"{CLAIMS}::TestAClaimIsRefused::test_before_its_time",
    ),
    _in_guards(
        "claimable",
        "not_overdue()",
        f"{CLAIMS}::TestAClaimIsRefused::test_after_celerys_expires",
    ),
    *(
        Guard(
            f"{statement}: held()",
            "holder.py",
            place,
            "held()",
            killed_by,
        )
        for statement, place, killed_by in (
            ("CHECKPOINT", "\nCHECKPOINT =", f"{BY_ITSELF}::CHECKPOINT"),
            ("CHECK", "\nCHECK =", f"{REFUSED}another_holder::check"),
            ("STAGE_DONE", "\nSTAGE_DONE =", f"{BY_ITSELF}::STAGE_DONE"),
            ("HAND_OFF, POSTPONE, PARK", "def _leave(", f"{BY_ITSELF}::HAND_OFF"),
            ("OUTCOME", "\nOUTCOME =", f"{BY_ITSELF}::OUTCOME"),
        )
    ),
    Guard(
        "FENCE: held()",
        "holder.py",
        "\nFENCE =",
        "held()",
        f"{HOLDER}::TestWithinTheCallersTransaction",
    ),
    Guard(
        "END_IN_ONE: the run has its live lease",
        "holder.py",
        "alive = select(lease.c.run_id).where(",
        "its_lease()",
        f"{HOLDER}::test_a_write_without_a_live_lease_is_refused_and_changes_nothing",
    ),
    Guard(
        "CLAIM: skips a busy run",
        "claims.py",
        "def _single(",
        "skip_locked=True",
        f"{RACING_CLAIMS}::test_a_claim_does_not_wait_for_a_run_that_is_busy",
        "skip_locked=False",
    ),
    Guard(
        "RENEW: skips a locked lease",
        "leases.py",
        "def _renew_in_one(",
        "skip_locked=True",
        f"{HAND_OVER}::TestNobodyWaitsForABusyRow::test_a_renewal_skips_a_locked_lease",
        "skip_locked=False",
    ),
    Guard(
        "RENEW_MANY: live()",
        "leases.py",
        "RENEW_MANY =",
        "live()",
        f"{RENEWALS}::TestARenewal::test_never_revives_a_lease_that_was_handed_over",
    ),
    Guard(
        "SUSPECT: active",
        "leases.py",
        "_EXPIRED = and_(",
        "lease.c.status == ACTIVE",
        f"{RECOVERY}::TestSuspicion::test_falls_once",
    ),
    Guard(
        "SUSPECT: expired",
        "leases.py",
        "_EXPIRED = and_(",
        "due(lease.c.expires_at)",
        f"{RECOVERY}::TestSuspicion::test_falls_on_an_expired_lease_only",
    ),
    Guard(
        "SUSPECT: skips a lease that is being renewed",
        "leases.py",
        "LOCK_EXPIRED =",
        "skip_locked=True",
        f"{HAND_OVER}::TestNobodyWaitsForABusyRow::test_a_reaper_passes_by",
        "skip_locked=False",
    ),
    Guard(
        "LOCK_SKIP: skips a busy run",
        "runs.py",
        "LOCK_SKIP =",
        "skip_locked=True",
        f"{HAND_OVER}::TestNobodyWaitsForABusyRow::test_a_reaper_passes_by",
        "skip_locked=False",
    ),
    Guard(
        "RECLAIM_LEASE: its epoch",
        "leases.py",
        "RECLAIM_LEASE =",
        "this_lease()",
        f"{STATEMENTS}::TestEndingALease::test_of_a_suspect_needs_one",
    ),
    Guard(
        "RECLAIM_LEASE: suspect",
        "leases.py",
        "RECLAIM_LEASE =",
        "lease.c.status == SUSPECT",
        f"{STATEMENTS}::TestEndingALease::test_of_a_suspect_needs_one",
    ),
    Guard(
        "RECLAIM_LEASE: beyond its grace",
        "leases.py",
        "RECLAIM_LEASE =",
        'due(lease.c.suspect_at + p("grace", Double))',
        f"{RECOVERY}::TestAReclaim::test_waits_for_the_grace_counted_from_the_suspicion",
    ),
    Guard(
        "ABANDON_LEASE: its_lease()",
        "leases.py",
        "ABANDON_LEASE =",
        "its_lease()",
        f"{RECOVERY}::TestAnAbandonment::test_by_anybody_else_does_nothing",
    ),
    Guard(
        "END_LEASE: live()",
        "leases.py",
        "END_LEASE =",
        "live()",
        f"{STATEMENTS}::TestEndingALease::test_leaves_the_history_of_earlier_leases_as_it_is",
    ),
    *(
        Guard(f"{statement}: {condition}", "runs.py", f"\n{statement} =", condition, killed_by)
        for statement, condition, killed_by in (
            (
                "HAND_OVER",
                'run.c.epoch == p("epoch")',
                f"{STATEMENTS}::TestHandOver::test_needs_the_epoch_that_was_seen",
            ),
            (
                "HAND_OVER",
                "run.c.state == RunState.RUNNING",
                f"{STATEMENTS}::TestHandOver::test_needs_a_running_run",
            ),
            (
                "EXPIRE",
                "run.c.state == RunState.READY",
                f"{STATEMENTS}::TestAnExpiry::test_happens_once",
            ),
            (
                "EXPIRE",
                "~not_overdue()",
                f"{RECOVERY}::TestASweep::test_leaves_a_run_alone_that_expired_after",
            ),
            (
                "REVOKE",
                "run.c.finished_at.is_(None)",
                f"{STATEMENTS}::TestAnOutcome::test_of_a_finished_run_is_not_revoked",
            ),
            (
                "RESUME",
                "run.c.state.in_([RunState.PARKED, RunState.FAILED, RunState.REVOKED])",
                f"{OPERATOR}::TestResuming::test_a_run_in_another_state_names_that_state",
            ),
            (
                "RESUME",
                "run.c.envelope.is_not(None)",
                f"{OPERATOR}::TestResuming::test_a_run_without_envelope_says_so",
            ),
            (
                "SETTLE",
                'run.c.holder == p("holder")',
                f"{RENEWALS}::TestSettling::test_by_a_holder_that_lost_the_delivery",
            ),
            (
                "SETTLE",
                "run.c.state.in_(_TERMINAL)",
                f"{TRANSITIONS}::settle",
            ),
            (
                "SETTLE",
                "run.c.settled_at.is_(None)",
                f"{RENEWALS}::TestSettling::test_twice_keeps_the_first_time",
            ),
            (
                "EXTEND_SETTLE",
                'run.c.holder == p("holder")',
                f"{RENEWALS}::TestSettling::test_does_not_move_on_for_anybody_else",
            ),
            (
                "EXTEND_SETTLE",
                "run.c.state.in_(_TERMINAL)",
                f"{STATEMENTS}::TestAnOutcome::test_is_kept_back_while_the_run_is_running",
            ),
            (
                "EXTEND_SETTLE",
                "run.c.settled_at.is_(None)",
                f"{STATEMENTS}::TestAnOutcome::test_is_kept_back_no_more_once_it_is_settled",
            ),
            (
                "REPLAY",
                "run.c.state.in_(_TERMINAL)",
                f"{STATEMENTS}::TestAnOutcome::test_is_replayed_of_a_finished_run_only",
            ),
            (
                "REPLAY",
                "run.c.settled_at.is_(None)",
                f"{STATEMENTS}::TestAnOutcome::test_is_replayed_until_it_is_settled",
            ),
            (
                "REPLAY",
                "due(run.c.settle_by)",
                f"{OUTBOX}::TestAReplay::test_has_one_winner_until_its_time_is_over",
            ),
            (
                "UNDELIVERABLE",
                "run.c.settled_at.is_(None)",
                f"{STATEMENTS}::TestAnOutcome::test_is_undeliverable_only_if",
            ),
            (
                "UNDELIVERABLE",
                "run.c.state.in_(_TERMINAL)",
                f"{STATEMENTS}::TestAnOutcome::test_is_undeliverable_only_if",
            ),
            (
                "RESERVE",
                'run.c.epoch == p("epoch")',
                f"{OUTBOX}::TestAReservation::test_of_another_epoch_is_refused",
            ),
            (
                "RESERVE",
                "run.c.envelope.is_not(None)",
                f"{STATEMENTS}::TestATrigger::test_without_an_envelope_is_not_reserved",
            ),
            (
                "RESERVE",
                "due(run.c.trigger_due)",
                f"{OUTBOX}::TestAReservation::test_is_for_one_sender",
            ),
            (
                "SENT",
                'run.c.epoch == p("epoch")',
                f"{OUTBOX}::TestASentTrigger::test_says_nothing_about_a_run_that_was_claimed",
            ),
            (
                "SENT",
                'run.c.triggers == p("triggers")',
                f"{OUTBOX}::TestASentTrigger::test_counts_once",
            ),
            (
                "SENT",
                "run.c.trigger_due.is_not(None)",
                f"{OUTBOX}::TestASentTrigger::test_says_nothing_about_an_outcome",
            ),
            (
                "EMPTY_RUN",
                "run.c.settled_at.is_not(None)",
                f"{STATEMENTS}::TestAnOutcome::test_is_emptied_only_once_it_is_settled",
            ),
            (
                "DROP_LEASES",
                "~live()",
                f"{STATEMENTS}::TestATombstone::test_keeps_a_lease_that_has_not_ended",
            ),
            (
                "FORGET",
                'run.c.settled_at < now() - p("age", Double)',
                f"{OPERATOR}::TestPruning::test_leaves_a_tombstone",
            ),
            (
                "FORGET",
                "run.c.envelope.is_(None)",
                f"{STATEMENTS}::test_a_tombstone_that_holds_anything_yet",
            ),
            (
                "FORGET",
                "run.c.outcome.is_(None)",
                f"{STATEMENTS}::test_a_tombstone_that_holds_anything_yet",
            ),
        )
    ),
]


#: What shows that a mutant did not run at all.
BROKEN = ("CompileError", "StatementError", "ProgrammingError", "SyntaxError", "ImportError")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the library and its tests."""
    leave = shutil.ignore_patterns("__pycache__", "integration", "acceptance", "mutation")
    for name in ("celery_lease", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=leave)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def run_tests(folder: Path, killed_by: str) -> subprocess.CompletedProcess[str]:
    """Run some tests of the copy against the copy."""
    file, *names = killed_by.split("::")
    command = [sys.executable, "-m", "pytest", file, "-k", " and ".join(names)]
    command += ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "-o", "addopts="]
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTEST_", "PYTHONPATH"))
    }
    return subprocess.run(
        [*command, "--import-mode=importlib"],
        cwd=folder,
        env={**environment, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_an_unchanged_copy_passes(copy: Path) -> None:
    done = run_tests(copy, f"{STATEMENTS}::test")
    assert done.returncode == 0, done.stdout + done.stderr
    assert str(ROOT / "celery_lease") not in done.stdout


@pytest.mark.parametrize("guard", GUARDS, ids=lambda guard: guard.name)
def test_a_guard_has_a_test_that_fails_without_it(copy: Path, guard: Guard) -> None:
    file = copy / "celery_lease" / "statements" / guard.file
    file.write_text(guard.mutate(file.read_text()))
    done = run_tests(copy, guard.killed_by)
    assert done.returncode == 1, f"nobody missed it:\n{done.stdout[-3000:]}{done.stderr[-1000:]}"
    assert not any(word in done.stdout for word in BROKEN), done.stdout[-3000:]
