"""`Peer`: a program's handle of a connection."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, overload

import attrs
import trio

from levada.framework import Identity, Reason, Ref, Sender, oneshot
from levada.framework.channel import Receipt
from levada.framework.errors import AskTimeout, ConfigurationError, NameUnknown
from levada.framework.ref import DEFAULT_TIMEOUT, check_timeout
from levada.transports.aqueduct import Headers
from levada.transports.carriers import CarrierInfo, CarrierStatistics

from .name_lookup import Lookup
from .raw import RawMessage

if TYPE_CHECKING:
    from .connection import AqueductDriver

__all__ = ["ConnectionStatistics", "Peer"]

T = TypeVar("T")
M = TypeVar("M")


@attrs.frozen(kw_only=True)
class ConnectionStatistics:
    """Counters of one connection; plain numbers, a snapshot."""

    channels: int
    """Halves of channels on this side that have not ended; the entrypoint is one."""
    unclaimed: int
    """Channels that ended before the message with them arrived."""
    tombstones: int
    """Channels that have ended here although the peer's program may still get the other half."""
    streams: int
    """Streams of the carrier in use."""
    messages_sent: int
    """Messages given to the protocol."""
    messages_received: int
    """Messages taken from the protocol."""
    messages_undelivered: int
    """Sent messages that did not arrive, as this side knows."""
    datagrams_dropped: int
    """Datagrams dropped because this side's carrier had no room for them."""
    bytes_held: int
    """Bytes that have arrived and wait for the program."""
    turns: int
    """How often outputs were taken from the core and passed to the carrier."""
    carrier: CarrierStatistics | None
    """Counters of the carrier; ``None`` if there is none."""


class Peer(Generic[T]):
    """The other side of a connection, as `connect` and `Listener.peers` return it."""

    def __init__(self, connection: AqueductDriver) -> None:
        self._connection = connection

    @property
    def entry(self) -> Sender[T]:
        """Sends to the server's handler; all other channels travel inside these messages.

        Raises:
            ConfigurationError: a server has no entrypoint to send to.
        """
        if self._connection.entrance is None:
            raise ConfigurationError(
                "only a client has an entrypoint to send to; a server answers on the senders that it gets"
            )
        return self._connection.entrance

    @overload
    async def send(self, message: T, *, receipt: Literal[False] = False) -> None: ...

    @overload
    async def send(self, message: T, *, receipt: Literal[True]) -> Receipt: ...

    async def send(self, message: T, *, receipt: bool = False) -> Receipt | None:
        """Send a message to the server's handler: ``peer.entry.send``.

        Cancellation:
            the message was not sent, and its handles still belong to this side.
        """
        if receipt:
            return await self.entry.send(message, receipt=True)
        await self.entry.send(message)
        return None

    @property
    def headers(self) -> Headers:
        """The connection headers of the peer; empty until it has greeted."""
        return self._connection.core.peer_headers or ()

    @property
    def info(self) -> CarrierInfo:
        """The peer's address and identity, as the carrier knows them."""
        info = self._connection.info
        assert info is not None
        return info

    @property
    def identity(self) -> Identity | None:
        """Who the client is, if the listener has an ``authenticate`` hook; None for a server."""
        return self._connection.identity

    @property
    def closed(self) -> bool:
        """Whether the connection has ended."""
        return self._connection.end is not None

    def statistics(self) -> ConnectionStatistics:
        """Return the counters as they are now."""
        connection = self._connection
        core, halves = connection.core, connection.halves
        return ConnectionStatistics(
            channels=len(core.halves),
            unclaimed=len(core.unclaimed),
            tombstones=len(core.links.tombstones),
            streams=connection.stream_count,
            messages_sent=halves.sent,
            messages_received=halves.received,
            messages_undelivered=halves.undelivered,
            datagrams_dropped=connection.datagrams_dropped,
            bytes_held=core.held,
            turns=connection.turns,
            carrier=connection.carrier_statistics(),
        )

    @overload
    async def lookup(self, name: str, message_type: type[M], *, timeout: float | None = DEFAULT_TIMEOUT) -> Ref[M]: ...

    @overload
    async def lookup(
        self, name: str, message_type: Any = Any, *, timeout: float | None = DEFAULT_TIMEOUT
    ) -> Ref[Any]: ...

    async def lookup(self, name: str, message_type: Any = Any, *, timeout: float | None = DEFAULT_TIMEOUT) -> Ref[Any]:
        """Find an actor that the peer exposes (``serve(…, expose=…)``, ``connect(…, expose=…)``).

        A server knows the names that a client exposes before the first message of that client reaches its handler.

        Args:
            name: the name of the actor in the peer's `ActorSystem.registry`.
            message_type: type of the messages that the actor handles; for type checkers only.
            timeout: seconds; ``None`` for no limit; by default the system's ``ask_timeout``.

        Raises:
            NameUnknown: the peer exposes no living actor of this name.
            AskTimeout: the peer did not answer in time.
            ConfigurationError: the messages of the connection are `RawMessage`, or `timeout` is not a number of seconds, 0 or more.
            ChannelError: the entrypoint was finished, the server's handler has closed it, or the connection is closing.
            ChannelConnectionLost: the connection was lost.

        Cancellation:
            only the waiting ends.
        """
        connection = self._connection
        if connection.item_type is RawMessage:
            raise ConfigurationError("a connection of RawMessage has no names to look up")
        check_timeout(timeout)
        seconds = connection.system.ask_timeout if timeout is DEFAULT_TIMEOUT else timeout
        if connection.lookups is None:
            raise NameUnknown(f"{self.info.peer} exposes no actors", name=name)
        item: Any = Ref[Any] | None
        found, answer = oneshot(item, name=f"lookup of {name}")
        with trio.move_on_after(math.inf if seconds is None else seconds):
            with answer, found:
                await connection.lookups.send(Lookup(name, found))
                ref: Ref[Any] | None = await answer
            if ref is None:
                raise NameUnknown(f"{self.info.peer} exposes no actor named {name!r}", name=name)
            return ref
        raise AskTimeout(
            f"{self.info.peer} did not answer the lookup of {name!r} in {seconds:g} s", seconds=seconds or 0.0
        )

    async def greeted(self) -> None:
        """Wait until the server has greeted. Useful with `PeerConfig.early` only: otherwise `connect` waits for it.

        Raises:
            ConnectionLost: the server does not answer, is not the expected one, or does not speak this protocol.

        Cancellation:
            only the waiting ends.
        """
        await self._connection.welcome.wait()
        if self._connection.unwelcome is not None:
            raise self._connection.unwelcome

    async def aclose(self) -> None:
        """Finish the entrypoint, wait up to `AqueductConfig.drain_timeout` seconds until open channels have ended, then close.

        Cancellation:
            closed at once.
        """
        await self._connection.aclose()

    def abort(self) -> None:
        """Close at once: open channels end with `ChannelConnectionLost` on both sides."""
        self._connection.shut()

    async def terminated(self) -> Reason:
        """Wait for the end of the connection and return the reason.

        Returns:
            `Normal` if this side closed it in order, `Lost` if the peer or the network ended it.

        Cancellation:
            only the waiting ends.
        """
        return await self._connection.ref.terminated()
