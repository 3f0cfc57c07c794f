"""The network of a simulated world: wires between processes, with latency, and what can go wrong on them.

A wire is a connection as TCP makes it. Bytes arrive in order or not at all. While the way is blocked they wait, as TCP would send them
again. A way is blocked while it is cut, and while a process at one of its ends is paused. So a wire may be blocked one way, and the other
end hears nothing while its own words arrive.

* When a process is killed, its peers learn it after everything that it has sent has arrived.
* When a machine loses its power, its peers learn nothing. When they send to the machine after it is up again, they learn that the wire is gone.
"""

from __future__ import annotations

import errno
import os
import random
from collections import deque
from collections.abc import Callable, Iterable
from hashlib import blake2b
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import Any, Final

import attrs
import trio

from levada.framework.errors import ConfigurationError

from .addresses import Addresses, Endpoint, SharedAddresses
from .datagrams import Post, SimulatedDatagrams

__all__ = ["NetworkOfProcess", "SimulatedNetwork", "SimulatedWire"]

_HANDSHAKE: Final = 3  # times the latency, for SYN, its answer, and the first data


def _no_one(side: int, why: str) -> None:
    """Learn nothing: no carrier uses the wire yet."""


@attrs.define(eq=False)
class _Way:
    """One way of a wire, with everything under way on it, the next to arrive first."""

    sender: Endpoint
    receiver: Endpoint
    under_way: deque[tuple[float, Callable[..., None], tuple[object, ...]]] = attrs.field(factory=deque)
    ended: bool = False
    """Whether nothing more is sent."""
    due: bool = False
    """Whether the network will look here."""


class SimulatedWire:
    """A connection of two processes; a `levada.framework.platform.Wire`."""

    def __init__(self, network: SimulatedNetwork, number: int, sides: tuple[Endpoint, Endpoint]) -> None:
        self.on_lost: Callable[[int, str], None] = _no_one
        self.number = number
        self.ways = _Way(sides[0], sides[1]), _Way(sides[1], sides[0])
        self._network = network

    def post(self, way: int, call: Callable[..., None], *arguments: object) -> None:
        """Call at the other end, see `Wire.post`."""
        lane = self.ways[way]
        if lane.ended or lane.sender.dead:
            return
        network = self._network
        network.record(self.number, way, call, arguments)
        if lane.receiver.dead and not lane.receiver.is_silent:
            self.reset(1 - way, "the connection was reset by the peer")
        elif not lane.receiver.dead:
            network.send(lane, call, arguments)

    def reset(self, way: int, why: str) -> None:
        """Tell the receiver of a way that the wire is gone, after everything that was sent this way."""
        lane = self.ways[way]
        if not lane.ended:
            lane.ended = True
            self._network.send(lane, self._lose, (1 - way, why))

    def _lose(self, side: int, why: str) -> None:
        self.ways[side].ended = True
        self.on_lost(side, why)

    def drop(self, process: Endpoint, why: str) -> None:
        """End the side of a process that ends, with a word to the peer unless the process is silent."""
        for side, lane in enumerate(self.ways):
            if lane.sender is process:
                if process.is_silent:
                    lane.under_way.clear()
                else:
                    self.reset(side, why)
                self.ways[1 - side].under_way.clear()
                self.on_lost(side, "this process has ended")


class SimulatedNetwork:
    """The wires and addresses of a world.

    Args:
        hosts: the names of the machines.
        rng: decides the latency.
        latency: least and most seconds that something is under way.
        chance: decides the fate of datagrams.
        loss: the share of datagrams that are lost, 0 to 1.
    """

    def __init__(
        self,
        hosts: Iterable[str],
        rng: random.Random,
        latency: tuple[float, float],
        chance: random.Random,
        loss: float,
    ) -> None:
        self.hosts = dict.fromkeys(hosts, True)
        """The machines, and whether they have power."""
        self._random = rng
        self.latency = latency
        self.post = Post(self, chance, loss)
        """Carries datagrams."""
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._carrier: trio.lowlevel.Task | None = None
        """Runs `carry`, and waits; None: it does not wait."""
        self.changed = trio.lowlevel.ParkingLot()
        """Those that wait for an address to be within reach."""
        self.addresses = Addresses(self.changed)
        self._wires: dict[SimulatedWire, None] = {}
        self._cuts: dict[tuple[str, str], dict[object, bool]] = {}
        """The cuts of each way, and whether each is only for datagrams."""
        self._digest = blake2b(digest_size=16)
        self.sent = 0
        """Calls that were posted so far."""

    @property
    def digest(self) -> str:
        """A digest of everything that was sent so far, with its time."""
        return self._digest.hexdigest()

    def record(self, wire: int, way: int, call: Callable[..., None], arguments: tuple[object, ...]) -> None:
        """Add a call to the digest."""
        self.sent += 1
        digest = self._digest
        digest.update(f"{trio.current_time():.9f} {wire} {way} {call.__name__}".encode())
        for each in arguments:
            digest.update(each if isinstance(each, bytes | bytearray | memoryview) else type(each).__name__.encode())

    def record_datagram(self, source: tuple[str, int], destination: tuple[str, int], size: int) -> None:
        """Add a datagram to the digest, without its bytes: keys and signatures are random in each run."""
        self.sent += 1
        self._digest.update(f"{trio.current_time():.9f} {source} {destination} {size}".encode())

    # Time.

    def later(self, seconds: float, call: Callable[[], None]) -> None:
        """Call in so many seconds, outside all processes. Raises `ConfigurationError` for a time that is not 0 or later."""
        if not 0 <= seconds < inf:
            raise ConfigurationError(f"{seconds!r} seconds; wanted 0 or more")
        self._call_at(trio.current_time() + seconds, call)

    def _call_at(self, at: float, call: Callable[[], None]) -> None:
        heappush(self._heap, (at, next(self._numbers), call))

    def due(self) -> float:
        """Return the time of the next call, if `carry` waits for it."""
        return self._heap[0][0] if self._heap and self._carrier is not None else inf

    def wake(self) -> None:
        """Wake `carry`, which waits; the clock does it when a call is due. That is less work than a time-out for each call."""
        assert self._carrier is not None
        trio.lowlevel.reschedule(self._carrier)
        self._carrier = None

    async def carry(self) -> None:
        """Deliver everything in time, until cancelled."""
        heap = self._heap

        def abort(_: object) -> trio.lowlevel.Abort:
            self._carrier = None
            return trio.lowlevel.Abort.SUCCEEDED

        while True:
            while heap and heap[0][0] <= trio.current_time():
                heappop(heap)[2]()
            self._carrier = trio.lowlevel.current_task()
            await trio.lowlevel.wait_task_rescheduled(abort)

    # Wires.

    def wire(self, one: Endpoint, other: Endpoint) -> SimulatedWire:
        """Join two processes."""
        wire = SimulatedWire(self, next(self._numbers), (one, other))
        self._wires[wire] = None
        one.wires[wire] = other.wires[wire] = None
        return wire

    def forget(self, process: Endpoint, why: str) -> None:
        """Drop the wires and addresses of a process that ends."""
        for wire in list(process.wires):
            wire.drop(process, why)
            if all(way.sender.dead for way in wire.ways):
                self._wires.pop(wire, None)
        self.addresses.forget(process)

    def send(self, way: _Way, call: Callable[..., None], arguments: tuple[object, ...]) -> None:
        """Put a call under way."""
        at = trio.current_time() + self._random.uniform(*self.latency)
        if way.under_way:
            at = max(at, way.under_way[-1][0])
        way.under_way.append((at, call, arguments))
        self._look(way)

    def _look(self, way: _Way) -> None:
        if way.under_way and not way.due and not self.is_blocked(way.sender, way.receiver):
            way.due = True
            self._call_at(max(way.under_way[0][0], trio.current_time()), lambda: self._arrive(way))

    def _arrive(self, way: _Way) -> None:
        way.due = False
        if self.is_blocked(way.sender, way.receiver):
            return
        now, queue, receiver = trio.current_time(), way.under_way, way.receiver
        while queue and queue[0][0] <= now and not receiver.dead:
            _, call, arguments = queue.popleft()
            receiver.context.run(call, *arguments)
        if receiver.dead:
            queue.clear()
        self._look(way)

    # Faults.

    def is_blocked(self, sender: Endpoint, receiver: Endpoint) -> bool:
        """Return whether nothing arrives this way now."""
        return bool(sender.paused or receiver.paused) or self.is_cut(sender, receiver)

    def is_cut(self, sender: Endpoint, receiver: Endpoint, *, udp: bool = False) -> bool:
        """Return whether this way is cut; with `udp`, for datagrams."""
        cuts = self._cuts
        return bool(cuts) and any(
            udp or not only_udp
            for a in sender.names
            for b in receiver.names
            for only_udp in cuts.get((a, b), {}).values()
        )

    def cut(self, sender: str, receiver: str, *, only_udp: bool = False) -> Callable[[], None]:
        """Block what one machine or process sends to another, or only its datagrams; return what ends this cut, and no other."""
        cuts, this = self._cuts.setdefault((sender, receiver), {}), object()
        cuts[this] = only_udp

        def end() -> None:
            cuts.pop(this, None)
            self.look()

        return end

    def heal(self, sender: str, receiver: str) -> None:
        """End all cuts of a way."""
        self._cuts.pop((sender, receiver), None)
        self.look()

    def look(self) -> None:
        """Carry on where ways are no longer blocked."""
        for wire in list(self._wires):
            for way in wire.ways:
                self._look(way)
        self.post.look()
        self.changed.unpark_all()

    async def connect(self, process: Endpoint, kind: str, host: str, port: int) -> tuple[SimulatedWire, Any]:
        """Connect to an address, see `Network.connect`."""
        addresses = self.addresses
        address = addresses.find(process, kind, host, port)
        await trio.sleep(_HANDSHAKE * self._random.uniform(*self.latency))
        while True:
            listeners = addresses.listeners(address)
            if not listeners and not addresses.is_held(address) and self.hosts[address.machine]:
                raise OSError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
            near = [
                (listener, owner)
                for listener, owner in listeners
                if not (self.is_blocked(process, owner) or self.is_blocked(owner, process))
            ]
            if near:
                listener, owner = near[0] if len(near) == 1 else self._random.choice(near)
                return self.wire(process, owner), listener
            await self.changed.park()


@attrs.frozen(eq=False)
class NetworkOfProcess:
    """The network as a process sees it; a `levada.framework.platform.Network`."""

    _network: SimulatedNetwork
    _process: Endpoint

    def bind(self, kind: str, host: str, port: int, listener: Any) -> int:
        """Take an address, see `Network.bind`."""
        return self._network.addresses.bind(self._process, kind, host, port, listener)

    def release(self, kind: str, host: str, port: int) -> None:
        """Free an address, see `Network.release`."""
        self._network.addresses.release(self._process, kind, host, port)

    async def connect(self, kind: str, host: str, port: int) -> tuple[SimulatedWire, Any]:
        """Connect to an address, see `Network.connect`."""
        return await self._network.connect(self._process, kind, host, port)

    def resolve(self, host: str) -> str:
        """Return the name by which datagrams find a host, see `Network.resolve`."""
        return self._network.addresses.resolve(self._process, host)

    def datagrams(self, host: str, port: int) -> SimulatedDatagrams:
        """Open a socket for datagrams, see `Network.datagrams`."""
        return self._network.post.open(self._process, host, port)

    def share(self) -> SharedAddresses:
        """Share addresses, see `Network.share`."""
        return self._network.addresses.share(self._process)
