"""The files of ``levada new --durable``: an app whose actors keep their state, on any number of nodes."""

from __future__ import annotations

from typing import Final

__all__ = ["CONTAINER_HEAD", "DURABLE_FILES", "DURABLE_NEXT"]

CONTAINER_HEAD: Final = """\
# levada is not on a package index yet. Make its wheel here first: pip wheel --no-deps --wheel-dir wheels PATH_OF_ITS_CLONE
FROM python:3.13-slim
WORKDIR /app
COPY wheels wheels
COPY pyproject.toml $name.py ./
RUN pip install --no-cache-dir --find-links wheels .
"""

DURABLE_FILES: Final = {
    "$name.py": '''\
"""An auction: each lot is a durable actor, which takes bids for an hour."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator

from levada.actors import rsocket
from levada.actors.durable import CommandReused, Durable, applies, shards
from levada.framework import ActorSystem, Asks, handles, message

HOST = os.environ.get("HOST", "127.0.0.1")
DOOR = f"rsocket+tcp://{HOST}:7000"
HOUR = 3600.0


@message("$name.bid", frozen=True)
class Bid(Asks[bool]):
    """Bid for a lot. The answer says whether this bid leads."""

    bidder: str
    cents: int


@message("$name.close", frozen=True)
class Close:
    """The reminder at the end of the hour."""


@message("$name.raised", frozen=True)
class Raised:
    """An event. The log has a column for each field, so change fields only as the page on durable actors says."""

    bidder: str
    cents: int


@message("$name.sold", frozen=True)
class Sold:
    pass


class Lot(Durable[Bid | Close]):
    """Handlers record events, and only the methods that apply them change the state."""

    bidder: str = ""
    cents: int = 0
    is_sold: bool = False

    @handles
    def bid(self, m: Bid) -> bool:
        if self.is_sold or m.cents <= self.cents:
            return False
        if not self.bidder:
            self.remind(self.system.platform.time() + HOUR, Close())
        self.record(Raised(m.bidder, m.cents))
        return True

    @handles
    def close(self, m: Close) -> None:
        self.record(Sold())

    @applies
    def raised(self, e: Raised) -> None:
        self.bidder, self.cents = e.bidder, e.cents

    @applies
    def sold(self, e: Sold) -> None:
        self.is_sold = True


async def app(system: ActorSystem, door: str = DOOR, folder: str = "lots") -> AsyncIterator[rsocket.Listener]:
    """The app of `levada serve $name:app`; nodes share the lots. The code after `yield` runs at the end."""
    lots = await shards(system, Lot, events=Raised | Sold, journal=folder)

    async def answer(request: rsocket.Request) -> bytes:
        try:
            lot, order, bidder, cents = request.data.decode().split()
            bid = Bid(bidder, int(cents))
        except ValueError:
            raise rsocket.RequestInvalid("wanted: LOT ID BIDDER CENTS") from None
        # The bid is on the disk before the answer. A client that has lost the answer sends the same order again.
        try:
            leads = await lots[lot].ask(bid, command=order)
        except CommandReused:
            raise rsocket.RequestRejected(f"{order} is the id of another bid for this lot") from None
        return b"leads" if leads else b"too low, or too late"

    async with rsocket.serve(system, door, answer) as listener:
        yield listener
''',
    "test_$name.py": '''\
"""The app in virtual time; and in simulated worlds, on two nodes that are killed and cut off."""

from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import trio
from levada.actors import rsocket
from levada.actors.nodes import local_nodes
from levada.framework import ActorSystem
from levada.framework.errors import LevadaError
from levada.framework.testing import autojump
from levada.framework.testing.simulation import Faults, World, check_linear, simulate
from levada.transports.carriers.shared_sockets import share_sockets

from $name import DOOR, HOUR, app

FAULTS = Faults(aims={"Bid", "Append"}, clock_jumps=0.0)  # a clock that jumps closes lots too early


def test_a_lot_takes_bids_for_an_hour(tmp_path: Path) -> None:
    async def main() -> None:
        serving = asynccontextmanager(app)
        async with (
            ActorSystem() as system,
            serving(system, "rsocket+memory://door", str(tmp_path / "lots")) as listener,
            rsocket.connect(system, listener.url) as client,
        ):
            for bid, answer in (
                (b"clock 1 anna 100", b"leads"),
                (b"clock 2 bert 100", b"too low, or too late"),
                (b"clock 1 anna 100", b"leads"),  # sent again, so not done again
            ):
                assert (await client.request_response(bid)).data == answer
            await trio.sleep(HOUR + 1)
            assert (await client.request_response(b"clock 3 bert 200")).data == b"too low, or too late"

    trio.run(main, clock=autojump())


async def fleet() -> None:
    """A process that does what `levada serve $name:app --nodes 2` does."""
    async with (
        ActorSystem("driver") as system,
        share_sockets() as sockets,
        local_nodes(system, 2, app, sockets=sockets),
    ):
        await trio.sleep_forever()


async def bid(world: World, bidder: str) -> None:
    """A process that bids ten times, and sends each bid until it is answered."""
    async with ActorSystem() as system, rsocket.connect(system, DOOR, reconnect=rsocket.Reconnect()) as client:

        async def send(cents: int) -> bool:
            while True:
                try:
                    with trio.fail_after(5):
                        answer = await client.request_response(f"clock {bidder}-{cents} {bidder} {cents}".encode())
                    return answer.data == b"leads"
                except (LevadaError, trio.TooSlowError):
                    await trio.sleep(0.1)

        for cents in range(100, 1100, 100):
            await world.history.call("clock", cents, send)
            await trio.sleep(0.5)


async def strike(world: World) -> None:
    """Two bidders see one auction, whatever is lost. The seed of the world decides what, and when."""
    await world.start("driver", fleet, restart=1.0)
    bidders = [await world.start(name, partial(bid, world, name)) for name in ("anna", "bert")]
    for each in bidders:
        assert await each.wait() == 0
    check_linear(world.history, lambda best, cents: (max(best, cents), cents > best), 0)


def test_each_bid_is_done_once() -> None:
    simulate(strike, seeds=range(5), faults=FAULTS)
''',
    "README.md": """\
# $name

An auction: each lot is a durable actor. Bids come over RSocket, as `LOT ORDER BIDDER CENTS`.

```
pip install -e '.[dev]'
pytest
levada serve $name:app              # in one process
levada serve $name:app --nodes 2    # on two nodes, which share the lots
levada call rsocket+tcp://127.0.0.1:7000 --data 'clock 1 anna 1500'
levada simulate test_$name:strike --faults test_$name:FAULTS --seeds 200
```

The folder `lots` has the log: the events of all lots, as a table that Spark can read.
`levada journal ls lots` shows it while the app does not run.

- levada has to be in this environment first. It is not on a package index yet: `pip install '.$extra'` in its clone.
- `mypy` checks the types, such as the answer of each question.
- If "another process or listener has this address", change the port at the top of `$name.py`.
  Port 0 takes a free one, which `levada serve` prints.
- To change what a lot does, change its handlers.
- To change what it keeps, add events or fields at the end of an event, with defaults. The log keeps the old ones.
- The connections are not encrypted. Give `serve` a certificate and `authenticate=` before other machines may connect.
""",
    "Containerfile": CONTAINER_HEAD
    + """\
# The log is in the current folder.
WORKDIR /data
RUN chown nobody /data
VOLUME /data
USER nobody
ENV HOST=0.0.0.0
EXPOSE 7000 8080
CMD ["levada", "serve", "$name:app", "--nodes", "2", "--health", "0.0.0.0:8080"]
""",
}
"""With ``--durable`` these replace the files of the same name, and are added to the others."""

DURABLE_NEXT: Final = """\
cd $folder
pip install -e '.[dev]' && pytest
levada serve $name:app --nodes 2    # or without --nodes, in one process
levada call rsocket+tcp://127.0.0.1:7000 --data 'clock 1 anna 1500'    # a bid: lot, id, bidder, cents
levada simulate test_$name:strike --faults test_$name:FAULTS --seeds 200    # nodes that are lost, in 200 simulated worlds
"""
