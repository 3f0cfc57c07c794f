"""Over QUIC: on a network that loses, delays and reorders packets, and over real loopback sockets; and how much of everything fits."""

from __future__ import annotations

import gc
import hashlib
import math
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from tests.simnet import SimNet
from trio.testing import MockClock

from levada.actors.authentication import Credentials, Refused
from levada.actors.authenticators import BearerTokens
from levada.actors.maop import (
    Call,
    Disapproved,
    GateConfig,
    Handler,
    Handlers,
    HandlerSpec,
    MaopConfig,
    OperationLost,
    Peer,
    PeerConfig,
    TestPlan,
    connect,
    serve,
)
from levada.actors.maop.config import listen_carrier
from levada.actors.maop.entry import connect_over, serve_over
from levada.framework import ActorSystem, Identity
from levada.framework.errors import ConfigurationError, ConnectionLost
from levada.transports.carriers import MemoryConfig
from levada.transports.quic import QuicConfig, dial, listen

from .conftest import NOTHING, TOKENS, Start, echo, nothing, settled

LARGE = HandlerSpec(allow_undefined_length=True, streaming=True, max_payload=2**40)


class Sum:
    """A streaming handler that keeps only the digest of what it got."""

    def __init__(self) -> None:
        self.digests: list[str] = []
        self.octets = 0

    async def take(self, call: Call) -> None:
        digest = hashlib.sha256()
        async for chunk in call:
            digest.update(chunk)
            self.octets += len(chunk)
        self.digests.append(digest.hexdigest())


# ---------------------------------------------------------------- a bad network


@pytest.mark.parametrize("seed", [1, 2])
async def test_loss_and_reordering_change_nothing(
    start_on_network: Start, seed: int, autojump_clock: MockClock
) -> None:
    total = Sum()
    data = bytes(range(256)) * 1024

    async def pieces() -> AsyncIterator[bytes]:
        for at in range(0, len(data), 50_000):
            yield data[at : at + 50_000]

    net = SimNet(seed, delay=0.02, jitter=0.03, loss=0.05, turns=200_000)
    async with start_on_network(net, {100: Handler(total.take, spec=LARGE), 101: echo}) as ends:
        answers: list[bytes] = []

        async def ask(number: int) -> None:
            answers.append(await ends.peer.request(101, b"%d" % number * 100, timeout=60))

        async with trio.open_nursery() as nursery:
            for number in range(50):
                nursery.start_soon(ask, number)
            nursery.start_soon(ends.peer.message, 100, data)
            nursery.start_soon(ends.peer.message, 100, pieces())
        assert sorted(answers) == sorted(b"%d" % number * 100 for number in range(50))
        assert total.digests == [hashlib.sha256(data).hexdigest()] * 2
        assert await ends.peer.test(TestPlan(mode=2, multi=True, exp=6), timeout=60) is None
        await settled()
        assert ends.left() == NOTHING


async def test_cancellation_reaches_the_peer_over_a_lossy_network(
    start_on_network: Start, autojump_clock: MockClock
) -> None:
    said: list[str] = []

    async def hang(call: Call) -> None:
        await trio.sleep_forever()

    async def undo(call: Call, reason: str) -> None:
        said.append(reason)

    net = SimNet(3, delay=0.02, loss=0.1, turns=200_000)
    async with start_on_network(net, {101: Handler(hang, on_cancel=undo), 102: echo}) as ends:
        for body in (b"", b"body"):
            with trio.move_on_after(1):
                await ends.peer.request(101, body, timeout=None)
        await settled()
        assert len(said) == 2
        assert ends.left() == NOTHING
        assert await ends.peer.request(102, b"alive") == b"alive"


async def test_a_network_that_falls_silent_is_a_lost_connection(
    start_on_network: Start, autojump_clock: MockClock
) -> None:
    said: list[str] = []

    async def hang(call: Call) -> None:
        await trio.sleep_forever()

    async def undo(call: Call, reason: str) -> None:
        said.append(reason)

    net = SimNet(6, delay=0.01, turns=200_000)
    async with start_on_network(net, {101: Handler(hang, on_cancel=undo)}) as ends:
        async with trio.open_nursery() as nursery:

            async def ask() -> None:
                with pytest.raises(OperationLost):
                    await ends.peer.request(101, timeout=None)

            nursery.start_soon(ask)
            await trio.sleep(1)
            net.partition("client", "server")
        assert await ends.peer.terminated() is not None
        await settled()
        assert said == ["the connection is over"]
        assert ends.listener.peers == []
        net.heal()


@pytest.mark.rule("MA-81")
@pytest.mark.rule("MA-130")
async def test_ma81_ma130_a_peer_that_grants_three_streams(start_on_network: Start, autojump_clock: MockClock) -> None:
    """The pool takes what credit there is, and leaves streams for operations."""
    net = SimNet(7, delay=0.01, turns=400_000)
    few = {"max_streams": 3, "max_streams_unidirectional": 3}
    async with start_on_network(net, {100: nothing, 101: echo}, carrier=few) as ends:
        answers: list[bytes] = []

        async def ask(number: int) -> None:
            answers.append(await ends.peer.request(101, b"%d" % number, timeout=60))
            await ends.peer.message(100, b"%d" % number)

        async with trio.open_nursery() as nursery:
            for number in range(30):
                nursery.start_soon(ask, number)
        assert sorted(answers) == sorted(b"%d" % number for number in range(30))
        assert len(ends.client.core.pool.streams) < 3
        await settled()
        assert ends.left() == NOTHING


# ---------------------------------------------------------------- the carrier's settings


@pytest.mark.rule("MA-1")
@pytest.mark.rule("MA-2")
@pytest.mark.rule("MA-125")
@pytest.mark.rule("MA-129")
async def test_ma1_ma2_ma125_ma129_what_maop_asks_of_quic(
    start_on_network: Start, quic: tuple[QuicConfig, QuicConfig], autojump_clock: MockClock
) -> None:
    """ALPN maop/1, no datagrams, no 0-RTT, windows of 10 MiB and 1 MiB, 100 streams and 16 for control, idle 30 s with keep-alive."""
    from levada.actors.maop.config import _fit

    fitted: QuicConfig = _fit("quic://x", PeerConfig(carrier=attrs.evolve(quic[0], alpn=("other",), idle_timeout=5.0)))
    assert (fitted.alpn, fitted.datagrams, fitted.early_data) == (("maop/1",), False, False)
    assert (fitted.connection_window, fitted.stream_window) == (10 * 2**20, 2**20)
    assert (fitted.idle_timeout, fitted.keepalive_interval) == (30.0, 10.0)
    assert fitted.max_streams >= 116
    assert fitted.max_streams_unidirectional >= 100
    defaults: QuicConfig = _fit("quic://x", PeerConfig())
    assert (defaults.max_streams, defaults.max_streams_unidirectional) == (116, 116)
    with pytest.raises(ConfigurationError, match="QuicConfig"):
        async with listen_carrier("maop://127.0.0.1:0", PeerConfig(carrier=7)):
            pass


# ---------------------------------------------------------------- real sockets


@pytest.mark.ci
@pytest.mark.loopback
async def test_over_a_real_socket(quic: tuple[QuicConfig, QuicConfig], tmp_path: Path) -> None:
    total = Sum()
    file = tmp_path / "body"
    file.write_bytes(bytes(range(256)) * 16_384)  # 4 MiB

    async def send(call: Call) -> Path:
        return file

    handlers: Handlers = {100: Handler(total.take, spec=LARGE), 101: echo, 103: send}
    async with ActorSystem() as system:
        server = PeerConfig(carrier=quic[0])
        async with serve(system, "maop://127.0.0.1:0", handlers, authenticate=TOKENS, config=server) as listener:
            assert listener.url.startswith("maop://127.0.0.1:")
            client = PeerConfig(carrier=attrs.evolve(quic[1], server_name="localhost"))
            async with connect(system, listener.url, token=b"secret", config=client) as peer:
                assert peer.info.alpn == "maop/1"
                await peer.message(100, file)
                assert total.digests == [hashlib.sha256(file.read_bytes()).hexdigest()]
                digest = hashlib.sha256()
                async with peer.open_request(103) as reply:
                    async for chunk in reply:
                        digest.update(chunk)
                assert digest.hexdigest() == total.digests[0]
                async with trio.open_nursery() as nursery:
                    for _ in range(200):
                        nursery.start_soon(peer.request, 101, b"x" * 100)
                for mode in (0, 1, 2):
                    assert await peer.test(TestPlan(mode=mode, multi=True, exp=8)) is None


@pytest.mark.loopback
@pytest.mark.rule("MA-128")
async def test_ma128_attempts_from_one_address_are_limited(quic: tuple[QuicConfig, QuicConfig]) -> None:
    """Authentication attempts per source address; above, close before reading."""
    async with ActorSystem() as system:
        server = PeerConfig(carrier=quic[0], max_attempts=3.0)
        async with serve(system, "maop://127.0.0.1:0", {}, authenticate=TOKENS, config=server) as listener:
            client = PeerConfig(carrier=attrs.evolve(quic[1], server_name="localhost"))
            outcomes: list[bool] = []

            async def attempt() -> None:
                try:
                    async with connect(system, listener.url, token=b"secret", config=client):
                        outcomes.append(True)
                        await trio.sleep(0.05)
                except ConnectionLost:
                    outcomes.append(False)

            began = trio.current_time()
            async with trio.open_nursery() as nursery:
                for _ in range(12):
                    nursery.start_soon(attempt)
            seconds = trio.current_time() - began  # three may come at once, then three a second
            assert 3 <= outcomes.count(True) <= 3 + math.ceil(3 * seconds)
            assert listener._actor.refused_attempts == outcomes.count(False)


# ---------------------------------------------------------------- much of it


async def upload(octets: int, piece: int = 131_072) -> tuple[int, int]:
    """Upload zeros through the memory carrier; return what arrived, and the most memory that it took."""
    total = Sum()
    block = bytes(piece)

    async def source() -> AsyncIterator[bytes]:
        for _ in range(octets // piece):
            yield block

    async with (
        ActorSystem() as system,
        serve(system, "maop+memory://desk", {100: Handler(total.take, spec=LARGE)}, authenticate=TOKENS) as listener,
        connect(system, listener.url, token=b"secret") as peer,
    ):
        await peer.message(100, b"warm up")
        gc.collect()
        tracemalloc.start()
        try:
            await peer.message(100, source(), length=octets)
            most = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    return total.octets - 7, most


@pytest.mark.parametrize("mib", [64, pytest.param(1024, marks=pytest.mark.release)])
async def test_an_upload_takes_no_memory(mib: int) -> None:
    arrived, most = await upload(mib * 2**20)
    assert arrived == mib * 2**20
    assert most < 6 * 2**20  # a window here, one there, and a megabyte on the way


async def many(count: int) -> float:
    """Have so many requests open at once on one connection; return the megabytes for each thousand, of both ends together."""
    gate = trio.Event()
    all_running = trio.Event()
    running = [0]

    async def wait(call: Call) -> None:
        running[0] += 1
        if running[0] == count:
            all_running.set()
        await gate.wait()

    config = PeerConfig(
        core=MaopConfig(
            gate=GateConfig(
                max_inflight_ops=min(count, 65_535), max_pending_approvals=65_535, max_open_streams=count + 100
            )
        ),
        carrier=MemoryConfig(shape="connection", max_streams=count + 100),
        max_running=count,
    )

    async def ask(peer: Peer) -> None:
        await peer.request(101, timeout=None)

    async with (
        ActorSystem() as system,
        serve(
            system,
            "maop+memory://desk",
            {101: wait},
            authenticate=BearerTokens.of({b"t": Identity("c-1")}),
            config=config,
        ) as listener,
        connect(system, listener.url, token=b"t", config=config) as peer,
        trio.open_nursery() as nursery,
    ):
        gc.collect()
        tracemalloc.start()
        try:
            for _ in range(count):
                nursery.start_soon(ask, peer)
            await all_running.wait()
            gc.collect()
            octets = tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()
        assert peer.statistics().operations == count
        gate.set()
    return octets / count / 1000


@pytest.mark.ci
@pytest.mark.parametrize("count", [2_000, pytest.param(50_000, marks=pytest.mark.release)])
async def test_many_operations_at_once_take_bounded_memory(count: int) -> None:
    megabytes = await many(count)
    print(f"{count}: {megabytes:.2f} MB for 1000 operations, both ends together")
    assert megabytes < 25, f"{megabytes:.1f} MB for 1000 operations"


@pytest.mark.rule("MA-19")
async def test_ma19_a_server_may_demand_the_channel_binding(
    quic: tuple[QuicConfig, QuicConfig], autojump_clock: MockClock
) -> None:
    """The TLS exporter value in a pair; absent, or of another connection: Disapproved UNAUTHORIZED (1)."""
    asked: list[Credentials] = []

    async def decide(question: Credentials) -> Identity | Refused:
        asked.append(question)
        return Identity("bound") if question.bound else Refused("The channel binding is absent or wrong.")

    net = SimNet(1)
    listening = partial(listen, "quic://server:4433", quic[0], port=net.port("server", 4433))
    async with ActorSystem() as system, serve_over(system, listening, {101: echo}, authenticate=decide):

        def client(**options: Any) -> AbstractAsyncContextManager[Peer]:
            dialling = partial(dial, "quic://server:4433", quic[1], port=net.port("client"))
            return connect_over(system, dialling, token=b"t", **options)

        async with client(bind=True, pairs={"region": "north"}) as peer:
            assert await peer.request(101, b"x") == b"x"
            assert asked[0].info.channel_binding == peer.info.channel_binding
        assert asked[0].headers["region"] == b"north"
        for pairs in ({}, {"channel-binding": ""}, {"channel-binding": "ä"}, asked[0].setup.pairs):
            with pytest.raises(Disapproved) as refused:
                async with client(pairs=pairs):
                    pass
            assert refused.value.code == 1
        assert len({question.info.channel_binding for question in asked}) == 5


async def test_a_connection_without_tls_cannot_be_bound() -> None:
    async with ActorSystem() as system:
        with pytest.raises(ConfigurationError, match="bind=True needs QUIC"):
            async with connect(system, "maop+memory://desk", token=b"t", bind=True):
                pass
