"""How long the run queue works between checkpoints, and how many of its turns are measured."""

from __future__ import annotations

from typing import Final

__all__ = ["EVERY", "SLICE"]

SLICE: Final = 0.0005
"""Seconds between checkpoints. Any value from 0.2 to 10 ms costs the same; timers of other tasks are late by one to one and a half slices."""

EVERY: Final = 63
"""One turn in so many is measured, of those that are no longer than a slice.

The number is odd, because in a quiet system a slice is one turn and one look at the empty queue: with an even number the last item would always
be that look.
"""
