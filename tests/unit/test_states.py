from __future__ import annotations

from dataclasses import replace

import pytest

from celery_lease.states import (
    LIVE,
    TERMINAL,
    TRANSITIONS,
    Decision,
    LeaseStatus,
    RunState,
    RunView,
    Step,
    Verb,
    decide,
    judge,
)

EPOCH = 4

#: A ready run at epoch 4 that is due and triggered; each test says what differs.
READY = RunView(
    dead_letter=False,
    state=RunState.READY,
    epoch=EPOCH,
    holder=None,
    attempt=0,
    untriggered=False,
    due_in=-1.0,
    overdue=False,
    settled=False,
    settle_in=0.0,
    lease_status=None,
    lease_left=0.0,
    grace_left=35.0,
    grace=35.0,
)
RUNNING = replace(
    READY,
    state=RunState.RUNNING,
    holder="holder",
    attempt=1,
    lease_status=LeaseStatus.ACTIVE,
    lease_left=60.0,
)
FINISHED = replace(READY, state=RunState.SUCCEEDED, holder="holder", settle_in=40.0)


def decided(
    view: RunView | None, expected: int = EPOCH, holder: str = "newcomer", **known: object
) -> Decision:
    return decide(view, expected=expected, holder=holder, **known)  # type: ignore[arg-type]


class TestTheTransitionTable:
    def test_has_one_row_for_every_verb(self) -> None:
        assert set(TRANSITIONS) == set(Verb)

    def test_names_somebody_who_may_do_it_in_every_row(self) -> None:
        assert all(row.who for row in TRANSITIONS.values())

    def test_leads_out_of_a_finished_run_only_by_an_operator_or_within_the_finished_states(
        self,
    ) -> None:
        for verb, row in TRANSITIONS.items():
            if row.sources & TERMINAL and not row.targets <= TERMINAL:
                assert row.who == "operator", verb

    def test_never_leads_out_of_success_except_by_raising_its_epoch(self) -> None:
        leaving = {
            verb
            for verb, row in TRANSITIONS.items()
            if RunState.SUCCEEDED in row.sources and row.targets - TERMINAL
        }
        assert leaving == {Verb.FENCE_ALL}

    def test_makes_a_run_running_by_a_claim_only(self) -> None:
        entering = {
            verb
            for verb, row in TRANSITIONS.items()
            if RunState.RUNNING in row.targets and RunState.RUNNING not in row.sources
        }
        assert entering == {Verb.CLAIM}

    def test_leaves_no_live_lease_when_it_leaves_running(self) -> None:
        for verb, row in TRANSITIONS.items():
            if RunState.RUNNING in row.sources and RunState.RUNNING not in row.targets:
                assert row.lease is not None, verb
                assert row.lease not in LIVE, verb

    def test_reaches_every_state_but_waiting_from_nothing(self) -> None:
        reached: set[RunState | None] = {None}
        while True:
            found = {
                target
                for row in TRANSITIONS.values()
                if row.sources & reached
                for target in row.targets
                if target in reached or row.who != "operator" or target is not RunState.WAITING
            } - {RunState.WAITING}
            if found <= reached:
                break
            reached |= found
        assert reached == {None, *RunState} - {RunState.WAITING}

    def test_lets_every_unfinished_state_end(self) -> None:
        ends: set[RunState | None] = set(TERMINAL)
        for _ in RunState:
            ends |= {
                source
                for row in TRANSITIONS.values()
                if row.targets & ends
                for source in row.sources
            }
        assert ends >= set(RunState)


class TestADeliveryOfARunWithoutARow:
    def test_claims_it_at_epoch_0(self) -> None:
        assert decided(None, 0) == Decision(Step.CLAIM, "new")

    def test_registers_it_when_it_may_not_start_now(self) -> None:
        assert decided(None, 0, runnable=False).step is Step.ENQUEUE

    @pytest.mark.parametrize("receives", [1, 2, 3, None])
    def test_is_deferred_when_it_expects_an_epoch(self, receives: int | None) -> None:
        decision = decided(None, 2, receives=receives)
        assert (decision.step, decision.reason) == (Step.DEFER, "unknown_run")
        assert decision.delay > 0

    def test_is_dropped_after_three_deferrals(self) -> None:
        assert decided(None, 2, receives=4) == Decision(Step.DROP, "unknown_run")

    def test_is_deferred_when_the_message_holds_no_arguments(self) -> None:
        assert decided(None, 0, stored=True, receives=1).step is Step.DEFER
        assert decided(None, 0, stored=True, receives=4).step is Step.DROP


class TestADeliveryFromTheFuture:
    """It expects an epoch that the store has not given out, as after a failover."""

    @pytest.mark.parametrize("view", [READY, RUNNING, FINISHED])
    def test_is_deferred_then_dropped_whatever_the_state(self, view: RunView) -> None:
        assert decided(view, EPOCH + 1, receives=3).step is Step.DEFER
        assert decided(view, EPOCH + 1, receives=4) == Decision(Step.DROP, "unknown_run")


@pytest.mark.parametrize("state", sorted(TERMINAL))
class TestADeliveryOfAFinishedRun:
    def test_is_dropped_when_it_is_settled(self, state: RunState) -> None:
        view = replace(FINISHED, state=state, settled=True)
        assert decided(view) == Decision(Step.DROP, "finished")

    def test_is_deferred_while_somebody_delivers_its_outcome(self, state: RunState) -> None:
        view = replace(FINISHED, state=state, settle_in=40.0)
        assert decided(view) == Decision(Step.DEFER, "settling", 40.0)

    def test_replays_the_outcome_that_nobody_delivered(self, state: RunState) -> None:
        view = replace(FINISHED, state=state, settle_in=-0.1)
        assert decided(view) == Decision(Step.REPLAY, "unsettled")

    def test_replays_for_an_old_trigger_too(self, state: RunState) -> None:
        view = replace(FINISHED, state=state, settle_in=-0.1)
        assert decided(view, 0).step is Step.REPLAY


@pytest.mark.parametrize("state", [RunState.WAITING, RunState.PARKED])
def test_a_delivery_of_a_run_that_needs_somebody_is_dropped(state: RunState) -> None:
    assert decided(replace(READY, state=state)) == Decision(Step.DROP, state.value)


def test_a_delivery_of_a_run_in_a_newer_releases_state_is_left_to_that_release() -> None:
    for epoch in (0, EPOCH, EPOCH + 1):
        view = replace(READY, state="frozen")
        assert decided(view, epoch) == Decision(Step.DROP, "unknown_state")


class TestADeliveryOfAReadyRun:
    def test_of_an_older_epoch_sends_the_trigger_that_nobody_has_sent(self) -> None:
        assert decided(replace(READY, untriggered=True), EPOCH - 1).step is Step.TRIGGER

    def test_of_an_older_epoch_is_dropped_once_the_trigger_is_on_its_way(self) -> None:
        assert decided(READY, EPOCH - 1) == Decision(Step.DROP, "stale")

    def test_is_dropped_when_it_comes_too_early(self) -> None:
        assert decided(replace(READY, due_in=0.1)) == Decision(Step.DROP, "too_early")

    def test_expires_it_when_celerys_expires_has_passed(self) -> None:
        view = replace(READY, epoch=0, overdue=True)
        assert decided(view, 0) == Decision(Step.EXPIRE, "expired")

    def test_claims_it_at_its_epoch(self) -> None:
        assert decided(READY) == Decision(Step.CLAIM, "ready")

    def test_claims_it_at_the_very_moment_it_is_due(self) -> None:
        assert decided(replace(READY, due_in=0.0)).step is Step.CLAIM


class TestADeliveryOfARunningRun:
    def test_of_the_same_holder_goes_on(self) -> None:
        assert decided(RUNNING, holder="holder") == Decision(Step.GO_ON, "repeat")

    def test_of_the_same_holder_goes_on_while_it_is_only_suspected(self) -> None:
        view = replace(RUNNING, lease_status=LeaseStatus.SUSPECT, grace_left=-1.0)
        assert decided(view, holder="holder").step is Step.GO_ON

    @pytest.mark.parametrize("ended", sorted(set(LeaseStatus) - LIVE))
    def test_of_the_same_holder_does_not_go_on_once_its_lease_ended(
        self, ended: LeaseStatus
    ) -> None:
        assert decided(replace(RUNNING, lease_status=ended), holder="holder").step is not Step.GO_ON

    def test_of_an_epoch_before_the_last_trigger_is_dropped(self) -> None:
        assert decided(RUNNING, EPOCH - 2) == Decision(Step.DROP, "stale")

    @pytest.mark.parametrize("expected", [EPOCH - 1, EPOCH])
    @pytest.mark.parametrize("receives", [1, 2, None])
    def test_is_a_second_watch_dog_and_deferred_beyond_the_hand_over(
        self, expected: int, receives: int | None
    ) -> None:
        decision = decided(RUNNING, expected, receives=receives, sweep=10.0)
        assert decision == Decision(Step.DEFER, "duplicate", 60.0 + 35.0 + 10.0)

    @pytest.mark.parametrize("receives", [3, 4, 100])
    def test_is_never_dropped_where_it_holds_its_group_back(self, receives: int) -> None:
        decision = decided(RUNNING, receives=receives, in_group=True)
        assert (decision.step, decision.reason) == (Step.DEFER, "duplicate")

    @pytest.mark.parametrize("receives", [3, 4, 100])
    def test_is_dropped_from_the_third_receive_on(self, receives: int) -> None:
        assert decided(RUNNING, receives=receives) == Decision(Step.DROP, "duplicate")

    def test_is_dropped_where_the_broker_cannot_hide_a_message(self) -> None:
        assert decided(RUNNING, receives=1, can_defer=False) == Decision(Step.DROP, "duplicate")

    @pytest.mark.parametrize("expected", [0, EPOCH - 1, EPOCH])
    def test_suspects_an_expired_lease_and_is_deferred_for_the_grace(self, expected: int) -> None:
        view = replace(RUNNING, lease_left=0.0)
        assert decided(view, expected) == Decision(Step.SUSPECT, "expired", 35.0)

    def test_waits_for_the_rest_of_a_suspects_grace(self) -> None:
        view = replace(RUNNING, lease_status=LeaseStatus.SUSPECT, grace_left=12.0)
        assert decided(view) == Decision(Step.DEFER, "suspect", 12.0)

    def test_reclaims_a_suspect_beyond_its_grace(self) -> None:
        view = replace(RUNNING, lease_status=LeaseStatus.SUSPECT, grace_left=0.0)
        assert decided(view) == Decision(Step.RECLAIM, "suspect")


class TestTheGuard:
    @staticmethod
    def judged(**changes: object) -> tuple[RunState, str]:
        known: dict[str, object] = {
            "attempt": 1,
            "max_attempts": 5,
            "recoveries": 1,
            "max_recoveries": 50,
            "on_reclaim": "resume",
        }
        return judge(**{**known, **changes})  # type: ignore[arg-type]

    @pytest.mark.parametrize("policy", ["resume", "restart"])
    def test_lets_the_run_go_on(self, policy: str) -> None:
        assert self.judged(on_reclaim=policy)[0] is RunState.READY

    def test_parks_a_run_whose_policy_asks_a_person(self) -> None:
        assert self.judged(on_reclaim="ask")[0] is RunState.PARKED

    def test_fails_a_run_at_its_last_attempt_and_names_the_limit(self) -> None:
        assert self.judged(attempt=4)[0] is RunState.READY
        state, reason = self.judged(attempt=5)
        assert state is RunState.FAILED
        assert "5 attempts" in reason
        assert "max_attempts" in reason

    def test_fails_a_run_at_its_last_recovery_whatever_progress_it_made(self) -> None:
        assert self.judged(attempt=0, recoveries=49)[0] is RunState.READY
        state, reason = self.judged(attempt=0, recoveries=50)
        assert state is RunState.FAILED
        assert "max_recoveries" in reason

    def test_counts_attempts_before_it_asks_a_person(self) -> None:
        assert self.judged(attempt=5, on_reclaim="ask")[0] is RunState.FAILED
