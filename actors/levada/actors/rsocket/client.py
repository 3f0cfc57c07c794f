"""The client's side of a connection: it dials, and with resumption dials again for the same session."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import trio

from levada.actors.driver import Phase
from levada.actors.single import SingleCarrier, dial_single
from levada.actors.stream_carriers import AsWritten
from levada.framework.errors import CarrierError, ConfigurationError
from levada.transports.rsocket.events import ConnectionEnded, LeaseGranted, SetupAccepted

from .config import ClientConfig
from .connection import RSocketDriver
from .dialects import ALPN, carrier_url, core_of
from .routing import Handler

__all__ = ["ClientConnection", "make_client"]


class ClientConnection(RSocketDriver):
    """A connection that this side dials."""

    url: str

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        self.accepted = False
        """Whether the server has shown that it accepted SETUP."""
        self._dialling: trio.CancelScope | None = None
        self._leasing = False

    async def carry(self) -> None:
        """Dial, and dial again while there is a session to resume."""
        assert isinstance(self.config, ClientConfig)
        attempt = 0
        while True:
            resumptions = self.resumptions
            await self._dial()
            if self.end is not None:
                return
            attempt = 1 if self.resumptions > resumptions else attempt + 1
            with trio.move_on_after(self.config.redial.delay(attempt, self.system.random)):
                await self.over.wait()
                return

    async def _dial(self) -> None:
        _, url = carrier_url(self.url)
        with trio.CancelScope() as scope:
            self._dialling = scope
            try:
                async with AsWritten(
                    self.url, url, partial(dial_single, url, self.config.carrier, alpn=ALPN)
                ) as carrier:
                    self._dialling = None
                    self._plug(carrier)
                    await self.read(carrier)
            except (CarrierError, ConfigurationError):
                if self.phase is Phase.CONNECTING:
                    raise

    def _plug(self, carrier: SingleCarrier[Any]) -> None:
        now = trio.current_time()
        if self.phase is Phase.CONNECTING:
            core = self.core_config()
            self.core = self.dialect(
                core, client=True, framed=carrier.framed, now=now, random_bytes=self.system.platform.token_bytes
            )
            self.established(core.data_mime_type, core.metadata_mime_type)
            self.attach(carrier)
            self.connected(carrier.info, early=True)
        else:
            self.core.resume(framed=carrier.framed, now=now)
            self.attach(carrier)
        self.flush()
        self.retime()

    def _on_setup_accepted(self, event: SetupAccepted) -> None:
        self.accepted = True
        self.greeted()

    def _on_lease(self, event: LeaseGranted) -> None:
        super()._on_lease(event)
        if not self._leasing:
            self._leasing = True
            self.first_lease()

    def _on_ended(self, event: ConnectionEnded) -> None:
        super()._on_ended(event)
        if self._dialling is not None:
            self._dialling.cancel()

    events: ClassVar = {
        **RSocketDriver.events,
        ConnectionEnded: _on_ended,
        SetupAccepted: _on_setup_accepted,
        LeaseGranted: _on_lease,
    }


def make_client(url: str, handler: Handler, config: ClientConfig | None) -> Callable[[], ClientConnection]:
    """Return a factory for connections to one URL; raise `ConfigurationError` if the URL, the handler or the settings cannot work."""
    core = core_of(carrier_url(url)[0])
    settings = config or ClientConfig()
    if not isinstance(settings, ClientConfig):
        raise ConfigurationError(f"the config of a client is a {type(settings).__name__}, wanted a ClientConfig")
    return lambda: ClientConnection(settings, handler, core, url)
