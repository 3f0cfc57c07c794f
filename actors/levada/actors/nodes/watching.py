"""The viewer of a browser on a node. Requests come through the driver, which has the dashboard or console that the browser uses."""

from __future__ import annotations

import json
from typing import Final

import attrs

from levada.actors.console import Viewer
from levada.actors.console.history import keep_history
from levada.framework import Reason, handles
from levada.framework.embedding import UntracedActor

from .messages import Show

__all__ = ["Watcher"]

SILENCE: Final = 30.0
"""Seconds without a request after which the client counts as gone."""


@attrs.frozen
class _Silent:
    pass


class Watcher(UntracedActor[Show | _Silent]):
    """Answers one browser, until it is silent."""

    actions: bool
    tracebacks: bool
    _viewer: Viewer | None = attrs.field(init=False, default=None)

    def started(self) -> None:
        """Start to record events."""
        self._viewer = Viewer(self.system, actions=self.actions, tracebacks=self.tracebacks)
        self.timers.once("silence", SILENCE, _Silent())
        self.start_soon(keep_history, self.system, name="<history>")

    def stopping(self, reason: Reason) -> None:
        """Stop recording events."""
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
        """Stop, because the client is gone."""
        self.stop()
