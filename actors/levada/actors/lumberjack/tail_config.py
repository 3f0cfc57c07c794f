"""The settings of `tail`, and its counters."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

import attrs
from attrs import validators as v

from levada.framework.errors import ConfigurationError
from levada.framework.platform import PLATFORM
from levada.framework.text import texts

__all__ = ["TailConfig", "TailStatus"]


def _pattern(value: str | re.Pattern[str] | None) -> re.Pattern[str] | None:
    try:
        return value if value is None else re.compile(value)
    except re.error as error:
        raise ConfigurationError(f"{value!r} is not a regular expression: {error}") from error


_positive: Any = [v.instance_of((int, float)), v.gt(0)]
_size: Any = [v.instance_of(int), v.ge(1)]


@attrs.frozen(kw_only=True)
class TailConfig:
    """How files are followed. Immutable; derive with `attrs.evolve`."""

    once: bool = attrs.field(default=False, validator=v.instance_of(bool))
    """Read each file to its end, including an unfinished last line, and stop."""
    start: Literal["beginning", "end"] = attrs.field(default="beginning", validator=v.in_(("beginning", "end")))
    """Where to begin in files that exist when the registry is new. Files that appear later are read from their beginning."""
    exclude: tuple[str, ...] = attrs.field(default=("*.gz", "*.bz2", "*.xz", "*.zst"), converter=texts)
    """Patterns of file names that are not followed, although another pattern matches them."""
    poll: float = attrs.field(default=0.25, validator=_positive)
    """Seconds between looks at a file that has no new bytes."""
    scan: float = attrs.field(default=2.0, validator=_positive)
    """Seconds between looks for new files."""
    save: float = attrs.field(default=1.0, validator=_positive)
    """Seconds between writes of the registry. After a kill, lines acknowledged since the last write are sent again."""
    rotate_wait: float = attrs.field(default=5.0, validator=_positive)
    """Seconds without a new byte after which a file that no pattern matches any more (renamed, unlinked) is closed, or not searched for."""
    close_inactive: float = attrs.field(default=300.0, validator=_positive)
    """Seconds without a new byte after which any file is closed until it changes; while others wait, a file is closed at its end."""
    max_files: int = attrs.field(default=256, validator=_size)
    """Files that are open at a time, and at most half of the descriptors of the process. Others wait."""
    multiline: re.Pattern[str] | None = attrs.field(default=None, converter=_pattern)
    """A line that contains this begins a record, and other lines belong to the record before; ``None``: each line is a record."""
    multiline_timeout: float = attrs.field(default=5.0, validator=_positive)
    """Seconds that a record waits for more lines."""
    max_record: int = attrs.field(default=1 << 20, validator=_size)
    """Bytes of a record of several lines. Further lines are left out, and the event has a field ``cut``."""
    max_line: int = attrs.field(default=1 << 20, validator=[*_size, v.le(8 << 20)])
    """Bytes of one line. The rest is left out, and the event has a field ``cut``."""
    read_size: int = attrs.field(default=128 * 1024, validator=_size)
    """Bytes read at a time."""
    max_lines: int = attrs.field(default=8192, validator=_size)
    """Records of one file that are read and not acknowledged."""
    max_bytes: int = attrs.field(default=16 << 20, validator=_size)
    """Bytes of such records, plus 256 for each; a single batch may be larger."""
    drain_timeout: float = attrs.field(default=10.0, validator=v.ge(0))
    """Seconds that the end waits for acknowledgements of lines under way."""
    host: str = attrs.field(factory=lambda: PLATFORM.get().host(), validator=v.instance_of(str))
    """The value of ``host`` in each event."""
    fields: Mapping[str, str] = attrs.field(factory=dict)
    """Added to each event, besides ``line``, ``host``, ``file`` and ``offset`` (LJ-9)."""


@attrs.frozen
class TailStatus:
    """Counters of a `Tail`; a snapshot."""

    files: int
    """Files being read."""
    waiting: int
    """Files that wait until others are closed."""
    lines_read: int
    lines_acked: int
    lines_cut: int
    """Records that lost a part because of `TailConfig.max_line` or `max_record`."""
    bytes_acked: int
    bytes_behind: int
    """Unacknowledged bytes of the files that are being read, wait or cannot be read, and of those that were closed undelivered at the end."""
    replacements: int
    """Files that were truncated or overwritten."""
    failures: int
    """Actors of files that ended with an error, and files that could not be opened or read. They are tried again."""
    save_errors: int
    """Writes of the registry that failed. They are tried again."""
