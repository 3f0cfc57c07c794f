"""What is lost, and how a connection ends: each half learns of it, nothing is left behind."""

from __future__ import annotations

import gc
from contextvars import ContextVar
from typing import Any

import pytest
import trio
from tests.actors import carried
from trio.testing import MockClock, wait_all_tasks_blocked

from levada.actors.aqueduct import PeerConfig, connect, serve
from levada.framework import Actor, ActorSystem, Down, TerminalState, channel, current_peer, handles, oneshot
from levada.framework.channel import Outcome
from levada.framework.errors import (
    ChannelConnectionLost,
    ChannelLost,
    ConfigurationError,
    ConnectionLost,
    HandleMoved,
    ReceiverClosed,
    SenderFinished,
)
from levada.transports.aqueduct import AqueductConfig
from levada.transports.carriers import MemoryConfig, dial

from .conftest import Parcel, Start, settled

NOTHING = (0,) * 10
DEAF = MemoryConfig(shape="connection", datagram_loss=1.0)


@pytest.mark.rule("AQ-55")
@carried.memory_only
async def test_aq55_a_lost_message_takes_its_channels_along(start: Start, autojump_clock: MockClock) -> None:
    """A nacked message loses what is attached to it, and what is attached to messages on that, of any depth."""
    async with start(carrier=DEAF) as ends:
        ends.peer.entry.unreliable()
        first, at_peer = channel(Parcel)
        sender, receiver = channel(int)
        answer, asked = oneshot(int)
        receipt = await ends.peer.send(Parcel(receiver=at_peer, sender=sender), receipt=True)
        await first.send(Parcel(sends_one=answer))
        assert not await receipt
        for handle in (receiver, asked):
            with pytest.raises(ChannelLost):
                await handle.receive()
        with pytest.raises(ChannelLost):
            await first.send(Parcel())
        with pytest.raises(trio.WouldBlock):
            ends.got.receive_nowait()
        await settled()
        assert ends.left() == NOTHING


@pytest.mark.parametrize("end", ["cut", "close"])
async def test_a_send_that_waits_for_room_raises_when_the_channel_ends(
    start: Start, autojump_clock: MockClock, end: str
) -> None:
    """What is settled then makes no room: a message that never left is not taken for sent."""
    async with start(core=AqueductConfig(window=4, mailbox=4)) as ends:
        sender, at_peer = channel(int)
        await ends.peer.send(Parcel(receiver=at_peer))
        got = (await ends.got.receive()).receiver
        errors: list[type[Exception]] = []
        sent = 0

        async def fill() -> None:
            nonlocal sent
            try:
                while True:
                    await sender.send(sent)
                    sent += 1
            except (ChannelConnectionLost, ReceiverClosed) as error:
                errors.append(type(error))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(fill)
            await settled()
            before = sent
            if end == "cut":
                ends.cut()
            else:
                got.close()
        got.close()
        assert errors == [ChannelConnectionLost if end == "cut" else ReceiverClosed]
        assert sent == before > 0


@carried.memory_only
async def test_an_actor_that_watches_a_handle_hears_of_the_loss(start: Start, autojump_clock: MockClock) -> None:
    heard: list[Any] = []

    class Watcher(Actor[Any]):
        receiver: Any

        def started(self) -> None:
            self.watch(self.receiver, tag="it")

        @handles
        def on_down(self, m: Down) -> None:
            heard.append((type(m.reason), m.tag))

    async with start(carrier=DEAF) as ends:
        ends.peer.entry.unreliable()
        sender, receiver = channel(int)
        ends.system.spawn(Watcher, receiver)
        await ends.peer.send(Parcel(sender=sender))
        await settled()
        assert heard == [(ChannelLost, "it")]


@pytest.mark.rule("AQ-50")
async def test_aq50_what_a_closed_receiver_never_took_is_given_up(start: Start, autojump_clock: MockClock) -> None:
    """Handles in messages that nobody will take end, though the peer's program never saw them."""
    async with start() as ends:
        outer, travelling = channel(Parcel)
        await ends.peer.send(Parcel(receiver=travelling))
        got = await ends.got.receive()
        pairs = [channel(int) for _ in range(3)]
        for sender, _ in pairs:
            await outer.send(Parcel(sender=sender))
        await settled()
        got.receiver.close()
        for _, receiver in pairs:
            with pytest.raises(Exception, match=r"cancelled the channel|lost in transit"):
                await receiver.receive()
        await settled()
        assert ends.left() == NOTHING


async def test_a_message_that_is_dropped_before_it_leaves_loses_its_channels(
    start: Start, autojump_clock: MockClock
) -> None:
    async with start(core=AqueductConfig(window=1, mailbox=1)) as ends:
        outer, travelling = channel(Parcel)
        await ends.peer.send(Parcel(receiver=travelling))
        got = await ends.got.receive()
        for _ in range(258):  # until only the window of this side has room
            await outer.send(Parcel())
        await settled()
        sender, receiver = channel(int)
        receipt = await outer.send(Parcel(sender=sender), receipt=True)
        await settled()
        assert receipt.outcome is None
        outer.cancel()
        assert not await receipt
        with pytest.raises(ChannelLost):
            await receiver.receive()
        with pytest.raises(HandleMoved):
            sender.send_nowait(1)
        got.receiver.close()
        await settled()
        assert ends.left() == NOTHING


async def test_a_lost_connection_ends_all_channels_on_both_sides(start: Start, autojump_clock: MockClock) -> None:
    """What had arrived can still be taken; then every handle says that the connection was lost, as does every later one."""
    async with start() as ends:
        sender, receiver = channel(int)
        mine, travelling = channel(int)
        answer, asked = oneshot(int)
        await ends.peer.send(Parcel(sender=sender, receiver=travelling, sends_one=answer))
        got = await ends.got.receive()
        await got.sender.send(1)
        await mine.send(2)
        late, never = channel(int)
        later = await ends.peer.send(Parcel(many=[late]), receipt=True)
        await wait_all_tasks_blocked()
        ends.cut()
        await wait_all_tasks_blocked()
        assert await receiver.receive() == 1
        assert await got.receiver.receive() == 2
        for handle in (receiver, asked, got.receiver):
            with pytest.raises(ChannelConnectionLost, match="somebody dug"):
                await handle.receive()
        for handle in (mine, got.sender, ends.peer.entry):
            with pytest.raises(ChannelConnectionLost, match="somebody dug"):
                await handle.send(3)
        with pytest.raises(ChannelConnectionLost):
            got.sends_one.send(4)
        assert not await later  # it has arrived, but the ack has not
        with pytest.raises(ChannelConnectionLost):
            await never.receive()
        arrived = await ends.got.receive()
        with pytest.raises(ChannelConnectionLost):
            arrived.many[0].send_nowait(1)
        await ends.peer.terminated()
        assert ends.listener.peers == []
        assert not [*ends.client.core.halves, *ends.client.halves.records]


async def test_leaving_the_block_lets_everything_arrive(start: Start, autojump_clock: MockClock) -> None:
    """An orderly end delivers what was sent, and waits for channels that are open."""
    numbers, into = channel(int)
    async with start() as ends:
        sender, travelling = channel(int)
        async with connect(ends.system, ends.listener.url, Parcel) as peer:
            await peer.send(Parcel(sender=numbers, receiver=travelling))
            got = await ends.got.receive()

            async def go_on() -> None:
                for number in range(100):
                    await trio.sleep(0.02)
                    await got.sender.send(number)
                got.sender.finish_nowait()

            ends.system.start_task(go_on, name="go on")
            for number in range(50):
                await sender.send(number)
            sender.finish_nowait()
        assert peer.closed
        assert [number async for number in got.receiver] == list(range(50))
        assert [number async for number in into] == list(range(100))
        assert trio.current_time() < 4


async def test_a_channel_that_nobody_ends_holds_up_for_the_drain_time_only(
    start: Start, autojump_clock: MockClock
) -> None:
    async with start(core=AqueductConfig(drain_timeout=3.0)) as ends:
        began = trio.current_time()
        sender, receiver = channel(int)
        async with connect(
            ends.system, ends.listener.url, Parcel, config=PeerConfig(core=AqueductConfig(drain_timeout=3.0))
        ) as peer:
            await peer.send(Parcel(sender=sender))
            got = await ends.got.receive()
        assert trio.current_time() - began == pytest.approx(3.0, abs=0.1)
        assert receiver.state is got.sender.state is TerminalState.CONNECTION_LOST


async def test_an_exception_closes_at_once(start: Start, autojump_clock: MockClock) -> None:
    async with start() as ends:
        began = trio.current_time()
        sender, receiver = channel(int)
        theirs: Any = None
        with pytest.raises(KeyError):
            async with connect(ends.system, ends.listener.url, Parcel) as peer:
                await peer.send(Parcel(sender=sender))
                theirs = (await ends.got.receive()).sender
                raise KeyError
        with pytest.raises(ChannelConnectionLost, match="this side closed"):
            await receiver.receive()
        with pytest.raises(ChannelConnectionLost, match="the peer closed it with code 0"):
            await theirs.send(1)
        assert trio.current_time() - began < 0.1


async def test_the_server_leaves_in_order(autojump_clock: MockClock) -> None:
    """Its entrypoint closes, a handler that runs is waited for, then the connection closes."""
    done: list[str] = []

    async def slow(m: Parcel) -> None:
        await trio.sleep(2)
        assert m.sender is not None
        m.sender.send_nowait(m.text)
        m.sender.finish_nowait()
        done.append(m.text)

    async with ActorSystem() as system:
        async with serve(system, "aqueduct+memory://desk", slow, Any) as listener:
            context = connect(system, listener.url, Parcel)
            peer = await context.__aenter__()
            sender, receiver = channel(str)
            await peer.send(Parcel("late", sender=sender))
            await wait_all_tasks_blocked()
        assert done == ["late"]
        assert [text async for text in receiver] == ["late"]
        with pytest.raises((ReceiverClosed, ChannelConnectionLost)):
            await peer.send(Parcel())
        await context.__aexit__(None, None, None)
        with pytest.raises(ConnectionLost):
            async with connect(system, "aqueduct+memory://desk", Parcel):
                pass


async def test_the_end_of_the_system_ends_everything(autojump_clock: MockClock) -> None:
    sender, receiver = channel(int)

    async def keep(m: Parcel) -> None:
        await trio.sleep_forever()

    async with ActorSystem() as system:
        serving = serve(system, "aqueduct+memory://desk", keep, Any)
        listener = await serving.__aenter__()
        connecting = connect(system, listener.url, Parcel)
        peer = await connecting.__aenter__()
        await peer.send(Parcel(sender=sender))
        await wait_all_tasks_blocked()  # the handler has it
    assert receiver.state is TerminalState.CONNECTION_LOST
    assert peer.closed
    await connecting.__aexit__(None, None, None)
    await serving.__aexit__(None, None, None)


async def test_a_peer_that_breaks_a_rule_loses_its_own_connection_only(start: Start, autojump_clock: MockClock) -> None:
    async with start() as ends:
        async with dial(ends.listener.url.removeprefix("aqueduct+")) as carrier:
            stream = await carrier.open_stream()  # type: ignore[union-attr]
            stream.send_nowait(b"GET / HTTP/1.1\r\n\r\n")
            reason = await carrier.wait_closed()  # type: ignore[union-attr]
        assert (reason.code, reason.text[:4]) == (1, "E-6:")
        await ends.peer.send(Parcel("still here"))
        assert (await ends.got.receive()).text == "still here"


async def test_a_server_that_breaks_a_rule_is_left(autojump_clock: MockClock) -> None:
    from levada.transports.carriers import listen

    async with (
        ActorSystem() as system,
        trio.open_nursery() as nursery,
        listen("memory://desk", MemoryConfig(shape="connection")) as listener,
    ):

        async def talk_nonsense() -> None:
            carrier = (await listener.accept()).accept()  # type: ignore[union-attr]
            stream = await carrier.accept_stream()
            stream.send_nowait(b"\xef\x50nonsense")
            assert (await carrier.wait_closed()).code == 1

        nursery.start_soon(talk_nonsense)
        with pytest.raises(ConnectionLost, match="the peer broke the protocol: E-7"):
            async with connect(system, "aqueduct+memory://desk", Parcel):
                pass


async def test_a_peer_with_another_codec_is_refused(start: Start, autojump_clock: MockClock) -> None:
    from levada.transports.aqueduct import AqueductCore, StreamData

    async with start() as ends:
        core = AqueductCore(client=True, headers=(("levada-codec", b"9"),))
        core.handshake_completed(1200)
        (data,) = [out for out in core.data_to_send(0.0) if isinstance(out, StreamData)]
        async with dial(ends.listener.url.removeprefix("aqueduct+")) as carrier:
            stream = await carrier.open_stream()  # type: ignore[union-attr]
            stream.send_nowait(data.data)
            reason = await carrier.wait_closed()  # type: ignore[union-attr]
        assert (reason.code, reason.text) == (3, "levada-codec is b'9' there and b'1' here")
        assert not ends.peer.closed


async def test_headers_of_both_sides(autojump_clock: MockClock) -> None:
    async with ActorSystem() as system:
        server = PeerConfig(headers=(("motd", b"hello"), ("motd", b"again")))

        async def ignore(m: Any) -> None: ...

        async with serve(system, "aqueduct+memory://desk", ignore, Any, config=server) as listener:
            client = PeerConfig(headers=(("who", b"me"),))
            async with connect(system, listener.url, Parcel, config=client) as peer:
                assert peer.headers[-2:] == (("motd", b"hello"), ("motd", b"again"))
                (other,) = listener.peers
                assert other.headers[-1:] == (("who", b"me"),)
                with pytest.raises(ConfigurationError, match="only a client"):
                    await other.send(Parcel())


async def test_mistakes_are_told(autojump_clock: MockClock) -> None:
    async with ActorSystem() as system:
        with pytest.raises(ConfigurationError, match="aqueduct://"):
            async with connect(system, "tcp://localhost:1", Parcel):
                pass
        with pytest.raises(ConnectionLost, match="no listener at"):
            async with connect(system, "aqueduct+memory://nowhere", Parcel):
                pass
        with pytest.raises(ConfigurationError, match="an actor class, a Ref or an async function"):
            async with serve(system, "aqueduct+memory://desk", 7, Any):  # type: ignore[arg-type]
                pass
        with pytest.raises(ConfigurationError, match="wanted a MemoryConfig"):
            async with connect(system, "aqueduct+memory://desk", Parcel, config=PeerConfig(carrier="fast")):
                pass
    gc.collect()


async def test_as_many_messages_are_handled_at_once_as_the_settings_say(autojump_clock: MockClock) -> None:
    """More than the window, if so wished; those above wait, and hold back the client."""
    gate = trio.Event()
    running = most = 0

    async def wait(m: Parcel) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await gate.wait()
        running -= 1

    sent = 0

    async def send(peer: Any) -> None:
        nonlocal sent
        for _ in range(2000):
            await peer.send(Parcel())
            sent += 1

    async with ActorSystem() as system:
        config = PeerConfig(max_handlers=400)
        async with (
            serve(system, "aqueduct+memory://desk", wait, Any, config=config) as listener,
            connect(system, listener.url, Parcel) as peer,
            trio.open_nursery() as nursery,
        ):
            nursery.start_soon(send, peer)
            await settled()
            assert most == 400
            assert 400 + 256 <= sent < 2000
            gate.set()
    assert (sent, running) == (2000, 0)


async def test_a_handler_begins_without_the_context_of_another(autojump_clock: MockClock) -> None:
    """A handler that ends lets the next message's begin; what it has set in a ContextVar stays its own. The peer is the same to both."""
    customer = ContextVar("customer", default="nobody")
    seen: list[tuple[str, str, object]] = []

    async def handle(m: Parcel) -> None:
        seen.append((m.text, customer.get(), current_peer()))
        customer.set(m.text)
        await trio.sleep(1)  # the others wait meanwhile

    async with ActorSystem() as system:
        config = PeerConfig(max_handlers=1)
        async with (
            serve(system, "aqueduct+memory://desk", handle, Any, config=config) as listener,
            connect(system, listener.url, Parcel) as peer,
        ):
            for text in ("anna", "bert", "carl"):
                await peer.send(Parcel(text))
            await settled()
            (connection,) = listener._actor.connections
            remote = connection.halves.remote
    assert remote is not None
    assert seen == [(text, "nobody", remote) for text in ("anna", "bert", "carl")]


@pytest.mark.parametrize("kind", ["class", "ref", "partial"])
async def test_actors_as_handlers(kind: str, autojump_clock: MockClock) -> None:
    """One object for each connection, or one for all; when it ends, the entrypoint closes."""
    from functools import partial

    made: list[Any] = []

    class Desk(Actor[Parcel]):
        def __attrs_post_init__(self) -> None:
            made.append(self)
            self.count = 0

        @handles
        async def on_parcel(self, m: Parcel) -> None:
            self.count += 1
            if m.sends_one is None:
                self.stop()
            else:
                m.sends_one.send(self.count)

    async with ActorSystem() as system:
        handler: Any = {"class": Desk, "ref": system.spawn(Desk), "partial": partial(Desk)}[kind]
        async with (
            serve(system, "aqueduct+memory://desk", handler, Any) as listener,
            connect(system, listener.url, Parcel) as one,
            connect(system, listener.url, Parcel) as two,
        ):
            counts = []
            for peer in (one, one, two):
                answer, asked = oneshot(int)
                await peer.send(Parcel(sends_one=answer))
                counts.append(await asked)
            assert counts == ([1, 2, 3] if kind == "ref" else [1, 2, 1])
            assert len(made) == (1 if kind == "ref" else 3)
            await one.send(Parcel())
            assert await one.entry.terminated() is TerminalState.RECEIVER_CLOSED


async def test_statistics(start: Start, autojump_clock: MockClock) -> None:
    async with start() as ends:
        sender, receiver = channel(int)
        await ends.peer.send(Parcel(sender=sender))
        remote = (await ends.got.receive()).sender
        for number in range(5):
            await remote.send(number)
        remote.finish_nowait()
        assert len([_ async for _ in receiver]) == 5
        await settled()
        numbers = ends.peer.statistics()
        assert (numbers.messages_sent, numbers.messages_received, numbers.channels, numbers.streams) == (1, 5, 1, 3)
        assert numbers.carrier is not None
        assert numbers.carrier.bytes_sent > 0
        with pytest.raises(SenderFinished):
            remote.send_nowait(6)


async def test_a_receipt_says_what_nobody_can_know(start: Start, autojump_clock: MockClock) -> None:
    """A message that the peer has processed and had not acked when the connection was lost is in doubt, not denied."""
    slow = AqueductConfig(ack_delay=30.0)
    async with start(core=slow) as ends:
        acked, unacked = [await ends.peer.send(Parcel(text), receipt=True) for text in ("a", "b")]
        assert {(await ends.got.receive()).text for _ in range(2)} == {"a", "b"}
        ends.cut()
        assert [await acked, await unacked] == [Outcome.UNKNOWN, Outcome.UNKNOWN]
