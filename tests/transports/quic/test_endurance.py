"""Much at once, for long: loss, reordering, duplicates, spoilt packets and cut links under streams, while keys, connection ids and addresses change.

Everything that happens by chance comes from the seed, connection ids and the order of tasks included: a run that fails, fails again.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import trio
from tests.simnet import SimNet, SimPacket
from trio.testing import MockClock

from levada.framework.errors import ConnectionLost
from levada.transports.quic import ClientSessions, QuicConnection, QuicListener, QuicStream


async def read_all(stream: QuicStream) -> bytes:
    parts = []
    while data := await stream.receive_some():
        parts.append(data)
    return b"".join(parts)


async def answer(stream: QuicStream) -> None:
    await stream.send_all(await read_all(stream))
    await stream.send_eof()


async def call(connection: QuicConnection, data: bytes, priority: int) -> None:
    stream = await connection.open_stream(priority=priority)
    await stream.send_all(data)
    await stream.send_eof()
    assert await read_all(stream) == data


def client_keys(ends: Any) -> None:
    ends.client.update_keys()


def server_keys(ends: Any) -> None:
    ends.server.update_keys()


def both_keys(ends: Any) -> None:
    ends.client.update_keys()
    ends.server.update_keys()


def connection_id(ends: Any) -> None:
    ends.client.change_path()


def another_port(ends: Any) -> None:
    ends.client._endpoint.rebind(ends.net.port("client"))


def another_host(ends: Any) -> None:
    ends.client._endpoint.rebind(ends.net.port("elsewhere"))


def forgetful_nat(ends: Any) -> None:
    ends.net.rebind(ends.client._endpoint._port)


def cut(ends: Any) -> None:
    ends.net.partition("client", "elsewhere", "server")


def heal(ends: Any) -> None:
    ends.net.heal()


KEYS_AND_IDS = (client_keys, server_keys, connection_id)
EVERYTHING = (*KEYS_AND_IDS, both_keys, another_port, another_host, forgetful_nat)


@attrs.frozen(kw_only=True)
class Trouble:
    """What a network does, and what happens meanwhile."""

    link: dict[str, Any]
    changes: tuple[Callable[[Any], None], ...] = EVERYTHING
    count: int = 20
    gap: float = 0.3
    """Seconds at most between two changes."""
    sizes: tuple[int, ...] = (0, 1, 100, 3_000, 12_000)
    config: dict[str, Any] = attrs.field(factory=dict)
    hold: Callable[[SimPacket], float] | None = None
    """Seconds that a packet comes later."""
    spoil: Callable[[SimPacket], bool] | None = None


TINY = (0, 1, 100)
TROUBLES = {
    "new keys and ids, little to say": Trouble(link={"loss": 0.2}, changes=KEYS_AND_IDS, sizes=TINY, count=30, gap=0.2),
    "everything, little to say": Trouble(link={"loss": 0.2}, sizes=TINY, count=30, gap=0.2),
    "keys at both ends at once": Trouble(link={"loss": 0.1, "jitter": 0.02}, changes=(both_keys,)),
    "keys all the time": Trouble(link={"loss": 0.1, "jitter": 0.02}, config={"key_update_after": 9}),
    "heavy loss": Trouble(link={"loss": 0.3}),
    "all twice": Trouble(link={"loss": 0.1, "duplicate": 1.0, "jitter": 0.05}),
    "far out of order": Trouble(link={"loss": 0.02, "jitter": 0.5}),
    "fifty in reverse": Trouble(link={"loss": 0.05}, hold=lambda packet: (50 - packet.n % 50) * 0.004),
    "some very late": Trouble(link={"loss": 0.05}, hold=lambda packet: 0.4 * (packet.n % 50 == 7)),
    "spoilt": Trouble(link={"loss": 0.1}, spoil=lambda packet: packet.n % 11 == 5 and packet.n > 20),
    "cut": Trouble(link={"loss": 0.05}, changes=(*EVERYTHING, cut, heal, heal)),
    "narrow": Trouble(link={"loss": 0.02, "rate": 40_000, "queue": 6_000}),
    "small packets": Trouble(link={"loss": 0.1, "mtu": 1_300}),
    "little credit": Trouble(
        link={"loss": 0.15}, config={"max_streams": 2, "stream_window": 2_000, "connection_window": 3_000}
    ),
    "bulk": Trouble(link={"loss": 0.1, "jitter": 0.02, "duplicate": 0.05}, sizes=(30_000,), gap=0.5),
}


async def endure(lab: Any, seed: int, trouble: Trouble) -> None:
    dice = random.Random(seed)
    net = SimNet(seed, **trouble.link)
    if trouble.spoil is not None:
        net.corrupt(trouble.spoil)
    if trouble.hold is not None:
        hold = trouble.hold

        def keep(packet: SimPacket) -> None:
            packet.hold += hold(packet)

        net.fault(keep)
    # A client that has nothing to say would never be found again behind a NAT that has forgotten it.
    async with lab.connected(net, client={"keepalive_interval": 1.7, **trouble.config}, **trouble.config) as ends:

        async def serve() -> None:
            while True:
                nursery.start_soon(answer, await ends.server.accept_stream())

        async def talk() -> None:
            for _ in range(3):
                await call(ends.client, dice.randbytes(dice.choice(trouble.sizes)), dice.choice((1, 128)))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve)
            async with trio.open_nursery() as calls:
                for _ in range(3):
                    calls.start_soon(talk)
                for _ in range(trouble.count):
                    await trio.sleep(dice.uniform(0, trouble.gap))
                    dice.choice(trouble.changes)(ends)
                net.heal()
            for _ in range(60):  # the last of it may have to be said again, and a keepalive be under way
                await trio.sleep(0.31)
                if not any(end.engine._loss.bytes_in_flight for end in (ends.client, ends.server)):
                    break
            for end in (ends.client, ends.server):
                assert not end.closed
                assert end.engine._loss.bytes_in_flight == 0
                assert end.engine.ready.unacked == 0
                assert (len(end.streams), len(end.engine._streams)) == (0, 0)
            nursery.cancel_scope.cancel()


async def come_again(lab: Any, seed: int) -> None:
    """Early data, Retry, loss: four connections in a row, each with what the one before has left."""
    dice = random.Random(seed)
    net = SimNet(seed, loss=0.15, jitter=dice.choice((0, 0.03)), duplicate=dice.choice((0, 0.3)))
    sessions = ClientSessions()

    async def serve(listener: QuicListener) -> None:
        while True:
            nursery.start_soon(attend, (await listener.accept()).accept())

    async def attend(connection: QuicConnection) -> None:
        try:
            async with trio.open_nursery() as answers:
                while True:
                    answers.start_soon(answer, await connection.accept_stream())
        except* ConnectionLost:
            pass  # the client has its answers, and closed

    async with lab.listening(net, retry=dice.choice(("always", "never"))) as listener, trio.open_nursery() as nursery:
        nursery.start_soon(serve, listener)
        for turn in range(4):
            async with lab.dialling(net, early=turn > 0, sessions=sessions) as connection:
                async with trio.open_nursery() as calls:
                    for _ in range(4):
                        calls.start_soon(call, connection, dice.randbytes(dice.choice((0, 1, 100, 3_000, 12_000))), 128)
                await trio.sleep(1)
        nursery.cancel_scope.cancel()


def run(lab: Any, repeatable: Callable[[int], None], seed: int, trouble: str) -> None:
    repeatable(seed)
    clock = MockClock(autojump_threshold=0)
    if trouble == "early data":
        trio.run(come_again, lab, seed, clock=clock)
    else:
        trio.run(endure, lab, seed, TROUBLES[trouble], clock=clock)


@pytest.mark.ci
@pytest.mark.parametrize("trouble", [*TROUBLES, "early data"])
def test_many_troubles_together_leave_nothing_behind(lab: Any, repeatable: Callable[[int], None], trouble: str) -> None:
    run(lab, repeatable, 1, trouble)


@pytest.mark.parametrize("seed", [4, 17, 41, 51])
def test_seeds_that_once_waited_for_ever(lab: Any, repeatable: Callable[[int], None], seed: int) -> None:
    """An acknowledgement alone had carried the news of new keys, and got lost."""
    run(lab, repeatable, seed, "new keys and ids, little to say")


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(2, 42))
@pytest.mark.parametrize("trouble", [*TROUBLES, "early data"])
def test_many_seeds_leave_nothing_behind(lab: Any, repeatable: Callable[[int], None], trouble: str, seed: int) -> None:
    run(lab, repeatable, seed, trouble)
