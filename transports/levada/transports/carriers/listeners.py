"""What listeners of byte streams share: peers wait for `accept` in a queue, in which handshakes have their places too.

`StreamListener` accepts from sockets, `UpgradingListener` from another listener. Each peer is taken in by the carrier: it is offered as it is, or
its handshake begins. A handshake that fails, or is slow, does not delay others.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Generic, Self, TypeVar

import trio

from levada.framework.errors import CarrierError, ConnectionClosed
from levada.transports.carriers.admission import Admission
from levada.transports.carriers.contracts import ByteStream, Listener
from levada.transports.carriers.places import Place, Places
from levada.transports.carriers.streams import JoinedStream, accept_from, plain_nursery

__all__ = ["QueuedListener", "ReadyQueue", "StreamListener", "UpgradingListener"]

T = TypeVar("T")


class ReadyQueue(Generic[T]):
    """The queue of peers between their handshake and the application's `accept`.

    Args:
        room: number of peers in their handshake or in the queue.
    """

    def __init__(self, room: int) -> None:
        self._places = Places(room)
        # The places bound it, but for a handshake that is complete in the very moment when it makes room.
        self._give, self._take = trio.open_memory_channel[tuple[T, Place]](math.inf)

    async def reserve(self, share: str, end: Callable[[], None]) -> Place:
        """Wait for a place for a peer whose handshake begins. If all are taken, another handshake ends: see `Places`.

        Args:
            share: see `Places.take`.
            end: ends the handshake. Not called once the peer was `put`.
        """
        await self._places.available()
        return self._places.take(share, end)

    def put(self, peer: T, place: Place) -> None:
        """Queue a peer whose handshake is complete.

        Raises:
            trio.ClosedResourceError: the listener is closed.
        """
        self._give.send_nowait((peer, place))
        place.keep()

    async def take(self, url: str) -> T:
        """Wait for a peer.

        Raises:
            ConnectionClosed: the listener at `url` is closed.
        """
        try:
            peer, place = await self._take.receive()
        except (trio.EndOfChannel, trio.ClosedResourceError) as error:
            raise ConnectionClosed(f"this side closed the listener {url}") from error
        place.leave()
        return peer

    def close(self) -> list[T]:
        """Close, end all handshakes, and return the peers that were not accepted. Tasks that wait in `reserve` continue, and their `put` fails."""
        self._give.close()
        while self._places.make_room():
            pass
        left: list[T] = []
        try:
            while True:
                peer, place = self._take.receive_nowait()
                place.leave()
                left.append(peer)
        except (trio.EndOfChannel, trio.ClosedResourceError):
            self._take.close()
            return left


class QueuedListener(Generic[T]):
    """A `Listener` whose peers wait in a queue.

    Args:
        url: the URL to dial, with the real port.
        room: most peers that are in their handshake or wait for `accept`.
        cut_off: ends a peer that was not accepted.
        admission: `None`: without a limit.
    """

    def __init__(self, url: str, room: int, cut_off: Callable[[T], None], admission: Admission | None = None) -> None:
        self.url = url
        """The URL to dial, with the real port."""
        self.admission = admission or Admission(url)
        """Admits peers, and counts the refused ones."""
        self._ready: ReadyQueue[T] = ReadyQueue(room)
        self._cut_off = cut_off

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Self]:
        """Accept peers until the end of the block, which closes the listener."""
        async with plain_nursery() as nursery:
            self.start(nursery)
            try:
                yield self
            finally:
                with trio.CancelScope(shield=True):
                    await self.aclose()

    def start(self, nursery: trio.Nursery) -> None:
        """Start the tasks that accept, if there are any."""

    async def accept(self) -> T:
        """Wait for the next peer. Several tasks may wait, and each gets a different peer: see `Listener.accept`.

        Raises:
            ConnectionClosed: the listener was closed.
        """
        return await self._ready.take(self.url)

    async def aclose(self) -> None:
        """Stop accepting, and close the connections that were not accepted. Accepted connections stay open."""
        self._close_queue()
        await trio.lowlevel.checkpoint()

    def _close_queue(self) -> None:
        for peer in self._ready.close():
            self._cut_off(peer)

    async def offer(self, peer: T, share: str) -> bool:
        """Queue a peer that needs no handshake; return false, and cut it off, if the listener is closed.

        Cancellation:
            the peer was cut off.
        """
        try:
            place = await self._ready.reserve(share, partial(self._cut_off, peer))
            try:
                self._ready.put(peer, place)
            except trio.ClosedResourceError:
                place.leave()
                raise
        except trio.ClosedResourceError:
            self._cut_off(peer)
            return False
        except BaseException:
            self._cut_off(peer)
            raise
        return True

    async def open_for(
        self,
        nursery: trio.Nursery,
        peer: str,
        share: str,
        shake_hands: Callable[[], Awaitable[T]],
        give_up: Callable[[], object],
    ) -> None:
        """Begin a handshake in the nursery. If there are too many, another one ends: see `Places`.

        Args:
            nursery: for the handshake.
            peer: for the warning, if it is turned away.
            share: see `Places.take`.
            shake_hands: returns the connection for `accept`; raises `CarrierError` if there is none.
            give_up: closes what is below, if the handshake fails or the listener is closed.
        """
        scope = trio.CancelScope()
        try:
            place = await self._ready.reserve(share, scope.cancel)
        except BaseException:
            give_up()
            raise
        nursery.start_soon(self._open, peer, shake_hands, give_up, scope, place)

    async def _open(
        self,
        peer: str,
        shake_hands: Callable[[], Awaitable[T]],
        give_up: Callable[[], object],
        scope: trio.CancelScope,
        place: Place,
    ) -> None:
        done = False
        try:
            with scope:
                self._ready.put(await shake_hands(), place)
                done = True
            if not done:
                self.admission.turn_away(peer, "its handshake made room for others")
        except CarrierError as error:
            self.admission.turn_away(peer, error)
        except trio.ClosedResourceError:
            pass  # the listener is closed
        finally:
            if not done:
                give_up()
                place.leave()


class StreamListener(QueuedListener[JoinedStream], ABC):
    """A listener on sockets, which it owns.

    Args:
        url: the URL to dial.
        sockets: one for each address.
        room: see `QueuedListener`.
        admission: see `QueuedListener`.
    """

    def __init__(self, url: str, sockets: list[trio.SocketListener], room: int, admission: Admission) -> None:
        super().__init__(url, room, JoinedStream.abort, admission)
        self._sockets = sockets

    def start(self, nursery: trio.Nursery) -> None:
        """Start a task for each socket."""
        for socket in self._sockets:
            nursery.start_soon(accept_from, socket, partial(self.take_in, nursery))

    @abstractmethod
    async def take_in(self, nursery: trio.Nursery, raw: trio.SocketStream) -> None:
        """Offer an accepted socket, or begin its handshake in the nursery; close it if it is refused."""

    async def aclose(self) -> None:
        """Stop accepting, and close the connections that were not accepted. Accepted connections stay open."""
        for listener in self._sockets:
            listener.socket.close()
        await super().aclose()


class UpgradingListener(QueuedListener[T], ABC):
    """A listener on the byte streams of another one, which it closes.

    Args:
        below: the other listener.
        url: see `QueuedListener`.
        room: see `QueuedListener`.
        cut_off: see `QueuedListener`.
    """

    def __init__(self, below: Listener[ByteStream], url: str, room: int, cut_off: Callable[[T], None]) -> None:
        super().__init__(url, room, cut_off)
        self.below = below
        """The listener below, which counts the clients that got no byte stream. With TLS a `TlsListener`, which can reload its certificates."""
        self._serving = trio.CancelScope()

    def start(self, nursery: trio.Nursery) -> None:
        """Start the task that accepts."""
        nursery.start_soon(self._serve, nursery)

    async def _serve(self, nursery: trio.Nursery) -> None:
        with self._serving:
            while True:
                try:
                    stream = await self.below.accept()
                except ConnectionClosed:
                    return
                await self.take_in(nursery, stream)

    @abstractmethod
    async def take_in(self, nursery: trio.Nursery, stream: ByteStream) -> None:
        """Offer a byte stream, or begin its handshake in the nursery; abort it if it is refused."""

    async def aclose(self) -> None:
        """Stop accepting, and close connections in the handshake or waiting for `accept`. Accepted connections stay open."""
        self._serving.cancel()
        self._close_queue()
        await self.below.aclose()
