"""The hook of a listener: what it gets, what follows from its decision, and clients that wait, leave, or say nothing."""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from typing import Any

import attrs
import pytest
import trio
from tests.simnet import SimNet
from trio.testing import MockClock, wait_all_tasks_blocked

from levada.actors.aqueduct import AqueductConfig, Listener, PeerConfig, connect, serve
from levada.actors.aqueduct.entry import connect_over, serve_over
from levada.actors.authentication import Authentication, Credentials, PeerRefused, Refused
from levada.actors.authenticators import BearerTokens
from levada.framework import (
    Actor,
    ActorSystem,
    Asks,
    Identity,
    Limits,
    Lost,
    RemotePeer,
    channel,
    current_peer,
    handles,
    message,
)
from levada.framework.errors import ChannelConnectionLost, ConnectionLost, NameUnknown
from levada.framework.testing import Probe
from levada.transports.aqueduct import AqueductCore, CloseCode, Mode, OpenStream, SenderHalf, StreamData
from levada.transports.carriers import Connection, MemoryConfig, Stream, dial
from levada.transports.quic import ClientSessions, QuicConfig, TicketStore
from levada.transports.quic import dial as dial_quic
from levada.transports.quic import listen as listen_quic

ADA = Identity("ada", tenant="acme", roles={"trader"}, headers=[("motd", b"hello ada")])
URL = "aqueduct+memory://desk"


@message("tests.aqueduct.Who")
class Who(Asks[str]):
    text: str = ""


async def ignore(m: Who) -> None:
    pass


async def ada(asked: Credentials) -> Identity | Refused:
    return ADA


async def never(asked: Credentials) -> Identity | Refused:
    await trio.sleep_forever()
    raise AssertionError


def no(**settings: Any) -> Any:
    async def refuse(asked: Credentials) -> Identity | Refused:
        return Refused("Not today.", **settings)

    return refuse


def serving(system: ActorSystem, hook: Any, handler: Any = ignore, **settings: Any) -> Any:
    listening: AbstractAsyncContextManager[Listener] = serve(system, URL, handler, Who, authenticate=hook, **settings)
    return listening


async def refusal(system: ActorSystem, **settings: Any) -> ConnectionLost:
    with pytest.raises(ConnectionLost) as caught:
        async with connect(system, URL, Who, **settings):
            raise AssertionError("it must not come in")
    return caught.value


async def test_the_hook_sees_what_the_client_says_and_answers_with_headers(autojump_clock: MockClock) -> None:
    asked: list[Credentials] = []

    async def decide(credentials: Credentials) -> Identity:
        asked.append(credentials)
        return ADA

    server = PeerConfig(headers=[("region", b"eu")])
    client = PeerConfig(headers=[("app", b"desk"), ("app", b"desk 2")])
    async with (
        ActorSystem() as system,
        serving(system, decide, config=server) as listener,
        connect(system, URL, Who, token=b"secret", config=client) as peer,
    ):
        assert peer.headers[-2:] == (("region", b"eu"), ("motd", b"hello ada"))
        (there,) = listener.peers
        assert (there.identity, peer.identity, listener.refused) == (ADA, None, 0)
    (credentials,) = asked
    assert (credentials.protocol, credentials.listener, credentials.early) == ("aqueduct", URL, False)
    assert (credentials.scheme, credentials.token, credentials.headers["app"]) == ("bearer", b"secret", b"desk 2")
    assert credentials.info.peer == peer.info.local
    assert "secret" not in repr(credentials) + repr(client)


@pytest.mark.parametrize("code", [None, 77])
async def test_a_refusal_is_raised_by_connect(code: int | None, autojump_clock: MockClock) -> None:
    async with ActorSystem() as system, serving(system, no(code=code)) as listener:
        audit = Probe(system)
        system.events.subscribe(PeerRefused, audit.ref)
        error = await refusal(system)
        event = await audit.expect(PeerRefused)
        assert (listener.refused, listener.peers) == (1, [])
    assert error.code == (code or CloseCode.REFUSED)
    assert str(error) == f"the connection was lost: the peer closed it with code {error.code}: Not today."
    assert (event.protocol, event.listener, event.reason) == ("aqueduct", URL, "Not today.")


async def test_tokens_of_a_file_work_here_too(autojump_clock: MockClock) -> None:
    async with ActorSystem() as system, serving(system, BearerTokens.of({b"secret": ADA})) as listener:
        async with connect(system, URL, Who, token=b"secret"):
            assert [peer.identity for peer in listener.peers] == [ADA]
        for settings in ({"token": b"guess"}, {}, {"config": PeerConfig(headers=[("authorization", b"\xff secret")])}):
            assert "These credentials are not valid here." in str(await refusal(system, **settings))


async def test_a_token_is_bytes(autojump_clock: MockClock) -> None:
    async with ActorSystem() as system:
        with pytest.raises(TypeError, match="the token is str, wanted bytes: encode it"):
            connect(system, URL, Who, token="secret")  # type: ignore[call-overload, arg-type, unused-ignore]


async def test_a_hook_may_be_an_actor(autojump_clock: MockClock) -> None:
    class Door(Actor[Credentials]):
        @handles
        def decide(self, m: Credentials) -> Identity | Refused:
            return ADA if m.token == b"secret" else Refused("Ask at the desk.")

    async with ActorSystem() as system, serving(system, system.spawn(Door)):
        async with connect(system, URL, Who, token=b"secret"):
            pass
        assert "Ask at the desk." in str(await refusal(system))


async def test_a_slow_hook_lets_nothing_through_before_it_has_decided(autojump_clock: MockClock) -> None:
    """An early client sends at once; its messages wait, and are handled in order when it is in."""
    handled: list[tuple[str, RemotePeer | None, float]] = []

    async def slow(asked: Credentials) -> Identity:
        await trio.sleep(3)
        return ADA

    class Desk(Actor[Who]):
        @handles
        def who(self, m: Who) -> None:
            handled.append((m.text, self.peer, trio.current_time()))

    async with ActorSystem() as system, serving(system, slow, Desk) as listener:
        began = trio.current_time()
        early = partial(dial, "memory://desk", MemoryConfig(shape="connection"))
        async with connect_over(system, early, Who, config=PeerConfig(early=True)) as peer:
            for number in range(5):
                await peer.send(Who(str(number)))
            await wait_all_tasks_blocked()
            assert (handled, listener.peers, trio.current_time() - began) == ([], [], 0)
            await peer.greeted()
            await wait_all_tasks_blocked()
            (there,) = listener.peers
            assert [text for text, _, _ in handled] == ["0", "1", "2", "3", "4"]
            assert {at - began for _, _, at in handled} == {3.0}
            assert {who.identity for _, who, _ in handled if who is not None} == {ADA} == {there.identity}


async def test_a_hook_that_hangs_refuses(autojump_clock: MockClock) -> None:
    async with ActorSystem() as system, serving(system, Authentication(never, timeout=2.0)):
        began = trio.current_time()
        assert "did not check these credentials in time" in str(await refusal(system))
        assert trio.current_time() - began == pytest.approx(2.0, abs=0.1)


async def test_an_identity_whose_headers_cannot_be_sent_lets_nobody_in(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async def decide(asked: Credentials) -> Identity:
        return Identity("ada", headers=[("größe", b"1")])

    async with ActorSystem() as system, serving(system, decide):
        assert "could not check these credentials" in str(await refusal(system))
    assert [r.getMessage().partition(": ")[2][:47] for r in caplog.records if r.levelno == logging.ERROR] == [
        "authenticate gave headers that cannot be sent: "
    ]


async def test_a_tenant_has_its_number_of_connections(autojump_clock: MockClock) -> None:
    async def decide(asked: Credentials) -> Identity:
        return Identity("ada", limits=Limits(max_connections=1))

    async with ActorSystem() as system, serving(system, decide):
        async with connect(system, URL, Who):
            assert "at most 1" in str(await refusal(system))
        async with connect(system, URL, Who):
            pass


@asynccontextmanager
async def raw(headers: tuple[tuple[str, bytes], ...] | None) -> AsyncIterator[Connection]:
    """A client that greets, or says nothing at all, and then neither reads nor writes."""
    async with dial("memory://desk", MemoryConfig(shape="connection")) as carrier:
        assert isinstance(carrier, Connection)
        if headers is not None:
            core = AqueductCore(client=True, headers=headers)
            core.handshake_completed(1200)
            stream = await carrier.open_stream()
            for output in core.data_to_send(0.0):
                if isinstance(output, StreamData):
                    stream.send_nowait(output.data)
        yield carrier


@pytest.mark.rule("AQ-15")
async def test_aq15_a_client_that_does_not_greet_loses_its_place(autojump_clock: MockClock) -> None:
    """Half-open clients take places of the listener, none of the hook, and only for `AqueductConfig.greeting` seconds."""
    config = PeerConfig(max_connections=3, core=AqueductConfig(greeting=4.0))
    hook = Authentication(ada, at_once=1)
    async with ActorSystem() as system, serving(system, hook, config=config) as listener, AsyncExitStack() as stack:
        mute = [await stack.enter_async_context(raw(None)) for _ in range(2)]
        async with connect(system, URL, Who):
            began = trio.current_time()
            assert len(listener.peers) == 1
            for carrier in mute:
                reason = await carrier.wait_closed()
                assert (reason.code, reason.text) == (4, "AQ-15: no ConnectionControl within 4 s")
            assert trio.current_time() - began == pytest.approx(4.0, abs=0.1)
            await trio.sleep(10)
            assert len(listener.peers) == 1


async def test_hooks_run_in_bounds_and_clients_that_leave_give_their_place_back(autojump_clock: MockClock) -> None:
    running = 0
    most = 0

    async def decide(asked: Credentials) -> Identity:
        nonlocal running, most
        running += 1
        most = max(most, running)
        try:
            await trio.sleep(math.inf if "stay" in asked.headers else 1.0)
        finally:
            running -= 1
        return ADA

    hook = Authentication(decide, at_once=2, timeout=60.0)
    async with ActorSystem() as system, serving(system, hook) as listener:
        async with AsyncExitStack() as gone:
            for _ in range(10):
                await gone.enter_async_context(raw((("stay", b""),)))
            await wait_all_tasks_blocked()
            assert (running, listener.peers) == (2, [])
        await wait_all_tasks_blocked()
        assert running == 0
        async with connect(system, URL, Who):
            assert len(listener.peers) == 1
    assert most == 2


@pytest.mark.rule("AQ-17")
async def test_aq17_what_a_client_may_send_before_it_is_in_is_bounded(autojump_clock: MockClock) -> None:
    """One stream stops at its window; many streams with too much in all end the connection, and the hook with it."""
    ended = trio.Event()

    async def hang(asked: Credentials) -> Identity:
        try:
            await trio.sleep_forever()
        finally:
            ended.set()
        raise AssertionError

    async def send(core: AqueductCore, carrier: Connection) -> list[Stream]:
        streams: dict[int, Stream] = {}
        for output in core.data_to_send(0.0):
            match output:
                case OpenStream(stream_id=number):
                    streams[number] = await carrier.open_stream(unidirectional=output.unidirectional)
                case StreamData():
                    streams[output.stream_id].send_nowait(output.data)
                case _:
                    raise AssertionError(output)
        return [*streams.values()]

    config = PeerConfig(core=AqueductConfig(max_held_early=100_000))
    async with ActorSystem() as system, serving(system, Authentication(hang, timeout=99.0), config=config) as listener:
        for mode in (Mode.ORDERED, Mode.UNORDERED):
            core = AqueductCore(client=True, early=True)
            assert isinstance(core.entrypoint, SenderHalf)
            for _ in range(256):
                core.entrypoint.send(bytes(1000), mode=mode)
            async with dial("memory://desk", MemoryConfig(shape="connection", window=10_000)) as carrier:
                assert isinstance(carrier, Connection)
                streams: list[Stream] = []
                with suppress(ConnectionLost):
                    streams = await send(core, carrier)
                await wait_all_tasks_blocked()
                if mode is Mode.ORDERED:
                    assert (ended.is_set(), listener.peers) == (False, [])
                    assert sum(stream.unsent for stream in streams) > 200_000
                else:
                    reason = await carrier.wait_closed()
                    assert (reason.code, reason.text[:6]) == (CloseCode.LIMIT, "AQ-17:")
            await ended.wait()
            ended = trio.Event()


async def test_the_identity_is_in_handlers_refs_lookups_and_logs(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "levada.actors.aqueduct")
    seen: list[tuple[str, RemotePeer | None]] = []

    async def function(m: Who) -> None:
        await trio.lowlevel.checkpoint()
        seen.append(("function", current_peer()))

    class Desk(Actor[Who]):
        @handles
        def who(self, m: Who) -> str:
            seen.append((m.text, self.peer))
            assert self.peer is not None
            return str(self.peer)

    def may(name: str) -> bool:
        who = current_peer()
        return who is not None and who.identity is not None and name == f"{who.identity.name}'s desk"

    async def decide(asked: Credentials) -> Identity:
        return Identity(asked.token.decode())

    async with ActorSystem() as system, ActorSystem() as far:
        for name in ("ada", "bob"):
            system.registry.register(f"{name}'s desk", system.spawn(Desk))
        async with (
            serving(system, decide, function, expose=may) as listener,
            connect(far, URL, Who, token=b"ada") as peer,
            connect(far, URL, Who, token=b"bob") as other,
        ):
            await peer.send(Who(), receipt=True)
            desk = await peer.lookup("ada's desk", Who)
            desk.tell(Who("tell"))
            assert await desk.ask(Who("ask")) == f"ada ({peer.info.local})"
            with pytest.raises(NameUnknown):
                await peer.lookup("bob's desk", Who)
            assert await (await other.lookup("bob's desk", Who)).ask(Who("other")) == f"bob ({other.info.local})"
            there = {p.identity.name: p for p in listener.peers if p.identity is not None}
        assert await there["ada"].terminated() == Lost(there["ada"].info.peer)
    names = [(what, who.identity.name) for what, who in seen if who is not None and who.identity is not None]
    assert names == [("function", "ada"), ("tell", "ada"), ("ask", "ada"), ("other", "bob")]
    ends = [r.getMessage() for r in caplog.records if "ended" in r.getMessage() and "(ada)" in r.getMessage()]
    assert len(ends) == 1


async def test_early_data_is_said_to_the_hook(quic: tuple[QuicConfig, QuicConfig], autojump_clock: MockClock) -> None:
    """It waits for the handshake, as all early data does, so it is no replay."""
    asked: list[bool] = []

    async def decide(credentials: Credentials) -> Identity | Refused:
        asked.append(credentials.early)
        return Refused("No second time.") if credentials.early else ADA

    net, sessions = SimNet(1, delay=0.05, turns=200_000), ClientSessions()
    server = attrs.evolve(quic[0], tickets=TicketStore())
    listening = partial(listen_quic, "quic://server:4433", server, port=net.port("server", 4433))

    def call(system: ActorSystem, *, early: bool) -> Any:
        client = attrs.evolve(quic[1], sessions=sessions)
        dialling = partial(dial_quic, "quic://server:4433", client, early=early, port=net.port("client"))
        return connect_over(system, dialling, Who, config=PeerConfig(early=early))

    async with ActorSystem() as system, serve_over(system, listening, ignore, Who, authenticate=decide):
        async with call(system, early=False):
            await trio.sleep(1)
        async with call(system, early=True) as peer:
            sender, answers = channel(str)
            sender.finish_nowait()
            with pytest.raises(ConnectionLost, match=r"No second time\."):
                await peer.greeted()
            with pytest.raises(ChannelConnectionLost, match=r"No second time\."):
                await peer.send(Who())
            answers.close()
    assert asked == [False, True]
