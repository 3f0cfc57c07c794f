"""The way out: subscribers take results from their mailboxes, and clients follow them.

Over RSocket a result is a JSON object, over Aqueduct a message of `levada.actors.demo.rows` on a channel from the client.
"""

from __future__ import annotations

import datetime as dt
import json
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from typing import Any, cast

import attrs
import trio

from levada.actors.aqueduct import Peer
from levada.actors.rsocket import ApplicationError, ConnectedPeer, Request
from levada.actors.spark.bridge import Delivery
from levada.framework import Actor, channel, handles
from levada.framework.errors import ChannelError

from .rows import Anomaly, Attack, Count, Follow, RateRow, Result

__all__ = ["MAILBOXES", "Feed", "FeedDesk", "FeedSubscriber", "Results"]

MAILBOXES: Mapping[str, type[Result]] = {"counts": Count, "rates": RateRow, "attacks": Attack, "anomalies": Anomaly}
"""The mailboxes that the queries write to, and the class of their rows. They are the routes of RSocket too."""
KEPT = 50_000
"""Results of one mailbox that are kept for later clients."""


class Feed:
    """The results of one mailbox, the past ones and then the new ones."""

    def __init__(self, kept: int = KEPT) -> None:
        self._rows: deque[Result] = deque(maxlen=kept)
        self.count = 0
        """Results so far; the first ones may be forgotten."""
        self._more = trio.lowlevel.ParkingLot()

    def put(self, row: Result) -> None:
        """Add one."""
        self._rows.append(row)
        self.count += 1
        self._more.unpark_all()

    async def follow(self) -> AsyncGenerator[Result, None]:
        """Yield all of them, forever; a slow caller misses results that are forgotten before their turn."""
        at = 0
        while True:
            while at < self.count:
                at = max(at, self.count - len(self._rows))
                yield self._rows[at - self.count]
                at += 1
            await self._more.park()


class FeedSubscriber(Actor[Delivery]):
    """Takes the rows of one mailbox and puts them into its feed."""

    feed: Feed

    def started(self) -> None:
        """Begin with no rows seen."""
        self._seen: dict[tuple[str, int], int] = {}

    @handles
    def take(self, m: Delivery) -> None:
        """Add a row, unless it came before: after a fault rows come again."""
        partition = (m.key.epoch, m.key.partition)
        if self._seen.get(partition, -1) < m.key.offset:
            self._seen[partition] = m.key.offset
            self.feed.put(m.message)


class FeedDesk:
    """Answers requests for feeds: the handler of the RSocket server and of the Aqueduct server."""

    def __init__(self) -> None:
        self.feeds = {name: Feed() for name in MAILBOXES}

    def answer(self, request: Request) -> AsyncIterator[bytes]:
        """Stream the feed that the route names."""
        feed = self.feeds.get(request.route)
        if feed is None:
            raise ApplicationError(f"no route {request.route!r}; there are: {', '.join(self.feeds)}")
        return _as_json(feed)

    async def send(self, m: Follow) -> None:
        """Send the feed of a mailbox on the channel in the message, until the receiver closes it."""
        feed = self.feeds.get(m.mailbox)
        if feed is None:
            m.rows.cancel()
            return
        async with trio.open_nursery() as nursery:

            async def send() -> None:
                try:
                    async with aclosing(feed.follow()) as rows:
                        async for row in rows:
                            await m.rows.send(row)
                except ChannelError:
                    pass  # the channel has ended; `terminated` below returns

            nursery.start_soon(send)
            await m.rows.terminated()  # notices the end also while there is nothing to send
            nursery.cancel_scope.cancel()


async def _as_json(feed: Feed) -> AsyncIterator[bytes]:
    async with aclosing(feed.follow()) as rows:
        async for row in rows:
            yield json.dumps(_as_row(row)).encode()


@attrs.define
class Results:
    """The results that came over RSocket, or over Aqueduct. A later row replaces an earlier one of the same key."""

    counts: dict[tuple[str, str, str], int] = attrs.field(factory=dict)
    """By source, kind and key."""
    rates: dict[str, dict[str, Any]] = attrs.field(factory=dict)
    """By the beginning of the hour."""
    attacks: dict[tuple[str, str], dict[str, Any]] = attrs.field(factory=dict)
    """By address and beginning."""
    anomalies: dict[tuple[str, str], dict[str, Any]] = attrs.field(factory=dict)
    """By template and hour."""
    taken: dict[str, int] = attrs.field(factory=lambda: dict.fromkeys(MAILBOXES, 0))
    """Rows of each route."""
    _changed: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot)

    async def follow(self, peer: ConnectedPeer, route: str) -> None:
        """Take the results of a route, forever.

        Raises:
            RequestFailed: the stream has failed.
        """
        async with await peer.request_stream(b"", route=route, window=256) as rows:
            async for payload in rows:
                self.take(route, json.loads(payload.data))

    async def receive(self, peer: Peer[Follow], mailbox: str) -> None:
        """Take the results of a mailbox over Aqueduct, forever.

        Raises:
            ChannelError: the channel has ended.
        """
        sender, rows = channel(MAILBOXES[mailbox])
        await peer.send(Follow(mailbox, sender))
        with rows:
            async for row in rows:
                self.take(mailbox, _as_row(row))

    def take(self, route: str, row: dict[str, Any]) -> None:
        """Take one row."""
        match route:
            case "counts":
                self.counts[row["source"], row["kind"], row["key"]] = row["count"]
            case "rates":
                self.rates[row["start"]] = row
            case "attacks":
                self.attacks[row["address"], row["start"]] = row
            case _:
                self.anomalies[row["template"], row["start"]] = row
        self.taken[route] += 1
        self._changed.unpark_all()

    async def reach(self, wanted: Mapping[str, int]) -> None:
        """Wait until so many rows of each route have arrived."""
        while any(self.taken[route] < number for route, number in wanted.items()):
            await self._changed.park()

    def count(self, source: str, kind: str, key: str = "") -> int:
        """The count of a key; 0 if it never came."""
        return self.counts.get((source, kind, key), 0)

    def by_key(self, source: str, kind: str) -> dict[str, int]:
        """All counts of a kind, the largest first."""
        found = [(key, count) for (of, what, key), count in self.counts.items() if (of, what) == (source, kind)]
        return dict(sorted(found, key=lambda item: (-item[1], item[0])))


def _as_row(result: Result) -> dict[str, Any]:
    """Convert a result to the types of JSON."""
    values = attrs.asdict(cast("Any", result))
    return {
        key: value.astimezone(dt.UTC).isoformat() if isinstance(value, dt.datetime) else value
        for key, value in values.items()
    }
