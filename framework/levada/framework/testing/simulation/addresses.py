"""The addresses of a simulated world: which process listens where, and which processes share an address.

Processes with the same `SharedAddresses` may listen at one address. A peer that connects comes to one of them by chance; datagrams come
to the one whose socket is the oldest. Such an address is held while the process that shares it lives: as long as none listens, peers wait. Sockets
of Unix are held by their listeners only, since the nodes of a fleet have some of their own.

The order of calls distinguishes listeners on port 0: the k-th of each process at a host has the k-th port.
"""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Mapping
from contextvars import Context, ContextVar
from itertools import count
from typing import Any, Final, NamedTuple

import trio

__all__ = ["HERE", "PROCESS", "Address", "Addresses", "Endpoint", "SharedAddresses"]

HERE: Final = frozenset({"localhost", "127.0.0.1", "::1"})
"""Names of the machine of the process that uses them."""
_ANY: Final = frozenset({"0.0.0.0", "::", ""})
_FIRST_PORT: Final = 49152  # RFC 6335, section 6: the first port that is chosen for a program


class Address(NamedTuple):
    """Where a process listens."""

    machine: str
    kind: str
    path: str
    """With ``"unix"``; otherwise empty."""
    port: int


class Endpoint:
    """A process, as the network sees it.

    Args:
        name: its name.
        host: the name of its machine.
        hosts: the names of all machines, and whether they have power.
        shares: the addresses that it shares with other processes.
    """

    def __init__(self, name: str, host: str, hosts: Mapping[str, bool], shares: SharedAddresses | None) -> None:
        self.name = name
        self.host = host
        self.hosts = hosts
        self.shares = shares
        self.names = (name, host)
        self.context = Context()
        """What arrives is taken in it."""
        self.wires: dict[Any, None] = {}
        self.dead = False
        """Whether nothing of it has an effect any more."""
        self.paused = 0
        """How many pauses are under way."""

    @property
    def is_silent(self) -> bool:
        """Whether peers do not learn of its end."""
        return not self.hosts[self.host]


PROCESS: Final[ContextVar[Endpoint | None]] = ContextVar("levada_simulated_process", default=None)
"""The process that runs here; None in the scenario itself."""


class SharedAddresses:
    """Addresses that processes share; a `levada.framework.platform.Shares`, made by `Addresses.share`."""

    def __init__(self, addresses: Addresses, owner: Endpoint) -> None:
        self.owner = owner
        self.closed = False
        self.ports: dict[tuple[str, str, int], int] = {}
        """By kind, host, and number in the order of a process's calls with port 0."""
        self.held: set[Address] = set()
        """Addresses that are not free while none listens."""
        self._addresses = addresses

    def close(self) -> None:
        """Share no more: an address is free once none listens there."""
        self.closed = True
        self.held.clear()
        self._addresses.changed.unpark_all()


class Addresses:
    """Which processes listen where.

    Args:
        changed: is woken when an address has another listener, or is free.
    """

    def __init__(self, changed: trio.lowlevel.ParkingLot) -> None:
        self.changed = changed
        self._listeners: dict[Address, list[tuple[Any, Endpoint]]] = {}
        self._shared: list[SharedAddresses] = []
        self._asked: Counter[tuple[Endpoint, str, str]] = Counter()

    def find(self, process: Endpoint, kind: str, host: str, port: int) -> Address:
        """Return the address that a process means.

        Raises:
            OSError: there is no such host.
        """
        if kind == "unix":
            return Address(process.host, kind, host, 0)
        return Address(process.host if host in HERE else _machine(process, host), kind, "", port)

    def resolve(self, process: Endpoint, host: str) -> str:
        """Return the name by which datagrams find a host, see `Network.resolve`."""
        if host in HERE:
            return "127.0.0.1" if host == "localhost" else host
        return _machine(process, host)

    def share(self, owner: Endpoint) -> SharedAddresses:
        """Share addresses among processes, for as long as their owner lives."""
        shared = SharedAddresses(self, owner)
        self._shared.append(shared)
        return shared

    def listeners(self, address: Address) -> list[tuple[Any, Endpoint]]:
        """Return the listeners at an address with their processes, the oldest first."""
        return [(listener, process) for listener, process in self._listeners.get(address, ()) if not process.dead]

    def is_held(self, address: Address) -> bool:
        """Return whether an address is taken though none listens there."""
        return any(address in shared.held for shared in self._shared)

    def bind(self, process: Endpoint, kind: str, host: str, port: int, listener: Any) -> int:
        """Take an address, see `Network.bind`."""
        machine, shares = process.host, process.shares
        if shares is not None and shares.closed:
            raise OSError(errno.ECANCELED, "the server is ending")
        if kind == "unix":
            address = Address(machine, kind, host, 0)
        else:
            if host.lower() not in HERE | _ANY | {machine.lower()}:
                raise OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))
            address = Address(machine, kind, "", port or self._port(process, kind, host))
        held = self.is_held(address) and (shares is None or address not in shares.held)
        if held or any(
            shares is None or owner.shares is not shares or owner is process for _, owner in self.listeners(address)
        ):
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        if shares is not None and kind != "unix":
            shares.held.add(address)
        self._listeners.setdefault(address, []).append((listener, process))
        self.changed.unpark_all()
        return address.port

    def _port(self, process: Endpoint, kind: str, host: str) -> int:
        """Choose a port."""
        key = kind, host, self._asked[process, kind, host]
        self._asked[process, kind, host] += 1
        ports = {} if process.shares is None else process.shares.ports
        if key in ports:
            return ports[key]
        here = (Address(process.host, kind, "", free) for free in count(_FIRST_PORT))
        port = next(each.port for each in here if not self.listeners(each) and not self.is_held(each))
        ports[key] = port
        return port

    def release(self, process: Endpoint, kind: str, host: str, port: int) -> None:
        """Free an address."""
        address = Address(process.host, kind, host if kind == "unix" else "", port)
        self._keep(address, [each for each in self._listeners.get(address, ()) if each[1] is not process])

    def forget(self, process: Endpoint) -> None:
        """Free the addresses of a process that ends."""
        for address, listeners in list(self._listeners.items()):
            self._keep(address, [each for each in listeners if each[1] is not process])
        for key in [key for key in self._asked if key[0] is process]:
            del self._asked[key]
        for shared in [shared for shared in self._shared if shared.owner is process]:
            self._shared.remove(shared)
            shared.close()

    def _keep(self, address: Address, listeners: list[tuple[Any, Endpoint]]) -> None:
        if listeners:
            self._listeners[address] = listeners
        else:
            self._listeners.pop(address, None)


def _machine(process: Endpoint, host: str) -> str:
    """Return the name of a machine. As in the DNS, the case of letters says nothing, and URLs have small ones."""
    for name in process.hosts:
        if name.lower() == host.lower():
            return name
    raise OSError(errno.EHOSTUNREACH, f"no machine has the name {host!r}")
