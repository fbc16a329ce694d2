"""A TCP proxy that can stop forwarding: a network that swallows, not one that refuses.

>>> with TcpProxy("127.0.0.1", 5432) as proxy:
...     store = Store(proxy.url(postgresql_url))
...     proxy.pause()                 # both ways: the connection is a black hole
...     proxy.resume()                # what was held is delivered
...     proxy.pause(requests=False)   # the server works, its answers are held
...     proxy.cut()                   # connections are reset, held bytes are lost
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit, urlunsplit

_CHUNK = 65536
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class TcpProxy:
    """Forwards connections from a free local port to ``host:port``."""

    def __init__(self, host: str, port: int) -> None:
        self.target = (host, port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.host, self.port = self._listener.getsockname()[:2]
        self._change = threading.Condition()
        self._held = {"requests": False, "answers": False}
        self._refusing = False
        self._generation = 0
        self._open: set[socket.socket] = set()
        self._waiting = {"requests": 0, "answers": 0}
        self._passes = {"requests": 0, "answers": 0}

    def url(self, url: str) -> str:
        """``url`` with the proxy in the place of its host and port."""
        parts = urlsplit(url)
        user, at, _ = parts.netloc.rpartition("@")
        return urlunsplit(parts._replace(netloc=f"{user}{at}{self.host}:{self.port}"))

    def pause(self, *, requests: bool = True, answers: bool = True) -> None:
        """Hold what clients send, what the server sends, or both; nothing is closed.

        New connections are accepted meanwhile, as a network that swallows packets looks to
        a client whose operating system has a connection already.
        """
        with self._change:
            self._held = {"requests": requests, "answers": answers}

    def resume(self) -> None:
        """Forward again, first what was held; new connections are welcome again."""
        with self._change:
            self._held = {"requests": False, "answers": False}
            self._refusing = False
            self._change.notify_all()

    def pass_one(self, way: str) -> None:
        """Let one held chunk through; the next one is held again."""
        with self._change:
            self._passes[way] += 1
            self._change.notify_all()
            self._change.wait_for(lambda: self._passes[way] == 0, timeout=10)

    def cut(self, *, refuse: bool = False) -> None:
        """Reset every connection and lose what was held; with ``refuse`` also new ones."""
        with self._change:
            self._refusing = refuse
            self._generation += 1
            connections, self._open = list(self._open), set()
            self._change.notify_all()
        for connection in connections:
            _reset(connection)

    @property
    def connections(self) -> int:
        """How many connections are open now."""
        with self._change:
            return len(self._open) // 2

    def holds(self, way: str) -> bool:
        """True once bytes are held in this direction: ``requests`` or ``answers``."""
        with self._change:
            return self._waiting[way] > 0

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, name="tcp-proxy", daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # Without a shutdown the thread that accepts would keep the port open.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut(refuse=True)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self._refusing:
                _reset(client)
                continue
            try:
                server = socket.create_connection(self.target, timeout=10)
            except OSError:
                _reset(client)
                continue
            server.settimeout(None)
            self._forward(client, server)

    def _forward(self, client: socket.socket, server: socket.socket) -> None:
        for one in (client, server):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._change:
            self._open |= {client, server}
            generation = self._generation
        for way, source, sink in (("requests", client, server), ("answers", server, client)):
            threading.Thread(
                target=self._pump,
                args=(way, source, sink, generation),
                name=f"tcp-proxy-{way}",
                daemon=True,
            ).start()

    def _pump(self, way: str, source: socket.socket, sink: socket.socket, generation: int) -> None:
        with contextlib.suppress(OSError):
            while chunk := source.recv(_CHUNK):
                if not self._may_pass(way, generation):
                    return
                sink.sendall(chunk)
        # A close that arrives while the proxy is paused is held like any packet.
        if self._may_pass(way, generation):
            with self._change:
                self._open -= {source, sink}
            for one in (source, sink):
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)

    def _may_pass(self, way: str, generation: int) -> bool:
        with self._change:
            self._waiting[way] += 1
            try:
                self._change.wait_for(
                    lambda: (
                        not self._held[way] or self._passes[way] or self._generation != generation
                    )
                )
                if self._held[way] and self._passes[way]:
                    self._passes[way] -= 1
                    self._change.notify_all()
            finally:
                self._waiting[way] -= 1
            return self._generation == generation


def _reset(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
