"""How the nodes that Spark starts come in: the driver's listener for certificates, and its socket for heartbeats.

A node knows the driver's addresses, the authority's certificate and the token of its run; all three are in the closure of its job. It

1. dials the driver, whose certificate must be this authority's, shows the token, sends `Certify` with its public key, and gets its own
   certificate;
2. opens the socket for heartbeats, and shows there the second token from that answer;
3. dials the fleet's listener with its certificate, and says `Hello`, as every node does.

A token is good for one start of a process. If Spark starts the task of a run again, the newer process is refused, and the run counts as
lost: Spark starts no task twice while it believes the first to be alive. So the driver alone decides when a node starts again.
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
from levada.framework.errors import ChannelError, ConfigurationError
from levada.transports.carriers.streams import plain_nursery
from levada.transports.text import printable

from .certificates import Authority, Carrier, node_id_of

__all__ = ["Certified", "Certify", "Gate", "Refusal", "Ticket", "listening_in", "member_url", "open_gate", "port_of"]

TOKEN: Final = 32  # octets
HEART_TIMEOUT: Final = 5.0  # seconds for a new connection to show its token
UNPROVED: Final = 64  # most connections that have shown no token yet

T = TypeVar("T")


@message("levada.node.Certified", frozen=True)
class Certified:
    """A node's certificate."""

    certificate: bytes
    """PEM."""
    heart: bytes = attrs.field(repr=False)
    """The token for the socket of heartbeats."""


@message("levada.node.Refusal", frozen=True)
class Refusal:
    """A node gets no certificate."""

    text: str


@message("levada.node.Certify")
class Certify:
    """A node that Spark has started asks for its certificate."""

    node_id: bytes
    public: bytes
    """`MemberKey.public`."""
    attempt: int
    """Spark's number for this try of the task, from 0."""
    answer: OneshotSender[Certified | Refusal]


class Ticket:
    """Lets one process in: what it has to show, and how far it is.

    Args:
        name: the identity of its connection (`levada.framework.Identity.name`).
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.token = secrets.token_hex(TOKEN).encode()  # in a header, which is text
        self.heart_token = secrets.token_bytes(TOKEN)
        self.node_id = b""
        """Empty until the process has its certificate."""
        self.heart: socket.socket | None = None
        """The connection for heartbeats, once there is one; belongs to the owner of this ticket."""
        self.came = trio.Event()
        """Set with `heart`."""
        self.superseded = trio.Event()
        """Set when Spark has started the task again."""


def _digest(token: bytes) -> bytes:
    # Tokens are looked up by digest, not compared, so the time of a look-up tells nothing about them.
    return hashlib.sha256(token).digest()


class Gate:
    """Lets the processes in that are expected. Comes from `open_gate`."""

    def __init__(self, authority: Authority) -> None:
        self._authority = authority
        self._tickets: dict[bytes, Ticket] = {}
        self._hearts: dict[bytes, Ticket] = {}
        self._unproved = 0
        self.url = ""
        """Where nodes get their certificates."""
        self.heart: tuple[str, int] = "", 0
        """Host and port of the socket for heartbeats."""

    @contextmanager
    def expect(self, name: str) -> Iterator[Ticket]:
        """Let one process in that shows the token of the ticket, within a block.

        Args:
            name: the identity of its connection.
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
        return Refused("This node is not expected any more.")

    async def certify(self, m: Certify) -> None:
        """Answer a node."""
        with m.answer as answer:
            try:
                answer.send(self._decide(m))
            except ChannelError:
                pass  # the node has gone

    def _decide(self, m: Certify) -> Certified | Refusal:
        peer = current_peer()
        name = "" if peer is None or peer.identity is None else peer.identity.name
        ticket = next((ticket for ticket in self._tickets.values() if ticket.name == name), None)
        if ticket is None:
            return Refusal("this node is not expected any more")
        if ticket.node_id:
            ticket.superseded.set()
            return Refusal(f"{name} has come before: its driver starts nodes again, not Spark (attempt {m.attempt})")
        if len(m.node_id) != 16:
            return Refusal(f"a node id has 16 bytes, not {len(m.node_id)}")
        try:
            certificate = self._authority.sign(m.public, m.node_id)
        except ConfigurationError as error:
            return Refusal(printable(str(error)))
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
    """Read a token; less if the peer is gone or slow."""
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
    """Listen at the first free port of some.

    Args:
        ports: in this order; ``range(1)``, which has only 0, is any free port.
        listen: listens at a port; raises `ConfigurationError` if it is taken.

    Raises:
        ConfigurationError: the last port's error, with the whole range.
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
        [listener, *_] = await trio.open_tcp_listeners(port, host=host)
    except OSError as error:
        raise ConfigurationError(f"cannot listen at {host}:{port}: {error}") from error
    async with listener:
        yield listener


@asynccontextmanager
async def open_gate(
    system: ActorSystem, authority: Authority, config: PeerConfig, carrier: Carrier, host: str, bind: str, ports: range
) -> AsyncIterator[Gate]:
    """Listen for nodes within a block.

    Args:
        system: of the driver.
        authority: of the fleet.
        config: with the driver's certificate.
        carrier: for certificates.
        host: the driver's name or address, as the nodes reach it.
        bind: name or address to listen at.
        ports: to listen at, see `listening_in`.

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
        nursery.start_soon(trio.serve_listeners, gate.take_heart, [heart])
        gate.url = member_url(carrier, host, port_of(listener.url))
        gate.heart = host, heart.socket.getsockname()[1]
        yield gate
        nursery.cancel_scope.cancel()
