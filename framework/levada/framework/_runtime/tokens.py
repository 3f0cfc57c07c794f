"""Mailbox entries that are not messages: each tells the runtime to do something at its place in the queue. And the line for room.

Each has its own class, because the handler table is keyed by class; `levada.framework._runtime.dispatch` has the handlers.

Private fields used here: ``Cell._extras``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import attrs

from levada.framework.links import SHUTDOWN

if TYPE_CHECKING:
    from collections.abc import Callable

    from trio.lowlevel import Task

    from levada.framework.links import Reason

__all__ = [
    "END_TURN", "ROOM", "START", "STOP", "TURN", "EndTurn", "RoomCallback", "Start", "Stop", "Take",
    "TakeSignal", "WaitingMessage", "WakeSenders",
]  # fmt: skip


class Start:
    """Run the `started` hook, and `run` if the actor has one."""

    __slots__ = ()


class Stop:
    """End: everything queued before this has been handled."""

    __slots__ = ("final", "reason")

    def __init__(self, reason: Reason, *, final: bool = False) -> None:
        self.reason = reason
        self.final = final
        """Whether the actor must not restart, since its parent or the system asked for the end."""


class WakeSenders:
    """Wake waiting senders: there is room."""

    __slots__ = ()


class Take:
    """Handle the oldest message of a store (drop, conflate). The subclass for routers takes from the router's mailbox.

    It keeps its message, for a report of its failure, as long as the handler runs: the cell must not, since the message may have channels.
    """

    __slots__ = ("_message",)

    _message: Any

    def next(self, cell: Any) -> Any:
        """Take the message that `cell` handles at this point; `TURN` if there is none."""
        self._message = cell.next_stored()
        return self._message

    def taken(self) -> Any:
        """Return the last result of `next`."""
        return self._message


class TakeSignal(Take):
    """Handle the oldest signal message of the actor: a `Down` of an actor, or an `Exit`."""

    __slots__ = ()

    def next(self, cell: Any) -> Any:
        """Take the oldest signal."""
        extras = cell._extras
        self._message = extras.signals.popleft()
        if not extras.signals:
            extras.signals = None  # an empty deque takes 760 bytes
        return self._message


class EndTurn:
    """End the turn, so that signals or a new handler table take effect."""

    __slots__ = ()


START: Final = Start()
STOP: Final = Stop(SHUTDOWN)
ROOM: Final = WakeSenders()
TURN: Final = EndTurn()

END_TURN: Final = EndTurn()
"""Returned by the functions in `dispatch` when the worker must not continue with the batch."""


@attrs.define(eq=False, weakref_slot=False)
class WaitingMessage:
    """A message that waits for room, and the task inside `send`; an ask, or a message from a thread, has no such task."""

    message: Any
    task: Task | None


@attrs.define(eq=False, weakref_slot=False)
class RoomCallback:
    """Stands in line in place of a message, for a caller of `on_room`."""

    back: Callable[[], None]
