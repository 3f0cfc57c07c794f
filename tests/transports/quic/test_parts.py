"""The parts by themselves: MTU search, UDP port, and the version of aioquic."""

from __future__ import annotations

import errno
import math
import socket
import subprocess
import sys
from typing import Any

import pytest
import trio
from aioquic.quic.packet_builder import QuicDeliveryState
from hypothesis import given
from hypothesis import strategies as st

from levada.transports.carriers.sockets import ListeningAddress, ListeningSocket, open_here, sockets_from
from levada.transports.quic import UdpPort, listen
from levada.transports.quic.pmtu import BLACK_HOLE_LOSSES, MtuSearch
from levada.transports.quic.port import authority
from levada.transports.quic.stream_state import make_stream

# ---------------------------------------------------------------- the state of a stream


@given(
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("write"), st.integers(0, 40)),
            st.tuples(st.just("send"), st.integers(-1, 25)),
            st.tuples(st.just("acked"), st.integers(0, 9)),
            st.tuples(st.just("lost"), st.integers(0, 9)),
        ),
        max_size=60,
    ),
    at_end=st.booleans(),
)
def test_a_stream_sends_each_byte_until_it_is_acknowledged(steps: list[tuple[str, int]], at_end: bool) -> None:
    """Packets are lost and acknowledged in any order; what has arrived is what was written, and only what is needed again is kept."""
    sender = make_stream(0, 0, 1 << 30).sender
    written, arrived, under_way = bytearray(), bytearray(), list[tuple[int, bytes, bool]]()
    missing: set[int] = set()

    def send(most: int) -> bool:
        frame = None if sender.buffer_is_empty else sender.get_frame(most)
        if frame is None:
            return False
        assert len(frame.data) <= most
        under_way.append((frame.offset, frame.data, frame.fin))
        return True

    def settle(which: int, outcome: QuicDeliveryState) -> None:
        offset, data, fin = under_way.pop(which % len(under_way))
        sender.on_data_delivery(outcome, offset, offset + len(data), fin)
        if outcome is QuicDeliveryState.ACKED:
            arrived[offset : offset + len(data)] = data
            missing.difference_update(range(offset, offset + len(data)))

    def write(size: int, *, fin: bool = False) -> None:
        data = bytes((len(written) + n) & 0xFF for n in range(size))
        missing.update(range(len(written), len(written) + size))
        written.extend(data)
        arrived.extend(bytes(size))
        sender.write(data, end_stream=fin)

    for what, value in steps:
        if what == "write":
            write(value)
        elif what == "send":
            send(value)
        elif under_way:
            settle(value, QuicDeliveryState.ACKED if what == "acked" else QuicDeliveryState.LOST)
        first = min(missing, default=len(written))
        assert bytes(sender._buffer) == written[first:]
        assert not sender.is_finished
    write(3 if at_end else 0, fin=True)
    while not sender.is_finished:
        assert send(10) or under_way
        while under_way:
            settle(0, QuicDeliveryState.ACKED)
    assert (arrived, missing, bytes(sender._buffer)) == (written, set(), b"")
    assert sender.next_offset == len(written)


# ---------------------------------------------------------------- MTU search


@given(mtu=st.integers(1_200, 9_000), ceiling=st.integers(1_200, 9_000))
def test_the_search_ends_at_what_the_path_carries(mtu: int, ceiling: int) -> None:
    search = MtuSearch(1_200, ceiling)
    probes = 0
    while size := search.probe(1.0):
        probes += 1
        assert 1_200 < size <= ceiling
        if size <= mtu:
            search.acked(size, 1.0)
        else:
            search.lost(size, 1.0)
    best = min(mtu, ceiling)
    assert best - 16 <= search.size <= best
    assert probes <= 40


def test_one_probe_at_a_time_and_again_after_ten_minutes() -> None:
    search = MtuSearch(1_200, 1_452)
    assert search.probe(0.0) == 1_452
    assert search.probe(0.0) == 0
    for _ in range(3):
        search.lost(1_452, 1.0)
        search.probe(1.0)
    while size := search.probe(1.0) or search._in_flight:
        search.acked(size, 1.0)
    assert search.size > 1_400
    assert (search.probe(600.0), search.probe(601.0)) == (0, 1_452)


def test_at_the_ceiling_nothing_is_probed_for() -> None:
    """A probe every ten minutes would keep an idle connection alive forever."""
    search = MtuSearch(1_200, 1_452)
    search.acked(search.probe(0.0), 1.0)
    assert (search.size, search.next_at) == (1_452, math.inf)


def test_a_single_lost_probe_says_nothing() -> None:
    search = MtuSearch(1_200, 1_452)
    for _ in range(2):
        assert search.probe(0.0) == 1_452
        search.lost(1_452, 0.0)
    assert search.probe(0.0) == 1_452
    search.acked(1_452, 0.0)
    assert search.size == 1_452


def test_large_packets_that_vanish_in_a_row_are_a_black_hole() -> None:
    search = MtuSearch(1_200, 1_452)
    search.probe(0.0)
    search.acked(1_452, 0.0)
    for _ in range(BLACK_HOLE_LOSSES - 1):
        assert not search.large_lost(1.0)
    search.large_acked()
    for _ in range(BLACK_HOLE_LOSSES - 1):
        assert not search.large_lost(1.0)
    assert search.large_lost(1.0)
    assert search.size == 1_200
    assert (search.probe(60.0), search.probe(61.0)) == (0, 1_452)


def test_the_peer_may_take_less() -> None:
    search = MtuSearch(1_200, 1_452)
    search.limit(1_300, 0.0)
    assert search.probe(0.0) == 1_300
    closed = MtuSearch(1_200, 1_452)
    closed.limit(1_200, 0.0)
    assert (closed.probe(1e9), closed.next_at) == (0, math.inf)
    large = MtuSearch(16_384, 16_384)
    large.limit(1_400, 0.0)
    assert (large.base, large.size, large.probe(1e9)) == (1_400, 1_400, 0)


# ---------------------------------------------------------------- UDP


async def exchange(one: UdpPort, two: UdpPort, payloads: list[bytes]) -> list[bytes]:
    assert one.send([(data, two.address) for data in payloads]) == len(payloads)
    got: list[bytes] = []
    with trio.fail_after(250):
        while len(got) < len(payloads):
            got += [data for data, source in await two.receive() if source == one.address]
    return got


@pytest.mark.loopback
@pytest.mark.parametrize("gso", [True, False])
@pytest.mark.parametrize("gro", [True, False])
async def test_groups_arrive_as_what_was_sent(gso: bool, gro: bool) -> None:
    one = UdpPort.bind(("127.0.0.1", 0), gso=gso, gro=gro)
    two = UdpPort.bind(("127.0.0.1", 0), gso=gso, gro=gro)
    payloads = (
        [bytes([n]) * 1_200 for n in range(50)] + [b"short"] + [bytes([n]) * 300 for n in range(20)] + [b"x" * 9_000]
    )
    assert await exchange(one, two, payloads) == payloads
    one.close()
    two.close()
    two.close()
    with pytest.raises((trio.ClosedResourceError, OSError, ValueError)):
        await two.receive()


@pytest.mark.loopback
async def test_single_datagrams_and_then_a_burst_all_arrive() -> None:
    """After single ones a call reads once; a burst that comes then still arrives whole, and in order."""
    one, two = UdpPort.bind(("127.0.0.1", 0), gro=False), UdpPort.bind(("127.0.0.1", 0), gro=False)
    for number in range(10):
        assert await exchange(one, two, [b"%d" % number]) == [b"%d" % number]
    burst = [b"burst %d" % number for number in range(200)]
    assert await exchange(one, two, burst) == burst
    one.close()
    two.close()


class RefusesGroups(socket.socket):
    """A socket of a kernel without GSO."""

    def sendmsg(self, *_: Any) -> int:
        raise OSError(errno.EIO, "no")


@pytest.mark.loopback
@pytest.mark.skipif(sys.platform != "linux", reason="GSO is Linux")
async def test_a_refused_group_is_sent_singly_and_no_group_is_tried_again() -> None:
    sock = RefusesGroups(socket.AF_INET, socket.SOCK_DGRAM)
    sock.bind(("127.0.0.1", 0))
    one, two = UdpPort(sock), UdpPort.bind(("127.0.0.1", 0))
    payloads = [bytes([n]) * 1_200 for n in range(5)]
    assert one.gso
    assert await exchange(one, two, payloads) == payloads
    assert not one.gso
    one.close()
    two.close()


@pytest.mark.loopback
async def test_the_settings_say_how_large_the_buffers_of_a_socket_are(lab: Any) -> None:
    opened: list[ListeningSocket] = []

    async def remember(address: ListeningAddress) -> list[ListeningSocket]:
        opened.extend(await open_here(address))
        return opened

    with sockets_from(remember):
        async with listen("quic://127.0.0.1:0", lab.server(socket_buffer=20_000)):
            sizes = [
                opened[0].socket.getsockopt(socket.SOL_SOCKET, name) for name in (socket.SO_RCVBUF, socket.SO_SNDBUF)
            ]
    assert sizes == [40_000 if sys.platform == "linux" else 20_000] * 2  # Linux doubles a size for its own use


@pytest.mark.loopback
async def test_what_the_network_refuses_is_lost_and_nothing_else() -> None:
    one, two = UdpPort.bind(("127.0.0.1", 0)), UdpPort.bind(("127.0.0.1", 0))
    assert one.send([(b"x" * 65_530, two.address), (b"after", two.address)]) == 2
    with trio.fail_after(250):
        assert await two.receive() == [(b"after", one.address)]
    one.close()
    two.close()


class Full(socket.socket):
    """A socket whose buffer is full after two datagrams."""

    taken = 0

    def sendto(self, *_: Any) -> int:
        self.taken += 1
        if self.taken > 2:
            raise BlockingIOError
        return 0


@pytest.mark.loopback
def test_a_full_buffer_says_how_many_were_taken() -> None:
    sock = Full(socket.AF_INET, socket.SOCK_DGRAM)
    sock.bind(("127.0.0.1", 0))
    port = UdpPort(sock, gso=False)
    assert port.send([(b"x", port.address)] * 5) == 2
    sock.close()


def test_authorities() -> None:
    assert authority(("client", 1)) == "client:1"
    assert authority(("::1", 1, 0, 0)) == "[::1]:1"


# ---------------------------------------------------------------- the version of aioquic


def test_another_version_of_aioquic_is_refused_at_import() -> None:
    """The engine overrides parts of one version, so with another it would fail later, in the middle of a connection."""
    program = "import aioquic; aioquic.__version__ = '1.8.0'; import levada.transports.quic"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    expected = (
        "ImportError: levada.transports.quic needs aioquic 1.7, and 1.8.0 is installed: pip install 'levada[quic]'"
    )
    assert result.stderr.splitlines()[-1] == expected
