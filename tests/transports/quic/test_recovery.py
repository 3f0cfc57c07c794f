"""Loss and reordering: what it costs in virtual time, and what the sender learns from packets that it gave up too early."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import trio
from aioquic.quic.recovery import QuicPacketSpace
from hypothesis import given
from hypothesis import strategies as st
from tests.seeds import seeds
from tests.simnet import SimNet, SimPacket
from trio.testing import MockClock

from levada.transports.quic import QuicStream
from levada.transports.quic.congestion import Cubic, Reno, make_controller
from levada.transports.quic.packets import SentPacket
from levada.transports.quic.ranges import MAX_RANGES, Ranges, ReceivedPackets
from levada.transports.quic.recovery import LeanRecovery, narrowed

SIZE = 4 << 20
PACKET = 1_200


async def length_of(stream: QuicStream) -> int:
    length = 0
    while data := await stream.receive_some():
        length += len(data)
    return length


async def transfer(lab: Any, net: SimNet, octets: int = SIZE) -> float:
    """Send octets to the server; return the virtual seconds until they are there."""
    async with lab.connected(net) as ends:
        start = trio.current_time()
        stream = await ends.client.open_stream()
        stream.send_nowait(bytes(octets), fin=True)
        assert await length_of(await ends.server.accept_stream()) == octets
        return trio.current_time() - start


def reordering(seed: int, share: float, **link: Any) -> SimNet:
    """Return a network of 10 ms each way that delays a share of its packets up to three times as long."""
    net, chance = SimNet(seed, **link), random.Random(seed)

    def fault(packet: SimPacket) -> None:
        late, longer = chance.random(), chance.random()
        if late < share:
            packet.hold += 0.02 * longer

    net.fault(fault)
    return net


CLEAN = 0.185
"""Virtual seconds of 4 MiB without trouble, which `test_a_clean_path` holds."""


@pytest.mark.ci
async def test_a_clean_path(lab: Any, autojump_clock: MockClock) -> None:
    assert await transfer(lab, SimNet(1)) == pytest.approx(CLEAN, abs=0.005)


@pytest.mark.ci
async def test_reordering_costs_less_than_a_third(lab: Any, autojump_clock: MockClock) -> None:
    assert await transfer(lab, reordering(1, 0.1)) < 1.3 * CLEAN


@pytest.mark.ci
@pytest.mark.parametrize(
    "share", [0.01, 0.1, *(pytest.param(share, marks=pytest.mark.release) for share in (0.02, 0.05))]
)
@seeds(2, 10)
async def test_reordering_costs_less_than_a_third_whatever_comes_late(
    lab: Any, autojump_clock: MockClock, share: float, seed: int
) -> None:
    assert await transfer(lab, reordering(seed, share)) < 1.3 * CLEAN


async def test_loss_of_one_packet_in_twenty(lab: Any, autojump_clock: MockClock) -> None:
    """The square-root law of AIMD allows a quarter of the 10 s that 4 MiB take."""
    assert await transfer(lab, SimNet(1, loss=0.05), SIZE // 4) < 3.5


@pytest.mark.ci
@pytest.mark.parametrize(("loss", "bar"), [(0.01, 5.5), (0.05, 11.5)])
@seeds(2, 8)
async def test_loss_costs_no_more_than_congestion_control_asks_for(
    lab: Any, autojump_clock: MockClock, loss: float, bar: float, seed: int
) -> None:
    assert await transfer(lab, SimNet(seed, loss=loss)) < bar


@pytest.mark.ci
@seeds(2, 5)
async def test_a_bottleneck_that_reorders_is_filled(lab: Any, autojump_clock: MockClock, seed: int) -> None:
    """4 MiB need 3.36 s at this rate; its queue overflows, so that late and lost packets have to be told apart."""
    net = reordering(seed, 0.05, rate=1_250_000, queue=50_000)
    assert await transfer(lab, net) < 3.8


@pytest.mark.ci
async def test_a_packet_that_a_thousand_others_overtake_is_taken(lab: Any, autojump_clock: MockClock) -> None:
    """A receiver that takes it for a duplicate makes the sender lose it for good."""
    net = SimNet(1)
    async with lab.connected(net) as ends, trio.open_nursery() as nursery:
        stream = await ends.client.open_stream()
        stream.send_nowait(bytes(SIZE), fin=True)
        nursery.start_soon(length_of, await ends.server.accept_stream())
        await trio.sleep(0.12)  # until the window has opened
        until = trio.current_time() + 0.001
        net.hold(lambda packet: packet.source[0] == "client" and packet.time <= until, 0.06)
        assert ends.client.send_datagram_nowait(b"late")
        before = ends.server.details().packets_received
        with trio.fail_after(0.1):
            assert (await ends.server.receive_datagram()).data == b"late"
        assert ends.server.details().packets_received - before > 1_000


# ---------------------------------------------------------------- what the sender learns


class Sender:
    """Recovery of one path of 20 ms, told what is sent and acknowledged."""

    def __init__(self, algorithm: str = "cubic") -> None:
        self.recovery = LeanRecovery(
            congestion_control_algorithm=algorithm,
            initial_rtt=0.1,
            max_datagram_size=PACKET,
            peer_completed_address_validation=True,
            send_probe=lambda: None,
        )
        self.space = QuicPacketSpace(is_application_data=True)
        self.recovery.spaces = [self.space]
        self.recovery.handshake_confirmed = True
        self.now = 100.0
        self.next = 0
        self.lost: list[int] = []
        self.exchange(10)

    @property
    def window(self) -> int:
        return self.recovery.congestion_window // PACKET

    def send(self, count: int) -> list[int]:
        numbers = list(range(self.next, self.next + count))
        for number in numbers:
            packet: Any = SentPacket(number)
            packet.is_ack_eliciting = packet.in_flight = True
            packet.sent_time, packet.sent_bytes = self.now, PACKET
            packet.delivery_handlers.append((self.delivered, (number,)))
            self.recovery.on_packet_sent(packet=packet, space=self.space)
        self.next += count
        return numbers

    def delivered(self, delivery: Any, number: int) -> None:
        if delivery.name == "LOST":
            self.lost.append(number)

    def ack(self, numbers: Iterable[int], after: float = 0.0, delay: float = 0.0) -> None:
        self.now += after
        acked = Ranges()
        for number in numbers:
            acked.add(number)
        self.recovery.on_ack_received(ack_rangeset=acked, ack_delay=delay, now=self.now, space=self.space)

    def exchange(self, count: int) -> None:
        self.ack(self.send(count), 0.02)

    def loses(self, numbers: Sequence[int]) -> bool:
        """Send enough to notice, and say whether exactly these packets were given up; the rest arrives."""
        before = len(self.lost)
        sent = self.send(10)
        self.ack([number for number in sent if number - sent[0] not in numbers], 0.02)
        return [number - sent[0] for number in self.lost[before:]] == list(numbers)


@pytest.mark.parametrize(
    ("samples", "smoothed", "variance"),
    [
        # Milliseconds: the round trip, and the peer's delay of the acknowledgement. The first sample is taken as it is.
        ([(50, 0)], 50, 25),
        ([(50, 20)], 50, 25),
        ([(50, 0), (100, 0)], 56.25, 0.75 * 25 + 0.25 * 50),
        ([(50, 0), (40, 0)], 48.75, 0.75 * 25 + 0.25 * 10),
        # The delay is taken off unless the rest would be shorter than the shortest round trip; more than 25 ms is not believed.
        ([(50, 0), (71, 20)], 50 + 1 / 8, 0.75 * 25 + 0.25 * 1),
        ([(50, 0), (69, 20)], 50 + 19 / 8, 0.75 * 25 + 0.25 * 19),
        ([(50, 0), (100, 400)], 50 + 25 / 8, 0.75 * 25 + 0.25 * 25),
        # A queue that stands is no variance: the mean moves, and the probe comes after 125 ms, and 1 for the clock, instead of 325.
        ([(50, 0), *[(100, 0)] * 100], 100, 0),
    ],
)
def test_the_round_trip_and_its_variance_are_those_of_the_rfc(
    samples: list[tuple[float, float]], smoothed: float, variance: float
) -> None:
    """RFC 9002 section 5.3 and appendix A.7; the probe timeout is that of section 6.2.1."""
    sender = Sender()
    sender.recovery.start_afresh(sender.next, size=PACKET)
    for measured, delay in samples:
        sender.ack(sender.send(1), measured / 1000, delay / 1000)
    expected = smoothed + max(4 * variance, 1) + 25
    assert 1000 * sender.recovery.get_probe_timeout() == pytest.approx(expected, abs=0.01)


def test_a_packet_that_three_others_overtake_is_given_up() -> None:
    sender = Sender()
    assert sender.loses([2])
    assert sender.loses([6])
    assert sender.loses([])
    assert not sender.loses([7])


@pytest.mark.parametrize("algorithm", ["cubic", "reno"])
def test_a_cut_is_taken_back_once_nothing_was_lost(algorithm: str) -> None:
    sender = Sender(algorithm)
    assert sender.window == 20
    sent = sender.send(20)
    sender.ack([sent[0], *sent[3:10]], 0.02)
    assert sender.lost == sent[1:3]
    assert sender.window == int(28 * (0.7 if algorithm == "cubic" else 0.5))
    sender.ack(sent[10:], 0.002)
    sender.ack([sent[1]], 0.002)
    assert sender.window < 20
    sender.ack([sent[2]], 0.002)
    # As if nothing had happened: what arrived after the cut has opened the window, too.
    assert sender.window == 38
    assert sender.recovery._cc.ssthresh is None


def test_a_cut_stays_if_one_packet_was_lost() -> None:
    sender = Sender()
    sender.loses([1, 2])
    cut = sender.window
    sender.ack([sender.next - 9], 0.002)
    assert sender.window == cut
    sender.now += 10
    sender.loses([1])  # too long ago: the other one is forgotten
    cut = sender.window
    sender.ack([8 + 10], 0.002)
    assert sender.window == cut


def test_after_a_late_packet_others_are_waited_for_as_long() -> None:
    sender = Sender()
    sender.loses([0])
    sender.ack([sender.next - 10], 0.012)
    assert not sender.loses(range(5)), "packets are not counted any more"
    sender.ack(range(sender.next - 10, sender.next - 5), 0.012)
    assert sender.lost == [10]
    first, *others = sender.send(6)
    sender.ack(others, 0.02)
    assert sender.space.loss_time == pytest.approx(sender.now + 1.25 * 0.012, abs=0.002)
    assert sender.space.loss_time is not None
    sender.now = sender.space.loss_time
    sender.recovery.on_loss_detection_timeout(now=sender.now)
    assert sender.lost == [10, first]


def test_packets_are_waited_for_a_round_trip_and_a_quarter_at_most() -> None:
    sender = Sender()
    sender.loses([0])
    sender.ack([sender.next - 10], 0.1)
    _, *others = sender.send(6)
    sender.ack(others, 0.02)
    assert sender.space.loss_time == pytest.approx(sender.now + 1.25 * 0.02, rel=0.2)


def test_an_orderly_path_is_trusted_again() -> None:
    sender = Sender()
    sender.loses([0])
    sender.ack([sender.next - 10], 0.004)
    for _ in range(17):
        sender.now += 0.001
        assert not sender.loses([0])
        sender.now += 1
        sender.exchange(1)  # a packet sent long ago was lost
    assert sender.loses([0])


def test_what_was_learnt_of_one_path_is_not_said_of_another() -> None:
    sender = Sender()
    sender.loses([0])
    sender.ack([sender.next - 10], 0.004)
    sender.recovery.start_afresh(sender.next, size=PACKET)
    sender.exchange(10)
    assert sender.loses([0])


def test_a_late_packet_of_an_old_path_changes_nothing() -> None:
    sender = Sender()
    sender.loses([0])
    late = sender.next - 10
    sender.recovery.start_afresh(sender.next, size=PACKET)
    window = sender.window
    sender.ack([late], 0.004)
    assert (sender.window, sender.loses([0])) == (window, True)


def test_three_probe_timeouts_without_anything_are_persistent_congestion() -> None:
    """RFC 9002 section 7.6: the smallest window, and a round trip measured anew; it is taken back as well."""
    sender = Sender()
    sender.exchange(10)
    window = sender.window
    silent = []
    for _ in range(4):
        silent += sender.send(1)
        sender.now += 2 * sender.recovery.get_probe_timeout()
    sender.exchange(4)
    assert sender.lost == silent
    assert sender.window == 2
    sender.ack(silent, 0.001)
    assert sender.window >= window


def test_a_late_packet_makes_no_acknowledgement_dear() -> None:
    """One packet is outstanding, and ten thousand after it are not: no look at the numbers between."""
    sender = Sender()
    sender.recovery._lateness = 1.0
    first = sender.send(1)
    for _ in range(10):
        sender.exchange(1_000)
        sender.now -= 0.02
    sent = sender.space.sent_packets
    assert list(sent) == first
    acked = Ranges()
    acked.add(first[0] + 1, sender.next)
    assert [list(numbers) for numbers in narrowed(acked, sent)] == [[]]
    sender.send(1)
    assert sum(len(list(numbers)) for numbers in narrowed(acked, sent)) == 0


# ---------------------------------------------------------------- the window


@pytest.mark.parametrize("algorithm", ["cubic", "reno"])
def test_a_window_that_is_not_used_does_not_grow(algorithm: str) -> None:
    sender = Sender(algorithm)
    window = sender.window
    for _ in range(100):
        sender.exchange(2)
    assert sender.window == window
    sender.exchange(window)
    assert sender.window == 2 * window


@pytest.mark.parametrize("algorithm", ["cubic", "reno"])
def test_one_cut_for_all_that_was_sent_before_it(algorithm: str) -> None:
    sender = Sender(algorithm)
    sender.exchange(sender.window)
    window = sender.window
    first, second = sender.send(10), sender.send(10)
    sender.ack(first[5:], 0.02)
    cut = sender.window
    assert cut < window
    sender.ack(second[5:], 0.001)
    assert sender.lost == [*first[:5], *second[:5]]
    assert sender.window == cut


def test_reno_grows_by_a_packet_in_a_round_trip() -> None:
    sender = Sender("reno")
    sender.loses([0])
    window = sender.window
    for n in range(1, 6):
        sender.now += 0.001
        sender.exchange(sender.window)
        assert sender.window == window + n


def test_cubic_returns_to_the_window_before_the_cut_and_goes_on_from_there() -> None:
    """RFC 9438 section 4.1: from 0.7 W it is W again after K = cbrt(0.3 W / 0.4) seconds, whatever the round trip."""
    control = Cubic(max_datagram_size=PACKET)
    control.congestion_window = 1_000 * PACKET
    control.on_rtt_measurement(now=0.0, rtt=0.1)
    packet: Any = SentPacket(0)
    packet.sent_bytes, packet.sent_time = 25 * PACKET, 0.0
    control.bytes_in_flight = control.congestion_window
    control.on_packets_lost(now=0.1, packets=[packet])
    assert control.congestion_window == 700 * PACKET
    now, windows = 0.1, []
    for _ in range(150):
        now += 0.1
        for _ in range(control.congestion_window // PACKET // 25):
            packet.sent_time = now - 0.05
            control.bytes_in_flight = control.congestion_window
            control.on_packet_sent(packet=packet)
            control.on_packet_acked(now=now, packet=packet)
        windows.append(control.congestion_window // PACKET)
    assert windows == sorted(windows)
    k = (0.3 * 1_000 / 0.4) ** (1 / 3)
    assert windows[int(10 * k)] == pytest.approx(1_000, rel=0.01)
    assert windows[int(5 * k)] > 950
    assert windows[int(15 * k)] == pytest.approx(1_000 + 0.4 * (k / 2) ** 3, rel=0.02)


def test_a_window_says_nothing_after_two_seconds_of_rest() -> None:
    sender = Sender()
    for _ in range(4):
        sender.exchange(sender.window)
    assert sender.window == 320
    sender.now += 1.9
    sender.exchange(1)
    assert sender.window == 320
    sender.now += 2.1
    sender.exchange(1)
    assert sender.window == 10


def test_controllers_are_those_of_the_configuration() -> None:
    assert type(make_controller("reno", max_datagram_size=PACKET)) is Reno
    assert type(make_controller("cubic", max_datagram_size=PACKET)) is Cubic


# ---------------------------------------------------------------- sets of numbers

numbers = st.integers(0, 60)


@given(st.lists(st.tuples(st.booleans(), numbers, st.integers(1, 20)), max_size=30))
def test_ranges_hold_what_a_set_holds(steps: list[tuple[bool, int, int]]) -> None:
    ranges, model = Ranges(), set[int]()
    for adding, start, length in steps:
        if adding:
            ranges.add(start, start + length)
            model.update(range(start, start + length))
        else:
            ranges.subtract(start, start + length)
            model.difference_update(range(start, start + length))
        assert [number for run in ranges for number in run] == sorted(model)
        assert all(one.stop < other.start for one, other in zip(ranges, list(ranges)[1:], strict=False))
        assert all((number in ranges) is (number in model) for number in range(90))
        if model:
            assert ranges.bounds() == range(min(model), max(model) + 1)


@given(st.lists(numbers, max_size=60))
def test_received_numbers_are_new_once(arrivals: list[int]) -> None:
    received, model = ReceivedPackets(), set[int]()
    for number in arrivals:
        assert (number in received) is (number in model)
        assert received.add(number) is (number not in model)
        model.add(number)
        assert received.following == max(model) + 1


def test_only_so_many_gaps_are_remembered() -> None:
    """Every other packet is missing: of the oldest ones nobody can say any more that they have not come."""
    received = ReceivedPackets()
    for number in range(1, 10_000, 2):
        assert received.add(number)
    assert not received.add(0)
    assert received.add(9_998)
    missing = [number for number in range(0, 10_000, 2) if number not in received]
    assert len(missing) == MAX_RANGES - 1
    assert missing[0] > 9_000
