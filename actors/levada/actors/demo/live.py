"""The way out: subscribers take results from their mailboxes, and whoever asks over RSocket gets them as they come, a JSON object each."""

from __future__ import annotations

import datetime as dt
import json
from collections import deque
from collections.abc import AsyncIterator, Mapping
from typing import Any

import attrs
import trio

from levada.actors.rsocket import ApplicationError, ConnectedPeer, Payload, Request
from levada.actors.spark.bridge import Delivery
from levada.framework import Actor, handles

from .rows import Anomaly, Attack, Count, Rate, Result

__all__ = ["MAILBOXES", "Desk", "Feed", "Results", "Subscriber"]

MAILBOXES: Mapping[str, type[Result]] = {"counts": Count, "rates": Rate, "attacks": Attack, "anomalies": Anomaly}
"""The mailboxes that the queries write to, which are the routes too, and the class of their rows."""
KEPT = 50_000
"""Results of one mailbox that are kept for those who come later."""


class Feed:
    """The results of one mailbox: those so far, and then those that come."""

    def __init__(self, kept: int = KEPT) -> None:
        self._rows: deque[bytes] = deque(maxlen=kept)
        self.count = 0
        """Results so far; the first ones may be forgotten."""
        self._more = trio.Event()

    def put(self, row: bytes) -> None:
        """Add one."""
        self._rows.append(row)
        self.count += 1
        self._more.set()
        self._more = trio.Event()

    async def follow(self) -> AsyncIterator[bytes]:
        """Give all of them, for ever; who is so slow that some are forgotten before their turn misses these."""
        at = 0
        while True:
            while at < self.count:
                at = max(at, self.count - len(self._rows))
                yield self._rows[at - self.count]
                at += 1
            await self._more.wait()


class Subscriber(Actor[Delivery]):
    """Takes the rows of one mailbox and puts them into its feed."""

    feed: Feed

    def started(self) -> None:
        """Begin without having seen any."""
        self._seen: dict[tuple[str, int], int] = {}

    @handles
    def take(self, m: Delivery) -> None:
        """Add a row, unless it came before: after a fault rows come again."""
        partition = (m.key.epoch, m.key.partition)
        if self._seen.get(partition, -1) < m.key.offset:
            self._seen[partition] = m.key.offset
            self.feed.put(json.dumps(attrs.asdict(m.message), default=_as_text).encode())


class Desk:
    """Answers requests for the feeds: the handler of the RSocket server."""

    def __init__(self) -> None:
        self.feeds = {name: Feed() for name in MAILBOXES}

    def answer(self, request: Request) -> AsyncIterator[bytes]:
        """Give the feed that the route names."""
        feed = self.feeds.get(request.route)
        if feed is None:
            raise ApplicationError(f"no route {request.route!r}; there are: {', '.join(self.feeds)}")
        return feed.follow()


@attrs.define
class Results:
    """What came over RSocket. A later row takes the place of an earlier one of the same key."""

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
    _changed: trio.Event = attrs.field(factory=trio.Event)

    async def follow(self, peer: ConnectedPeer, route: str) -> None:
        """Take what a route gives, for ever.

        Raises:
            RequestFailed: it gives no more.
        """
        async with await peer.request_stream(b"", route=route, window=256) as rows:
            async for payload in rows:
                self.take(route, payload)

    def take(self, route: str, payload: Payload) -> None:
        """Take one row."""
        row = json.loads(payload.data)
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
        self._changed.set()
        self._changed = trio.Event()

    async def reach(self, wanted: Mapping[str, int]) -> None:
        """Wait until so many rows of each route are there."""
        while any(self.taken[route] < number for route, number in wanted.items()):
            await self._changed.wait()

    def count(self, source: str, kind: str, key: str = "") -> int:
        """How many of something there are; 0 if it never came."""
        return self.counts.get((source, kind, key), 0)

    def by_key(self, source: str, kind: str) -> dict[str, int]:
        """All counts of a kind, the largest first."""
        found = [(key, count) for (of, what, key), count in self.counts.items() if (of, what) == (source, kind)]
        return dict(sorted(found, key=lambda item: (-item[1], item[0])))


def _as_text(value: Any) -> str:
    assert isinstance(value, dt.datetime)
    return value.isoformat()
