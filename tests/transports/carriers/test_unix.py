"""Unix sockets: the contract, the file and its mode, stale files, who is at the other end."""

# ruff: noqa: ASYNC240 - a look at a small local file blocks nobody here

from __future__ import annotations

import os
import shutil
import socket as stdlib_socket
import stat
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import quote

import pytest
import trio
import trio.testing

from levada.framework.errors import ConfigurationError, ConnectionClosed, ConnectionLost, IdleTimeout
from levada.transports.carriers import unix
from levada.transports.carriers.memory import MemoryByteStream, memory_streams
from levada.transports.carriers.streams import JoinedStream
from levada.transports.carriers.unix import UnixConfig
from levada.transports.testing import CarrierCheck, CarrierTraits, carrier_checks

pytestmark = [
    pytest.mark.loopback,
    pytest.mark.skipif(not hasattr(stdlib_socket, "AF_UNIX"), reason="the system has no Unix sockets"),
]

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells who connects")


async def settle() -> None:
    await trio.testing.wait_all_tasks_blocked(0.01)


# A Unix socket has no reset: an abort looks like an end, unless octets were left unread.
TRAITS = CarrierTraits(shape="bytes", tells_loss=False, settle=settle, timeout=20)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "socket"


@asynccontextmanager
async def pair(path: Path, config: UnixConfig | None = None) -> AsyncIterator[tuple[JoinedStream, JoinedStream]]:
    async with (
        unix.listen(f"unix://{path}", config) as listener,
        unix.dial(listener.url, config) as client,
        await listener.accept() as server,
    ):
        yield client, server


@pytest.mark.parametrize("check", carrier_checks(TRAITS), ids=str)
async def test_keeps_the_contract(check: CarrierCheck, path: Path) -> None:
    await check(lambda: pair(path))


async def test_file_is_private_and_removed(path: Path) -> None:
    mask = os.umask(0)
    try:
        async with unix.listen(f"unix://{path}") as listener:
            assert listener.url == f"unix://{path}"
            assert stat.S_IMODE(path.lstat().st_mode) == 0o600
            await listener.aclose()
            assert not path.exists()
        async with unix.listen(f"unix://{path}", UnixConfig(mode=0o660)):
            assert stat.S_IMODE(path.lstat().st_mode) == 0o660
    finally:
        os.umask(mask)
    assert not path.exists()


async def test_spaces_in_the_path(tmp_path: Path) -> None:
    async with (
        unix.listen(f"unix://{tmp_path}/a%20socket"),
        unix.dial(f"unix://{tmp_path}/a%20socket") as client,
    ):
        assert client.info.local == f"{tmp_path}/a socket"


async def test_the_url_of_a_listener_leads_to_it(tmp_path: Path) -> None:
    for name in ("a?b", "a#b", "100%41", "gr\u00fc\u00df", os.fsdecode(b"\xff")):
        async with (
            unix.listen(f"unix://{quote(os.fsencode(tmp_path / name))}") as listener,
            unix.dial(listener.url) as client,
            unix.dial(
                f"unix://{tmp_path}/{name.replace('%', '%25').replace('?', '%3F').replace('#', '%23')}"
            ) as unquoted,
        ):
            assert client.info.local == unquoted.info.local == f"{tmp_path}/{name}"
            assert stat.S_ISSOCK((tmp_path / name).stat().st_mode)


@on_linux
async def test_a_full_listener_is_waited_for(path: Path, autojump_clock: trio.testing.MockClock) -> None:
    with stdlib_socket.socket(stdlib_socket.AF_UNIX) as listener, stdlib_socket.socket(stdlib_socket.AF_UNIX) as first:
        listener.bind(str(path))
        listener.listen(0)
        first.connect(str(path))
        with pytest.raises(IdleTimeout, match="within 7 s"):
            async with unix.dial(f"unix://{path}", UnixConfig(connect_timeout=7)):
                pass
        assert trio.current_time() == pytest.approx(7, abs=0.2)

        async def make_room() -> None:
            await trio.sleep(3)
            listener.accept()[0].close()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(make_room)
            async with unix.dial(f"unix://{path}", UnixConfig(connect_timeout=7)) as client:
                await client.send_all(b"in")
                with listener.accept()[0] as server:
                    assert server.recv(10) == b"in"
        assert 10 <= trio.current_time() < 10.3


async def test_stale_file_is_replaced(path: Path) -> None:
    with stdlib_socket.socket(stdlib_socket.AF_UNIX) as dead:
        dead.bind(str(path))
    assert path.exists()
    async with pair(path) as (client, server):
        await client.send_all(b"x")
        assert await server.receive_some() == b"x"


@pytest.mark.parametrize("what", ["socket", "folder"])
async def test_a_listener_whose_file_was_removed_listens_there_again(
    what: str, tmp_path: Path, autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "folder" / "socket"
    path.parent.mkdir(0o755)
    async with (
        unix.listen(f"unix://{path}") as listener,
        unix.dial(listener.url) as before,
        await listener.accept() as known,
    ):
        if what == "socket":
            path.unlink()
        else:
            shutil.rmtree(path.parent)
        await trio.sleep(2 * unix.LOOK_EVERY)
        async with unix.dial(listener.url) as client, await listener.accept() as server:
            await client.send_all(b"again")
            assert await server.receive_some() == b"again"
        await before.send_all(b"still")
        assert await known.receive_some() == b"still"
        assert stat.S_IMODE(path.lstat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == (0o755 if what == "socket" else 0o700)
    assert not path.exists()
    assert [record.getMessage() for record in caplog.records] == [f"{path} was removed: it is there again"]


@pytest.mark.parametrize("what", ["a file", "what cannot be looked at"])
async def test_a_listener_that_cannot_listen_again_says_so_once_and_goes_on_trying(
    what: str, tmp_path: Path, autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "folder" / "socket"
    path.parent.mkdir()
    async with unix.listen(f"unix://{path}") as listener:
        shutil.rmtree(path.parent)
        if what == "a file":
            path.parent.write_text("a file in its place")
        else:
            path.parent.symlink_to("x" * 300)  # longer than names of files
        await trio.sleep(5 * unix.LOOK_EVERY)
        (record,) = caplog.records
        assert record.levelname == "ERROR"
        assert record.getMessage().startswith(f"{path} was removed, no client can connect: ")
        path.parent.unlink()
        await trio.sleep(2 * unix.LOOK_EVERY)
        async with unix.dial(listener.url), await listener.accept():
            pass


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root makes folders of other users")
async def test_a_listener_does_not_go_on_in_the_folder_of_another_user(
    tmp_path: Path, autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "folder" / "socket"
    path.parent.mkdir()
    async with unix.listen(f"unix://{path}"):
        shutil.rmtree(path.parent)
        path.parent.mkdir()
        os.chown(path.parent, 12345, -1)
        await trio.sleep(2 * unix.LOOK_EVERY)
        assert not path.exists()
    assert f"{path.parent} belongs to another user now" in caplog.text


async def test_a_closed_listener_does_not_listen_again(path: Path, autojump_clock: trio.testing.MockClock) -> None:
    async with unix.listen(f"unix://{path}") as listener:
        await listener.aclose()
        await trio.sleep(3 * unix.LOOK_EVERY)
        assert not path.exists()


async def test_live_listener_keeps_its_file(path: Path) -> None:
    async with unix.listen(f"unix://{path}") as first:
        with pytest.raises(ConfigurationError, match=r"cannot listen at .*: another process .* choose another path"):
            async with unix.listen(f"unix://{path}"):
                pass
        async with unix.dial(first.url), await first.accept(), await first.accept():
            pass  # the second one was the look whether anybody listens


async def test_other_files_are_left_alone(path: Path) -> None:
    path.write_text("precious")
    with pytest.raises(ConfigurationError, match="is not a socket"):
        async with unix.listen(f"unix://{path}"):
            pass
    assert path.read_text() == "precious"


async def test_somebody_elses_file_is_not_removed(path: Path) -> None:
    async with unix.listen(f"unix://{path}") as first:
        path.unlink()
        async with unix.listen(f"unix://{path}"):
            await first.aclose()
            assert path.exists()
    assert not path.exists()


async def test_urls_that_cannot_be(tmp_path: Path) -> None:
    for url in (
        "unix://@abstract",
        "unix:///%00abstract",
        "unix://host/path",
        "unix:",
        "unix:///dir/",
        "unix:///path?query",
        "unix:///path#fragment",
        "unix:///lone\ud800surrogate",
        "tcp://127.0.0.1:1",
    ):
        for context in (unix.listen, unix.dial):
            with pytest.raises(ConfigurationError):
                async with context(url):
                    pass
    with pytest.raises(ConfigurationError, match="107"):
        async with unix.listen(f"unix:///{'x' * 110}"):
            pass
    with pytest.raises(ConfigurationError, match="cannot listen"):
        async with unix.listen(f"unix://{tmp_path}/no/such/folder"):
            pass


async def test_nobody_listens(path: Path) -> None:
    with pytest.raises(ConnectionLost, match="cannot connect"):
        async with unix.dial(f"unix://{path}"):
            pass


@on_linux
async def test_both_ends_know_the_others_process(path: Path) -> None:
    async with pair(path) as (client, server):
        expected = (os.getpid(), os.getuid(), os.getgid())
        assert client.info.peer_credentials == server.info.peer_credentials == expected
        assert server.info.peer == f"pid={os.getpid()} uid={os.getuid()} gid={os.getgid()}"


@on_linux
async def test_only_allowed_users_get_in(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    own, other = UnixConfig(allowed_uids={os.getuid()}), UnixConfig(allowed_uids={os.getuid() + 1})
    async with pair(path, own) as (client, server):
        await client.send_all(b"x")
        assert await server.receive_some() == b"x"
    async with unix.listen(f"unix://{path}", other) as listener:
        async with unix.dial(listener.url) as client:
            assert await client.receive_some() == b""
        assert "not allowed" in caplog.text
        with trio.move_on_after(0.01) as scope:
            await listener.accept()
        assert scope.cancelled_caught
    with pytest.raises(ConnectionLost, match="not allowed"):
        async with unix.listen(f"unix://{path}", own) as listener, unix.dial(listener.url, other):
            pass


async def test_end_is_an_end_though_octets_were_left_unread(path: Path) -> None:
    async with pair(path) as (client, server):
        await client.send_all(b"never read")
        await server.send_all(b"bye")
        await server.aclose()
        assert await client.receive_some() == b"bye"
        assert await client.receive_some() == b""


async def test_accepted_streams_outlive_the_listener(path: Path) -> None:
    async with unix.listen(f"unix://{path}") as listener, unix.dial(listener.url) as client:
        server = await listener.accept()
        await listener.aclose()
        with pytest.raises(ConnectionClosed):
            await listener.accept()
        await client.send_all(b"x")
        assert await server.receive_some() == b"x"
        await server.aclose()


async def test_unread_octets_make_an_abort_a_loss(path: Path) -> None:
    async with pair(path) as (client, server):
        await client.send_all(b"never read")
        await settle()
        server.abort()
        with pytest.raises(ConnectionLost):
            await client.receive_some()


async def test_streams_that_wait_for_room_are_aborted_when_a_handed_listener_closes() -> None:
    listener = unix.HandedListener(1)
    streams = [memory_streams()[0] for _ in range(4)]
    await listener.hand(streams[0])
    refused: list[str] = []

    async def hand(stream: MemoryByteStream) -> None:
        with pytest.raises(ConnectionClosed) as error:
            await listener.hand(stream)
        refused.append(str(error.value))

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            for stream in streams[1:3]:
                nursery.start_soon(hand, stream)
            await trio.testing.wait_all_tasks_blocked()
            assert refused == []
            await listener.aclose()
        await hand(streams[3])
    assert refused == ["this side closed the listener"] * 3
    for stream in streams:
        with pytest.raises(ConnectionClosed):
            await stream.receive_some()
