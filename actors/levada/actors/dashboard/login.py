"""The login: one-time tokens, and the signed cookies that browsers get for them."""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

from levada.framework.errors import ConfigurationError
from levada.framework.platform import PLATFORM

__all__ = ["LASTING", "Login", "key_from"]

LASTING: Final = 12 * 3600
"""Seconds for which a cookie is valid."""
_TOKENS: Final = 16
"""The most unused tokens; one more replaces the oldest."""
_KEY: Final = 32


def key_from(path: Path | None) -> bytes:
    """Read the key for cookies; make it if the file is missing.

    Raises:
        ConfigurationError: the file cannot be read or made, other users can read it, or it does not contain a key.
    """
    platform = PLATFORM.get()
    if path is None:
        return platform.token_bytes(_KEY)
    files = platform.files
    try:
        try:
            file = files.open(path, os.O_RDONLY)
        except FileNotFoundError:
            file = files.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            files.pwrite(file, platform.token_bytes(_KEY), 0)
        try:
            if files.fstat(file).st_mode & 0o077:
                raise ConfigurationError(f"other users can read {path}: chmod 600 it, or delete it")
            key = files.pread(file, _KEY + 1, 0)
        finally:
            files.close(file)
    except OSError as error:
        raise ConfigurationError(f"cannot use {path} for the key of a dashboard: {error.strerror}") from error
    if len(key) != _KEY:
        raise ConfigurationError(f"{path} is not the key of a dashboard ({_KEY} bytes): delete it")
    return key


class Login:
    """Makes and checks tokens and cookies. It keeps no sessions: a cookie has its own signature and expiry.

    Args:
        key: signs cookies.
        clock: returns seconds since 1970; ``None``: `Platform.time`.
    """

    def __init__(self, key: bytes, clock: Callable[[], float] | None = None) -> None:
        self._key = key
        platform = PLATFORM.get()
        self._clock = clock or platform.time
        self._token_bytes = platform.token_bytes
        self._tokens: list[bytes] = []  # digests, so that a memory dump does not show the tokens

    def __repr__(self) -> str:
        return f"<Login: {len(self._tokens)} tokens>"

    def token(self) -> str:
        """Make a token for one login."""
        token = self._token_bytes(_KEY).hex()
        self._tokens = [*self._tokens[1 - _TOKENS :], _hashed(token)]
        return token

    def redeem(self, token: str) -> bool:
        """Use a token up; return whether it was valid."""
        hashed = _hashed(token)
        right = [hmac.compare_digest(hashed, each) for each in self._tokens]
        self._tokens = [each for each, used in zip(self._tokens, right, strict=True) if not used]
        return any(right)

    def cookie(self) -> str:
        """Make the value of a cookie."""
        text = f"{int(self._clock()) + LASTING}.{self._token_bytes(12).hex()}"
        return f"{text}.{self._signature(text)}"

    def admits(self, cookie: str) -> bool:
        """Return whether a cookie was signed with this key and has not expired."""
        text, _, signature = cookie.rpartition(".")
        if not hmac.compare_digest(signature.encode(), self._signature(text).encode()):
            return False
        return int(text.partition(".")[0]) > self._clock()

    def _signature(self, text: str) -> str:
        return hmac.new(self._key, b"levada dashboard cookie\n" + text.encode(), hashlib.sha256).hexdigest()


def _hashed(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
