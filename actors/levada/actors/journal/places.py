"""Where an archive is: a folder, or a URL. Apart from `archive.py`, because Arrow's Parquet takes 50 ms to import."""

from __future__ import annotations

import os
from urllib.parse import urlsplit

from levada.framework.errors import ConfigurationError
from levada.framework.files import StrPath, folder_path

__all__ = ["archive_place", "is_url", "shown"]


def archive_place(place: StrPath) -> str:
    """Return where an archive is, as a question has it: an absolute path, or a URL.

    Raises:
        ConfigurationError: it is empty or no text, or the URL has a password.
    """
    text = os.fspath(place)
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


def is_url(place: str) -> bool:
    """Whether an archive is at a URL."""
    return "://" in place


def shown(place: str) -> str:
    """Return where an archive is, without what may be secret."""
    parts = urlsplit(place)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}" if is_url(place) else place
