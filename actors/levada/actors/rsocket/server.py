"""The server's side: a listener, its connections, and the resumable sessions among them."""

from __future__ import annotations

import logging
import math
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, ClassVar

import attrs
import trio

from levada.actors.authentication import Credentials, Refused, acquire
from levada.actors.listening import Accepted, Acceptor, ListenerHandle
from levada.actors.single import SingleCarrier, SingleDriver, accept_single, listen_single
from levada.actors.stream_carriers import AsWritten
from levada.framework import Identity
from levada.framework.embedding import act_for
from levada.framework.errors import DecodeError
from levada.framework.text import printable
from levada.transports import carriers
from levada.transports.carriers.addresses import is_loopback
from levada.transports.carriers.places import Place, Places
from levada.transports.rsocket import ErrorCode, RSocketCore, Sessions
from levada.transports.rsocket.codes import SETUP_CODES, is_stream_code
from levada.transports.rsocket.events import ConnectionEnded, ResumeReceived, SetupReceived
from levada.transports.rsocket.extensions import (
    Authentication,
    BearerAuthentication,
    OtherAuthentication,
    SimpleAuthentication,
)

from .config import ServerConfig
from .connection import RSocketDriver
from .dialects import ALPN, CoreFactory
from .encoding import Encoding
from .errors import RequestFailed, RequestRejected
from .peers import ConnectedPeer
from .requests import Request
from .routing import Handler, make_responder

__all__ = ["Listener", "ListenerActor", "ServerConnection"]

logger = logging.getLogger("levada.actors.rsocket")

_CODES = SETUP_CODES - {ErrorCode.REJECTED_RESUME}


class ServerConnection(RSocketDriver):
    """A connection that a client opened."""

    accepted: Accepted
    listener: ListenerActor

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        authentication = self.listener.gatekeeper.authentication
        self.checks_requests = authentication is not None
        # A quarter of the listener's hooks at most, so that requests of one client do not keep others out.
        self._checks = trio.CapacityLimiter(1 if authentication is None else max(1, authentication.at_once // 4))
        self.heir: RSocketDriver | None = None
        """The connection of an older session that continues on the carrier accepted here."""
        self._left: Place | None = None
        """The place among the sessions that were left."""

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
                    random_bytes=self.system.platform.token_bytes,
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
        if session.info is not None and self.info is not None and _shows(session.info) == _shows(self.info):
            session.take_over(self)
            return
        refusal = Refused("The session belongs to another client.")
        self.listener.gatekeeper.refuse(self.system, self.credentials, refusal)
        # In the words of an unknown token, as a token is a secret.
        self.shut(ErrorCode.REJECTED_RESUME, "no such session")

    def suspended(self) -> None:
        """Record that the session has no carrier for now, and makes room for other sessions."""
        super().suspended()
        if self._left is None and self.place is not None:
            self._left = self.listener.left.take(self.place.share, self.place.end)

    def resumed(self) -> None:
        """Record that the session has a carrier again."""
        super().resumed()
        self._return()

    def _return(self) -> None:
        if self._left is not None:
            self._left.leave()
            self._left = None

    def take_over(self, other: ServerConnection) -> None:
        """Continue on another connection's carrier; from now on that connection only reads for this one."""
        self.reading.cancel()
        self.reading = other.reading
        carrier = other.hand_over()
        assert carrier is not None
        other.heir = self
        other.keep_place()
        self.core.resume_on(other.core, trio.current_time())
        self.attach(carrier)
        self.apply(self.core.take_events())
        self.flush()
        self.retime()

    def _on_setup(self, event: SetupReceived) -> None:
        self.handle.setup = event
        credentials = attrs.evolve(self.credentials, setup=event)
        if self.checks_requests:
            encoding = Encoding(event.data_mime_type, event.metadata_mime_type, self.config.codec)
            try:
                credentials = _with(credentials, encoding.read(event.payload.metadata).entries.first(Authentication))
            except DecodeError as error:
                refusal = Refused(f"metadata: {error}")
                self.listener.gatekeeper.refuse(self.system, credentials, refusal)
                self.refused(refusal)
                return
        self.listener.note_credentials(credentials)
        self.authenticate(credentials)

    def admitted(self, identity: Identity | None) -> None:
        """Accept the client's SETUP."""
        event = self.handle.setup
        assert event is not None
        self.handle.identity = identity
        self.established(event.data_mime_type, event.metadata_mime_type)
        if event.resume_token is not None:
            self.listener.owners[self.core] = self
        self.greeted()
        self.core.accept_setup(trio.current_time())
        self.apply(self.core.take_events())
        if event.lease:
            self.first_lease()
        self.flush()
        self.retime()

    def refused(self, refusal: Refused) -> None:
        """Reject the client's SETUP. Source: RS-46."""
        code = ErrorCode(refusal.code) if refusal.code in _CODES else ErrorCode.REJECTED_SETUP
        self.core.reject_setup(refusal.reason, code)
        self.apply(self.core.take_events())
        self.flush()

    async def check(self, request: Request, shown: Authentication) -> None:
        """Ask the hook to decide on a request that brings credentials of its own."""
        gatekeeper = self.listener.gatekeeper
        own = attrs.evolve(self.credentials, setup=self.handle.setup, identity=self.identity)
        credentials = _with(own, shown)
        self.listener.note_credentials(credentials)
        await acquire(self._checks, request)
        try:
            answer = await gatekeeper.decide(credentials)
        finally:
            self._checks.release_on_behalf_of(request)
        if isinstance(answer, Identity):
            request.identity = answer
            if answer != self.identity:
                act_for(request.peer)
            return
        gatekeeper.refuse(self.system, credentials, answer, self.identity.name if self.identity is not None else "")
        if answer.code is None or not is_stream_code(answer.code):
            raise RequestRejected(answer.reason)
        raise RequestFailed(answer.reason, code=answer.code)

    def _on_ended(self, event: ConnectionEnded) -> None:
        super()._on_ended(event)
        self._return()
        self.listener.owners.pop(self.core, None)

    events: ClassVar = {
        **RSocketDriver.events,
        ConnectionEnded: _on_ended,
        ResumeReceived: _on_resume,
        SetupReceived: _on_setup,
    }


def _with(credentials: Credentials, shown: Authentication | None) -> Credentials:
    """Add what the metadata says (EXT-3)."""
    match shown:
        case SimpleAuthentication():
            return attrs.evolve(credentials, scheme="simple", user=shown.username, token=shown.password.encode())
        case BearerAuthentication():
            return attrs.evolve(credentials, scheme="bearer", token=shown.token.encode())
        case OtherAuthentication():
            return attrs.evolve(credentials, scheme=str(shown.type).lower(), token=shown.credentials)
        case _:
            return credentials


def _shows(info: carriers.CarrierInfo) -> object:
    """Return what a carrier shows of its client except its address and its process; None if it shows nothing."""
    if info.peer_credentials is not None:
        return info.peer_credentials[1:]
    # Not the certificate itself, which a client may renew during a session.
    return (info.peer_subject, info.peer_names) if info.peer_subject or info.peer_names else info.peer_certificate


class ListenerActor(Acceptor[ServerConnection]):
    """Accepts carriers and makes a connection from each."""

    config: ServerConfig
    handler: Handler
    dialect: CoreFactory
    scheme: str
    carrier_url: str

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        make_responder(self.handler)  # so that a mistake is raised here
        self._warned = False
        self.left = Places(math.inf)
        """The sessions without a carrier."""
        self.sessions: Sessions[RSocketCore] = Sessions(
            self.config.max_sessions, self.config.max_session_bytes, self.left.make_room
        )
        self.owners: dict[object, ServerConnection] = {}
        """The connection of each core whose session can be resumed."""

    def note_credentials(self, credentials: Credentials) -> None:
        """Warn once if a client shows a password or a token over a network that others can read."""
        info = credentials.info
        readable = info.scheme in ("tcp", "ws") and not is_loopback(info.peer)
        if credentials.token and readable and not self._warned:
            self._warned = True
            text = (
                "%s: clients send passwords or tokens without encryption, and %s is not on this machine: use %s+%s://"
            )
            encrypted = "tls" if info.scheme == "tcp" else "wss"
            logger.warning(
                text, self.url, printable(info.peer), self.scheme, encrypted, extra={"event": "credentials_readable"}
            )

    @property
    def max_connections(self) -> int:
        """The most connections at a time, as configured."""
        return self.config.max_connections

    def listening(self) -> AbstractAsyncContextManager[carriers.Listener[Accepted]]:
        """Listen at the carrier of the URL."""
        listens = partial(listen_single, self.carrier_url, self.config.carrier, alpn=ALPN)
        return AsWritten(self.url_of(self.carrier_url), self.carrier_url, listens)

    def url_of(self, carrier_url: str) -> str:
        """Turn the carrier's URL, with the real port, into the protocol's."""
        return f"{self.scheme}+{carrier_url}"

    def make(self, accepted: Accepted) -> ServerConnection:
        """Make the connection for an accepted carrier."""
        return ServerConnection(self.config, self.handler, self.dialect, accepted, self)


class Listener(ListenerHandle[ListenerActor]):
    """The handle that `serve` yields: its address and its connected clients."""

    @property
    def peers(self) -> list[ConnectedPeer]:
        """The clients that are connected, or may return to their session; requests may be sent to each."""
        return [connection.handle for connection in self._actor.connections if connection.end is None]
