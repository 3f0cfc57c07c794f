"""What a peer can cost: the worst messages that the default limits let through, and those that they do not."""

from __future__ import annotations

import contextlib
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgpack
import pytest
import trio
from tests.pace import within

from levada.actors.aqueduct import Peer, RawMessage, connect, serve
from levada.framework import (
    Actor,
    ActorSystem,
    OneshotSender,
    Receiver,
    TerminalState,
    channel,
    handles,
    message,
    oneshot,
)
from levada.framework.errors import CarrierError, LevadaError
from levada.transports.aqueduct.frames import VERSION, ConnectionControl, encode_int
from levada.transports.carriers import Connection, dial


@message("tests.cost.Load")
class Load:
    value: Any


@message("tests.cost.Echo")
class Echo:
    answer: OneshotSender[int]


def load(items: bytes, count: int) -> bytes:
    """The octets of a `Load` with a list of so many items."""
    header = b"\xdd" + count.to_bytes(4, "big")
    return msgpack.packb(msgpack.ExtType(2, b"\x92\xaftests.cost.Load" + header + items * count))


NESTED = msgpack.packb(msgpack.ExtType(2, b"\x92\xaftests.cost.Load\xc0"))
WORST = {
    "empty maps": load(b"\x80", 116_000),
    "small maps": load(b"\x81\x01\x01", 95_000),
    "texts": load(b"\xa2ab", 1_040_000),
    "messages": load(NESTED, 40_000),
    "refs": load(b"\xd5\x01\x05\x05", 16_384),
    "too many maps": load(b"\x80", 15_000_000),
    "too many refs": load(b"\xd5\x01\x05\x05", 120_000),
    "octets": load(b"\xc6\x00\xfe\x00\x00" + bytes(0xFE0000), 1),
}


class Handler:
    """Counts what it gets, as a function or as an actor."""

    def __init__(self) -> None:
        self.loads = 0

    def take(self, m: Load | Echo) -> None:
        if isinstance(m, Echo):
            m.answer.send(self.loads)
        else:
            self.loads += 1
            if isinstance(m.value, Receiver):
                m.value.close()

    def function(self) -> Callable[..., Any]:
        async def handler(m: Load | Echo) -> None:
            self.take(m)

        return handler

    def actor(self) -> Callable[..., Any]:
        outer = self

        class Taker(Actor[Load | Echo]):
            @handles
            def take(self, m: Load | Echo) -> None:
                outer.take(m)

        return Taker


@pytest.mark.ci
@pytest.mark.parametrize("scheme", ["memory", pytest.param("qmux+memory", marks=pytest.mark.release)])
@pytest.mark.parametrize("octets", WORST.values(), ids=WORST)
async def test_one_message_costs_at_most_two_seconds_and_150_mb(octets: bytes, scheme: str) -> None:
    """Measured on two cores: 0.45 s and 80 MB; CPU time, so that a busy machine does not decide."""
    async with (
        ActorSystem() as system,
        serve(system, f"aqueduct+{scheme}://desk", Handler().function(), Any) as listener,
        connect(system, listener.url, RawMessage) as peer,
    ):
        for measure in (time.process_time, lambda: tracemalloc.get_traced_memory()[1]):
            if measure is not time.process_time:
                tracemalloc.start()
            before = measure()
            await peer.send(RawMessage(octets))
            await (await peer.send(RawMessage(NESTED), receipt=True))
            await trio.testing.wait_all_tasks_blocked()
            cost = measure() - before
            assert within(cost, 2.0) if measure is time.process_time else cost < 150_000_000
        tracemalloc.stop()


@pytest.mark.ci
@pytest.mark.parametrize("kind", ["function", "actor"])
async def test_others_are_served_between_large_messages(kind: str, scheme: str) -> None:
    """An echo of an honest client does not wait until all that a hostile one has sent is decoded."""
    handler = Handler()
    async with (
        ActorSystem() as system,
        serve(system, f"aqueduct+{scheme}://desk", getattr(handler, kind)(), Any) as listener,
        connect(system, listener.url, RawMessage) as hostile,
        connect(system, listener.url, object) as honest,
    ):
        for _ in range(20):
            await hostile.send(RawMessage(load(b"\x81\x01\x01", 12_000)))
        sender, answer = oneshot(int)
        await honest.send(Echo(sender))
        assert await answer < 15
        hostile.abort()


@pytest.mark.parametrize("levels", [50, 5000])
async def test_messages_that_are_refused_cost_their_sender_only_them(levels: int, scheme: str) -> None:
    """Whatever cannot be decoded is one line in the log; the connection goes on."""
    handler = Handler()
    async with (
        ActorSystem() as system,
        serve(system, f"aqueduct+{scheme}://desk", handler.function(), Any) as listener,
        connect(system, listener.url, RawMessage) as peer,
    ):
        for octets in (
            b"\x91" * levels,
            b"\xdd\xff\xff\xff\xff" * levels,
            msgpack.packb({bytes([7]): 1}) * levels,
            load(b"\xd5\x01\x00\x07", levels),
        ):
            await peer.send(RawMessage(octets))
        await (await peer.send(RawMessage(NESTED), receipt=True))
        await trio.testing.wait_all_tasks_blocked()
        assert handler.loads == 1
        assert len(listener.peers) == 1


# ---------------------------------------------------------------- beside an honest client


@contextmanager
def costs(octets: int, seconds: float) -> Iterator[None]:
    """Require that the block takes no more memory at any moment, and no more processor time, than this."""
    tracemalloc.start(1)
    try:
        start = time.process_time()
        yield
        assert tracemalloc.get_traced_memory()[1] < octets
        assert within(time.process_time() - start, seconds)
    finally:
        tracemalloc.stop()


async def honest(peer: Peer[Any]) -> None:
    """Require that a client is answered within a second of processor time of all."""
    start = time.process_time()
    sender, answer = oneshot(int)
    await peer.send(Echo(sender))
    await answer
    assert within(time.process_time() - start, 1.0)


@pytest.mark.ci
async def test_many_lookups_hold_nobody_up(scheme: str) -> None:
    async with (
        ActorSystem() as system,
        serve(system, f"aqueduct+{scheme}://desk", Handler().function(), Any) as listener,
        connect(system, listener.url, object) as hostile,
        connect(system, listener.url, object) as peer,
        trio.open_nursery() as nursery,
    ):
        with costs(64 << 20, 10.0):

            async def look_up(name: str) -> None:
                with contextlib.suppress(LevadaError):
                    await hostile.lookup(name)

            for n in range(500):
                nursery.start_soon(look_up, f"nobody {n}")
            await trio.testing.wait_all_tasks_blocked()
            await honest(peer)
        hostile.abort()


@pytest.mark.ci
@pytest.mark.parametrize("shape", ["chain", "tree"])
async def test_channels_in_channels_that_are_dropped_hold_nobody_up(shape: str, scheme: str) -> None:
    """A thousand receivers, each in a message of another: one after the other, or ten in each. The first is closed."""
    async with (
        ActorSystem() as system,
        serve(system, f"aqueduct+{scheme}://desk", Handler().function(), Any) as listener,
        connect(system, listener.url, object) as hostile,
        connect(system, listener.url, object) as peer,
    ):
        with costs(64 << 20, 10.0):
            first, head = channel(object)
            senders = [first]
            for n in range(1000):
                inner, travelling = channel(object)
                (senders[-1] if shape == "chain" else senders[n // 10]).send_nowait(Load(travelling))
                senders.append(inner)
            await hostile.send(Load(head))
            await trio.testing.wait_all_tasks_blocked()
            await honest(peer)
            hostile.abort()
            await hostile.terminated()
            await honest(peer)
            assert all(sender.state is not TerminalState.OPEN for sender in senders)


@pytest.mark.ci
@pytest.mark.parametrize("what", ["streams that are reset", "headers without end", "one octet at a time"])
async def test_raw_octets_hold_nobody_up(what: str) -> None:
    async with (
        ActorSystem() as system,
        serve(system, "aqueduct+memory://desk", Handler().function(), Any) as listener,
        connect(system, listener.url, object) as peer,
        dial("memory://desk") as hostile,
    ):
        assert isinstance(hostile, Connection)
        with costs(64 << 20, 10.0):
            with contextlib.suppress(CarrierError):
                for n in range(2000 if what == "streams that are reset" else 1):
                    stream = await hostile.open_stream()
                    match what:
                        case "streams that are reset":
                            stream.send_nowait(bytes([n % 256]))
                            stream.reset(0)
                        case "headers without end":
                            stream.send_nowait(VERSION + b"\x01" + encode_int(1 << 24) + bytes(1 << 20))
                        case _:
                            for octet in VERSION + ConnectionControl((("x", bytes(2000)),)).encode():
                                stream.send_nowait(bytes([octet]))
                                await trio.lowlevel.checkpoint()
            await trio.testing.wait_all_tasks_blocked()
            await honest(peer)
        hostile.close()
