"""The authenticator of a server's connection: it decides on one client, then stops.

If it fails or is stopped, the client is turned away. If it takes longer than the core allows, it is killed. Source: MA-19, MA-20.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs

from levada.framework import Actor, Reason, Ref, handles

from .identities import Authentication, Denied, Identity

if TYPE_CHECKING:
    from .server import ServerConnection

__all__ = ["DECIDE", "Authenticator"]


class Decide:
    """Tells an authenticator to check the credentials. It does not carry them, because messages that fail are published."""

    __slots__ = ()


DECIDE = Decide()


class Authenticator(Actor[Decide]):
    """Calls the listener's ``authenticate`` in a handler of its own."""

    connection: ServerConnection
    question: Authentication
    decided: bool = attrs.field(default=False, init=False)

    @handles
    async def decide(self, m: Decide) -> None:
        """Decide on the client."""
        answer = await self._ask()
        if not isinstance(answer, Identity | Denied):
            raise TypeError(f"authenticate returns an Identity or a Denied, not {type(answer).__name__}")
        self.decided = True
        self.connection.decided(answer)
        self.stop()

    async def _ask(self) -> Any:
        authenticate, question = self.connection.listener.decides, self.question
        if isinstance(authenticate, Ref):
            return await authenticate.ask(question, timeout=self.connection.config.core.auth_timeout)
        if isinstance(authenticate, Mapping):
            known = authenticate.get(question.token) if question.auth_type == "bearer" else None
            return known or Denied()
        return await authenticate(question)

    def stopping(self, reason: Reason) -> None:
        """Turn the client away if no decision was made."""
        if not self.decided:
            self.connection.decided(Denied("The server could not check these credentials.", retry_after=1.0))
