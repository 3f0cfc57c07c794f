"""Where lines come in: a reader in this process, or one on each of several nodes, which read and parse on several cores.

::

    writer ══TLS══> node n0: reader, Ingest ──Lines──> Intake (in the driver) ──> logs
           ══TLS══> node n1: reader, Ingest ──Lines──>

Each node listens at its own port, and gets the same port again after a restart. The writer has a connection to each and sends
each window where there is room. A line is acknowledged when it is on the disk, and `LineIntake` knows the numbers of the lines, so each line
is in the journal once even if a node is killed.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import trio

from levada.actors.lumberjack import serve
from levada.actors.nodes import NodeUp, local_nodes
from levada.framework import Actor, ActorSystem, Asks, Ref, handles, message
from levada.framework.errors import LevadaError
from levada.transports.carriers import TlsConfig

from . import scoring  # noqa: F401 - a node runs the actors of modules that its app has imported
from .parsing import Ingest, warm_up
from .rows import Lines

__all__ = ["GetUrl", "NodeReader", "app", "reader", "readers"]

logger = logging.getLogger("levada.actors.demo")


@message("levada.demo.GetUrl", frozen=True)
class GetUrl(Asks[str]):
    """Ask a reader for the URL it listens at."""


class NodeReader(Actor[GetUrl]):
    """Listens on a node, and has the lines put into the driver's journal.

    Args:
        intake: takes the lines, in the driver.
        url: ``lumberjack+tls://host:port``; port 0 takes a free one.
        certificate: file of the certificate to show.
        key: file of its key.
    """

    intake: Ref[Lines]
    url: str
    certificate: str
    key: str

    async def started(self) -> None:
        """Listen."""
        tls = TlsConfig(certificate=Path(self.certificate), key=Path(self.key))
        ingest = functools.partial(Ingest, self.intake)
        self._reader = await self.enter(serve(self.system, self.url, ingest, carrier=tls))

    @handles
    def tell_url(self, m: GetUrl) -> str:
        """Answer with the URL."""
        return self._reader.url


async def app(system: ActorSystem) -> AsyncIterator[None]:
    """Run on each node: the actors' classes are imported there, and Arrow is warm before a node hides its start from the garbage collector."""
    await warm_up()
    yield


@asynccontextmanager
async def reader(
    system: ActorSystem, url: str, intake: Ref[Lines], certificate: Path, key: Path
) -> AsyncIterator[list[str]]:
    """Run a reader in this process; yields its URL in a list. Arguments as for `readers`."""
    await warm_up()
    tls = TlsConfig(certificate=certificate, key=key)
    async with serve(system, url, functools.partial(Ingest, intake), carrier=tls) as listening:
        yield [listening.url]


@asynccontextmanager
async def readers(
    system: ActorSystem, url: str, intake: Ref[Lines], certificate: Path, key: Path, *, nodes: int
) -> AsyncIterator[list[str]]:
    """Run a reader on each of several nodes; yields their URLs.

    Args:
        system: the driver.
        url: of the first reader; the ports of the others follow. Port 0: free ones.
        intake: takes the lines.
        certificate: file of the certificate that all of them show.
        key: file of its key.
        nodes: how many to start.

    Raises:
        NodeLost: a node could not start.
        ActorError: a reader could not, because its port is taken.

    Cancellation:
        no node is left.
    """
    place, _, port = url.rpartition(":")
    async with (
        local_nodes(system, nodes, app) as fleet,
        fleet.events() as events,
        trio.open_nursery() as nursery,
    ):
        urls = {member.name: f"{place}:{int(port) and int(port) + member.index}" for member in fleet.members}

        async def start(name: str) -> None:
            reader = await fleet.spawn(NodeReader, intake, urls[name], str(certificate), str(key), on=name)
            urls[name] = await reader.ask(GetUrl())

        async def start_again() -> None:
            async for event in events:
                if isinstance(event, NodeUp):
                    try:
                        await start(event.member.name)
                    except LevadaError as error:
                        # If it was lost again, it will start again.
                        logger.warning("no reader on %s: %s", event.member.name, error)

        for name in urls:
            await start(name)
        nursery.start_soon(start_again)
        yield list(urls.values())
        nursery.cancel_scope.cancel()
