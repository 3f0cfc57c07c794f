"""The contract of ``levada interop lumberjack``: a reader for versions 1 and 2 on one port.

It acks as the rules of the protocol say, once the sink has taken the events.  With ``--spool DIR`` they are then on disk, as files of JSON
lines; without it they are counted and dropped.  The count of events so far is printed on SIGUSR1 and at the end.
With ``--client-ca FILE`` writers must show a certificate.
"""

from __future__ import annotations

import argparse
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import trio

from levada.actors.lumberjack import Reader, SpoolSink, Unit
from levada.actors.lumberjack import serve as serve_lumberjack
from levada.framework import Actor, ActorSystem, handles, restart
from levada.framework.errors import ConfigurationError
from levada.transports.carriers import TlsConfig

__all__ = ["CARRIERS", "add_arguments", "serve"]

CARRIERS = ("tcp", "tls")


class Sink(Actor[Unit]):
    """Writes units to a folder, if there is one, and counts the events that are safe."""

    folder: Path | None
    count: list[int]
    """One number, so that it outlives a restart."""

    def __attrs_post_init__(self) -> None:
        self._spool: Any = None

    def started(self) -> None:
        """Start the spool, if there is a folder."""
        if self.folder is not None:
            folder = self.folder
            self._spool = self.spawn(lambda: SpoolSink(folder))

    @handles
    async def take(self, unit: Unit) -> None:
        """Take a unit."""
        if self._spool is not None:
            await self._spool.ask(unit)
        self.count[0] += len(unit.events)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add where events go, and who may send them."""
    parser.add_argument("--spool", type=Path, metavar="DIR", help="write the events there before they are acknowledged")
    parser.add_argument(
        "--client-ca", type=Path, metavar="FILE", help="writers must show a certificate of these authorities (PEM)"
    )


@asynccontextmanager
async def serve(
    system: ActorSystem, carrier: str, where: str, tls: TlsConfig | None, args: argparse.Namespace
) -> AsyncIterator[Reader]:
    """Serve the contract; arguments as for `levada.actors.interop.rsocket.serve`."""
    if args.client_ca is not None:
        if tls is None:
            raise ConfigurationError("--client-ca needs --carrier tls")
        tls = attrs.evolve(tls, ca=args.client_ca, client_certificates="required")
    count = [0]
    sink = system.spawn(lambda: Sink(args.spool, count), supervise=restart())
    scheme = "lumberjack" if carrier == "tcp" else "lumberjack+tls"
    try:
        async with (
            serve_lumberjack(system, f"{scheme}://{where}", sink, carrier=tls if carrier == "tls" else None) as reader,
            trio.open_nursery() as nursery,
        ):
            nursery.start_soon(_tell_count, count)
            yield reader
            nursery.cancel_scope.cancel()
    finally:
        print(count[0], flush=True)  # noqa: T201 - part of the contract


async def _tell_count(count: list[int]) -> None:
    if not hasattr(signal, "SIGUSR1"):  # Windows
        return
    with trio.open_signal_receiver(signal.SIGUSR1) as signals:
        async for _ in signals:
            print(count[0], flush=True)  # noqa: T201 - part of the contract
