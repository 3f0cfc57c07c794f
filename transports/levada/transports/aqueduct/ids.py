"""Channel ids: who minted one, and which way it flows."""

from __future__ import annotations

import enum
from typing import Final

__all__ = ["ENTRYPOINT", "FLOW", "MINTER", "ONESHOT", "SPACES", "Attach"]

FLOW: Final = 1
"""Bit of a channel id: 0 if the channel flows from the client to the server."""
MINTER: Final = 2
"""Bit of a channel id: 0 if the client minted it."""
ONESHOT: Final = 4
"""Bit of a channel id: the channel carries at most one message."""
SPACES: Final = 7
"""The three bits together: each value has indices of its own, and ids of one space are 8 apart. Source: AQ-6."""
ENTRYPOINT: Final = 0
"""The channel that is there from the start, from the client to the server."""


class Attach(enum.Enum):
    """What travels inside a message, seen from the peer that gets it; the opposite half stays here."""

    SENDER = 0
    RECEIVER = 1
    ONESHOT_SENDER = ONESHOT
    ONESHOT_RECEIVER = ONESHOT | 1
