"""Ready-made hooks for ``serve(…, authenticate=…)``."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Self

from levada.actors.authentication import Credentials, Refused
from levada.framework import Identity

__all__ = ["BearerTokens"]


class BearerTokens:
    """Admits clients that show one of some tokens (scheme ``bearer``). It keeps their SHA-256, not the tokens."""

    def __init__(self, identities: Mapping[bytes, Identity]) -> None:
        self._identities = dict(identities)

    @classmethod
    def of(cls, tokens: Mapping[bytes, Identity]) -> Self:
        """Make a hook of tokens that the program knows: for tests and small programs.

        Example:
            >>> BearerTokens.of({b"secret": Identity("ada")})
            <BearerTokens: 1>
        """
        return cls({hashlib.sha256(token).digest(): identity for token, identity in tokens.items()})

    async def __call__(self, credentials: Credentials) -> Identity | Refused:
        """Decide on a client."""
        if credentials.scheme != "bearer":
            return Refused()
        # How long the look-up takes says something about the digest only, and a client cannot choose that.
        return self._identities.get(hashlib.sha256(credentials.token).digest()) or Refused()

    def __repr__(self) -> str:
        return f"<BearerTokens: {len(self._identities)}>"
