"""How many messages may wait for an actor, and what happens to one more.

A policy only; the queues themselves are in `levada.framework._runtime.cell`, beside the code that drains them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Literal

import attrs

from .errors import ConfigurationError

__all__ = ["Conflate", "MailboxPolicy", "Overflow", "bounded", "conflate", "unbounded"]


@attrs.frozen
class Conflate:
    """Overflow policy: of the queued messages with equal keys only the newest is kept, in the place of the oldest."""

    key: Callable[[Any], Hashable]
    """Takes a message, gives its key. A key that cannot be hashed is a `TypeError` for whoever sends."""


Overflow = Literal["wait", "raise", "drop_new", "drop_old", "stop"] | Conflate
"""What a full mailbox does with one more message; see `bounded`."""

_WORDS = ("wait", "raise", "drop_new", "drop_old", "stop")


@attrs.frozen
class MailboxPolicy:
    """Capacity of a mailbox and what it does when full. Made by `bounded` and `unbounded`."""

    capacity: int | None
    """Messages that may wait; ``None``: no bound."""
    overflow: Overflow
    """What happens to one more."""


def unbounded() -> MailboxPolicy:
    """Make a mailbox without a bound: right inside a process where senders are known, wrong for whatever a network feeds."""
    return MailboxPolicy(None, "wait")


def bounded(capacity: int = 1024, *, overflow: Overflow = "wait") -> MailboxPolicy:
    """Make a mailbox that holds at most `capacity` messages.

    ========== ================================ ==================================
    overflow   `Ref.tell` to a full mailbox     `Ref.send`, `Ref.ask`
    ========== ================================ ==================================
    wait       raises `MailboxFull`             wait for room, first come first served
    raise      raises `MailboxFull`             raise `MailboxFull`
    drop_new   the new message: dead letter     the same (an ask fails with `MailboxFull`)
    drop_old   the oldest message: dead letter  the same (a dropped ask fails with `MailboxFull`)
    stop       the actor fails, `MailboxFull`   the same
    conflate   see `conflate`; else drop_old    the same
    ========== ================================ ==================================

    Args:
        capacity: 1 or more messages, those taken but not handled yet included.
        overflow: one of the words above, or what `conflate` makes.

    Raises:
        ConfigurationError: a capacity below 1 or an unknown word.
    """
    if not isinstance(capacity, int) or capacity < 1:
        raise ConfigurationError(f"a mailbox holds 1 message or more, not {capacity!r}")
    if not isinstance(overflow, Conflate) and overflow not in _WORDS:
        raise ConfigurationError(f"overflow is one of {', '.join(_WORDS)} or conflate(key), not {overflow!r}")
    return MailboxPolicy(capacity, overflow)


def conflate(key: Callable[[Any], Hashable]) -> Conflate:
    """Keep only the newest of the queued messages that have the same key; for ``bounded(…, overflow=conflate(key))``.

    Once `capacity` different keys wait, the oldest message makes room.  Asks are never conflated with one another.
    """
    return Conflate(key)
