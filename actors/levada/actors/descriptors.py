"""The limit of the file descriptors of this process."""

from __future__ import annotations

import contextlib
import errno

try:
    import resource
except ModuleNotFoundError:  # not a POSIX system
    resource = None  # type: ignore[assignment]

__all__ = ["NO_ROOM", "descriptor_limit", "raise_descriptor_limit"]

NO_ROOM = frozenset({errno.EMFILE, errno.ENFILE})
"""Numbers of the errors that say that no descriptor is free, in this process or in the system."""

_MOST = 1 << 20  # programs that close every possible descriptor take a second for a million


def descriptor_limit() -> int:
    """Return the number of descriptors that this process may have open."""
    if resource is None:
        return _MOST
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST if soft == resource.RLIM_INFINITY else soft


def raise_descriptor_limit() -> None:
    """Raise the soft limit of this process to the hard limit, up to a million.

    The soft limit is for programs that call ``select``, which cannot watch more than 1,024 descriptors.  trio does not call it.
    """
    if resource is None:
        return
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if most > descriptor_limit():
        with contextlib.suppress(OSError, ValueError):  # macOS has a limit of its own below the hard one
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
