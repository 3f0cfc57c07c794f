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

from collections.abc import Callable, Iterable, Mapping
from typing import Generic, Protocol, TypeVar

from .frames import encode_int

__all__ = ["Linked", "Links"]


class Linked(Protocol):
    """A half, as far as links are concerned."""

    id: int
    minted_here: bool
    reachable: bool
    """Whether the peer's application has, or can get at, the other half."""

    def take_acked_links(self) -> list[int]:
        """Take the channels that are attached to acked messages of a sender which was not reachable."""
        ...

    def lose(self) -> None:
        """The peer's application will never get the other half."""
        ...


H = TypeVar("H", bound=Linked)


class Links(Generic[H]):
    """Reachability, loss and tombstones of one connection.

    Args:
        halves: the halves that are not gone, by channel.
        reached: called with a half that the peer's application can reach from now on.
        announce: sends bytes on a stream of their own.
    """

    __slots__ = ("_announce", "_halves", "_reached", "_running", "todo", "tombstones")

    def __init__(
        self, halves: Mapping[int, H], reached: Callable[[H], None], announce: Callable[[bytes], None]
    ) -> None:
        self._halves = halves
        self._reached = reached
        self._announce = announce
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
        """The connection is over: nothing can be reached or lost any more, and the core need not wait for the collector."""
        self.todo.clear()
        self.tombstones.clear()
        del self._halves, self._reached, self._announce

    def leave_tombstone(self, half: H) -> None:
        """Keep what must be known of a half that ended in its own way. Source: AQ-56 (`end`)."""
        if half.minted_here and not half.reachable:
            self.tombstones[half.id] = half.take_acked_links()

    def _reach(self, channel: int) -> None:
        half = self._halves.get(channel)
        if half is None:
            self.reach(self.tombstones.pop(channel, ()))
        elif not half.reachable:
            half.reachable = True
            self._reached(half)
            self.reach(half.take_acked_links())

    def _lose(self, channel: int) -> None:
        half = self._halves.get(channel)
        if half is not None:
            assert not half.reachable, "a link is resolved before what hangs on it is reached"  # I-8
            half.lose()
        elif channel in self.tombstones:
            self._announce(b"\x09" + encode_int(channel))
            self.lose(self.tombstones.pop(channel))
