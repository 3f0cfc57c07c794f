"""Signals that a long-running program obeys: some end it, others only request something."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["COUNT", "ENDS", "RELOAD", "late_ones_dropped"]

ENDS = (signal.SIGINT, signal.SIGTERM)
# Windows has neither; a signal of number 0 never comes.
COUNT = getattr(signal, "SIGUSR1", 0)
RELOAD = getattr(signal, "SIGHUP", 0)


@contextmanager
def late_ones_dropped(*wishes: int) -> Iterator[list[int]]:
    """Around ``trio.run``: give the signals to listen to; a request that comes after the listener has ended is dropped.

    trio raises again what its receiver did not hand out, and the default of a wish would kill a program that is about to end as it was
    told to. It may well come behind a SIGTERM that was sent later, as any thread can be the one that gets it.
    """
    wanted = [number for number in wishes if number]
    before = [(number, signal.signal(number, _drop)) for number in wanted]
    try:
        yield [*ENDS, *wanted]
    finally:
        for number, handler in before:
            signal.signal(number, handler)


def _drop(number: int, frame: object) -> None:
    """Take a signal and do nothing. With ``SIG_IGN`` Python would complain of a signal that comes while handlers change."""
