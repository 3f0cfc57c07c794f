"""Listening sockets that one process binds for several: here the processes are tasks, each with its end of a pair of sockets."""

from __future__ import annotations

import errno
import os
import resource
import socket as stdlib_socket
import stat
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from levada.framework.errors import ConfigurationError, ConnectionLost
from levada.transports import quic
from levada.transports.carriers import TlsConfig, dial, listen, tcp
from levada.transports.carriers.shared_sockets import PassedSockets, ServerEnding, SharedSockets, share_sockets
from levada.transports.carriers.sockets import ListeningAddress, ListeningSocket, open_here, sockets_from
from levada.transports.carriers.websocket import WebSocketConfig
from levada.transports.qmux import QmuxConfig
from levada.transports.quic import QuicConfig

if TYPE_CHECKING:
    from tests.transports.conftest import Authority

pytestmark = pytest.mark.loopback

ANY = "tcp://127.0.0.1:0"


class Process:
    """Stands for a process: it has its own connection to the one that binds."""

    def __init__(self, shared: SharedSockets) -> None:
        self.source = PassedSockets(shared.offer())

    @asynccontextmanager
    async def listen(self, url: str, config: Any = None) -> AsyncIterator[Any]:
        async with AsyncExitStack() as stack:
            with sockets_from(self.source):
                listener = await stack.enter_async_context(listen(url, config))
            yield listener


@pytest.fixture
async def shared() -> AsyncIterator[SharedSockets]:
    async with share_sockets() as shared:
        yield shared


@pytest.fixture
def processes(shared: SharedSockets) -> Iterator[list[Process]]:
    made = [Process(shared), Process(shared)]
    yield made
    for process in made:
        process.source.close()


async def hello(listener: Any, url: str) -> bytes:
    """Dial, be accepted at a listener, and return what it got."""
    async with dial(url) as client:
        await client.send_all(b"hello")  # type: ignore[union-attr]
        async with await listener.accept() as server:
            return bytes(await server.receive_some())


async def test_two_processes_listen_at_one_port(processes: list[Process]) -> None:
    one, two = processes
    async with one.listen(ANY) as first:
        async with two.listen(ANY) as second:
            assert first.url == second.url
            assert first.url != ANY
        # The second one has closed its copy. The first one goes on.
        assert await hello(first, first.url) == b"hello"


async def test_a_copy_that_is_closed_drops_no_client(shared: SharedSockets) -> None:
    """Clients that the kernel has queued wait until a process accepts."""
    source = PassedSockets(shared.offer())
    (first,) = await source(ListeningAddress(kind="tcp", host="127.0.0.1"))
    address = first.socket.getsockname()
    with stdlib_socket.create_connection(address) as client:
        client.sendall(b"early")
        first.close()
        source.close()
        after = Process(shared)
        async with after.listen(ANY) as listener, await listener.accept() as server:
            assert await server.receive_some() == b"early"
        after.source.close()
    shared.close()
    with pytest.raises(ConnectionRefusedError):
        stdlib_socket.create_connection(address).close()


async def test_port_0_twice_is_two_ports_and_all_processes_agree(processes: list[Process]) -> None:
    found = []
    for process in processes:
        async with process.listen(ANY) as a, process.listen(ANY) as b:
            found.append((a.url, b.url))
    assert found[0] == found[1]
    assert len(set(found[0])) == 2


async def test_every_carrier_with_a_port(processes: list[Process], authority: Authority, tmp_path: Path) -> None:
    server = TlsConfig(certificate=authority.issue("server"))
    for url, config in (
        ("tls://127.0.0.1:0", server),
        ("ws://127.0.0.1:0/x", None),
        ("wss://127.0.0.1:0/x", WebSocketConfig(tls=server)),
        ("qmux+tcp://127.0.0.1:0", QmuxConfig()),
        (f"unix://{tmp_path}/s", None),
        (f"qmux+unix://{tmp_path}/q", QmuxConfig()),
        ("quic://127.0.0.1:0", QuicConfig(certificate=authority.issue("server"))),
    ):
        one, two = processes
        async with one.listen(url, config) as first, two.listen(url, config) as second:
            assert first.url == second.url, url


async def test_an_address_in_use_is_said_in_each_process(processes: list[Process]) -> None:
    async with tcp.listen(ANY) as other:
        for process in processes:
            with pytest.raises(ConfigurationError, match=rf"cannot listen at {other.url}: .*Address already in use"):
                async with process.listen(other.url):
                    pass
    async with processes[0].listen(other.url) as listener:  # it is free now
        with pytest.raises(ConfigurationError, match="Address already in use"):
            async with processes[0].listen(listener.url):
                pass


async def test_errors_keep_their_number(processes: list[Process]) -> None:
    source = processes[0].source
    for kind, host, number in (("tcp", "203.0.113.1", errno.EADDRNOTAVAIL), ("unix", "/nowhere/s", errno.ENOENT)):
        with pytest.raises(OSError, match=os.strerror(number)) as caught:
            await source(ListeningAddress(kind=kind, host=host))  # type: ignore[arg-type]
        assert caught.value.errno == number
    with pytest.raises(ConfigurationError, match="label"):
        await source(ListeningAddress(kind="tcp", host="x" * 70 + ".test"))


async def test_the_file_of_a_unix_socket_stays_until_the_end(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with stdlib_socket.socket(stdlib_socket.AF_UNIX) as dead:
        dead.bind(str(path))
    url = f"unix://{path}"
    async with share_sockets() as shared:
        one, two = Process(shared), Process(shared)
        async with one.listen(url) as listener:
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            with pytest.raises(ConfigurationError, match="Address already in use"):
                async with one.listen(url):
                    pass
        assert path.exists()
        async with two.listen(url) as listener:
            assert await hello(listener, url) == b"hello"
        (tmp_path / "file").touch()
        with pytest.raises(ConfigurationError, match="exists and is not a socket"):
            async with one.listen(f"unix://{tmp_path}/file"):
                pass
        for process in (one, two):
            process.source.close()
    assert not path.exists()


async def test_one_process_at_a_time_reads_datagrams(shared: SharedSockets, authority: Authority) -> None:
    """The turn goes on when a listener is closed, and when its process ends, in the order of the requests."""
    serving = QuicConfig(certificate=authority.issue("server"))
    dialling = QuicConfig(ca=authority.ca)
    processes = [Process(shared) for _ in range(3)]

    async def accept(listener: Any) -> None:
        async with (await listener.accept()).accept() as connection:
            await connection.wait_closed()

    async def reached(listener: Any) -> bool:
        """Whether it is this listener that a client reaches."""
        url = listener.url.replace("127.0.0.1", "localhost")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(accept, listener)
            async with quic.dial(url, dialling):
                return True

    address = ListeningAddress(kind="udp", host="127.0.0.1")
    (first,) = await processes[0].source(address)
    await wait_all_tasks_blocked()
    (second,) = await processes[1].source(address)
    await wait_all_tasks_blocked()
    async with processes[2].listen("quic://127.0.0.1:0", serving) as third:
        assert first.turn is not None
        assert second.turn is not None
        await trio.lowlevel.wait_readable(first.turn)
        first.close()
        await trio.lowlevel.wait_readable(second.turn)
        second.close()
        assert await reached(third)
    for process in processes:
        process.source.close()


async def test_too_many_descriptors_and_addresses(shared: SharedSockets) -> None:
    async def many(address: ListeningAddress) -> list[ListeningSocket]:
        return [ListeningSocket(socket=stdlib_socket.socket()) for _ in range(17)]

    async with share_sockets(many) as over:
        source = PassedSockets(over.offer())
        with pytest.raises(ConfigurationError, match="over 16 addresses"):
            await source(ListeningAddress(kind="tcp", host="many.test", port=1))
        source.close()


async def test_a_request_without_a_free_descriptor_fails_alone(
    shared: SharedSockets, caplog: pytest.LogCaptureFixture
) -> None:
    """The process that binds cannot take the socket for the answer. The next request gets its own answer, not that of the lost one."""
    link = shared.offer()
    ours, theirs = stdlib_socket.socketpair()
    line = b'{"kind": "tcp", "host": "127.0.0.1", "port": 1}\n'
    stdlib_socket.send_fds(link, [line], [theirs.fileno()])
    theirs.close()
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, before[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY))
        await wait_all_tasks_blocked()
    finally:
        for number in taken:
            os.close(number)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert ours.recv(100) == b""
    ours.close()
    assert "no file descriptor is free" in caplog.text
    source = PassedSockets(link)
    (other,) = await source(ListeningAddress(kind="tcp", host="127.0.0.1"))
    assert other.socket.getsockname()[1] > 1
    other.close()
    source.close()


async def test_a_cancelled_request_leaves_the_connection_whole() -> None:
    slow = trio.Event()

    async def source(address: ListeningAddress) -> list[ListeningSocket]:
        await slow.wait()
        return await open_here(address)

    async with share_sockets(source) as shared:
        asking = PassedSockets(shared.offer())
        async with trio.open_nursery() as nursery:
            nursery.start_soon(asking, ListeningAddress(kind="tcp", host="127.0.0.1"))
            await wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        slow.set()
        (opened,) = await asking(ListeningAddress(kind="tcp", host="127.0.0.1"))
        assert opened.socket.getsockname()[1] > 0
        opened.close()
        asking.close()


async def test_the_process_that_binds_has_ended() -> None:
    async with share_sockets() as shared:
        source = PassedSockets(shared.offer())
        shared.close()
        with pytest.raises(ServerEnding, match="the server is ending"):
            await source(ListeningAddress(kind="tcp", host="127.0.0.1"))
    with pytest.raises(ConnectionLost, match="has ended"):
        await source(ListeningAddress(kind="tcp", host="127.0.0.1"))
    source.close()
