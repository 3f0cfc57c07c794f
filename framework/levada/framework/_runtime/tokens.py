"""Entries of a mailbox that are not messages: they tell the runtime to do something at this point of the queue.

Each has a class of its own, because the handler table is keyed by class; what is done is in `levada.framework._runtime.dispatch`.

Private fields used here: ``Cell._extras``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from levada.framework.links import SHUTDOWN

if TYPE_CHECKING:
    from levada.framework.links import Reason

__all__ = ["END_TURN", "ROOM", "START", "STOP", "TAKE", "TURN", "Room", "Start", "Stop", "Take", "TakeSignal", "Turn"]


class Start:
    """Run the `started` hook, and `run` of an actor that has one."""

    __slots__ = ()


class Stop:
    """Everything queued before this has been handled: end."""

    __slots__ = ("final", "reason")

    def __init__(self, reason: Reason, *, final: bool = False) -> None:
        self.reason = reason
        self.final = final
        """Whether supervision must not start the actor again: its parent or the system asked."""


class Room:
    """There is room again for senders that wait."""

    __slots__ = ()


class Take:
    """The oldest message of a mailbox that drops or conflates comes here; a router's subclass takes from the router's."""

    __slots__ = ()

    def next(self, cell: Any) -> Any:
        """Take the message that `cell` is to handle at this point; `TURN` if there is none after all."""
        return cell.next_stored()

    def taken(self, cell: Any) -> Any:
        """Return what `next` gave last, for reports of its failure."""
        return cell.last_stored


class TakeSignal(Take):
    """The oldest signal message of the actor comes here: a `Down` of an actor, or an `Exit`."""

    __slots__ = ("_message",)

    def next(self, cell: Any) -> Any:
        """See `Take.next`."""
        extras = cell._extras
        self._message = extras.signals.popleft()
        if not extras.signals:
            extras.signals = None  # an empty deque is 760 octets
        return self._message

    def taken(self, cell: Any) -> Any:
        """See `Take.taken`."""
        return self._message


class Turn:
    """Let go of the worker, so that signals or a new handler table take effect."""

    __slots__ = ()


START: Final = Start()
STOP: Final = Stop(SHUTDOWN)
ROOM: Final = Room()
TAKE: Final = Take()
TURN: Final = Turn()

END_TURN: Final = Turn()
"""What the functions in `dispatch` return when the worker must not go on with the batch."""
