"""The contract of ``levada interop rsocket`` and ``levada interop reactivesocket``.

The metadata type is ``text/plain`` and a request's metadata is its route (composite metadata with a route does as well):

============== ==================== ======================================================================================
route          interaction          does
============== ==================== ======================================================================================
``echo``       request-response     same data and metadata back
``count``      request-stream       data is a decimal N: payloads ``"0"`` to ``"N-1"``
``blob``       request-stream       data is ``"N SIZE"``: N payloads of SIZE zero bytes
``chan``       request-channel      every payload comes back, in order; complete after the requester's complete
``fail``       response and stream  APPLICATION_ERROR whose data is the request's data
``slow``       request-response     never answers; a CANCEL ends it
``slow-open``  request-response     decimal count of ``slow`` requests that are open now
``fnf``        fire-and-forget      is counted
``fnf-count``  request-response     decimal count so far
``len``        request-response     decimal length of the data
anything else                       APPLICATION_ERROR ``unknown route: NAME``
============== ==================== ======================================================================================

The counts are the program's, over all connections.
"""

from __future__ import annotations

import argparse
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Any

import trio

from levada.actors.protocols import carrier_settings
from levada.actors.rsocket import ApplicationError, CoreConfig, Interaction, Listener, Payload, Request, ServerConfig
from levada.actors.rsocket import serve as serve_rsocket
from levada.framework import ActorSystem
from levada.transports.carriers import TlsConfig

__all__ = ["CARRIERS", "CORE", "Contract", "add_arguments", "serve"]

CARRIERS = ("tcp", "tls", "ws", "wss", "quic", "unix")
CORE = CoreConfig(fragment_size=1 << 20)  # some WebSocket clients take no larger messages than 4 MiB


class Contract:
    """Answers the requests of all connections."""

    def __init__(self) -> None:
        self.slow_open = 0
        self.forgotten = 0

    def answer(self, request: Request) -> Any:
        """Answer by the route and the interaction."""
        name, text = request.route, request.data.decode("utf-8", "replace")
        match request.kind, name:
            case Interaction.REQUEST_RESPONSE, "echo":
                return request.payload
            case Interaction.REQUEST_RESPONSE, "slow":
                return self._never()
            case Interaction.REQUEST_RESPONSE, "slow-open":
                return b"%d" % self.slow_open
            case Interaction.REQUEST_RESPONSE, "fnf-count":
                return b"%d" % self.forgotten
            case Interaction.REQUEST_RESPONSE, "len":
                return b"%d" % len(request.data)
            case Interaction.FIRE_AND_FORGET, "fnf":
                self.forgotten += 1
                return None
            case ((Interaction.REQUEST_STREAM | Interaction.REQUEST_SUBSCRIPTION), "count"):
                (count,) = _numbers(text, 1)
                return _stream(count, lambda i: b"%d" % i)
            case ((Interaction.REQUEST_STREAM | Interaction.REQUEST_SUBSCRIPTION), "blob"):
                count, size = _numbers(text, 2)
                return _stream(count, lambda _: bytes(size))
            case Interaction.REQUEST_CHANNEL, "chan":
                return request.payloads
            case ((Interaction.REQUEST_RESPONSE | Interaction.REQUEST_STREAM), "fail"):
                raise ApplicationError(text, data=request.data)
            case _:
                raise ApplicationError(f"unknown route: {name}")

    async def _never(self) -> Payload:
        self.slow_open += 1
        try:
            return await trio.sleep_forever()
        finally:
            self.slow_open -= 1


def _numbers(text: str, count: int) -> list[int]:
    parts = text.split()
    if len(parts) != count or not all(part.isascii() and part.isdigit() and len(part) < 10 for part in parts):
        raise ApplicationError(f"expected {count} decimal numbers, got {text[:40]!r}")
    return [int(part) for part in parts]


async def _stream(count: int, make: Any) -> AsyncIterator[bytes]:
    for i in range(count):
        yield make(i)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add nothing: there is nothing to choose."""


def serve(
    system: ActorSystem, carrier: str, where: str, tls: TlsConfig | None, args: argparse.Namespace
) -> AbstractAsyncContextManager[Listener]:
    """Serve the contract.

    Args:
        system: has been entered.
        carrier: one of `CARRIERS`.
        where: ``host:port``, or the path of a Unix socket.
        tls: certificate and key, for the carriers that need them.
        args: of the command line; ``protocol`` names the dialect.
    """
    config = ServerConfig(carrier=carrier_settings(carrier, tls), core=CORE)
    return serve_rsocket(system, f"{args.protocol}+{carrier}://{where}", Contract().answer, config=config)
