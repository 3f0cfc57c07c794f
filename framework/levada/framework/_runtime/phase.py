"""The phases of an actor's life."""

from __future__ import annotations

import enum
from typing import Final

__all__ = ["PAUSED", "RUNNING", "STOPPED", "ActorPhase"]


class ActorPhase(enum.Enum):
    """The phase of an actor's life."""

    RUNNING = "running"
    """It handles messages, or waits for messages."""
    PAUSED = "paused"
    """It is ending, or about to restart: it handles no messages and gets no new children."""
    STOPPED = "stopped"
    """It has ended for good."""


RUNNING: Final = ActorPhase.RUNNING
PAUSED: Final = ActorPhase.PAUSED
STOPPED: Final = ActorPhase.STOPPED
