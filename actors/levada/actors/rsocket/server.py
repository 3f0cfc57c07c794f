"""The server's side: a listener, its connections, and the sessions among them that can be resumed."""

from __future__ import annotations

import logging
import os
from typing import Any, ClassVar

import trio

from levada.framework import Actor, Reason
from levada.framework.errors import ActorStopped, CarrierError, ConfigurationError, DecodeError, LevadaError
from levada.transports.carriers import Incoming
from levada.transports.rsocket import RSocketCore, Sessions
from levada.transports.rsocket.events import ConnectionEnded, ResumeReceived, SetupReceived
from levada.transports.rsocket.extensions import Authentication

from .config import ServerConfig
from .connection import Connection
from .dialects import CoreFactory
from .encoding import Encoding
from .errors import RequestRejected, SetupRejected
from .peers import ConnectedPeer
from .requests import Request
from .routing import Handler, make_responder
from .wires import Accepted, Wire, listen_for, open_accepted

__all__ = ["Listener", "ListenerActor", "ServerConnection"]

logger = logging.getLogger("levada.actors.rsocket")


class ServerConnection(Connection):
    """A connection that a client opened."""

    accepted: Accepted
    listener: ListenerActor

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        self.checks_requests = isinstance(self.config, ServerConfig) and self.config.authenticate is not None
        self.heir: Connection | None = None
        """The connection of an older session, which goes on on the carrier that came here."""

    def started(self) -> None:
        """See `Actor.started`."""
        self.start_soon(self.main)

    async def stopping(self, reason: Reason) -> None:
        """See `Connection.stopping`."""
        if not self.main_task:  # it is ended before it began
            refuse(self.accepted)
        await super().stopping(reason)

    async def carry(self) -> None:
        """See `Connection.carry`."""
        config = self.core_config()
        try:
            with trio.CancelScope() as self.arriving:
                self.arriving.deadline = trio.current_time() + config.setup_timeout
                async with open_accepted(self.accepted) as wire:
                    self.arriving.deadline = float("inf")
                    self.core = self.dialect(
                        config,
                        client=False,
                        framed=wire.framed,
                        now=trio.current_time(),
                        random_bytes=os.urandom,
                        sessions=self.listener.sessions,
                    )
                    self.begun_core = True
                    self.attach(wire)
                    self.retime()
                    await self.read(wire)
        except CarrierError as error:
            logger.debug("%s: %s", self.ref.path, error, extra=self._extra("carrier_failed"))
        if self.begun_core and self.heir is None:
            await self.over.wait()  # a session may go on elsewhere

    def user(self, wire: Wire) -> Connection | None:
        """See `Connection.user`."""
        return super().user(wire) if self.heir is None else self.heir.user(wire)

    def _on_resume(self, event: ResumeReceived) -> None:
        session = self.listener.owners[event.session]
        session.take_over(self)

    def take_over(self, other: ServerConnection) -> None:
        """Go on on the carrier that came to another connection, which from now on only reads for this one."""
        self._reading.cancel()
        self._reading = other._reading
        wire, other.wire = other.wire, None
        assert wire is not None
        other.heir = self
        self.attach(wire)
        self.apply(self.core.resume_on(other.core, trio.current_time()))
        self.flush()
        self.retime()

    # ------------------------------------------------------------ letting a client in

    def _on_setup(self, event: SetupReceived) -> None:
        assert isinstance(self.config, ServerConfig)
        self.peer.setup = event
        if self.config.accept is None and self.config.authenticate is None:
            self._let_in(event)
        else:
            self.start_soon(self._ask_hooks, self.config, event)

    async def _ask_hooks(self, config: ServerConfig, event: SetupReceived) -> None:
        refusal = ""
        try:
            if config.authenticate is not None:
                encoding = Encoding(event.data_mime_type, event.metadata_mime_type, config.codec)
                entries = encoding.read(event.payload.metadata).entries
                self.peer.principal = await config.authenticate(entries.first(Authentication), self.peer)
            if config.accept is not None:
                await config.accept(self.peer)
        except (SetupRejected, RequestRejected) as error:
            refusal = str(error) or "refused"
        except DecodeError as error:
            refusal = f"metadata: {error}"
        except Exception:
            logger.exception("%s: a hook failed", self.ref.path, extra=self._extra("hook_failed"))
            refusal = "the server failed"
        if self.end is not None:
            return
        if refusal:
            self.apply(self.core.reject_setup(refusal))
            self.flush()
        else:
            self._let_in(event)

    def _let_in(self, event: SetupReceived) -> None:
        self.established(event.data_mime_type, event.metadata_mime_type)
        if event.resume_token is not None:
            self.listener.owners[self.core] = self
        self.listener.connections[self] = None
        self.apply(self.core.accept_setup(trio.current_time()))
        self.first_lease()
        self.flush()
        self.retime()

    async def check(self, request: Request) -> None:
        """See `Connection.check`."""
        assert isinstance(self.config, ServerConfig)
        assert self.config.authenticate is not None
        credentials = request.credentials
        if credentials is not None:
            try:
                request.principal = await self.config.authenticate(credentials, self.peer)
            except SetupRejected as error:
                raise RequestRejected(str(error)) from error

    def _on_ended(self, event: ConnectionEnded) -> None:
        super()._on_ended(event)
        self.listener.connections.pop(self, None)
        self.listener.owners.pop(self.core, None)

    _apply: ClassVar = {
        **Connection._apply,
        ConnectionEnded: _on_ended,
        ResumeReceived: _on_resume,
        SetupReceived: _on_setup,
    }


class ListenerActor(Actor[Any]):
    """Accepts carriers and makes a connection of each."""

    config: ServerConfig
    handler: Handler
    dialect: CoreFactory
    scheme: str
    carrier_url: str

    def __attrs_post_init__(self) -> None:
        make_responder(self.handler)  # so that a mistake shows now
        self.url = ""
        self.connections: dict[ServerConnection, None] = {}
        """Those whose client was let in."""
        self.sessions: Sessions[RSocketCore] = Sessions()
        self.owners: dict[object, ServerConnection] = {}
        """Connection of each core whose session can be resumed."""
        self._places = trio.CapacityLimiter(self.config.max_connections)
        self._accepting = trio.CancelScope()
        self._opened = trio.Event()
        self._refusal: LevadaError | OSError | None = None

    def started(self) -> None:
        """See `Actor.started`."""
        self.start_soon(self._listen)

    async def opened(self) -> None:
        """Wait until it listens.

        Raises:
            ConfigurationError: a URL or settings that cannot work, or an address that is taken.
        """
        await self._opened.wait()
        if self._refusal is not None:
            raise self._refusal

    async def _listen(self) -> None:
        try:
            with self._accepting:
                async with listen_for(self.carrier_url, self.config.carrier) as listener:
                    self.url = f"{self.scheme}+{listener.url}"
                    self._opened.set()
                    while True:
                        place = object()
                        await self._places.acquire_on_behalf_of(place)
                        self._connect(await listener.accept(), place)
        except (ConfigurationError, OSError, CarrierError) as error:
            if self._opened.is_set():
                raise
            self._refusal = error
        finally:
            self._opened.set()

    def _connect(self, accepted: Accepted, place: object) -> None:
        connection = ServerConnection(self.config, self.handler, self.dialect, accepted, self)
        try:
            ref = self.spawn(lambda: connection)
        except ActorStopped:  # the listener is ending
            refuse(accepted)
            return
        ref.on_stopped(lambda: self._places.release_on_behalf_of(place))

    def close_listener(self) -> None:
        """Accept nobody any more."""
        self._accepting.cancel()


def refuse(accepted: Accepted) -> None:
    """Send a client away that came too late."""
    if isinstance(accepted, Incoming):
        accepted.refuse()
    else:
        accepted.abort()


class Listener:
    """What `serve` gives: where it listens, and who is connected."""

    def __init__(self, actor: ListenerActor) -> None:
        self._actor = actor

    @property
    def url(self) -> str:
        """Where clients connect to, with the real port."""
        return self._actor.url

    @property
    def peers(self) -> list[ConnectedPeer]:
        """The clients that are connected, or may come back to their session; requests may be sent to each."""
        return [connection.peer for connection in self._actor.connections]

    async def aclose(self) -> None:
        """Accept nobody any more, and close all connections as `ConnectedPeer.aclose` does, at the same time. Twice is harmless.

        Cancellation:
            closed at once.
        """
        self._actor.close_listener()
        try:
            async with trio.open_nursery() as nursery:
                for connection in list(self._actor.connections):
                    nursery.start_soon(connection.aclose)
        finally:
            self._actor.ref.stop(now=True)
        await self._actor.ref.terminated()

    async def terminated(self) -> Reason:
        """Wait for the end of the listener and of all its connections.

        Cancellation:
            only the waiting ends.
        """
        return await self._actor.ref.terminated()
