"""Mailbox policies: the capacity, and what happens on overflow. The queues are in `levada.framework._runtime.cell`."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Literal

import attrs

from .errors import ConfigurationError

__all__ = ["Conflate", "MailboxPolicy", "Overflow", "bounded", "conflate", "unbounded"]


@attrs.frozen
class Conflate:
    """Overflow policy: a message replaces a queued one with the same key, and takes its place in the queue."""

    key: Callable[[Any], Hashable]
    """Returns the key of a message. If the key cannot be hashed, the sender gets a `TypeError`."""


Overflow = Literal["wait", "raise", "drop_new", "drop_old", "stop"] | Conflate
"""What a full mailbox does with another message; see `bounded`."""

_WORDS = ("wait", "raise", "drop_new", "drop_old", "stop")


@attrs.frozen
class MailboxPolicy:
    """The capacity of a mailbox, and what it does when full. Made by `bounded` and `unbounded`."""

    capacity: int | None
    """How many messages may wait; ``None``: no bound."""
    overflow: Overflow
    """What happens to another message when it is full."""


def unbounded() -> MailboxPolicy:
    """Make a mailbox without a bound: right where you know the senders, wrong where a network feeds it."""
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
        capacity: 1 or more messages, including those taken but not yet handled.
        overflow: one of the words above, or the result of `conflate`.

    Raises:
        ConfigurationError: a capacity below 1 or an unknown word.
    """
    if not isinstance(capacity, int) or capacity < 1:
        raise ConfigurationError(f"the capacity of the mailbox is {capacity!r}, wanted 1 message or more")
    if not isinstance(overflow, Conflate) and overflow not in _WORDS:
        raise ConfigurationError(f"overflow is {overflow!r}, wanted one of {', '.join(_WORDS)} or conflate(key)")
    return MailboxPolicy(capacity, overflow)


def conflate(key: Callable[[Any], Hashable]) -> Conflate:
    """Keep only the newest queued message of each key; for ``bounded(…, overflow=conflate(key))``.

    When `capacity` different keys wait, the oldest message is dropped.  Asks are never conflated with one another.
    """
    return Conflate(key)
