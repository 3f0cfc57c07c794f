"""The health probe of ``levada serve`` by itself: a little of HTTP, and what is no HTTP."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing

from levada.actors import health_server as answering
from levada.actors.cli.health import serve_health
from levada.framework.errors import ConfigurationError

pytestmark = pytest.mark.loopback


class Patient:
    well = True

    async def report(self) -> tuple[bool, dict[str, object]]:
        return self.well, {"state": "well" if self.well else "ill"}


@pytest.fixture
def patient() -> Patient:
    return Patient()


@pytest.fixture(autouse=True)
def no_traceback(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Nothing that a client sends ends in a traceback in a log."""
    yield
    assert [record.getMessage() for record in caplog.get_records("call") if record.exc_info] == []


def no_scrapes() -> None:
    """There is no system yet."""


@asynccontextmanager
async def served(patient: Patient) -> AsyncIterator[int]:
    async with trio.open_nursery() as nursery:
        url = await nursery.start(serve_health, "127.0.0.1", 0, patient.report, no_scrapes)
        assert url.startswith("http://127.0.0.1:")
        yield int(url.rpartition(":")[2].rstrip("/"))
        nursery.cancel_scope.cancel()


async def asked(port: int, *parts: bytes) -> tuple[bytes, bytes]:
    """Send a request in parts; gives the first line of the answer and its body."""
    answer = b""
    async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
        for part in parts:
            await stream.send_all(part)
        async for data in stream:
            answer += data
    head, _, body = answer.partition(b"\r\n\r\n")
    if head:
        assert b"Content-Length: " in head
        assert b"Connection: close" in head
    return head.partition(b"\r\n")[0], body


async def test_well_and_ill(patient: Patient) -> None:
    async with served(patient) as port:
        assert await asked(port, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n") == (b"HTTP/1.1 200 OK", b'{"state": "well"}\n')
        assert await asked(port, b"GET /health", b" HTTP/1.1\r\n", b"\r\n") == (
            b"HTTP/1.1 200 OK",
            b'{"state": "well"}\n',
        )
        patient.well = False
        ill = b"HTTP/1.1 503 Service Unavailable"
        assert await asked(port, b"GET / HTTP/1.0\r\n\r\n") == (ill, b'{"state": "ill"}\n')
        assert await asked(port, b"HEAD / HTTP/1.1\r\n\r\n") == (ill, b"")
        assert await asked(port, b"POST / HTTP/1.1\r\n\r\n") == (b"HTTP/1.1 405 Method Not Allowed", b"")


async def test_a_domain_name_is_refused_at_a_loopback_address(patient: Patient) -> None:
    """A page of that name could have given it this machine's address, and would read health and metrics."""
    async with served(patient) as port:
        for path in (b"/", b"/metrics"):
            request = b"GET %s HTTP/1.1\r\nHOST: Page.example:%d\r\n\r\n" % (path, port)
            refused = b"the Host of a request to a loopback address must be localhost or an address\n"
            assert await asked(port, request) == (b"HTTP/1.1 421 Misdirected Request", refused)
        for host in (b"127.0.0.1", b"10.1.2.3:8080", b"localhost:8080", b"[::1]", b"desk"):
            assert (await asked(port, b"GET / HTTP/1.1\r\nHost: %s\r\n\r\n" % host))[0] == b"HTTP/1.1 200 OK"


async def test_what_is_no_request_is_not_answered(patient: Patient) -> None:
    """Too much of it, and a connection that ends in the middle: neither harms the next one."""
    async with served(patient) as port:
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            with pytest.raises(trio.BrokenResourceError):
                while True:  # until the other side has closed it
                    await stream.send_all(b"x" * 65536)
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            await stream.send_all(b"GET /")
        assert (await asked(port, b"GET / HTTP/1.1\r\n\r\n"))[0] == b"HTTP/1.1 200 OK"


async def test_a_request_that_comes_whole_never_waits_for_those_that_do_not(
    patient: Patient, caplog: pytest.LogCaptureFixture
) -> None:
    """Clients that send their requests an octet at a time lose their places to others, the oldest first."""
    async with served(patient) as port:
        slow = [await trio.open_tcp_stream("127.0.0.1", port) for _ in range(answering.AT_ONCE)]
        for stream in slow:
            await stream.send_all(b"G")
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert (await asked(port, b"GET / HTTP/1.1\r\n\r\n"))[0] == b"HTTP/1.1 200 OK"
        with trio.fail_after(250):
            assert await slow[0].receive_some() == b""
        await slow[-1].send_all(b"ET / HTTP/1.1\r\n\r\n")
        assert (await slow[-1].receive_some(12)) == b"HTTP/1.1 200"
        for stream in slow:
            await stream.aclose()
    assert [record.exc_info for record in caplog.records] == [None] * len(caplog.records)
    assert "no whole request in time" in caplog.text


async def test_slow_clients_of_one_address_take_no_places_of_another(
    patient: Patient, caplog: pytest.LogCaptureFixture
) -> None:
    """The warning says who it was."""
    async with served(patient) as port:
        other = await trio.open_tcp_stream("127.0.0.1", port, local_address="127.0.0.2")
        await other.send_all(b"GET / HTTP/1.1\r\n")
        await trio.testing.wait_all_tasks_blocked(0.01)
        slow = []
        for _ in range(2 * answering.AT_ONCE):
            slow.append(await trio.open_tcp_stream("127.0.0.1", port))
            await slow[-1].send_all(b"G")
        with trio.fail_after(250):
            for stream in slow[: 1 - answering.AT_ONCE]:
                assert await stream.receive_some() == b""
        await other.send_all(b"\r\n")
        assert (await other.receive_some(12)) == b"HTTP/1.1 200"
        for stream in [*slow, other]:
            await stream.aclose()
    (line,) = [record.getMessage() for record in caplog.records]
    assert " turned 127.0.0.1:" in line
    assert line.endswith(" away: no whole request in time")


async def test_an_address_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            ConfigurationError, match=rf"cannot listen at 127.0.0.1:{port}: another process .* another port"
        ):
            await serve_health("127.0.0.1", port, Patient().report, no_scrapes)
