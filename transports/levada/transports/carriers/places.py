"""The places of a listener, and which connection makes room for the newest.

Every listener has a limit: of handshakes, connections, requests or sessions. `Places` is the one rule for all of them when the limit is
reached. A connection gives way from its beginning until it is kept, which its listener does when the client has said a whole first message
and was let in. It gives way again when its session was left. Of the networks, the one with the most connections that give way loses its
oldest one. So a client that connects and says nothing keeps no other out, and many of one address take nothing from the other addresses.

A listener that can let new clients wait does so for a moment (`GRACE`), so that clients that come together do not end each other.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Final

import trio

from levada.transports.carriers.admission import network_of
from levada.transports.carriers.contracts import CarrierInfo

__all__ = ["GRACE", "Place", "Places", "share_of"]

GRACE: Final = 0.25
"""Seconds that a new connection has for its first message while others wait for its place."""


def _nothing() -> None:
    pass


class Place:
    """The place of one connection. Made by `Places.take`. After `leave`, and when it gave way, every call does nothing."""

    __slots__ = ("_places", "end", "share")

    def __init__(self, places: Places, share: str, end: Callable[[], None]) -> None:
        self._places = places
        self.share = share
        self.end = end

    def keep(self) -> None:
        """Give way no longer."""
        self._places.keep(self)

    def give_way(self) -> None:
        """Give way from now on, as the youngest of those that do."""
        self._places.give_way(self)

    def leave(self) -> None:
        """Free the place."""
        self._places.leave(self)


class Places:
    """The places of one listener.

    Args:
        room: number of places; may be infinite.
    """

    def __init__(self, room: float) -> None:
        self._room = room
        self._taken: set[Place] = set()
        self._giving: dict[str, dict[Place, float]] = {}  # from when on each may end, by share, the oldest first
        self._waiting = trio.lowlevel.ParkingLot()

    def __len__(self) -> int:
        return len(self._taken)

    @property
    def full(self) -> bool:
        """Whether all places are taken, and no connection gives way."""
        return len(self._taken) >= self._room and not self._giving

    async def available(self) -> None:
        """Wait until `take` has a place without ending a connection that has just come."""
        await trio.lowlevel.checkpoint()
        while len(self._taken) >= self._room and (due := self._due()) > trio.current_time():
            with trio.move_on_at(due):
                await self._waiting.park()

    def take(self, share: str, end: Callable[[], None]) -> Place:
        """Take a place for a new connection, which gives way until `Place.keep`. If all are taken, another connection ends.

        Args:
            share: what the connection counts with, see `share_of`.
            end: ends this connection at once. Its place is free when it is called, so it must not wait for the peer.
        """
        if len(self._taken) >= self._room:
            assert self.make_room(), "wait until places are available"
        place = Place(self, share, end)
        self._taken.add(place)
        self._give(place, trio.current_time() + GRACE)
        return place

    def make_room(self) -> bool:
        """End the connection whose turn it is to give way; return whether there was one."""
        if not self._giving:
            return False
        place = next(iter(self._largest()))
        end = place.end
        self.leave(place)
        end()
        return True

    def _largest(self) -> dict[Place, float]:
        return max(self._giving.values(), key=len)

    def _due(self) -> float:
        """Return when the next connection may end for another; infinity if none gives way."""
        return next(iter(self._largest().values())) if self._giving else inf

    def _give(self, place: Place, due: float) -> None:
        self._giving.setdefault(place.share, {})[place] = due
        self._waiting.unpark_all()

    def keep(self, place: Place) -> None:
        """Protect a connection: it no longer gives way."""
        giving = self._giving.get(place.share)
        if giving is not None and place in giving:
            del giving[place]
            if not giving:
                del self._giving[place.share]

    def give_way(self, place: Place) -> None:
        """Make a connection give way from now on."""
        if place in self._taken:
            self._give(place, -inf)

    def leave(self, place: Place) -> None:
        """Free the place of a connection."""
        if place in self._taken:
            self._taken.remove(place)
            self.keep(place)
            place.end = _nothing  # it belongs to the connection, and the connection has this place
            self._waiting.unpark_all()


def share_of(peer: str, info: CarrierInfo | None = None) -> str:
    """Return what a connection counts with: its user at a Unix socket, otherwise its network (`network_of`).

    Args:
        peer: the address, as in `CarrierInfo.peer`.
        info: more about it, if known.

    >>> share_of("[2001:db8::1]:443"), share_of("192.0.2.1:443")
    ('2001:db8::/64', '192.0.2.1')
    """
    if info is not None and info.peer_credentials is not None:
        return f"uid {info.peer_credentials[1]}"
    return network_of(peer.rpartition(":")[0].strip("[]"))
