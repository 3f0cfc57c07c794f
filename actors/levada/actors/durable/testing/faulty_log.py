"""`FaultyLog`: a log that is out of reach now and then, for tests of what uses it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from levada.framework import Actor, Ref, Reply, handles
from levada.framework.errors import LevadaError

__all__ = ["FaultyLog", "Lost"]

Lost = Literal["", "question", "answer"]
"""Nothing is lost, the question, or its answer."""


class FaultyLog(Actor[object]):
    """Passes questions on to a log, and loses some of them, or their answers, as a connection does that is cut.

    Args:
        log: the ref of the log.
        lost: says of each question whether it is lost, or its answer. It gets the number of the question, from 0 on, and the question.

    Example:
        ``system.spawn(FaultyLog, log, lambda number, question: "answer" if number % 10 == 0 else "")``
    """

    log: Ref[Any]
    lost: Callable[[int, Any], Lost]

    def __attrs_post_init__(self) -> None:
        self._asked = 0

    @handles
    def any(self, m: object) -> None:
        """Pass a question on."""
        lost = self.lost(self._asked, m)
        self._asked += 1
        self.start_soon(self._pass_on, m, lost, self.reply_later())

    async def _pass_on(self, m: Any, lost: Lost, reply: Reply[Any]) -> None:
        error: Exception = ConnectionResetError(f"the {lost} is lost")
        if lost != "question":
            try:
                answer = await self.log.ask(m, timeout=None)
                if not lost:
                    reply.send(answer)
                    return
            except (LevadaError, OSError) as refusal:
                if not lost:
                    error = refusal
        reply.fail(error)
