"""The interface between an endpoint and the network, and its implementation with a UDP socket.

A `DatagramPort` moves datagrams and knows nothing of QUIC. Worlds and tests have implementations of their own.
"""

from __future__ import annotations

import errno
import socket
import struct
import sys
from collections.abc import Sequence
from typing import Any, Final, Protocol

import trio

from levada.framework.platform import Datagrams

__all__ = ["Address", "DatagramPort", "SharedUdpPort", "UdpPort", "authority"]

Address = Any
"""A socket address as the system gives it: ``(host, port)`` or ``(host, port, flow, scope)``."""

RECEIVE_BURST: Final = 64  # most reads of a call, after which other tasks get a turn
_SINGLES: Final = 7  # calls that read only once, after a call that found a single datagram
_SOL_UDP: Final = 17
_UDP_SEGMENT: Final = 103
_UDP_GRO: Final = 104
_IP_MTU_DISCOVER: Final = 10
_IPV6_MTU_DISCOVER: Final = 23
_PMTUDISC_PROBE: Final = 3  # set "don't fragment", and ignore the kernel's own estimate of the path MTU
_GSO_SEGMENTS: Final = 44
_GSO_BYTES: Final = 65_000
_GSO_PACKET: Final = 1_500  # larger packets gain nothing from being grouped
_LARGEST: Final = 65_535


class DatagramPort(Datagrams, Protocol):
    """An unreliable network, seen from one address."""


def authority(address: Address) -> str:
    """Write a socket address as in a URL.

    >>> authority(("127.0.0.1", 4433)), authority(("::1", 4433, 0, 0))
    ('127.0.0.1:4433', '[::1]:4433')
    """
    host, port = address[0], address[1]
    return f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"


class UdpPort:
    """A UDP socket. Groups of packets go to and from the kernel in one call if it supports this (GSO and GRO save 3 us of a packet's 45)."""

    def __init__(self, sock: socket.socket, *, gso: bool = True, gro: bool = True, buffer: int = 4 << 20):
        sock.setblocking(False)
        self._socket = sock
        self._linux = sys.platform == "linux"
        self.gso = gso and self._linux
        """Whether groups are sent. It stays false once the kernel has refused a group for another reason than its size."""
        self.gro = False
        """Whether groups are received."""
        self._singles = 0
        for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, buffer)
        if gro and self._linux:
            try:
                sock.setsockopt(_SOL_UDP, _UDP_GRO, 1)
                self.gro = True
            except OSError:
                pass
        self._ancillary_size = socket.CMSG_SPACE(4) if self.gro else 0
        if self._linux:
            try:
                if sock.family == socket.AF_INET6:
                    sock.setsockopt(socket.IPPROTO_IPV6, _IPV6_MTU_DISCOVER, _PMTUDISC_PROBE)
                else:
                    sock.setsockopt(socket.IPPROTO_IP, _IP_MTU_DISCOVER, _PMTUDISC_PROBE)
            except OSError:
                pass  # routers may then fragment packets: path MTU discovery finds too large a size, and packets still arrive

    @classmethod
    def bind(cls, address: Address, **options: Any) -> UdpPort:
        """Open a socket at a numeric address, with port 0 for any free one; `options` are those of the class."""
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_DGRAM)
        try:
            sock.bind(address)
            return cls(sock, **options)
        except BaseException:
            sock.close()
            raise

    @property
    def address(self) -> Address:
        """The local address, with the real port."""
        return self._socket.getsockname()

    async def receive(self) -> list[tuple[bytes, Address]]:
        """Wait for datagrams, and take as many as up to 64 reads return."""
        await trio.lowlevel.wait_readable(self._socket)
        received: list[tuple[bytes, Address]] = []
        for _ in range(1 if self._singles else RECEIVE_BURST):
            try:
                data, ancillary, _flags, address = self._socket.recvmsg(_LARGEST, self._ancillary_size)
            except BlockingIOError:
                break
            except OSError:
                continue  # an error of an earlier send; loss recovery handles it
            size = len(data)
            for _level, kind, value in ancillary:
                if kind == _UDP_GRO:
                    size = int.from_bytes(value[:4], sys.byteorder)
            if size >= len(data):
                received.append((data, address))
            else:
                received += [(data[at : at + size], address) for at in range(0, len(data), size)]
        # To find out that there is no second datagram costs 3 us. While datagrams come singly, only every eighth call tries; the next call takes
        # a second datagram at once.
        if len(received) != 1:
            self._singles = 0
        else:
            self._singles = self._singles - 1 if self._singles else _SINGLES
        return received

    def send(self, datagrams: Sequence[tuple[bytes, Address]]) -> int:
        """Send without waiting. Datagrams that the system refuses for good count as sent, and are lost."""
        at, count = 0, len(datagrams)
        while at < count:
            data, address = datagrams[at]
            end = self._group_end(datagrams, at) if self.gso and count - at > 1 else at + 1
            try:
                if end == at + 1:
                    self._socket.sendto(data, address)
                else:
                    group = [encoded for encoded, _ in datagrams[at:end]]
                    self._socket.sendmsg(group, [(_SOL_UDP, _UDP_SEGMENT, struct.pack("H", len(data)))], 0, address)
            except BlockingIOError:
                return at
            except OSError as error:
                if end > at + 1 and error.errno in (
                    errno.EIO,
                    errno.EINVAL,
                    errno.EMSGSIZE,
                    errno.ENOPROTOOPT,
                    errno.EOPNOTSUPP,
                ):
                    self.gso = error.errno == errno.EMSGSIZE
                    end = at + self._send_singly(datagrams[at:end])
            at = end
        return count

    def _send_singly(self, datagrams: Sequence[tuple[bytes, Address]]) -> int:
        for at, (data, address) in enumerate(datagrams):
            try:
                self._socket.sendto(data, address)
            except BlockingIOError:
                return at
            except OSError:
                pass  # too large, no route, refused: lost
        return len(datagrams)

    @staticmethod
    def _group_end(datagrams: Sequence[tuple[bytes, Address]], at: int) -> int:
        """Return the end of the group that starts at `at`: datagrams to one address, of one size except for a smaller last one."""
        data, address = datagrams[at]
        size = total = len(data)
        end = at + 1
        if size > _GSO_PACKET:
            return end
        limit = min(len(datagrams), at + _GSO_SEGMENTS)
        while end < limit:
            encoded, to = datagrams[end]
            length = len(encoded)
            if to != address or length > size or total + length > _GSO_BYTES:
                break
            total += length
            end += 1
            if length < size:
                break
        return end

    async def writable(self) -> None:
        """Wait until the socket accepts more datagrams."""
        await trio.lowlevel.wait_writable(self._socket)

    def close(self) -> None:
        """Close the socket."""
        if self._socket.fileno() >= 0:
            trio.lowlevel.notify_closing(self._socket)
            self._socket.close()


class SharedUdpPort(UdpPort):
    """A UDP socket that several processes share, and one of them reads: it receives nothing before this process's turn.

    Args:
        sock: the UDP socket.
        turn: a socket that is readable once it is this process's turn; closing it ends the turn.
        options: as for `UdpPort`.
    """

    def __init__(self, sock: socket.socket, turn: socket.socket, **options: Any) -> None:
        super().__init__(sock, **options)
        turn.setblocking(False)
        self._turn = turn
        self._reads = False

    async def receive(self) -> list[tuple[bytes, Address]]:
        """Wait for the turn of this process, then for datagrams."""
        if not self._reads:
            await trio.lowlevel.wait_readable(self._turn)
            self._reads = True
        return await super().receive()

    def close(self) -> None:
        """Close the socket and end the turn."""
        super().close()
        if self._turn.fileno() >= 0:
            trio.lowlevel.notify_closing(self._turn)
            self._turn.close()
