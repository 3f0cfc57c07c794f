"""What a peer can cost: the worst inputs within the default limits, what they hold, and whether an honest client notices."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from contextlib import AsyncExitStack
from time import process_time
from urllib.parse import urlsplit

import attrs
import pytest
import trio
from tests.pace import within
from trio.testing import wait_all_tasks_blocked

from levada.actors.authentication import Authentication, Credentials, Refused
from levada.actors.rsocket import (
    COMPOSITE,
    ClientConfig,
    ConnectedPeer,
    CoreConfig,
    LeaseGrant,
    Listener,
    Payload,
    Request,
    RequestCanceled,
    ServerConfig,
)
from levada.actors.rsocket.dialects import core_of
from levada.framework import ActorSystem, Identity
from levada.framework.errors import CarrierError, ChannelError
from levada.transports.carriers import ByteStream, dial
from levada.transports.rsocket import RSocketCore
from levada.transports.rsocket.events import Interaction
from levada.transports.rsocket.frames import FrameType, PayloadFrame, RequestFrame
from levada.transports.rsocket.reactive_streams import ReactiveStreamsCore

from .conftest import below, connect, serve

pytestmark = pytest.mark.ci
MB = 1_000_000
CORE = CoreConfig(metadata_mime_type=COMPOSITE, fragment_size=1 << 20)
ALLOWED = LeaseGrant(1_000_000.0, 2**31 - 1)


async def handler(request: Request) -> bytes | None:
    """Look at the route of each request, and never answer some."""
    if request.data == b"large":
        return bytes(1_000_000)
    if request.route == "" and request.data.startswith(b"never"):
        await trio.sleep_forever()
    return b""


def open_and_cancel(core: ReactiveStreamsCore) -> None:
    for _ in range(5_000):
        core.send_cancel(core.send_request_stream(Payload(b"never"), 1, 0.0))


def credit(core: ReactiveStreamsCore) -> None:
    stream_id = core.send_request_stream(Payload(b"never"), 1, 0.0)
    for _ in range(10_000):
        core.send_request_n(stream_id, 1)


def unanswered(core: ReactiveStreamsCore) -> None:
    for _ in range(2_000):
        core.send_request_response(Payload(b"never"), 0.0)


def large_keepalives(core: ReactiveStreamsCore) -> None:
    for _ in range(4):
        core.send_keepalive(bytes(15_000_000))


def small_keepalives(core: ReactiveStreamsCore) -> None:
    for _ in range(10_000):
        core.send_keepalive()


def entries(core: ReactiveStreamsCore) -> None:
    """Entries of 4 octets, which would be objects of 100."""
    for _ in range(2):
        core.send_request_response(Payload(b"", b"\x80\0\0\0" * 2_000_000), 0.0)


def tags(core: ReactiveStreamsCore) -> None:
    """Tags of a route of 1 octet."""
    for _ in range(2):
        core.send_request_response(Payload(b"", b"\xfe" + (8_000_000).to_bytes(3) + bytes(8_000_000)), 0.0)


def routes(core: ReactiveStreamsCore) -> None:
    """Metadata that is new each time, so that none that is remembered helps."""
    for number in range(2_000):
        core.send_request_response(Payload(b"", b"\x80\0\0\0" * 60 + b"\x80\0\0\x04" + number.to_bytes(4)), 0.0)


def fired(core: ReactiveStreamsCore) -> None:
    for _ in range(10_000):
        core.send_fire_and_forget(Payload(b""), 0.0)


def pushes(core: ReactiveStreamsCore) -> None:
    for _ in range(10_000):
        core.send_metadata_push(b"x")


def extensions(core: ReactiveStreamsCore) -> None:
    for number in range(10_000):
        core.send_extension(0, 1 + number, bytes(100))


def large_pushes(core: ReactiveStreamsCore) -> None:
    """For a hook that never ends."""
    for _ in range(40):
        core.send_metadata_push(bytes(1_000_000))


def leases(core: ReactiveStreamsCore) -> None:
    for number in range(10_000):
        core.send_lease(1.0 + number % 7, number, 0.0, b"x")


def held(core: ReactiveStreamsCore) -> None:
    """Of 400 MB the handlers hold 64 MiB."""
    for _ in range(400):
        core.send_request_response(Payload(b"never" + bytes(1_000_000)), 0.0)


def endless(core: ReactiveStreamsCore) -> None:
    """A channel's payload in fragments, of more than may be put together."""
    core.send_request_channel(Payload(bytes(70_000_000)), 1, 0.0)


# MB at its worst, and CPU seconds: several times what was measured on a busy machine.
WORST: list[tuple[Callable[[ReactiveStreamsCore], None], int, float]] = [
    (open_and_cancel, 10, 6.0),
    (credit, 10, 4.0),
    (unanswered, 30, 6.0),
    (large_keepalives, 140, 10.0),
    (small_keepalives, 10, 6.0),
    (entries, 80, 5.0),
    (tags, 80, 5.0),
    (routes, 20, 6.0),
    (fired, 20, 6.0),
    (pushes, 10, 5.0),
    (endless, 220, 10.0),
    (extensions, 10, 4.0),
    (large_pushes, 20, 4.0),
    (leases, 10, 6.0),
    (held, 140, 6.0),
]


async def push(peer: ConnectedPeer, metadata: bytes) -> None:
    """A hook that never ends."""
    await trio.sleep_forever()


SERVER = ServerConfig(metadata_pushed=push)


async def attack(url: str, octets: bytes, honest: ConnectedPeer, listener: Listener) -> float:
    """Send, and read whatever comes, until all has been taken up; return the most CPU time for which an honest request waited."""
    waited = 0.0
    async with dial(url) as stream, trio.open_nursery() as nursery:
        assert isinstance(stream, ByteStream)

        @nursery.start_soon
        async def sink() -> None:
            try:
                while await stream.receive_some():
                    pass
            except CarrierError:
                pass

        @nursery.start_soon
        async def ask() -> None:
            nonlocal waited
            while True:
                began = process_time()
                await honest.request_response(b"honest")
                waited = max(waited, process_time() - began)

        await stream.send_all(octets[:100])
        while len(listener.peers) < 2:
            await trio.lowlevel.checkpoint()
        try:
            for at in range(100, len(octets), 1 << 20):  # so that the attacker's own copy counts little
                await stream.send_all(octets[at : at + (1 << 20)])
        except CarrierError:
            pass  # it has been cut off
        while len(listener.peers) == 2:
            attacker = listener.peers[1]
            carrier = attacker.statistics().carrier
            if carrier is not None and carrier.bytes_received == len(octets) and not below(attacker).unbegun:
                break
            await trio.lowlevel.checkpoint()
        nursery.cancel_scope.cancel()
        stream.abort()
    return waited


def written(dialect: str, worst: Callable[[ReactiveStreamsCore], None]) -> bytes:
    config = attrs.evolve(CORE, lease=LeaseGrant()) if worst is leases else CORE
    core = core_of(dialect)(config, client=True, framed=False, now=0.0, random_bytes=bytes)
    begin = b"".join(core.data_to_send(0.0))
    worst(core)
    return begin + b"".join(core.data_to_send(0.0))


@pytest.mark.parametrize("dialect", ["rsocket", pytest.param("reactivesocket", marks=pytest.mark.release)])
@pytest.mark.parametrize(("worst", "peak", "seconds"), WORST, ids=[case[0].__name__ for case in WORST])
async def test_what_the_worst_message_costs(
    dialect: str, worst: Callable[[ReactiveStreamsCore], None], peak: int, seconds: float
) -> None:
    octets = written(dialect, worst)
    async with (
        ActorSystem() as system,
        serve(
            system,
            f"{dialect}+memory://desk",
            handler,
            config=attrs.evolve(SERVER, lease=ALLOWED if worst is leases else None),
        ) as listener,
    ):
        async with connect(system, listener.url) as honest:
            await honest.request_response(b"honest")
            began = process_time()
            waited = await attack("memory://desk", octets, honest, listener)
            spent = process_time() - began
            while len(listener.peers) > 1:
                await trio.lowlevel.checkpoint()
            tracemalloc.start()
            try:
                await attack("memory://desk", octets, honest, listener)
                most = tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()
        assert (most < peak * MB, within(waited, 1.0), within(spent, seconds)) == (True, True, True), (
            most / MB,
            waited,
            spent,
        )


async def test_sessions_that_are_left_hold_little() -> None:
    """200 clients ask for a session and 1 MB, and go; beside them a session that keeps little goes on. Limits are 1/16 of the defaults."""
    config = attrs.evolve(CORE, resume=True)
    limits = ServerConfig(core=config, max_sessions=1000 // 16, max_session_bytes=(256 << 20) // 16)
    async with ActorSystem() as system, serve(system, "rsocket+memory://desk", handler, config=limits) as listener:
        async with connect(system, listener.url, config=ClientConfig(core=config)) as honest:
            tracemalloc.start()
            try:
                began = process_time()
                for number in range(200):
                    token = number.to_bytes(16)
                    core = RSocketCore(
                        attrs.evolve(config, resume_token=token), client=True, framed=False, now=0.0, random_bytes=bytes
                    )
                    core.send_request_response(Payload(b"large"), 0.0)
                    async with dial("memory://desk") as stream:
                        assert isinstance(stream, ByteStream)
                        await stream.send_all(b"".join(core.data_to_send(0.0)))
                        taken = 0
                        while taken < 1_000_000 and (data := await stream.receive_some()):
                            taken += len(data)
                        stream.abort()
                    if not number % 20:
                        asked = process_time()
                        await honest.request_response(b"honest")
                        assert within(process_time() - asked, 1.0)
                most, spent = tracemalloc.get_traced_memory()[1], process_time() - began
            finally:
                tracemalloc.stop()
            assert len(listener.peers) == 62
        assert (most < 30 * MB, within(spent, 10.0)) == (True, True), (most / MB, spent)


async def test_clients_of_a_hook_that_hangs_hold_little() -> None:
    """100 clients wait for `authenticate`, each with 1 MB of requests behind its SETUP, of which none is handled."""

    async def decide(credentials: Credentials) -> Identity | Refused:
        if credentials.setup.data_mime_type == "text/plain":
            await trio.sleep_forever()
        return Identity("honest")

    config = attrs.evolve(CORE, data_mime_type="text/plain")
    core = RSocketCore(config, client=True, framed=False, now=0.0, random_bytes=bytes)
    for _ in range(100):
        core.send_request_response(Payload(bytes(10_000)), 0.0)
    octets = b"".join(core.data_to_send(0.0))

    async def send(stream: ByteStream) -> None:
        for at in range(0, len(octets), 16_384):  # so that the attacker's own copy counts little
            await stream.send_all(octets[at : at + 16_384])

    async with (
        ActorSystem() as system,
        serve(system, "rsocket+memory://desk", handler, authenticate=Authentication(decide, timeout=1e6)) as listener,
        connect(system, listener.url) as honest,
    ):
        await honest.request_response(b"honest")
        tracemalloc.start()
        try:
            began = process_time()
            async with AsyncExitStack() as stack, trio.open_nursery() as nursery:
                for _ in range(100):
                    stream = await stack.enter_async_context(dial("memory://desk"))
                    assert isinstance(stream, ByteStream)
                    nursery.start_soon(send, stream)
                await wait_all_tasks_blocked()
                asked = process_time()
                await honest.request_response(b"honest")
                waited = process_time() - asked
                most, spent = tracemalloc.get_traced_memory()[1], process_time() - began
                assert [peer.identity for peer in listener.peers if peer.identity is not None] == [Identity("honest")]
                nursery.cancel_scope.cancel()
        finally:
            tracemalloc.stop()
    assert (most < 150 * MB, within(waited, 1.0), within(spent, 4.0)) == (True, True, True), (most / MB, waited, spent)


@pytest.mark.loopback
@pytest.mark.release
@pytest.mark.parametrize("worst", [fired, entries, held, endless, open_and_cancel])
async def test_the_worst_messages_over_tcp(worst: Callable[[ReactiveStreamsCore], None]) -> None:
    """The same bounds as in memory."""
    octets = written("rsocket", worst)
    [(peak, seconds)] = [case[1:] for case in WORST if case[0] is worst]
    async with (
        ActorSystem() as system,
        serve(system, "rsocket+tcp://127.0.0.1:0", handler, config=SERVER) as listener,
        connect(system, listener.url) as honest,
    ):
        await honest.request_response(b"honest")
        began = process_time()
        tracemalloc.start()
        try:
            waited = await attack(listener.url.removeprefix("rsocket+"), octets, honest, listener)
            most = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        spent = process_time() - began
    # Tracing makes everything several times slower.
    assert (most < peak * MB, within(waited, 1.0), within(spent, 3 * seconds)) == (True, True, True), (
        most / MB,
        waited,
        spent,
    )


@pytest.mark.loopback
async def test_websocket_frames_of_one_octet_cost_little() -> None:
    """A request of 50,000 octets, each in a frame of its own; an honest client is answered meanwhile."""
    core = RSocketCore(CORE, client=True, framed=True, now=0.0, random_bytes=bytes)
    core.send_request_response(Payload(b"", bytes(50_000)), 0.0)
    begin, request = core.data_to_send(0.0)
    async with (
        ActorSystem() as system,
        serve(system, "rsocket+ws://127.0.0.1:0/", handler, config=SERVER) as listener,
        connect(system, listener.url) as honest,
        trio.open_nursery() as nursery,
    ):
        await honest.request_response(b"honest")
        waited = 0.0

        async def ask() -> None:
            nonlocal waited
            while True:
                began = process_time()
                await honest.request_response(b"honest")
                waited = max(waited, process_time() - began)

        nursery.start_soon(ask)
        port = urlsplit(listener.url).port
        assert port is not None
        stream = await trio.open_tcp_stream("127.0.0.1", port)
        await stream.send_all(
            b"GET / HTTP/1.1\r\nHost: here\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n"
            b"Sec-WebSocket-Protocol: rsocket\r\n\r\n"
        )
        assert (await stream.receive_some()).startswith(b"HTTP/1.1 101")
        mask = bytes(4)
        await stream.send_all(b"\x82" + bytes((0x80 | len(begin),)) + mask + begin)
        while len(listener.peers) < 2:
            await trio.lowlevel.checkpoint()
        frames = bytearray()
        for at, octet in enumerate(request):
            first = (0x02 if at == 0 else 0) | (0x80 if at == len(request) - 1 else 0)
            frames += bytes((first, 0x81)) + mask + bytes((octet,))
        began = process_time()
        await stream.send_all(bytes(frames))
        await stream.receive_some()  # the refusal: more than 1,000 entries
        spent = process_time() - began
        await stream.aclose()
        nursery.cancel_scope.cancel()
    assert (within(waited, 1.0), within(spent, 5.0)) == (True, True), (waited, spent)


def thousand(core: ReactiveStreamsCore) -> None:
    for _ in range(1_000):
        core.send_request_response(Payload(b"x"), 0.0)


@pytest.mark.parametrize("gated", [False, True])
async def test_answers_that_are_never_read_hold_little(gated: bool) -> None:
    """Of 1,000 answers of 1 MB: handlers begin as answers are read; of handlers that end together, 4 MB wait, and the others are errors."""
    octets = written("rsocket", thousand)
    gate, begun, ended = trio.Event(), 0, 0

    async def large(request: Request) -> bytes:
        nonlocal begun, ended
        if request.data == b"honest":
            return b""
        begun += 1
        if gated:
            await gate.wait()
        ended += 1
        return bytes(MB)

    config = ServerConfig(max_answer_bytes=4 * MB)
    async with (
        ActorSystem() as system,
        serve(system, "rsocket+memory://desk", large, config=config) as listener,
        connect(system, listener.url) as honest,
        dial("memory://desk") as stream,
    ):
        assert isinstance(stream, ByteStream)
        await honest.request_response(b"honest")
        tracemalloc.start()
        try:
            await stream.send_all(octets)
            await wait_all_tasks_blocked(0.01)
            assert begun == 1_000 if gated else begun < 10
            gate.set()
            await wait_all_tasks_blocked(0.01)
            await honest.request_response(b"honest")
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert ended == begun
        assert peak < 30 * MB


async def test_payloads_of_channels_have_a_bound_in_bytes() -> None:
    """20 channels want 62 MB more than 1 MiB: they end, and the one that was there goes on."""
    go_on = trio.Event()
    taken = 0

    async def slow(request: Request) -> bytes:
        nonlocal taken
        if request.kind is Interaction.REQUEST_CHANNEL:
            await go_on.wait()
            async for payload in request.payloads:
                taken += len(payload.data)
        return b""

    async with (
        ActorSystem() as system,
        serve(system, "rsocket+memory://desk", slow, config=ServerConfig(max_request_bytes=1 << 20)) as listener,
        connect(system, listener.url) as peer,
        trio.open_nursery() as nursery,
    ):
        ends: list[str] = []

        async def send(count: int) -> None:
            sender, receiver = await peer.request_channel(b"")
            try:
                for _ in range(count):
                    await sender.send(Payload(bytes(100_000)))
                await sender.finish()
            except ChannelError:
                pass
            try:
                async for _ in receiver:
                    pass
                ends.append("answered")
            except RequestCanceled as error:
                ends.append("canceled" if "1048576 (max_request_bytes)" in str(error) else str(error))

        nursery.start_soon(send, 5)
        await wait_all_tasks_blocked(0.01)
        serving = below(listener.peers[0])
        assert serving.request_bytes == 500_000
        for _ in range(20):
            nursery.start_soon(send, 31)
        while len(ends) < 20:
            await trio.lowlevel.checkpoint()
            assert serving.request_bytes <= 1 << 20
        assert (set(ends), serving.request_bytes) == ({"canceled"}, 500_000)
        await peer.request_response(b"honest")
        go_on.set()
        while len(ends) < 21:
            await trio.lowlevel.checkpoint()
        assert (ends[-1], taken, serving.request_bytes) == ("answered", 500_000, 0)


def test_fragments_of_one_byte_cost_little() -> None:
    """A payload of 100,000 bytes is 1 MB on the wire, and no more than a byte for each is kept."""
    core = RSocketCore(CORE, client=False, framed=True, now=0.0, random_bytes=bytes)
    client = RSocketCore(CORE, client=True, framed=True, now=0.0, random_bytes=bytes)
    (setup,) = client.data_to_send(0.0)
    core.receive_message(setup, 0.0)
    core.accept_setup(0.0)
    request = RequestFrame(type=FrameType.REQUEST_RESPONSE, stream_id=1, payload=Payload(b"x"), follows=True)
    part = PayloadFrame(stream_id=1, payload=Payload(b"x"), next=True, follows=True).encode()
    core.receive_message(request.encode(), 0.0)
    tracemalloc.start()
    try:
        began = process_time()
        for _ in range(100_000):
            assert core.receive_message(part, 0.0) == []
        most, spent = tracemalloc.get_traced_memory()[1], process_time() - began
    finally:
        tracemalloc.stop()
    assert (most < MB, within(spent, 5.0)) == (True, True), (most / MB, spent)
