"""A link between an actor and a channel: `Actor.link` with a sender or a receiver.

It works like a link between two actors.  A channel that finishes ends with the reason `Normal`, which ends no actor; so does a channel that
this side ends itself, by cancelling the sender or closing the receiver.  If the other side or the network ends the channel, the actor ends.

Private fields used here: ``Cell._extras``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from levada.framework.errors import ChannelError
from levada.framework.links import NORMAL, Failed, Lost, Normal, Reason

from .cell import Cell
from .channel_core import TerminalState

__all__ = ["ChannelLink"]

_LOST = (TerminalState.LOST, TerminalState.CONNECTION_LOST)


class ChannelLink:
    """The channel's end of a link; kept among the actor's links, like a ref."""

    __slots__ = ("_cell", "_forget", "handle")

    def __init__(self, cell: Cell, handle: Any) -> None:
        self._cell = cell
        self._forget: Callable[[], None] = _nothing
        self.handle = handle

    @classmethod
    def find(cls, cell: Cell, handle: Any) -> ChannelLink | None:
        """Return the link between an actor and a handle, or None."""
        links = cell._extras.links if cell._extras is not None else None
        for link in links or ():
            if isinstance(link, cls) and link.handle is handle:
                return link
        return None

    def tie(self) -> None:
        """Start the link; if the channel has ended, the signal comes at once.

        Raises:
            HandleMoved: the handle was sent away.
        """
        self._cell.tie(self)
        try:
            self._forget = self.handle.on_terminated(self._ended)
        except BaseException:
            self._cell.untie(self)
            raise

    def cut(self) -> None:
        """Remove the link."""
        self._forget()
        self._cell.untie(self)

    def _ended(self, state: TerminalState, error: ChannelError | None) -> None:
        cell, handle = self._cell, self.handle
        cell.untie(self)
        reason: Reason = NORMAL
        if state in _LOST:
            reason = Lost(handle.name)
        elif error is not None and state is not _OWN[hasattr(handle, "receive")]:
            reason = Failed(error)
        cell.system.lifecycle.exit_signal(cell, handle, reason)

    def exited(self, _: Cell, reason: Reason) -> None:
        """End the channel, since the actor has ended. A handle that was sent away is left alone."""
        self._forget()
        handle = self.handle
        if not isinstance(reason, Normal):
            handle.disown(reason)


_OWN = {False: TerminalState.CANCELLED, True: TerminalState.RECEIVER_CLOSED}
"""How the owner of a sender, and of a receiver, ends the channel itself."""


def _nothing() -> None:
    """The placeholder of `_forget` until the link is tied."""
