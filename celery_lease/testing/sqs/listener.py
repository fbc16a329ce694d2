"""HTTP/1.1 on loopback with connections that stay open, and that end at once with the server."""

from __future__ import annotations

import contextlib
import logging
import socket
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from celery_lease.testing.sqs.service import HttpRequest, Service
from celery_lease.testing.sqs.wire import Answer

logger = logging.getLogger(__name__)


class Listener(ThreadingHTTPServer):
    """Serves a `Service` on 127.0.0.1; port 0 takes a free one."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, service: Service, *, port: int = 0) -> None:
        self.service = service
        self._open: set[socket.socket] = set()
        self._open_lock = threading.Lock()
        self._thread: threading.Thread | None = None
        super().__init__(("127.0.0.1", port), _Handler)

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self.server_address[1])

    def start(self) -> None:
        """Serve in a thread of its own."""
        self._thread = threading.Thread(
            target=self.serve_forever,
            kwargs={"poll_interval": 0.05},
            name="strict-sqs",
            daemon=True,
        )
        self._thread.start()

    def stop(self) -> None:
        """Stop listening and close every connection, busy or idle."""
        self.shutdown()
        self.server_close()
        with self._open_lock:
            connections = list(self._open)
        for connection in connections:
            _shut(connection)
        if self._thread is not None:
            self._thread.join(timeout=5)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._open_lock:
            self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._open_lock:
            self._open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, ConnectionError | TimeoutError):
            logger.error("connection failed", exc_info=error)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Listener

    def do_POST(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        answer = self.server.service.answer(
            HttpRequest(
                method=self.command,
                url=f"http://{self.headers.get('Host', '127.0.0.1')}{self.path}",
                headers=dict(self.headers.items()),
                body=body,
                connected=lambda: _connected(self.connection),
            )
        )
        if answer is None:
            self.close_connection = True
            _shut(self.connection)
        else:
            self._send(answer)

    def _send(self, answer: Answer) -> None:
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            if name.lower() not in {"content-length", "date", "server", "status"}:
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(answer.body)))
        # Headers and body in one write: two would wait for each other's acknowledgement.
        buffered: list[bytes] = self._headers_buffer  # type: ignore[attr-defined]
        self.wfile.write(b"".join([*buffered, b"\r\n", answer.body]))
        buffered.clear()

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug(format, *args)


def _connected(connection: socket.socket) -> bool:
    """Whether the other side has not closed the connection."""
    before = connection.gettimeout()
    try:
        connection.settimeout(0)
        return connection.recv(1, socket.MSG_PEEK) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        connection.settimeout(before)


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # already gone
        connection.shutdown(socket.SHUT_RDWR)
