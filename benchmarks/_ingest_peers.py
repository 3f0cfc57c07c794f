"""The other end of ``levada bench ingest``, in a process of its own.

``python -m benchmarks._ingest_peers reader FOLDER`` prints its URL and acknowledges all it gets; ``… shipper FOLDER URL FILE`` ships a file.
"""

from __future__ import annotations

import sys
from pathlib import Path

import trio

from levada.actors.demo.ingest import Pace, ship
from levada.actors.interop.certificates import make_certificates
from levada.actors.lumberjack import Unit, serve
from levada.framework import ActorSystem
from levada.transports.carriers import TlsConfig

__all__ = ["take"]


async def take(unit: Unit) -> None:
    """Do nothing with a unit."""


async def reader(folder: Path) -> None:
    """Acknowledge everything, until standard input ends."""
    pems = make_certificates(folder)
    tls = TlsConfig(certificate=pems.certificate, key=pems.key)
    async with ActorSystem() as system, serve(system, "lumberjack+tls://127.0.0.1:0", take, carrier=tls) as served:
        print(served.url, flush=True)
        await trio.to_thread.run_sync(sys.stdin.read)


async def shipper(folder: Path, url: str, file: Path) -> None:
    """Ship a file."""
    async with ActorSystem() as system:
        await ship(system, [url], folder / "ca.pem", [file], Pace())


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["reader", folder]:
            trio.run(reader, Path(folder))
        case ["shipper", folder, url, file]:
            trio.run(shipper, Path(folder), url, Path(file))
