"""A relay acks upstream only what was acked downstream."""

from __future__ import annotations

import json
import struct
from typing import Any, cast

import pytest
import trio
from trio.testing import MockClock

from levada.actors.lumberjack import Unit, WriterConfig, connect, relay, serve
from levada.framework import ActorSystem
from levada.transports.carriers import ByteStream, dial
from levada.transports.lumberjack import encode_data, encode_json, encode_window


@pytest.mark.rule("LJ-25")
async def test_lj25_upstream_is_acked_after_downstream(autojump_clock: MockClock) -> None:
    """LJ-25: commit before ack, over two hops; keepalives go up while the far sink works."""
    arrived: list[dict[str, Any]] = []

    async def far(unit: Unit) -> None:
        await trio.sleep(10.0)
        arrived.extend(unit.events)

    async with (
        ActorSystem() as system,
        serve(system, "lumberjack+memory://far", far) as end,
        connect(system, end.url, config=WriterConfig(window=4, linger=0)) as writer,
        serve(system, "lumberjack+memory://near", relay(writer)) as near,
        dial("memory://near") as dialled,
    ):
        stream = cast("ByteStream", dialled)
        began = trio.current_time()
        frames = b"".join(encode_json(2, number, {"n": number}) for number in (1, 2, 3))
        await stream.send_all(encode_window(2, 3) + frames)
        data = b""
        while not data.endswith(b"2A\0\0\0\3"):
            assert data == b"2A\0\0\0\0" * (len(data) // 6)
            assert arrived == []
            data += await stream.receive_some()
        assert len(data) == 4 * 6
        assert trio.current_time() == pytest.approx(began + 10.0, abs=0.5)
        assert arrived == [{"n": 1}, {"n": 2}, {"n": 3}]
        assert near.statistics().acks == end.statistics().acks == 1


async def test_a_unit_is_sent_on_at_once(autojump_clock: MockClock) -> None:
    async def far(unit: Unit) -> None:
        pass

    async with (
        ActorSystem() as system,
        serve(system, "lumberjack+memory://far", far) as end,
        connect(system, end.url) as writer,
        serve(system, "lumberjack+memory://near", relay(writer)),
        dial("memory://near") as dialled,
    ):
        stream = cast("ByteStream", dialled)
        began = trio.current_time()
        for _ in range(10):
            await stream.send_all(encode_window(2, 1) + encode_json(2, 1, {"n": 1}))
            assert await stream.receive_some() == b"2A\0\0\0\1"
        assert trio.current_time() == began


async def test_numbers_beyond_a_float_pass_through(autojump_clock: MockClock) -> None:
    arrived: list[dict[str, Any]] = []

    async def far(unit: Unit) -> None:
        arrived.extend(unit.events)

    async with (
        ActorSystem() as system,
        serve(system, "lumberjack+memory://far", far) as end,
        connect(system, end.url) as writer,
        serve(system, "lumberjack+memory://near", relay(writer)),
        dial("memory://near") as dialled,
    ):
        stream = cast("ByteStream", dialled)
        body = b'{"n":1e400}'
        frame = b"2J" + struct.pack(">II", 2, len(body)) + body
        await stream.send_all(encode_window(2, 3) + encode_json(2, 1, {"n": 1}) + frame + encode_json(2, 3, {"n": 3}))
        assert await stream.receive_some() == b"2A\0\0\0\3"
    assert arrived == [{"n": 1}, {"n": "1e400"}, {"n": 3}]


async def test_octets_that_are_not_text_pass_through(autojump_clock: MockClock) -> None:
    arrived: list[dict[str, Any]] = []

    async def far(unit: Unit) -> None:
        arrived.extend(unit.events)

    half = encode_json(1, 2, {"line": "\ud83d"})
    raw = b"caf\xe9".decode("utf-8", "surrogateescape")
    for version in (1, 2):
        async with ActorSystem() as system, serve(system, "lumberjack+memory://far", far) as end:
            config = WriterConfig(version=version, linger=0)
            async with (
                connect(system, end.url, config=config) as writer,
                serve(system, "lumberjack+memory://near", relay(writer)),
                dial("memory://near") as dialled,
            ):
                stream = cast("ByteStream", dialled)
                await stream.send_all(encode_window(1, 2) + encode_data(1, 1, {"line": raw}) + half)
                assert await stream.receive_some() == b"1A\0\0\0\2"
    assert json.loads(json.dumps(arrived)) == [{"line": raw}, {"line": r"\ud83d"}, {"line": raw}, {"line": "\ud83d"}]
