"""The phases of an actor's life."""

from __future__ import annotations

import enum
from typing import Final

__all__ = ["PAUSED", "RUNNING", "STOPPED", "ActorPhase"]


class ActorPhase(enum.Enum):
    """Where an actor is in its life."""

    RUNNING = "running"
    """It handles messages, or waits for some."""
    PAUSED = "paused"
    """It is ending, or about to start over: it handles no messages and has no new children."""
    STOPPED = "stopped"
    """It has ended for good."""


RUNNING: Final = ActorPhase.RUNNING
PAUSED: Final = ActorPhase.PAUSED
STOPPED: Final = ActorPhase.STOPPED
