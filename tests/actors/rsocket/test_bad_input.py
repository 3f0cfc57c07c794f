"""Whatever a peer sends, to a server or to a client: no handler fails for it, and no traceback is in a log."""

from __future__ import annotations

import logging
import random
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from levada.actors.authentication import Credentials, Refused
from levada.actors.rsocket import (
    COMPOSITE,
    MESSAGES,
    ApplicationError,
    ClientConfig,
    ConnectedPeer,
    CoreConfig,
    LeaseGrant,
    Payload,
    Request,
    RequestInvalid,
    ServerConfig,
    route,
)
from levada.actors.rsocket.encoding import ROUTING
from levada.framework import Actor, ActorSystem, Identity, Receiver, Sender
from levada.framework.errors import CarrierError, LevadaError
from levada.transports.carriers import ByteStream, dial, listen
from levada.transports.reactivesocket.frames import Frame as OldFrame
from levada.transports.reactivesocket.frames import FrameType as OldType
from levada.transports.rsocket.frames import HEADER, FrameType, SetupFrame

from .conftest import connect, serve

both_dialects = pytest.mark.parametrize("dialect", ["rsocket", "reactivesocket"])


@pytest.fixture(autouse=True)
def _no_tracebacks(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Fail on any record with the traceback of an exception."""
    caplog.set_level(logging.DEBUG)
    yield
    records = [record for when in ("setup", "call") for record in caplog.get_records(when)]
    assert [r.getMessage() for r in records if r.exc_info or "Traceback" in r.getMessage()] == []


# ---------------------------------------------------------------- octets

PIECES = [
    b"",
    b"\xff" * 40,
    b"\0" * 9,
    bytes.fromhex("fe 000005 04 6563686f"),  # a route
    bytes.fromhex("fe 000002 04 65"),  # cut off
    bytes.fromhex("fe 000003 02 ff fe"),  # not UTF-8
    bytes.fromhex("fc 000001 80"),  # credentials that are cut off
    bytes.fromhex("fc 000003 81 ff fe"),
    bytes.fromhex("fd 000002 ff 00"),  # tracing
    bytes.fromhex("fa 000001 85"),  # data MIME type
    bytes.fromhex("fa 000003 02 ff ff ff"),
    bytes.fromhex("fb 000003 85 7f 61"),
    bytes.fromhex("02 612f62 ffffff 6d"),
    bytes((0x7A, *MESSAGES.encode(), 0, 0, 0)),
]
MIME_TYPES = [COMPOSITE, ROUTING, MESSAGES, "text/plain", "x", "", "é", "a" * 128, "a" * 200, "a\0", "\x1b[31m"]


def any_bytes(lot: random.Random) -> bytes:
    return b"".join(lot.choice(PIECES) for _ in range(lot.randrange(4))) + lot.randbytes(lot.randrange(6))


def setup(dialect: str, metadata: str, data: str, payload: Payload, *, lease: bool = False) -> bytes:
    if dialect == "rsocket":
        frame = SetupFrame(
            version=(1, 0),
            keepalive_ms=1000,
            lifetime_ms=1000,
            metadata_mime_type=metadata,
            data_mime_type=data,
            payload=payload,
            lease=lease,
        ).encode()
        return len(frame).to_bytes(3) + frame
    kind = OldType.SETUP
    flags = 0x2000 if lease else 0
    return OldFrame(
        kind, 0, flags, (0, 1000, 1000), (metadata, data), metadata=payload.metadata, data=payload.data
    ).encode()


def any_frame(dialect: str, lot: random.Random) -> bytes:
    """A frame whose header makes some sense, with fields and flags that may not."""
    stream_id = lot.choice([0, 1, 1, 2, 2, 3, 4, 2**31 - 1])
    body = lot.choice([b"", lot.randbytes(4), bytes((0, 0, 0, lot.randrange(4)))]) + lot.choice(
        [b"", (n := any_bytes(lot)) and len(n).to_bytes(3) + n, any_bytes(lot)]
    )
    if dialect == "rsocket":
        kind = lot.choice([*FrameType, 0x00, 0x20])
        frame: bytes = HEADER.pack(stream_id, kind << 10 | lot.getrandbits(10)) + body
        return len(frame).to_bytes(3) + frame
    if lot.randrange(2):
        metadata = any_bytes(lot)
        body = (4 + len(metadata)).to_bytes(4) + metadata + body
    kind = lot.choice([*OldType, 0x0000, 0x00FF])
    frame = kind.to_bytes(2) + lot.getrandbits(16).to_bytes(2) + stream_id.to_bytes(4) + body
    return (4 + len(frame)).to_bytes(4) + frame


# ---------------------------------------------------------------- who gets them


async def look_at_all(request: Request) -> Any:
    """Use everything that a request has, as routers and loggers do."""
    text = f"{request!r} {request.route} {request.entries} {request.credentials} {request.tracing}"
    text += f"{request.data_mime_type} {request.accepts} {request.holds_message}"
    text.encode()
    if request.holds_message:
        request.message()

    async def items() -> AsyncIterator[Payload]:
        async for payload in request.payloads:
            yield payload

    return items() if len(request.data) % 2 else request.payload


async def authenticate(credentials: Credentials) -> Identity | Refused:
    assert credentials.setup is not None
    return Identity(f"{credentials}"[:256])


async def pushed(peer: ConnectedPeer, metadata: bytes) -> None:
    await trio.lowlevel.checkpoint()


@both_dialects
@pytest.mark.parametrize("metadata", MIME_TYPES, ids=ascii)
async def test_every_request_with_metadata_of_every_type(dialect: str, metadata: str) -> None:
    """A metadata MIME type is refused in SETUP, or its requests are answered, each by itself."""
    kind = {"rsocket": 0x0500 << 2, "reactivesocket": 0x0004}[dialect]
    async with (
        ActorSystem() as system,
        serve(system, f"{dialect}+memory://desk", look_at_all, authenticate=authenticate),
        dial("memory://desk") as stream,
    ):
        assert isinstance(stream, ByteStream)
        await stream.send_all(setup(dialect, metadata, "x", Payload(b"", PIECES[3])))
        for number, piece in enumerate(PIECES):
            if dialect == "rsocket":
                frame = HEADER.pack(2 * number + 1, FrameType.REQUEST_RESPONSE << 10 | 0x100)
                frame += len(piece).to_bytes(3) + piece
                await stream.send_all(len(frame).to_bytes(3) + frame)
            else:
                await stream.send_all(OldFrame(OldType(kind), 2 * number + 2, metadata=piece).encode())
        await wait_all_tasks_blocked()
        assert system.statistics().failures == 0


@both_dialects
@pytest.mark.parametrize("seed", range(12))
async def test_any_frames_at_a_server(dialect: str, seed: int) -> None:
    lot = random.Random(seed)
    hook = authenticate if seed % 2 else None
    config = ServerConfig(
        lease=LeaseGrant(10.0, 20) if seed % 3 == 0 else None,
        metadata_pushed=pushed,
    )
    async with (
        ActorSystem() as system,
        serve(system, f"{dialect}+memory://desk", look_at_all, authenticate=hook, config=config),
    ):
        for _ in range(8):
            async with dial("memory://desk") as stream:
                assert isinstance(stream, ByteStream)
                payload = Payload(any_bytes(lot), lot.choice([None, any_bytes(lot)]))
                octets = setup(dialect, lot.choice(MIME_TYPES[:5]), "x", payload, lease=seed % 3 == 0)
                octets += b"".join(any_frame(dialect, lot) for _ in range(30))
                try:
                    for at in range(0, len(octets), 200):
                        await stream.send_all(octets[at : at + 200])
                        await wait_all_tasks_blocked()
                except CarrierError:
                    pass  # the server has had enough
                stream.abort()
            await wait_all_tasks_blocked()
        assert system.statistics().failures == 0


@both_dialects
@pytest.mark.parametrize("seed", range(8))
async def test_any_frames_at_a_client(dialect: str, seed: int) -> None:
    lot = random.Random(seed)
    use: list[Callable[[ConnectedPeer], Any]] = [
        lambda peer: peer.request_response(b"x", route="r"),
        lambda peer: peer.request_stream(b"x"),
        lambda peer: peer.request_channel(b"x"),
        lambda peer: peer.fire_and_forget(b"x"),
    ]
    async with ActorSystem() as system, listen("memory://desk") as listener, trio.open_nursery() as nursery:

        async def answer() -> None:
            stream: Any = await listener.accept()
            try:
                while await stream.receive_some():
                    await stream.send_all(b"".join(any_frame(dialect, lot) for _ in range(10)))
            except CarrierError:
                pass
            stream.abort()

        async def request(peer: ConnectedPeer, number: int) -> None:
            try:
                opened = await use[number % 4](peer)
            except LevadaError:
                return
            for channel in opened if isinstance(opened, tuple) else (opened,):
                if isinstance(channel, Receiver):
                    channel.close()
                elif isinstance(channel, Sender):
                    channel.cancel()

        for _ in range(6):
            nursery.start_soon(answer)
            config = ClientConfig(
                core=CoreConfig(metadata_mime_type=COMPOSITE, drain_timeout=0),
                lease=LeaseGrant(1.0, 5) if seed % 3 == 0 else None,
            )
            async with connect(system, f"{dialect}+memory://desk", look_at_all, config=config) as peer:
                with trio.move_on_after(0.05):
                    async with trio.open_nursery() as requests:
                        for number in range(8):
                            requests.start_soon(request, peer, number)
                            await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
        assert system.statistics().failures == 0


@pytest.mark.rule("RX-63")
async def test_rx63_an_answer_to_a_stream_without_credit_waits_for_it() -> None:
    """An initial n of 0 is allowed: the one payload of a handler that returns one goes when REQUEST_N has come."""
    async with ActorSystem() as system, serve(system, "reactivesocket+memory://desk", look_at_all):
        async with dial("memory://desk") as stream:
            assert isinstance(stream, ByteStream)
            await stream.send_all(setup("reactivesocket", "x", "x", Payload()))
            await stream.send_all(OldFrame(OldType.REQUEST_STREAM, 2, 0, (0,), data=b"even").encode())
            await wait_all_tasks_blocked()
            await stream.send_all(OldFrame(OldType.REQUEST_N, 2, 0, (1,)).encode())
            assert OldFrame.decode(await stream.receive_some()).data == b"even"
        assert system.statistics().failures == 0


class Desk(Actor[Any]):
    @route("fail")
    def fail(self) -> bytes:
        raise LookupError("\udcff" * 2**21)


async def test_an_answer_that_quotes_the_request_fits_into_a_frame(caplog: pytest.LogCaptureFixture) -> None:
    text = ClientConfig(core=CoreConfig(metadata_mime_type="text/plain"))
    telling = ServerConfig(error_texts=True)
    async with (
        ActorSystem() as system,
        serve(system, "rsocket+memory://desk", Desk, config=telling) as listener,
        connect(system, listener.url, config=text) as peer,
    ):
        with pytest.raises(ApplicationError, match="unknown route") as unknown:
            await peer.request_response(b"", route="\x1b" * (2**24 - 1))
        assert len(unknown.value.data) < 1000
        assert b"\x1b" not in unknown.value.data
        with pytest.raises(RequestInvalid, match="metadata of 16777216 bytes"):
            await peer.request_response(b"", route="a" * 2**24)
        with pytest.raises(ApplicationError, match=r"\\udcff") as failed:
            await peer.request_response(b"", route="fail")
        assert len(failed.value.data) == 65_536
    caplog.clear()  # the handler's failure is logged, with its traceback
