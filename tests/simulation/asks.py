"""Nodes whose actors executors of Spark ask, in a world: at sockets of Unix in a folder that all nodes share, or over TLS."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import trio
from tests.simulation.bank import SETTINGS, Account, Add, Added, Reminded
from tests.simulation.bridges import Executors, Tell

from levada.actors.durable import shards, shards_of
from levada.actors.nodes import local_nodes
from levada.actors.spark.desk import serve_asks
from levada.framework import Actor, ActorSystem, handles, restart
from levada.framework.testing.simulation import Faults, World

__all__ = ["FAULTS", "Desks", "app"]

FAULTS: Final = Faults(strikes=10, every=0.7, aims={"Command", "Tell"})
"""Strikes at random times; in half of the worlds, also at questions of executors and their commands."""
_FOLDER: Final = "/asks"
_PORT: Final = 7100
"""Of the first node; the others have the ports behind it."""
_NODES: Final = 2


class Teller(Actor[Tell]):
    """Passes questions of executors on to accounts, which may be on another node."""

    @handles
    async def tell(self, m: Tell) -> int:
        """Ask the account."""
        accounts = await shards_of(self.system, Account)
        return int(await accounts[m.account].ask(Add(m.id), command=m.id, timeout=20.0))


async def app(system: ActorSystem) -> AsyncIterator[None]:
    """Serve executors, on a node."""
    desks = DESKS[-1]
    actors = {"teller": system.spawn(Teller, supervise=restart())}
    url = desks.url(_PORT + int(system.name.removeprefix("n")))
    async with serve_asks(system, _FOLDER, actors, url=url, config=desks.config) as desk:
        desks.open(desk)
        yield


class Desks(Executors):
    """Fleets and executors of all worlds."""

    def __init__(self, certificate: Path | None = None) -> None:
        super().__init__(certificate)
        self._addresses = [
            f"unix://{_FOLDER}/n{node}.socket" if certificate is None else f"tls://server:{_PORT + node}"
            for node in range(_NODES)
        ]

    async def run(self, world: World) -> None:
        """Run until each id of each executor is in its account, and check the history."""
        DESKS[-1] = self
        self.errors, self._token = [], None
        await world.start("driver", self._drive, machine=self.machines[0], restart=0.5)
        await self.check(world, await self.start(world, self._addresses))

    async def _drive(self) -> None:
        async with (
            ActorSystem("driver", ask_timeout=10.0) as system,
            local_nodes(system, _NODES, app, settings=SETTINGS) as nodes,
        ):
            events = Added | Reminded
            await shards(system, Account, events=events, journal="/accounts", shards=4, nodes=nodes, keeper=True)
            await trio.sleep_forever()


DESKS: Final[list[Desks]] = [Desks()]
"""The fleet of the present world, for its nodes."""
