"""Which ids the tasks have that follow a run."""

from __future__ import annotations

from celery_lease.successors import fix_ids


def test_callbacks_without_an_id_get_the_same_id_each_time() -> None:
    def signatures() -> list[dict[str, object]]:
        return [
            {"task": "a", "options": {}},
            {"task": "b", "options": {"task_id": "given"}},
            {
                "task": "celery.group",
                "subtask_type": "group",
                "options": {},
                "kwargs": {"tasks": [{"task": "c", "options": {"link": [{"task": "d"}]}}]},
            },
        ]

    first, second, other = signatures(), signatures(), signatures()
    fix_ids("run-1", first, "link")
    fix_ids("run-1", second, "link")
    fix_ids("run-2", other, "link")
    assert first == second
    assert first != other
    assert first[1]["options"] == {"task_id": "given"}
    ids = {
        first[0]["options"]["task_id"],  # type: ignore[index]
        first[2]["options"]["task_id"],  # type: ignore[index]
        first[2]["kwargs"]["tasks"][0]["options"]["task_id"],  # type: ignore[index]
        first[2]["kwargs"]["tasks"][0]["options"]["link"][0]["options"]["task_id"],  # type: ignore[index]
    }
    assert len(ids) == 4
