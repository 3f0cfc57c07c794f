"""Channel ids: which side minted the channel, and in which direction it flows."""

from __future__ import annotations

import enum
from typing import Final

__all__ = ["ENTRYPOINT", "FLOW", "MINTER", "ONESHOT", "SPACES", "Attach"]

FLOW: Final = 1
"""Bit of a channel id: 0 if the channel flows from the client to the server."""
MINTER: Final = 2
"""Bit of a channel id: 0 if the client minted it."""
ONESHOT: Final = 4
"""Bit of a channel id: 1 if the channel carries at most one message."""
SPACES: Final = 7
"""The three bits together. Each value has its own indices, and the ids of one space are 8 apart. Source: AQ-6."""
ENTRYPOINT: Final = 0
"""The channel that exists from the start, from the client to the server."""


class Attach(enum.Enum):
    """The half that a message carries, from the receiving peer's view; the opposite half stays here."""

    SENDER = 0
    RECEIVER = 1
    ONESHOT_SENDER = ONESHOT
    ONESHOT_RECEIVER = ONESHOT | 1
