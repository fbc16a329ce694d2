from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

from celery_lease.testing import plugin
from celery_lease.testing.sqs import MODES

pytest_plugins = ["pytester"]

ROOT = Path(plugin.__file__).parents[2]


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A user's project with the plugin active, run in a process of its own."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    entry_points = importlib.metadata.entry_points(group="pytest11")
    if all(entry_point.value != plugin.__name__ for entry_point in entry_points):
        monkeypatch.setenv("PYTEST_PLUGINS", plugin.__name__)
    return pytester


def test_the_plugin_imports_no_moto_while_no_fixture_is_used(project: pytest.Pytester) -> None:
    project.makepyfile(
        """
        import sys

        def test_nothing_of_it():
            assert "celery_lease.testing.plugin" in sys.modules
            assert "moto" not in sys.modules
            assert "boto3" not in sys.modules
        """
    )
    project.runpytest_subprocess("-p", "no:cacheprovider").assert_outcomes(passed=1)


def test_importing_the_package_of_test_help_imports_no_moto_boto3_or_pytest() -> None:
    code = (
        "import sys; before = set(sys.modules); import celery_lease.testing;"
        "print({'moto', 'boto3', 'pytest'} & (set(sys.modules) - before))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "set()"


def test_each_test_gets_a_clean_server_in_mode_error(project: pytest.Pytester) -> None:
    project.makepyfile(
        """
        import pytest

        @pytest.mark.parametrize("again", [1, 2])
        def test_clean(strict_sqs, again):
            assert strict_sqs.calls == []
            assert strict_sqs.clock.added == 0
            assert strict_sqs.mode == "error"
            assert "QueueUrls" not in strict_sqs.client().list_queues()
            url = strict_sqs.create_queue("jobs")
            strict_sqs.client().send_message(QueueUrl=url, MessageBody="x")
            assert len(strict_sqs.messages("jobs")) == 1
            strict_sqs.clock.advance(hours=1)
            strict_sqs.mode = "silent"
            strict_sqs.faults.deny("ListQueues")
        """
    )
    project.runpytest_subprocess("--strict-markers").assert_outcomes(passed=2)


def test_the_marker_chooses_the_mode(project: pytest.Pytester) -> None:
    project.makepyfile(
        """
        import pytest

        @pytest.mark.strict_sqs(mode="rehide")
        def test_marked(strict_sqs):
            assert strict_sqs.mode == "rehide"
        """
    )
    project.runpytest_subprocess("--strict-markers").assert_outcomes(passed=1)


def test_a_test_can_run_in_every_mode(project: pytest.Pytester) -> None:
    project.makepyfile(
        """
        def test_any(strict_sqs_in_every_mode, request):
            assert strict_sqs_in_every_mode.mode in request.node.name
        """
    )
    project.runpytest_subprocess().assert_outcomes(passed=len(MODES))


def test_the_plugin_knows_the_modes_of_the_server() -> None:
    assert plugin._MODES == MODES
