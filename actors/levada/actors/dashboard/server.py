"""The server of a dashboard: one listener, with HTTP for the files and the login and WebSockets for the rest."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Final
from urllib.parse import urlsplit

import trio

from levada.actors.console.history import keep_history
from levada.framework import ActorSystem
from levada.framework.embedding import FailureLog
from levada.framework.errors import CarrierError
from levada.transports.carriers import ByteStream, Listener
from levada.transports.carriers.admission import Admission
from levada.transports.carriers.places import Place, Places, share_of
from levada.transports.carriers.streams import plain_nursery
from levada.transports.carriers.tcp import listen as listen_tcp
from levada.transports.carriers.tls import listen as listen_tls
from levada.transports.carriers.websocket_config import Refusal, WebSocketConfig
from levada.transports.carriers.websocket_handshake import HandshakeRefused, answer
from levada.transports.carriers.websocket_stream import WebSocketStream

from .config import DashboardConfig
from .http import receive, send
from .login import Login, key_from
from .session import DashboardSession
from .site import SOCKET, Site, SiteResponse
from .sources import Source, console_source, system_source

__all__ = ["Dashboard", "serve_console_dashboard", "serve_dashboard"]

logger = logging.getLogger("levada.actors.dashboard")

PATIENCE: Final = 10.0
"""Seconds for a request and its answer."""
MOST_CONNECTIONS: Final = 64
"""The most connections at a time. One more takes the place of another that is no WebSocket, see `Places`."""
MOST_BROWSERS: Final = 8
"""The most WebSockets at a time; a console has as many clients."""
_WEBSOCKET: Final = WebSocketConfig(max_message=65_536, accept_text=True, close_timeout=1.0)


class Dashboard:
    """A dashboard that is being served. Made by `serve_dashboard`."""

    def __init__(self, url: str, login: Login, source: Source, site: Site) -> None:
        self.url = url
        """Its address, for browsers that are logged in."""
        self._login = login
        self._source = source
        self._site = site
        self._admission = Admission(url)
        self._failures = FailureLog()
        self._places = Places(MOST_CONNECTIONS)
        self._browsers = 0

    def login_url(self) -> str:
        """Return an address that logs in one browser, once. It is a secret: show it to the user, and do not log it."""
        return f"{self.url}#token={self._login.token()}"

    async def serve(self, listener: Listener[ByteStream]) -> None:
        """Serve browsers until cancelled.

        Cancellation:
            open connections are aborted.
        """
        async with plain_nursery() as nursery:
            while True:
                stream = await listener.accept()
                scope = trio.CancelScope()
                place = self._places.take(share_of(stream.info.peer, stream.info), scope.cancel)
                nursery.start_soon(self._serve_in_place, stream, scope, place)

    async def _serve_in_place(self, stream: ByteStream, scope: trio.CancelScope, place: Place) -> None:
        try:
            with scope:
                await self.serve_client(stream, place.keep)
            if scope.cancelled_caught:
                self._admission.turn_away(stream.info.peer, "its request made room for others")
        finally:
            stream.abort()
            place.leave()

    async def serve_client(self, stream: ByteStream, keep: Callable[[], None]) -> None:
        """Answer one request, or run one WebSocket. Errors of the client are logged, not raised.

        Args:
            stream: of the client.
            keep: called when a WebSocket begins, which makes no room for other clients.

        Cancellation:
            the stream stays open; the caller closes it.
        """
        socket: WebSocketStream | None = None
        why: str | None = None
        try:
            with trio.move_on_after(PATIENCE) as patience:
                socket, why = await self._answer(stream)
            if patience.cancelled_caught:
                why = "no whole request in time"
            elif socket is not None:
                keep()
                try:
                    await DashboardSession(socket, self._source).run()
                    await socket.aclose()
                finally:
                    self._browsers -= 1
        except* CarrierError as group:
            logger.debug(
                "a browser has disconnected: %r", group.exceptions[0], extra={"event": "dashboard_client_gone"}
            )
        except* Exception as group:  # noqa: BLE001 - the failure log has it
            self._failures.log(logger, group, "the dashboard has failed on a request", event="dashboard_failed")
        if why is not None:
            self._admission.turn_away(stream.info.peer, why)

    async def _answer(self, stream: ByteStream) -> tuple[WebSocketStream | None, str | None]:
        """Answer a request; return the WebSocket if it opens one, and the reason if the client was turned away."""
        try:
            received = await receive(stream)
            if received is None:
                return None, None
            response = self._site.answer(received.request)
            if response is None:
                if self._browsers >= MOST_BROWSERS:
                    raise HandshakeRefused(Refusal(503, f"{MOST_BROWSERS} browsers are connected: close one of them"))
                asked, _, data = answer(received.head, received.rest, _WEBSOCKET, SOCKET, self._failures)
                stream.send_nowait(data)
                self._browsers += 1
                socket = WebSocketStream(
                    stream, config=_WEBSOCKET, client=False, early=b"", subprotocol=None, request=asked
                )
                return socket, None
            head_only = received.request.method == "HEAD"
        except HandshakeRefused as refused:
            refusal = refused.refusal
            response, head_only = SiteResponse(refusal.status, f"{refusal.detail}\n".encode()), False
        await send(stream, response, head_only=head_only)
        await stream.aclose()
        # Not worth a log line: a page that is not logged in keeps asking.
        harmless = response.status < 400 or response.status in (401, 404, 405)
        return None, None if harmless else response.body.decode().strip()


@asynccontextmanager
async def serve_dashboard(system: ActorSystem, config: DashboardConfig | None = None) -> AsyncIterator[Dashboard]:
    """Show `system` to browsers while the block lasts. `Dashboard.login_url` is the address for the user.

    In an actor: ``await self.enter(serve_dashboard(self.system))``.

    Args:
        system: has been entered.
        config: where to listen, and what browsers may do.

    Raises:
        ConfigurationError: the address, the certificate or the key file cannot be used.
    """
    config = config or DashboardConfig()
    async with _served(partial(system_source, system, config), config) as dashboard, plain_nursery() as nursery:
        nursery.start_soon(keep_history, system)
        yield dashboard


@asynccontextmanager
async def serve_console_dashboard(
    path: str | os.PathLike[str], config: DashboardConfig | None = None
) -> AsyncIterator[Dashboard]:
    """Show a program that serves a console (`levada.actors.console.serve_console`), as ``levada top --web`` does.

    The program may restart meanwhile: browsers show that it is away, and continue when it is back.

    Args:
        path: the console's socket, which need not exist yet.
        config: as for `serve_dashboard`; the console must allow actions and tracebacks, too.

    Raises:
        ConfigurationError: the address, the certificate or the key file cannot be used.
    """
    config = config or DashboardConfig()
    async with _served(partial(console_source, path, config), config) as dashboard:
        yield dashboard


@asynccontextmanager
async def _served(source: Source, config: DashboardConfig) -> AsyncIterator[Dashboard]:
    login = Login(key_from(config.key_file))
    async with _listening(config) as listener, plain_nursery() as nursery:
        port = urlsplit(listener.url).port
        assert port is not None
        secure = config.tls is not None
        site = Site(login, hosts=config.hosts(port), secure=secure, cookie=f"levada-{port}")
        name = config.names[0] if config.names else config.host
        host = f"[{name}]" if ":" in name else name
        dashboard = Dashboard(f"{'https' if secure else 'http'}://{host}:{port}/", login, source, site)
        nursery.start_soon(dashboard.serve, listener)
        yield dashboard


def _listening(config: DashboardConfig) -> AbstractAsyncContextManager[Listener[ByteStream]]:
    host = f"[{config.host}]" if ":" in config.host else config.host
    if config.tls is not None:
        return listen_tls(f"tls://{host}:{config.port}", config.tls)
    return listen_tcp(f"tcp://{host}:{config.port}")
