"""What both sides of a channel read when the code with a handle ends.

The error of a handle may have all; `ChannelCancelled.reason` also reaches peers, so it says what the code has lost, or only that it
failed, and never the text of an error.
"""

from __future__ import annotations

from typing import Final

import trio

from levada.framework.errors import loss_of
from levada.framework.links import CANCELLED, KILLED, NORMAL, SHUTDOWN, Failed, Lost, Normal, Reason, Shutdown
from levada.framework.text import error_text

__all__ = ["ForPeers", "describe_end", "reason_of_block", "reason_of_end"]


class ForPeers(str):
    """Why a trio scope was cancelled, in words that peers may read. trio shows them in a `trio.Cancelled` that somebody logs."""


def describe_end(reason: Reason) -> str:
    """Describe an actor's end, for the error at the other side."""
    if isinstance(reason, Failed):
        return f"failed: {error_text(reason.error)}"
    if isinstance(reason, Normal | Shutdown):
        return "has stopped"
    return f"has stopped ({type(reason).__name__.lower()})"


def reason_of_end(reason: Reason) -> ForPeers:
    """Return why an actor's channels are cancelled at its end."""
    if isinstance(reason, Failed):
        return ForPeers(loss_of(reason.error) or "its actor has failed")
    return _ENDS[type(reason)]


_ENDS: Final = {
    type(each): ForPeers(f"its actor {describe_end(each)}") for each in (NORMAL, SHUTDOWN, KILLED, CANCELLED, Lost(""))
}
"""Not made anew for each end: a scope keeps its reason as long as a timer keeps the scope."""


def reason_of_block(error: BaseException) -> str:
    """Return why a channel is cancelled whose block an error has left.

    Of a cancellation the innermost scope counts, as trio has it: if that was due at the same time, nothing of the actor is known.
    """
    failure = error.split(trio.Cancelled)[1] if isinstance(error, BaseExceptionGroup) else error
    if isinstance(failure, Exception):
        return loss_of(failure) or "the sender has failed"
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, trio.Cancelled) and isinstance(error.reason, ForPeers):
        return error.reason
    return "its task was cancelled"
