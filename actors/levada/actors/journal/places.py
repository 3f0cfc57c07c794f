"""Where an archive is: a folder, or a URL; and what a log remembers of it. Apart from `archive.py`, because Arrow's Parquet takes 50 ms to import."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

import attrs

from levada.framework.errors import ConfigurationError
from levada.framework.files import StrPath, folder_path

from .errors import JournalError

__all__ = ["Archived", "archive_place", "is_url", "misplaced", "require_named", "shown"]

_ONE_SLASH: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/(?!/)")


@attrs.frozen
class Archived:
    """What a log remembers of the archive of a shard."""

    place: str
    """A folder or a URL, see `archive_place`."""
    end: int
    """All rows before this offset are there, or were trimmed without it. 0: perhaps none are."""


def require_named(known: Archived | None, place: str, shard: int, log: str) -> None:
    """Require that who takes rows out of a log names the archive that it has: rows must not pass it by.

    Raises:
        JournalError: there is an archive, and `place` is empty.
    """
    if known is not None and not place:
        raise JournalError(
            f"shard {shard} has old rows in the archive {shown(known.place)}, and it is not named: give shards(keep=Keep(…, archive=…)) or "
            "levada journal trim --archive; or, if it is gone for good, levada journal trim --forget-archive",
            path=log,
        )


def archive_place(place: StrPath) -> str:
    """Return where an archive is, as a question has it: an absolute path, or a URL.

    Raises:
        ConfigurationError: it is empty or no text, the URL has a password or one slash, or the path begins with ``~``.
    """
    text = os.fspath(place)
    if _ONE_SLASH.match(text):
        raise ConfigurationError(
            "the archive begins as a URL with one slash: two are behind the colon, as in s3://bucket/accounts"
        )
    if not is_url(text):
        text = str(folder_path(text).absolute())
    elif urlsplit(text).password is not None:
        raise ConfigurationError(
            f"the URL of the archive, {shown(text)}, has a password: give it by the environment, or by a file of the cloud's own"
        )
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigurationError(f"the archive is {text!r:.100}, which is no Unicode text") from None
    return text


def misplaced(place: str, log: Path) -> str:
    """Say why an archive cannot be there for a log in a folder: one is inside the other. Empty if it can."""
    if not place or (is_url(place) and not place.startswith("file:")):
        return ""
    archive = Path(unquote(urlsplit(place).path) if is_url(place) else place).resolve()
    folder = log.resolve()
    if archive.is_relative_to(folder):
        return f"the archive {archive} is inside its log {folder}: name a folder elsewhere, best on another disk"
    if folder.is_relative_to(archive):
        return f"the log {folder} is inside its archive {archive}: name a folder elsewhere, best on another disk"
    return ""


def is_url(place: str) -> bool:
    """Whether an archive is at a URL."""
    return "://" in place


def shown(place: str) -> str:
    """Return where an archive is, without what may be secret."""
    parts = urlsplit(place)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}" if is_url(place) else place
