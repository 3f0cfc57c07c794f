"""Faults of a simulated disk, each at a call that has a name: the third sync of one file.

Nothing here is drawn from a sequence of random numbers. A fault happens at a named call, and `chance` gives each sector and each name a number
of its own. So a failure that was saved happens again when other calls come or go around it.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from typing import Final, TypeAlias

import attrs

__all__ = ["CHANGES", "Call", "Crashed", "DiskFaults", "Fault", "chance"]

CHANGES: Final = frozenset(
    {
        "commit", "create", "fdatasync", "fsync", "link", "mkdir", "rename", "rmdir", "truncate", "unlink", "write",
    }
)  # fmt: skip
"""Kinds of calls that change a disk, or how sure its content is. The other kinds are ``database``, ``map``, ``names``, ``open``, ``read``
and ``stat``."""


class Crashed(BaseException):
    """The simulated process is dead: each call that it still makes raises this.

    It is no `Exception`, as `trio.Cancelled` is none. A dead process must not handle its own death: an actor would be restarted, a sender would
    get an answer. What cleans up on the way out makes calls too, also in a shielded scope. Each of them raises this again, at once, and changes
    nothing. Who started the process catches it.
    """


@attrs.frozen
class Call:
    """A call of one process, by its name."""

    kind: str
    """One of `CHANGES`, or a kind that changes nothing."""
    path: str
    """The file or folder; for ``rename`` and ``link`` the new name."""
    count: int
    """How many calls of this kind for this path the process has made, with this one."""


@attrs.frozen
class Fault:
    """What happens at a call."""

    error: int = 0
    """The `OSError.errno` that it raises; 0 for none."""
    crash: bool = False
    """Whether the process dies here."""
    done: float = 0.0
    """Share of the call that is done before, 0 to 1.

    A write is cut between pages. Without an error or a crash it is a short write, as it is with `errno.ENOSPC` if a part fits. A sync that
    fails brings this share of the sectors to the disk. Other calls are done at 1, and not done below."""


DiskFaults: TypeAlias = Callable[[Call], "Fault | None"]
"""Says what happens at a call; None: nothing does."""


def chance(seed: object, *name: object) -> float:
    """Return a number from 0 up to 1 that belongs to a name under a seed: the same in each process."""
    return int.from_bytes(blake2b(repr((seed, *name)).encode(), digest_size=6).digest(), "little") / (1 << 48)
