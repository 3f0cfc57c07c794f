"""What a requester sees: credit, errors, cancellation, back-pressure, typed answers, metadata."""

from __future__ import annotations

import gc
import pickle
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from levada.actors.authentication import Authenticate, Authentication
from levada.actors.rsocket import (
    MESSAGES,
    ApplicationError,
    ClientConfig,
    ConnectedPeer,
    CoreConfig,
    Handler,
    Listener,
    Payload,
    Request,
    RequestCanceled,
    RequestFailed,
    RequestInvalid,
    RequestRejected,
    ServerConfig,
)
from levada.framework import Actor, ActorSystem, Asks, Ref, handles, message
from levada.framework.errors import (
    ActorStopped,
    ChannelCancelled,
    ConfigurationError,
    ConnectionClosed,
    ConnectionLost,
    DecodeError,
    LocalProtocolError,
    ReceiverClosed,
)
from levada.framework.testing import Probe
from levada.transports.carriers import MemoryConfig
from levada.transports.rsocket.extensions import (
    AcceptableMimeTypes,
    BearerAuthentication,
    CompositeMetadata,
    DataMimeType,
    Entry,
    Extension,
    Routing,
    ZipkinTracing,
)

from .conftest import Tables, below, connect, serve


@message("tests.rsocket.Quote")
class Quote(Asks[float]):
    symbol: str


@message("tests.rsocket.Follow")
class Follow(Asks["Price"]):
    symbol: str


@message("tests.rsocket.Price")
class Price:
    bid: float


TEXT = CoreConfig(metadata_mime_type="text/plain")


@asynccontextmanager
async def pair(
    handler: Handler,
    *,
    client: ClientConfig | None = None,
    server: ServerConfig | None = None,
    answers: Handler = None,
    authenticate: Authenticate | Authentication | None = None,
) -> AsyncIterator[tuple[ConnectedPeer, Listener, ActorSystem]]:
    """A client and a server in memory; both sides have let go of everything afterwards."""
    async with ActorSystem() as system:
        async with (
            serve(system, "rsocket+memory://desk", handler, authenticate=authenticate, config=server) as listener,
            connect(system, listener.url, answers, config=client) as peer,
        ):
            yield peer, listener, system
        statistics = system.statistics()
        assert (statistics.actors, statistics.timers) == (0, 0)


# ---------------------------------------------------------------- credit


async def test_the_window_is_the_credit() -> None:
    """RS-72, RS-73: no more payloads are produced than were asked for; half a window is granted when half was taken."""
    produced: list[int] = []

    async def numbers(_: Request) -> AsyncIterator[bytes]:
        for number in range(100):
            produced.append(number)
            yield b"%d" % number

    async def handler(request: Request) -> Any:
        return numbers(request)

    async with pair(handler) as (peer, _, _system):
        async with await peer.request_stream(b"", window=8) as receiver:
            await wait_all_tasks_blocked()
            assert len(produced) == 9  # the ninth waits for credit
            for _ in range(3):
                await receiver.receive()
            await wait_all_tasks_blocked()
            assert len(produced) == 9
            await receiver.receive()
            await wait_all_tasks_blocked()
            assert len(produced) == 13
            assert [payload.data async for payload in receiver] == [b"%d" % number for number in range(4, 100)]
        for window in (0, -1, 1 << 31, 1.5):
            with pytest.raises(ConfigurationError) as caught:
                await peer.request_stream(b"", window=window)  # type: ignore[arg-type]
            assert str(caught.value) == f"the window is {window!r}, wanted 1 to 2147483647 payloads"


async def test_a_stream_into_a_mailbox() -> None:
    """What a mailbox takes is granted anew, as what a task takes."""

    async def handler(_: Request) -> Any:
        async def numbers() -> AsyncIterator[bytes]:
            for number in range(50):
                yield b"%d" % number

        return numbers()

    async with pair(handler) as (peer, _, system):
        probe = Probe(system)
        receiver = await peer.request_stream(b"", window=4)
        receiver.to_mailbox(probe.ref, lambda payload: payload.data)
        for number in range(50):
            await probe.expect(b"%d" % number)
        assert (await receiver.terminated()).value == "finished"
        probe.ref.stop()


async def test_a_full_carrier_holds_producers_back() -> None:
    """Queued octets stay near the high watermark although credit is endless."""
    produced = 0

    async def handler(_: Request) -> Any:
        async def blocks() -> AsyncIterator[bytes]:
            nonlocal produced
            for _ in range(1000):
                produced += 1
                yield bytes(10_000)

        return blocks()

    narrow = MemoryConfig(window=10_000)
    async with pair(handler, server=ServerConfig(carrier=narrow, high_watermark=100_000)) as (peer, listener, _):
        (await peer.request_stream(b"", window=2**31 - 1)).close()
        await wait_all_tasks_blocked()
        receiver = await peer.request_stream(b"", window=2**31 - 1)
        link = below(listener.peers[0]).carrier.stream.link  # type: ignore[union-attr]
        link.hold()
        produced = 0
        await wait_all_tasks_blocked()
        assert 5 < produced < 40
        link.release()
        assert len([payload async for payload in receiver]) == 1000


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("error", "code", "retryable"),
    [
        (ApplicationError("no"), 0x201, False),
        (RequestRejected("later"), 0x202, True),
        (RequestCanceled("gave up"), 0x203, False),
        (RequestInvalid("what?"), 0x204, False),
        (RequestFailed("own", code=0x1234, data=b"\xff"), 0x1234, False),
    ],
)
async def test_what_the_handler_raises_the_requester_catches(error: RequestFailed, code: int, retryable: bool) -> None:
    """RS-27, RS-28: codes and data travel; a handler that refuses has not failed."""

    async def handler(request: Request) -> Any:
        if request.data == b"stream":

            async def items() -> AsyncIterator[bytes]:
                yield b"first"
                raise error

            return items()
        raise error

    async with pair(handler) as (peer, _, system):
        with pytest.raises(type(error)) as caught:
            await peer.request_response(b"")
        assert (caught.value.code, caught.value.data, caught.value.retryable) == (code, error.data, retryable)
        copy = pickle.loads(pickle.dumps(caught.value))
        assert (type(copy), copy.code, copy.data, str(copy)) == (type(error), code, error.data, str(caught.value))
        receiver = await peer.request_stream(b"stream")
        assert (await receiver.receive()).data == b"first"
        for _ in range(2):  # errors stay
            with pytest.raises(type(error)):
                await receiver.receive()
        assert system.statistics().failures == 0


async def test_a_handler_that_fails_fails_its_stream_only(caplog: pytest.LogCaptureFixture) -> None:
    """APPLICATION_ERROR for the peer, a failure of the stream's actor here; the connection lives on."""

    async def handler(request: Request) -> bytes:
        if request.data == b"bad":
            raise KeyError("EURUSD")
        return b"fine"

    async with pair(handler) as (peer, _, system):
        with pytest.raises(ApplicationError, match=r"^the handler failed \[([0-9a-f]{8})\]") as failed:
            await peer.request_response(b"bad")
        assert b"EURUSD" not in failed.value.data
        assert f"\nfailure {failed.value.data[-9:-1].decode()}" in caplog.text
        assert (await peer.request_response(b"good")).data == b"fine"
        assert system.statistics().failures == 1
    assert "failed" in caplog.text


async def test_wrong_answers_and_wrong_questions() -> None:
    async def handler(request: Request) -> Any:
        match request.data:
            case b"text":
                return "not octets"
            case b"nothing":
                return None
            case b"says nothing":
                raise ArithmeticError

        async def items() -> AsyncIterator[bytes]:
            yield b"item"

        return items()

    async with pair(handler, server=ServerConfig(error_texts=True)) as (peer, _, _system):
        with pytest.raises(ApplicationError, match="wanted bytes"):
            await peer.request_response(b"text")
        with pytest.raises(ApplicationError, match=r"^ArithmeticError"):
            await peer.request_response(b"says nothing")
        with pytest.raises(RequestInvalid, match="send a request-stream"):
            await peer.request_response(b"items")
        assert await peer.request_response(b"nothing") == Payload(b"", None)
        async with await peer.request_stream(b"nothing") as receiver:
            assert [payload async for payload in receiver] == []
        with pytest.raises(TypeError, match="the value is str, wanted bytes"):
            await peer.request_response("text")
        with pytest.raises(LocalProtocolError):
            await peer.request_subscription(b"")


async def test_no_handler_rejects() -> None:
    async with pair(None) as (peer, listener, _):
        with pytest.raises(RequestRejected, match="no handler"):
            await peer.request_response(b"")
        with pytest.raises(RequestRejected, match="no handler"):
            await listener.peers[0].request_response(b"")


# ---------------------------------------------------------------- cancellation


async def test_a_cancelled_request_cancels_its_handler() -> None:
    """RS-60: CANCEL ends the responder; nothing answers any more, and the connection goes on."""
    ended: list[str] = []

    async def handler(request: Request) -> bytes:
        try:
            await trio.sleep_forever()
        finally:
            ended.append(request.data.decode())
        raise AssertionError

    async with pair(handler) as (peer, listener, _):
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(peer.request_response, b"one")
                await wait_all_tasks_blocked()
                scope.cancel()
        await wait_all_tasks_blocked()
        assert ended == ["one"]
        assert listener.peers[0].statistics().open_streams == peer.statistics().open_streams == 0


async def test_cancelled_before_it_is_sent() -> None:
    """Nothing is sent by a task that was cancelled before."""
    async with pair(lambda request: request.payload) as (peer, _, _system):
        with trio.CancelScope() as scope:
            scope.cancel()
            await peer.request_response(b"")
        assert scope.cancelled_caught
        assert peer.statistics().requests_sent == 0


async def test_a_request_cancelled_before_its_handler_began() -> None:
    seen: list[bytes] = []

    def handler(request: Request) -> bytes:
        seen.append(request.data)
        return b""

    async with pair(handler) as (peer, _, _system):
        connection = below(peer)
        stream_id = connection.core.send_request_response(Payload(b"gone"), trio.current_time())
        connection.core.send_cancel(stream_id)
        connection.flush()
        await peer.request_response(b"next")
        assert seen == [b"next"]


async def test_closing_the_receiver_cancels_the_stream() -> None:
    closed = trio.Event()

    async def handler(_: Request) -> Any:
        async def items() -> AsyncIterator[bytes]:
            try:
                yield b"first"
                await trio.sleep_forever()
            finally:
                closed.set()

        return items()

    async with pair(handler) as (peer, _, _system):
        async with await peer.request_stream(b"") as receiver:
            assert (await receiver.receive()).data == b"first"
        await closed.wait()
        # One that is forgotten is closed as well, and says so.
        receiver = await peer.request_stream(b"")
        with pytest.warns(ResourceWarning, match="forgotten"):
            del receiver
            gc.collect()
        await wait_all_tasks_blocked()
        assert peer.statistics().open_streams == 0


async def test_a_waiting_producer_is_cancelled() -> None:
    """A generator that waits for credit is closed when the stream is cancelled."""
    closed = trio.Event()

    async def handler(_: Request) -> Any:
        async def items() -> AsyncIterator[bytes]:
            try:
                while True:
                    yield b"more"
            finally:
                closed.set()

        return items()

    async with pair(handler) as (peer, _, _system):
        receiver = await peer.request_stream(b"", window=2)
        await wait_all_tasks_blocked()
        assert not closed.is_set()
        receiver.close()
        await closed.wait()
        await wait_all_tasks_blocked()
        assert peer.statistics().open_streams == 0


# ---------------------------------------------------------------- channels


async def echo_channel(request: Request) -> Any:
    async def back() -> AsyncIterator[Payload]:
        async for payload in request.payloads:
            yield payload

    return back()


async def test_each_direction_of_a_channel_ends_by_itself() -> None:
    """RS-64: the answers go on after the requester has finished."""

    async def handler(request: Request) -> Any:
        async def answers() -> AsyncIterator[bytes]:
            got = [payload.data async for payload in request.payloads]
            yield b"%d" % len(got)
            yield b"end"

        return answers()

    async with pair(handler) as (peer, _, _system):
        sender, receiver = await peer.request_channel(b"0", window=1)
        async with sender:
            for number in range(1, 100):
                await sender.send(b"%d" % number)
        assert [payload.data async for payload in receiver] == [b"100", b"end"]


async def test_a_responder_that_wants_no_more() -> None:
    """RS-69: only the requester's sending ends, the answers still come."""

    async def handler(request: Request) -> Any:
        async def answers() -> AsyncIterator[bytes]:
            request.payloads.close()
            yield b"enough"
            yield b"end"

        return answers()

    async with pair(handler) as (peer, _, _system):
        sender, receiver = await peer.request_channel(b"0", window=8)
        assert [payload.data async for payload in receiver] == [b"enough", b"end"]
        with pytest.raises(ReceiverClosed):
            await sender.send(b"more")


@pytest.mark.parametrize("how", ["sender", "receiver"])
async def test_cancelling_a_channel(how: str) -> None:
    """CANCEL of the requester ends both directions, and the handler (RS-68)."""
    async with pair(echo_channel) as (peer, listener, _):
        sender, receiver = await peer.request_channel(b"0")
        assert (await receiver.receive()).data == b"0"
        if how == "sender":
            sender.cancel()
            with pytest.raises(ChannelCancelled):
                await receiver.receive()
        else:
            receiver.close()
            await wait_all_tasks_blocked()
            with pytest.raises(ReceiverClosed):
                await sender.send(b"1")
        await wait_all_tasks_blocked()
        assert peer.statistics().open_streams == listener.peers[0].statistics().open_streams == 0


async def test_a_channel_whose_responder_fails() -> None:
    async def handler(request: Request) -> Any:
        await request.payloads.receive()
        await request.payloads.receive()
        raise ApplicationError("too much")

    async with pair(handler) as (peer, _, _system):
        sender, receiver = await peer.request_channel(b"0")
        await sender.send(b"1")
        with pytest.raises(ApplicationError, match="too much"):
            await receiver.receive()
        with pytest.raises(ReceiverClosed):
            await sender.send(b"2")


async def test_a_payload_that_cannot_be_sent_ends_its_channel(caplog: pytest.LogCaptureFixture) -> None:
    async with pair(echo_channel) as (peer, listener, _):
        sender, receiver = await peer.request_channel(b"0")
        assert (await receiver.receive()).data == b"0"
        sender.send_nowait("text")  # type: ignore[arg-type]
        with pytest.raises(RequestInvalid, match="could not be sent"):
            await receiver.receive()
        await wait_all_tasks_blocked()
        assert listener.peers[0].statistics().open_streams == 0
        sender.cancel()
    assert "the value is str, wanted bytes" in caplog.text


class Failing:
    """A handler of channels that keeps what it gets, and how that ended."""

    def __init__(self) -> None:
        self.got: list[bytes] = []
        self.ends: list[RequestFailed] = []

    async def __call__(self, request: Request) -> Any:
        try:
            async for payload in request.payloads:
                self.got.append(payload.data)
        except RequestFailed as error:
            self.ends.append(error)
            raise


@pytest.mark.parametrize(
    "error",
    [ApplicationError("out of paper"), RequestFailed("low on ink", code=0x1234), RequestCanceled("never mind")],
    ids=lambda error: type(error).__name__,
)
async def test_a_requester_fails_its_channel(error: RequestFailed, caplog: pytest.LogCaptureFixture) -> None:
    """ERROR of the requester, with code and text, behind the payloads it has sent; both directions end (RS-68)."""
    handler = Failing()
    async with pair(handler) as (peer, listener, _):
        sender, receiver = await peer.request_channel(b"0")
        await sender.send(b"1")
        await sender.send(error)
        with pytest.raises(type(error)) as failed:
            await receiver.receive()
        assert (failed.value.code, failed.value.data) == (error.code, error.data)
        with pytest.raises(ReceiverClosed):
            await sender.send(b"2")
        await wait_all_tasks_blocked()
        assert handler.got == [b"0", b"1"]
        [ended] = handler.ends
        assert (type(ended), ended.code, ended.data, str(ended)) == (type(error), error.code, error.data, str(error))
        assert peer.statistics().open_streams == listener.peers[0].statistics().open_streams == 0
    assert caplog.text == ""


async def test_a_requesters_error_that_cannot_be_sent_is_still_an_error() -> None:
    handler = Failing()
    async with pair(handler) as (peer, _, _system):
        sender, receiver = await peer.request_channel(b"0")
        await wait_all_tasks_blocked()
        await sender.send(RequestFailed("no code of streams", code=0x101))
        with pytest.raises(RequestInvalid, match="the error could not be sent: 0x101 is no code for a stream"):
            await receiver.receive()
        await wait_all_tasks_blocked()
        [ended] = handler.ends
        assert (type(ended), ended.data) == (ApplicationError, b"")


async def test_a_requesters_error_needs_no_credit() -> None:
    ended = trio.Event()

    async def handler(request: Request) -> Any:
        try:
            await trio.sleep_forever()
        finally:
            ended.set()

    async with pair(handler, server=ServerConfig(window=1)) as (peer, _, _system):
        sender, receiver = await peer.request_channel(b"0")
        await sender.send(b"1")
        await wait_all_tasks_blocked()
        await sender.send(ApplicationError("out of paper"))
        with pytest.raises(ApplicationError, match="out of paper"):
            await receiver.receive()
        await ended.wait()


# ---------------------------------------------------------------- messages and metadata


class Desk(Actor[Quote]):
    @handles
    def quote(self, m: Quote) -> float:
        return {"EURUSD": 1.08}[m.symbol]


@pytest.mark.parametrize("whole", [True, False])
async def test_messages_to_a_ref(whole: bool, caplog: pytest.LogCaptureFixture) -> None:
    """A ref answers messages; their type is named by SETUP, or by each request (EXT-4)."""
    core = CoreConfig(data_mime_type=MESSAGES, metadata_mime_type="text/plain") if whole else ClientConfig().core
    async with ActorSystem() as system:
        desk: Ref[Quote] = system.spawn(Desk)
        async with (
            serve(system, "rsocket+memory://desk", desk) as listener,
            connect(system, listener.url, config=ClientConfig(core=core)) as peer,
        ):
            assert await peer.request_response(Quote("EURUSD")) == 1.08
            await peer.fire_and_forget(Quote("EURUSD"))
            async with await peer.request_stream(Quote("EURUSD")) as receiver:
                assert [price async for price in receiver] == [1.08]
            with pytest.raises(RequestInvalid):
                await peer.request_response(b"\xc1")
            with pytest.raises(ApplicationError, match="the handler failed"):
                await peer.request_response(Quote("EURUSX"))
    assert "EURUSX" in caplog.text


async def test_typed_streams_and_channels() -> None:
    async def handler(request: Request) -> Any:
        async def prices() -> AsyncIterator[Price]:
            if request.data == request.payload.data and request.kind.name == "REQUEST_CHANNEL":
                async for payload in request.payloads:
                    yield Price(len(request.read(payload).symbol))
            else:
                assert request.message(Follow).symbol == "EURUSD"
                yield Price(1.08)
                yield Price(1.09)

        return prices()

    async with pair(handler) as (peer, _, _system):
        async with await peer.request_stream(Follow("EURUSD")) as receiver:
            assert [price.bid async for price in receiver] == [1.08, 1.09]
        sender, prices = await peer.request_channel(Follow("a"))
        async with sender:
            await sender.send(Follow("abc"))
        assert [price.bid async for price in prices] == [1, 3]


async def test_an_answer_that_is_no_such_message() -> None:
    async with pair(lambda request: Payload(b"\xc1")) as (peer, _, _system):
        with pytest.raises(DecodeError):
            await peer.request_response(Quote("EURUSD"))
        async with await peer.request_stream(Quote("EURUSD")) as receiver:
            with pytest.raises(DecodeError):
                await receiver.receive()


async def test_what_a_request_says_of_itself() -> None:
    """EXT-1 to EXT-5: entries are read when they are asked for, and reach the handler in their order."""
    seen: list[Any] = []

    async def handler(request: Request) -> bytes:
        seen.append((request.route, request.credentials, request.tracing, request.data_mime_type, request.accepts))
        seen.append([entry.mime_type for entry in request.entries.entries])
        return b""

    tracing = ZipkinTracing(trace_id=1, span_id=2, sampled=True)
    async with pair(handler) as (peer, _, _system):
        parts: list[Extension | Entry] = [
            BearerAuthentication("tok"),
            tracing,
            DataMimeType("application/json"),
            AcceptableMimeTypes(["text/plain"]),
            Entry("application/own", b"x"),
        ]
        await peer.request_response(b"", route="desk.quote", metadata=parts)
        await peer.request_response(b"")
        await peer.request_response(Payload(b"", CompositeMetadata.of(Routing("raw")).encode()))
        with pytest.raises(RequestInvalid):
            await peer.request_response(b"", metadata=b"\xfe\x00\x00\x05")
        with pytest.raises(ConfigurationError, match="leaves no room"):
            await peer.request_response(b"", route="a", metadata=b"raw")
        with pytest.raises(ConfigurationError, match="brings its own"):
            await peer.request_response(Payload(b"", b"raw"), route="a")
    octets = "application/octet-stream"
    assert seen[0] == ("desk.quote", BearerAuthentication("tok"), tracing, "application/json", ("text/plain",))
    assert seen[1][-1] == "application/own"
    assert seen[2] == ("", None, None, octets, (octets,))
    assert seen[4][0] == "raw"


async def test_without_composite_metadata_the_metadata_is_the_route() -> None:
    async with pair(lambda request: request.route.encode(), client=ClientConfig(core=TEXT)) as (peer, _, _system):
        assert (await peer.request_response(b"", route="echo")).data == b"echo"
        assert (await peer.request_response(b"", metadata=b"raw")).data == b"raw"
        assert (await peer.request_response(b"")).data == b""
        with pytest.raises(ConfigurationError, match="text/plain"):
            await peer.request_response(Quote("EURUSD"), route="a")


@pytest.mark.parametrize("core", [ClientConfig().core, TEXT], ids=["composite", "text"])
async def test_a_route_that_is_sent_again_is_the_same_route(core: CoreConfig) -> None:
    """What was written for a route is remembered for the next request, and for no other one."""
    routes = ["desk", "", "desk.quote", "ü" * 100, "desk"]
    async with pair(lambda request: request.route.encode(), client=ClientConfig(core=core)) as (peer, _, _system):
        for route in (*routes, *routes):
            assert (await peer.request_response(b"", route=route)).data == route.encode()
        assert (await peer.request_response(b"")).data == b""
        with pytest.raises(ConfigurationError, match="leaves no room"):
            await peer.request_response(b"", route="desk", metadata=b"raw")


async def test_metadata_pushes_reach_the_hook() -> None:
    got: list[bytes] = []

    async def pushed(peer: ConnectedPeer, metadata: bytes) -> None:
        got.append(metadata)
        if metadata == b"bad":
            raise ValueError("on purpose")

    async with pair(None, server=ServerConfig(metadata_pushed=pushed)) as (peer, _, _system):
        for metadata in (b"one", b"bad", b"two"):
            await peer.metadata_push(metadata)
        await wait_all_tasks_blocked()
        assert got == [b"one", b"bad", b"two"]


@pytest.mark.parametrize(
    ("pushes", "left"),
    [
        ([b"%d" % n for n in range(100)], [b"0", *(b"%d" % n for n in range(36, 100))]),
        ([bytes([n]) * 300_000 for n in range(10)], [bytes([n]) * 300_000 for n in (0, 7, 8, 9)]),
        ([b"first", b"small", bytes(2_000_000)], [b"first", bytes(2_000_000)]),
    ],
    ids=["too many", "too much", "a single large one"],
)
async def test_metadata_pushes_that_wait_for_the_hook_have_a_bound(pushes: list[bytes], left: list[bytes]) -> None:
    """The first is in the hook; of the others the oldest are dropped."""
    got: list[bytes] = []
    gate = trio.Event()

    async def pushed(peer: ConnectedPeer, metadata: bytes) -> None:
        got.append(metadata)
        await gate.wait()

    async with pair(None, server=ServerConfig(metadata_pushed=pushed)) as (peer, _, _system):
        for metadata in pushes:
            await peer.metadata_push(metadata)
            await wait_all_tasks_blocked()
        gate.set()
        await wait_all_tasks_blocked()
        assert got == left


# ---------------------------------------------------------------- the end of an actor, of a connection


async def test_the_actor_of_a_request_is_ended_by_somebody() -> None:
    """Whoever waits learns it; the peer gets CANCEL."""

    async def handler(_: Request) -> bytes:
        await trio.sleep_forever()
        return b""

    async with pair(handler) as (peer, listener, _):
        errors: list[BaseException] = []

        async def call() -> None:
            try:
                await peer.request_response(b"")
            except ActorStopped as error:
                errors.append(error)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(call)
            await wait_all_tasks_blocked()
            (stream,) = below(peer).streams.values()
            stream.ref.kill()
        assert len(errors) == 1
        await wait_all_tasks_blocked()
        assert listener.peers[0].statistics().open_streams == 0
        receiver = await peer.request_stream(b"")
        (stream,) = below(peer).streams.values()
        stream.ref.stop()
        with pytest.raises(ConnectionLost, match="ended"):
            await receiver.receive()


async def test_the_actor_of_an_answer_is_killed() -> None:
    """The requester gets CANCELED, and no restart plays the request again."""
    begun = 0

    async def handler(_: Request) -> bytes:
        nonlocal begun
        begun += 1
        await trio.sleep_forever()
        return b""

    async with pair(handler) as (peer, listener, _):
        async with trio.open_nursery() as nursery:

            async def call() -> None:
                with pytest.raises(RequestCanceled):
                    await peer.request_response(b"")

            nursery.start_soon(call)
            await wait_all_tasks_blocked()
            (stream,) = below(listener.peers[0]).streams.values()
            stream.ref.kill()
        assert begun == 1


async def test_an_answer_that_is_killed_before_it_began(tables: Tables) -> None:
    """Its requester gets CANCELED, and the reader does not wait for it."""
    seen: list[bytes] = []

    async def handler(request: Request) -> bytes:
        seen.append(request.data)
        return b""

    async with pair(handler) as (peer, listener, _):
        await peer.request_response(b"first")
        serving = below(listener.peers[0])
        tables.leave_out(peer)
        below(peer).core.send_request_response(Payload(b"killed"), trio.current_time())
        serving.feed(b"".join(below(peer).core.data_to_send(0.0)))
        (stream,) = serving.streams.values()
        stream.ref.kill()
        await wait_all_tasks_blocked()
        assert (seen, serving.unbegun, serving.streams) == ([b"first"], 0, {})


async def test_requests_after_the_end() -> None:
    async with pair(None) as (peer, _, _system):
        await peer.aclose()
        with pytest.raises(ConnectionClosed):
            await peer.request_response(b"")
        with pytest.raises(ConnectionClosed):
            await peer.fire_and_forget(b"")
        with pytest.raises(ConnectionClosed):
            await peer.metadata_push(b"")
        assert peer.closed
        await peer.terminated()
        assert peer.end is not None
        assert peer.end.reason.value == "closed"
        await peer.aclose()


async def test_answers_of_one_moment_share_a_write_and_a_lonely_one_goes_at_once(tables: Tables) -> None:
    """Requests that came together are answered by one write, after the last of their handlers."""

    async def handler(request: Request) -> bytes:
        return request.data

    async with pair(handler) as (peer, listener, _):
        await peer.request_response(b"first")
        (answering,) = listener.peers

        def writes() -> int:
            carrier = answering.statistics().carrier
            assert carrier is not None
            return carrier.writes

        before = writes()
        await peer.request_response(b"alone")
        assert writes() == before + 1
        asking = below(peer)
        tables.leave_out(peer)
        for number in range(10):
            asking.core.send_request_response(Payload(b"%d" % number), trio.current_time())
        asking.flush()
        await wait_all_tasks_blocked()
        assert listener.peers[0].statistics().requests_received == 12
        assert writes() == before + 2


# ---------------------------------------------------------------- credit of streams that follow one another


@pytest.mark.parametrize("into_mailbox", [False, True])
async def test_what_is_taken_of_an_old_stream_grants_nothing_to_a_new_one(into_mailbox: bool) -> None:
    """The payloads of a stream that is over are taken while the actor that it had has another one."""
    produced: list[int] = []

    async def numbers(count: int) -> AsyncIterator[bytes]:
        for number in range(count):
            produced.append(number)
            yield b"%d" % number

    async def handler(request: Request) -> Any:
        return numbers(int(request.data))

    async with pair(handler) as (peer, _, system):
        old = await peer.request_stream(b"8", window=8)
        await wait_all_tasks_blocked()
        produced.clear()
        new = await peer.request_stream(b"100", window=4)
        await wait_all_tasks_blocked()
        assert len(produced) == 5  # the fifth waits for credit
        probe = Probe(system)
        with old, new:
            if into_mailbox:
                old.to_mailbox(probe.ref, lambda payload: payload.data)
                for number in range(8):
                    await probe.expect(b"%d" % number)
            else:
                assert [payload.data async for payload in old] == [b"%d" % number for number in range(8)]
            await wait_all_tasks_blocked()
            assert len(produced) == 5
            for _ in range(2):
                await new.receive()
            await wait_all_tasks_blocked()
            assert len(produced) == 7
        probe.ref.stop()
