"""The answers to the questions of one ref, over one channel for all of them.

After `FEW` questions, a question on the channel of a ref brings two more channels: one for its answer and later ones, one for
withdrawals. From then on each question has a number, which its answer repeats. With 64 asks at a time, an ask between nodes costs 90 µs
of CPU time on both sides together, against 320 µs with a oneshot for each answer. A ref that is asked seldom stays one channel.

* `Answers` is the holder's side, `Replies` the owner's. Both are records without actors, as the oneshots of `levada.actors.aqueduct.oneshots`.
* An answer never waits for messages or withdrawals, only for earlier answers of the same actor. The holder takes them as they come.
* A connection that closes in order waits for the answers to open questions. Otherwise these channels do not hold it up.
* When the channel of the ref has ended and all its questions are answered, the owner finishes the answers, then the holder the withdrawals.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Any

from levada.framework import Lost
from levada.framework.embedding import Ask, Outcome, RemoteAsk, TerminalState, stopped_error
from levada.framework.errors import DecodeError, LevadaError, NoValue
from levada.framework.message import Asks, reply_type
from levada.transports.aqueduct import Attach, Delivery, ReceiverHalf, ReceiverState, SenderHalf

from . import envelopes
from .halves import SENDING, Halves, Letter, Packing, open_delivery
from .links import OwnHalf
from .referring import Referring

__all__ = ["FEW", "Answers", "OpenQuestion", "Replies", "answer_type"]

FEW = 8
"""Questions of a ref that are answered on oneshots."""
_TOGETHER = 16
"""Answers that are taken together in any case."""

_LOST = (TerminalState.LOST, TerminalState.CONNECTION_LOST)

logger = logging.getLogger("levada.actors.aqueduct")


class OpenQuestion:
    """A question of this side, which waits for its answer."""

    __slots__ = ("question", "ref", "refs")

    question: Ask
    ref: Any
    """The ref of the actor that is asked."""
    refs: Referring
    """The refs of the connection that it was sent on."""

    def answered(self, delivery: Delivery, start: int = 0) -> None:
        """Take the answer, which begins at byte `start` of a message."""
        question, halves, payload = self.question, self.refs.halves, delivery.payload
        if question.settled:  # withdrawn in the turn when the answer came: its handles are given up
            delivery.discard()
            return
        try:
            if payload.startswith(envelopes.ANSWER, start):
                expected = answer_type(question.message)
                payload = payload[start + len(envelopes.ANSWER) :]
                value, _ = open_delivery(halves, delivery, payload, expected)
                question.answer(value)
            else:
                error = envelopes.error_from(payload[start:], self.ref.path, question.message)
                delivery.discard()
                question.fail(error)
        except LevadaError as error:
            if not delivery.payload.startswith(envelopes.ANSWER, start):
                delivery.discard()
            question.fail(error)

    def over(self, state: TerminalState) -> None:
        """Record that there will be no answer."""
        if state in _LOST:
            self.question.fail(stopped_error(self.ref, Lost(self.refs.peer), self.question.message))
        else:
            self.unanswered()

    def unanswered(self) -> None:
        """Tell the asker that there is no answer."""
        self.question.fail(NoValue(f"the answer to {type(self.question.message).__name__} was given up"))


class Line(OwnHalf):
    """Sends payloads over one half, in order. What does not fit into the window waits here."""

    def __init__(self, halves: Halves, ended: Callable[[], None], room: Callable[[], None]) -> None:
        self.waiting: deque[Letter] = deque()
        self.halves = halves
        self.half = None
        self.idle = True
        self._finishing = False
        self._ended = ended
        self._room = room

    def send(self, payload: bytes) -> None:
        """Send a payload, with the handles in the connection's packing."""
        halves, half = self.halves, self.half
        packing = halves.packing
        if half is not None and not self.waiting and not packing.taken and half.push(payload, halves.plain):
            halves.sent += 1
            halves.flush_soon()
            return
        halves.answers += len(payload)
        self.waiting.append(Letter(halves, payload, None, packing.leave()))
        if half is not None:
            self.pump()

    def finish(self) -> None:
        """Send no more."""
        self._finishing = True
        if self.half is not None:
            self.pump()

    def pump(self) -> None:
        """Send what waits, as far as there is room."""
        half, waiting = self.half, self.waiting
        begun = bool(waiting)
        while waiting and half.state in SENDING and half.has_room():
            letter = waiting.popleft()
            size = len(letter.payload)
            self.dispatch(letter)
            self.halves.answer_left(size)
        if self._finishing and not waiting and half.state in SENDING:
            half.finish()
        self.halves.flush_soon()
        if begun and not waiting:
            self._room()

    def over(self) -> None:
        """Give up what waits."""
        while self.waiting:
            letter = self.waiting.popleft()
            self.halves.answer_left(len(letter.payload))
            letter.settle(Outcome.NOT_PROCESSED)
        ended, self._ended, self._room = self._ended, _nothing, _nothing  # the owner of both holds this object
        ended()


class Answers(OwnHalf):
    """Receives the answers to the questions of one ref, and sends withdrawals.

    Args:
        halves: the channels of the connection.
        lost: called when the peer ends the channel of the answers, in whatever way.
        given_back: called when the message with the channels could not leave.
    """

    def __init__(self, halves: Halves, lost: Callable[[], None], given_back: Callable[[], None]) -> None:
        self.halves = halves
        self._lost = lost
        self._given_back = given_back
        self._asked = 0
        self._open: dict[int, OpenQuestion] = {}
        self.half = None
        self.idle = True
        self._withdrawals = Line(halves, _nothing, _nothing)

    def pack(self, packing: Packing) -> None:
        """Attach the two channels to the first question."""
        packing.take(self, Attach.SENDER)
        packing.take(self._withdrawals, Attach.RECEIVER)

    def add(self, asking: OpenQuestion) -> int:
        """Wait for the answer to a question; return its number."""
        number = self._asked & envelopes.MAX_NUMBER
        self._asked += 1
        self._open[number] = asking
        if len(self._open) == 1:
            self.set_idle(False)
        return number

    def withdraw(self, number: int) -> None:
        """Stop waiting for an answer, and tell the owner's side. Does nothing if it has come."""
        if self._open.pop(number, None) is not None:
            self._withdrawals.send(envelopes.encode_withdrawal(number))
            if not self._open:
                self.set_idle(True)

    def give_back(self) -> None:
        """Record that the message with the channels could not be encoded."""
        self._given_back()

    def pump(self) -> None:
        """Take the answers that have come; of many only half of those that are due, and the others when this side has written again.

        Otherwise all questions wait for one side, then all answers for the other. With 64 asks at a time, an ask between nodes took 27 µs
        instead of 21, because one of the two processes always waited.
        """
        half = self.half
        self._take(max(_TOGETHER, len(self._open) // 2))
        if half.mailbox:
            self.halves.go_on_later(self)

    def _take(self, most: int) -> None:
        half, halves = self.half, self.halves
        for _ in range(min(most, len(half.mailbox))):
            delivery = half.take()
            halves.received += 1
            try:
                number = envelopes.read_number(envelopes.REPLY, delivery.payload)
            except DecodeError as error:
                logger.warning("%s: an answer: %s", halves.peer, error)
                delivery.discard()
                half.close()
                break
            asking = self._open.pop(number, None)
            if asking is None:  # it was withdrawn
                delivery.discard()
            else:
                asking.answered(delivery, len(envelopes.REPLY) + envelopes.NUMBER_SIZE)
        if not self._open:
            self.set_idle(True)
        halves.flush_soon()

    def over(self) -> None:
        """Take the answers that have come; the other questions get none."""
        half = self.half
        while half is not None and half.mailbox:
            self._take(len(half.mailbox))
        state = self.how_ended
        self._withdrawals.finish()
        while self._open:
            self._open.popitem()[1].over(state)
        self._lost()


class Replies(OwnHalf):
    """Sends the answers to the questions of one copy of a ref, and receives withdrawals: the owner's side.

    Args:
        halves: the channels of the connection.
        room: called when no answer waits for room any more.
    """

    def __init__(self, halves: Halves, room: Callable[[], None]) -> None:
        self.halves = halves
        self._line = Line(halves, self._unwanted, room)
        self._open: dict[int, RemoteAsk] = {}
        self.half = None
        self.idle = True
        self._over = False
        """Whether no more questions come."""

    @property
    def crowded(self) -> bool:
        """Whether answers wait for room, so that no further questions should be taken."""
        return bool(self._line.waiting)

    def open(self, answers: SenderHalf, withdrawals: ReceiverHalf) -> None:
        """Use the channels that came with the first question."""
        self._line.use(answers)
        self.use(withdrawals)

    def add(self, number: int, question: RemoteAsk) -> bool:
        """Record an open question; false if it is open already, or if too many are open on the connection."""
        halves = self.halves
        if number in self._open or halves.questions >= halves.core.config.max_channels:
            return False
        if not self._open:
            self._line.set_idle(False)
        self._open[number] = question
        halves.questions += 1
        return True

    def send(self, number: int, payload: bytes) -> None:
        """Send the answer to a question, with the handles in the connection's packing; does nothing if it was withdrawn."""
        if self._open.pop(number, None) is None:
            self.halves.packing.rollback()
            return
        self.halves.questions -= 1
        self._line.send(envelopes.REPLY + number.to_bytes(envelopes.NUMBER_SIZE, "big") + payload)
        self._rest()

    def finish(self) -> None:
        """Take no more questions: the channel of the ref has ended."""
        self._over = True
        self._rest()

    def _rest(self) -> None:
        """Allow the connection to close, or finish the channel, if no question is open."""
        if not self._open:
            self._line.set_idle(True)
            if self._over:
                self._line.finish()

    def _unwanted(self) -> None:
        """Withdraw all questions: the holder is out of reach."""
        while self._open:
            self.halves.questions -= 1
            self._open.popitem()[1].withdraw()

    def pump(self) -> None:
        """Take the withdrawals that have come."""
        half, halves = self.half, self.halves
        while half.mailbox:
            delivery = half.take()
            delivery.discard()
            halves.received += 1
            try:
                question = self._open.pop(envelopes.read_withdrawal(delivery.payload), None)
            except DecodeError as error:
                logger.warning("%s: a withdrawal: %s", halves.peer, error)
                half.close()
                break
            if question is not None:
                halves.questions -= 1
                question.withdraw()
        self._rest()
        halves.flush_soon()

    def over(self) -> None:
        """Withdraw all questions, unless the holder has ended in order."""
        half = self.half
        self.pump()
        if half.state is not ReceiverState.FINISHED:
            self._unwanted()
            self._rest()


def _nothing() -> None:
    """Do nothing."""


def answer_type(question: Any) -> Any:
    """Return the type of the answer to a question; `Any` if its class does not declare one."""
    kind = type(question)
    return reply_type(kind) if issubclass(kind, Asks) else Any
