"""What `levada.transports.core` promises of every protocol core."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest

from levada.transports import maop
from levada.transports.aqueduct import AqueductCore, Attach, StreamData
from levada.transports.core import Core, StreamsInput
from levada.transports.lumberjack import (
    ReaderConfig,
    ReaderCore,
    SendQueue,
    WriterConfig,
    WriterCore,
    encode_event,
    encode_json,
    encode_window,
)
from levada.transports.maop.frames import Proceed, Request
from levada.transports.qmux import QmuxCore
from levada.transports.reactivesocket import ReactiveSocketCore
from levada.transports.rsocket import CoreConfig, Payload, RSocketCore
from levada.transports.rsocket.reactive_streams import ReactiveStreamsCore


def lumberjack_reader() -> Core[Any, Any]:
    """A reader with a unit at the sink."""
    core = ReaderCore(ReaderConfig(), now=0.0)
    core.receive_data(encode_window(2, 1) + encode_json(2, 1, {}) + encode_json(2, 2, {}), 0.0)
    core.hand_on(0.0)
    core.take_events()
    return core


def lumberjack_writer() -> Core[Any, Any]:
    """A writer with a window in flight."""
    config = WriterConfig()
    queue, core = SendQueue(config), WriterCore(config, now=0.0)
    queue.put(encode_event({}, config), None, 0.0)
    batch = queue.next_batch(0.0, core.room, flush=True)
    assert batch is not None
    core.send_batch(batch, 0.0)
    core.data_to_send(0.0)
    return core


def rsocket(client: bool, framed: bool) -> Callable[[], Core[Any, Any]]:
    """One side of an open connection on which a stream is open."""

    def make() -> Core[Any, Any]:
        made = {
            side: RSocketCore(CoreConfig(), client=side, framed=framed, now=0.0, random_bytes=bytes)
            for side in (True, False)
        }
        return open_stream(made[True], made[False], framed)[not client]

    return make


def reactivesocket(client: bool, framed: bool) -> Callable[[], Core[Any, Any]]:
    """The same in the older dialect."""

    def make() -> Core[Any, Any]:
        made = {side: ReactiveSocketCore(CoreConfig(), client=side, framed=framed, now=0.0) for side in (True, False)}
        return open_stream(made[True], made[False], framed)[not client]

    return make


def open_stream(
    client: ReactiveStreamsCore, server: ReactiveStreamsCore, framed: bool
) -> tuple[ReactiveStreamsCore, ReactiveStreamsCore]:
    client.send_request_stream(Payload(), 1, 0.0)
    sent = client.data_to_send(0.0)
    for piece in sent if framed else [b"".join(sent)]:
        (server.receive_message if framed else server.receive_data)(piece, 0.0)
    server.accept_setup(0.0)
    server.take_events()
    return client, server


def aqueduct(client: bool) -> Callable[[], Core[Any, Any]]:
    """One side of an open connection on which a channel is open, with a message to ack."""

    def make() -> Core[Any, Any]:
        both = AqueductCore(client=True), AqueductCore(client=False)
        for core in both:
            core.handshake_completed(1170)
        pass_streams(*both)
        both[1].accept()
        pass_streams(*both)
        assert both[0].entrypoint is not None
        assert both[1].entrypoint is not None
        both[0].entrypoint.send(b"", [Attach.SENDER])  # type: ignore[union-attr]
        pass_streams(*both)
        both[1].entrypoint.take().attachments[0].send(b"")  # type: ignore[union-attr]
        pass_streams(*both)
        return both[not client]

    return make


def pass_streams(*both: AqueductCore) -> None:
    for _ in range(3):
        for core, other in (both, both[::-1]):
            for output in core.data_to_send(0.0):
                if isinstance(output, StreamData):
                    other.receive_stream_data(output.stream_id, output.data, output.fin, 0.0)
            other.take_events()


def maop_server() -> Core[Any, Any]:
    """A server with a handler at work."""
    core = maop.MaopCore(client=False, random_bytes=bytes, handlers={101: maop.HandlerSpec()})
    core.handshake_completed(now=0.0)
    core.receive_stream_data(
        0, maop.Authentication("Bearer", b"x", {}, maop.Version(1, 0, 0), "test").encode(), True, 0.0
    )
    core.approve_client("client", now=0.0)
    core.receive_stream_data(4, Request(101, 0, timeout_ms=5000).encode(), True, 0.0)
    core.data_to_send(0.0)
    return core


def maop_client() -> Core[Any, Any]:
    """A client whose Request is on its way."""
    core = maop.MaopCore(client=True, random_bytes=bytes)
    core.handshake_completed(now=0.0)
    core.receive_stream_data(0, maop.Result(maop.Version(1, 0, 0), "test", bytes(16), "client").encode(), True, 0.0)
    core.send_request(101, b"hello", now=0.0)
    core.take_events()
    core.data_to_send(0.0)
    return core


def qmux(client: bool, framed: bool) -> Callable[[], Core[Any, Any]]:
    """One side of an open connection on which a stream is open, with data queued."""

    def make() -> Core[Any, Any]:
        both = {side: QmuxCore(client=side, now=0.0, framed=framed) for side in (True, False)}
        for _ in range(2):
            for side, core in both.items():
                for piece in core.data_to_send(0.0):
                    (both[not side].receive_message if framed else both[not side].receive_data)(piece, 0.0)
        for core in both.values():
            stream_id = core.open_stream()
            assert stream_id is not None
            core.send(stream_id, b"data")
            core.data_to_send(0.0)
            core.take_events()
        return both[client]

    return make


def stream(stream_id: int, octets: bytes, fin: bool) -> Callable[[Any, float], list[Any]]:
    def give(core: Any, now: float) -> list[Any]:
        events = core.receive_stream_data(stream_id, octets, fin, now)
        assert isinstance(events, list)
        return events

    return give


def gone(core: StreamsInput[Any], now: float) -> list[Any]:
    """The peer has given both directions of a stream up."""
    return [*core.stream_reset(8, 0, now), *core.stream_stopped(8, 0, now)]


def datagram(core: StreamsInput[Any], now: float) -> list[Any]:
    return core.receive_datagram(b"x", now)


def messages(message: bytes) -> Callable[[Any, float], list[Any]]:
    def give(core: Any, now: float) -> list[Any]:
        events = core.receive_message(message, now)
        assert isinstance(events, list)
        return events

    return give


def data(octets: bytes) -> Callable[[Any, float], list[Any]]:
    def give(core: Any, now: float) -> list[Any]:
        events = core.receive_data(octets, now)
        assert isinstance(events, list)
        return events

    return give


@attrs.frozen
class Case:
    """A core, and input for it."""

    make: Callable[[], Core[Any, Any]]
    """Makes one with work that has not ended."""
    inputs: tuple[Callable[[Any, float], list[Any]], ...]
    """Calls that only this input protocol has: something valid, the end of the peer's direction, something broken."""


CASES = {
    "Lumberjack reader": Case(lumberjack_reader, (data(encode_window(2, 1)), data(b""), data(b"?"))),
    "Lumberjack writer": Case(lumberjack_writer, (data(b"2A\0\0\0\0"), data(b""), data(b"?"))),
    "MAOP server": Case(maop_server, (stream(8, Request(101, 0).encode(), True), gone, datagram)),
    "MAOP client": Case(maop_client, (stream(1, Proceed((4,)).encode(), False), gone, datagram)),
}
# KEEPALIVE; a length of 1, a message of 1.
for _client in (True, False):
    _side = "client" if _client else "server"
    CASES |= {
        f"Aqueduct {_side}": Case(
            aqueduct(_client),
            (gone, datagram, stream(2 + _client, b"?", True)),
        ),
        f"RSocket {_side}": Case(
            rsocket(_client, False),
            (data(bytes.fromhex("00000e 00000000 0c80 0000000000000000")), data(b""), data(b"\0\0\1")),
        ),
        f"RSocket {_side}, messages": Case(
            rsocket(_client, True), (messages(bytes.fromhex("00000000 0c80 0000000000000000")), messages(b"?"))
        ),
        f"QMux {_side}": Case(qmux(_client, False), (data(b"\1\0"), data(b""), data(b"\x01\x01"))),
        f"QMux {_side}, messages": Case(qmux(_client, True), (messages(b"\0"), messages(b"\1"))),
        f"ReactiveSocket {_side}": Case(
            reactivesocket(_client, False),
            (data(bytes.fromhex("0000000c 0003 2000 00000000")), data(b""), data(b"\0\0\0\1")),
        ),
        f"ReactiveSocket {_side}, messages": Case(
            reactivesocket(_client, True), (messages(bytes.fromhex("0003 2000 00000000")), messages(b"?"))
        ),
    }


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


def everything(case: Case, core: Core[Any, Any], now: float) -> list[Any]:
    """Give all input that there is; return its events."""
    return [
        *[event for give in case.inputs for event in give(core, now)],
        *core.handle_timeout(now),
        *core.drain(now),
        *core.connection_lost(0, "", now),
        *core.close(0, "", now),
    ]


def test_a_closed_core_has_ended_and_ignores_input(case: Case) -> None:
    core = case.make()
    assert core.close(0, "", 1.0)
    core.data_to_send(1.0)
    assert everything(case, core, 1e6) == []
    assert (core.take_events(), core.data_to_send(1e6), core.next_deadline()) == ([], [], None)


def test_a_core_ends_in_time_once_it_drains(case: Case) -> None:
    """Its deadlines lead to the end, and a second call changes nothing."""
    core = case.make()
    events = core.drain(1.0)
    assert core.drain(1.0) == []
    now = 1.0
    for _ in range(100):
        deadline = core.next_deadline()
        if deadline is None:
            break
        now = max(now, deadline)
        events = core.handle_timeout(now)
        core.data_to_send(now)
    assert events
    assert everything(case, core, now) == []


def test_a_carrier_that_is_lost_is_lost_once(case: Case) -> None:
    core = case.make()
    assert core.connection_lost(0, "cut", 1.0)
    assert core.connection_lost(0, "cut", 1.0) == []
    assert core.data_to_send(1.0) == []


def test_a_broken_rule_is_told_and_never_raised(case: Case) -> None:
    core = case.make()
    *_, broken = case.inputs
    assert broken(core, 1.0)
    core.close(0, "", 1.0)
    assert everything(case, core, 2.0) == []


def test_an_early_timeout_does_nothing(case: Case) -> None:
    core = case.make()
    deadline = core.next_deadline()
    assert deadline is not None
    assert (core.handle_timeout(deadline - 0.001), core.next_deadline()) == ([], deadline)
    assert core.data_to_send(deadline - 0.001) == []


def test_events_are_returned_once(case: Case) -> None:
    core = case.make()
    core.drain(1.0)
    core.close(0, "", 1.0)
    assert core.take_events() == []
