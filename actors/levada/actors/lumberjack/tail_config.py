"""How files are followed, and the counters that tell how it goes."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from typing import Any, Literal

import attrs
from attrs import validators as v

from levada.framework.errors import ConfigurationError

__all__ = ["TailConfig", "TailStatus"]


def _pattern(value: str | re.Pattern[str] | None) -> re.Pattern[str] | None:
    try:
        return value if value is None else re.compile(value)
    except re.error as error:
        raise ConfigurationError(f"not a regular expression: {value!r}: {error}") from error


_positive: Any = [v.instance_of((int, float)), v.gt(0)]
_size: Any = [v.instance_of(int), v.ge(1)]


@attrs.frozen(kw_only=True)
class TailConfig:
    """How files are followed. Immutable; derive with `attrs.evolve`."""

    once: bool = attrs.field(default=False, validator=v.instance_of(bool))
    """Read each file to its end, an unfinished last line included, and stop."""
    start: Literal["beginning", "end"] = attrs.field(default="beginning", validator=v.in_(("beginning", "end")))
    """Where to begin in files that exist when the registry is new; files that appear later are read from their beginning."""
    exclude: tuple[str, ...] = attrs.field(default=("*.gz", "*.bz2", "*.xz", "*.zst"), converter=tuple[str, ...])
    """Patterns of names that are left alone although a pattern of files matches them."""
    poll: float = attrs.field(default=0.25, validator=_positive)
    """Seconds between looks at a file that has nothing new."""
    scan: float = attrs.field(default=2.0, validator=_positive)
    """Seconds between looks for files."""
    save: float = attrs.field(default=1.0, validator=_positive)
    """Seconds between writes of the registry; lines acknowledged since the last write are sent again if the process is killed."""
    rotate_wait: float = attrs.field(default=5.0, validator=_positive)
    """Seconds without a new byte after which a file that no pattern names any more (renamed, unlinked) is let go."""
    close_inactive: float = attrs.field(default=300.0, validator=_positive)
    """Seconds without a new byte after which any file is let go, until its size changes; `rotate_wait` while others wait for a place."""
    max_files: int = attrs.field(default=256, validator=_size)
    """Files open at a time; more wait."""
    multiline: re.Pattern[str] | None = attrs.field(default=None, converter=_pattern)
    """A line that contains this begins a record, other lines belong to the record before; ``None``: each line is a record."""
    multiline_timeout: float = attrs.field(default=5.0, validator=_positive)
    """Seconds that a record waits for more lines."""
    max_record: int = attrs.field(default=1 << 20, validator=_size)
    """Bytes of a record of several lines; further lines are left out and the event is marked."""
    max_line: int = attrs.field(default=1 << 20, validator=[*_size, v.le(8 << 20)])
    """Bytes of one line; the rest of it is left out and the event is marked."""
    read_size: int = attrs.field(default=128 * 1024, validator=_size)
    """Bytes read at a time."""
    max_lines: int = attrs.field(default=8192, validator=_size)
    """Records of one file that are read and not acknowledged."""
    max_bytes: int = attrs.field(default=16 << 20, validator=_size)
    """Bytes of such records, with 256 for each; a single batch may be larger."""
    drain_timeout: float = attrs.field(default=10.0, validator=v.ge(0))
    """Seconds that lines under way have to be acknowledged at the end."""
    host: str = attrs.field(factory=socket.gethostname, validator=v.instance_of(str))
    """The value of ``host`` in each event."""
    fields: Mapping[str, str] = attrs.field(factory=dict)
    """Put into each event, besides ``line``, ``host``, ``file`` and ``offset`` (LJ-9)."""


@attrs.frozen
class TailStatus:
    """Counters of a `Tail`; a snapshot."""

    files: int
    """Files being read."""
    waiting: int
    """Files that wait until others are let go."""
    lines_read: int
    lines_acked: int
    lines_cut: int
    """Lines or records that lost a part, see `TailConfig.max_line` and `max_record`."""
    bytes_acked: int
    bytes_behind: int
    """Bytes of files that are not acknowledged: of those being read, those that wait for a place, and, at the end, those that were let go."""
    replacements: int
    """Files truncated or written over."""
    failures: int
    """Actors of files that ended with an error; their files are tried again."""
    save_errors: int
    """Writes of the registry that failed; they are tried again."""
