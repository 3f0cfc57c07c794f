"""Records of strikes, by name, so that they outlive changes of the code."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterable, Mapping
from math import inf
from typing import Any, Final, Literal, get_args

import attrs
from attrs import validators as v

from .faults import CHANGES, Fault

__all__ = ["AT_A_CALL", "REFUSALS", "Kind", "Moment", "Strike", "as_code"]

Kind = Literal[
    "kill",
    "crash",
    "error",
    "pause",
    "cut",
    "zombie",
    "power failure",
    "disk errors",
    "full disk",
    "slow disk",
    "clock",
]
"""What may happen."""
AT_A_CALL: Final = ("crash", "error")
"""What happens in a call of the disk."""
REFUSALS: Final[Mapping[str, tuple[frozenset[str], Fault]]] = {
    "syncs": (frozenset({"commit", "fdatasync", "fsync"}), Fault(errno.EIO)),
    "writes": (frozenset({"write"}), Fault(errno.EIO, done=0.5)),
    "changes": (CHANGES, Fault(errno.EIO)),
    "reads": (frozenset({"database", "map", "names", "open", "read", "stat"}), Fault(errno.EIO)),
    "openings": (frozenset({"create", "database", "open"}), Fault(errno.EMFILE)),
    "short writes": (frozenset({"write"}), Fault(done=0.5)),
}
"""What a disk may refuse for a while: kinds of calls, and what becomes of them."""


def _code_of(record: Any) -> str:
    """Return a record as Python: the arguments by place first, then those that differ from their defaults."""
    parts = []
    for field in attrs.fields(type(record)):
        value = getattr(record, field.name)
        if not field.kw_only:
            parts.append(_text(value))
        elif value != field.default:
            parts.append(f"{field.name}={_text(value)}")
    return f"{type(record).__name__}({', '.join(parts)})"


def _text(value: object) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)  # as formatters quote


@attrs.frozen(repr=False)
class Moment:
    """A moment in a world, by its name: the third `Bid` that the processes of a name handle, or their second sync of a file."""

    process: str
    """The name of the process; those that were started after each other under one name count on."""
    name: str
    """A message class that an actor is about to handle, or a kind of `Call`."""
    count: int = attrs.field(validator=[v.instance_of(int), v.ge(1)])
    """Which of them, from 1."""
    path: str = attrs.field(default="", kw_only=True)
    """Of a call: `Call.path`."""

    def __repr__(self) -> str:
        return _code_of(self)


@attrs.frozen(repr=False)
class Strike:
    """One strike of a world. Its `repr` makes it again."""

    what: Kind = attrs.field(validator=v.in_(get_args(Kind)))
    """What happens. A ``"crash"`` ends the process in a call of its disk, and an ``"error"`` is a call that fails with `errno.EIO`."""
    whom: str
    """The name of a process; of a machine for its power and its disk."""
    at: float | Moment = attrs.field(kw_only=True, validator=v.instance_of((int, float, Moment)))
    """Seconds of virtual time, or a moment; for a crash and an error always the call, as a moment of `whom`."""
    after: float = attrs.field(default=0.0, kw_only=True, validator=[v.ge(0), v.lt(inf)])
    """Seconds behind the moment."""
    seconds: float = attrs.field(default=0.0, kw_only=True)
    """How long it takes; for a clock how far it jumps."""
    earlier: int = attrs.field(default=0, kw_only=True, validator=v.ge(0))
    """How many processes of the name were started after it: 1 if it is taken for dead, and its successor runs."""
    other: str = attrs.field(default="", kw_only=True)
    """Of a cut: the process at the other end."""
    one_way: bool = attrs.field(default=False, kw_only=True)
    """Of a cut: whether what `other` sends still arrives."""
    stopped: bool = attrs.field(default=False, kw_only=True)
    """Of a zombie: whether it is paused for the first half of the time."""
    calls: str = attrs.field(default="", kw_only=True)
    """Of disk errors: which calls, such as ``"syncs"``."""
    share: float = attrs.field(default=0.0, kw_only=True, validator=[v.ge(0), v.le(1)])
    """Of disk errors: the share of the calls. Of a crash and an error: the share of the call that is done, see `Fault.done`."""
    seed: int = attrs.field(default=0, kw_only=True)
    """Of disk errors: decides which of the calls."""
    sync_time: float = attrs.field(default=0.0, kw_only=True, validator=v.ge(0))
    """Of a slow disk: seconds of each sync."""

    def __attrs_post_init__(self) -> None:
        if self.what in AT_A_CALL and not (
            isinstance(self.at, Moment) and self.at.path and self.at.process == self.whom
        ):
            raise ValueError(f"{self.what!r} happens at a call of the disk of {self.whom!r}, not at {self.at!r}")
        if self.what == "disk errors" and self.calls not in REFUSALS:
            raise ValueError(f"'calls' are {', '.join(REFUSALS)}; not {self.calls!r}")

    def __repr__(self) -> str:
        return _code_of(self)


def as_code(strikes: Iterable[Strike]) -> str:
    """Return strikes as an argument of `simulate`."""
    lines = "".join(f"    {strike!r},\n" for strike in strikes)
    return f"strikes=[\n{lines}]" if lines else "strikes=[]"
