"""A live auction: each lot is a durable actor, and every node of the fleet takes bids and shows prices.

::

    levada serve auction:app              # in one process
    levada serve auction:app --nodes 3    # on three nodes, behind the same addresses
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from typing import Any

import attrs

from levada.actors import aqueduct, rsocket
from levada.actors.durable import Durable, Shards, applies, shards
from levada.actors.journal import GetExtent, ReadRows
from levada.actors.nodes import singleton
from levada.actors.spark import serve_bridge
from levada.framework import (
    Actor,
    ActorSystem,
    Asks,
    Metric,
    OneshotSender,
    Sample,
    Sender,
    channel,
    forward,
    handles,
    message,
    restart,
)
from levada.framework.errors import ChannelError
from levada.transports.carriers import TlsConfig
from levada.transports.qmux import QmuxConfig

FRONT = os.environ.get("FRONT", "aqueduct+tcp://127.0.0.1:7001")  # beyond this machine aqueduct+tls, or it is refused
TICKER = os.environ.get("TICKER", "rsocket+tcp://127.0.0.1:7002")
TLS = os.environ.get("TLS", "tls")
"""For an encrypted `FRONT`: the folder with ``cert.pem`` and ``key.pem`` of the nodes, and with ``ca.pem`` for their clients."""

BIDS = Metric("auction_bids_total", "counter", "Bids that were taken.")
FOLLOWERS = Metric("auction_followers", "gauge", "Open streams of prices.")
OPEN_LOTS = Metric("auction_open_lots", "gauge", "Lots that were open when the catalogue was last shown.")


# What a lot is asked, and what it records.


@message("auction.price", frozen=True)
class Price:
    """A lot, as it is now."""

    lot: str
    title: str
    cents: int
    bidder: str
    is_open: bool

    def as_json(self) -> dict[str, Any]:
        """Return what clients in other languages get."""
        return {
            "lot": self.lot,
            "title": self.title,
            "cents": self.cents,
            "bidder": self.bidder,
            "open": self.is_open,
        }


@message("auction.open", frozen=True)
class Open(Asks[bool]):
    """Offer the lot for some time. The answer is False if it was offered before."""

    title: str
    cents: int
    seconds: float


@message("auction.bid", frozen=True)
class Bid(Asks[bool]):
    """Bid for the lot. The answer says whether this bid leads."""

    bidder: str
    cents: int


@message("auction.watch")
class Watch(Asks[None]):
    """Send the price now, and then each new one, until the lot is closed. A lot that was never offered has none."""

    prices: Sender[Price]


@message("auction.close", frozen=True)
class Close:
    """The reminder at the end of the time."""


@message("auction.opened", frozen=True)
class Opened:
    title: str
    cents: int


@message("auction.raised", frozen=True)
class Raised:
    bidder: str
    cents: int


@message("auction.closed", frozen=True)
class Closed:
    pass


class Lot(Durable[Open | Bid | Watch | Close]):
    """Its state is the sum of its events. What it tells its followers is on the disk."""

    title: str = ""
    cents: int = 0
    bidder: str = ""
    is_open: bool = False

    def started(self) -> None:
        self.feed = self.spawn(Feed, supervise=restart())

    @property
    def price(self) -> Price:
        return Price(self.entity, self.title, self.cents, self.bidder, self.is_open)

    @handles
    def open(self, m: Open) -> bool:
        if self.title:
            return False
        self.record(Opened(m.title, m.cents))
        self.remind(self.system.platform.time() + m.seconds, Close())
        return True

    @handles
    def bid(self, m: Bid) -> bool:
        if not self.is_open or m.cents <= self.cents:
            return False
        self.record(Raised(m.bidder, m.cents))
        self.after_commit(self.feed, self.price)
        return True

    @handles
    def close(self, _: Close) -> None:
        self.record(Closed())
        self.after_commit(self.feed, self.price)

    @handles
    def follow(self, m: Watch) -> None:
        self.after_commit(self.feed, Joined(m.prices, self.price))

    @applies
    def opened(self, e: Opened) -> None:
        self.title, self.cents, self.is_open = e.title, e.cents, True

    @applies
    def raised(self, e: Raised) -> None:
        self.bidder, self.cents = e.bidder, e.cents

    @applies
    def closed(self, _: Closed) -> None:
        self.is_open = False


@message("auction.joined")
class Joined:
    prices: Sender[Price]
    now: Price


class Feed(Actor[Joined | Price]):
    """Has the followers of one lot. It ends with its lot, and so do their channels: they follow again."""

    followers: list[Sender[Price]] = attrs.field(factory=list)
    bids: int = 0

    @handles
    def join(self, m: Joined) -> None:
        # A price makes those before it worthless: a slow follower misses some, and holds up no one.
        self.send(m.prices.unreliable(8), m.now)

    @handles
    def tell_all(self, m: Price) -> None:
        self.bids += m.is_open
        followers, self.followers = self.followers, []
        for follower in followers:
            self.send(follower, m)

    def send(self, follower: Sender[Price], price: Price) -> None:
        try:
            if price.title:
                follower.send_nowait(price)
            if price.is_open:
                self.followers.append(follower)
            else:
                follower.finish_nowait()
        except ChannelError:
            pass  # it has left, or is lost

    def metrics(self) -> list[Sample]:
        return [BIDS.sample(self.bids), FOLLOWERS.sample(len(self.followers))]


# One of each in the whole fleet.


@message("auction.show", frozen=True)
class Show(Asks[list[Price]]):
    """List the open lots."""


class Catalogue(Actor[Show]):
    """Knows which lots are open. It reads that from the log, so it needs no state of its own when it moves to another node."""

    async def started(self) -> None:
        self.read: dict[int, int] = {}
        self.open: dict[str, Price] = {}
        self.lots = await open_lots(self.system)

    @handles
    async def show(self, _: Show) -> list[Price]:
        assert self.lots.journal is not None
        extent = await self.lots.journal.ask(GetExtent())
        for partition, end in extent.end.items():
            while (at := self.read.get(partition, 0)) < end:
                rows = await self.lots.journal.ask(ReadRows(partition, at, end))
                for row in rows.batch().to_pylist():
                    self.add(row)
                self.read[partition] = rows.end
        return list(self.open.values())

    def add(self, row: dict[str, Any]) -> None:
        lot, kind = row["entity"], row["kind"]
        if kind == "auction.opened":
            self.open[lot] = Price(lot, row["title"], row["cents"], "", True)
        elif kind == "auction.raised":
            self.open[lot] = Price(lot, self.open[lot].title, row["cents"], row["bidder"], True)
        elif kind == "auction.closed":
            del self.open[lot]

    def metrics(self) -> list[Sample]:
        return [OPEN_LOTS.sample(len(self.open))]


class Books(Actor[Any]):
    """Shows Spark the log, at an address that does not change when this actor moves to another node."""

    folder: str

    async def started(self) -> None:
        bridge = await self.enter(serve_bridge(self.system, self.folder))
        await bridge.log("lots", await open_lots(self.system))


# What runs on each node.


@message("auction.order")
class Order:
    """A command for a lot, from outside. With the same id it may be sent again: it is done once."""

    lot: str
    id: str
    what: Open | Bid
    answer: OneshotSender[bool]


@message("auction.follow")
class Follow:
    lot: str
    prices: Sender[Price]


@message("auction.browse")
class Browse:
    lots: OneshotSender[list[Price]]


async def open_lots(system: ActorSystem) -> Shards[Open | Bid | Watch | Close]:
    return await shards(system, Lot, events=Opened | Raised | Closed, journal="lots", shards=8, idle=3600.0)


def carrier(url: str, *, serves: bool = False) -> QmuxConfig | None:
    """Return the settings of an encrypted connection, with the files of the folder `TLS`."""
    if not url.startswith("aqueduct+tls:"):
        return None
    own = TlsConfig(certificate=f"{TLS}/cert.pem", key=f"{TLS}/key.pem") if serves else TlsConfig(ca=f"{TLS}/ca.pem")
    return QmuxConfig(below=own)


async def app(
    system: ActorSystem, front: str = FRONT, ticker: str = TICKER
) -> AsyncIterator[tuple[aqueduct.Listener, rsocket.Listener]]:
    """The app of `levada serve`. Each node serves all lots, wherever they are."""
    lots = await open_lots(system)
    catalogue = await singleton(system, Catalogue)
    await singleton(system, Books, "bridge")

    async def serve_one(m: Order | Follow | Browse) -> None:
        match m:
            case Order(lot, id, what, answer):
                answer.send(await lots[lot].ask(what, command=id))
            case Follow(lot, prices):
                sender, receiver = channel(Price)  # one that came from another process cannot be sent on
                with receiver:
                    await lots[lot].ask(Watch(sender))
                    await forward(receiver, prices)
            case Browse(answer):
                answer.send(await catalogue.ask(Show()))

    async def ticks(lot: str) -> AsyncIterator[bytes]:
        sender, receiver = channel(Price)
        with receiver:
            await lots[lot].ask(Watch(sender))
            async for price in receiver:
                yield json.dumps(price.as_json()).encode()

    async def serve_prices(request: rsocket.Request) -> AsyncIterator[bytes]:
        return ticks(request.data.decode())

    # A follower occupies a handler as long as it follows.
    many = aqueduct.PeerConfig(max_handlers=5000, carrier=carrier(front, serves=True))
    async with (
        aqueduct.serve(system, front, serve_one, Order | Follow | Browse, config=many) as house,
        rsocket.serve(system, ticker, serve_prices) as prices,
    ):
        yield house, prices
