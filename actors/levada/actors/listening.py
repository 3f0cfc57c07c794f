"""Listeners of all protocols: they accept carriers, make a connection from each, limit their number, and close.

A protocol derives from `Acceptor`, which it tells how to listen and what a connection is, and from `ListenerHandle`, which its ``serve``
yields.  A connection is a `Driver`.  It calls `Acceptor.admit` when it lets its client in; a listener that closes waits for the work of
these connections, and cuts off the others.
A connection counts against the limit from when it is accepted until its actor has ended.  If the limit is reached, a connection that has
not let its client in, or whose session was left, makes room for the newest one: see `levada.transports.carriers.places`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import partial
from typing import Any, ClassVar, Final, Generic, TypeVar

import attrs
import trio

from levada.actors.authentication import Authenticate, Authentication, Gatekeeper
from levada.actors.metrics.connections import listener_samples
from levada.framework import ActorSystem, Phase, Reason, Ref, Sample
from levada.framework.embedding import DescribedActor, adopt
from levada.framework.errors import CarrierError, ConfigurationError, ConnectionLost, LevadaError, LocalProtocolError
from levada.transports.carriers import ByteStream, Connection, Incoming, Listener, MessageStream
from levada.transports.carriers.admission import Admission
from levada.transports.carriers.places import Place, Places, share_of

from .driver import Driver
from .driver import Phase as ConnectionPhase

__all__ = ["Accepted", "Acceptor", "ListenerHandle", "begin", "closing", "refuse", "running"]

HURRY: Final = 1.0
"""Seconds for the last bytes of a connection that is closed by an exception or a cancellation."""

Accepted = ByteStream | MessageStream | Incoming
"""A carrier that a listener has accepted."""


C = TypeVar("C", bound=Driver[Any])
A = TypeVar("A", bound="Acceptor[Any]")
R = TypeVar("R", bound="Driver[Any] | Acceptor[Any]")


class Acceptor(DescribedActor[Any], Generic[C]):
    """Accepts carriers and makes a connection from each."""

    subject = "listener"
    waits: ClassVar[bool] = True
    """Whether new clients wait at the carrier while no connection makes room for them; otherwise they are turned away."""

    authenticate: Authenticate | Authentication | None = attrs.field(default=None, kw_only=True)
    """Decides on clients; None admits all."""
    closes: Phase = attrs.field(default="accept", kw_only=True)
    """The phase of the system's end in which it closes."""
    trust_traces: bool | None = attrs.field(default=None, kw_only=True)
    """Whether a traced system continues the traces of clients; None: only of clients with an identity."""

    def __attrs_post_init__(self) -> None:
        self.url = ""
        self.gatekeeper = Gatekeeper(Authentication.of(self.authenticate))
        self.admission = Admission("")
        """Counts the clients that made room for others, or found none."""
        self.connections: dict[Any, None] = {}
        """Connections whose client was admitted."""
        self._greeting: dict[Any, None] = {}
        """All others."""
        self.places = Places(self.max_connections)
        self._accepting = trio.CancelScope()
        self._opened = trio.Event()
        self._refusal: LevadaError | OSError | None = None
        self._forget_end: Callable[[], None] = lambda: None
        self._listener: Any = None

    @property
    @abstractmethod
    def max_connections(self) -> float:
        """The most connections at a time. May be infinite."""

    @abstractmethod
    def listening(self) -> AbstractAsyncContextManager[Listener[Any]]:
        """Listen at a carrier until the context ends. Raises the errors of `opened`."""

    @abstractmethod
    def url_of(self, carrier_url: str) -> str:
        """Turn the carrier's URL, with the real port, into the protocol's."""

    async def accept(self, listener: Listener[Any]) -> Accepted:
        """Wait for the next carrier."""
        accepted: Accepted = await listener.accept()
        return accepted

    @abstractmethod
    def make(self, accepted: Any) -> C:
        """Make the actor of a connection from an accepted carrier; if the actor never runs, the carrier is refused."""

    @property
    def about(self) -> str:
        """The URL and the number of clients."""
        refused = f", refused: {self.gatekeeper.refused:,}" if self.gatekeeper.refused else ""
        return f"{self.url}, clients: {len(self.connections):,}{refused}"

    @property
    def turned_away(self) -> int:
        """Clients and requests that the hook or a limit has refused, and clients that never shook hands or made room for others."""
        below = getattr(self._listener, "admission", None)  # memory has none
        return self.gatekeeper.refused + self.admission.refused + (0 if below is None else below.refused)

    def metrics(self) -> Iterable[Sample]:
        """Return the counts."""
        if not self.url:
            return ()
        protocol = self.url.partition(":")[0].partition("+")[0]
        return listener_samples(
            protocol, self.url, clients=len(self.connections), limit=self.max_connections, refused=self.turned_away
        )

    async def report(self) -> dict[str, object]:
        """Return the URL and the counts."""
        return {"url": self.url, "clients": len(self.connections), "refused": self.gatekeeper.refused}

    def started(self) -> None:
        """Begin to listen, and have the end of the system close this listener."""
        self._forget_end = self.system.at_end(self.closes, self.aclose)
        self.start_soon(self._listen)

    def stopping(self, reason: Reason) -> None:
        """Unregister from the end of the system."""
        self._forget_end()

    async def opened(self) -> None:
        """Wait until the listener listens.

        Raises:
            ConfigurationError: the URL or the settings cannot work, or the address is taken.
            OSError: the address is not available, or a file cannot be read.
        """
        await self._opened.wait()
        if self._refusal is not None:
            raise self._refusal

    async def _listen(self) -> None:
        try:
            async with self.listening() as listener:
                self._listener = listener
                self.url = self.admission.url = self.url_of(listener.url)
                self._opened.set()
                with self._accepting:
                    while True:
                        self._connect(await self._next(listener))  # no name here, which would keep the last one
                await listener.aclose()
                # QUIC connections live on the listener's socket: it stays, and this actor with it, until they have ended.
                await trio.sleep_forever()
        except (ConfigurationError, OSError, CarrierError) as error:
            if self._opened.is_set():
                raise
            self._refusal = error
        finally:
            self._opened.set()

    async def _next(self, listener: Listener[Any]) -> Accepted:
        """Wait for a client, and for its place."""
        if self.waits:
            await self.places.available()
        accepted = await self.accept(listener)
        try:
            if self.waits:  # the last connection that gave way may be kept by now
                await self.places.available()
        except trio.Cancelled:
            refuse(accepted)
            raise
        return accepted

    def _connect(self, accepted: Accepted) -> None:
        if self.places.full:
            why = "there are enough connections (max_connections)"
            self.admission.turn_away(_peer(accepted), why)
            refuse(accepted, why)
            return
        connection = self.make(accepted)
        connection.acceptor = self
        connection.turn_away = partial(refuse, accepted)
        if adopt(self, connection):
            self._greeting[connection] = None
            share = share_of(_peer(accepted), getattr(accepted, "info", None))
            place = self.places.take(share, partial(self._make_room, connection, _peer(accepted)))
            connection.place = place
            connection.ref.on_stopped(lambda: self._left(connection, place))
        else:  # this listener is ending
            refuse(accepted)

    def _make_room(self, connection: C, peer: str) -> None:
        left = connection.phase is ConnectionPhase.SUSPENDED
        why = "its session was left" if left else "it has not said a whole first message"
        self.admission.turn_away(peer, f"it made room for others: {why}")
        connection.make_room()

    def _left(self, connection: C, place: Place) -> None:
        place.leave()
        if connection.identity is not None:
            self.gatekeeper.leave(connection.identity)
        # Not before: a listener that closes waits for work that came before the end, too.
        self.connections.pop(connection, None)
        self._greeting.pop(connection, None)

    def admit(self, connection: C) -> None:
        """Count a connection among those whose work is waited for when this listener closes."""
        del self._greeting[connection]
        self.connections[connection] = None

    def reload(self) -> None:
        """Read the files of certificates and tokens again; see `ListenerHandle.reload`."""
        below = getattr(self._listener, "below", self._listener)  # what a WebSocket listener listens on
        try:
            if hasattr(below, "reload"):
                below.reload()
        finally:
            self.gatekeeper.reload()

    def shut(self) -> None:
        """Close all connections at once."""
        for connection in list(self.connections):
            connection.shut()

    def close_listener(self) -> None:
        """Accept no more clients."""
        self._accepting.cancel()

    async def aclose(self) -> None:
        """Accept no more clients, close all connections at the same time, then end. A second call does no harm.

        The end of the system calls it in the phase `closes`. All listeners close at the same time and share the phase's time limit.

        Cancellation:
            closed at once.
        """
        self.close_listener()
        for connection in list(self._greeting):
            connection.shut()  # before it begins work for which nobody would wait
        try:
            async with trio.open_nursery() as nursery:
                for connection in list(self.connections):
                    nursery.start_soon(connection.aclose)
        finally:
            self.ref.stop(now=True)
        await self.ref.terminated()


class ListenerHandle(Generic[A]):
    """Base of the handles that ``serve`` yields."""

    def __init__(self, actor: A) -> None:
        self._actor = actor

    @property
    def url(self) -> str:
        """The URL that clients connect to, with the real port."""
        return self._actor.url

    @property
    def refused(self) -> int:
        """The number of clients and requests that ``authenticate``, or a limit of a tenant, has refused."""
        return self._actor.gatekeeper.refused

    def reload(self) -> None:
        """Read the certificate files, and the files of the ``authenticate`` hook, again, for new clients; connected clients stay.

        A listener without such files does nothing.

        Raises:
            ConfigurationError: a file cannot be used; the settings read from it stay unchanged.
        """
        self._actor.reload()

    async def aclose(self) -> None:
        """Accept no more clients, and close all connections at the same time. A second call does no harm.

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


def begin(incoming: Incoming) -> Connection:
    """Begin the handshake of a client.

    Raises:
        ConnectionLost: it has waited too long for a place.
    """
    try:
        return incoming.accept()
    except LocalProtocolError as error:
        raise ConnectionLost(f"the client has waited too long: {error}") from error


def refuse(accepted: Accepted, why: str = "the listener is ending") -> None:
    """Turn away a client."""
    if isinstance(accepted, Incoming):
        with suppress(LocalProtocolError):  # it has waited too long for a place
            accepted.refuse(why)
    else:
        accepted.abort()


def _peer(accepted: Accepted) -> str:
    return accepted.peer if isinstance(accepted, Incoming) else accepted.info.peer


@asynccontextmanager
async def running(system: ActorSystem, actor: R) -> AsyncIterator[R]:
    """Run a connection or a listener for a block, as `closing` says.

    Args:
        system: has been entered.
        actor: a `Driver` or an `Acceptor`. It never starts again.

    Raises:
        LevadaError, OSError: an error of `opened`.
    """
    ref = system.spawn(lambda: actor)
    async with closing([ref], actor.shut, actor.aclose):
        await actor.opened()
        yield actor


@asynccontextmanager
async def closing(
    roots: Iterable[Ref[Any]], shut: Callable[[], None], aclose: Callable[[], Awaitable[None]]
) -> AsyncIterator[None]:
    """Close connections after a block: in order after its end, at once after an exception or a cancellation.

    At once means that the bytes queued so far get `HURRY` seconds. A peer that does not read cannot make it longer.

    Args:
        roots: the actors that the connections are, or are children of; they have ended when this is over.
        shut: closes the connections at once.
        aclose: closes them in order.
    """
    try:
        yield
        await aclose()
    except BaseException:
        shut()
        raise
    finally:
        for root in roots:
            root.stop(now=True)
        with trio.CancelScope(shield=True):
            with trio.move_on_after(HURRY):
                for root in roots:
                    await root.terminated()
            for root in roots:
                root.kill()
            for root in roots:
                await root.terminated()
