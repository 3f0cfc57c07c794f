"""Messages of `pull` routers whose routees are in another system, and questions of `least_mailbox` routers.

A routee in another system holds one message. `levada.actors.aqueduct.exports.Task` is the owner's side: it puts the message into the
mailbox in a `Work`, and reports on a oneshot when the handler has finished.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from levada.framework.embedding import Ask, Outcome, TerminalState
from levada.framework.errors import DecodeError
from levada.transports.aqueduct import Attach, Delivery

from . import envelopes
from .halves import Packing, Referring
from .oneshots import Awaited
from .signals import Asking, Signal, opened

if TYPE_CHECKING:
    from .refs import RemoteRef

__all__ = ["Sampling", "WorkAsking", "Working"]

logger = logging.getLogger("levada.actors.aqueduct")


class Working(Signal):
    """A message that the actor handles for a `pull` router."""

    __slots__ = ("_message", "_over", "_ref", "context")

    def __init__(self, ref: RemoteRef, message: Any, over: Callable[[Outcome], None]) -> None:
        self._ref = ref
        self._message, self.context = opened(message)
        self._over = over

    def encode(self, refs: Referring, packing: Packing) -> bytes:
        packing.take(_report(refs, self._ref, self._over), Attach.ONESHOT_SENDER)
        return envelopes.WORK + refs.codec.encode(self._message, attachments=packing)

    def failed(self, error: BaseException | None) -> None:
        if error is not None:
            self.refuse(error)
        self._over(Outcome.NOT_PROCESSED if error is None else Outcome.PROCESSED)

    def refuse(self, error: BaseException) -> None:
        """Record that the message cannot travel."""
        self._ref.system.failure_log.log(logger, error, "%r: a message cannot travel", self._ref)
        self._ref.system.dead_letter(self._message, self._ref, "cannot travel")


class WorkAsking(Asking):
    """A question for a `pull` router: its answer, and the report that the handler has finished, come on oneshots of their own."""

    __slots__ = ("_ended", "_half_over")

    def __init__(self, ref: RemoteRef, question: Ask, over: Callable[[Outcome], None]) -> None:
        super().__init__(ref, question)
        self._ended = over
        self._half_over = False
        """Whether one of two things has happened: the report has come, and the oneshot for the answer has ended without a value, as it does
        if the question was returned, or its answer was given up."""

    def unsent(self) -> None:
        super().unsent()
        self._ended(Outcome.PROCESSED)  # the routee is free for the next message

    def encode(self, refs: Referring, packing: Packing) -> bytes:
        packing.take(_report(refs, self.ref, self._finished), Attach.ONESHOT_SENDER)
        return envelopes.WORK_ASK + self.encode_question(refs, packing)

    def failed(self, error: BaseException | None) -> None:
        if error is not None:
            self.refuse(error)
        self._ended(Outcome.NOT_PROCESSED if error is None else Outcome.PROCESSED)

    def refuse(self, error: BaseException) -> None:
        """Record that the question cannot travel."""
        self.withdraw()
        self.question.fail(error)

    def unanswered(self) -> None:
        if self._half_over:
            super().unanswered()
        self._half_over = True

    def _finished(self, outcome: Outcome) -> None:
        if outcome is Outcome.NOT_PROCESSED:
            self.withdraw()
        else:
            self.unanswered()
        self._ended(outcome)


def _report(refs: Referring, ref: RemoteRef, over: Callable[[Outcome], None]) -> Awaited:
    """Make the oneshot for the report that a message of a `pull` router is finished."""

    def got(delivery: Delivery) -> None:
        delivery.discard()
        try:
            done = envelopes.read_done(delivery.payload)
        except DecodeError as error:
            logger.warning("%r: %s", ref, error)
            lost(TerminalState.LOST)
        else:
            over(Outcome.PROCESSED if done else Outcome.NOT_PROCESSED)

    def lost(_: TerminalState) -> None:
        over(Outcome.UNKNOWN)
        ref.lose()

    return Awaited(refs.halves, got, lost)


class Sampling(Signal):
    """A question how many messages wait for the actor."""

    __slots__ = ("_got", "_ref")

    def __init__(self, ref: RemoteRef, got: Callable[[int | None], None]) -> None:
        self._ref = weakref.ref(ref)
        self._got = got

    def encode(self, refs: Referring, packing: Packing) -> bytes:
        packing.take(Awaited(refs.halves, self._answered, self._over, idle=True), Attach.ONESHOT_SENDER)
        return envelopes.LOAD

    def failed(self, error: BaseException | None) -> None:
        self._got(None)

    def _answered(self, delivery: Delivery) -> None:
        delivery.discard()
        try:
            waiting = envelopes.read_load(delivery.payload)
        except DecodeError as error:
            logger.warning("%r: %s", self._ref(), error)
            self._over(TerminalState.LOST)
        else:
            self._got(waiting)

    def _over(self, state: TerminalState) -> None:
        ref = self._ref()
        if ref is not None:
            ref.lose()
