"""How much slower than the machine of the stated figures one may be on which tests run."""

from __future__ import annotations

PATIENCE = 5.0
"""Time limits of tests, and CPU seconds that code may take, count that often. Virtual machines count time of which their host robbed them as
CPU time too, in pieces of half a second, so no figure taken in the same process says how slow one is.
"""

exact = False
"""Whether CPU seconds are held to the stated figures: in the profiles that want a quiet machine."""


def every(step: int) -> int:
    """Return the step between the places that a test tries: 1 in the profiles that want a quiet machine, which have the time for all of them."""
    return 1 if exact else step


def within(spent: float, seconds: float) -> bool:
    """Whether CPU seconds are within what is stated, or what a slower machine may make of it."""
    return spent < seconds * (1.0 if exact else PATIENCE)
