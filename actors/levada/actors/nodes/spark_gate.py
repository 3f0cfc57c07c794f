"""How the driver admits nodes that Spark starts: a listener that issues certificates, and a socket for heartbeats.

A node has the driver's addresses, the authority's certificate and the token of its run from the closure of its job. It

1. dials the driver, whose certificate must be signed by the authority, shows the token, sends `Certify` with its public key, and gets its
   own certificate;
2. connects to the socket for heartbeats, and shows the second token from that answer;
3. dials the fleet's listener with its certificate, and says `Hello`, as every node does.

A token is valid for one start of a process. If Spark starts the task of a run again, the new process is refused and the run counts as lost,
because Spark repeats a task only if it believes that the first one has ended. So only the driver decides when a node restarts.
"""

from __future__ import annotations

import hashlib
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial
from typing import Final, TypeVar

import attrs
import trio

from levada.actors.aqueduct import Listener, PeerConfig, serve
from levada.actors.authentication import Credentials, Refused
from levada.framework import ActorSystem, Identity, OneshotSender, current_peer, message
from levada.framework.embedding import UntracedMessage
from levada.framework.errors import ChannelError, ConfigurationError
from levada.framework.text import printable
from levada.transports.carriers.sockets import why_not_bound
from levada.transports.carriers.streams import accept_from, plain_nursery

from .certificates import Authority, Carrier, node_id_of

__all__ = [
    "CertificateRefused", "Certified", "Certify", "Gate", "Ticket", "listening_in", "member_url", "open_gate", "port_of",
]  # fmt: skip

TOKEN: Final = 32  # octets
HEART_TIMEOUT: Final = 5.0  # seconds for a new connection to show its token
UNPROVED: Final = 64  # the most connections that have not shown a token yet

T = TypeVar("T")


@message("levada.node.Certified", frozen=True)
class Certified:
    """A node's certificate."""

    certificate: bytes
    """PEM."""
    heart: bytes = attrs.field(repr=False)
    """The token for the socket of heartbeats."""


@message("levada.node.Refusal", frozen=True)
class CertificateRefused:
    """The driver issues no certificate to a node."""

    text: str


@message("levada.node.Certify")
class Certify(UntracedMessage):
    """A node that Spark has started asks for its certificate."""

    node_id: bytes
    public: bytes
    """`MemberKey.public`."""
    attempt: int
    """Spark's number of this attempt at the task, from 0."""
    answer: OneshotSender[Certified | CertificateRefused]


class Ticket:
    """Admits one process: its tokens, and its progress.

    Args:
        name: the name of its connection's identity (`levada.framework.Identity.name`).
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.token = secrets.token_hex(TOKEN).encode()  # in a header, which is text
        self.heart_token = secrets.token_bytes(TOKEN)
        self.node_id = b""
        """Empty until the process has its certificate."""
        self.heart: socket.socket | None = None
        """The connection for heartbeats, once there is one. The owner of this ticket closes it."""
        self.came = trio.Event()
        """Set with `heart`."""
        self.superseded = trio.Event()
        """Set when Spark has started the task again."""


def _digest(token: bytes) -> bytes:
    # Tokens are looked up by their digests, so the time of a look-up reveals nothing about them.
    return hashlib.sha256(token).digest()


class Gate:
    """Admits the processes that are expected. Made by `open_gate`."""

    def __init__(self, authority: Authority) -> None:
        self._authority = authority
        self._tickets: dict[bytes, Ticket] = {}
        self._hearts: dict[bytes, Ticket] = {}
        self._unproved = 0
        self.url = ""
        """The URL at which nodes get their certificates."""
        self.heart: tuple[str, int] = "", 0
        """Host and port of the socket for heartbeats."""

    @contextmanager
    def expect(self, name: str) -> Iterator[Ticket]:
        """While the block lasts, admit one process that shows the token of the ticket.

        Args:
            name: the name of its connection's identity.
        """
        ticket = Ticket(name)
        self._tickets[_digest(ticket.token)] = ticket
        try:
            yield ticket
        finally:
            del self._tickets[_digest(ticket.token)]
            self._hearts.pop(_digest(ticket.heart_token), None)

    async def by_token(self, credentials: Credentials) -> Identity | Refused:
        """Decide on a client that wants a certificate."""
        ticket = self._tickets.get(_digest(credentials.token))
        return Refused("No node is expected with this token.") if ticket is None else Identity(ticket.name)

    async def by_certificate(self, credentials: Credentials) -> Identity | Refused:
        """Decide on a client that has its certificate."""
        node_id = node_id_of(credentials.info.peer_names)
        for ticket in self._tickets.values():
            if node_id is not None and ticket.node_id == node_id:
                return Identity(ticket.name)
        return Refused("This node is no longer expected.")

    async def certify(self, m: Certify) -> None:
        """Answer a node."""
        with m.answer as answer:
            try:
                answer.send(self._decide(m))
            except ChannelError:
                pass  # the node has ended

    def _decide(self, m: Certify) -> Certified | CertificateRefused:
        peer = current_peer()
        name = "" if peer is None or peer.identity is None else peer.identity.name
        ticket = next((ticket for ticket in self._tickets.values() if ticket.name == name), None)
        if ticket is None:
            return CertificateRefused("this node is no longer expected")
        if ticket.node_id:
            ticket.superseded.set()
            return CertificateRefused(
                f"{name} was admitted before: the driver restarts nodes, not Spark (attempt {m.attempt})"
            )
        if len(m.node_id) != 16:
            return CertificateRefused(f"the node id has {len(m.node_id)} bytes, wanted 16")
        try:
            certificate = self._authority.sign(m.public, m.node_id)
        except ConfigurationError as error:
            return CertificateRefused(printable(str(error)))
        ticket.node_id = m.node_id
        self._hearts[_digest(ticket.heart_token)] = ticket
        return Certified(certificate, ticket.heart_token)

    async def take_heart(self, stream: trio.SocketStream) -> None:
        """Take a new connection for heartbeats, if it shows the token of a ticket."""
        if self._unproved >= UNPROVED:
            await stream.aclose()
            return
        self._unproved += 1
        async with stream:
            try:
                token = await _read(stream)
            finally:
                self._unproved -= 1
            ticket = self._hearts.pop(_digest(token), None)
            if ticket is not None:
                ticket.heart = socket.socket(fileno=stream.socket.detach())
                ticket.came.set()


async def _read(stream: trio.SocketStream) -> bytes:
    """Read a token. The result is shorter if the peer has left or is slow."""
    token = b""
    with trio.move_on_after(HEART_TIMEOUT):
        while len(token) < TOKEN:
            try:
                data = await stream.receive_some(TOKEN - len(token))
            except trio.BrokenResourceError:
                break
            if not data:
                break
            token += data
    return token


def member_url(carrier: Carrier, host: str, port: int) -> str:
    """Return the URL of a member.

    Example:
        >>> member_url("tls", "10.0.0.7", 4433), member_url("quic", "::1", 4433)
        ('aqueduct+tls://10.0.0.7:4433', 'aqueduct://[::1]:4433')
    """
    scheme = "aqueduct" if carrier == "quic" else f"aqueduct+{carrier}"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def port_of(url: str) -> int:
    """Return the port of a URL of `member_url`."""
    return int(url.rpartition(":")[2])


@asynccontextmanager
async def listening_in(ports: range, listen: Callable[[int], AbstractAsyncContextManager[T]]) -> AsyncIterator[T]:
    """Listen at the first free port of a range.

    Args:
        ports: the ports to try, in this order; ``range(1)``, which has only 0, is any free port.
        listen: listens at a port; raises `ConfigurationError` if it is taken.

    Raises:
        ConfigurationError: no port is free; the text has the range and the last error.
    """
    async with AsyncExitStack() as stack:
        for port in ports:
            try:
                found = await stack.enter_async_context(listen(port))
            except ConfigurationError as error:
                if port != ports[-1]:
                    continue
                if len(ports) == 1:
                    raise
                raise ConfigurationError(
                    f"no port from {ports[0]} to {ports[-1]} is free: give `ports` a larger range; the last error: {error}"
                ) from error
            yield found
            return


@asynccontextmanager
async def _heart_listener(host: str, port: int) -> AsyncIterator[trio.SocketListener]:
    try:
        listener, *others = await trio.open_tcp_listeners(port, host=host)
    except OSError as error:
        raise ConfigurationError(f"cannot listen at {host}:{port}: {why_not_bound(error)}") from error
    for other in others:  # a name may have several addresses, and the nodes get one
        other.socket.close()
    async with listener:
        yield listener


@asynccontextmanager
async def open_gate(
    system: ActorSystem, authority: Authority, config: PeerConfig, carrier: Carrier, host: str, bind: str, ports: range
) -> AsyncIterator[Gate]:
    """Listen for nodes while the block lasts.

    Args:
        system: the driver's system.
        authority: signs the certificates of the fleet.
        config: the settings of connections, with the driver's certificate.
        carrier: the carrier of the connections for certificates.
        host: the driver's name or address, as nodes reach it.
        bind: the name or address to listen at.
        ports: the ports to try, see `listening_in`.

    Raises:
        ConfigurationError: no port is free, or the address is not one of this machine.
    """
    gate = Gate(authority)

    def listen(port: int) -> AbstractAsyncContextManager[Listener]:
        url = member_url(carrier, bind, port)
        return serve(system, url, gate.certify, Certify, authenticate=gate.by_token, config=config)

    async with (
        listening_in(ports, listen) as listener,
        listening_in(ports, partial(_heart_listener, bind)) as heart,
        plain_nursery() as nursery,
    ):

        async def take_in(stream: trio.SocketStream) -> None:
            nursery.start_soon(gate.take_heart, stream)

        nursery.start_soon(accept_from, heart, take_in)
        gate.url = member_url(carrier, host, port_of(listener.url))
        gate.heart = host, heart.socket.getsockname()[1]
        yield gate
        nursery.cancel_scope.cancel()
