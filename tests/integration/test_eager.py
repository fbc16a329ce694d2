"""Eager and direct calls: what Celery does with a plain task, no broker, and one run each."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from celery import Celery, Task, chord, group
from celery.exceptions import Ignore, Reject, TaskRevokedError

from celery_lease import LeasedTask, LeaseLost, LeasePolicy, Runs, current_lease
from celery_lease.application import Leasing
from tests.integration.guest import Guest, app_of, leased

#: Nothing listens there: whoever asks a broker fails.
NO_BROKER = "amqp://nobody@127.0.0.1:1//"


class Pair:
    """The same tasks, plain or leased, and what their bodies and hooks have seen."""

    def __init__(self, folder: Path, base: type[Any], **settings: Any) -> None:
        self.app = Celery(
            f"eager-{folder.name}-{base.__name__}", broker=NO_BROKER, backend="cache+memory://"
        )
        self.app.conf.update(
            lease_store_url=f"sqlite:///{folder / 'leases.sqlite3'}",
            broker_transport_options={"max_retries": 0},
            task_publish_retry=False,
        )
        self.app.conf.update(settings)
        self.app.set_current()
        self.log: list[Any] = []
        self.tasks: Any = {}
        self._base = self._with_hooks(base)
        self._define_outcomes()
        self._define_retries()
        self._define_others()

    def _with_hooks(self, base: type[Any]) -> type[Any]:
        log = self.log

        class Hooked(base):  # type: ignore[misc]  # any base
            abstract = True

            def before_start(self, *args: Any) -> None:
                log.append(("before_start", args[1:]))

            def on_success(self, value: Any, *_: Any) -> None:
                log.append(("on_success", value))

            def on_failure(self, exc: Any, *_: Any) -> None:
                log.append(("on_failure", repr(exc)))

            def on_retry(self, exc: Any, *_: Any) -> None:
                log.append(("on_retry", repr(exc)))

            def after_return(self, status: Any, value: Any, *_: Any) -> None:
                log.append(("after_return", status, repr(value)))

        return Hooked

    def _task(self, **options: Any) -> Callable[[Any], Any]:
        def register(body: Any) -> Any:
            name = body.__name__
            options.update(base=self._base, shared=False, bind=True, name=f"t.{name}")
            self.tasks[name] = self.app.task(**options)(body)
            return self.tasks[name]

        return register

    def _define_outcomes(self) -> None:
        log, task = self.log, self._task

        @task()
        def add(self: Any, *numbers: int) -> int:
            log.append(("add", numbers))
            return sum(numbers)

        @task()
        def total(self: Any, numbers: list[int]) -> int:
            return sum(numbers)

        @task()
        def fail(self: Any, *args: Any) -> None:
            raise ValueError(f"no {args}")

        @task()
        def ends(self: Any, how: str) -> None:
            log.append(("ends", how))
            raise {
                "ignore": Ignore("i"),
                "reject": Reject("r", requeue=False),
                "requeue": Reject("r", requeue=True),
            }[how]

    def _define_retries(self) -> None:
        log, task = self.log, self._task

        @task()
        def again(self: Any, times: int, text: str = "a") -> str:
            log.append(("again", text, self.request.retries))
            if self.request.retries < times:
                raise self.retry(countdown=0, kwargs={"text": text + "b"})
            return text

        @task(max_retries=2)
        def hopeless(self: Any) -> None:
            log.append(("hopeless", self.request.retries))
            raise self.retry(countdown=0, exc=KeyError("k"))

        @task(autoretry_for=(OSError,), max_retries=2, default_retry_delay=0, retry_backoff=False)
        def automatic(self: Any, failures: int) -> int:
            log.append(("automatic", self.request.retries))
            if self.request.retries < failures:
                raise OSError("not yet")
            return failures

        @task()
        def lenient(self: Any) -> str:
            if self.request.retries == 0:
                self.retry(countdown=0, throw=False)
                return "went on"
            return "again"

    def _define_others(self) -> None:
        task, tasks = self._task, self.tasks
        add, total = tasks["add"], tasks["total"]

        @task()
        def replaced(self: Any, form: str) -> Any:
            forms = {
                "task": add.si(1, 2),
                "chain": add.si(1, 2) | add.s(3) | add.s(4),
                "chord": chord([add.si(1), add.si(2)], total.s()),
                "retried": tasks["again"].si(1),
                "nested": tasks["replaced"].si("task"),
                "failing": tasks["fail"].si(1),
            }
            return self.replace(forms[form])

        @task()
        def sees(self: Any, *args: Any, **kwargs: Any) -> Any:
            known = self.request
            return [
                known.is_eager,
                known.called_directly,
                list(known.args or ()),
                known.kwargs,
                known.retries,
                known.id,
                known.headers,
                known.delivery_info,
            ]

        @task()
        def calls(self: Any, how: str) -> Any:
            if how == "directly":
                return add(1, 2)
            return add.apply((1, 2)).get(disable_sync_subtasks=False)

        @task()
        def gives_back(self: Any, anything: Any) -> Any:
            return anything

        @task()
        def reports(self: Any) -> str:
            self.update_state(state="PROGRESS", meta={"done": 1})
            return "done"


def _applied(task: str, *args: Any, **options: Any) -> Callable[[Pair], Any]:
    def call(pair: Pair) -> Any:
        return pair.tasks[task].apply(args, task_id="x", **options)

    return call


def _delayed(task: str, *args: Any) -> Callable[[Pair], Any]:
    return lambda pair: pair.tasks[task].delay(*args)


def _composed(form: Callable[[Any], Any]) -> Callable[[Pair], Any]:
    return lambda pair: form({name: task.s for name, task in pair.tasks.items()}).apply()


APPLIED = {
    "a result": _applied("add", 1, 2),
    "an error": _applied("fail", 1),
    "an error that is thrown": _applied("fail", 1, throw=True),
    "a retry with new arguments": _applied("again", 2),
    "retries used up": _applied("hopeless"),
    "an automatic retry": _applied("automatic", 1),
    "automatic retries used up": _applied("automatic", 9),
    "a retry that is not thrown": _applied("lenient"),
    "replaced by a task": _applied("replaced", "task"),
    "replaced by a chain": _applied("replaced", "chain"),
    "replaced by a chord": _applied("replaced", "chord"),
    "replaced by one that retries": _applied("replaced", "retried"),
    "replaced by one that fails": _applied("replaced", "failing"),
    "replaced by one that is replaced": _applied("replaced", "nested"),
    "ignored": _applied("ends", "ignore"),
    "rejected": _applied("ends", "reject"),
    "rejected to be tried again": _applied("ends", "requeue"),
    "the request": _applied("sees", 1, headers={"own": 1}),
    "a direct call in the body": _applied("calls", "directly"),
    "an eager call in the body": _applied("calls", "eagerly"),
    "what no serializer takes": _applied("gives_back", len),
    "a state of one's own": _applied("reports"),
    "a chain": _composed(
        lambda t: t["add"](1, 2) | t["add"](3) | t["again"](0).set(immutable=True)
    ),
    "a chain that fails": _composed(lambda t: t["add"](1, 2) | t["fail"]() | t["add"](1)),
    "a group": _composed(lambda t: group(t["add"](n, 1) for n in range(3))),
    "a chord": _composed(lambda t: chord([t["add"](n, 1) for n in range(3)], t["total"]())),
}
DELAYED = {
    "a result": _delayed("add", 1, 2),
    "an error": _delayed("fail", 1),
    "a retry": _delayed("again", 1),
    "retries used up": _delayed("hopeless"),
    "callbacks": lambda pair: pair.tasks["add"].apply_async(
        (1, 2), link=[pair.tasks["add"].s(3), pair.tasks["add"].s(4)], task_id="x"
    ),
    "an errback": lambda pair: pair.tasks["fail"].apply_async(
        (1,), link_error=pair.tasks["add"].si(9), task_id="x"
    ),
    "a chain": lambda pair: (pair.tasks["add"].s(1, 2) | pair.tasks["add"].s(3)).delay(),
    "a group": lambda pair: group(pair.tasks["add"].s(n, 1) for n in range(3)).delay(),
    "a chord": lambda pair: chord([pair.tasks["add"].s(n, 1) for n in range(3)])(
        pair.tasks["total"].s()
    ),
}


def _outcome(pair: Pair, call: Callable[[Pair], Any]) -> Any:
    try:
        result = call(pair)
    except Exception as exc:  # noqa: BLE001 - compared
        told: Any = ["raised", repr(exc)]
    else:
        told = [type(result).__name__, getattr(result, "state", None), _value(result)]
    return re.sub(r"[0-9a-f]{8}-[0-9a-f-]{27}", "ID", repr([told, pair.log]))


def _value(result: Any) -> Any:
    try:
        return result.get(disable_sync_subtasks=False)
    except Exception as exc:  # noqa: BLE001 - compared
        return repr(exc)


def _compare(folder: Path, call: Callable[[Pair], Any], **settings: Any) -> None:
    plain = _outcome(Pair(folder, Task, **settings), call)
    pair = Pair(folder, LeasedTask, **settings)
    assert _outcome(pair, call) == plain
    # Nothing is left to do, but what the caller was told to try again.
    to_come = {run.state for run in Runs(pair.app).list(unsettled=True)}
    put_off = re.search(r"'raised', .Retry\(|\('ends', 'requeue'\)", plain)
    assert to_come == ({"ready"} if put_off else set())


@pytest.mark.parametrize("call", APPLIED.values(), ids=APPLIED.keys())
@pytest.mark.parametrize("propagates", [False, True], ids=["", "propagates"])
def test_apply_does_with_a_leased_task_what_it_does_with_a_plain_one(
    tmp_path: Path, call: Callable[[Pair], Any], propagates: bool
) -> None:
    _compare(tmp_path, call, task_eager_propagates=propagates)


@pytest.mark.parametrize("call", DELAYED.values(), ids=DELAYED.keys())
@pytest.mark.parametrize(
    "settings",
    [{}, {"task_eager_propagates": True}, {"task_store_eager_result": True}],
    ids=["", "propagates", "stored"],
)
def test_always_eager_does_with_a_leased_task_what_it_does_with_a_plain_one(
    tmp_path: Path, call: Callable[[Pair], Any], settings: dict[str, Any]
) -> None:
    _compare(tmp_path, call, task_always_eager=True, **settings)


def test_a_stored_eager_result_is_the_same(tmp_path: Path) -> None:
    seen = []
    for base in (Task, LeasedTask):
        pair = Pair(tmp_path, base, task_always_eager=True, task_store_eager_result=True)
        ids = [pair.tasks["add"].delay(1, 2).id, pair.tasks["fail"].delay(1).id]
        seen.append([(pair.app.AsyncResult(one).state) for one in ids])
    assert seen[0] == seen[1] == ["SUCCESS", "FAILURE"]


# -- what only a leased task has ------------------------------------------------------------------


def app_in(folder: Path) -> Celery:
    app = Celery("eager", broker=NO_BROKER, backend="cache+memory://", set_as_current=False)
    app.conf.lease_store_url = f"sqlite:///{folder / 'leases.sqlite3'}"
    return app


def own_epoch() -> int:
    return current_lease().epoch


def test_an_eager_retry_goes_on_from_the_checkpoint_under_the_next_epoch(tmp_path: Path) -> None:
    app, seen = app_in(tmp_path), []

    @app.task(base=LeasedTask, bind=True, shared=False)
    def steps(self: LeasedTask) -> str:
        seen.append((self.lease.epoch, self.lease.restore("start")))
        self.lease.checkpoint(f"after {self.lease.epoch}")
        if self.lease.epoch < 3:
            raise self.retry(countdown=0)
        return "done"

    assert steps.apply(task_id="x").get() == "done"
    assert seen == [(1, "start"), (2, "after 1"), (3, "after 2")]
    run = Runs(app).get("x")
    assert (run.state, run.epoch) == ("succeeded", 3)
    assert run.settled_at is not None


def test_an_eager_run_is_never_handed_off(tmp_path: Path) -> None:
    """There is no message to move to: each stage is done here, one after the other."""
    app = app_in(tmp_path)
    policy = LeasePolicy(stage_handoff="always")

    @app.task(base=LeasedTask, bind=True, shared=False, lease_policy=policy)
    def squares(self: LeasedTask, count: int) -> list[int]:
        return [self.lease.stage(("part", n), lambda n: n * n, n) for n in range(count)]

    assert squares.apply((3,), task_id="x").get() == [0, 1, 4]
    assert [stage["name"] for stage in Runs(app).story("x").stages] != []
    assert Runs(app).get("x").epoch == 1


def test_a_replacement_is_a_run_of_its_own_each_step_of_it(tmp_path: Path) -> None:
    pair = Pair(tmp_path, LeasedTask)
    pair.tasks["replaced"].apply(("chain",), task_id="x").get(disable_sync_subtasks=False)
    runs = Runs(pair.app).list()
    assert sorted(run.task for run in runs) == ["t.add", "t.add", "t.add", "t.replaced"]
    assert {run.state for run in runs} == {"succeeded"}


def test_callbacks_of_a_replaced_eager_task_are_called_once(tmp_path: Path) -> None:
    """Celery calls them of the replacement and of the task that it replaced, under one id."""
    pair = Pair(tmp_path, LeasedTask, task_always_eager=True)
    replaced, add = pair.tasks["replaced"], pair.tasks["add"]
    assert replaced.apply(("task",), link=add.s(5)).get(disable_sync_subtasks=False) == 3
    assert pair.log.count(("add", (3, 5))) == 1


def test_the_same_id_is_done_once(tmp_path: Path) -> None:
    app, calls = app_in(tmp_path), []

    @app.task(base=LeasedTask, shared=False)
    def counted() -> int:
        calls.append(1)
        return len(calls)

    assert counted.apply(task_id="x").get() == 1
    assert counted.apply(task_id="x").state == "IGNORED"
    assert calls == [1]


def test_a_revoked_run_is_told_to_its_caller(tmp_path: Path) -> None:
    app = app_in(tmp_path)
    task = app.task(base=LeasedTask, shared=False, name="t")(own_epoch)
    assert Runs(app).revoke("x", "not wanted")
    result = task.apply(task_id="x")
    assert result.state == "REVOKED"
    with pytest.raises(TaskRevokedError, match="not wanted"):
        result.get()
    Runs(app).revoke("y")
    with pytest.raises(TaskRevokedError):
        task.apply(task_id="y", throw=True)
    assert all(run.settled_at is not None for run in Runs(app).list())


def test_a_body_that_loses_its_lease_is_ended_and_tells_nothing(tmp_path: Path) -> None:
    app, seen = app_in(tmp_path), []

    def save() -> None:
        Runs(app).revoke(current_lease().run_id)

    @app.task(base=LeasedTask, bind=True, shared=False)
    def loses(self: LeasedTask) -> str:
        save()
        try:
            self.lease.checkpoint(1)
        except LeaseLost as lost:
            seen.append(lost.reason)
            raise
        return "done"

    result = loses.apply(task_id="x")
    assert seen == ["revoked"]
    assert (result.state, Runs(app).get("x").state) == ("IGNORED", "revoked")


def test_callbacks_that_could_not_be_sent_leave_the_outcome_to_a_worker(tmp_path: Path) -> None:
    """An eager task sends its callbacks to the broker; here is none."""
    call = _applied("add", 1, 2, link=Celery("elsewhere").signature("t.after"))
    plain, pair = Pair(tmp_path, Task), Pair(tmp_path, LeasedTask)
    assert _outcome(pair, call) == _outcome(plain, call)
    run = Runs(pair.app).get("x")
    assert (run.state, run.settled_at) == ("succeeded", None)
    assert run.trigger_in is not None


def test_a_worker_that_stops_does_not_refuse_what_its_bodies_call(tmp_path: Path) -> None:
    """The eager run is a part of the body, which is to end well."""
    app = app_of(tmp_path)
    inner = leased(app, name="inner")(own_epoch)

    def outer() -> Any:
        guest.side.board.stopping = True
        result = inner.apply()
        return [result.state, result.get(disable_sync_subtasks=False)]

    task = leased(app, name="outer")(outer)
    guest = Guest(app)
    result = task.delay()
    guest.deliver()
    assert result.get(timeout=1) == ["SUCCESS", 1]


def test_switched_off_an_eager_task_asks_no_store(tmp_path: Path) -> None:
    app = app_in(tmp_path)
    app.conf.lease_enabled = False
    task = app.task(base=LeasedTask, shared=False, name="t")(own_epoch)
    assert task.apply().get() == 1
    assert not (tmp_path / "leases.sqlite3").exists()


# -- called like a function -----------------------------------------------------------------------


def _directly(pair: Pair, task: str, *args: Any) -> Any:
    try:
        told: Any = pair.tasks[task](*args)
    except Exception as exc:  # noqa: BLE001 - compared
        told = repr(exc)
    return [told, pair.log]


@pytest.mark.parametrize(
    "call",
    [
        ("add", 1, 2),
        ("fail", 1),
        ("again", 1),
        ("hopeless",),
        ("automatic", 1),
        ("ends", "ignore"),
        ("ends", "requeue"),
        ("sees", 1),
        ("calls", "directly"),
    ],
    ids=str,
)
def test_a_direct_call_is_that_of_a_plain_task(tmp_path: Path, call: tuple[Any, ...]) -> None:
    plain, pair = Pair(tmp_path, Task), Pair(tmp_path, LeasedTask)
    assert _directly(pair, *call) == _directly(plain, *call)
    assert not (tmp_path / "leases.sqlite3").exists()


def test_a_direct_call_has_a_lease_in_memory_of_its_own(tmp_path: Path) -> None:
    app = app_in(tmp_path)

    @app.task(base=LeasedTask, bind=True, shared=False)
    def steps(self: LeasedTask) -> Any:
        start = self.lease.restore(0)
        self.lease.checkpoint({"at": (1, 2)})
        doubled = self.lease.stage("double", lambda n: n * 2, 21)
        self.lease.check()
        return [start, self.lease.restore(0), doubled, self.lease.epoch]

    assert steps() == steps() == [0, {"at": [1, 2]}, 42, 1]
    assert not (tmp_path / "leases.sqlite3").exists()
    assert Leasing.of(app).board is None
