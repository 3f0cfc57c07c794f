"""Why actors end, and who is told: reasons, exit signals over links, `Down` notices over monitors.

A **link** ties two fates: when one end stops for any reason but `Normal`, the other stops for the same reason, unless it
has ``trap_exits = True``; then it gets an `Exit` message (for `Normal` too).  A **monitor** is one-way: the watcher gets one
`Down` message and nothing else happens.  Both fire when a ref ends for good; a restart keeps the ref and is not an end.
"""

from __future__ import annotations

from typing import Any

import attrs

__all__ = ["Cancelled", "Down", "Exit", "Failed", "Killed", "Lost", "Normal", "Reason", "Shutdown"]


@attrs.frozen
class Normal:
    """The actor ended by itself."""


@attrs.frozen
class Shutdown:
    """Somebody asked the actor to stop: `Ref.stop`, its parent, or the system."""


@attrs.frozen
class Killed:
    """`Ref.kill`: the running handler was cancelled."""


@attrs.frozen
class Cancelled:
    """The scope around the whole system was cancelled."""


@attrs.frozen
class Failed:
    """A handler, a hook or a background task of the actor raised."""

    error: BaseException
    """What it raised; a group stays a group."""


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
    """Choose the more severe of two reasons: an error, then a request to end, then a lost peer, then a normal end.

    Of two equals the first one wins.
    """
    return second if _SEVERITY[type(second)] > _SEVERITY[type(first)] else first


@attrs.frozen(eq=False)
class Exit:
    """A linked actor or channel ended; delivered to actors with ``trap_exits = True``."""

    ref: Any
    """What ended: the `Ref` of an actor, or a channel's `Sender` or `Receiver`."""
    reason: Reason
    """Why."""


@attrs.frozen(eq=False)
class Down:
    """A watched actor or channel ended; one for each watch, at once if it had ended already."""

    ref: Any
    """What ended: a `Ref`, or a channel's `Sender` or `Receiver`."""
    reason: Any
    """A `Reason`; for a channel the `ChannelError`, or ``None`` if it was finished in order."""
    tag: Any = None
    """What was given to `Actor.watch`."""
