"""The reader in an actor system, on the memory carrier and in virtual time."""

from __future__ import annotations

import logging
import ssl
import struct
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, cast

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from levada.actors.lumberjack import Reader, ReaderConfig, Sink, Unit, serve
from levada.actors.lumberjack.connection import LumberjackDriver
from levada.actors.lumberjack.load import Load
from levada.framework import Actor, ActorSystem, Reply, actor, handles
from levada.framework.errors import ConfigurationError, ConnectionLost
from levada.framework.message import field_types, tag_of
from levada.transports.carriers import ByteStream, MemoryConfig, dial
from levada.transports.carriers.memory import memory_streams
from levada.transports.lumberjack import encode_data, encode_json, encode_window


def frames(version: int, *numbers: int) -> bytes:
    if version == 1:
        return b"".join(encode_data(1, number, {"n": str(number)}) for number in numbers)
    return b"".join(encode_json(2, number, {"n": str(number)}) for number in numbers)


def window(version: int, *numbers: int) -> bytes:
    return encode_window(version, len(numbers)) + frames(version, *numbers)


class Shelf(Actor[Unit]):
    """Keeps units and answers when it is told to."""

    units: list[Unit]
    patient: bool
    replies: list[Reply[Any]]

    @handles
    def keep(self, unit: Unit) -> object:
        self.units.append(unit)
        if self.patient:
            self.replies.append(self.reply_later())
        return None


class Kept:
    """A shelf and what is on it."""

    def __init__(self, system: ActorSystem, *, patient: bool = False) -> None:
        self.units: list[Unit] = []
        self.replies: list[Reply[Any]] = []
        self.ref = system.spawn(Shelf, self.units, patient, self.replies)

    @property
    def numbers(self) -> list[list[int]]:
        return [[int(event["n"]) for event in unit.events] for unit in self.units]


@asynccontextmanager
async def desk(
    sink: Sink | None = None, *, patient: bool = False, carrier: MemoryConfig | None = None, **settings: Any
) -> AsyncIterator[tuple[Reader, Kept]]:
    async with ActorSystem(shutdown_timeout=30.0) as system:
        kept = Kept(system, patient=patient)
        async with serve(
            system, "lumberjack+memory://logs", sink or kept.ref, config=ReaderConfig(**settings), carrier=carrier
        ) as reader:
            yield reader, kept


@asynccontextmanager
async def writer(name: str = "logs") -> AsyncIterator[ByteStream]:
    async with dial(f"memory://{name}") as stream:
        yield cast("ByteStream", stream)


async def acks(stream: ByteStream, count: int) -> list[int]:
    data = b""
    while len(data) < 6 * count:
        part = await stream.receive_some()
        assert part, f"the reader closed after {data!r}"
        data += part
    assert len(data) == 6 * count
    return [number for (number,) in struct.iter_unpack(">2xI", data)]


async def until_closed(stream: ByteStream) -> bytes:
    """What comes until the reader closes, or cuts."""
    data = b""
    try:
        while part := await stream.receive_some():
            data += part
    except ConnectionLost:
        pass
    return data


@pytest.mark.parametrize("version", [1, 2])
async def test_units_go_to_the_sink_with_their_origin_and_are_acked(version: int) -> None:
    async with desk() as (reader, kept), writer() as stream:
        await stream.send_all(window(version, 1, 2) + window(version, 1, 2, 3))
        assert await acks(stream, 2) == [2, 3]
        assert kept.numbers == [[1, 2], [1, 2, 3]]
        first, second = kept.units
        assert (first.number, second.number, first.origin) == (1, 2, second.origin)
        assert (first.origin.version, first.origin.peer, first.origin.subject) == (version, stream.info.local, None)
        assert (first.name, first.whole) == (f"{first.origin.connection}-000001", True)
        numbers = reader.statistics()
        assert (numbers.connections, numbers.units, numbers.events, numbers.acks) == (1, 2, 5, 2)
        assert numbers.bytes_received == len(window(version, 1, 2) + window(version, 1, 2, 3))


async def test_each_connection_has_its_own_name_and_the_counters_outlive_it(autojump_clock: MockClock) -> None:
    async with desk() as (reader, kept):
        for _ in range(2):
            async with writer() as stream:
                await stream.send_all(window(1, 1))
                assert await acks(stream, 1) == [1]
        await trio.sleep(5)
        assert len({unit.origin.connection for unit in kept.units}) == 2
        assert (reader.statistics().connections, reader.statistics().connections_accepted) == (0, 2)
        assert (reader.statistics().events, reader.statistics().bytes_held) == (2, 0)


@pytest.mark.rule("LJ-25")
async def test_lj25_the_ack_comes_after_the_reply(autojump_clock: MockClock) -> None:
    """LJ-25: commit before ack, units in order, two at the sink and then nothing more is read."""
    async with desk(patient=True) as (reader, kept), writer() as stream:
        await stream.send_all(window(2, 1, 2) + window(2, 1) + window(2, 1, 2, 3))
        await trio.sleep(1)
        assert kept.numbers == [[1, 2], [1]]
        kept.replies[1].send(None)
        await trio.sleep(1)
        assert kept.numbers == [[1, 2], [1], [1, 2, 3]]
        kept.replies[0].send(None)
        assert await acks(stream, 2) == [2, 1]
        kept.replies[2].send(None)
        assert await acks(stream, 1) == [3]
        assert reader.statistics().oldest_unacked == 0


@pytest.mark.rule("LJ-25")
async def test_lj25_a_stopped_sink_stops_the_writer(autojump_clock: MockClock) -> None:
    """LJ-25: TCP pushes back: with two units at the sink the writer's sends block; memory stays bounded."""
    async with desk(patient=True) as (reader, kept), writer() as stream:
        sent = 0
        frame = window(2, *range(1, 101))
        with trio.move_on_after(3600):
            while True:
                await stream.send_all(frame)
                sent += 1
        assert len(kept.units) == 2
        assert sent < 200
        assert reader.statistics().bytes_held < 2**20
        kept.replies[0].send(None)
        await trio.sleep(1)
        assert len(kept.units) == 3


@pytest.mark.rule("LJ-25")
@pytest.mark.parametrize("how", ["failure", "death", "refusal"])
@pytest.mark.usefixtures("user_code_fails")
async def test_lj25_a_sink_that_fails_closes_without_ack(how: str, autojump_clock: MockClock) -> None:
    """LJ-25: failure or death of the sink closes the connection; the writer sends again elsewhere or later."""

    async def fail(unit: Unit) -> None:
        raise RuntimeError("disk full")

    async with desk(fail if how == "failure" else None, patient=True) as (reader, kept), writer() as stream:
        await stream.send_all(window(1, 1))
        await wait_all_tasks_blocked()
        if how == "death":
            kept.ref.kill()
        elif how == "refusal":
            kept.replies[0].fail(ValueError("not mine"))
        assert await until_closed(stream) == b""
        await trio.sleep(3)
        assert (reader.statistics().sink_failures, reader.statistics().events_unacked) == (1, 1)
        assert reader.statistics().connections == 0


async def test_a_class_or_a_function_is_one_actor_for_each_connection() -> None:
    made: list[Actor[Unit]] = []

    class Own(Actor[Unit]):
        @handles
        def take(self, unit: Unit) -> None:
            made.append(self)

    async with desk(Own), writer() as first, writer() as second:
        for stream in (first, second, first):
            await stream.send_all(window(1, 1))
            assert await acks(stream, 1) == [1]
    assert len(made) == 3
    assert made[0] is made[2]
    assert made[0] is not made[1]


@pytest.mark.rule("LJ-20")
async def test_lj20_keepalives_while_the_sink_works(autojump_clock: MockClock) -> None:
    """LJ-20: ack 0 every 3 s in version 2 only."""
    async with desk(patient=True) as (_, kept), writer() as new, writer() as old:
        await new.send_all(window(2, 1))
        await old.send_all(window(1, 1))
        began = trio.current_time()
        assert await acks(new, 3) == [0, 0, 0]
        assert trio.current_time() == pytest.approx(began + 9.0)
        for reply in kept.replies:
            reply.send(None)
        assert await acks(new, 1) == [1]
        assert await acks(old, 1) == [1]


@pytest.mark.rule("LJ-25a")
@pytest.mark.rule("LJ-26")
async def test_lj25a_lj26_version_1_does_not_wait_for_ever(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """LJ-25a, LJ-26: 60 s; a commit after that is counted and logged, once a minute."""
    async with desk(patient=True) as (reader, kept), writer() as first, writer() as second:
        began = trio.current_time()
        await first.send_all(window(1, 1))
        await second.send_all(window(1, 1))
        assert await until_closed(first) == b""
        assert trio.current_time() == pytest.approx(began + 60.0)
        assert await until_closed(second) == b""
        for reply in kept.replies:
            reply.send(None)
        await trio.sleep(1)
        assert (reader.statistics().late_commits, reader.statistics().sink_failures) == (2, 2)
        assert [
            record.getMessage().partition(": ")[2] for record in caplog.records if record.levelno == logging.WARNING
        ] == [
            "logs/client was gone when the sink committed a unit after 60 s; it comes again: put a spool before a slow sink"
        ]


@pytest.mark.rule("LJ-26")
async def test_lj26_a_writer_that_closes_at_once_is_not_the_sinks_fault(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """LJ-26: a commit that is late because its writer did not wait is counted; nobody is blamed for it."""
    async with desk(patient=True) as (reader, kept):
        async with writer() as hasty:
            await hasty.send_all(window(2, 1))
            await wait_all_tasks_blocked()
            hasty.abort()
        await wait_all_tasks_blocked()
        kept.replies[0].send(None)
        await wait_all_tasks_blocked()
        assert reader.statistics().late_commits == 1
    assert [record.levelno for record in caplog.records if record.levelno > logging.INFO] == []


@pytest.mark.rule("LJ-18")
@pytest.mark.rule("LJ-29")
async def test_lj18_lj29_clocks(autojump_clock: MockClock) -> None:
    """LJ-18, LJ-29: idle ack after a second, close after a minute without octets."""
    async with desk(), writer() as stream:
        began = trio.current_time()
        await stream.send_all(encode_window(1, 3) + frames(1, 1))
        assert await acks(stream, 1) == [1]
        assert trio.current_time() == pytest.approx(began + 1.0)
        assert await until_closed(stream) == b""
        assert trio.current_time() == pytest.approx(began + 61.0)


@pytest.mark.rule("LJ-29")
async def test_lj29_a_slow_loris_is_closed(autojump_clock: MockClock) -> None:
    """LJ-29: a frame that dribbles has 30 s; nobody else is disturbed."""
    async with desk() as (reader, _), writer() as slow, writer() as other:
        began = trio.current_time()
        async with trio.open_nursery() as nursery:

            async def dribble() -> None:
                try:
                    for octet in encode_data(1, 1, {"line": "x" * 1000}):
                        await slow.send_all(bytes([octet]))
                        await trio.sleep(1.0)
                except ConnectionLost:
                    pass

            nursery.start_soon(dribble)
            assert await until_closed(slow) == b""
            assert 30.0 <= trio.current_time() - began <= 33.0
            await other.send_all(window(2, 1))
            assert await acks(other, 1) == [1]
            nursery.cancel_scope.cancel()
        assert reader.statistics().protocol_errors == {"LJ-29": 1}


@pytest.mark.rule("LJ-46")
async def test_lj46_one_bad_peer_hurts_nobody_and_is_one_log_line(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """LJ-46: one line with address, rule and first octets; counted by kind; no traceback."""
    async with desk() as (reader, kept), writer() as good, writer() as bad:
        await good.send_all(encode_window(1, 2) + frames(1, 1))
        await bad.send_all(window(1, 7) + b"\x16\x03\x01 a TLS hello")
        assert await until_closed(bad) == b"1A" + struct.pack(">I", 7)
        await good.send_all(frames(1, 2))
        assert await acks(good, 1) == [2]
        assert reader.statistics().protocol_errors == {"LJ-2": 1}
        assert sorted(kept.numbers) == [[1, 2], [7]]
        (line,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
        assert bad.info.local in line.getMessage()
        assert "[LJ-2, octet 26]; it begins with b'\\x16\\x03\\x01 a TLS hello'" in line.getMessage()
        assert (line.exc_info, vars(line)["event"]) == (None, "refused")


@pytest.mark.rule("LJ-43")
async def test_lj43_too_many_connections(autojump_clock: MockClock) -> None:
    """LJ-43: accepted, closed, counted."""
    async with desk(max_connections=2) as (reader, _), writer() as first, writer() as second:
        for each in (first, second):
            await each.send_all(window(1, 1))
            assert await acks(each, 1) == [1]
        async with writer() as third:
            assert await until_closed(third) == b""
        await first.send_all(window(1, 2))
        assert await acks(first, 1) == [2]
        assert (reader.statistics().connections, reader.statistics().connections_refused) == (2, 1)


@pytest.mark.rule("LJ-43")
async def test_lj43_a_writer_without_a_whole_unit_makes_room(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """LJ-43: the oldest that is silent, or has sent half a unit, is closed for the newest; a writer that has sent one stays."""
    async with desk(max_connections=2) as (reader, _), writer() as first, writer() as half:
        await first.send_all(window(1, 1))
        assert await acks(first, 1) == [1]
        await half.send_all(window(1, 1)[:-1])
        async with writer() as third:
            assert await until_closed(half) == b""
            await third.send_all(window(1, 1))
            assert await acks(third, 1) == [1]
        await first.send_all(window(1, 2))
        assert await acks(first, 1) == [2]
        assert reader.statistics().connections_refused == 1
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.endswith("it made room for others: it has not said a whole first message")


@pytest.mark.rule("LJ-28")
async def test_lj28_half_close_is_answered(autojump_clock: MockClock) -> None:
    """LJ-28: finish the units, ack, then close."""
    async with desk(patient=True) as (_, kept), writer() as stream:
        await stream.send_all(encode_window(1, 9) + frames(1, 1, 2))
        await stream.send_eof()
        await trio.sleep(1)
        kept.replies[0].send(None)
        assert await until_closed(stream) == b"1A\0\0\0\2"


@pytest.mark.rule("LJ-28")
async def test_lj28_leaving_the_block_acks_what_gets_committed(autojump_clock: MockClock) -> None:
    """LJ-28: running commits have 5 s; the open unit is dropped."""
    async with ActorSystem() as system:
        kept = Kept(system, patient=True)
        async with trio.open_nursery() as nursery:
            leave = trio.Event()

            async def reader() -> None:
                async with serve(system, "lumberjack+memory://logs", kept.ref):
                    await leave.wait()

            nursery.start_soon(reader)
            await wait_all_tasks_blocked()
            async with writer() as quick, writer() as slow, writer() as opened:
                await quick.send_all(window(1, 1))
                await wait_all_tasks_blocked()
                await slow.send_all(window(1, 2))
                await opened.send_all(encode_window(1, 2) + frames(1, 3))
                await wait_all_tasks_blocked()
                began = trio.current_time()
                leave.set()
                await trio.sleep(4.0)
                kept.replies[0].send(None)
                assert await until_closed(quick) == b"1A\0\0\0\1"
                assert await until_closed(opened) == b""
                assert await until_closed(slow) == b""
                assert 4.9 <= trio.current_time() - began <= 5.1
        assert kept.numbers == [[1], [2]]


async def test_the_end_of_the_system_ends_the_reader(autojump_clock: MockClock) -> None:
    class Edge(Actor[Any]):
        async def started(self) -> None:
            await self.enter(serve(self.system, "lumberjack+memory://logs", take))

    async def take(unit: Unit) -> None:
        await trio.sleep(1.0)

    async with trio.open_nursery() as nursery:
        async with ActorSystem() as system:
            system.spawn(Edge)
            await wait_all_tasks_blocked()
            stream = await nursery.start(hold)
            await stream.send_all(window(1, 5))
            await wait_all_tasks_blocked()
        assert await until_closed(stream) == b"1A\0\0\0\5"
        nursery.cancel_scope.cancel()


async def test_connections_of_a_system_that_ends_have_their_time_together(autojump_clock: MockClock) -> None:
    kept: list[Kept] = []

    class Edge(Actor[Any]):
        async def started(self) -> None:
            kept.append(Kept(self.system, patient=True))
            await self.enter(serve(self.system, "lumberjack+memory://logs", kept[0].ref))

    async with trio.open_nursery() as nursery:
        async with ActorSystem(shutdown_timeout=60.0) as system:
            system.spawn(Edge)
            await wait_all_tasks_blocked()
            streams = [await nursery.start(hold) for _ in range(5)]
            for stream in streams:
                await stream.send_all(window(2, 1))
            await wait_all_tasks_blocked()
            began = trio.current_time()
        assert trio.current_time() - began < 8.0
        for stream in streams:
            assert await until_closed(stream) == b"2A\0\0\0\0"  # a keepalive
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("order", ["stop", "kill", "drain", "drain and stop", "lost"])
@pytest.mark.parametrize("steps", [0, 1, 3, 6])
@pytest.mark.parametrize("data", [window(1, 1), window(1, 1)[:9]], ids=["unit", "cut"])
async def test_a_connection_may_end_at_any_moment(
    order: str, steps: int, data: bytes, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever comes first: no error, nothing is left of it, and no longer than the time for commits."""

    async def slow(unit: Unit) -> None:
        await trio.sleep(1.0)

    load = Load(ReaderConfig())
    async with ActorSystem() as system, trio.open_nursery() as nursery:
        client, server = memory_streams()
        client.send_nowait(data)
        connection = LumberjackDriver(server, system.spawn(actor(slow)), load)
        ref = system.spawn(lambda: connection)
        for _ in range(steps):
            await trio.lowlevel.checkpoint()
        if order == "lost":
            client.abort()
        if "drain" in order:
            nursery.start_soon(connection.aclose)
        if "stop" in order:
            ref.stop()
        elif order == "kill":
            ref.kill()
        await trio.sleep(10.0)
        client.abort()
        with trio.fail_after(100.0):
            ref.stop()
            assert type(await ref.terminated()).__name__ != "Failed"
    assert (len(load), load.statistics(0.0).bytes_held) == (0, 0)
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []


async def hold(task_status: trio.TaskStatus[ByteStream]) -> None:
    async with writer() as stream:
        task_status.started(stream)
        await trio.sleep_forever()


@pytest.mark.rule("LJ-27")
@pytest.mark.parametrize(("settings", "seconds"), [({}, 30.0), ({"send_timeout": 4.0}, 4.0)])
async def test_lj27_a_writer_that_reads_no_acks_is_closed(
    settings: dict[str, Any], seconds: float, autojump_clock: MockClock
) -> None:
    """LJ-27: a full buffer of acks, then the time of the settings, by default 30 s; the default of the buffer is 64 KiB."""
    small = MemoryConfig(window=600, high_watermark=60)
    async with desk(send_buffer=60, carrier=small, **settings) as (reader, kept), writer() as stream:
        began = trio.current_time()
        with pytest.raises(ConnectionLost):
            while True:
                await stream.send_all(window(1, 1))
        assert trio.current_time() == pytest.approx(began + seconds)
        assert 600 < 6 * len(kept.units) < 800  # what the carrier takes, and our own buffer
        assert ReaderConfig().send_buffer == 64 * 1024
        await trio.sleep(5)
        assert reader.statistics().connections == 0


@pytest.mark.rule("LJ-42b")
async def test_lj42b_the_newest_are_paused_first_and_all_get_through(autojump_clock: MockClock) -> None:
    """LJ-42b: above the bound of the listener the newest connections wait; the oldest that holds anything never does."""
    big = {"line": "x" * 20_000}
    async with desk(max_inflight_bytes=400_000, idle_ack=1000.0) as (reader, kept):
        async with trio.open_nursery() as nursery:
            done: list[int] = []

            async def ship(number: int) -> None:
                async with writer() as stream:
                    await stream.send_all(encode_window(2, 30))
                    for sequence in range(1, 31):
                        await stream.send_all(encode_json(2, sequence, big))
                        await trio.sleep(0.1)
                        assert reader.statistics().bytes_held < 400_000 + 12 * 4 * 65_536  # a read of each
                    assert (await acks(stream, 1))[-1] == 30
                    done.append(number)

            for number in range(12):
                nursery.start_soon(ship, number)
        assert len(done) == 12
        assert reader.statistics().connections_paused == 0
        assert sum(len(unit.events) for unit in kept.units) == 360
        assert any(not unit.whole for unit in kept.units)


@pytest.mark.rule("LJ-42b")
async def test_lj42b_who_holds_little_is_not_paused(autojump_clock: MockClock) -> None:
    """LJ-42b: of those that hold much, the one that came first with it goes on, and all others wait; small windows get through."""
    # Not `wait_all_tasks_blocked`: on a slow machine a connection that has had its share rests for a while.
    big = encode_window(2, 1) + encode_json(2, 1, {"line": "x" * 20_000})
    async with (
        desk(patient=True, max_inflight_bytes=500_000) as (reader, kept),
        AsyncExitStack() as stack,
    ):
        writers = []
        for _ in range(6):
            writers.append(await stack.enter_async_context(writer()))
            await trio.sleep(0.2)  # the order in which they begin counts
        oldest, first, second, third, fourth, newest = writers
        for stream in (first, second, third, fourth, oldest):
            await stream.send_all(big)
            await trio.sleep(0.2)
        assert (reader.statistics().connections_paused, len(kept.units)) == (4, 5)
        for number in (6, 7):
            await newest.send_all(window(2, number))
            await trio.sleep(0.2)
            kept.replies[-1].send(None)
            assert await acks(newest, 1) == [number]
        for stream in (oldest, first):
            await stream.send_all(window(2, 8))
            await trio.sleep(0.2)
        assert [unit.origin.connection for unit in kept.units[7:]] == [kept.units[0].origin.connection]
        for reply in kept.replies[:5] + kept.replies[7:]:
            reply.send(None)
        await trio.sleep(0.2)
        kept.replies[-1].send(None)
        assert await acks(first, 2) == [1, 8]
        assert await acks(oldest, 2) == [1, 8]
        assert reader.statistics().connections_paused == 0


@pytest.mark.rule("LJ-42b")
async def test_lj42b_those_that_wait_go_on_although_nobody_reports(autojump_clock: MockClock) -> None:
    """LJ-42b: once little is held all connections are read, also if those let on first have nothing to say."""
    async with (
        desk(patient=True, max_inflight_bytes=100_000) as (reader, kept),
        writer() as big,
        writer(),
        writer(),
        writer() as last,
    ):
        await wait_all_tasks_blocked()  # each has said that it holds nothing
        await big.send_all(encode_window(2, 1) + encode_json(2, 1, {"line": "x" * 40_000}))
        await wait_all_tasks_blocked()
        assert reader.statistics().connections_paused == 3
        kept.replies[0].send(None)
        assert await acks(big, 1) == [1]
        assert reader.statistics().connections_paused == 0
        await last.send_all(window(2, 1))
        await wait_all_tasks_blocked()
        assert len(kept.units) == 2
        kept.replies[1].send(None)
        assert await acks(last, 1) == [1]


@pytest.mark.rule("LJ-6")
async def test_lj6_an_end_inside_a_frame_is_an_error_in_the_log(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """LJ-6: logged as an error; an end at a boundary is not."""
    async with desk() as (_, kept):
        for data in (window(1, 1), window(1, 1) + b"1D"):
            async with writer() as stream:
                await stream.send_all(data)
                await stream.send_eof()
                await until_closed(stream)
        await trio.sleep(3)
        assert kept.numbers == [[1], [1]]
    assert [vars(record)["event"] for record in caplog.records if record.levelno >= logging.ERROR] == ["cut"]


async def test_a_url_that_is_none_of_ours() -> None:
    async with ActorSystem() as system:
        for url in ("http://localhost", "lumberjack+memory://", "lumberjack+ftp://x:1"):
            with pytest.raises(ConfigurationError):
                async with serve(system, url, cast("Any", None)):
                    pass


async def two(unit: Unit, more: int) -> None: ...


@pytest.mark.parametrize("sink", [two, lambda unit: unit, Shelf, "store"], ids=["two", "sync", "fields", "text"])
async def test_what_cannot_be_a_sink_is_a_mistake(sink: Any) -> None:
    async with ActorSystem() as system:
        with pytest.raises(ConfigurationError, match="wanted a Ref, an async function of one unit"):
            async with serve(system, "lumberjack+memory://logs", sink):
                pass


async def test_a_function_may_be_annotated_with_what_is_not_there() -> None:
    async def store(unit: Nowhere) -> None:  # type: ignore[name-defined]  # noqa: F821 - that is the point
        pass

    async with desk(store), writer() as stream:
        await stream.send_all(window(1, 1))
        assert await acks(stream, 1) == [1]


async def test_a_context_needs_tls() -> None:
    async with desk() as (reader, _):
        assert reader.url == "lumberjack+memory://logs"
        reader.reload()
        with pytest.raises(ConfigurationError, match="does not use TLS"):
            reader.reload(ssl.create_default_context())


async def test_units_are_messages_that_can_travel() -> None:
    async with desk() as (_, kept), writer() as stream:
        await stream.send_all(window(2, 1))
        await acks(stream, 1)
        assert tag_of(type(kept.units[0])) == "levada.lumberjack.Unit"
        assert set(field_types(Unit)) == {"events", "origin", "number", "whole"}


async def test_leaving_the_block_does_not_wait_for_late_commits(autojump_clock: MockClock) -> None:
    async with ActorSystem() as system:
        kept = Kept(system, patient=True)
        async with serve(system, "lumberjack+memory://late", kept.ref) as reader:
            async with writer("late") as stream:
                await stream.send_all(window(1, 1))
                assert await until_closed(stream) == b""
            began = trio.current_time()
            assert reader.statistics().connections == 1
        assert trio.current_time() - began < 0.1
