"""The writer against a reader by hand, in virtual time: what it sends, what it takes for an ack, and what it does after a fault."""

from __future__ import annotations

import itertools
import json
import struct
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import attrs
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from levada.actors.lumberjack.balance import HostConfig
from levada.actors.lumberjack.writer import Writer, connect
from levada.actors.lumberjack.writer_queue import EventsDropped, Hub
from levada.framework import ActorSystem
from levada.framework.errors import ConfigurationError, ConnectionClosed, ConnectionLost
from levada.transports.carriers import ByteStream, Listener, MemoryConfig, TlsConfig, listen
from levada.transports.lumberjack import Batch, EventRejected, WriterConfig, WriterCore

# ---------------------------------------------------------------- the reader by hand


@attrs.frozen
class Window:
    """What came for one W frame."""

    version: int
    size: int
    numbers: list[int]
    events: list[dict[str, Any]]
    packed: bool

    @property
    def lines(self) -> list[Any]:
        return [event["n"] for event in self.events]


class Peer:
    """One connection as its reader sees it."""

    def __init__(self, stream: ByteStream, since: float) -> None:
        self.stream = stream
        self.since = since
        self.version = b"2"
        self.octets = 0
        self._in = bytearray()
        self._size = 0

    async def _take(self, count: int) -> bytes:
        while len(self._in) < count:
            data = await self.stream.receive_some()
            if not data:
                raise EOFError
            self.octets += len(data)
            self._in += data
        data = bytes(self._in[:count])
        del self._in[:count]
        return data

    async def _frame(self, take: Callable[[int], Any]) -> tuple[bytes, int, Any]:
        head = await take(6)
        kind, number = head[1:2], int.from_bytes(head[2:])
        if kind == b"J":
            return kind, number, json.loads(await take(int.from_bytes(await take(4))))
        if kind == b"D":
            event = {}
            for _ in range(number_of(await take(4))):
                key = await take(number_of(await take(4)))
                event[key.decode()] = (await take(number_of(await take(4)))).decode("utf-8", "surrogateescape")
            return kind, number, event
        if kind == b"C":
            return kind, number, zlib.decompress(await take(number))
        self.version = head[:1]
        return kind, number, None

    async def window(self) -> Window:
        """Wait for a W frame (but in stream mode, after the first) and for what it announces or what comes in one envelope."""
        kind, number, content = await self._frame(self._take)
        if kind == b"W":
            self._size = number
            kind, number, content = await self._frame(self._take)
        if kind != b"C":
            numbers, events = [number], [content]
            while len(events) < self._size:
                _, number, content = await self._frame(self._take)
                numbers.append(number)
                events.append(content)
            return Window(int(self.version), self._size, numbers, events, packed=False)
        rest = bytearray(content)

        async def take(count: int) -> bytes:
            data = bytes(rest[:count])
            del rest[:count]
            return data

        numbers, events = [], []
        while rest:
            _, number, content = await self._frame(take)
            numbers.append(number)
            events.append(content)
        return Window(int(self.version), self._size, numbers, events, packed=True)

    async def ack(self, number: int) -> None:
        await self.stream.send_all(self.version + b"A" + struct.pack(">I", number))

    async def serve(self) -> list[list[Any]]:
        """Ack every window until the end; return what they held."""
        got = []
        try:
            while True:
                window = await self.window()
                got.append(window.lines)
                await self.ack(window.numbers[-1])
        except EOFError:
            return got

    async def gone(self) -> bool:
        """Wait for the other side's end; whatever comes before it is thrown away."""
        while await self.stream.receive_some():
            pass
        return True


def number_of(octets: bytes) -> int:
    return int.from_bytes(octets)


class Peers:
    """Where a writer connects to."""

    def __init__(self, listener: Listener[ByteStream]) -> None:
        self.listener = listener
        self.url = (
            "lumberjack+" + listener.url
            if listener.url.startswith(("memory", "tls"))
            else listener.url.replace("tcp", "lumberjack")
        )

    async def accept(self) -> Peer:
        return Peer(await self.listener.accept(), trio.current_time())


@asynccontextmanager
async def peers(url: str = "memory://reader", config: Any = None) -> AsyncIterator[Peers]:
    async with listen(url, config) as listener:
        yield Peers(cast("Listener[ByteStream]", listener))


@asynccontextmanager
async def writing(
    url: str | list[str],
    *,
    hosts: HostConfig | None = None,
    close_timeout: float = 5.0,
    stamp: bool = False,
    **settings: Any,
) -> AsyncIterator[Writer]:
    """A writer in a system of its own; what goes wrong in a connection at the end of a test is no concern of it."""
    config = WriterConfig(**settings)
    async with (
        ActorSystem(seed=0) as system,
        connect(system, url, config=config, hosts=hosts, close_timeout=close_timeout, stamp=stamp) as writer,
    ):
        yield writer


async def send(writer: Writer, numbers: range) -> None:
    for number in numbers:
        await writer.send({"n": number})


# ---------------------------------------------------------------- windows


@pytest.mark.rule("LJ-48")
@pytest.mark.rule("LJ-49")
@pytest.mark.parametrize("version", [1, 2])
async def test_lj48_lj49_batch_windows_have_their_own_size_and_numbers_from_1(
    version: int, autojump_clock: trio.testing.MockClock
) -> None:
    """LJ-48, LJ-49: W is the number of events, numbered 1..n in each window."""
    async with peers() as reader, writing(reader.url, version=version, window=3, compression=0) as writer:
        peer = await reader.accept()
        await send(writer, range(5))
        first = await peer.window()
        await peer.ack(3)
        second = await peer.window()
        await peer.ack(2)
        n = str if version == 1 else int
        assert first == Window(version, 3, [1, 2, 3], [{"n": n(0)}, {"n": n(1)}, {"n": n(2)}], packed=False)
        assert second == Window(version, 2, [1, 2], [{"n": n(3)}, {"n": n(4)}], packed=False)
        await writer.flush()
        assert writer.unacked == 0


@pytest.mark.rule("LJ-48")
@pytest.mark.rule("LJ-49")
async def test_lj48_lj49_stream_mode_announces_once_and_numbers_run_on(autojump_clock: trio.testing.MockClock) -> None:
    """LJ-48, LJ-49: in stream mode W comes once a connection, numbers start at 1 on each and up to W events are unacked."""
    settings: dict[str, Any] = {"version": 1, "mode": "stream", "window": 4, "compression": 0}
    async with peers() as reader, writing(reader.url, **settings) as writer:
        peer = await reader.accept()
        await send(writer, range(8))
        assert (await peer.window()).numbers == [1, 2, 3, 4]
        with trio.move_on_after(2):
            await peer.stream.receive_some()
            raise AssertionError("more than the window")
        await peer.ack(2)
        peer._size = 1  # no W any more: events one by one
        assert [(await peer.window()).numbers for _ in range(2)] == [[5], [6]]
        peer.stream.abort()
        peer = await reader.accept()
        again = await peer.window()
        assert (again.size, again.numbers, again.lines) == (4, [1, 2, 3, 4], ["2", "3", "4", "5"])
        await peer.ack(4)
        peer._size = 1
        assert [(await peer.window()).lines for _ in range(2)] == [["6"], ["7"]]
        await peer.ack(6)
        await writer.flush()


@pytest.mark.rule("LJ-50")
@pytest.mark.parametrize(("version", "windows"), [(1, 1), (2, 2)])
async def test_lj50_only_so_many_windows_are_in_flight(
    version: int, windows: int, autojump_clock: trio.testing.MockClock
) -> None:
    """LJ-50: two windows in flight in version 2, one in version 1; the next one goes when the oldest is acked."""
    async with peers() as reader, writing(reader.url, version=version, window=2) as writer:
        peer = await reader.accept()
        await send(writer, range(8))
        for _ in range(windows):
            assert (await peer.window()).size == 2
        with trio.move_on_after(2) as scope:
            await peer.stream.receive_some()
        assert scope.cancelled_caught
        await peer.ack(2)
        assert (await peer.window()).size == 2
        assert writer.statistics().windows_sent == windows + 1
        for _ in range(3):
            await peer.ack(2)
            await wait_all_tasks_blocked()


@pytest.mark.rule("LJ-51")
async def test_lj51_a_window_goes_when_full_or_large_or_old_enough(autojump_clock: trio.testing.MockClock) -> None:
    """LJ-51: a window is sent when it has `window` events, `max_bytes`, or after `linger`, whichever is first."""
    settings: dict[str, Any] = {"window": 3, "max_bytes": 200, "linger": 0.2, "pipelining": 9}
    async with peers() as reader, writing(reader.url, **settings) as writer:
        peer = await reader.accept()
        begin = trio.current_time()
        await send(writer, range(3))
        assert (await peer.window()).lines == [0, 1, 2]
        assert trio.current_time() == begin
        await writer.send({"n": 3, "text": "x" * 150})
        await writer.send({"n": 4, "text": "x" * 150})
        assert (await peer.window()).lines == [3]
        assert trio.current_time() == begin
        assert (await peer.window()).lines == [4]
        assert trio.current_time() == pytest.approx(begin + 0.2)
        await writer.send({"n": 5})
        async with trio.open_nursery() as nursery:
            nursery.start_soon(writer.flush)  # does not wait for the window to fill
            assert (await peer.window()).lines == [5]
            assert trio.current_time() == pytest.approx(begin + 0.2)
            for size in (3, 1, 1, 1):
                await peer.ack(size)
                await wait_all_tasks_blocked()


async def test_deliver_does_not_wait_for_a_window_to_fill(autojump_clock: trio.testing.MockClock) -> None:
    """An event that was waiting for more goes along."""
    async with peers() as reader, writing(reader.url) as writer:
        peer = await reader.accept()
        begin = trio.current_time()
        await writer.send({"n": 0})
        async with trio.open_nursery() as nursery:
            nursery.start_soon(writer.deliver, [{"n": 1}, {"n": 2}])
            assert (await peer.window()).lines == [0, 1, 2]
            await peer.ack(3)
        assert trio.current_time() == begin
        await writer.send({"n": 3})
        assert (await peer.window()).lines == [3]
        assert trio.current_time() == pytest.approx(begin + 0.2)
        await peer.ack(1)


async def test_windows_are_packed_into_one_envelope(autojump_clock: trio.testing.MockClock) -> None:
    async with peers() as reader, writing(reader.url, window=50) as writer:
        peer = await reader.accept()
        await send(writer, range(50))
        window = await peer.window()
        assert (window.packed, window.size, window.lines) == (True, 50, list(range(50)))
        await peer.ack(50)


# ---------------------------------------------------------------- acks, the clock, reconnecting


@pytest.mark.rule("LJ-52")
async def test_lj52_a_wrong_ack_ends_the_connection_and_all_comes_again(autojump_clock: trio.testing.MockClock) -> None:
    """LJ-52: partial acks make events safe, 0 and old ones change nothing, one beyond the window is a protocol error."""
    async with peers() as reader, writing(reader.url, window=4) as writer:
        peer = await reader.accept()
        await send(writer, range(4))
        assert (await peer.window()).lines == [0, 1, 2, 3]
        for number in (2, 0, 1):
            await peer.ack(number)
        await wait_all_tasks_blocked()
        assert writer.unacked == 2
        await peer.ack(5)
        assert await peer.gone()
        peer = await reader.accept()
        again = await peer.window()
        assert (again.size, again.numbers, again.lines) == (2, [1, 2], [2, 3])
        await peer.ack(2)
        await writer.flush()
        assert writer.statistics().faults == 1


@pytest.mark.rule("LJ-52a")
async def test_lj52a_acks_are_read_while_a_send_blocks(autojump_clock: trio.testing.MockClock) -> None:
    """LJ-52a: a reader that stops reading until its ack is taken does not stop the writer forever."""
    small = MemoryConfig(window=100, high_watermark=0)
    settings: dict[str, Any] = {"window": 1, "compression": 0, "pipelining": 2}
    async with peers(config=small) as reader, writing(reader.url, hosts=HostConfig(memory=small), **settings) as writer:
        peer = await reader.accept()
        await writer.send({"n": 0})
        await writer.send({"n": 1, "text": "x" * 5000})
        await writer.send({"n": 2})
        assert (await peer.window()).lines == [0]
        await peer.ack(1)
        await wait_all_tasks_blocked()
        assert writer.statistics().events_acked == 1, "the ack was taken while the second event was stuck"
        assert (await peer.window()).lines == [1]
        await peer.ack(1)
        assert (await peer.window()).lines == [2]
        await peer.ack(1)


@pytest.mark.rule("LJ-53")
async def test_lj53_no_ack_for_too_long_means_a_new_connection(autojump_clock: trio.testing.MockClock) -> None:
    """LJ-53: 30 s without any ack close the connection; an ack of 0 starts the clock again."""
    async with peers() as reader, writing(reader.url, window=2) as writer:
        peer = await reader.accept()
        await send(writer, range(2))
        await peer.window()
        begin = trio.current_time()
        await trio.sleep(20)
        await peer.ack(0)
        assert await peer.gone()
        assert trio.current_time() - begin == pytest.approx(50)
        peer = await reader.accept()
        assert (await peer.window()).lines == [0, 1]
        await peer.ack(2)


@pytest.mark.rule("LJ-53")
async def test_lj53_a_slow_line_is_no_dead_one_but_a_stopped_one_is(autojump_clock: trio.testing.MockClock) -> None:
    """LJ-53: the clock starts again whenever the carrier takes octets of the window, and runs while a send blocks."""
    small = MemoryConfig(window=64 * 1024, high_watermark=0)
    settings: dict[str, Any] = {"window": 1, "compression": 0, "max_bytes": 1 << 20}
    async with peers(config=small) as reader, writing(reader.url, hosts=HostConfig(memory=small), **settings) as writer:
        peer = await reader.accept()
        await writer.send({"n": 0, "text": "x" * 600_000})
        for _ in range(8):
            await trio.sleep(25)
            await peer.stream.receive_some(64 * 1024)
        stopped = trio.current_time()
        assert writer.statistics().faults == 0, "200 s for one window, and octets moved all the time"
        with pytest.raises(ConnectionLost):
            while True:
                await trio.sleep(31)
                await peer.stream.send_all(b"")
        assert 30 <= trio.current_time() - stopped <= 63
        peer = await reader.accept()
        assert (await peer.window()).lines == [0]
        await peer.ack(1)


@pytest.mark.rule("LJ-54")
async def test_lj54_pauses_grow_until_an_ack_and_not_until_a_connect(autojump_clock: trio.testing.MockClock) -> None:
    """LJ-54: exponential 1 s to 60 s with full jitter, reset by an ack above 0."""
    async with peers() as reader, writing(reader.url, window=1, close_timeout=0) as writer:
        await writer.send({"n": 0})
        begins = []
        for _ in range(40):
            peer = await reader.accept()
            begins.append(peer.since)
            await peer.window()
            await peer.ack(0)  # alive, and nothing is safe
            peer.stream.abort()
        pauses = [later - earlier for earlier, later in itertools.pairwise(begins)]
        for round, pause in enumerate(pauses):
            assert 0 <= pause <= min(60, 2**round)
        late = pauses[6:]
        assert max(late) > 40, "the longest grow to 60 s"
        assert min(late) < 15, "full jitter begins at 0"
        peer = await reader.accept()
        await peer.window()
        await peer.ack(1)
        await wait_all_tasks_blocked()
        peer.stream.abort()
        begin = trio.current_time()
        peer = await reader.accept()
        assert peer.since - begin <= 1.0


@pytest.mark.rule("LJ-55")
async def test_lj55_everything_unacked_comes_again_in_order_before_newer(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """LJ-55: after a fault all unacked events are sent again, oldest first, numbered from 1, before any newer event."""
    async with peers() as reader, writing(reader.url, window=3) as writer:
        peer = await reader.accept()
        await send(writer, range(6))
        assert (await peer.window()).lines == [0, 1, 2]
        assert (await peer.window()).lines == [3, 4, 5]
        await peer.ack(1)
        await wait_all_tasks_blocked()
        peer.stream.abort()
        await wait_all_tasks_blocked()
        await send(writer, range(6, 9))
        peer = await reader.accept()
        windows = []
        for _ in range(3):
            window = await peer.window()
            assert window.numbers == list(range(1, window.size + 1))
            windows.append(window.lines)
            await peer.ack(window.size)
        assert windows == [[1, 2], [3, 4, 5], [6, 7, 8]]
        await writer.flush()
        statistics = writer.statistics()
        assert (statistics.events_acked, statistics.events_sent, statistics.connects) == (9, 14, 2)


@pytest.mark.rule("LJ-55")
@pytest.mark.parametrize("seed", range(8))
async def test_lj55_at_least_once_whatever_is_cut(seed: int, autojump_clock: trio.testing.MockClock) -> None:
    """LJ-55: an event leaves the queue only by an ack; connections cut anywhere lose none."""
    acked: set[int] = set()
    seen: set[int] = set()
    cuts = iter([37 * seed + 11, 200 + seed, 513 * seed + 50, 90, 1400])

    async def read(reader: Peers) -> None:
        while True:
            peer = await reader.accept()
            link = cast("Any", peer.stream).link
            link.config = attrs.evolve(link.config, cut_after=next(cuts, None))
            try:
                while True:
                    window = await peer.window()
                    seen.update(window.lines)
                    await peer.ack(window.numbers[-1])
                    acked.update(window.lines)
            except (EOFError, ConnectionError):
                peer.stream.abort()

    async with peers() as reader, trio.open_nursery() as nursery:
        nursery.start_soon(read, reader)
        async with writing(reader.url, window=7, linger=0.01) as writer:
            await send(writer, range(200))
            await writer.flush()
            assert seen == set(range(200))
            assert writer.unacked == 0
            assert writer.statistics().faults >= 4
        nursery.cancel_scope.cancel()


# ---------------------------------------------------------------- the queue


@pytest.mark.rule("LJ-56")
async def test_lj56_events_are_stamped_if_asked(autojump_clock: trio.testing.MockClock) -> None:
    """LJ-56: a stamp of writer and counter lets a sink drop what comes twice; off unless asked for."""
    stamps = []
    for stamp in (False, True, True):
        async with peers() as reader, writing(reader.url, stamp=stamp) as writer:
            peer = await reader.accept()
            await send(writer, range(2))
            events = (await peer.window()).events
            await peer.ack(2)
            stamps.append([event.get("stamp") for event in events])
    assert stamps[0] == [None, None]
    assert [str(stamp).rpartition("-")[2] for stamp in stamps[1]] == ["0", "1"]
    assert len(set(stamps[1] + stamps[2])) == 4


@pytest.mark.rule("LJ-57")
async def test_lj57_senders_wait_while_the_queue_is_full(autojump_clock: trio.testing.MockClock) -> None:
    """LJ-57: `send` waits while the queue holds `queue` windows; nothing is dropped."""
    async with peers() as reader, writing(reader.url, window=2, queue=2) as writer:
        peer = await reader.accept()
        await send(writer, range(4))
        with pytest.raises(trio.WouldBlock):
            writer.send_nowait({"n": -1})
        async with trio.open_nursery() as nursery:
            nursery.start_soon(send, writer, range(4, 6))
            await trio.sleep(1)
            assert writer.unacked == 4
            nursery.start_soon(peer.serve)
            await trio.sleep(1)
            await writer.flush()
            assert writer.statistics().events_acked == 6
            nursery.cancel_scope.cancel()


@pytest.mark.rule("LJ-57")
@pytest.mark.parametrize(("drop", "kept"), [("oldest", [0, 1, 4, 5]), ("newest", [0, 1, 2, 3])])
async def test_lj57_drop_policies_count_and_spare_what_was_sent(
    drop: str, kept: list[int], autojump_clock: trio.testing.MockClock
) -> None:
    """LJ-57: a full queue drops, with a counter, only events that were never sent."""
    async with peers() as reader, writing(reader.url, window=2, queue=2, drop=drop, pipelining=1) as writer:
        peer = await reader.accept()
        await send(writer, range(2))
        assert (await peer.window()).lines == [0, 1]
        await send(writer, range(2, 5))
        writer.send_nowait({"n": 5})
        assert writer.statistics().events_dropped == 2
        await peer.ack(2)
        assert [0, 1, *(await peer.window()).lines] == kept
        await peer.ack(2)
        await writer.flush()
        assert writer.unacked == 0


@pytest.mark.rule("LJ-57")
@pytest.mark.parametrize(("drop", "lost"), [("oldest", 2), ("newest", 0)])
async def test_lj57_who_delivers_learns_of_what_was_dropped(
    drop: str, lost: int, autojump_clock: trio.testing.MockClock
) -> None:
    """LJ-57: what was to be delivered waits for room, and if it has to make room for others, that is no success."""
    outcome: list[int] = []

    async def deliver(writer: Writer) -> None:
        try:
            await writer.deliver({"n": n} for n in range(4))
        except EventsDropped as error:
            outcome.append(error.count)
        else:
            outcome.append(0)

    async with (
        peers() as reader,
        writing(reader.url, window=2, queue=2, drop=drop, pipelining=1) as writer,
        trio.open_nursery() as nursery,
    ):
        peer = await reader.accept()
        nursery.start_soon(deliver, writer)
        assert (await peer.window()).lines == [0, 1]
        writer.send_nowait({"n": 4})
        writer.send_nowait({"n": 5})
        await peer.ack(2)
        assert (await peer.window()).lines == ([4, 5] if lost else [2, 3])
        await peer.ack(2)
        await writer.flush()
    assert outcome == [lost]


@pytest.mark.rule("LJ-57")
async def test_lj57_flush_waits_for_all_and_close_reports_what_is_left(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """LJ-57: `flush` returns when all is acked; closing flushes with a deadline and reports the number of unacked events."""
    async with peers() as reader:
        async with writing(reader.url, window=2, close_timeout=7) as writer:
            peer = await reader.accept()
            await send(writer, range(3))
            done = trio.Event()

            async def flush() -> None:
                await writer.flush()
                done.set()

            async with trio.open_nursery() as nursery:
                nursery.start_soon(flush)
                assert (await peer.window()).lines == [0, 1]
                assert (await peer.window()).lines == [2]
                await peer.ack(2)
                await trio.sleep(1)
                assert not done.is_set()
                await peer.ack(1)
            assert done.is_set()
            await send(writer, range(3, 8))
            begin = trio.current_time()
        assert trio.current_time() - begin == pytest.approx(7)
        assert "5 events are not acked at the end" in caplog.text
        with pytest.raises(ConnectionClosed):
            await writer.send({"n": 9})
        assert await writer.aclose(0) == 5


async def test_deliver_returns_when_its_own_events_are_acked(autojump_clock: trio.testing.MockClock) -> None:
    async with peers() as reader, writing(reader.url, window=2, linger=0.0) as writer:
        peer = await reader.accept()
        done: list[int] = []

        async def deliver(number: int) -> None:
            await writer.deliver([{"n": number}, {"n": number + 1}])
            done.append(number)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(deliver, 0)
            await wait_all_tasks_blocked()
            nursery.start_soon(deliver, 2)
            assert (await peer.window()).lines == [0, 1]
            assert (await peer.window()).lines == [2, 3]
            await peer.ack(1)
            await wait_all_tasks_blocked()
            assert done == []
            await peer.ack(2)
            await wait_all_tasks_blocked()
            assert done == [0]
            await peer.ack(2)
        assert done == [0, 2]
        await writer.deliver([])


# ---------------------------------------------------------------- hosts


@pytest.mark.rule("LJ-58")
async def test_lj58_failover_goes_to_the_next_host_with_all_that_is_unacked(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """LJ-58: one host at a time, chosen by lot, and after a fault the next one."""
    async with peers("memory://a") as a, peers("memory://b") as b, writing([a.url, b.url], window=2) as writer:
        accepted: list[tuple[Peers, Peer]] = []

        async def accept(host: Peers) -> None:
            accepted.append((host, await host.accept()))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(accept, a)
            nursery.start_soon(accept, b)
            await send(writer, range(2))
            await trio.sleep(1)
            assert len(accepted) == 1
            first, peer = accepted[0]
            assert (await peer.window()).lines == [0, 1]
            begin = trio.current_time()
            peer.stream.abort()
            await wait_all_tasks_blocked()
            assert len(accepted) == 2
            second, peer = accepted[1]
            assert second is not first
            assert peer.since == begin, "another host is tried at once"
            assert (await peer.window()).lines == [0, 1]
            await peer.ack(2)
            peer.stream.abort()
            peer = await first.accept()


@pytest.mark.rule("LJ-58")
async def test_lj58_balance_uses_all_hosts_and_survives_the_loss_of_one(autojump_clock: trio.testing.MockClock) -> None:
    """LJ-58: each window to any host with a free slot; a failed host's windows go to the others."""
    hosts = HostConfig(several="balance")
    async with (
        peers("memory://a") as a,
        peers("memory://b") as b,
        writing([a.url, b.url], hosts=hosts, window=2, pipelining=1) as writer,
    ):
        left, right = await a.accept(), await b.accept()
        await send(writer, range(8))
        on_left, on_right = await left.window(), await right.window()
        assert sorted(on_left.lines + on_right.lines) == [0, 1, 2, 3]
        left.stream.abort()
        await wait_all_tasks_blocked()
        await right.ack(2)
        rest = [(await right.window()).lines]
        assert rest == [on_left.lines], "what came back goes first"
        await right.ack(2)
        for _ in range(2):
            rest.append((await right.window()).lines)
            await right.ack(2)
        assert rest[1:] == [[4, 5], [6, 7]]
        await writer.flush()
        left = await a.accept()
        assert writer.statistics().connects == 3


@pytest.mark.rule("LJ-58")
async def test_lj58_a_connection_ends_with_its_time_to_live_and_loses_nothing(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """LJ-58: connection TTL with ±20 % jitter: drain, then reconnect."""
    async with peers() as reader, writing(reader.url, hosts=HostConfig(ttl=100.0), window=1) as writer:
        peer = await reader.accept()
        ends = []
        for number in range(6):
            begin = peer.since
            await trio.sleep_until(begin + 79)
            await writer.send({"n": number})
            assert (await peer.window()).lines == [number]
            await trio.sleep_until(begin + 105)
            await peer.ack(1)  # the connection waited for it
            assert await peer.gone()
            ends.append(trio.current_time() - begin)
            peer = await reader.accept()
            assert peer.since == trio.current_time(), "no pause: it was no fault"
        assert all(105 <= end <= 120 for end in ends)
        assert len(set(ends)) > 1
        assert writer.statistics().faults == 0
        assert writer.statistics().events_sent == 6


@pytest.mark.rule("LJ-59")
async def test_lj59_an_event_that_cannot_be_sent_is_rejected_to_its_sender(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """LJ-59: an event that can't be encoded or is too large never enters a window and does not block the rest."""
    async with peers() as reader, writing(reader.url, max_frame=100) as writer:
        peer = await reader.accept()
        with pytest.raises(EventRejected, match="cannot be encoded"):
            await writer.send({"n": object()})
        with pytest.raises(EventRejected, match="cannot be encoded"):
            writer.send_nowait({"n": float("nan")})
        with pytest.raises(EventRejected) as caught:
            await writer.deliver([{"n": 0}, {"n": "x" * 100}])
        assert (caught.value.size, caught.value.limit) == (118, 100)
        await writer.send({"n": 1})
        assert (await peer.window()).lines == [1]
        await peer.ack(1)


@pytest.mark.rule("LJ-59")
@pytest.mark.parametrize("on_stuck", ["keep", "reject"])
async def test_lj59_a_stuck_window_is_halved_until_the_event_at_fault_is_alone(
    on_stuck: str, autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """LJ-59: after five connections without an ack: counted, logged, sent in halves, one in flight; dropped only if asked."""
    sizes: list[int] = []
    got: set[int] = set()

    async def read(reader: Peers) -> None:
        while True:
            peer = await reader.accept()
            try:
                while True:
                    window = await peer.window()
                    sizes.append(window.size)
                    if 5 in window.lines:
                        break  # this reader cannot take event 5
                    got.update(window.lines)
                    await peer.ack(window.numbers[-1])
            except (EOFError, ConnectionError):
                pass
            peer.stream.abort()

    async with peers() as reader, trio.open_nursery() as nursery:
        nursery.start_soon(read, reader)
        async with writing(reader.url, window=8, on_stuck=on_stuck, close_timeout=0, pipelining=2) as writer:
            await send(writer, range(16))
            with trio.move_on_after(3000):
                await writer.flush()
            statistics = writer.statistics()
            assert statistics.stuck_windows >= 1
            assert statistics.events_rejected == (on_stuck == "reject")
            assert sizes[:5] == [8] * 5
            assert 1 in sizes
            assert {0, 1, 2, 3, 4} <= got
            if on_stuck == "reject":
                assert got == set(range(16)) - {5}
                assert writer.unacked == 0
            else:
                assert writer.unacked >= 1
        nursery.cancel_scope.cancel()
    assert "sent in halves" in caplog.text


@pytest.mark.rule("LJ-59")
async def test_lj59_a_connection_was_not_idle_if_its_end_gives_up_an_event(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """LJ-59: the fifth connection that an event ends is a fault as those before, though nothing waits any more."""
    async with peers() as reader, writing(reader.url, window=1, on_stuck="reject") as writer:
        await writer.send({"n": 0})
        for _ in range(5):
            peer = await reader.accept()
            assert (await peer.window()).lines == [0]
            await peer.stream.aclose()
        await wait_all_tasks_blocked()
        statistics = writer.statistics()
        assert (statistics.events_rejected, statistics.faults) == (1, 5)


@pytest.mark.rule("LJ-59")
async def test_lj59_only_one_window_is_in_flight_while_one_is_stuck(autojump_clock: trio.testing.MockClock) -> None:
    """LJ-59: a stuck window has the line for itself until the next ack; nothing spins meanwhile."""
    async with peers() as reader, writing(reader.url, window=4, pipelining=2, close_timeout=0) as writer:
        await send(writer, range(12))
        for _ in range(5):
            peer = await reader.accept()
            assert (await peer.window()).lines == [0, 1, 2, 3]
            peer.stream.abort()
        peer = await reader.accept()
        assert (await peer.window()).lines == [0, 1]
        with trio.move_on_after(10) as scope:  # far beyond the time that events wait for a window to fill
            await peer.stream.receive_some()
        assert scope.cancelled_caught
        await peer.ack(2)
        assert (await peer.window()).lines == [2, 3]
        assert (await peer.window()).lines == [4, 5, 6, 7]


async def test_a_connection_past_its_time_takes_no_new_events(autojump_clock: trio.testing.MockClock) -> None:
    async with peers() as reader, writing(reader.url, hosts=HostConfig(ttl=10.0), window=4) as writer:
        peer = await reader.accept()
        await trio.sleep(7)
        await writer.send({"n": 0})
        assert (await peer.window()).lines == [0]
        await trio.sleep(6)
        await writer.send({"n": 1})
        with trio.move_on_after(10) as scope:
            await peer.stream.receive_some()
        assert scope.cancelled_caught
        await peer.ack(1)
        assert await peer.gone()
        peer = await reader.accept()
        assert (await peer.window()).lines == [1]
        await peer.ack(1)


# ---------------------------------------------------------------- the way in


async def test_a_reader_that_is_not_there_yet_is_no_error(autojump_clock: trio.testing.MockClock) -> None:
    async with writing("lumberjack+memory://late") as writer:
        await writer.send({"n": 0})
        await trio.sleep(100)
        async with peers("memory://late") as reader:
            peer = await reader.accept()
            assert (await peer.window()).lines == [0]
            await peer.ack(1)
            await writer.flush()


async def test_a_reader_may_close_an_idle_connection(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is lost, so that is no fault: the writer connects again with the next event, at once."""
    async with peers() as reader, writing(reader.url, window=2, linger=10.0) as writer:
        await (await reader.accept()).stream.aclose()  # before the first event
        for number in range(1, 4):
            await trio.sleep(3600)
            assert (writer.statistics().connects, writer.statistics().connections) == (number, 0)
            begin = trio.current_time()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(writer.deliver, [{"n": number}])
                peer = await reader.accept()
                assert (await peer.window()).lines == [number]
                await peer.ack(1)
            assert trio.current_time() == begin
            await peer.stream.aclose()
        await wait_all_tasks_blocked()
        assert (writer.statistics().connects, writer.statistics().faults) == (4, 0)
        assert caplog.messages == []
        await writer.send({"n": 4})
        peer = await reader.accept()
        await peer.stream.aclose()  # an event waits for more
        await reader.accept()
        assert (writer.statistics().connects, writer.statistics().faults) == (6, 1)
        assert [message.partition(";")[0] for message in caplog.messages] == [
            f"{reader.url}: the reader closed the connection"
        ]
        caplog.clear()


async def test_of_several_hosts_one_with_a_closed_connection_is_used_when_the_others_are_full(
    autojump_clock: trio.testing.MockClock,
) -> None:
    hosts = HostConfig(several="balance")
    async with (
        peers("memory://a") as a,
        peers("memory://b") as b,
        writing([a.url, b.url], hosts=hosts, window=2, pipelining=1, close_timeout=0) as writer,
    ):
        left, right = await a.accept(), await b.accept()
        await left.stream.aclose()
        await wait_all_tasks_blocked()
        await send(writer, range(2))
        assert (await right.window()).lines == [0, 1]
        await send(writer, range(2, 4))
        left = await a.accept()
        assert (await left.window()).lines == [2, 3]
        assert writer.statistics().faults == 0
        await right.ack(2)
        await left.stream.aclose()  # what it has not acked is sent to the other host at once, and its loss is a fault
        assert (await right.window()).lines == [2, 3]
        await a.accept()
        assert writer.statistics().faults == 1


async def test_a_host_with_a_closed_connection_is_left_alone_until_an_event_waits_for_it(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """And then it is used before the other host has acked, and before a window is full."""
    hosts = HostConfig(several="balance")
    async with (
        peers("memory://a") as a,
        peers("memory://b") as b,
        writing([a.url, b.url], hosts=hosts, window=2, pipelining=1, close_timeout=0) as writer,
        trio.open_nursery() as nursery,
    ):
        left, right = await a.accept(), await b.accept()
        await left.stream.aclose()
        await wait_all_tasks_blocked()
        assert writer.statistics().connects == 2
        nursery.start_soon(writer.deliver, [{"n": 0}])
        assert (await right.window()).lines == [0]
        await wait_all_tasks_blocked()
        begin = trio.current_time()
        await writer.send({"n": 1})
        left = await a.accept()
        assert (await left.window()).lines == [1]
        assert trio.current_time() == begin
        await right.ack(1)


async def test_a_host_that_waits_goes_on_waiting_if_another_took_the_event_that_woke_it(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Which of the two runs first is up to trio, so the test takes the event as the other connection does."""
    config = WriterConfig(window=10, linger=0.0)
    hub, gone = Hub(config), trio.Event()

    async def wait() -> None:
        await hub.wanted()
        gone.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        await wait_all_tasks_blocked()
        hub.put_nowait(b"0")
        assert isinstance(hub.take(WriterCore(config, now=0.0)), Batch)
        await wait_all_tasks_blocked()
        assert not gone.is_set()
        hub.put_nowait(b"1")
        await wait_all_tasks_blocked()
        assert gone.is_set()


async def test_certificates_that_cannot_be_used_are_told_to_whoever_connects() -> None:
    hosts = HostConfig(tls=TlsConfig(ca="/nowhere/ca.pem"))
    with pytest.raises(ConfigurationError, match="cannot use the certificates"):
        async with writing("lumberjack+tls://127.0.0.1:9", hosts=hosts):
            pass


async def test_calls_that_wait_when_the_writer_is_closed_fail(autojump_clock: trio.testing.MockClock) -> None:
    """The waiting tasks are not in the block of the writer, so that leaving it does not cancel them."""
    outcomes: list[str] = []

    async def call(function: Callable[..., Awaitable[None]], *arguments: Any) -> None:
        with pytest.raises(ConnectionClosed, match="closed before these events were acked"):
            await function(*arguments)
        outcomes.append(function.__name__)

    async with (
        trio.open_nursery() as nursery,
        writing("lumberjack+memory://nobody", window=1, queue=1, close_timeout=1) as writer,
    ):
        await writer.send({"n": 0})
        for function, *arguments in (
            (writer.flush,),
            (writer.send, {"n": 1}),
            (writer.deliver, [{"n": 2}, {"n": 3}]),
        ):
            nursery.start_soon(call, function, *arguments)
        await trio.sleep(1)
        assert outcomes == []
    assert sorted(outcomes) == ["deliver", "flush", "send"]
    await call(writer.flush)
    assert await writer.aclose() == 1


async def test_cancelling_a_send_that_waits_takes_nothing(autojump_clock: trio.testing.MockClock) -> None:
    async with writing("lumberjack+memory://nobody", window=1, queue=1, close_timeout=0) as writer:
        await writer.send({"n": 0})
        with trio.move_on_after(1) as scope:
            await writer.send({"n": 1})
        assert scope.cancelled_caught
        assert writer.unacked == 1
