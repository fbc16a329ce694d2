"""The background loop that heartbeat and reaper share."""

from __future__ import annotations

import threading

import pytest

from celery_lease.loop import Loop


def test_a_loop_goes_on_after_a_pass_that_failed(caplog: pytest.LogCaptureFixture) -> None:
    passes: list[int] = []
    third = threading.Event()

    def run_once() -> float:
        passes.append(1)
        if len(passes) == 1:
            raise RuntimeError("a bad tick")
        if len(passes) == 3:
            third.set()
        return 0.0

    loop = Loop("test", run_once, retry=0.0)
    loop.start()
    assert third.wait(5)
    loop.stop()
    assert "a bad tick" in caplog.text
    assert not loop.alive


def test_waking_a_loop_does_the_next_pass_now() -> None:
    passed = threading.Semaphore(0)

    def run_once() -> float:
        passed.release()
        return 3600.0

    loop = Loop("test", run_once)
    loop.start()
    assert passed.acquire(timeout=5)
    loop.wake()
    assert passed.acquire(timeout=5)
    loop.stop()


def test_stop_waits_for_the_pass_that_is_under_way() -> None:
    inside, go = threading.Event(), threading.Event()
    finished: list[bool] = []

    def run_once() -> float:
        inside.set()
        go.wait(5)
        finished.append(True)
        return 0.0

    loop = Loop("test", run_once)
    loop.start()
    assert inside.wait(5)
    stopper = threading.Thread(target=loop.stop)
    stopper.start()
    assert not finished
    go.set()
    stopper.join(5)
    assert finished == [True]
