"""What a server decides and sees: who is let in, who is there, how it ends; and handlers of each kind."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from contextvars import ContextVar
from functools import partial
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from levada.actors.authentication import Authentication, Credentials, PeerRefused, Refused
from levada.actors.rsocket import (
    ApplicationError,
    ClientConfig,
    ConnectedPeer,
    CoreConfig,
    EndReason,
    LeaseGrant,
    Listener,
    Payload,
    Request,
    RequestFailed,
    RequestInvalid,
    RequestRejected,
    ServerConfig,
    SetupRejected,
    route,
)
from levada.actors.rsocket.dialects import core_of
from levada.actors.rsocket.encoding import COMPOSITE
from levada.actors.rsocket.server import ListenerActor
from levada.framework import Actor, ActorSystem, Identity, Receiver, current_peer, handles
from levada.framework.errors import ChannelConnectionLost, ConfigurationError, ConnectionClosed, ConnectionLost
from levada.framework.testing import Probe
from levada.transports.carriers.contracts import ByteStream, CarrierInfo
from levada.transports.carriers.memory import MemoryByteStream, MemoryConfig, dial
from levada.transports.rsocket.codes import ErrorCode
from levada.transports.rsocket.extensions import (
    BearerAuthentication,
    CompositeMetadata,
    Entry,
    OtherAuthentication,
    SimpleAuthentication,
)
from levada.transports.rsocket.frames import SetupFrame

from .conftest import below, connect, serve
from .test_requests import pair


async def test_a_client_that_has_said_nothing_when_the_end_begins_is_cut_off() -> None:
    """Otherwise it would begin work during the drain of others, and nobody would wait for that work."""
    asked, begun, done = list[bytes](), trio.Event(), trio.Event()

    async def answer(request: Request) -> bytes:
        asked.append(request.data)
        begun.set()
        await done.wait()
        return b"answer"

    async def end() -> None:
        await listener.aclose()

    async def first() -> None:
        answers.append((await peer.request_response(b"in time")).data)

    answers = list[bytes]()
    async with (
        ActorSystem() as system,
        serve(system, "rsocket+tcp://127.0.0.1:0", answer) as listener,
        connect(system, listener.url) as peer,
        await trio.open_tcp_stream("127.0.0.1", int(listener.url.rpartition(":")[2])) as late,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(first)
        await begun.wait()
        nursery.start_soon(end)
        with suppress(trio.BrokenResourceError):  # if the listener had not accepted it yet
            assert b"".join([part async for part in late])[-4:] in (b"", ErrorCode.CONNECTION_CLOSE.to_bytes(4))
        assert (asked, answers) == ([b"in time"], [])
        done.set()
    assert answers == [b"answer"]


def signed_in(credentials: SimpleAuthentication) -> ClientConfig:
    payload = Payload(b"hello", CompositeMetadata.of(credentials).encode())
    return ClientConfig(core=CoreConfig(metadata_mime_type=COMPOSITE, setup_payload=payload))


# ---------------------------------------------------------------- letting clients in


@pytest.mark.parametrize("dialect", ["rsocket", "reactivesocket"])
async def test_accept_and_refuse(dialect: str) -> None:
    """RS-46, RS-47: the refusal's text reaches the client; requests behind a refused SETUP fail with it."""

    async def polite(credentials: Credentials) -> Identity | Refused:
        await trio.lowlevel.checkpoint()
        return Identity("guest") if credentials.setup.payload.data == b"please" else Refused("say please")

    async with (
        ActorSystem() as system,
        serve(system, f"{dialect}+memory://desk", lambda request: request.payload, authenticate=polite) as listener,
    ):
        async with connect(system, listener.url) as peer:
            with pytest.raises(SetupRejected, match="say please") as caught:
                await peer.request_response(b"")
            assert caught.value.code == 0x003
            await peer.terminated()
            end = peer.end
            assert end is not None
            assert (end.reason, end.code) == (EndReason.REFUSED, 0x003)
            assert (listener.peers, listener.refused) == ([], 1)
        client = ClientConfig(core=CoreConfig(setup_payload=Payload(b"please")))
        async with connect(system, listener.url, config=client) as peer:
            assert (await peer.request_response(b"in")).data == b"in"
            [guest] = listener.peers
            assert (guest.identity, str(guest.remote)) == (Identity("guest"), f"guest ({guest.info.peer})")
            assert peer.identity is None


@pytest.mark.parametrize(("code", "sent"), [(None, 0x003), (0x002, 0x002), (0x004, 0x003), (0x301, 0x003)])
async def test_the_code_of_a_refusal(code: int | None, sent: int) -> None:
    """RS-47: a hook may choose among the codes of a refused SETUP."""

    async def refuse(_: Credentials) -> Identity | Refused:
        return Refused("no", code=code)

    async with pair(None, authenticate=refuse) as (peer, _, _system):
        with pytest.raises(SetupRejected) as caught:
            await peer.request_response(b"")
        assert caught.value.code == sent


async def test_authentication_of_connections_and_of_requests() -> None:
    """EXT-3: credentials in SETUP make the identity of the connection, those of a request that of the request."""
    asked: list[Credentials] = []

    async def decide(credentials: Credentials) -> Identity | Refused:
        asked.append(credentials)
        match credentials:
            case Credentials(scheme="simple", user=name, token=b"secret"):
                return Identity(name)
            case Credentials(scheme="bearer", token=b"tok"):
                return Identity("bearer")
            case Credentials(token=b"crowd"):
                return Refused("too many of you", code=0x301)
        return Refused("who are you?")

    async def who(request: Request) -> bytes:
        assert request.identity is not None
        assert current_peer() == request.peer
        return f"{request.identity.name} {request.peer} {request.connection.remote}".encode()

    client = signed_in(SimpleAuthentication("ann", "secret"))
    async with pair(who, authenticate=decide, client=client) as (peer, listener, system):
        audit = Probe(system)
        system.events.subscribe(PeerRefused, audit.ref)
        await peer.request_response(b"")
        [guest] = listener.peers
        where = guest.info.peer
        assert (await peer.request_response(b"")).data == f"ann ann ({where}) ann ({where})".encode()
        token = [BearerAuthentication("tok")]
        told = await peer.request_response(b"", metadata=token)
        assert told.data == f"bearer bearer ({where}) ann ({where})".encode()
        assert (await peer.request_response(b"")).data == f"ann ann ({where}) ann ({where})".encode()
        assert [(c.scheme, c.identity) for c in asked] == [("simple", None), ("bearer", Identity("ann"))]
        assert asked[-1].setup == asked[0].setup
        with pytest.raises(RequestRejected, match="who are you"):
            await peer.request_response(b"", metadata=[BearerAuthentication("stolen")])
        event = await audit.expect(PeerRefused)
        assert (event.protocol, event.name, event.reason) == ("rsocket", "ann", "who are you?")
        with pytest.raises(RequestFailed, match="too many of you") as caught:
            await peer.request_response(b"", metadata=[OtherAuthentication("mtls", b"crowd")])
        assert caught.value.code == 0x301
        assert asked[-1].scheme == "mtls"
        assert listener.refused == 2
        audit.ref.stop()
        await audit.ref.terminated()
    for client in (signed_in(SimpleAuthentication("ann", "guess")), ClientConfig()):
        async with pair(who, authenticate=decide, client=client) as (peer, _, _system):
            with pytest.raises(SetupRejected, match="who are you"):
                await peer.request_response(b"")


async def test_each_fire_and_forget_has_the_peer_of_its_own_credentials() -> None:
    seen: list[tuple[str, bool]] = []

    async def decide(credentials: Credentials) -> Identity | Refused:
        return Identity(credentials.token.decode() or "ann") if credentials.token != b"eve" else Refused()

    async def note(request: Request) -> None:
        assert request.identity is not None
        seen.append((request.identity.name, current_peer() == request.peer))

    async with pair(note, authenticate=decide) as (peer, listener, _system):
        for name in ("bob", "", "eve", "cyd", ""):
            await peer.fire_and_forget(b"", metadata=[BearerAuthentication(name)] if name else None)
        await wait_all_tasks_blocked()
        assert listener.refused == 1
    assert sorted(seen) == [("ann", True), ("ann", True), ("bob", True), ("cyd", True)]


async def test_requests_of_one_client_do_not_keep_other_clients_out(autojump_clock: MockClock) -> None:
    """A connection has a quarter of the hooks that run at a time; its further requests wait."""
    running, most = 0, 0

    async def decide(credentials: Credentials) -> Identity | Refused:
        nonlocal running, most
        if credentials.identity is not None:
            running += 1
            most = max(most, running)
            await trio.sleep(1.0)
            running -= 1
        return Identity("ann")

    async def nothing(_: Request) -> bytes:
        return b""

    async with pair(nothing, authenticate=Authentication(decide, at_once=8)) as (peer, listener, system):
        async with trio.open_nursery() as nursery:
            for _ in range(10):
                nursery.start_soon(partial(peer.request_response, b"", metadata=[BearerAuthentication("tok")]))
            await wait_all_tasks_blocked()
            began = trio.current_time()
            async with connect(system, listener.url) as other:
                assert (await other.request_response(b"")).data == b""
            assert trio.current_time() == began
        assert trio.current_time() - began == pytest.approx(5.0)
        assert most == 2


async def test_credentials_that_cannot_be_read_are_refused() -> None:
    """EXT-3: the hook is not asked, and the refusal is on record."""

    async def decide(_: Credentials) -> Identity | Refused:
        raise AssertionError

    metadata = CompositeMetadata((Entry("message/x.rsocket.authentication.v0", b"\x80\xff\xff"),)).encode()
    client = ClientConfig(core=CoreConfig(metadata_mime_type=COMPOSITE, setup_payload=Payload(b"", metadata)))
    async with pair(None, authenticate=decide, client=client) as (peer, listener, _system):
        with pytest.raises(SetupRejected, match=r"^metadata: "):
            await peer.request_response(b"")
        assert listener.refused == 1


async def test_a_hook_that_fails_lets_nobody_in(caplog: pytest.LogCaptureFixture) -> None:
    async def fail(_: Credentials) -> Identity | Refused:
        raise KeyError("database")

    async with pair(None, authenticate=fail) as (peer, _, _system):
        with pytest.raises(SetupRejected, match=r"^The server could not check these credentials\.$"):
            await peer.request_response(b"")
    assert "database" in caplog.text


async def never(_: Credentials) -> Identity | Refused:
    await trio.sleep_forever()
    raise AssertionError


async def test_a_client_that_leaves_while_it_is_judged() -> None:
    async with ActorSystem() as system, serve(system, "rsocket+memory://desk", authenticate=never):
        async with connect(system, "rsocket+memory://desk") as peer:
            await wait_all_tasks_blocked()
            peer.abort()
        await wait_all_tasks_blocked()
        assert system.statistics().actors == 1


async def test_who_sends_no_setup(autojump_clock: MockClock) -> None:
    """RS-48, RS-49: another first frame is refused, silence is cut off; other connections are unharmed."""
    async with (
        ActorSystem() as system,
        serve(system, "rsocket+memory://desk", lambda request: request.payload) as listener,
        connect(system, listener.url) as peer,
    ):
        async with dial("memory://desk") as stranger:
            assert isinstance(stranger, MemoryByteStream)
            await stranger.send_all(bytes.fromhex("00000a 00000003 2000 00000005"))
            answer = await stranger.receive_some()
            assert answer[3:13] == bytes.fromhex("00000000 2c00 00000001")
            assert await stranger.receive_some() == b""
        async with dial("memory://desk") as mute:
            assert isinstance(mute, MemoryByteStream)
            began = trio.current_time()
            assert await mute.receive_some() == b""
            assert trio.current_time() - began == pytest.approx(10.0, abs=0.1)
        assert (await peer.request_response(b"alive")).data == b"alive"
        assert len(listener.peers) == 1


async def test_so_many_connections_and_no_more(autojump_clock: MockClock) -> None:
    async with ActorSystem() as system:
        config = ServerConfig(max_connections=1)
        async with (
            serve(system, "rsocket+memory://desk", lambda request: request.payload, config=config) as listener,
            connect(system, listener.url) as first,
        ):
            assert (await first.request_response(b"1")).data == b"1"
            async with connect(system, listener.url) as second:
                with trio.move_on_after(1.0) as scope:
                    await second.request_response(b"2")
                assert scope.cancelled_caught
                await first.aclose()
                assert (await second.request_response(b"3")).data == b"3"


async def test_a_client_waits_if_the_last_one_without_setup_has_sent_it_meanwhile(autojump_clock: MockClock) -> None:
    """The listener has been waiting for a newcomer since the place of the late one was to be had."""
    setup = SetupFrame(
        version=(1, 0), keepalive_ms=20_000, lifetime_ms=90_000, metadata_mime_type="a/b", data_mime_type="a/b",
        payload=Payload(b""),
    ).encode()  # fmt: skip
    async with ActorSystem() as system:
        config = ServerConfig(max_connections=1)
        async with serve(system, "rsocket+memory://desk", lambda asked: asked.payload, config=config) as listener:
            async with dial("memory://desk") as late:
                assert isinstance(late, ByteStream)
                await trio.sleep(1.0)
                await late.send_all(len(setup).to_bytes(3) + setup)
                await wait_all_tasks_blocked()
                async with connect(system, listener.url) as second:
                    with trio.move_on_after(1.0) as scope:
                        await second.request_response(b"2")
                    assert scope.cancelled_caught
                    assert len(listener.peers) == 1
                    await late.aclose()
                    assert (await second.request_response(b"3")).data == b"3"
            assert listener.refused == 0


async def test_a_client_that_has_not_said_a_whole_setup_makes_room(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with ActorSystem() as system:
        config = ServerConfig(max_connections=2)
        async with (
            serve(system, "rsocket+memory://desk", lambda request: request.payload, config=config) as listener,
            connect(system, listener.url) as first,
        ):
            assert (await first.request_response(b"1")).data == b"1"
            async with dial("memory://desk") as half:
                assert isinstance(half, ByteStream)
                await half.send_all(b"\0\0\x40\0")
                async with connect(system, listener.url) as second:
                    assert (await second.request_response(b"2")).data == b"2"
                    assert b"made room" in await half.receive_some()
                assert (await first.request_response(b"3")).data == b"3"
            assert trio.current_time() < 10.0
    (line,) = caplog.messages
    assert line.endswith("turned desk/client away: it made room for others: it has not said a whole first message")


async def test_a_client_that_reads_nothing_makes_room_at_once(autojump_clock: MockClock) -> None:
    """Not after the time for the last words, for which its window has no room."""
    carrier = MemoryConfig(window=8)
    config = ServerConfig(max_connections=1, carrier=carrier)
    async with (
        ActorSystem() as system,
        serve(system, "rsocket+memory://desk", None, config=config),
        dial("memory://desk", carrier) as half,
    ):
        assert isinstance(half, ByteStream)
        await half.send_all(b"\0\0\x40")
        await trio.sleep(1.0)
        actors = system.statistics().actors
        async with dial("memory://desk", carrier):
            await wait_all_tasks_blocked()
            assert system.statistics().actors == actors


@pytest.mark.parametrize(
    ("scheme", "peer", "token", "warned"),
    [
        ("tcp", "192.0.2.1:1", b"secret", True),
        ("ws", "[2001:db8::1]:1", b"secret", True),
        ("tcp", "192.0.2.1:1", b"", False),
        ("tcp", "127.0.0.1:1", b"secret", False),
        ("ws", "[::1]:1", b"secret", False),
        ("tls", "192.0.2.1:1", b"secret", False),
        ("wss", "192.0.2.1:1", b"secret", False),
        ("unix", "pid=1 uid=2 gid=3", b"secret", False),
    ],
)
async def test_a_warning_of_credentials_that_others_can_read(
    caplog: pytest.LogCaptureFixture, scheme: str, peer: str, token: bytes, warned: bool
) -> None:
    listener = ListenerActor(ServerConfig(), None, core_of("rsocket"), "rsocket", "tcp://0.0.0.0:7000")
    info = CarrierInfo(scheme=scheme, local="", peer=peer)
    credentials = Credentials(protocol="rsocket", listener="", info=info, token=token)
    for _ in range(3):
        listener.note_credentials(credentials)
    assert len(caplog.messages) == warned
    assert "secret" not in caplog.text
    if warned:
        assert f"is not on this machine: use rsocket+{'tls' if scheme == 'tcp' else 'wss'}://" in caplog.text


# ---------------------------------------------------------------- handlers


class Counting(Actor[Any]):
    """One object for each connection."""

    step: int
    total: int = 0

    @route("add")
    def add(self) -> bytes:
        self.total += self.step
        return b"%d" % self.total

    @route("slow")
    async def slow(self) -> bytes:
        before = self.total
        await trio.sleep(1)
        return b"%d %d" % (before, self.total)

    @route("both")
    async def both(self, request: Request, payloads: Receiver[bytes]) -> Any:
        assert request.stream_id
        return payloads


async def test_an_actor_class_is_made_for_each_connection(autojump_clock: MockClock) -> None:
    """A slow route holds up nobody; state belongs to the connection."""
    async with (
        ActorSystem() as system,
        serve(system, "rsocket+memory://desk", partial(Counting, 5)) as listener,
        connect(system, listener.url) as one,
        connect(system, listener.url) as other,
    ):
        slow: list[bytes] = []

        async def call() -> None:
            slow.append((await one.request_response(b"", route="slow")).data)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(call)
            await wait_all_tasks_blocked()
            assert (await one.request_response(b"", route="add")).data == b"5"
            assert (await one.request_response(b"", route="add")).data == b"10"
        assert slow == [b"0 10"]
        assert (await other.request_response(b"", route="add")).data == b"5"
        async with await one.request_stream(b"only", route="both") as receiver:
            assert [payload.data async for payload in receiver] == [b"only"]


async def test_a_route_has_the_peer_of_its_request(autojump_clock: MockClock) -> None:
    """By the request's own credentials, and while the actor handles a message of this system."""

    async def decide(credentials: Credentials) -> Identity | Refused:
        return Identity(credentials.token.decode() or "ann")

    seen: list[str] = []

    class Desk(Actor[str]):
        def note(self) -> bytes:
            peer = self.peer
            assert peer is not None
            assert peer == current_peer()
            assert peer.identity is not None
            return peer.identity.name.encode()

        @handles
        async def on_text(self, m: str) -> None:
            seen.append(f"{m} {self.note().decode()}")
            await trio.sleep(3)
            seen.append(f"{m} {self.note().decode()}")

        @route("twice")
        async def twice(self) -> bytes:
            before = self.note()
            await trio.sleep(1)
            return before + b" " + self.note()

        @route("each")
        async def each(self) -> AsyncIterator[bytes]:
            for _ in range(2):
                await trio.sleep(1)
                yield self.note()

        @route("tell")
        def tell(self) -> bytes:
            self.ref.tell("told")
            return self.note()

    async with pair(Desk, authenticate=decide) as (peer, _listener, _system):
        answers: dict[str, bytes] = {}

        async def ask(name: str) -> None:
            shown = [BearerAuthentication(name)] if name else None
            answers[name] = (await peer.request_response(b"", route="twice", metadata=shown)).data
            async with await peer.request_stream(b"", route="each", metadata=shown) as payloads:
                answers[name] += b"".join([b" " + payload.data async for payload in payloads])

        async with trio.open_nursery() as nursery:
            for name in ("", "bob", "cyd"):
                nursery.start_soon(ask, name)
            answer = await peer.request_response(b"", route="tell", metadata=[BearerAuthentication("dan")])
            assert answer.data == b"dan"
        assert answers == {"": b"ann ann ann ann", "bob": b"bob bob bob bob", "cyd": b"cyd cyd cyd cyd"}
    assert seen == ["told ann", "told ann"]


async def test_a_handler_object_that_fails_starts_again(caplog: pytest.LogCaptureFixture) -> None:
    class Fragile(Actor[Any]):
        total: int = 0

        @route("add")
        def add(self) -> bytes:
            self.total += 1
            return b"%d" % self.total

        @route("break")
        def fall(self) -> None:
            self.start_soon(self._fail)

        async def _fail(self) -> None:
            raise ValueError("on purpose")

    async with pair(Fragile) as (peer, _, system):
        assert (await peer.request_response(b"", route="add")).data == b"1"
        await peer.request_response(b"", route="break")
        await wait_all_tasks_blocked()
        assert (await peer.request_response(b"", route="add")).data == b"1"
        assert system.statistics().restarts == 1
    assert "on purpose" in caplog.text


async def test_handlers_that_cannot_work() -> None:
    class Empty(Actor[Any]):
        pass

    class Twice(Actor[Any]):
        @route("a")
        def one(self) -> None: ...
        @route("a")
        def other(self) -> None: ...

    class Odd(Actor[Any]):
        @route("a")
        def one(self, number: complex) -> None: ...

    async with ActorSystem() as system:
        for handler, text in (
            (Empty, "no method with @route"),
            (Twice, "twice"),
            (Odd, "complex"),
            (int, "no actor class"),
            ("desk", "the handler is"),
        ):
            with pytest.raises(ConfigurationError, match=text):
                async with serve(system, "rsocket+memory://desk", handler):  # type: ignore[arg-type]
                    pass
            with pytest.raises(ConfigurationError, match=text):
                async with connect(system, "rsocket+memory://desk", handler):  # type: ignore[arg-type]
                    pass
        for url in ("http://desk", "rsocket", "rsocket+carrot://desk"):
            with pytest.raises(ConfigurationError):
                async with serve(system, url):
                    pass
            with pytest.raises(ConfigurationError):
                async with connect(system, url):
                    pass
        with pytest.raises(ConfigurationError, match="ClientConfig"):
            async with connect(system, "rsocket+memory://desk", config=ServerConfig()):  # type: ignore[call-overload]
                pass
        with pytest.raises(ConfigurationError, match="ServerConfig"):
            async with serve(system, "rsocket+memory://desk", config=ClientConfig()):  # type: ignore[arg-type]
                pass
        async with serve(system, "rsocket+memory://desk"):
            with pytest.raises(ConfigurationError, match="taken"):
                async with serve(system, "rsocket+memory://desk"):
                    pass
        with pytest.raises(ConnectionLost):
            async with connect(system, "rsocket+memory://nowhere"):
                pass
        assert system.statistics().actors == 0


async def test_context_variables_of_one_request_are_not_seen_by_the_next() -> None:
    user: ContextVar[str] = ContextVar("user", default="nobody")

    async def handler(request: Request) -> bytes:
        before = user.get()
        if request.data:
            user.set(request.data.decode())
        return before.encode()

    async with pair(handler) as (peer, _, _system):
        for data in (b"ann", b"", b"bob", b""):
            assert (await peer.request_response(data)).data == b"nobody"


# ---------------------------------------------------------------- floods


@pytest.mark.parametrize(
    ("limits", "size", "handled"),
    [
        ({"max_fire_and_forget": 10}, 0, 10),
        ({"max_fire_and_forget_bytes": 10_000}, 1_000, 10),
        ({"max_fire_and_forget_bytes": 999}, 1_000, 1),
    ],
    ids=["count", "octets", "a single large one"],
)
async def test_fire_and_forget_requests_have_a_bound(limits: dict[str, Any], size: int, handled: int) -> None:
    gate = trio.Event()
    taken: list[int] = []

    async def handler(request: Request) -> Any:
        if request.kind.name == "FIRE_AND_FORGET":
            await gate.wait()
            taken.append(len(request.data))
        return b""

    text = ClientConfig(core=CoreConfig(metadata_mime_type="text/plain"))
    async with pair(handler, client=text, server=ServerConfig(**limits)) as (peer, listener, _):
        for _ in range(500):
            await peer.fire_and_forget(bytes(size // 2), metadata=bytes(size // 2))
        await peer.request_response(b"")
        assert listener.peers[0].statistics().fire_and_forget_dropped == 500 - handled
        gate.set()
        await wait_all_tasks_blocked()
        assert taken == [size // 2] * handled
        await peer.fire_and_forget(b"again")
        await wait_all_tasks_blocked()
        assert taken[-1] == 5


async def test_the_octets_of_answers_that_wait_have_a_bound() -> None:
    """Further large ones are errors that name the setting; small ones, and those that were there, arrive when they are read again."""
    gate = trio.Event()

    async def handler(request: Request) -> bytes:
        await gate.wait()
        return bytes(int(request.data))

    config = ServerConfig(max_answer_bytes=100_000, high_watermark=10_000)
    async with pair(handler, server=config) as (peer, _, _system), trio.open_nursery() as nursery:
        answers: list[int] = []
        errors: list[str] = []

        async def ask(size: int) -> None:
            try:
                answers.append(len((await peer.request_response(b"%d" % size)).data))
            except ApplicationError as error:
                errors.append(str(error))

        for size in [20_000] * 20 + [4_000] * 20:
            nursery.start_soon(ask, size)
        await wait_all_tasks_blocked()
        link: Any = below(peer).carrier
        link.stream.link.hold()
        gate.set()
        await wait_all_tasks_blocked()
        assert answers == []
        link.stream.link.release()
        await wait_all_tasks_blocked()
        assert answers.count(4_000) == 20
        assert 5 <= answers.count(20_000) <= 10  # the carrier takes some
        assert len(errors) == 20 - answers.count(20_000)
        assert all("wait until they are read, at most 100000 (max_answer_bytes)" in error for error in errors)
        assert len((await peer.request_response(b"200000")).data) == 200_000


async def test_the_octets_of_requests_in_handlers_have_a_bound() -> None:
    """One more is rejected before a handler sees it, unless it is the only one; requests that are over, however they ended, count no more."""
    gate = trio.Event()
    begun: list[int] = []

    async def handler(request: Request) -> bytes:
        begun.append(len(request.data))
        await gate.wait()
        if request.metadata == b"fail":
            raise RequestInvalid("it fails")
        return b""

    text = ClientConfig(core=CoreConfig(metadata_mime_type="text/plain"))
    async with pair(handler, client=text, server=ServerConfig(max_request_bytes=100_000)) as (peer, _, _system):
        for end in ("cancelled", "answered", "failed"):
            begun.clear()
            gate = trio.Event()
            async with trio.open_nursery() as nursery:

                async def ask(data: bytes) -> None:
                    with suppress(RequestInvalid):
                        await peer.request_response(data, metadata=b"fail" if end == "failed" else b"")  # noqa: B023

                nursery.start_soon(ask, bytes(200_000))
                await wait_all_tasks_blocked()
                with pytest.raises(RequestRejected, match="at most 100000") as caught:
                    await peer.request_response(bytes(5_000))
                assert caught.value.retryable
                nursery.start_soon(ask, bytes(4_000))  # small ones are bounded by their number
                await wait_all_tasks_blocked()
                assert begun == [200_000, 4_000]
                if end == "cancelled":
                    nursery.cancel_scope.cancel()
                gate.set()
        # Cancelled before a handler began: both frames come at once.
        connection = below(peer)
        for _ in range(100):
            stream_id = connection.core.send_request_response(Payload(bytes(90_000)), trio.current_time())
            connection.core.send_cancel(stream_id)
            connection.flush()
        await wait_all_tasks_blocked()
        await peer.request_response(bytes(100_000))


async def test_so_many_streams_and_no_more() -> None:
    """RS-22, limit of the core: one more is rejected, which says that it may be sent again."""

    async def handler(_: Request) -> bytes:
        await trio.sleep_forever()
        return b""

    server = ServerConfig(core=CoreConfig(max_streams=2))
    async with pair(handler, server=server) as (peer, _, _system), trio.open_nursery() as nursery:
        for _ in range(2):
            nursery.start_soon(peer.request_response, b"")
        await wait_all_tasks_blocked()
        with pytest.raises(RequestRejected) as caught:
            await peer.request_response(b"")
        assert caught.value.retryable
        nursery.cancel_scope.cancel()


@pytest.mark.ci
async def test_a_hundred_thousand_opens_and_cancels() -> None:
    """Nothing grows with what is over."""
    async with pair(lambda request: request.payload) as (peer, listener, system):
        connection = below(peer)
        for number in range(20_000):
            stream_id = connection.core.send_request_response(Payload(b"x"), trio.current_time())
            connection.core.send_cancel(stream_id)
            if number % 100 == 99:
                connection.flush()
                await trio.lowlevel.checkpoint()
        assert (await peer.request_response(b"done")).data == b"done"
        assert listener.peers[0].statistics().open_streams == 0
        assert system.statistics().actors < 600


# ---------------------------------------------------------------- leases


async def test_leases_of_a_policy(autojump_clock: MockClock) -> None:
    """RS-54, RS-133: requests wait for a lease, in order; the policy is asked again when one has run out."""
    asked: list[float] = []

    def policy(peer: ConnectedPeer) -> LeaseGrant:
        asked.append(trio.current_time())
        return LeaseGrant(1.0, 2)

    client = ClientConfig(lease=LeaseGrant())
    async with pair(lambda request: request.payload, server=ServerConfig(lease=policy), client=client) as (peer, _, _s):
        began = trio.current_time()
        times: list[tuple[bytes, float]] = []

        async def call(data: bytes) -> None:
            await peer.request_response(data)
            times.append((data, round(trio.current_time() - began)))

        async with trio.open_nursery() as nursery:
            for number in range(6):
                nursery.start_soon(call, b"%d" % number)
                await wait_all_tasks_blocked()
        assert sorted(times) == [(b"0", 0), (b"1", 0), (b"2", 1), (b"3", 1), (b"4", 2), (b"5", 2)]
        assert len(asked) == 3
        with trio.move_on_after(0.1):
            await call(b"6")  # waits for a lease, and is given up without a word
        assert peer.statistics().open_streams == 0


@pytest.mark.parametrize("fixed", [True, False], ids=["fixed", "policy"])
@pytest.mark.parametrize("dialect", ["rsocket", "reactivesocket"])
async def test_a_server_with_leases_serves_clients_without(
    dialect: str, fixed: bool, autojump_clock: MockClock
) -> None:
    """RS-45, RX-38: a client without the flag needs no lease and gets none, for as long as it stays; and a connection that drains gives none."""
    grant = LeaseGrant(ttl=1.0, n=5)
    policed: list[ConnectedPeer] = []

    def policy(peer: ConnectedPeer) -> LeaseGrant:
        policed.append(peer)
        return grant

    async def handler(request: Request) -> bytes:
        await trio.sleep(3)
        return request.data

    config = ServerConfig(lease=grant if fixed else policy)
    with_lease = ClientConfig(lease=LeaseGrant())
    async with (
        ActorSystem() as system,
        serve(system, f"{dialect}+memory://desk", handler, config=config) as listener,
        connect(system, listener.url) as peer,
        connect(system, listener.url, config=with_lease) as other,
    ):
        for data in (b"1", b"2"):
            assert (await peer.request_response(data)).data == data
            assert (await other.request_response(data)).data == data
        assert {each.setup.lease for each in policed if each.setup} == (set() if fixed else {True})
        count = len(policed)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(other.request_response, b"3")
            await wait_all_tasks_blocked()
            for serving in listener.peers:
                nursery.start_soon(serving.aclose)
        assert len(policed) == count
        assert system.statistics().failures == 0


# ---------------------------------------------------------------- the end


async def test_draining_lets_streams_end(autojump_clock: MockClock) -> None:
    """RS-31: who is served is served to the end, new requests are rejected."""

    async def handler(request: Request) -> bytes:
        await trio.sleep(float(request.data))
        return b"done"

    async with ActorSystem() as system:
        answers: list[Any] = []
        began = trio.current_time()
        async with both_of(system, handler) as (peer, listener):

            async def call() -> None:
                answers.append((await peer.request_response(b"2")).data)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(call)
                await wait_all_tasks_blocked()
                nursery.start_soon(listener.aclose)
                await wait_all_tasks_blocked()
                with pytest.raises(RequestRejected, match="draining"):
                    await peer.request_response(b"0")
                with pytest.raises(ConnectionClosed, match="closing"):
                    await listener.peers[0].request_response(b"0")
            assert answers == [b"done"]
            await peer.terminated()
            assert peer.end is not None
            assert peer.end.reason is EndReason.CLOSED_BY_PEER
            assert trio.current_time() - began < 3


async def test_followers_of_a_server_that_leaves_read_that_it_leaves(autojump_clock: MockClock) -> None:
    """RS-31: an endless stream has the time of the drain; then its client reads who ended it."""

    async def ticks(request: Request) -> AsyncIterator[bytes]:
        while True:
            yield b"tick"
            await trio.sleep(1)

    got: list[bytes] = []

    async def follow(peer: ConnectedPeer) -> None:
        with pytest.raises(
            ChannelConnectionLost, match=r": the peer closed the connection: .* after the drain timeout$"
        ):
            async for payload in await peer.request_stream(b""):
                got.append(payload.data)

    async with (
        ActorSystem() as system,
        serve(
            system, "rsocket+memory://desk", ticks, config=ServerConfig(core=CoreConfig(drain_timeout=2.5))
        ) as listener,
        connect(system, listener.url) as peer,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(follow, peer)
        await wait_all_tasks_blocked()
        nursery.start_soon(listener.aclose)
        await peer.terminated()
        assert trio.current_time() == pytest.approx(2.5, abs=0.1)
        assert peer.end is not None
        assert peer.end.reason is EndReason.CLOSED_BY_PEER
    assert len(got) == 3


@pytest.mark.parametrize("sent", [0.049, 0.050, 0.051])
async def test_a_request_that_crosses_the_end_of_the_server_is_rejected(sent: float, autojump_clock: MockClock) -> None:
    """RS-31: so its client knows that it was not done. The server waits no longer than that."""
    asked: list[bytes] = []

    async def ask(peer: ConnectedPeer) -> None:
        await trio.sleep(sent)
        with pytest.raises(RequestRejected, match="draining") as caught:
            await peer.request_response(b"crossing")
        assert caught.value.retryable

    carrier = MemoryConfig(latency=0.002)
    async with (
        ActorSystem() as system,
        serve(
            system,
            "rsocket+memory://desk",
            lambda request: asked.append(request.data),
            config=ServerConfig(carrier=carrier),
        ) as listener,
        connect(system, listener.url, config=ClientConfig(carrier=carrier)) as peer,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(ask, peer)
        await trio.sleep(0.05)
        await listener.aclose()
        assert trio.current_time() < 0.06
    assert asked == []


@asynccontextmanager
async def both_of(system: ActorSystem, handler: Any) -> AsyncIterator[tuple[ConnectedPeer, Listener]]:
    async with serve(system, "rsocket+memory://desk", handler) as listener, connect(system, listener.url) as peer:
        yield peer, listener


async def test_draining_has_an_end(autojump_clock: MockClock) -> None:
    ended = trio.Event()

    async def handler(_: Request) -> bytes:
        try:
            await trio.sleep_forever()
        finally:
            ended.set()
        return b""

    async with ActorSystem() as system, both_of(system, handler) as (peer, listener):
        async with trio.open_nursery() as nursery:

            async def call() -> None:
                with pytest.raises(ConnectionLost):
                    await peer.request_response(b"")

            nursery.start_soon(call)
            await wait_all_tasks_blocked()
            began = trio.current_time()
            await listener.aclose()
            assert trio.current_time() - began == pytest.approx(5.0, abs=0.5)
        assert ended.is_set()


@pytest.mark.parametrize("side", ["client", "server"])
async def test_the_other_side_is_told_that_a_peer_is_gone(side: str) -> None:
    """RS-71: handlers are cancelled, requests fail, `terminated` returns: on both sides, whoever goes."""
    ended: list[str] = []

    async def handler(request: Request) -> Any:
        try:
            await trio.sleep_forever()
        finally:
            ended.append("handler")

    async with pair(handler) as (peer, listener, _):
        while not listener.peers:
            await trio.lowlevel.checkpoint()
        client = listener.peers[0]
        async with trio.open_nursery() as nursery:

            async def call() -> None:
                with pytest.raises(ConnectionLost):
                    await peer.request_response(b"")
                ended.append("call")

            nursery.start_soon(call)
            await wait_all_tasks_blocked()
            gone = peer if side == "server" else client
            wire = below(client if side == "server" else peer).carrier
            assert wire is not None
            wire.abort()
        await gone.terminated()
        assert gone.end is not None
        assert gone.end.reason is EndReason.LOST
        await wait_all_tasks_blocked()
        assert sorted(ended) == ["call", "handler"]
        assert listener.peers == []


async def test_one_client_is_closed_by_the_server() -> None:
    async with (
        ActorSystem() as system,
        serve(system, "rsocket+memory://desk", lambda r: r.payload) as listener,
        connect(system, listener.url) as one,
        connect(system, listener.url) as other,
    ):
        await one.request_response(b"")
        await other.request_response(b"")
        await listener.peers[0].aclose()
        await one.terminated()
        assert one.end is not None
        assert one.end.reason is EndReason.CLOSED_BY_PEER
        assert (await other.request_response(b"still")).data == b"still"
        assert len(listener.peers) == 1


async def test_a_silent_peer_is_given_up(autojump_clock: MockClock) -> None:
    """RS-107: nothing came for the whole lifetime; the request in the air fails, and so does the handler at the other end."""
    core = CoreConfig(keepalive_interval=1.0, max_lifetime=3.0)
    async with pair(lambda request: request.payload, client=ClientConfig(core=core)) as (peer, _, _system):
        await peer.request_response(b"")
        await trio.sleep(60)
        assert not peer.closed
        below(peer).carrier.stream.link.hold()  # type: ignore[union-attr]
        await peer.terminated()
        end = peer.end
        assert end is not None
        assert end.reason is EndReason.TIMED_OUT


@pytest.mark.parametrize("where", ["entering", "inside", "leaving"])
async def test_cancelled_around_a_connection(where: str, autojump_clock: MockClock) -> None:
    """Whatever is cancelled, nothing is left."""

    async def handler(_: Request) -> bytes:
        await trio.sleep_forever()
        return b""

    async with ActorSystem() as system, serve(system, "rsocket+memory://desk", handler) as listener:
        actors = system.statistics().actors
        receiver: Receiver[Payload] | None = None
        with trio.CancelScope() as scope:
            if where == "entering":
                scope.cancel()
            async with connect(system, listener.url) as peer, trio.open_nursery() as nursery:
                if where == "inside":
                    nursery.start_soon(peer.request_response, b"")
                    await wait_all_tasks_blocked()
                    scope.cancel()
                else:
                    receiver = await peer.request_stream(b"")
                    scope.deadline = trio.current_time() + 1.0  # while it drains
        assert scope.cancelled_caught
        if receiver is not None:
            assert where == "leaving"
            with pytest.raises(ConnectionLost):
                await receiver.receive()
        await wait_all_tasks_blocked()
        assert system.statistics().actors == actors
        assert listener.peers == []


async def test_an_exception_inside_closes_at_once(autojump_clock: MockClock) -> None:
    async def handler(_: Request) -> bytes:
        await trio.sleep_forever()
        return b""

    async with ActorSystem() as system:
        began = trio.current_time()
        receiver: Receiver[Payload] | None = None
        with pytest.raises(KeyError):
            async with both_of(system, handler) as (peer, _):
                receiver = await peer.request_stream(b"")
                raise KeyError("body")
        assert trio.current_time() - began < 2
        assert receiver is not None
        with pytest.raises(ConnectionLost):
            await receiver.receive()
        assert system.statistics().actors == 0


async def test_inside_an_actor() -> None:
    """`enter` holds a connection for as long as the actor lives."""

    class Teller(Actor[Any]):
        url: str

        async def started(self) -> None:
            self.far = await self.enter(connect(self.system, self.url))
            answers.append((await self.far.request_response(b"hello")).data)

    answers: list[bytes] = []
    async with (
        ActorSystem() as system,
        serve(system, "rsocket+memory://desk", lambda request: request.payload) as listener,
    ):
        teller = system.spawn(Teller, listener.url)
        await wait_all_tasks_blocked()
        assert answers == [b"hello"]
        teller.stop()
        await teller.terminated()
        await wait_all_tasks_blocked()
        assert listener.peers == []


@pytest.mark.parametrize("stuck", [0, 4])
async def test_the_end_of_the_system_drains_connections(autojump_clock: MockClock, stuck: int) -> None:
    """What is under way is answered before the system ends, on all connections at the same time; a stuck one delays no other."""

    async def handler(request: Request) -> bytes:
        await trio.sleep(1 if request.data != b"stuck" else 1000)
        return b"in time"

    answers: list[tuple[str, float]] = []

    async def call(peer: ConnectedPeer, data: bytes) -> None:
        try:
            answers.append(((await peer.request_response(data)).data.decode(), trio.current_time()))
        except ConnectionLost:
            answers.append(("given up", trio.current_time()))

    async with trio.open_nursery() as nursery, ActorSystem() as clients:
        async with ActorSystem() as system, AsyncExitStack() as stack:
            config = ServerConfig(core=CoreConfig(drain_timeout=3.0))
            await stack.enter_async_context(serve(system, "rsocket+memory://desk", handler, config=config))
            leave = stack.pop_all()  # after the system, not before it
            for number in range(8):
                peer = await leave.enter_async_context(connect(clients, "rsocket+memory://desk"))
                nursery.start_soon(call, peer, b"stuck" if number < stuck else b"")
            await wait_all_tasks_blocked()
        assert answers == [("in time", 1.0)] * (8 - stuck) + [("given up", 3.0)] * stuck
        await leave.aclose()


async def test_a_stopped_connection_actor_says_goodbye() -> None:
    async with pair(lambda request: request.payload) as (peer, listener, _):
        await peer.request_response(b"")
        below(peer).ref.stop()
        (client,) = listener.peers
        await client.terminated()
        assert client.end is not None
        assert client.end.reason is EndReason.CLOSED_BY_PEER
        with pytest.raises(ConnectionClosed):
            await peer.request_response(b"")
