"""Creation links: which channels live or die with which message.

A channel made here is *reachable* when the remote application has, or can dequeue its way to, the other half: the message that carries
it was acked, and so on up to a channel that came from the peer, or the entrypoint. A nacked message takes everything below it along.

A half that ends before that is known leaves a *tombstone*: the peer may still keep its mailbox for an application that will never get
it, and must be told (ClosedChannelLost). Every channel minted here hangs on exactly one link until that link is resolved (AQ-58), so
every tombstone goes away.

Chains may be of any length and halves call each other in circles, so nothing here recurses: what is to be done is queued, and `run`
does it until nothing is left (I-11).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from .events import Reached
from .frames import encode_int
from .sender import SenderHalf

if TYPE_CHECKING:
    from .core import AqueductCore
    from .receiver import ReceiverHalf

__all__ = ["Links"]


class Links:
    """Reachability, loss and tombstones of one connection."""

    __slots__ = ("_core", "_running", "todo", "tombstones")

    def __init__(self, core: AqueductCore) -> None:
        self._core = core
        self._running = False
        self.todo: list[tuple[Callable[[int], None], int] | Callable[[], None]] = []
        """What is left to do, in any order."""
        self.tombstones: dict[int, list[int]] = {}
        """Ids minted here whose half has ended unreached, with the channels that hang on messages acked before. Source: AQ-56."""

    def reach(self, channels: Iterable[int]) -> None:
        """The peer's application can get at these. Source: AQ-54, AQ-56."""
        self.todo += [(self._reach, channel) for channel in channels]

    def lose(self, channels: Iterable[int]) -> None:
        """The peer's application will never get at these. Source: AQ-55, AQ-56."""
        self.todo += [(self._lose, channel) for channel in channels]

    def later(self, action: Callable[[], None]) -> None:
        """Do something to another half when this one has been dealt with."""
        self.todo.append(action)

    def run(self) -> None:
        """Do what is to be done. Everything that the core is asked ends with this."""
        if self._running:
            return
        self._running = True
        todo = self.todo
        while todo:
            item = todo.pop()
            if isinstance(item, tuple):
                item[0](item[1])
            else:
                item()
        self._running = False

    def close(self) -> None:
        """The connection is over: there is nothing to reach or to lose any more, and the core need not wait for the collector."""
        self.todo.clear()
        self.tombstones.clear()
        del self._core

    def bury(self, half: SenderHalf | ReceiverHalf) -> None:
        """Keep what must be known of a half that ended in its own way. Source: AQ-56 (`end`)."""
        if half.minted_here and not half.reachable:
            self.tombstones[half.id] = (half.acked_links if isinstance(half, SenderHalf) else None) or []

    def _reach(self, channel: int) -> None:
        half = self._core.halves.get(channel)
        if half is None:
            self.reach(self.tombstones.pop(channel, ()))
        elif not half.reachable:
            half.reachable = True
            self._core.emit(Reached(half))
            if isinstance(half, SenderHalf) and half.acked_links:
                self.reach(half.acked_links)
                half.acked_links = None

    def _lose(self, channel: int) -> None:
        half = self._core.halves.get(channel)
        if half is not None:
            assert not half.reachable, "a link is resolved before what hangs on it is reached"  # I-8
            half.lose()
        elif channel in self.tombstones:
            self._core.streams.announce(b"\x09" + encode_int(channel))
            self.lose(self.tombstones.pop(channel))
