"""Datagrams of a simulated world: each takes its own time, so they overtake each other, and each may be lost.

A datagram is lost when it arrives at a cut, at a machine without power, at an address that no process has, or at a full buffer. It waits while
a process at one of its ends is paused. No process learns that a datagram was lost, or that the process at the other end has ended.

An address is a host and a port. The host is that by which the receiver reaches the sender: the name of its machine, or on the same machine the
host that was sent to, such as ``127.0.0.1``.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

import trio

from .addresses import HERE, Address, Endpoint

if TYPE_CHECKING:
    from .network import SimulatedNetwork

__all__ = ["Post", "SimulatedDatagrams"]

_MTU: Final = 1_472
"""The most bytes of a datagram between machines: Ethernet's 1,500 without the headers of IP and UDP."""
_LARGEST: Final = 65_507
"""The same on one machine."""
_BUFFER: Final = 4_096
"""Datagrams that a socket keeps, and that wait for the end of pauses."""


class SimulatedDatagrams:
    """A socket of a process for datagrams; a `levada.framework.platform.Datagrams`."""

    def __init__(self, post: Post, process: Endpoint) -> None:
        self.process = process
        self.address: tuple[str, int] = "", 0
        """The host and the port, once it is bound."""
        self._post = post
        self._arrived: deque[tuple[bytes, tuple[str, int]]] = deque()
        self._waiting = trio.lowlevel.ParkingLot()
        self._closed = False

    async def receive(self) -> list[tuple[bytes, tuple[str, int]]]:
        """Wait for datagrams and take those that have arrived, see `Datagrams.receive`."""
        await trio.lowlevel.checkpoint()  # before any is taken
        while not self._arrived and not self._closed:
            await self._waiting.park()
        if self._closed:
            raise trio.ClosedResourceError
        taken = list(self._arrived)
        self._arrived.clear()
        return taken

    def send(self, datagrams: Sequence[tuple[bytes, tuple[str, int]]]) -> int:
        """Send each to its address: the network accepts all of them."""
        if not self._closed:
            for data, (host, port) in datagrams:
                self._post.send(self, host, port, data)
        return len(datagrams)

    async def writable(self) -> None:
        """Return at once."""
        await trio.lowlevel.checkpoint()

    def close(self) -> None:
        """Free the address; datagrams under way to it are lost."""
        self._closed = True
        self._post.close(self)
        self._waiting.unpark_all()

    def arrive(self, data: bytes, source: tuple[str, int]) -> None:
        """Take a datagram, unless the buffer is full."""
        if len(self._arrived) < _BUFFER:
            self._arrived.append((data, source))
            self._waiting.unpark_all()


class Post:
    """Carries the datagrams of a world.

    Args:
        network: knows the addresses, the cuts, and the time.
        rng: decides how long each datagram takes, and which are lost.
        loss: the share that is lost, 0 to 1.
    """

    def __init__(self, network: SimulatedNetwork, rng: random.Random, loss: float) -> None:
        self._network = network
        self._random = rng
        self.loss = loss
        self._held: deque[partial[None]] = deque(maxlen=_BUFFER)

    def open(self, process: Endpoint, host: str, port: int) -> SimulatedDatagrams:
        """Open a socket, see `Network.datagrams`."""
        host = host or "0.0.0.0"
        socket = SimulatedDatagrams(self, process)
        socket.address = host, self._network.addresses.bind(process, "udp", host, port, socket)
        return socket

    def close(self, socket: SimulatedDatagrams) -> None:
        """Free the address of a socket."""
        self._network.addresses.release(socket.process, "udp", *socket.address)

    def send(self, socket: SimulatedDatagrams, host: str, port: int, data: bytes) -> None:
        """Put a datagram under way, or lose it."""
        sender, network = socket.process, self._network
        if sender.dead:
            return
        own = sender.host
        source = (host if host in HERE else own), socket.address[1]
        target = Address(own if host in HERE else host, "udp", "", port)
        network.record_datagram(source, (host, port), len(data))
        lost = self._random.random() < self.loss
        seconds = self._random.uniform(*network.latency)
        if not lost and len(data) <= (_LARGEST if target.machine == own else _MTU):
            network.later(seconds, partial(self._arrive, sender, source, target, data))

    def _arrive(self, sender: Endpoint, source: tuple[str, int], target: Address, data: bytes) -> None:
        listeners = self._network.addresses.listeners(target)
        if not listeners:
            return
        socket, receiver = listeners[0]  # the one whose turn it is
        if sender.paused or receiver.paused:
            self._held.append(partial(self._arrive, sender, source, target, data))
        elif not self._network.is_cut(sender, receiver, udp=True):
            receiver.context.run(socket.arrive, data, source)

    def look(self) -> None:
        """Carry on after a pause."""
        for _ in range(len(self._held)):
            self._held.popleft()()
