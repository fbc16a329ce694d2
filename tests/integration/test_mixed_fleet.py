"""Workers with leases beside workers without, and what a revoked run tells."""

from __future__ import annotations

from tests.workers import Shop


def test_a_switched_off_worker_goes_on_with_a_run_that_began_under_a_lease(shop: Shop) -> None:
    """Its trigger carries an epoch: the run is claimed, and its checkpoint is not lost."""
    leased = shop.start("leased")[0]
    run = shop.send("steps", "step", 3)
    shop.entered(run)
    shop.open("step-0")
    leased.term()
    shop.event(run, "handed_off")
    leased.ended()
    shop.start("plain", lease_enabled=False)
    for step in range(1, 3):
        shop.open(f"step-{step}")
    assert shop.outcome(run) == ("SUCCESS", [3, 2])
    assert [note["start"] for note in shop.notes("body", run)] == [0, 1]
    assert shop.state(run) == "succeeded"


def test_a_revoked_run_is_told_to_its_errbacks_and_never_begins(shop: Shop) -> None:
    """Revoked while no worker is there; a late message replays REVOKED."""
    run = shop.send(
        "hold", "never", link=shop.signature("after"), link_error=shop.signature("mourn")
    )
    assert shop.store.revoke(run, "not wanted")
    shop.start("w1")
    shop.noted("mourn")
    shop.settled(run)
    assert shop.status(run) == "REVOKED"
    assert shop.bodies(run) == 0
    assert shop.notes("after") == []
