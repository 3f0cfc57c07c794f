"""QUIC on a simulated network as a carrier of its own: ``aqueduct+simnet://host:port`` for members of a fleet, each a host of a `SimNet`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import attrs
from tests.simnet import SimNet

from levada.transports import carriers
from levada.transports.carriers import Carrier
from levada.transports.quic import QuicConfig, QuicConnection, QuicListener, dial, listen

__all__ = ["SimConfig"]


@attrs.frozen(kw_only=True)
class SimConfig:
    """A host of a network."""

    net: SimNet | None = None
    host: str = ""
    """Where connections are dialled from."""
    server: QuicConfig = attrs.field(factory=QuicConfig)
    client: QuicConfig = attrs.field(factory=QuicConfig)

    @classmethod
    def of(cls, net: SimNet, host: str, sides: tuple[QuicConfig, QuicConfig], **changes: Any) -> SimConfig:
        """Make settings with a certificate that has the name ``server`` for all hosts; `changes` are those of both sides."""
        server, client = (attrs.evolve(side, **changes) for side in sides)
        return cls(net=net, host=host, server=server, client=attrs.evolve(client, server_name="server"))


@asynccontextmanager
async def _dial(url: str, config: SimConfig | None) -> AsyncIterator[QuicConnection]:
    assert config is not None
    assert config.net is not None
    async with dial(_quic(url), config.client, port=config.net.port(config.host)) as connection:
        yield connection


@asynccontextmanager
async def _listen(url: str, config: SimConfig) -> AsyncIterator[QuicListener]:
    assert config.net is not None
    parts = urlsplit(url)
    port = config.net.port(parts.hostname or "", parts.port or 0)
    async with listen(_quic(url), config.server, port=port) as listener:
        yield _Listener(listener)  # type: ignore[misc]


def _quic(url: str) -> str:
    return url.replace("simnet:", "quic:", 1)


class _Listener:
    """A listener with a URL of this carrier."""

    def __init__(self, below: QuicListener) -> None:
        self._below = below

    def __getattr__(self, name: str) -> Any:
        return getattr(self._below, name)

    @property
    def url(self) -> str:
        return self._below.url.replace("quic:", "simnet:", 1)


CARRIER: Carrier[Any] = Carrier(dial=_dial, listen=_listen, config=SimConfig)
carriers.register("simnet", CARRIER)
