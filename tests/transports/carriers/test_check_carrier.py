"""The contract suite finds what it is there to find: each broken carrier fails just the checks that speak of its fault."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
import trio.testing

from levada.framework.errors import CarrierError, StreamWasReset
from levada.transports.carriers.contracts import Octets
from levada.transports.carriers.memory import MemoryConfig, memory_connections, memory_messages, memory_streams
from levada.transports.testing import CarrierTraits, carrier_checks, check_carrier
from levada.transports.testing.traits import Factory

BUFFERED = 160 * 1024


class Wrapped:
    """Passes everything on to a sound carrier; subclasses get one thing wrong."""

    def __init__(self, sound: Any) -> None:
        self.sound = sound

    def __getattr__(self, name: str) -> Any:
        return getattr(self.sound, name)

    async def __aenter__(self) -> Wrapped:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.sound.aclose()


class SendsInParts(Wrapped):
    async def send_all(self, data: Octets) -> None:
        for at in range(0, len(data), 1000):
            await self.sound.send_all(memoryview(data)[at : at + 1000])


class QueuesWithoutBound(Wrapped):
    async def send_all(self, data: Octets) -> None:
        self.sound.send_nowait(data)
        await trio.lowlevel.checkpoint()


class LosesWhatACancelledReceiveTook(Wrapped):
    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        data: bytes = await self.sound.receive_some(max_bytes)
        await trio.lowlevel.checkpoint()
        return data


class TakesTwoReceivers(Wrapped):
    lock: trio.Lock | None = None

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        self.lock = self.lock or trio.Lock()
        async with self.lock:
            data: bytes = await self.sound.receive_some(max_bytes)
            return data


class ReturnsMoreThanAskedFor(Wrapped):
    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        data: bytes = await self.sound.receive_some()
        return data


class DropsTheQueueOnClose(Wrapped):
    async def aclose(self) -> None:
        self.sound.abort()


class AbortsAsIfItClosed(Wrapped):
    def abort(self) -> None:
        self.sound._out.unsent.clear()
        self.sound._out.finish()
        self.sound.abort()


class FlushesNothing(Wrapped):
    async def flush(self) -> None:
        await trio.lowlevel.checkpoint()


class ForgetsItsErrors(Wrapped):
    failed = False

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        if self.failed:
            return b""
        try:
            data: bytes = await self.sound.receive_some(max_bytes)
        except CarrierError:
            self.failed = True
            raise
        return data


class CountsNothing(Wrapped):
    def statistics(self) -> object:
        return memory_streams()[0].statistics()


STREAMS: list[tuple[type[Wrapped], set[str]]] = [
    (
        SendsInParts,
        {
            "cancelled_send_is_all_or_nothing",
            "stopped_receiver_stops_the_sender_both_ways",
            "second_sender_is_refused",
            "flush_waits_for_the_queue_and_may_be_cancelled",
            "sends_without_waiting_above_the_watermark",
            "end_comes_after_what_is_queued",
            "close_sends_what_is_queued",
        },
    ),
    (
        QueuesWithoutBound,
        {
            "abort_of_the_peer_wakes_sender_and_flush",
            "cancelled_send_is_all_or_nothing",
            "flush_waits_for_the_queue_and_may_be_cancelled",
            "second_sender_is_refused",
            "stopped_receiver_stops_the_sender_both_ways",
        },
    ),
    (LosesWhatACancelledReceiveTook, {"cancelled_receive_takes_nothing"}),
    (TakesTwoReceivers, {"second_receiver_is_refused"}),
    (ReturnsMoreThanAskedFor, {"receives_no_more_than_asked_for"}),
    (DropsTheQueueOnClose, {"close_of_the_peer_is_an_end"}),
    (AbortsAsIfItClosed, {"abort_is_seen_as_a_loss_by_the_peer", "abort_of_the_peer_wakes_the_receiver"}),
    (FlushesNothing, {"flush_waits_for_the_queue_and_may_be_cancelled", "abort_of_the_peer_wakes_sender_and_flush"}),
    (ForgetsItsErrors, {"abort_is_seen_as_a_loss_by_the_peer"}),
    (CountsNothing, {"counts_what_it_carries"}),
]


def factory(make: Callable[[], tuple[Any, Any]], broken: type[Wrapped]) -> Factory:
    @asynccontextmanager
    async def pair() -> AsyncIterator[tuple[Any, Any]]:
        a, b = make()
        yield broken(a), broken(b)

    return pair


def impatient() -> trio.testing.MockClock:
    """What hangs is over at once."""
    return trio.testing.MockClock(autojump_threshold=0)


def failing(traits: CarrierTraits, pair: Factory) -> set[str]:
    """Return the names of the checks that fail; each runs by itself, as a broken carrier may leave tasks hanging."""
    found = set()
    for check in carrier_checks(traits):
        try:
            trio.run(check, pair, clock=impatient())
        except (AssertionError, trio.TooSlowError, CarrierError, trio.BusyResourceError, ExceptionGroup):
            found.add(str(check))
    return found


@pytest.mark.parametrize(("broken", "expected"), STREAMS, ids=lambda value: getattr(value, "__name__", None))
def test_broken_streams_are_found(broken: type[Wrapped], expected: set[str]) -> None:
    traits = CarrierTraits(shape="bytes", buffered=BUFFERED)
    found = failing(traits, factory(memory_streams, broken))
    assert expected <= found, f"not found: {expected - found}"


def test_a_sound_carrier_passes_in_one_call() -> None:
    made = 0

    def streams() -> tuple[Any, Any]:
        nonlocal made
        made += 1
        return memory_streams()

    traits = CarrierTraits(shape="bytes", buffered=BUFFERED)
    trio.run(check_carrier, factory(streams, Wrapped), traits, clock=impatient())
    assert made == len(carrier_checks(traits))


def test_the_note_names_the_check() -> None:
    with pytest.raises(AssertionError) as caught:
        trio.run(check_carrier, factory(memory_streams, CountsNothing), CarrierTraits(shape="bytes"))
    assert caught.value.__notes__ == ["carrier check: flush_waits_for_the_queue_and_may_be_cancelled"]


def test_checks_follow_the_traits() -> None:
    every = set(map(str, carrier_checks(CarrierTraits(shape="messages", max_message=10, cut=lambda a, b: None))))
    fewer = set(map(str, carrier_checks(CarrierTraits(shape="messages", tells_loss=False))))
    assert every - fewer == {
        "abort_is_seen_as_a_loss_by_the_peer",
        "is_cut_while_flushing",
        "is_cut_while_receiving",
        "is_cut_while_sending",
        "larger_message_than_allowed_closes",
    }
    assert fewer < every
    for shape in ("bytes", "messages", "connection"):
        names = list(map(str, carrier_checks(CarrierTraits(shape=shape))))
        assert len(names) == len(set(names)) > 20


class WrongMessageBoundaries(Wrapped):
    async def send(self, message: Octets) -> None:
        await self.sound.send(message or b"\0")


class WrongCloseCode(Wrapped):
    async def aclose(self, code: int = 1000, reason: str = "") -> None:
        await self.sound.aclose(1000, reason)


class WaitsForNoRoom(Wrapped):
    async def wait_for_room(self) -> None:
        await trio.lowlevel.checkpoint()


class SendsWhatItWaitsWith(Wrapped):
    async def wait_for_room(self) -> None:
        await self.sound.send(b"")


class HasNothingHere(Wrapped):
    def receive_nowait(self) -> bytes | None:
        return None


@pytest.mark.parametrize(
    ("broken", "expected"),
    [
        (WrongMessageBoundaries, "messages_stay_whole"),
        (WrongCloseCode, "close_code_comes_after_the_messages"),
        (WaitsForNoRoom, "queues_messages_without_waiting"),
        (SendsWhatItWaitsWith, "queues_messages_without_waiting"),
        (HasNothingHere, "takes_what_is_here_without_waiting"),
    ],
)
def test_broken_message_streams_are_found(broken: type[Wrapped], expected: str) -> None:
    traits = CarrierTraits(shape="messages", buffered=BUFFERED)
    assert expected in failing(traits, factory(memory_messages, broken))


# ---------------------------------------------------------------- connections


class WrongResetCode(Wrapped):
    """Wraps the streams of a connection too."""

    async def accept_stream(self) -> Any:
        return _WrongCodeStream(await self.sound.accept_stream())


class _WrongCodeStream(Wrapped):
    stream_id = property(lambda self: self.sound.stream_id)
    priority = 128

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        try:
            data: bytes = await self.sound.receive_some(max_bytes)
        except StreamWasReset as error:
            raise StreamWasReset(error.detail, code=error.code & 0xFF) from error
        return data


class KeepsEveryStream(Wrapped):
    def __init__(self, sound: Any) -> None:
        super().__init__(sound)
        self.kept: list[object] = []

    async def open_stream(self, **options: Any) -> Any:
        stream = await self.sound.open_stream(**options)
        self.kept.append(stream)
        return stream


class LimitsNoStreams(Wrapped):
    def try_open_stream(self, **options: Any) -> Any:
        self.sound._may_open = {True: 10, False: 10}
        return self.sound.try_open_stream(**options)


class ClosesWithoutDraining(Wrapped):
    async def aclose(self, code: int = 0, reason: str = "", *, drain_timeout: float = 5.0) -> None:
        self.sound.close(code, reason)
        await trio.lowlevel.checkpoint()


class DropsTheNewestDatagrams(Wrapped):
    def __init__(self, sound: Any) -> None:
        super().__init__(sound)
        take = sound.take_datagram
        sound.take_datagram = lambda datagram: (
            take(datagram) if len(sound._datagrams) < 256 else sound._peer.datagram_gone()
        )


class LosesACancelledAccept(Wrapped):
    async def accept_stream(self) -> Any:
        stream = await self.sound.accept_stream()
        await trio.lowlevel.checkpoint()
        return stream


@pytest.mark.parametrize(
    ("broken", "expected"),
    [
        (WrongResetCode, "reset_carries_its_code"),
        (KeepsEveryStream, "many_streams_come_and_go_without_growth"),
        (LimitsNoStreams, "streams_wait_for_the_peers_credit"),
        (ClosesWithoutDraining, "drains_finished_streams_on_close"),
        (DropsTheNewestDatagrams, "datagrams_nobody_takes_are_dropped_oldest_first"),
        (LosesACancelledAccept, "cancelled_accept_takes_nothing"),
    ],
)
def test_broken_connections_are_found(broken: type[Wrapped], expected: str) -> None:
    """Windows are small, so that closing at once leaves something behind."""
    traits = CarrierTraits(shape="connection", buffered=BUFFERED, max_open=200, streams=1000, datagram_queue=256)
    config = MemoryConfig(connection_window=64 * 1024)
    checks = [check for check in carrier_checks(traits) if str(check) == expected]
    with pytest.raises((AssertionError, trio.TooSlowError, CarrierError, ExceptionGroup)):
        trio.run(checks[0], factory(lambda: memory_connections(config), broken), clock=impatient())
    trio.run(checks[0], factory(lambda: memory_connections(config), Wrapped), clock=impatient())
