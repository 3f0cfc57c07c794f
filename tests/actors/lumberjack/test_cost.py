"""What a peer can cost: memory and time of the worst messages, and how long an honest writer beside them waits."""

from __future__ import annotations

import subprocess
import sys
import time
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

import pytest
import trio
import trio.testing
from tests.pace import within

from levada.actors.lumberjack import ReaderConfig, Unit, serve
from levada.framework import ActorSystem
from levada.framework.errors import CarrierError
from levada.transports.carriers import ByteStream, dial
from levada.transports.lumberjack import encode_data, encode_envelope, encode_json, encode_window

MIB = 2**20


def json_frame(version: int, text: bytes) -> bytes:
    return b"%dJ\0\0\0\1" % version + len(text).to_bytes(4, "big") + text


def array(item: bytes, octets: int) -> bytes:
    return b"[" + b",".join([item] * (octets // (len(item) + 1))) + b"]"


def envelope(version: int, *frames: bytes) -> bytes:
    return encode_window(version, 1) + encode_envelope(version, zlib.compress(b"".join(frames), 9))


SCALE = 64
COST = 64 * MIB // SCALE


def worst(scale: int) -> dict[str, Callable[[], bytes]]:
    """Small messages that ask for much, for limits that are the default's divided by `scale`."""
    frame, cost = 9 * MIB // scale, 64 * MIB // scale
    return {
        "numbers": lambda: envelope(1, json_frame(1, array(b"1", frame))),
        "numbers in version 2": lambda: envelope(2, json_frame(2, array(b"1", frame)) * 6),
        "as many numbers as are allowed": lambda: envelope(1, json_frame(1, array(b"1", cost // 42))),
        "as many numbers as are allowed, in version 2": lambda: envelope(2, json_frame(2, array(b"1", cost // 42)) * 6),
        "lists": lambda: envelope(2, json_frame(2, array(b"[]", cost // 55))),
        "lists, and no JSON": lambda: envelope(2, json_frame(2, array(b"[]", cost // 55)[:-1])),
        "very many lists of lists": lambda: envelope(2, json_frame(2, array(b"[]", 60_000)) * (1000 // scale)),
        "quotes": lambda: envelope(2, json_frame(2, b'["' + b"," * (cost // 100) + b'"' + b'""' * (frame // 3) + b"]")),
        "wide characters": lambda: envelope(1, encode_data(1, 1, {"k": "a" * frame + "\U0001f600"}) * 6),
        "wide characters of JSON": lambda: envelope(2, encode_json(2, 1, {"k": "a" * frame + "\U0001f600"}) * 6),
        "events": lambda: encode_window(1, 10**6) + envelope(1, encode_data(1, 1, {}) * (300_000 // scale))[6:],
        "windows of one": lambda: envelope(1, encode_data(1, 1, {}) * (600_000 // scale)),
        "windows of nothing": lambda: envelope(2, encode_window(2, 0) * (100_000 // scale)),
        "zeros": lambda: envelope(1, bytes(64 * MIB // scale)),
    }


WORST = worst(SCALE)


async def attack(url: str, data: bytes) -> None:
    async with dial(url) as dialled:
        stream = cast("ByteStream", dialled)
        try:
            await stream.send_all(data)
            await stream.send_eof()
            while await stream.receive_some():
                pass
        except CarrierError:
            pass


async def take(unit: Unit) -> None:
    pass


async def ship(
    url: str,
    stop: trio.Event,
    waits: list[float],
    clock: Callable[[], float] = time.process_time,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Be an honest writer; note the processor's time that each small window takes until its ack."""
    window = encode_window(2, 50) + envelope(2, json_frame(2, b'{"message":"hello"}') * 50)[6:]
    async with dial(url) as dialled:
        stream = cast("ByteStream", dialled)
        task_status.started()
        while not stop.is_set():
            began = clock()
            await stream.send_all(window)
            while await stream.receive_some() == b"2A\0\0\0\0":
                pass
            waits.append(clock() - began)
            await trio.sleep(0.01)


CONFIG = ReaderConfig(
    max_frame=10 * MIB // SCALE,
    max_unpacked=64 * MIB // SCALE,
    max_envelope=MIB,
    max_cost=COST,
    max_windows=1024 // SCALE,
    max_inflight_bytes=256 * MIB // SCALE,
)


@pytest.mark.ci
@pytest.mark.rule("LJ-42b")
@pytest.mark.rule("LJ-47")
@pytest.mark.parametrize(
    "message", sorted(WORST.keys() - {"events"})
)  # those are measured at the core: tracemalloc makes them slow
async def test_lj47_memory_for_the_worst_messages(message: str, autojump_clock: trio.testing.MockClock) -> None:
    """LJ-47: a 64th: a dozen at a time grow memory by LJ-41 + 3 x LJ-42 + 4 MiB at most."""
    data = WORST[message]()
    async with ActorSystem() as system, serve(system, "lumberjack+memory://memory", take, config=CONFIG) as reader:
        tracemalloc.start()
        before, _ = tracemalloc.get_traced_memory()
        async with trio.open_nursery() as nursery:
            for _ in range(12):
                nursery.start_soon(attack, "memory://memory", data)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak - before < 4 * COST + 4 * MIB
        await trio.sleep(10.0)
        assert (reader.statistics().bytes_held, reader.statistics().connections) == (0, 0)


@pytest.mark.ci
@pytest.mark.rule("LJ-35")
@pytest.mark.rule("LJ-47")
@pytest.mark.parametrize("message", WORST)
async def test_lj47_an_honest_writer_beside_fifty(message: str, autojump_clock: trio.testing.MockClock) -> None:
    """LJ-47: it has the ack of each of its windows within a second of the processor's time.

    Messages and limits are a 64th of those of the default. All that fifty such messages ask for is 0.02 to 0.3 s of work, so what this
    asserts is that none of them gets past its limit: in one that does there are many seconds.
    """
    data = WORST[message]()
    waits: list[float] = []
    stop = trio.Event()
    async with ActorSystem() as system, serve(system, "lumberjack+memory://wait", take, config=CONFIG):
        async with trio.open_nursery() as honest:
            honest.start_soon(ship, "memory://wait", stop, waits)
            async with trio.open_nursery() as nursery:
                for _ in range(50):
                    nursery.start_soon(attack, "memory://wait", data)
            stop.set()
        assert within(max(waits), 1.0)


READER = """
import sys
import trio
from levada.actors.lumberjack import Unit, serve
from levada.framework import ActorSystem
from tests.pace import within

async def take(unit: Unit) -> None:
    pass

def peak() -> int:
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))

async def main() -> None:
    async with ActorSystem() as system, serve(system, "lumberjack://127.0.0.1:0", take) as reader:
        print(reader.url, peak(), flush=True)
        await trio.to_thread.run_sync(sys.stdin.readline)
        print(peak(), reader.statistics().bytes_held, flush=True)

trio.run(main)
"""


@contextmanager
def reader_process() -> Iterator[tuple[str, Callable[[], float], Callable[[], tuple[int, int]]]]:
    """A reader with the default limits: its URL, its processor's time, and what says how far it grew and what it holds."""
    command = [sys.executable, "-c", READER]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        ask, told = process.stdin, process.stdout
        url, before = told.readline().split()
        cpu = (~process.pid << 3) | 2  # as `clock_getcpuclockid` makes it on Linux

        def grown() -> tuple[int, int]:
            print(file=ask, flush=True)
            peak, held = map(int, told.readline().split())
            return (peak - int(before)) * 1024, held

        try:
            yield url.removeprefix("lumberjack"), lambda: time.clock_gettime(cpu), grown
        finally:
            process.kill()


@pytest.mark.loopback
@pytest.mark.release
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and the clock of another process")
@pytest.mark.rule("LJ-42b")
@pytest.mark.rule("LJ-47")
@pytest.mark.parametrize("message", WORST)
async def test_lj47_eight_at_full_size(message: str) -> None:
    """LJ-47: a process of its own grows by LJ-41 + 3 x LJ-42 + 16 MiB at most, and honest writers wait less than a second of its time.

    One of them was there before the eight, the other one comes after them.
    """
    data = worst(1)[message]()
    waits: list[float] = []
    stop = trio.Event()
    with reader_process() as (url, cpu, grown):
        async with trio.open_nursery() as honest:
            await honest.start(ship, "tcp" + url, stop, waits, cpu)
            async with trio.open_nursery() as nursery:
                for _ in range(8):
                    nursery.start_soon(attack, "tcp" + url, data)
                honest.start_soon(ship, "tcp" + url, stop, waits, cpu)
            stop.set()
        size, held = grown()
    assert size < (64 + 3 * 64 + 16) * MIB
    assert within(max(waits), 1.0)
    assert held == 0
