"""The strict SQS as a server: its faults, its protocols, its end, and a real worker on it.

As in `test_strict_sqs`, docstrings name the page of AWS behind a check, where there is one.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import boto3
import pytest
from botocore.exceptions import ClientError, ConnectionClosedError
from celery import Celery
from celery.backends.database.models import ResultModelBase
from sqlalchemy import create_engine

from celery_lease.testing.sqs import StrictSQS

ROOT = Path(__file__).parents[2]


@pytest.fixture
def url(strict_sqs: StrictSQS) -> str:
    return strict_sqs.create_queue("jobs", VisibilityTimeout=30)


def send(sqs: StrictSQS, url: str, body: str = "m") -> str:
    return str(sqs.client().send_message(QueueUrl=url, MessageBody=body)["MessageId"])


def receive(sqs: StrictSQS, url: str, count: int = 1, wait: int = 0) -> list[dict[str, Any]]:
    answer = sqs.client().receive_message(
        QueueUrl=url, MaxNumberOfMessages=count, WaitTimeSeconds=wait
    )
    return list(answer.get("Messages", []))


def eventually(condition: Callable[[], object], *, seconds: float = 30) -> None:
    """Wait until the condition holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


class TestFaults:
    def test_the_nth_call_fails_and_does_nothing(self, strict_sqs: StrictSQS, url: str) -> None:
        """API, "Common Errors": InternalError, answered 500."""
        strict_sqs.faults.fail("SendMessage", nth=2)
        send(strict_sqs, url, "first")
        with pytest.raises(ClientError) as failed:
            send(strict_sqs, url, "second")
        send(strict_sqs, url, "third")
        assert failed.value.response["ResponseMetadata"]["HTTPStatusCode"] == 500
        assert [m.body for m in strict_sqs.messages("jobs")] == ["first", "third"]
        errors = [(c.status, c.error) for c in strict_sqs.calls_of("SendMessage", "jobs")]
        assert errors == [(200, None), (500, "InternalError"), (200, None)]

    def test_boto3_repeats_a_failed_request_and_the_server_sees_both(
        self, strict_sqs: StrictSQS, url: str
    ) -> None:
        strict_sqs.faults.fail("SendMessage", code="RequestThrottled")
        client = boto3.client(
            "sqs",
            endpoint_url=strict_sqs.url,
            region_name="us-east-1",
            aws_access_key_id="a",
            aws_secret_access_key="b",
        )
        client.send_message(QueueUrl=url, MessageBody="m")
        assert [c.status for c in strict_sqs.calls_of("SendMessage")] == [400, 200]

    def test_a_delayed_call_is_done_late_and_holds_nobody_up(
        self, strict_sqs: StrictSQS, url: str
    ) -> None:
        strict_sqs.faults.delay("SendMessage", seconds=0.5)
        with ThreadPoolExecutor(1) as pool:
            started = time.monotonic()
            late = pool.submit(send, strict_sqs, url, "late")
            eventually(lambda: strict_sqs.pending_of("SendMessage"))
            send(strict_sqs, url, "early")
            assert not late.done()
            late.result()
        assert time.monotonic() - started >= 0.5
        assert [m.body for m in strict_sqs.messages("jobs")] == ["early", "late"]
        bodies = [c.parameters["MessageBody"] for c in strict_sqs.calls_of("SendMessage")]
        assert bodies == ["late", "early"], "calls are listed in the order of their arrival"

    def test_an_ignored_call_is_answered_and_not_done(
        self, strict_sqs: StrictSQS, url: str
    ) -> None:
        """API, "DeleteMessage": you might receive a message even after you delete it."""
        client = strict_sqs.client()
        send(strict_sqs, url)
        for action in ("SendMessage", "ReceiveMessage", "DeleteMessage", "DeleteMessageBatch"):
            strict_sqs.faults.ignore(action)
        send(strict_sqs, url)
        assert receive(strict_sqs, url) == []
        (message,) = receive(strict_sqs, url)
        handle = message["ReceiptHandle"]
        client.delete_message(QueueUrl=url, ReceiptHandle=handle)
        entries = [{"Id": "1", "ReceiptHandle": handle}]
        answer = client.delete_message_batch(QueueUrl=url, Entries=entries)
        assert len(answer["Successful"]) == 1
        assert len(strict_sqs.messages("jobs")) == 1
        client.delete_message(QueueUrl=url, ReceiptHandle=handle)
        assert strict_sqs.messages("jobs") == []

    def test_a_denied_action_is_denied_in_its_batch_form_too_until_cleared(
        self, strict_sqs: StrictSQS, url: str
    ) -> None:
        """Guide, "Amazon SQS API permissions": a permission covers the action's batch form."""
        strict_sqs.faults.deny("SendMessage")
        entries = [{"Id": "1", "MessageBody": "m"}]
        for _ in range(2):
            with pytest.raises(
                ClientError, match="not authorized to perform: sqs:sendmessage"
            ) as e:
                strict_sqs.client().send_message_batch(QueueUrl=url, Entries=entries)
            assert e.value.response["Error"]["Code"] == "AccessDenied"
            assert e.value.response["ResponseMetadata"]["HTTPStatusCode"] == 403
        strict_sqs.faults.clear()
        send(strict_sqs, url)

    def test_a_duplicated_delivery_reaches_another_receive(
        self, strict_sqs: StrictSQS, url: str
    ) -> None:
        """Guide, "Amazon SQS at-least-once delivery"."""
        fault = strict_sqs.faults.duplicate()
        sent = send(strict_sqs, url)
        assert [m["MessageId"] for m in receive(strict_sqs, url, 10)] == [sent]
        assert [m["MessageId"] for m in receive(strict_sqs, url, 10)] == [sent]
        assert receive(strict_sqs, url) == []
        assert fault.fired == 1

    def test_messages_can_come_in_another_order(self, strict_sqs: StrictSQS, url: str) -> None:
        """Guide, "Amazon SQS standard queues": best-effort ordering."""
        strict_sqs.faults.reorder()
        for body in ("a", "b", "c"):
            send(strict_sqs, url, body)
        assert [m["Body"] for m in receive(strict_sqs, url, 10)] == ["c", "b", "a"]

    @pytest.mark.parametrize("after", [False, True])
    def test_a_dropped_connection_leaves_open_whether_it_was_done(
        self, strict_sqs: StrictSQS, url: str, after: bool
    ) -> None:
        strict_sqs.faults.drop_connection("SendMessage", after=after)
        with pytest.raises(ConnectionClosedError):
            send(strict_sqs, url)
        assert len(strict_sqs.messages("jobs")) == after
        (call,) = strict_sqs.calls_of("SendMessage")
        assert (call.status, call.error) == (0, "ConnectionDropped")
        send(strict_sqs, url)


class TestPolling:
    def test_a_long_poll_ends_as_soon_as_a_message_arrives(
        self, strict_sqs: StrictSQS, url: str
    ) -> None:
        """Guide, "Amazon SQS short and long polling"."""
        with ThreadPoolExecutor(1) as pool:
            polled = pool.submit(receive, strict_sqs, url, wait=20)
            eventually(lambda: strict_sqs.pending_of("ReceiveMessage"))
            send(strict_sqs, url)
            assert len(polled.result(timeout=5)) == 1

    def test_a_long_poll_gets_what_the_clock_makes_visible(
        self, strict_sqs: StrictSQS, url: str
    ) -> None:
        """Guide, "Amazon SQS short and long polling"."""
        send(strict_sqs, url)
        receive(strict_sqs, url)
        with ThreadPoolExecutor(1) as pool:
            polled = pool.submit(receive, strict_sqs, url, wait=20)
            eventually(lambda: strict_sqs.pending_of("ReceiveMessage"))
            strict_sqs.clock.advance(30)
            assert len(polled.result(timeout=5)) == 1

    def test_a_long_poll_gets_what_becomes_visible_by_itself(
        self, strict_sqs: StrictSQS, url: str
    ) -> None:
        """Guide, "Amazon SQS visibility timeout"."""
        send(strict_sqs, url)
        strict_sqs.client().receive_message(QueueUrl=url, VisibilityTimeout=1)
        with ThreadPoolExecutor(1) as pool:
            polled = pool.submit(receive, strict_sqs, url, wait=20)
            assert len(polled.result(timeout=5)) == 1

    def test_many_receivers_at_once_get_each_message_once(
        self, strict_sqs: StrictSQS, url: str
    ) -> None:
        """Guide, "Amazon SQS visibility timeout": a received message is hidden from others."""

        def drain(_: int) -> list[str]:
            got: list[str] = []
            while messages := receive(strict_sqs, url, 3, wait=1):
                got += [message["MessageId"] for message in messages]
            return got

        with ThreadPoolExecutor(8) as pool:
            drained = [pool.submit(drain, n) for n in range(6)]
            sent = list(pool.map(lambda _: send(strict_sqs, url), range(60)))
            got = [message_id for future in drained for message_id in future.result(timeout=60)]
        assert sorted(got) == sorted(sent)

    def test_a_dead_receiver_takes_no_message(self, strict_sqs: StrictSQS, url: str) -> None:
        query = urllib.parse.urlencode({"Action": "ReceiveMessage", "WaitTimeSeconds": 20})
        path = urllib.parse.urlsplit(url).path
        with socket.create_connection(("127.0.0.1", strict_sqs.port)) as connection:
            connection.sendall(f"GET {path}?{query} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            eventually(lambda: strict_sqs.pending_of("ReceiveMessage"))
        send(strict_sqs, url)
        assert len(receive(strict_sqs, url, wait=5)) == 1
        assert strict_sqs.messages("jobs")[0].receive_count == 1


def query(url: str, *, method: str, **parameters: str) -> ET.Element:
    """Ask by the older query protocol."""
    text = urllib.parse.urlencode(parameters)
    request = (
        urllib.request.Request(f"{url}?{text}")
        if method == "GET"
        else urllib.request.Request(url, text.encode())
    )
    try:
        with urllib.request.urlopen(request) as answer:
            body = answer.read()
    except urllib.error.HTTPError as error:
        body = error.read()
    return ET.fromstring(body)


def text_of(answer: ET.Element, name: str) -> str | None:
    found = answer.find(f".//{{http://queue.amazonaws.com/doc/2012-11-05/}}{name}")
    return None if found is None else found.text


class TestProtocols:
    @pytest.mark.parametrize("method", ["GET", "POST"])
    def test_the_query_protocol_keeps_the_same_rules(
        self, strict_sqs: StrictSQS, url: str, method: str
    ) -> None:
        """API, "Making Query API requests in Amazon SQS"."""
        query(url, method=method, Action="SendMessage", MessageBody="m")
        handle = text_of(query(url, method=method, Action="ReceiveMessage"), "ReceiptHandle")
        assert handle is not None
        change = {"Action": "ChangeMessageVisibility", "ReceiptHandle": handle}
        refused = query(url, method=method, VisibilityTimeout="43200", **change)
        assert text_of(refused, "Code") == "InvalidParameterValue"
        strict_sqs.clock.advance(30)
        refused = query(url, method=method, VisibilityTimeout="10", **change)
        assert text_of(refused, "Code") == "AWS.SimpleQueueService.MessageNotInflight"

    def test_every_client_sees_the_one_account(self, strict_sqs: StrictSQS, url: str) -> None:
        elsewhere = boto3.client(
            "sqs",
            endpoint_url=strict_sqs.url,
            region_name="eu-central-1",
            aws_access_key_id="AKIAIOSFODNN7EXAMPLE",
            aws_secret_access_key="other",
        )
        assert elsewhere.get_queue_url(QueueName="jobs")["QueueUrl"] == url

    def test_what_is_no_action_is_refused(self, strict_sqs: StrictSQS) -> None:
        """API, "Common Errors": InvalidAction, MissingAction."""
        assert (
            text_of(query(strict_sqs.url, method="POST", Action="Fly"), "Code") == "InvalidAction"
        )
        assert text_of(query(strict_sqs.url, method="GET"), "Code") == "MissingAction"


class TestServer:
    def test_it_stops_at_once_with_long_polls_and_idle_connections_open(self) -> None:
        with ThreadPoolExecutor(1) as pool, StrictSQS() as sqs:
            url = sqs.create_queue("jobs")
            send(sqs, url)
            polled = pool.submit(receive, sqs, url, wait=20)
            polled.result()
            pool.submit(receive, sqs, url, wait=20)
            eventually(lambda: sqs.pending_of("ReceiveMessage"))
            started = time.monotonic()
            sqs.stop()
            assert time.monotonic() - started < 1

    def test_it_can_be_started_again_on_its_port_with_its_messages(self) -> None:
        with StrictSQS() as sqs:
            send(sqs, sqs.create_queue("jobs"))
            port = sqs.port
            sqs.stop()
            with pytest.raises(RuntimeError, match="not running"):
                sqs.url  # noqa: B018 asking is what fails
            sqs.start(port)
            assert len(receive(sqs, f"{sqs.url}/123456789012/jobs")) == 1

    def test_an_unknown_mode_is_refused(self) -> None:
        with pytest.raises(ValueError, match="error, silent, rehide"):
            StrictSQS(mode="lax")  # type: ignore[arg-type]

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
    def test_as_a_command_it_says_where_it_is_and_ends_on_a_signal(
        self, number: signal.Signals
    ) -> None:
        command = [sys.executable, "-m", "celery_lease.testing.sqs", "--mode", "silent"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
            try:
                assert process.stdout is not None
                url = process.stdout.readline().split()[-1]
                client = boto3.client(
                    "sqs",
                    endpoint_url=url,
                    region_name="us-east-1",
                    aws_access_key_id="a",
                    aws_secret_access_key="b",
                )
                client.create_queue(QueueName="jobs")
                process.send_signal(number)
                assert process.wait(timeout=10) == 0
            finally:
                process.kill()


APP = """
from celery import Celery

app = Celery("app", broker={broker!r}, backend={backend!r})
app.conf.broker_transport_options = {{"wait_time_seconds": 1, "visibility_timeout": 60}}
app.conf.task_default_queue = "jobs"

@app.task(name="add", acks_late=True)
def add(x, y):
    return x + y
"""


@pytest.fixture
def worker(strict_sqs: StrictSQS, tmp_path: Path) -> Iterator[Celery]:
    """A real worker on the strict SQS; the app that sends to it."""
    results = f"sqlite:///{tmp_path}/results.db"
    # Celery 5.4 makes them for the first database of a process only.
    ResultModelBase.metadata.create_all(create_engine(results))
    source = APP.format(broker=strict_sqs.broker_url, backend=f"db+{results}")
    (tmp_path / "app.py").write_text(source)
    options = ["--pool", "solo", "--without-mingle", "--without-gossip", "--without-heartbeat"]
    namespace: dict[str, Any] = {}
    exec(source, namespace)
    with (tmp_path / "worker.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "celery", "-A", "app", "worker", *options],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        killer = threading.Timer(60, process.kill)
        killer.start()
        try:
            yield namespace["app"]
        finally:
            killer.cancel()
            process.terminate()
            try:
                process.wait(timeout=15)
            except subprocess.TimeoutExpired:
                process.kill()


@pytest.mark.integration
def test_a_real_worker_receives_runs_and_deletes(strict_sqs: StrictSQS, worker: Celery) -> None:
    result = worker.tasks["add"].delay(2, 3)
    assert result.get(timeout=50) == 5
    eventually(lambda: strict_sqs.messages("jobs", deleted=True)[0].deleted)
    assert strict_sqs.messages("jobs") == []
    (call,) = strict_sqs.calls_of("DeleteMessage", "jobs")
    assert call.status == 200
