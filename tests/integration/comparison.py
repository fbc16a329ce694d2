"""The same canvas of plain tasks and of leased ones, and all that can be seen of both.

Tasks are named by labels. What was seen is told in labels too, so that two runs of a canvas
can be compared whatever their ids are.
"""

from __future__ import annotations

import contextlib
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import celery
import redis
from celery import Celery
from celery.result import GroupResult

from celery_lease.testing.sqs import StrictSQS
from tests import services
from tests.waiting import wait_until
from tests.workers import Shop, slowly

MODULE = "tests.integration.apps.canvas"
KINDS = ("plain", "leased")
FINAL = ("SUCCESS", "FAILURE", "REVOKED")
#: What tasks for canvases take beside their label.
_ARGUMENTS = ("other", "how", "gate", "failures")
_UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")


class CanvasShop(Shop):
    """A shop whose workers know the tasks for canvases; results on the database."""

    def launch(self, name: str = "w1", **options: Any) -> Any:
        known = {"imports": [MODULE], "result_chord_retry_interval": 0.2}
        return super().launch(name, **{**known, **options})

    @property
    def nodes(self) -> list[dict[str, Any]]:
        """What tasks have noted, in order."""
        return self.notes("node")

    def of_label(self, label: str) -> list[dict[str, Any]]:
        """The notes of one task."""
        return [note for note in self.nodes if note["label"] == label]

    def labelled(self, label: str, *, times: int = 1, timeout: float = 60.0) -> dict[str, Any]:
        """Wait until a task was entered so many times."""
        found = slowly(
            lambda: notes if len(notes := self.of_label(label)) >= times else [],
            timeout=timeout,
            what=f"{times} x task {label}",
        )
        return found[times - 1]


class RedisShop(CanvasShop):
    """The same with results in Redis, under a prefix of its own."""

    def __init__(self, sqs: StrictSQS, store_url: str, namespace: str, folder: Path) -> None:
        super().__init__(sqs, store_url, namespace, folder)
        self.results_url = services.find_broker("redis")
        self.prefix = f"celery-lease-{secrets.token_hex(6)}-"
        self.client = Celery("client", broker=sqs.broker_url, backend=self.results_url)
        self.client.conf.update(broker_transport_options={"wait_time_seconds": 1}, **self.prefixed)
        self._redis = redis.Redis.from_url(self.results_url, decode_responses=True)
        self._states: list[tuple[str, str]] = []
        self._heard = self._redis.pubsub()
        self._heard.psubscribe(**{f"{self.prefix}*celery-task-meta-*": self._hear})
        wait_until(lambda: self._heard.get_message(timeout=1), what="the subscription")
        self._listener = self._heard.run_in_thread(sleep_time=0.05, daemon=True)

    @property
    def prefixed(self) -> dict[str, Any]:
        """The setting that keeps the keys of two tests apart."""
        return {"result_backend_transport_options": {"global_keyprefix": self.prefix}}

    def launch(self, name: str = "w1", **options: Any) -> Any:
        return super().launch(name, **{**self.prefixed, **options})

    def _environment(self, *args: Any) -> dict[str, str]:
        return super()._environment(*args) | {"SHOP_RESULTS": self.results_url}

    def _hear(self, message: Mapping[str, Any]) -> None:
        task_id = message["channel"].rpartition("task-meta-")[2]
        status = self.client.backend.decode(message["data"])["status"]
        self._states.append((task_id, status))

    def told(self, run_id: str) -> list[str]:
        states = [state for task_id, state in list(self._states) if task_id == run_id]
        return [state for i, state in enumerate(states) if i == 0 or state != states[i - 1]]

    def close(self) -> None:
        super().close()
        self._listener.stop()
        self._listener.join(5)
        keys = list(self._redis.scan_iter(f"{self.prefix}*"))
        if keys:
            self._redis.delete(*keys)
        self._redis.close()


SHOPS: Mapping[str, type[CanvasShop]] = {"database": CanvasShop, "redis": RedisShop}


@contextlib.contextmanager
def opened(backend: str, folder: Path) -> Iterator[CanvasShop]:
    """A shop with results on ``backend``, and its lease store in ``folder``."""
    with StrictSQS() as sqs:
        try:
            shop = SHOPS[backend](
                sqs, f"sqlite:///{folder / 'leases.sqlite3'}", f"test-{folder.name}", folder
            )
        except services.ServiceMissing as exc:
            services.missing(str(exc))
        try:
            shop.queue()
            shop.queue("aside")
            yield shop
        finally:
            shop.close()


@dataclass(frozen=True)
class Tasks:
    """Makes signatures of one kind, whose labels carry the name of their canvas."""

    shop: CanvasShop
    kind: str
    canvas: str

    def __call__(
        self, label: str, *args: Any, task: str = "node", kind: str = "", **options: Any
    ) -> Any:
        """A task; ``kind`` where it is to be another one's than the canvas's."""
        known = {name: options.pop(name) for name in _ARGUMENTS if name in options}
        return self.shop.client.signature(
            f"shop.{kind or self.kind}_{task}",
            args=args,
            kwargs={"label": self.name(label), **known},
            **options,
        )

    def name(self, label: str) -> str:
        return f"{self.kind}/{self.canvas}/{label}"


@dataclass(frozen=True)
class Form:
    """A canvas, and the labels of the tasks that it is over with."""

    make: Callable[[Tasks], Any]
    ends: Sequence[str]
    #: Whether its last task has a result to wait for.
    waits: bool = True
    #: The first Celery whose plain tasks do it right.
    since: tuple[int, int] = (5, 4)

    @property
    def known(self) -> bool:
        """Whether this Celery does it."""
        return tuple(celery.VERSION[:2]) >= self.since


def known(forms: Mapping[str, Form]) -> dict[str, Form]:
    """Those of the forms that this Celery does."""
    return {name: form for name, form in forms.items() if form.known}


def play(shop: CanvasShop, forms: Mapping[str, Form], timeout: float = 90.0) -> dict[str, Any]:
    """Send every form in both kinds, wait for their ends; what was seen, by form and kind."""
    forms = known(forms)
    results = {
        (name, kind): form.make(Tasks(shop, kind, name)).apply_async()
        for name, form in forms.items()
        for kind in KINDS
    }
    wanted = {
        f"{kind}/{name}/{end}"
        for name, form in forms.items()
        for kind in KINDS
        for end in form.ends
    }
    last = [result.id for (name, _), result in results.items() if forms[name].waits]

    def over() -> bool:
        return (
            wanted <= {note["label"] for note in shop.nodes}
            and all((shop.told(one) or [""])[-1] in FINAL for one in last)
            and not any(shop.sqs.messages(queue) for queue in ("celery", "aside"))
        )

    # What is missing is for the tests to say, each for its own form.
    with contextlib.suppress(TimeoutError, AssertionError):
        slowly(over, timeout=timeout, what="the end of every canvas")
    return {
        name: {kind: watch(shop, kind, name, results[name, kind]) for kind in KINDS}
        for name in forms
    }


def watch(shop: CanvasShop, kind: str, canvas: str, result: Any) -> dict[str, Any]:
    """All that can be seen of one canvas, with labels for ids."""
    start = f"{kind}/{canvas}/"
    notes = [note for note in shop.nodes if note["label"].startswith(start)]
    labels = {note["run"]: note["label"].removeprefix(start) for note in reversed(notes)}
    groups: dict[str, list[str]] = {}
    for note in notes:
        if note["group"]:
            groups.setdefault(note["group"], []).append(labels[note["run"]])
    names = {**{g: f"group of {sorted(set(of))}" for g, of in groups.items()}, **labels}
    # The last member of a chord is the parent of its body, whichever that is.
    members = {n["run"]: f"one of the {names[n['group']]}" for n in notes if n["chord"]}
    roots = {n["root"]: "the root of a member" for n in notes if n["chord"]}
    for note in notes:
        note["parent"] = members.get(note["parent"], note["parent"])
        note["root"] = roots.get(note["root"], note["root"])

    def renamed(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [renamed(one) for one in value]
        if isinstance(value, dict):
            return {renamed(key): renamed(one) for key, one in value.items()}
        if not isinstance(value, str):
            return value
        value = value.replace(start, "").replace(f"shop.{kind}_", "shop.")
        return _UUID.sub(lambda found: names.get(found[0], "an id"), value)

    def told(one: Any) -> Any:
        """The state and the value of a result, and of those it stands for or follows."""
        if one is None:
            return None
        if isinstance(one, GroupResult):
            return [told(each) for each in one.results], told(one.parent)
        return renamed(one.id), shop.told(one.id), renamed(_value(shop, one.id)), told(one.parent)

    tasks = [renamed({k: v for k, v in note.items() if k not in ("pid", "at")}) for note in notes]
    return {
        "tasks": sorted(tasks, key=lambda note: (note["label"], note["retries"], note["name"])),
        "told": {label: shop.told(run) for run, label in labels.items()},
        "values": {label: renamed(_value(shop, run)) for run, label in labels.items()},
        "result": told(result),
        "hooks": {
            label: [
                renamed([note["hook"], note["about"]])
                for note in shop.notes("hook")
                if note["label"] == start + label
            ]
            for label in labels.values()
        },
        "inline": sorted(
            [renamed(note["run"]), renamed(note["error"])]
            for note in shop.notes("inline")
            if note["run"] in labels
        ),
    }


def _value(shop: CanvasShop, run: str) -> Any:
    meta = shop.client.backend.get_task_meta(run, cache=False)
    value = meta["result"] if meta["status"] in FINAL else None  # else of its process
    return f"{type(value).__name__}: {value}" if isinstance(value, BaseException) else value
