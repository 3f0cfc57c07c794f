"""Why actors end, and who learns of it: reasons, exit signals over links, `Down` notices over monitors.

A **link** works both ways: when one actor stops for any reason but `Normal`, the other stops for the same reason. If the other has
``trap_exits = True`` it gets an `Exit` message instead (for `Normal` too).  A **monitor** is one-way: the watcher gets one
`Down` message and nothing else happens.  Both fire when a ref ends for good; a restart keeps the ref and is not an end.
"""

from __future__ import annotations

import functools
from typing import Any

import attrs

from .text import text_of

__all__ = ["Cancelled", "Down", "Exit", "Failed", "Killed", "Lost", "Normal", "Reason", "Shutdown"]


@attrs.frozen
class Normal:
    """The actor ended by itself."""


@attrs.frozen
class Shutdown:
    """The actor was asked to stop: by `Ref.stop`, its parent, or the system."""


@attrs.frozen
class Killed:
    """`Ref.kill`: the running handler was cancelled."""


@attrs.frozen
class Cancelled:
    """The scope around the whole system was cancelled."""


@attrs.frozen
class Failed:
    """A handler, a hook or a background task of the actor raised."""

    error: BaseException = attrs.field(repr=functools.partial(text_of, write=repr))
    """The exception; a group stays a group."""


@attrs.frozen
class Lost:
    """The connection to the system where the actor lives was lost."""

    peer: str
    """Address of the other system, as in logs."""


Reason = Normal | Shutdown | Killed | Cancelled | Failed | Lost
"""Why an actor ended."""

_SEVERITY: dict[type, int] = {Normal: 0, Lost: 1, Shutdown: 2, Killed: 2, Cancelled: 2, Failed: 3}

NORMAL = Normal()
SHUTDOWN = Shutdown()
KILLED = Killed()
CANCELLED = Cancelled()


def more_severe(first: Reason, second: Reason) -> Reason:
    """Return the more severe reason (error, request to end, lost peer, normal end); if both are equal, the first."""
    return second if _SEVERITY[type(second)] > _SEVERITY[type(first)] else first


@attrs.frozen(eq=False)
class Exit:
    """A linked actor or channel ended; delivered to actors with ``trap_exits = True``."""

    ref: Any
    """The `Ref` of the actor, or the channel's `Sender` or `Receiver`."""
    reason: Reason
    """Why it ended."""


@attrs.frozen(eq=False)
class Down:
    """A watched actor or channel ended; one for each watch, at once if it had ended already."""

    ref: Any
    """The `Ref` of the actor, or the channel's `Sender` or `Receiver`."""
    reason: Any
    """A `Reason`; for a channel the `ChannelError`, or ``None`` if it was finished in order."""
    tag: Any = None
    """The tag given to `Actor.watch`."""
