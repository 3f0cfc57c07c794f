"""A link between an actor and a channel: what `Actor.link` does with a sender or a receiver.

The fates are tied as those of two actors are.  An end in order is `Normal` and ends nobody; so is one that this side's handle asked for
itself: a sender that is cancelled, a receiver that is closed.  What the other side does, or the network, ends the actor.

Private fields used here: ``Cell._extras``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from levada.framework.errors import ChannelError
from levada.framework.links import NORMAL, Failed, Lost, Normal, Reason

from .cell import Cell
from .channel_core import TerminalState
from .remains import how_it_ended

__all__ = ["ChannelLink"]

_LOST = (TerminalState.LOST, TerminalState.CONNECTION_LOST)


class ChannelLink:
    """The channel's end of a link; stands among the links of the actor as a ref would."""

    __slots__ = ("_cell", "_forget", "handle")

    def __init__(self, cell: Cell, handle: Any) -> None:
        self._cell = cell
        self._forget: Callable[[], None] = _nothing
        self.handle = handle

    @classmethod
    def find(cls, cell: Cell, handle: Any) -> ChannelLink | None:
        """Find the link of an actor with a handle."""
        links = cell._extras.links if cell._extras is not None else None
        for link in links or ():
            if isinstance(link, cls) and link.handle is handle:
                return link
        return None

    def tie(self) -> None:
        """Begin; if the channel has ended, the signal comes at once.

        Raises:
            HandleMoved: the handle was sent away before.
        """
        self._cell.tie(self)
        try:
            self._forget = self.handle.on_terminated(self._ended)
        except BaseException:
            self._cell.untie(self)
            raise

    def cut(self) -> None:
        """Untie."""
        self._forget()
        self._cell.untie(self)

    def _ended(self, state: TerminalState, error: ChannelError | None) -> None:
        """The channel has ended."""
        cell, handle = self._cell, self.handle
        cell.untie(self)
        reason: Reason = NORMAL
        if state in _LOST:
            reason = Lost(handle.name)
        elif error is not None and state is not _OWN[hasattr(handle, "receive")]:
            reason = Failed(error)
        cell.system.lifecycle.exit_signal(cell, handle, reason)

    # What the end of the actor asks of those it is linked to.

    def exited(self, _: Cell, reason: Reason) -> None:
        """The actor has ended: nobody will use the handle, unless it has gone elsewhere."""
        self._forget()
        handle = self.handle
        if not isinstance(reason, Normal):
            handle.disown(how_it_ended(reason), reason.error if isinstance(reason, Failed) else None)


_OWN = {False: TerminalState.CANCELLED, True: TerminalState.RECEIVER_CLOSED}
"""How the owner of a sender, and of a receiver, ends the channel itself."""


def _nothing() -> None:
    """There is nothing to take back yet."""
