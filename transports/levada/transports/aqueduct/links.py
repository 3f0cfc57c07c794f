"""Creation links: the channels that live or die with a message.

A channel made here is *reachable* when the remote application has the other half or can get it by taking messages: the message that carries
it was acked, and so on up to a channel that the peer made, or the entrypoint. If a message is nacked, all channels below it are lost.

A half that ends earlier leaves a *tombstone*: the peer may keep its mailbox for an application that will never get it, and must be told
(ClosedChannelLost). Every channel minted here depends on exactly one link until that link is resolved (AQ-58), so every tombstone is
removed in the end.

Chains may have any length, and halves call each other in circles, so no code here recurses: actions are queued, and `run` performs them
until none is left (I-11).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from .frames import ONESHOT, encode_int

if TYPE_CHECKING:
    from .streams import AqueductStream

__all__ = ["ChannelHalf", "ConnectionLinks"]


class ChannelHalf(ABC):
    """One local half of a channel: a `SenderHalf` or a `ReceiverHalf`."""

    __slots__ = ("control", "ended", "id", "known", "minted_here", "reachable", "state")

    state: Any
    """Its `SenderState` or `ReceiverState`: open, ending, or the way it ended."""

    def __init__(self, channel: int, *, minted_here: bool, reachable: bool) -> None:
        self.id = channel
        """Channel id."""
        self.minted_here = minted_here
        self.reachable = reachable
        """Whether the remote application has the other half, or can get it. Source: AQ-52."""
        self.known = minted_here
        """Whether the application has this handle, so that events may name it."""
        self.control: AqueductStream | None = None
        self.ended = False
        """Whether the half has ended. Set by the core; the mailbox of a receiver may still hold messages."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} {self.state.value}>"

    @property
    def oneshot(self) -> bool:
        """Whether the channel carries at most one message."""
        return bool(self.id & ONESHOT)

    def gate_opened(self) -> None:  # noqa: B027 - a receiver does not wait for it
        """Record that the peer has seen the control stream. Source: AQ-45 (D-22)."""

    def take_acked_links(self) -> list[int]:
        """Take the channels attached to acked messages of a sender that was not reachable."""
        return []

    @abstractmethod
    def lose(self, *, told: bool = False) -> None:
        """End, because the peer's application will never get the other half, or has said so with `told`. Source: AQ-48, AQ-56."""


H = TypeVar("H", bound=ChannelHalf)


class ConnectionLinks(Generic[H]):
    """Reachability, loss and tombstones of one connection.

    Args:
        halves: the live halves, by channel.
        reached: called with each half that becomes reachable for the peer's application.
        announce: sends bytes on a stream of their own.
    """

    __slots__ = ("_announce", "_halves", "_reached", "_running", "todo", "tombstones")

    def __init__(
        self,
        halves: Mapping[int, H],
        reached: Callable[[H], None],
        announce: Callable[[bytes], None],
    ) -> None:
        self._halves = halves
        self._reached = reached
        self._announce = announce
        self._running = False
        self.todo: list[tuple[Callable[[int], None], int] | Callable[[], None]] = []
        """Actions to perform, in any order."""
        self.tombstones: dict[int, list[int]] = {}
        """Ids minted here whose half ended unreached, with the channels of messages acked before. Source: AQ-56."""

    def reach(self, channels: Iterable[int]) -> None:
        """Record that the peer's application can get these channels. Source: AQ-54, AQ-56."""
        self.todo += [(self._reach, channel) for channel in channels]

    def lose(self, channels: Iterable[int]) -> None:
        """Record that the peer's application will never get these channels. Source: AQ-55, AQ-56."""
        self.todo += [(self._lose, channel) for channel in channels]

    def later(self, action: Callable[[], None]) -> None:
        """Queue an action on another half for when this one is finished."""
        self.todo.append(action)

    def run(self) -> None:
        """Perform the queued actions. Every call to the core ends with this."""
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
        """Drop everything at the end of the connection, so that the core is freed without the garbage collector."""
        self.todo.clear()
        self.tombstones.clear()
        del self._halves, self._reached, self._announce

    def leave_tombstone(self, half: H) -> None:
        """Remember a half that ended before it was reached or lost. Source: AQ-56 (`end`)."""
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
