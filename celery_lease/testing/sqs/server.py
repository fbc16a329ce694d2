"""`StrictSQS`: the server with everything a test controls it by."""

from __future__ import annotations

import json
from types import TracebackType
from typing import Any, Self

from celery_lease.testing.sqs.account import REGION, Account
from celery_lease.testing.sqs.backend import StrictBackend
from celery_lease.testing.sqs.calls import Call, MessageInfo
from celery_lease.testing.sqs.clock import ServerClock
from celery_lease.testing.sqs.faults import Faults
from celery_lease.testing.sqs.listener import Listener
from celery_lease.testing.sqs.rules import MODES, Mode, StoredMessage
from celery_lease.testing.sqs.service import Service


class StrictSQS:
    """SQS over HTTP on 127.0.0.1, in threads of this process, with AWS's rules enforced.

    Real clients and workers of any process use it; the test that owns it moves its clock, orders
    faults and looks at messages without receiving them. Credentials and region are not looked
    at: everybody sees the one account. `mode` is what happens with an expired or superseded
    receipt handle on a standard queue: `error`, `silent` or `rehide`, see `rules`.

        with StrictSQS() as sqs:
            url = sqs.create_queue("celery", VisibilityTimeout=30)
            app.conf.broker_url = sqs.broker_url
            sqs.clock.advance(hours=12)
    """

    def __init__(self, port: int = 0, mode: Mode = "error") -> None:
        self._account = Account(initial_mode=_checked(mode))
        self._wanted_port = port
        self._listener: Listener | None = None
        self._client: Any = None

    def start(self, port: int | None = None) -> Self:
        """Listen, on `port` if given; afterwards `url` and `port` are known.

        After a `stop` everything is still there: a broker that was away for a while.
        """
        if self._listener is not None:
            raise RuntimeError("the server is already running")
        self._account.closing = False
        self._listener = Listener(
            Service(self._account), port=self._wanted_port if port is None else port
        )
        self._listener.start()
        return self

    def stop(self) -> None:
        """Stop listening, end every waiting request and close every connection, within a second."""
        listener, self._listener = self._listener, None
        if listener is None:
            return
        self._account.close()
        listener.stop()
        if self._client is not None:
            self._client.close()
            self._client = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    # -- where it is ----------------------------------------------------------------------

    @property
    def port(self) -> int:
        """The port on 127.0.0.1."""
        if self._listener is None:
            raise RuntimeError("the server is not running")
        return self._listener.port

    @property
    def url(self) -> str:
        """What boto3 takes as `endpoint_url`, and the environment as `AWS_ENDPOINT_URL_SQS`."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def broker_url(self) -> str:
        """What Celery takes as `broker_url`."""
        return f"sqs://user:secret@127.0.0.1:{self.port}//"

    def client(self) -> Any:
        """A boto3 client for it, which does not repeat failed requests by itself."""
        if self._client is None:
            import boto3
            from botocore.config import Config

            self._client = boto3.session.Session().client(
                "sqs",
                endpoint_url=self.url,
                region_name=REGION,
                aws_access_key_id="user",
                aws_secret_access_key="secret",
                config=Config(retries={"total_max_attempts": 1}),
            )
        return self._client

    # -- what happens in it ---------------------------------------------------------------

    @property
    def mode(self) -> Mode:
        """What happens with an old receipt handle; may be changed at any time."""
        return self._account.mode

    @mode.setter
    def mode(self, mode: Mode) -> None:
        self._account.mode = _checked(mode)

    @property
    def clock(self) -> ServerClock:
        """The server's clock; `advance` moves everything that depends on time."""
        return self._account.clock

    @property
    def faults(self) -> Faults:
        """The faults to order."""
        return self._account.faults

    @property
    def calls(self) -> list[Call]:
        """Every finished request so far, in the order of arrival."""
        with self._account.changed:
            return self._account.calls.finished()

    def calls_of(self, action: str, queue: str | None = None) -> list[Call]:
        """The finished requests of one action, of one queue if given."""
        return [c for c in self.calls if c.action == action and queue in (None, c.queue)]

    def pending_of(self, action: str) -> int:
        """How many requests of one action are being answered now, long polls among them."""
        with self._account.changed:
            return self._account.calls.pending(action)

    def create_queue(self, name: str, **attributes: Any) -> str:
        """Make a queue and return its URL; the attributes have AWS's names.

        A name that ends in `.fifo` makes it FIFO. Values may be numbers and booleans, and for
        `RedrivePolicy` a dict. Faults do not apply, and it is not among the calls.
        """
        texts: dict[str, Any] = {key: _text(value) for key, value in attributes.items()}
        if name.endswith(".fifo"):
            texts.setdefault("FifoQueue", "true")
        with self._account.changed:
            queue = StrictBackend(self._account).create_queue(name, **texts)
        return f"{self.url}/{queue.account_id}/{name}"

    def messages(self, queue_name: str, *, deleted: bool = False) -> list[MessageInfo]:
        """The messages in a queue, oldest first, without receiving them.

        With `deleted` also those that somebody deleted, after them. A queue that does not exist
        has none.
        """
        with self._account.changed:
            state = self._account.states.get(queue_name)
            if state is None:
                return []
            now = self._account.clock.now()
            gone = [m for m in state.gone if m.left == "deleted"] if deleted else []
            return [_info(message, now) for message in [*state.messages, *gone]]

    def reset(self) -> None:
        """Forget queues, messages, faults, calls and added time; the first mode is back."""
        self._account.reset()


def _checked(mode: Mode) -> Mode:
    if mode not in MODES:
        raise ValueError(f"mode is one of {', '.join(MODES)}, not {mode!r}")
    return mode


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return json.dumps(value) if isinstance(value, dict) else str(value)


def _info(message: StoredMessage, now: float) -> MessageInfo:
    visible = message.left is None and message.deliverable(now)
    return MessageInfo(
        message_id=message.message_id,
        body=message.payload.body,
        receive_count=message.receive_count,
        first_received_at=message.first_received_at,
        visible=visible,
        hidden_until=None if visible else max(message.hidden_until, message.delayed_until),
        sent_at=message.sent_at,
        group=message.group,
        deleted=message.left == "deleted",
    )
