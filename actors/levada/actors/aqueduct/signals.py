"""What travels on the channel of a remote ref beside plain messages: questions, requests for notice, links, and the work of routers.

A `Signal` waits in line for room, or for the connection of a ref that has none yet. It makes its oneshots when it is encoded, since only
then the connection is known.

A routee of a `pull` router in another system holds one message. `levada.actors.aqueduct.exports.Task` is the owner's side: it puts the
message into the mailbox in a `Work`, and reports on a oneshot when the handler has finished.
"""

from __future__ import annotations

import logging
import weakref
from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from levada.framework import Failed, Lost, Reason
from levada.framework.embedding import Ask, LocalRef, Outcome, TerminalState, TracedAsk, TracedTell
from levada.framework.errors import DecodeError
from levada.transports.aqueduct import Attach, Delivery, ReceiverHalf, SenderHalf

from . import envelopes
from .answers import Answers, OpenQuestion
from .halves import Packing
from .oneshots import Awaited, Promise
from .referring import Referring

if TYPE_CHECKING:
    from .refs import RemoteRef

__all__ = ["Asking", "Later", "Sampling", "Signal", "Tie", "Watching", "WorkAsking", "Working", "opened"]

logger = logging.getLogger("levada.actors.aqueduct")

_LOST = (TerminalState.LOST, TerminalState.CONNECTION_LOST)


def opened(message: Any) -> tuple[Any, object]:
    """Return a message, and the context that it brings if it has the envelope of a traced system."""
    return (message.message, message.context) if isinstance(message, TracedTell) else (message, None)


class Signal:
    """An entry of a ref's channel that is not a plain message."""

    __slots__ = ()

    context: object = None
    """The trace context of its sender, in a traced system."""

    @property
    def wanted(self) -> bool:
        """Whether it still needs to be sent."""
        return True

    @abstractmethod
    def encode(self, refs: Referring, packing: Packing) -> bytes:
        """Return the bytes, and put attached handles into the packing."""

    @abstractmethod
    def failed(self, error: BaseException | None) -> None:
        """Handle an error of a later send; the error is ``None`` if the ref has ended."""

    def stand(self, step_back: Callable[[Any], None]) -> None:
        """Wait in line for room; `step_back` takes this signal out of it."""

    def unsent(self) -> None:
        """Clean up: the entry has left the line, since it is no longer needed."""


class Later(Signal):
    """A message that waits, from a sender that cannot wait."""

    __slots__ = ("context", "message", "ref")

    def __init__(self, ref: RemoteRef, message: Any) -> None:
        self.ref = ref
        self.message, self.context = opened(message)

    def encode(self, refs: Referring, packing: Packing) -> bytes:
        return envelopes.TELL + refs.codec.encode(self.message, attachments=packing)

    def failed(self, error: BaseException | None) -> None:
        if error is not None:
            self.ref.system.failure_log.log(logger, error, "%r: a message cannot travel", self.ref)
        self.ref.system.dead_letter(self.message, self.ref, "stopped")


class Asking(OpenQuestion, Signal):
    """A question on its way; its answer comes on the channel for all answers of the ref, or on a oneshot."""

    __slots__ = ("_answer", "_answers", "_number", "context")

    ref: RemoteRef
    _number: int

    def __init__(self, ref: RemoteRef, question: Ask) -> None:
        self.ref = ref
        self.question = question
        self.context = question.context if isinstance(question, TracedAsk) else None
        self._answer: Awaited | None = None
        self._answers: Answers | None = None

    @property
    def wanted(self) -> bool:
        return not self.question.settled

    def encode(self, refs: Referring, packing: Packing) -> bytes:
        ref = self.ref
        answers, head = ref.answers, envelopes.ASK_NEXT
        if answers is None:
            answers, head = ref.expect_answers(), envelopes.ASK_FIRST
            if answers is None:
                return envelopes.ASK + self.encode_question(refs, packing)
            answers.pack(packing)
        self.refs = refs
        message = refs.codec.encode(self.question.message, attachments=packing)
        self._answers, self._number = answers, answers.add(self)
        self.question.asker_gone = partial(answers.withdraw, self._number)
        return head + self._number.to_bytes(envelopes.NUMBER_SIZE, "big") + message

    def encode_question(self, refs: Referring, packing: Packing) -> bytes:
        """Attach the oneshot for the answer; return the bytes of the question."""
        self.refs = refs
        answer = Awaited(refs.halves, self.answered, self.over)
        packing.take(answer, Attach.ONESHOT_SENDER)
        message = refs.codec.encode(self.question.message, attachments=packing)
        # Only now: a question that cannot travel must be in no cycle, where its channels would wait for the garbage collector.
        self._answer = answer
        self.question.asker_gone = answer.close
        return message

    def stand(self, step_back: Callable[[Any], None]) -> None:
        self.question.asker_gone = partial(step_back, self)

    def unsent(self) -> None:
        self.question.pass_over()

    def failed(self, error: BaseException | None) -> None:
        self.withdraw()
        self.question.fail(error or self.ref.stopped(self.question.message))

    def withdraw(self) -> None:
        """Stop waiting for the answer, and tell the owner's side."""
        if self._answers is not None:
            self._answers.withdraw(self._number)
        elif self._answer is not None:
            self._answer.close()


class Watching(Signal):
    """A request for notice of the actor's end."""

    __slots__ = ("_down", "_ref", "_wanted")

    def __init__(self, ref: RemoteRef) -> None:
        # Weak: a request for notice does not keep the ref alive, the watchers do.
        self._ref = weakref.ref(ref)
        self._down: Awaited | None = None
        self._wanted = True

    @property
    def wanted(self) -> bool:
        return self._wanted

    def encode(self, refs: Referring, packing: Packing) -> bytes:
        self._down = Awaited(refs.halves, self._told, self._over, idle=True)
        packing.take(self._down, Attach.ONESHOT_SENDER)
        return envelopes.WATCH

    def failed(self, error: BaseException | None) -> None:
        self._over(TerminalState.LOST)

    def withdraw(self) -> None:
        """Cancel the request for notice, and tell the owner's side."""
        self._wanted = False
        if self._down is not None:
            self._down.close()

    def _told(self, delivery: Delivery) -> None:
        ref = self._ref()
        delivery.discard()
        if ref is not None:
            try:
                reason = envelopes.read_signal(envelopes.DOWN, delivery.payload, ref.path)
            except DecodeError as error:
                logger.warning("%r: %s", ref, error)
                ref.lose()
            else:
                ref.end(reason)

    def _over(self, state: TerminalState) -> None:
        ref = self._ref()
        if ref is not None:
            ref.lose()


class Tie(Signal):
    """One side's record of a link between an actor here and one there.

    Each side reports the end of its actor, with the reason, on a oneshot. A oneshot that ends without a value unlinks.
    """

    __slots__ = ("_exit", "_oneshots", "_peer", "_wanted", "cell", "ref")

    def __init__(self, ref: RemoteRef, cell: LocalRef) -> None:
        self.ref = ref
        self.cell = cell
        self._wanted = True
        self._oneshots: tuple[Promise, Awaited] | None = None
        """Tell the peer of the end of the actor here, and this side of the end of the actor there."""
        self._exit: Reason | None = None
        """Why the actor here ended before there were oneshots."""
        self._peer = ""

    @property
    def wanted(self) -> bool:
        return self._wanted

    def encode(self, refs: Referring, packing: Packing) -> bytes:
        ours, theirs = self._make(refs)
        if self._exit is not None:
            self.tell_exit(self._exit)
        return refs.codec.encode([envelopes.LINK[1], self.cell, theirs, ours], attachments=packing)

    def failed(self, error: BaseException | None) -> None:
        """End the link, which cannot be requested any more."""
        self.end(Failed(error) if error is not None else self.ref.reason)

    def accept(self, refs: Referring, half: SenderHalf) -> Callable[[ReceiverHalf], None]:
        """Make the link that the peer asks for.

        Args:
            refs: the refs of the connection that it asks on.
            half: tells the peer of the end of the actor here.

        Returns:
            A function that takes the other half, and begins to listen for the end of the actor there.
        """
        ours, theirs = self._make(refs)
        ours.use(half)
        return theirs.use

    def tell_exit(self, reason: Reason) -> None:
        """Tell the peer that the actor here has ended."""
        self._exit = reason
        if self._oneshots is not None:
            ours, theirs = self._oneshots
            ours.send(envelopes.encode_signal(envelopes.EXIT, reason))
            theirs.close()

    def cut(self) -> None:
        """Unlink, from this side."""
        self._wanted = False
        if self._oneshots is not None:
            ours, theirs = self._oneshots
            ours.finish()
            theirs.close()

    def end(self, reason: Reason) -> None:
        """End the link: the actor there has ended, or is out of reach."""
        self.cut()
        self.ref.forget_tie(self)
        self.cell.exited(self.ref, reason)

    def _make(self, refs: Referring) -> tuple[Promise, Awaited]:
        self._peer = refs.peer
        self._oneshots = (
            Promise(refs.halves, self._unheard, idle=True),
            Awaited(refs.halves, self._exited, self._untied, idle=True),
        )
        return self._oneshots

    def _exited(self, delivery: Delivery) -> None:
        delivery.discard()
        try:
            self.end(envelopes.read_signal(envelopes.EXIT, delivery.payload, self.ref.path))
        except DecodeError as error:
            logger.warning("%r: %s", self.ref, error)
            self.end(Lost(self._peer))

    def _untied(self, state: TerminalState) -> None:
        if state is TerminalState.FINISHED:  # the actor there has unlinked
            self.cut()
            if self.ref.forget_tie(self):
                self.cell.untie(self.ref)
        else:
            self.end(Lost(self._peer))

    def _unheard(self) -> None:
        """Do nothing: the peer also reports the end of its side on its own oneshot."""


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
