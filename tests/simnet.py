"""A simulated network of datagrams on trio's clock: real QUIC packets, virtual time, scripted faults.

::

    net = SimNet(seed=1, delay=0.01, loss=0.02)
    async with listen("quic://server:4433", config, port=net.port("server", 4433)) as listener:
        async with dial("quic://server:4433", config, port=net.port("client")) as connection:
            ...

Run it under `trio.testing.MockClock(autojump_threshold=0)`.  One generator makes all random choices, in the order of sending, with the same
number of draws for each packet.  So the same seed gives the same trace of (time, source, destination, size) if the program itself is
repeatable: the order of trio's scheduler and the lengths of signatures (Ed25519, not ECDSA) have to be fixed as well.

There is no task: each port keeps a heap of datagrams on their way, and its `receive` sleeps until the first is due.  A protocol that sets
the same timer again and again would stop virtual time: after `turns` calls at one time, the network raises `TimeStandsStill`.
"""

from __future__ import annotations

import hashlib
import heapq
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import trio

__all__ = ["SimAddress", "SimNet", "SimPacket", "SimPort", "TimeStandsStill"]

SimAddress = tuple[str, int]


class TimeStandsStill(AssertionError):
    """The program keeps using the network while its clock stands still."""


@attrs.define
class SimPacket:
    """A datagram on its way, which a fault may change."""

    n: int
    """Number in the order of sending, from 0."""
    time: float
    source: SimAddress
    destination: SimAddress
    data: bytes
    hold: float = 0.0
    """Seconds that the datagram is kept in addition to the link's delay."""
    dropped: bool = False


@attrs.frozen(kw_only=True)
class Link:
    """The path from one host to another."""

    delay: float = 0.01
    """Seconds that each datagram takes."""
    jitter: float = 0.0
    """Upper bound of the random seconds added to each delay. A jitter larger than the time between datagrams reorders them."""
    loss: float = 0.0
    """Share of datagrams that are lost, 0 to 1."""
    duplicate: float = 0.0
    """Share of datagrams that arrive twice, 0 to 1."""
    reorder: float = 0.0
    """Share of datagrams, 0 to 1, that are held back by another `delay`, so that others overtake them."""
    rate: float = math.inf
    """Bytes per second that pass the bottleneck."""
    queue: int = 1 << 20
    """Bytes that may wait at the bottleneck; further datagrams are lost."""
    mtu: int = 1_500
    """Bytes of the largest datagram that passes."""


Fault = Callable[[SimPacket], object]


class SimPort:
    """One address in a `SimNet`; a `levada.transports.quic.DatagramPort`."""

    def __init__(self, net: SimNet, address: SimAddress):
        self._net = net
        self._address = address
        self._heap: list[tuple[float, int, bytes, SimAddress]] = []
        self._scope: trio.CancelScope | None = None
        self._closed = False

    @property
    def address(self) -> SimAddress:
        """The port's own address."""
        return self._address

    async def receive(self) -> list[tuple[bytes, SimAddress]]:
        """Wait until a datagram is due, and take all that are due.

        Raises:
            trio.ClosedResourceError: the port was closed.

        Cancellation:
            no datagram was taken.
        """
        while True:
            if self._closed:
                raise trio.ClosedResourceError
            self._net.turn()
            now = trio.current_time() + 1e-9
            if self._heap and self._heap[0][0] <= now:
                await trio.lowlevel.checkpoint()  # before a datagram is taken, so that a cancelled call loses none
                due: list[tuple[bytes, SimAddress]] = []
                while self._heap and self._heap[0][0] <= now:
                    _, _, data, source = heapq.heappop(self._heap)
                    due.append((data, source))
                return due
            with trio.CancelScope(deadline=self._heap[0][0] if self._heap else math.inf) as self._scope:
                await trio.sleep_forever()
            self._scope = None

    def send(self, datagrams: Sequence[tuple[bytes, SimAddress]]) -> int:
        """Send datagrams, and return their number: the network accepts all of them."""
        self._net.turn()
        for data, destination in datagrams:
            self._net.carry(self._address, destination, data)
        return len(datagrams)

    async def writable(self) -> None:
        """Return at once, since the network accepts every datagram, even if it then loses it."""
        await trio.lowlevel.checkpoint()

    def close(self) -> None:
        """Release the address; datagrams on their way to it are lost."""
        self._closed = True
        self._net.remove(self)
        if self._scope is not None:
            self._scope.cancel()

    def arrive(self, at: float, n: int, data: bytes, source: SimAddress) -> None:
        """Take a datagram that arrives at a later time."""
        heapq.heappush(self._heap, (at, n, data, source))
        if self._scope is not None and at < self._scope.deadline:
            self._scope.deadline = at

    def move(self, address: SimAddress) -> None:
        """Change the address, as happens when a NAT has forgotten its mapping."""
        self._address = address


class SimNet:
    """Hosts, the links between them, and scripted faults."""

    def __init__(self, seed: int, *, turns: int = 20_000, **link: Any):
        """Make a network.

        Args:
            seed: seed of all random choices.
            turns: most sends and receives at one time.
            link: fields of `Link`, for all pairs of hosts without a link of their own.
        """
        self.seed = seed
        self.trace: list[tuple[float, SimAddress, SimAddress, int]] = []
        """(time, source, destination, bytes) of each datagram sent."""
        self.sent = 0
        self.lost = 0
        self._random = random.Random(seed)
        self._default = Link(**link)
        self._links: dict[tuple[str, str], Link] = {}
        self._cut: set[frozenset[str]] = set()
        self._ports: dict[SimAddress, SimPort] = {}
        self._faults: list[Fault] = []
        self._busy: dict[tuple[str, str], float] = {}
        self._arrivals = 0
        self._next_port = 50_000
        self._turns = turns
        self._turn = 0
        self._turn_time = -math.inf

    def port(self, host: str, number: int = 0) -> SimPort:
        """Open an address; number 0 takes a free one.

        Raises:
            OSError: the address is in use.
        """
        address = self._free(host, number)
        port = self._ports[address] = SimPort(self, address)
        return port

    def _free(self, host: str, number: int) -> SimAddress:
        if number:
            if (host, number) in self._ports:
                raise OSError(f"{host}:{number} is in use in this network")
            return host, number
        while True:
            self._next_port += 1
            if (host, self._next_port) not in self._ports:
                return host, self._next_port

    def link(self, source: str, destination: str, **changes: Any) -> None:
        """Change the link from one host to another, from now on and in this direction only."""
        key = (source, destination)
        self._links[key] = attrs.evolve(self._links.get(key, self._default), **changes)

    def partition(self, *hosts: str) -> None:
        """Cut these hosts off from each other until `heal`."""
        self._cut.update(frozenset((one, other)) for one in hosts for other in hosts if one != other)

    def heal(self) -> None:
        """End all partitions."""
        self._cut.clear()

    def rebind(self, port: SimPort, number: int = 0) -> SimAddress:
        """Give a port another number on its host. Answers to the old number are lost.

        Raises:
            OSError: the number is in use.
        """
        address = self._free(port.address[0], number)
        self.remove(port)
        port.move(address)
        self._ports[address] = port
        return address

    def fault(self, fault: Fault) -> None:
        """Call a function with each datagram before it is sent; the function may change the datagram."""
        self._faults.append(fault)

    def drop(self, which: Callable[[SimPacket], bool]) -> None:
        """Lose the datagrams that `which` accepts."""

        def fault(packet: SimPacket) -> None:
            packet.dropped = packet.dropped or which(packet)

        self.fault(fault)

    def hold(self, which: Callable[[SimPacket], bool], seconds: float) -> None:
        """Delay the datagrams that `which` accepts by some more seconds, so that others overtake them."""

        def fault(packet: SimPacket) -> None:
            if which(packet):
                packet.hold += seconds

        self.fault(fault)

    def corrupt(self, which: Callable[[SimPacket], bool], *, at: int = -1, mask: int = 0x01) -> None:
        """Flip the bits of `mask` in one byte of the datagrams that `which` accepts."""

        def fault(packet: SimPacket) -> None:
            if which(packet):
                data = bytearray(packet.data)
                data[at] ^= mask
                packet.data = bytes(data)

        self.fault(fault)

    def blackhole(self, source: str, destination: str, *, larger_than: int = 0) -> None:
        """Lose the datagrams from one host to another that have more than `larger_than` bytes."""
        self.drop(lambda p: p.source[0] == source and p.destination[0] == destination and len(p.data) > larger_than)

    def clear_faults(self) -> None:
        """Remove all faults."""
        self._faults.clear()

    def carry(self, source: SimAddress, destination: SimAddress, data: bytes) -> None:
        """Send one datagram, or lose it."""
        now = trio.current_time()
        packet = SimPacket(self.sent, now, source, destination, data)
        self.sent += 1
        self.trace.append((now, source, destination, len(data)))
        chance = self._random
        lost, twice, late, shake, shake_again = (chance.random() for _ in range(5))
        for fault in self._faults:
            fault(packet)
        key = (source[0], destination[0])
        link = self._links.get(key, self._default)
        if packet.dropped or lost < link.loss or len(packet.data) > link.mtu or frozenset(key) in self._cut:
            self.lost += 1
            return
        start = max(now, self._busy.get(key, 0.0))
        if (start - now) * link.rate > link.queue:
            self.lost += 1
            return
        at = start
        if not math.isinf(link.rate):
            at = self._busy[key] = start + len(packet.data) / link.rate
        at += link.delay + packet.hold + (link.delay if late < link.reorder else 0.0)
        self._deliver(packet, at + shake * link.jitter)
        if twice < link.duplicate:
            self._deliver(packet, at + shake_again * link.jitter)

    def _deliver(self, packet: SimPacket, at: float) -> None:
        port = self._ports.get(packet.destination)
        if port is None:
            self.lost += 1
            return
        self._arrivals += 1
        port.arrive(at, self._arrivals, packet.data, packet.source)

    def remove(self, port: SimPort) -> None:
        """Release a port's address; datagrams to it are lost."""
        if self._ports.get(port.address) is port:
            del self._ports[port.address]

    def turn(self) -> None:
        """Count a send or receive.

        Raises:
            TimeStandsStill: there were too many at one time.
        """
        now = trio.current_time()
        if now > self._turn_time:
            self._turn_time, self._turn = now, 0
        self._turn += 1
        if self._turn > self._turns:
            raise TimeStandsStill(
                f"{self._turns} turns of the network at {now:.6f} s, seed {self.seed}: a timer is set to the same moment again and again"
            )

    def digest(self) -> str:
        """Return a short hash of the trace."""
        return hashlib.sha256(repr(self.trace).encode()).hexdigest()[:16]
