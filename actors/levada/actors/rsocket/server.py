"""The server's side: a listener, its connections, and the resumable sessions among them."""

from __future__ import annotations

import logging
import math
import os
from contextlib import AbstractAsyncContextManager
from typing import Any, ClassVar

import trio

from levada.actors.listening import Accepted, Acceptor, ListenerHandle, refuse
from levada.actors.single import SingleCarrier, SingleDriver, accept_single, listen_single
from levada.framework.errors import DecodeError
from levada.transports import carriers
from levada.transports.rsocket import RSocketCore, Sessions
from levada.transports.rsocket.events import ConnectionEnded, ResumeReceived, SetupReceived
from levada.transports.rsocket.extensions import Authentication

from .config import ServerConfig
from .connection import RSocketDriver
from .dialects import CoreFactory
from .encoding import Encoding
from .errors import RequestRejected, SetupRejected
from .peers import ConnectedPeer
from .requests import Request
from .routing import Handler, make_responder
from .urls import ALPN

__all__ = ["Listener", "ListenerActor", "ServerConnection"]

logger = logging.getLogger("levada.actors.rsocket")


class ServerConnection(RSocketDriver):
    """A connection that a client opened."""

    accepted: Accepted
    listener: ListenerActor

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        self.checks_requests = isinstance(self.config, ServerConfig) and self.config.authenticate is not None
        self.heir: RSocketDriver | None = None
        """The connection of an older session that continues on the carrier accepted here."""

    def refuse(self) -> None:
        """Turn the client away."""
        refuse(self.accepted)

    async def carry(self) -> None:
        """Run the accepted carrier; the session may continue on other carriers."""
        config = self.core_config()
        with trio.CancelScope() as arriving:
            arriving.deadline = trio.current_time() + config.setup_timeout
            async with accept_single(self.accepted) as carrier:
                arriving.deadline = math.inf
                self.core = self.dialect(
                    config,
                    client=False,
                    framed=carrier.framed,
                    now=trio.current_time(),
                    random_bytes=os.urandom,
                    sessions=self.listener.sessions,
                )
                self.attach(carrier)
                self.connected(carrier.info)
                self.retime()
                await self.read(carrier)
        if self.heir is None:
            await self.over.wait()  # the session may continue on another carrier

    def user(self, carrier: SingleCarrier[Any]) -> SingleDriver[Any] | None:
        """Return the connection that uses a carrier; if an older session continues on it, that session's connection."""
        return super().user(carrier) if self.heir is None else self.heir.user(carrier)

    def _on_resume(self, event: ResumeReceived) -> None:
        session = self.listener.owners[event.session]
        session.take_over(self)

    def take_over(self, other: ServerConnection) -> None:
        """Continue on another connection's carrier; from now on that connection only reads for this one."""
        self.reading.cancel()
        self.reading = other.reading
        carrier = other.detach()
        assert carrier is not None
        other.heir = self
        self.core.resume_on(other.core, trio.current_time())
        self.attach(carrier)
        self.apply(self.core.take_events())
        self.flush()
        self.retime()

    def _on_setup(self, event: SetupReceived) -> None:
        assert isinstance(self.config, ServerConfig)
        self.handle.setup = event
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
                self.handle.principal = await config.authenticate(entries.first(Authentication), self.handle)
            if config.accept is not None:
                await config.accept(self.handle)
        except (SetupRejected, RequestRejected) as error:
            refusal = str(error) or "refused"
        except DecodeError as error:
            refusal = f"metadata: {error}"
        except Exception:
            logger.exception("%s: a hook failed", self.ref.path, extra=self.extra("hook_failed"))
            refusal = "the server failed"
        if self.end is not None:
            return
        if refusal:
            self.core.reject_setup(refusal)
            self.apply(self.core.take_events())
            self.flush()
        else:
            self._let_in(event)

    def _let_in(self, event: SetupReceived) -> None:
        self.established(event.data_mime_type, event.metadata_mime_type)
        if event.resume_token is not None:
            self.listener.owners[self.core] = self
        self.greeted()
        self.core.accept_setup(trio.current_time())
        self.apply(self.core.take_events())
        self.first_lease()
        self.flush()
        self.retime()

    async def check(self, request: Request) -> None:
        """Authenticate a request that brings its own credentials."""
        assert isinstance(self.config, ServerConfig)
        assert self.config.authenticate is not None
        credentials = request.credentials
        if credentials is not None:
            try:
                request.principal = await self.config.authenticate(credentials, self.handle)
            except SetupRejected as error:
                raise RequestRejected(str(error)) from error

    def _on_ended(self, event: ConnectionEnded) -> None:
        super()._on_ended(event)
        self.listener.owners.pop(self.core, None)

    events: ClassVar = {
        **RSocketDriver.events,
        ConnectionEnded: _on_ended,
        ResumeReceived: _on_resume,
        SetupReceived: _on_setup,
    }


class ListenerActor(Acceptor[ServerConnection]):
    """Accepts carriers and makes a connection of each."""

    config: ServerConfig
    handler: Handler
    dialect: CoreFactory
    scheme: str
    carrier_url: str

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        make_responder(self.handler)  # so that a mistake is raised here
        self.sessions: Sessions[RSocketCore] = Sessions(self.config.max_sessions, self.config.max_session_octets)
        self.owners: dict[object, ServerConnection] = {}
        """The connection of each core whose session can be resumed."""

    @property
    def max_connections(self) -> int:
        """The most connections at a time, as configured."""
        return self.config.max_connections

    def listening(self) -> AbstractAsyncContextManager[carriers.Listener[Accepted]]:
        """Listen at the carrier of the URL."""
        return listen_single(self.carrier_url, self.config.carrier, alpn=ALPN)

    def url_of(self, carrier_url: str) -> str:
        """Turn the carrier's URL, with the real port, into the protocol's."""
        return f"{self.scheme}+{carrier_url}"

    def make(self, accepted: Accepted) -> ServerConnection:
        """Make the connection of an accepted carrier."""
        return ServerConnection(self.config, self.handler, self.dialect, accepted, self)


class Listener(ListenerHandle[ListenerActor]):
    """The handle that `serve` yields: its address and its connected clients."""

    @property
    def peers(self) -> list[ConnectedPeer]:
        """The clients that are connected, or may return to their session; requests may be sent to each."""
        return [connection.handle for connection in self._actor.connections if connection.end is None]
