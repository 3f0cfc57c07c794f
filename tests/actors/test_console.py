"""The console: what it shows, who may look, and that a bad client hurts nobody."""

from __future__ import annotations

import io
import itertools
import json
import os
import socket
import stat
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from tests.surroundings import measure_by
from trio.testing import MockClock, memory_stream_pair, wait_all_tasks_blocked

from levada.actors import maop
from levada.actors.authenticators import BearerTokens
from levada.actors.console import NodeSnapshot, Snapshot, connect_console, serve_console, show, take_snapshot, text
from levada.actors.console.server import IDLE, MOST_CLIENTS, PATIENCE
from levada.actors.console.snapshot import Watching, nodes_asked_by
from levada.actors.console.wire import LineReader
from levada.framework import Actor, ActorSystem, Asks, Identity, Ref, handles, message, restart
from levada.framework.errors import (
    CarrierError,
    ConfigurationError,
    ConnectionLost,
    DecodeError,
    IdleTimeout,
)

pytestmark = pytest.mark.loopback


@message
class Work:
    pass


@message
class Wait(Asks[None]):
    pass


class Clerk(Actor[Work | Wait]):
    @handles
    def work(self, m: Work) -> None:
        pass

    @handles
    async def wait(self, m: Wait) -> None:
        await trio.sleep_forever()


class Office(Actor[Wait]):
    clerks: int = 2

    def started(self) -> None:
        self.staff = [self.spawn(Clerk, name=f"clerk{n}") for n in range(self.clerks)]

    @handles
    async def wait(self, m: Wait) -> None:
        await self.staff[0].ask(m, timeout=None)


@asynccontextmanager
async def served(tmp_path: Path) -> AsyncIterator[tuple[ActorSystem, str, Ref[Wait]]]:
    async with ActorSystem("office block") as system, serve_console(system, tmp_path / "c") as path:
        office = system.spawn(Office, name="office")
        await wait_all_tasks_blocked()
        yield system, path, office
        office.kill()


def rows(snapshot: Snapshot) -> list[tuple[Any, ...]]:
    return [(row.level, row.path, row.kind, row.state, row.depth, row.handled) for row in snapshot.actors]


async def test_a_snapshot_over_the_socket(tmp_path: Path) -> None:
    async with served(tmp_path) as (system, path, office):
        clerk = system.lookup("/office/clerk1")
        assert clerk is not None
        for _ in range(3):
            clerk.tell(Work())
        office.tell(Wait())
        await wait_all_tasks_blocked()
        async with connect_console(path) as console:
            snapshot = await console.snapshot()
            # The console's actor is the one without a name.
            assert rows(snapshot) == [
                (0, "/", "_Root", "idle", 0, 0),
                (1, "/$1", "Console", "idle", 0, 0),
                (1, "/office", "Office", "waiting", 0, 1),
                (2, "/office/clerk0", "Clerk", "waiting", 0, 1),
                (2, "/office/clerk1", "Clerk", "idle", 0, 3),
            ]
            assert snapshot.system == "office block"
            assert snapshot.phase == "running"
            assert snapshot.pid == os.getpid()
            assert snapshot.waits == [("/office", "/office/clerk0")] == system.observe.waits()
            assert snapshot.actors[2].handler == "Office.wait"
            assert snapshot.statistics.actors == 4
            assert snapshot.statistics.waiting == 2
            clerk.tell(Work())
            await wait_all_tasks_blocked()
            assert (await console.snapshot()).actors[4].handled == 4


async def test_a_limit_keeps_what_is_near_the_root_and_counts_the_rest(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, path, _office), connect_console(path) as console:
        snapshot = await console.snapshot(limit=4)
        assert [(row.path, row.hidden) for row in snapshot.actors] == [
            ("/", 0),
            ("/$1", 0),
            ("/office", 1),
            ("/office/clerk0", 0),
        ]
        assert snapshot.hidden == 1
        assert (await console.snapshot(limit=1)).actors[0].hidden == 2


async def test_a_snapshot_survives_json() -> None:
    async with ActorSystem() as system:
        system.spawn(Office)
        await wait_all_tasks_blocked()
        snapshot = take_snapshot(system)
        octets = json.dumps({"some": "news", **snapshot.to_json()})
        assert Snapshot.from_json(json.loads(octets)) == snapshot
        with pytest.raises(DecodeError, match="not a snapshot: KeyError 'statistics'"):
            Snapshot.from_json({})


def inside(folder: Path) -> list[str]:
    return [file.name for file in folder.iterdir()]


async def test_only_the_owner_may_open_the_socket_and_it_goes_away(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, path, _office):
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert inside(tmp_path) == []


async def test_what_lies_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    async with ActorSystem() as system, serve_console(system, tmp_path / "c") as path:
        for there, why in (
            (
                tmp_path / "c",
                r"another process or listener has this address \(Address already in use\): stop it, .* another path",
            ),
            (tmp_path / "file", "this file is not a socket"),
            (tmp_path / "missing" / "c", "No such file or directory"),
            (tmp_path / ("x" * 120), "AF_UNIX path too long"),
        ):
            with pytest.raises(ConfigurationError, match=f"cannot serve a console at .*: {why}"):
                async with serve_console(system, there):
                    raise AssertionError("it is not served")
        async with connect_console(path) as console:
            assert len((await console.snapshot()).actors) == 2
    assert (tmp_path / "file").read_text() == "mine"


async def test_a_socket_of_a_dead_program_is_replaced(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "c"))
    async with served(tmp_path) as (_, path, _office), connect_console(path) as console:
        assert (await console.snapshot()).system == "office block"


async def test_somebody_elses_socket_at_the_same_path_is_left_alone(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, path, _office):
        os.unlink(path)
        with socket.socket(socket.AF_UNIX) as other:
            other.bind(path)
    assert inside(tmp_path) == ["c"]


async def test_the_errors_of_a_client(tmp_path: Path) -> None:
    path = tmp_path / "c"

    async def look() -> None:
        async with connect_console(path):
            raise AssertionError("nobody is there")

    with pytest.raises(CarrierError, match=r"there is no socket .*: a program makes one with serve_console"):
        await look()
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with pytest.raises(CarrierError, match="no program listens at"):
        await look()
    path.unlink()
    path.touch()
    with pytest.raises(CarrierError, match=r"no program listens at .* another kind of file$|cannot connect to"):
        await look()


async def test_the_end_of_the_program_is_seen(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, path, _office):
        client = connect_console(path)
        console = await client.__aenter__()
        await console.snapshot()
    with pytest.raises(ConnectionLost, match="has ended"):
        await console.snapshot()
    await client.__aexit__(None, None, None)


async def test_a_program_that_hangs_is_named(tmp_path: Path, autojump_clock: MockClock) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "c"))
        listening.listen()
        async with connect_console(tmp_path / "c", timeout=5.0) as console:
            with pytest.raises(IdleTimeout, match="did not answer within 5 s"):
                await console.snapshot()
    assert trio.current_time() == pytest.approx(5.0)


Server = Callable[[], Awaitable[trio.abc.Stream]]


@pytest.fixture
async def raw(tmp_path: Path) -> AsyncIterator[tuple[ActorSystem, Server]]:
    """A system with a console, and a function that connects to it without a client of ours."""
    async with served(tmp_path) as (system, path, _office):

        async def connect() -> trio.abc.Stream:
            return await trio.open_unix_socket(path)

        yield system, connect


async def still_served(server: Server) -> bool:
    stream = await server()
    async with stream:
        await stream.send_all(b'{"levada-console":1,"limit":1}\n')
        line = await LineReader(stream, 1 << 20).line()
    return line is not None and json.loads(line)["system"] == "office block"


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (b"top\n", "not a line of JSON: Expecting value: line 1 column 1 (char 0)"),
        (b"[1]\n", 'expected a JSON object with the member "levada-console"'),
        (b"{}\n", 'expected a JSON object with the member "levada-console"'),
        (
            b'{"levada-console":2}\n',
            "the other side speaks version 2 of the console's protocol, expected 1: use the same levada on both sides",
        ),
        (b'{"levada-console":1,"limit":0}\n', "limit is 0, wanted a whole number, 1 or more"),
        (b'{"levada-console":1,"limit":true}\n', "limit is True, wanted a whole number, 1 or more"),
        (b"[" * 4000 + b"\n", "not a line of JSON: "),
        (b"\xff\xfe\n", "not a line of JSON: "),
        (b"x" * 70_000, "a line of more than 65536 bytes"),
        (b"", None),
        (b'{"levada-console":1', None),
    ],
)
async def test_what_is_not_a_request_ends_its_connection_only(
    raw: tuple[ActorSystem, Server], request_: bytes, error: str | None
) -> None:
    _, server = raw
    stream = await server()
    async with stream:
        await stream.send_all(request_)
        assert isinstance(stream, trio.SocketStream)
        await stream.send_eof()
        lines = LineReader(stream, 1 << 20)
        if error is not None:
            answer = json.loads(await lines.line() or b"")
            assert answer["levada-console"] == 1
            assert answer["error"].startswith(error)
        assert await lines.line() is None
    assert await still_served(server)


async def test_one_too_many_is_told_so(raw: tuple[ActorSystem, Server]) -> None:
    _, server = raw
    streams = [await server() for _ in range(MOST_CLIENTS)]
    for stream in streams:
        await stream.send_all(b'{"levada-console":1,"limit":1}\n')
        assert b'"office block"' in await stream.receive_some()
    await wait_all_tasks_blocked()
    late = await server()
    assert (
        json.loads(await LineReader(late, 1000).line() or b"")["error"]
        == "8 clients are connected already; try again later"
    )
    async with connect_console(late.socket.getpeername()) as client:  # type: ignore[attr-defined]
        await wait_all_tasks_blocked()  # the console has closed the connection before it is asked
        with pytest.raises(CarrierError, match=r"/c: 8 clients are connected already; try again later$") as refused:
            await client.snapshot()
        assert type(refused.value) is CarrierError
    for stream in [*streams, late]:
        await stream.aclose()
    await wait_all_tasks_blocked()
    assert await still_served(server)


async def test_after_a_snapshot_the_console_rests_for_as_long_as_it_took(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """The time is virtual: each look at the system's clock takes a millisecond, and nothing else takes any."""
    looks = 0

    def clock() -> float:
        nonlocal looks
        looks += 1
        autojump_clock.jump(0.001)
        return trio.current_time()

    measure_by(clock)
    async with ActorSystem() as system, serve_console(system, tmp_path / "c") as path:
        system.spawn(Office)
        await wait_all_tasks_blocked()
        async with connect_console(path) as one, connect_console(path) as other:
            looks, begin = 0, trio.current_time()
            for _ in range(10):
                await one.snapshot()
                await other.snapshot()
            took, elapsed = looks * 0.001, trio.current_time() - begin
    assert looks >= 20
    assert elapsed == pytest.approx(2 * took, rel=0.1)


async def test_clients_that_ask_nothing_give_way_and_are_told_of_once(
    raw: tuple[ActorSystem, Server], autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """Half requests count as none; a client that asks keeps the place, until it has been silent for long."""
    _, server = raw

    async def ask(stream: trio.abc.Stream) -> None:
        await stream.send_all(b'{"levada-console":1}\n')
        assert b'"office block"' in await stream.receive_some()

    begin = trio.current_time()
    silent = [await server() for _ in range(MOST_CLIENTS)]
    await ask(silent[0])
    for stream in silent[1:]:
        await stream.send_all(b'{"levada-console":1')
    newcomers = []
    for stream in silent[1:]:
        newcomers.append(await server())
        await ask(newcomers[-1])
        assert await stream.receive_some() == b""
    assert trio.current_time() == begin
    await trio.sleep(PATIENCE / 2)
    for stream in newcomers:
        await ask(stream)
    late = await server()
    assert b"clients are connected already" in await late.receive_some()
    await trio.sleep(PATIENCE / 2)
    async with await server() as last:
        await ask(last)
        assert await silent[0].receive_some() == b""
        await ask(newcomers[0])
    for stream in [*silent, *newcomers, late]:
        await stream.aclose()
    assert [record.exc_info for record in caplog.records] == [None, None]
    assert "turned a process away: it was silent, and all places were taken" in caplog.text


async def test_a_client_that_does_not_read_is_dropped(
    raw: tuple[ActorSystem, Server], autojump_clock: MockClock
) -> None:
    system, server = raw
    stream = await server()
    begin = trio.current_time()
    # More answers than any socket holds; the server stops reading, so this waits too, until it is dropped.
    with pytest.raises(trio.BrokenResourceError):
        while True:
            await stream.send_all(b'{"levada-console":1}\n' * 1000)
    assert trio.current_time() - begin == pytest.approx(PATIENCE)
    await stream.aclose()
    assert await still_served(server)
    assert system.statistics().failures == 0


async def test_a_client_that_idles_is_dropped(raw: tuple[ActorSystem, Server], autojump_clock: MockClock) -> None:
    _, server = raw
    stream = await server()
    begin = trio.current_time()
    assert await stream.receive_some() == b""
    assert trio.current_time() - begin == pytest.approx(IDLE)
    await stream.aclose()


async def test_clients_that_leave_in_the_middle(raw: tuple[ActorSystem, Server]) -> None:
    system, server = raw
    for request in (b"", b'{"levada-cons', b'{"levada-console":1}\n' * 3):
        stream = await server()
        await stream.send_all(request)
        await stream.aclose()
        await wait_all_tasks_blocked()
    assert await still_served(server)
    assert system.statistics().failures == 0


class Landlord(Actor[Work]):
    path: Path

    async def started(self) -> None:
        await self.enter(serve_console(self.system, self.path))

    @handles
    def work(self, m: Work) -> None:
        raise ValueError("on purpose")


async def test_an_actor_can_serve_the_console(tmp_path: Path) -> None:
    async with ActorSystem() as system:
        landlord = system.spawn(Landlord, tmp_path / "c", supervise=restart(), name="landlord")
        landlord.tell(Work())
        await wait_all_tasks_blocked()
        async with connect_console(tmp_path / "c") as console:
            kinds = [(row.kind, row.restarts) for row in (await console.snapshot()).actors]
            assert kinds == [("_Root", 0), ("Landlord", 1), ("Console", 0)]
        landlord.stop()
        await landlord.terminated()
        assert inside(tmp_path) == []
        assert system.statistics().actors == 0


async def test_a_cancelled_block_takes_the_socket_away(tmp_path: Path) -> None:
    async with ActorSystem() as system:
        with trio.CancelScope() as scope:
            async with serve_console(system, tmp_path / "c") as path, connect_console(path):
                scope.cancel()
                await trio.sleep_forever()
        assert inside(tmp_path) == []
        assert system.statistics().actors == 0


@pytest.mark.parametrize("cut", range(1, 12))
async def test_lines_cut_anywhere_arrive_whole(cut: int) -> None:
    left, right = memory_stream_pair()
    octets = b"one\n\ntwo\nthr"
    lines = LineReader(right, 3)
    await left.send_all(octets[:cut])
    await left.send_all(octets[cut:])
    await left.aclose()
    assert [await lines.line() for _ in range(4)] == [b"one", b"", b"two", None]


async def test_the_turns_of_a_quiet_system_are_measured() -> None:
    """A slice of one turn each time: the sampling goes on where the last slice left it."""
    ticks = itertools.count()  # by real time, a turn in which the processor is lost would be the end of its slice
    measure_by(lambda: next(ticks) * 1e-6)
    async with ActorSystem() as system:
        clerk = system.spawn(Clerk)
        for _ in range(1000):
            clerk.tell(Work())
            await wait_all_tasks_blocked()
        snapshot = take_snapshot(system)
    assert sum(snapshot.turn_times) == sum(snapshot.queue_times) == pytest.approx(1000, abs=2 * 63)
    assert 0 < snapshot.quantiles()["turn_50"] < 1


# ---------------------------------------------------------------- the picture


async def test_the_text(autojump_clock: MockClock) -> None:
    async with ActorSystem("desk") as system:
        office = system.spawn(Office, name="office")
        await wait_all_tasks_blocked()
        before = take_snapshot(system)
        for _ in range(20):
            clerk = system.lookup("/office/clerk1")
            assert clerk is not None
            clerk.tell(Work())
        office.tell(Wait())
        office.tell(Wait())
        await trio.sleep(2)
        after = take_snapshot(system)
        office.kill()
    lines = text(after, previous=before).splitlines()
    assert lines[0] == (
        f"desk (process {os.getpid()}, running): 3 actors, 0 ready, 2 waiting, 0 timers; "
        "so far 0 failures, 0 restarts, 0 dead letters, 0 slow turns"
    )
    assert lines[1].startswith("wait for a turn: 50 % below ")
    # The time that a message has waited is real time, also under a virtual clock.
    table = [line.split() for line in lines[2:]]
    assert table[0] == ["actor", "class", "state", "queue", "oldest", "handled", "per", "s", "restarts", "in", "about"]
    assert table[1] == ["/", "Root", "idle", "0", "0", "0"]
    assert table[2][:4] == ["office", "Office", "waiting", "1"]
    line = Office.wait.__code__.co_firstlineno + 2
    assert table[2][-5:] == ["Office.wait", f"test_console.py:{line}", "waits", "for", "/office/clerk0"]
    assert lines[5].startswith("  clerk0 ")
    assert table[4] == ["clerk1", "Clerk", "idle", "0", "20", "10"]


async def test_listeners_and_connections_say_who_is_there() -> None:
    clients = BearerTokens.of({b"secret": Identity("ada")})
    async with ActorSystem() as system, maop.serve(system, "maop+memory://desk", {}, authenticate=clients) as listener:
        with pytest.raises(maop.Disapproved):
            async with maop.connect(system, listener.url, token=b"guess"):
                pass
        async with maop.connect(system, listener.url, token=b"secret") as peer:
            snapshot = Snapshot.from_json(json.loads(json.dumps(take_snapshot(system).to_json())))
            about = {row.kind: row.about for row in snapshot.actors if row.about and row.kind != "Connection"}
            server, client = listener.peers[0].info, peer.info
            assert about == {
                "ListenerActor": f"{listener.url}, clients: 1, refused: 1",
                "ServerConnection": f"ada ({server.peer})",
                "ClientConnection": client.peer,
            }
            assert f"  ada ({server.peer})\n" in text(snapshot)


async def test_a_snapshot_of_an_older_program_has_less_about_actors() -> None:
    async with ActorSystem() as system:
        members = take_snapshot(system).to_json()
        del members["actors"][0]["about"]
        assert Snapshot.from_json(members).actors[0].about == ""


async def test_sorted_and_cut_at_a_depth() -> None:
    by_path, by_handled = io.StringIO(), io.StringIO()
    async with ActorSystem() as system:
        system.spawn(Office, name="b")
        system.spawn(Clerk, name="a").tell(Work())
        await wait_all_tasks_blocked()
        show(system, sort="path", depth=1, file=by_path)
        show(system, sort="handled", file=by_handled)
    assert [line.split()[0] for line in by_path.getvalue().splitlines()[3:]] == ["/", "/a", "/b"]
    # Among equals the order of the tree is kept.
    names = [line.split()[0] for line in by_handled.getvalue().splitlines()[3:]]
    assert names == ["/a", "/", "/b", "/b/clerk0", "/b/clerk1"]


async def test_text_of_another_program_cannot_steer_the_terminal() -> None:
    async with ActorSystem() as system:
        system.spawn(Clerk)
        snapshot = take_snapshot(system)
    strange = (attrs.evolve(row, path="/a\x1b[2J\nb", kind="C\x07", about="\u202e") for row in snapshot.actors)
    said = text(attrs.evolve(snapshot, actors=tuple(strange)))
    assert r"a\x1b[2J\nb" in said
    assert said.replace("\n", "").isprintable()


async def test_nodes_and_their_trees(tmp_path: Path) -> None:
    """A driver's console has its nodes: the answers of those that answered, and why the others did not."""
    async with ActorSystem("node") as far:
        far.spawn(Clerk, name="clerk").tell(Work())
        await wait_all_tasks_blocked()
        there = take_snapshot(far)
    limits = []

    async def ask(limit: int) -> list[dict[str, Any]]:
        limits.append(limit)
        up = NodeSnapshot(name="n0", state="up", pid=7, host="box", restarts=2, snapshot=there)
        down = NodeSnapshot(
            name="n1", state="down", pid=None, host="", restarts=0, snapshot=None, error="it\x1b is starting"
        )
        return [up.to_json(), down.to_json()]

    async def no_node(name: str, actions: bool, tracebacks: bool) -> Watching:
        raise AssertionError(f"nobody looks at {name}")

    async with served(tmp_path) as (system, path, _office), connect_console(path) as console:
        nodes_asked_by(system, ask, no_node)
        snapshot = await console.snapshot(limit=500)
    assert limits == [500]
    assert snapshot.nodes[0].snapshot == there
    lines = text(snapshot, previous=snapshot).splitlines()
    assert lines[2] == "nodes: 1 up, 1 down"
    named = [line.split()[0] for line in lines]
    assert named[-1].startswith("$"), "the console's own actors come last"
    begin = named.index("n0")
    assert "office" in named[4:begin]
    shown = [line.split() for line in lines[begin : begin + 3]]
    assert shown[0] == ["n0", "node", "up", "0", "1", "2", "process", "7", "on", "box"]
    assert shown[1][:5] == ["clerk", "Clerk", "idle", "0", "1"]
    assert shown[2] == ["n1", "node", "down", "0", "0", "it\\x1b", "is", "starting"]
    sorted_rows = [line.split()[0] for line in text(snapshot, sort="handled").splitlines()[4:]]
    assert sorted_rows[:2] == ["n0", "n0/clerk"]
    assert [line.split()[0] for line in text(snapshot, depth=0).splitlines()[4:]] == ["/", "n0", "n1"]


async def test_commands(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A program may let its console do more than look; other requests are refused."""

    async def double(members: Mapping[str, Any]) -> Mapping[str, Any]:
        if members["number"] < 0:
            raise ConfigurationError("not below 0")
        return {"twice": 2 * members["number"]}

    async with ActorSystem() as system, serve_console(system, tmp_path / "c", commands={"double": double}) as path:
        async with connect_console(path) as console:
            assert (await console.command("double", number=21))["twice"] == 42
            with pytest.raises(CarrierError, match="not below 0"):
                await console.command("double", number=-1)
            assert (await console.command("double", number=4))["twice"] == 8
            assert not caplog.records  # nobody was turned away
        for name in ("halve", 5):
            async with connect_console(path) as console:
                with pytest.raises(CarrierError, match="this program has no command"):
                    await console.command(name)  # type: ignore[arg-type]
