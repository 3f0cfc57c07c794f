"""A browser's look at a node: requests come from the driver, whose dashboard or console the browser has asked."""

from __future__ import annotations

import json
from typing import Final

import attrs

from levada.actors.console import Viewer
from levada.framework import Reason, handles
from levada.framework.embedding import UntracedActor

from .messages import Show

__all__ = ["Watcher"]

SILENCE: Final = 30.0
"""Seconds without a request after which no client watches any more."""


@attrs.frozen
class _Silent:
    pass


class Watcher(UntracedActor[Show | _Silent]):
    """Answers one browser, until it shows something else."""

    actions: bool
    tracebacks: bool
    _viewer: Viewer | None = attrs.field(init=False, default=None)

    def started(self) -> None:
        """Begin to record events."""
        self._viewer = Viewer(self.system, actions=self.actions, tracebacks=self.tracebacks)
        self.timers.once("silence", SILENCE, _Silent())

    def stopping(self, reason: Reason) -> None:
        """Record no more."""
        if self._viewer is not None:
            self._viewer.close()

    @handles
    async def show(self, m: Show) -> str:
        """Answer a request."""
        self.timers.once("silence", SILENCE, _Silent())
        assert self._viewer is not None
        return json.dumps(await self._viewer.answer(json.loads(m.request)))

    @handles
    def silent(self, m: _Silent) -> None:
        """End, because no client watches."""
        self.stop()
