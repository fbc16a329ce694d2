from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from urllib.request import urlopen

import pytest

from tests import services
from tests.tcp_proxy import TcpProxy
from tests.waiting import wait_until


class TestAMissingService:
    def test_skips_a_test_with_the_place_it_was_looked_for(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv(services.REQUIRED_BY, raising=False)
        monkeypatch.setenv(services.NAMED_BY, "postgresql+psycopg://nobody@127.0.0.1:1/none")
        with pytest.raises(services.ServiceMissing, match=r"127\.0\.0\.1:1") as missing:
            services.find_postgresql()
        with pytest.raises(pytest.skip.Exception, match="no PostgreSQL was found"):
            services.missing(str(missing.value))

    @pytest.mark.parametrize("broker", services.BROKERS)
    def test_may_be_a_broker(self, broker: str, monkeypatch: pytest.MonkeyPatch) -> None:
        named_by, usual = services.BROKERS[broker]
        scheme = usual.partition(":")[0]
        monkeypatch.setenv(named_by, f"{scheme}://127.0.0.1:1//")
        with pytest.raises(services.ServiceMissing, match=f"no {broker} was found; set {named_by}"):
            services.find_broker(broker)

    def test_fails_a_test_where_services_are_required(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(services.REQUIRED_BY, "1")
        with pytest.raises(pytest.fail.Exception, match="no PostgreSQL"):
            services.missing("no PostgreSQL was found")


class Echo(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"echo")

    def log_message(self, *_: object) -> None:
        """Stay quiet."""


@pytest.fixture
def proxy() -> Iterator[TcpProxy]:
    server = HTTPServer(("127.0.0.1", 0), Echo)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with TcpProxy("127.0.0.1", server.server_port) as made:
        yield made
    server.shutdown()
    server.server_close()


class TestTheProxy:
    @staticmethod
    def ask(proxy: TcpProxy, timeout: float = 10.0) -> bytes:
        with urlopen(
            proxy.url("http://user@elsewhere:1/path").replace("user@", ""), None, timeout
        ) as answer:
            return bytes(answer.read())

    def test_forwards(self, proxy: TcpProxy) -> None:
        assert self.ask(proxy) == b"echo"

    @pytest.mark.parametrize("way", ["requests", "answers"])
    def test_holds_what_is_under_way_and_delivers_it_later(self, proxy: TcpProxy, way: str) -> None:
        proxy.pause(requests=way == "requests", answers=way == "answers")
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(self.ask, proxy)
            wait_until(lambda: proxy.holds(way), what="bytes to be held")
            assert not asked.done()
            proxy.resume()
            assert asked.result(10) == b"echo"

    def test_resets_connections_and_refuses_new_ones_until_it_resumes(
        self, proxy: TcpProxy
    ) -> None:
        proxy.pause()
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(self.ask, proxy)
            wait_until(lambda: proxy.holds("requests"), what="bytes to be held")
            proxy.cut(refuse=True)
            with pytest.raises(OSError):
                asked.result(10)
        with pytest.raises(OSError):
            self.ask(proxy)
        proxy.resume()
        assert self.ask(proxy) == b"echo"


def test_waiting_gives_the_value_and_says_in_its_failure_what_it_waited_for() -> None:
    values = iter([None, 0, "there"])
    assert wait_until(lambda: next(values)) == "there"
    with pytest.raises(AssertionError, match=r"waited 0\.05 s for the moon; last seen: None"):
        wait_until(lambda: None, timeout=0.05, what="the moon")
