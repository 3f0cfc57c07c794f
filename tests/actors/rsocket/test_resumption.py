"""Sessions that outlive their carriers: nothing is lost or doubled, however often and wherever the carrier is cut."""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import attrs
import pytest
import trio
from tests.transports.conftest import make_authority
from trio.testing import MockClock, wait_all_tasks_blocked

from levada.actors.authentication import Credentials, PeerRefused, Refused
from levada.actors.authenticators import UnixUsers
from levada.actors.rsocket import (
    ClientConfig,
    ConnectedPeer,
    CoreConfig,
    EndReason,
    Listener,
    Payload,
    Reconnect,
    Request,
    ServerConfig,
)
from levada.framework import ActorSystem, Identity
from levada.framework.errors import ConnectionLost
from levada.framework.testing import Probe
from levada.transports.carriers import ByteStream, MemoryConfig, TlsConfig, UnixConfig, dial
from levada.transports.rsocket import ErrorCode
from levada.transports.rsocket.frames import (
    ErrorFrame,
    Frame,
    KeepaliveFrame,
    ResumeFrame,
    ResumeOkFrame,
    SetupFrame,
    decode,
)

from .conftest import below, connect, serve
from .test_requests import pair

CORE = CoreConfig(metadata_mime_type="text/plain", resume=True, resume_timeout=20.0)
CLIENT = ClientConfig(core=CORE, redial=Reconnect(initial_backoff=0.01, max_backoff=0.1))
SERVER = ServerConfig(core=CORE, carrier=MemoryConfig(window=512))


async def handler(request: Request) -> Any:
    match request.route:
        case "numbers":

            async def numbers() -> AsyncIterator[bytes]:
                for number in range(int(request.data)):
                    yield b"%d" % number

            return numbers()
        case "back":
            return request.payloads
        case "slow":
            await trio.sleep(5)
    return request.payload


def cut(peer: ConnectedPeer) -> None:
    """Lose the carrier, with what is under way on it."""
    wire: Any = below(peer).carrier
    if wire is not None:
        wire.stream.link.cut("cut by the test")


@pytest.mark.rule("RS-102")
@pytest.mark.parametrize("seed", range(8))
async def test_rs102_streams_go_on_over_random_cuts(seed: int, autojump_clock: MockClock) -> None:
    """Streams stay alive while the carrier is down; nothing is lost, nothing comes twice."""
    dice = random.Random(seed)
    async with pair(handler, client=CLIENT, server=SERVER) as (peer, listener, _):
        got: list[bytes] = []
        back: list[bytes] = []

        async def follow() -> None:
            async with await peer.request_stream(b"500", route="numbers", window=16) as receiver:
                async for payload in receiver:
                    got.append(payload.data)
                    if not len(got) % 25:
                        await trio.sleep(0.01)

        async def channel() -> None:
            sender, receiver = await peer.request_channel(b"0", route="back", window=8)

            async def send() -> None:
                async with sender:
                    for number in range(1, 200):
                        await sender.send(b"%d" % number)
                        if not number % 20:
                            await trio.sleep(0.01)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(send)
                back.extend([payload.data async for payload in receiver])

        async def call() -> None:
            for number in range(50):
                answer = await peer.request_response(b"%d" % number)
                assert answer.data == b"%d" % number
                await trio.sleep(0.005)

        async def disturb() -> None:
            while True:
                await trio.sleep(dice.uniform(0.005, 0.05))
                cut(peer)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(disturb)
            async with trio.open_nursery() as work:
                for function in (follow, channel, call):
                    work.start_soon(function)
            nursery.cancel_scope.cancel()
        assert got == [b"%d" % number for number in range(500)]
        assert back == [b"%d" % number for number in range(200)]
        assert peer.statistics().sessions_resumed > 0
        assert len(listener.peers) == 1


@pytest.mark.rule("RS-102")
async def test_rs102_a_session_that_is_not_resumed_ends(autojump_clock: MockClock) -> None:
    """After `resume_timeout` without a carrier both sides give up: handlers are cancelled, requests fail."""
    ended: list[str] = []

    async def waits(_: Request) -> Any:
        try:
            await trio.sleep_forever()
        finally:
            ended.append("handler")

    async with (
        ActorSystem() as system,
        serve(system, "rsocket+memory://desk", waits, config=SERVER) as listener,
        connect(system, listener.url, config=CLIENT) as peer,
    ):

        async def call() -> None:
            with pytest.raises(ConnectionLost):
                await peer.request_response(b"")
            ended.append("call")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(call)
            await wait_all_tasks_blocked()
            listener._actor.close_listener()
            await wait_all_tasks_blocked()
            began = trio.current_time()
            cut(peer)
            (client,) = listener.peers
            await client.terminated()
            assert client.end is not None
            assert client.end.reason is EndReason.TIMED_OUT
        assert trio.current_time() - began == pytest.approx(20.0, abs=0.5)
        await wait_all_tasks_blocked()  # the handler ends in a turn of its own
        assert sorted(ended) == ["call", "handler"]
        await peer.terminated()
        assert peer.end is not None
        assert peer.end.reason is EndReason.TIMED_OUT


@pytest.mark.rule("RS-98")
async def test_rs98_a_server_that_knows_nothing_of_the_session(autojump_clock: MockClock) -> None:
    """REJECTED_RESUME ends the session at once: the client does not try again."""
    async with (
        ActorSystem() as system,
        serve(system, "rsocket+memory://desk", handler, config=SERVER) as listener,
        connect(system, listener.url, config=CLIENT) as peer,
    ):
        await peer.request_response(b"")
        (client,) = listener.peers
        assert client.setup is not None
        assert client.setup.resume_token is not None
        listener._actor.sessions.remove(client.setup.resume_token)
        cut(peer)
        await peer.terminated()
        end = peer.end
        assert end is not None
        assert (end.reason, end.code) == (EndReason.REFUSED, 0x004)


@pytest.mark.rule("RS-102")
async def test_rs102_requests_while_the_carrier_is_down_wait(autojump_clock: MockClock) -> None:
    """They are kept and sent later, and a cancelled one says so when the session goes on."""
    async with pair(handler, client=CLIENT, server=SERVER) as (peer, _, _system):
        await peer.request_response(b"")
        cut(peer)
        await trio.lowlevel.checkpoint()
        assert (await peer.request_response(b"later")).data == b"later"


async def test_a_new_carrier_replaces_one_that_looks_alive(autojump_clock: MockClock) -> None:
    """RS-102: the server learns of the loss by the client's return."""
    async with pair(handler, client=CLIENT, server=SERVER) as (peer, listener, _):
        slow: list[Payload] = []

        async def call() -> None:
            slow.append(await peer.request_response(b"5", route="slow"))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(call)
            await wait_all_tasks_blocked()
            wire: Any = below(listener.peers[0]).carrier
            wire.stream.link.hold()
            below(peer).detach()
            below(peer).lost(0, "the client's side only")
            below(peer).reading.cancel()
        assert [payload.data for payload in slow] == [b"5"]
        assert peer.statistics().sessions_resumed == listener.peers[0].statistics().sessions_resumed == 1
        await wait_all_tasks_blocked()
        assert len(listener.peers) == 1


HELLO = SetupFrame(
    version=(1, 0), keepalive_ms=20_000, lifetime_ms=90_000, token=b"token", metadata_mime_type="text/plain",
    data_mime_type="text/plain", payload=Payload(b""),
)  # fmt: skip
BACK = ResumeFrame(version=(1, 0), token=b"token", server_position=0, client_position=0)
ASK = KeepaliveFrame(respond=True, position=0, data=b"")


async def first_answer(listener: Listener, carrier: TlsConfig | UnixConfig, *frames: Frame) -> Frame:
    """Send frames on a carrier of its own, and lose the carrier after the first one that comes back."""
    async with dial(listener.url.removeprefix("rsocket+"), carrier) as stream:
        assert isinstance(stream, ByteStream)
        for frame in frames:
            octets = frame.encode()
            await stream.send_all(len(octets).to_bytes(3) + octets)
        got = bytearray()
        while len(got) < 3 or len(got) < 3 + int.from_bytes(got[:3]):
            got += await stream.receive_some()
        stream.abort()
        return decode(bytes(got[3 : 3 + int.from_bytes(got[:3])]))


@pytest.mark.rule("RS-104")
@pytest.mark.parametrize("limit", [{"max_sessions": 3}, {"max_connections": 3}], ids=["sessions", "connections"])
async def test_rs104_sessions_that_were_left_make_room(
    limit: dict[str, Any], autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """RS-104: a client gets a session at once, for which the oldest of those that were left ends; those in use stay."""

    async def say(carrier: ByteStream, frame: Frame) -> None:
        octets = frame.encode()
        await carrier.send_all(len(octets).to_bytes(3) + octets)

    async def hear(carrier: ByteStream) -> Frame:
        got = await carrier.receive_some()
        return decode(got[3 : 3 + int.from_bytes(got[:3])])

    @asynccontextmanager
    async def arriving(frame: SetupFrame | ResumeFrame) -> AsyncIterator[ByteStream]:
        async with dial("memory://desk") as carrier:
            assert isinstance(carrier, ByteStream)
            await say(carrier, frame)
            await say(carrier, ASK)
            yield carrier
            carrier.abort()

    def setup(token: bytes) -> SetupFrame:
        return attrs.evolve(HELLO, token=token)

    def back(token: bytes) -> ResumeFrame:
        return attrs.evolve(BACK, token=token)

    config = ServerConfig(core=CORE, **limit)
    async with ActorSystem() as system, serve(system, "rsocket+memory://desk", handler, config=config):
        for token in (b"first", b"second"):
            async with arriving(setup(token)) as carrier:
                assert isinstance(await hear(carrier), KeepaliveFrame)
            await wait_all_tasks_blocked()
        async with arriving(setup(b"in use")) as using:
            assert isinstance(await hear(using), KeepaliveFrame)
            began = trio.current_time()
            async with arriving(setup(b"new")) as carrier:
                assert isinstance(await hear(carrier), KeepaliveFrame)
                assert trio.current_time() == began
            await wait_all_tasks_blocked()
            async with arriving(back(b"first")) as carrier:
                refusal = await hear(carrier)
                assert isinstance(refusal, ErrorFrame)
                assert refusal.code == ErrorCode.REJECTED_RESUME
            await wait_all_tasks_blocked()
            async with arriving(back(b"new")) as carrier:
                assert isinstance(await hear(carrier), ResumeOkFrame)
            await say(using, ASK)
            assert isinstance(await hear(using), KeepaliveFrame)
    assert caplog.messages[0].endswith("it made room for others: its session was left")


@pytest.mark.rule("RS-104")
async def test_rs104_the_carrier_of_a_resumed_session_makes_no_room(autojump_clock: MockClock) -> None:
    """RS-104: its connection has said a whole first message, RESUME; silent clients that came later go first."""
    setup, back = HELLO.encode(), BACK.encode()
    config = ServerConfig(core=CORE, max_connections=3)
    async with ActorSystem() as system, serve(system, "rsocket+memory://desk", handler, config=config) as listener:
        async with dial("memory://desk") as first:
            assert isinstance(first, ByteStream)
            await first.send_all(len(setup).to_bytes(3) + setup)
            await wait_all_tasks_blocked()
            first.abort()
        async with dial("memory://desk") as resumed, dial("memory://desk") as silent:
            assert isinstance(resumed, ByteStream)
            assert isinstance(silent, ByteStream)
            await resumed.send_all(len(back).to_bytes(3) + back)
            await trio.sleep(1.0)
            async with dial("memory://desk"):
                assert b"made room" in await silent.receive_some()
            assert listener.peers[0].statistics().sessions_resumed == 1
            octets = ASK.encode()
            await resumed.receive_some()
            await resumed.send_all(len(octets).to_bytes(3) + octets)
            assert isinstance(decode((await resumed.receive_some())[3:]), KeepaliveFrame)
            resumed.abort()


async def said(carrier: Any, *frames: Frame) -> Frame:
    """Send frames; return the first that comes back."""
    for octets in [frame.encode() for frame in frames]:
        await carrier.send_all(len(octets).to_bytes(3) + octets)
    got = await carrier.receive_some()
    return decode(got[3 : 3 + int.from_bytes(got[:3])])


@pytest.mark.rule("RS-104")
async def test_rs104_only_sessions_that_are_left_now_make_room(autojump_clock: MockClock) -> None:
    """RS-104: not one that was resumed, and one whose time is over frees no second place."""
    config = ServerConfig(core=CORE, max_sessions=2)
    a, b, c, d = (attrs.evolve(HELLO, token=token) for token in (b"a", b"b", b"c", b"d"))
    async with ActorSystem() as system, serve(system, "rsocket+memory://desk", handler, config=config):

        async def leave(hello: SetupFrame) -> None:
            async with dial("memory://desk") as carrier:
                assert isinstance(await said(carrier, hello, ASK), KeepaliveFrame)
                cast("ByteStream", carrier).abort()
            await wait_all_tasks_blocked()

        await leave(a)
        await trio.sleep(CORE.resume_timeout + 1.0)
        await leave(b)
        async with dial("memory://desk") as third, dial("memory://desk") as second, dial("memory://desk") as fourth:
            assert isinstance(await said(third, c, ASK), KeepaliveFrame)
            assert isinstance(await said(second, attrs.evolve(BACK, token=b"b")), ResumeOkFrame)
            refusal = await said(fourth, d, ASK)
            assert isinstance(refusal, ErrorFrame)
            assert refusal.code == ErrorCode.REJECTED_SETUP
            assert isinstance(await said(second, ASK), KeepaliveFrame)
            cast("ByteStream", second).abort()
            await wait_all_tasks_blocked()
            await leave(d)
            async with dial("memory://desk") as late:
                assert isinstance(await said(late, attrs.evolve(BACK, token=b"b")), ErrorFrame)


async def is_refused(listener: Listener, system: ActorSystem, answer: Callable[[], Awaitable[Frame]]) -> None:
    """A stranger with the token is told that there is no such session, and the audit has it."""
    audit = Probe(system)
    system.events.subscribe(PeerRefused, audit.ref)
    refusal = await answer()
    assert isinstance(refusal, ErrorFrame)
    assert (refusal.code, refusal.data) == (ErrorCode.REJECTED_RESUME, b"no such session")
    event = await audit.expect(PeerRefused)
    assert (event.protocol, event.reason) == ("rsocket", "The session belongs to another client.")
    assert listener.refused == 1


@pytest.mark.loopback
@pytest.mark.rule("RS-96")
@pytest.mark.parametrize("renewed", [False, True], ids=["the same certificate", "a renewed certificate"])
async def test_rs96_a_session_is_resumed_by_its_client_only(tmp_path: Path, renewed: bool) -> None:
    """Who has a session's token but another client certificate is told that there is no such session; the session lives on."""
    authority = make_authority(tmp_path)
    server, ann, eve = (authority.issue(name) for name in ("server", "ann", "eve"))
    config = ServerConfig(
        core=CORE, carrier=TlsConfig(certificate=server, ca=authority.ca, client_certificates="required")
    )

    async def name(credentials: Credentials) -> Identity | Refused:
        return Identity(credentials.info.peer_subject or "")

    def showing(certificate: Path) -> TlsConfig:
        return TlsConfig(ca=authority.ca, certificate=certificate)

    async with (
        ActorSystem() as system,
        serve(system, "rsocket+tls://127.0.0.1:0", handler, authenticate=name, config=config) as listener,
    ):
        assert isinstance(await first_answer(listener, showing(ann), HELLO, ASK), KeepaliveFrame)
        [session] = listener.peers
        await is_refused(listener, system, partial(first_answer, listener, showing(eve), BACK))
        assert listener.peers == [session]
        if renewed:
            ann = authority.issue("ann")
        assert isinstance(await first_answer(listener, showing(ann), BACK), ResumeOkFrame)
        assert listener.peers == [session]
        assert session.identity == Identity("CN=ann")


@pytest.mark.loopback
@pytest.mark.rule("RS-96")
@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can be another user for a while")
async def test_rs96_a_session_is_resumed_by_its_user_only() -> None:
    """The same for the user of a Unix socket, whom the kernel names."""
    nobody = 65534
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o711)
        config = ServerConfig(core=CORE, carrier=UnixConfig(mode=0o666))
        users = UnixUsers({0: Identity("root"), nobody: Identity("nobody")})
        async with (
            ActorSystem() as system,
            serve(system, f"rsocket+unix://{folder}/socket", handler, authenticate=users, config=config) as listener,
        ):

            async def as_nobody() -> Frame:
                os.seteuid(nobody)
                try:
                    return await first_answer(listener, UnixConfig(), BACK)
                finally:
                    os.seteuid(0)

            assert isinstance(await first_answer(listener, UnixConfig(), HELLO, ASK), KeepaliveFrame)
            [session] = listener.peers
            await is_refused(listener, system, as_nobody)
            assert listener.peers == [session]
            assert isinstance(await first_answer(listener, UnixConfig(), BACK), ResumeOkFrame)
            assert session.identity == Identity("root")
