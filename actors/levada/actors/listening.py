"""What protocols over connections do alike: listen, make a connection of each carrier that comes, bound their number, end.

A protocol derives from `Acceptor` and says how it listens and what a connection is, and from `ListenerHandle`, which is what its
``serve`` gives.  A connection is an actor with ``aclose``; it enters itself into `Acceptor.connections` when its client has been
let in, and takes itself out at its end.  It holds its place from before it is accepted until its actor has ended, so
that clients that never say anything are bounded too.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Final, Generic, Protocol, TypeVar

import trio

from levada.framework import Actor, Reason, Ref
from levada.framework.errors import ActorStopped, CarrierError, ConfigurationError, LevadaError
from levada.transports.carriers import ByteStream, Incoming, Listener, MessageStream

from .driver import Driver

__all__ = ["Accepted", "Acceptor", "ListenerHandle", "closing", "refuse"]

HURRY: Final = 1.0
"""Seconds for the last octets of a connection that is closed by an exception or a cancellation."""

Accepted = ByteStream | MessageStream | Incoming
"""What a listener of any carrier hands over."""


class _Closes(Protocol):
    @property
    def aclose(self) -> Callable[[], Awaitable[None]]: ...


class _Shuts(Protocol):
    def shut(self) -> None: ...


C = TypeVar("C", bound=_Closes)
A = TypeVar("A", bound="Acceptor[Any]")


class Acceptor(Actor[Any], Generic[C]):
    """Accepts carriers and makes a connection of each."""

    def __attrs_post_init__(self) -> None:
        self.url = ""
        self.connections: dict[Any, None] = {}
        """Those whose client was let in."""
        self._places = trio.CapacityLimiter(self.max_connections)
        self._accepting = trio.CancelScope()
        self._opened = trio.Event()
        self._refusal: LevadaError | OSError | None = None
        self._forget_end: Callable[[], None] = lambda: None
        self._listener: Any = None

    @property
    def max_connections(self) -> int:
        """How many there may be; while there are so many, no more are accepted from the carrier."""
        raise NotImplementedError

    def listening(self) -> AbstractAsyncContextManager[Listener[Any]]:
        """Listen at a carrier; leaving the context stops that. An implementation raises what `opened` says."""
        raise NotImplementedError

    def url_of(self, carrier_url: str) -> str:
        """Make the protocol's URL of the carrier's, which has the real port."""
        raise NotImplementedError

    async def accept(self, listener: Listener[Any]) -> Accepted:
        """Wait for a carrier that is to be let in so far."""
        accepted: Accepted = await listener.accept()
        return accepted

    def make(self, accepted: Any) -> Actor[Any]:
        """Make the actor of a connection of what came; if it never runs, that is refused for it."""
        raise NotImplementedError

    def started(self) -> None:
        """See `Actor.started`."""
        self._forget_end = self.system.at_end("accept", self.aclose)
        self.start_soon(self._listen)

    def stopping(self, reason: Reason) -> None:
        """See `Actor.stopping`."""
        self._forget_end()

    async def opened(self) -> None:
        """Wait until it listens.

        Raises:
            ConfigurationError: a URL or settings that cannot work, or an address that is taken.
            OSError: an address that cannot be had, or a file that cannot be read.
        """
        await self._opened.wait()
        if self._refusal is not None:
            raise self._refusal

    async def _listen(self) -> None:
        try:
            async with self.listening() as listener:
                self._listener = listener
                self.url = self.url_of(listener.url)
                self._opened.set()
                with self._accepting:
                    while True:
                        place = object()
                        await self._places.acquire_on_behalf_of(place)
                        self._connect(await self.accept(listener), place)
                await listener.aclose()
                # Connections of QUIC live on the listener's socket, so it stays until they have ended, and this actor with them.
                await trio.sleep_forever()
        except (ConfigurationError, OSError, CarrierError) as error:
            if self._opened.is_set():
                raise
            self._refusal = error
        finally:
            self._opened.set()

    def _connect(self, accepted: Accepted, place: object) -> None:
        connection = self.make(accepted)
        if isinstance(connection, Driver):
            connection.acceptor = self
        try:
            ref = self.spawn(lambda: connection)
        except ActorStopped:  # the listener is ending
            refuse(accepted)
            return
        ref.on_stopped(lambda: self._left(connection, place))

    def _left(self, connection: Actor[Any], place: object) -> None:
        self._places.release_on_behalf_of(place)
        # Not before: a listener that closes waits for work that came before the end, too.
        self.connections.pop(connection, None)

    def reload(self) -> None:
        """Read the certificate files again; see `ListenerHandle.reload`."""
        below = getattr(self._listener, "below", self._listener)  # what a WebSocket listener listens on
        if not hasattr(below, "reload"):
            raise ConfigurationError(f"{self.url} has no certificates to reload")
        below.reload()

    def close_listener(self) -> None:
        """Accept nobody any more."""
        self._accepting.cancel()

    async def aclose(self) -> None:
        """Accept nobody any more and close all connections in order, at the same time; then end. Twice is harmless.

        The end of the system calls it in its phase ``accept``, so that they share its seconds and do not wait for one another.

        Cancellation:
            closed at once.
        """
        self.close_listener()
        try:
            async with trio.open_nursery() as nursery:
                for connection in list(self.connections):
                    nursery.start_soon(connection.aclose)
        finally:
            self.ref.stop(now=True)
        await self.ref.terminated()


class ListenerHandle(Generic[A]):
    """What ``serve`` gives, to begin with."""

    def __init__(self, actor: A) -> None:
        self._actor = actor

    @property
    def url(self) -> str:
        """Where clients connect to, with the real port."""
        return self._actor.url

    def reload(self) -> None:
        """Read the certificate files again, for clients from now on; those that are connected stay.

        Raises:
            ConfigurationError: there is no TLS here, or the files cannot be used; the certificates of before stay.
        """
        self._actor.reload()

    async def aclose(self) -> None:
        """Accept nobody any more, and close all connections in order, at the same time. Twice is harmless.

        Cancellation:
            closed at once.
        """
        await self._actor.aclose()

    async def terminated(self) -> Reason:
        """Wait for the end of the listener and of all its connections.

        Cancellation:
            only the waiting ends.
        """
        return await self._actor.ref.terminated()


def refuse(accepted: Accepted) -> None:
    """Send a client away that came too late."""
    if isinstance(accepted, Incoming):
        accepted.refuse("the listener is ending")
    else:
        accepted.abort()


@asynccontextmanager
async def closing(
    root: Ref[Any], connections: Callable[[], Iterable[_Shuts]], aclose: Callable[[], Awaitable[None]]
) -> AsyncIterator[None]:
    """Close connections after a block: in order after its end, at once after an exception or a cancellation of it.

    Args:
        root: the actor that the connections are, or are children of; it has ended when this is over.
        connections: those there are then.
        aclose: closes them in order.
    """
    try:
        yield
        await aclose()
    except BaseException:
        for connection in connections():
            connection.shut()
        raise
    finally:
        root.stop(now=True)
        with trio.CancelScope(shield=True):
            with trio.move_on_after(HURRY):
                await root.terminated()
            root.kill()
            await root.terminated()
