"""The owner's side of a ref that has travelled: envelopes from the peer become messages, questions and signals of the actor here.

* If the actor's mailbox is full, the message waits, and later ones stay in the channel, whose window closes. So senders at the peer wait
  for the actor, like senders here. The same holds while questions of more than `MOST_ASKED` bytes are not answered: a router has no
  mailbox to be full.
* A malformed envelope ends the channel. If the message in an envelope cannot be decoded, only that message is lost; an asker gets an error.
* The channel outlives the actor: a message to an ended actor is a dead letter, and a question to it fails with the reason.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Final

import attrs
import trio

from levada.framework import Ref
from levada.framework.codec import AttachmentKind
from levada.framework.embedding import LARGE, Ask, LocalRef, RemoteAsk, RemoteTell, Work, adopt, let_others_run
from levada.framework.errors import ActorError, ActorStopped, DecodeError, LevadaError
from levada.framework.text import printable
from levada.transports.aqueduct import Delivery, ReceiverHalf, SenderHalf

from . import envelopes
from .answers import Replies, answer_type
from .halves import ANSWERS_ROOM, Unreadable, give_up, open_delivery, read_last
from .links import HalfActor, OwnHalf
from .oneshots import Promise

__all__ = ["Export"]

MOST_TASKS: Final = 64
"""Messages of `pull` routers that one copy of a ref may hold: a peer has one for each router. More stay in the channel."""

MOST_ASKED: Final = 2**23
"""Bytes of the questions of one copy of a ref that are not answered yet; one may exceed it. More stay in the channel."""

SMALL_ANSWER: Final = 2**12
"""Bytes up to which an answer is sent however many wait: a failure in its place has about a tenth of them, and as many places."""

logger = logging.getLogger("levada.actors.aqueduct")


class Export(OwnHalf, HalfActor):
    """Receives the envelopes of one copy of a ref."""

    target: LocalRef
    """The actor that the ref refers to."""
    idle: bool = attrs.field(default=True, init=False)
    _held: Any = attrs.field(default=None, init=False)
    """A message or a question that did not fit into the mailbox."""
    _waiting: bool = attrs.field(default=False, init=False)
    """Whether the mailbox will call when it has room, or has ended."""
    _forget: Callable[[], None] = attrs.field(init=False)
    _busy: bool = attrs.field(default=False, init=False)
    _pausing: bool = attrs.field(default=False, init=False)
    """Whether it waits until other tasks have run for as long as a large message took."""
    _replies: Replies | None = attrs.field(default=None, init=False)
    """Sends the answers to numbered questions, after the first of them."""
    tasks: int = attrs.field(default=0, init=False)
    """Messages of `pull` routers that the actor has not finished."""
    _asked: int = attrs.field(default=0, init=False)
    """Bytes of the questions that are not answered."""

    def begun(self) -> None:
        """Become an actor, and deliver what has arrived."""
        self.is_actor = adopt(self.halves.connection, self)
        self.pump()

    def over(self) -> None:
        """End after the peer has dropped the ref, or is lost; envelopes that have arrived are still handled."""
        if self.half is None:
            return  # the message with the ref has never left
        self.pump()
        if self._replies is not None:
            self._replies.finish()
        self.retire()

    def give_up(self, detail: str) -> None:
        """Close the half."""
        self.half.close()
        self.halves.flush_soon()

    def pump(self) -> None:
        """Deliver the envelopes that have arrived."""
        if self._busy or not self._takes:
            return
        self._busy = True
        half, halves = self.half, self.halves
        try:
            while half.mailbox and self._takes:
                delivery = half.take()
                halves.received += 1
                began = trio.current_time() if len(delivery.payload) > LARGE else 0.0
                try:
                    self._open(delivery)
                except DecodeError as error:
                    told = read_last(halves, delivery.payload)
                    cause = (
                        f"the message with the ref was not read: {told.cause}"
                        if isinstance(told, Unreadable)
                        else error
                    )
                    logger.warning("%s: an envelope for %s: %s", halves.peer, self.target.path, printable(str(cause)))
                    delivery.discard()
                    half.close()
                if began:
                    self._pausing = True
                    trio.lowlevel.spawn_system_task(self._pause, trio.current_time() - began)
        finally:
            self._busy = False
        halves.flush_soon()

    @property
    def _takes(self) -> bool:
        """Whether it takes another envelope now."""
        replies = self._replies
        return not (
            self._waiting
            or self._pausing
            or self._asked >= MOST_ASKED
            or self.tasks >= MOST_TASKS
            or (replies is not None and replies.crowded)
        )

    def asked(self, size: int) -> None:
        """Count the bytes of a question."""
        self._asked += size

    def answered(self, size: int) -> None:
        """Count the bytes of a question no more: it is answered, or nobody waits for the answer."""
        before = self._asked
        self._asked -= size
        if self._asked < MOST_ASKED <= before:
            self.pump()

    async def _pause(self, seconds: float) -> None:
        await let_others_run(seconds)
        self._pausing = False
        self.pump()

    def _open(self, delivery: Delivery) -> None:
        """Handle one envelope.

        Raises:
            DecodeError: it is malformed.
        """
        if self.halves.tracing is not None:
            self.halves.read_stamp(delivery)
        head = envelopes.head_of(delivery.payload)
        if head is envelopes.TELL:
            self._receive(delivery, len(head))
        elif head is envelopes.ASK_NEXT:
            self._ask_next(delivery, head, 0)
        elif head is envelopes.ASK:
            self._receive(
                delivery, len(head), 1, question=Question(self, len(delivery.payload), self._oneshot(delivery))
            )
        elif head is envelopes.ASK_FIRST:
            self._ask_first(delivery)
        elif head is envelopes.WATCH or head is envelopes.LOAD:
            if delivery.payload != head or len(delivery.attachments) != 1:
                raise DecodeError("a watch, or a question for the load, with more than its oneshot")
            half = self._oneshot(delivery)
            self._watch(half) if head is envelopes.WATCH else self._load(half)
        elif head is envelopes.WORK:
            self._receive(delivery, len(head), 1, task=Task(self, self._oneshot(delivery)))
        elif head is envelopes.WORK_ASK:
            half, answer = self._oneshot(delivery), self._oneshot(delivery, 1)
            task, question = Task(self, half), Question(self, len(delivery.payload), answer)
            self._receive(delivery, len(head), 2, task=task, question=question)
        else:
            self._link(delivery)

    def _oneshot(self, delivery: Delivery, index: int = 0) -> SenderHalf:
        half = delivery.attachments[index] if index < len(delivery.attachments) else None
        if not isinstance(half, SenderHalf) or not half.oneshot:
            raise DecodeError("an envelope without the oneshot that belongs to it")
        return half

    def _receive(
        self,
        delivery: Delivery,
        start: int,
        first: int = 0,
        *,
        task: Task | None = None,
        question: PeersQuestion | None = None,
    ) -> None:
        """Decode a message, or a question, and give it to the actor. What cannot be decoded is lost; an asker gets an error.

        Args:
            delivery: the envelope.
            start: where the message begins in it.
            first: attachments before this index belong to the envelope.
            task: its end is reported to a `pull` router.
            question: gets the message.
        """
        halves = self.halves
        try:
            message, handles = open_delivery(halves, delivery, delivery.payload[start:], Any, first=first)
        except LevadaError as error:
            if question is None:
                halves.complain("%s: a message for %s cannot be decoded: %s", halves.peer, self.target.path, error)
            else:
                question.fail(ActorError(f"the question cannot be decoded: {error}", actor=self.target.path))
            if task is not None:
                task.over(True)
            return
        entry: RemoteTell | PeersQuestion
        if question is None:
            entry = RemoteTell(message, halves.remote, halves.context)
        else:
            question.message, entry = message, question
        self._put(entry) if task is None else task.begin(entry, handles)

    def _ask_first(self, delivery: Delivery) -> None:
        match delivery.attachments[:2]:
            case (SenderHalf(oneshot=False) as answers, ReceiverHalf(oneshot=False) as withdrawals) if (
                self._replies is None
            ):
                self._replies = Replies(self.halves, self.pump)
                self._replies.open(answers, withdrawals)
            case _:
                raise DecodeError("a first question without the two channels that belong to it, or a second one")
        self._ask_next(delivery, envelopes.ASK_FIRST, 2)

    def _ask_next(self, delivery: Delivery, head: bytes, first: int) -> None:
        replies = self._replies
        number = envelopes.read_number(head, delivery.payload)
        if replies is None:
            raise DecodeError("a question before the first")
        question = NumberedQuestion(self, len(delivery.payload), replies, number)
        if not replies.add(number, question):
            raise DecodeError(f"question {number} is open already, or there are too many")
        self._receive(delivery, len(head) + envelopes.NUMBER_SIZE, first, question=question)

    def _load(self, half: SenderHalf) -> None:
        halves = self.halves
        promise = Promise(halves, _nothing, idle=True)
        promise.use(half)
        promise.send(envelopes.encode_load(self.target.load()))

    def _watch(self, half: SenderHalf) -> None:
        cell, halves = self.target, self.halves
        promise = Promise(halves, lambda: cell.forget_watcher(promise), idle=True)
        promise.use(half)
        cell.add_watcher(promise, lambda reason: promise.send(envelopes.encode_signal(envelopes.DOWN, reason)))

    def _link(self, delivery: Delivery) -> None:
        """Link the actor here to the actor there that asks for it, if it accepts such links.

        Raises:
            DecodeError: it is malformed.
        """
        refs = self.halves.refs
        attachments = delivery.attachments
        wanted = (AttachmentKind.REF, AttachmentKind.ONESHOT_SENDER, AttachmentKind.ONESHOT_RECEIVER)
        notes: list[bytes] = []

        def detach(number: int, kind: AttachmentKind, item: Any, note: bytes = b"") -> AttachmentKind:
            if number != wanted.index(kind):
                raise ValueError("it is in another's place")
            notes.append(note)
            return kind

        if refs.codec.decode(delivery.payload, detach=detach) != [envelopes.LINK[1], *wanted] or len(attachments) != 3:
            raise DecodeError("a link that lacks something, or has too much")
        source, ours, theirs = attachments
        if not (
            isinstance(source, SenderHalf)
            and not source.oneshot
            and isinstance(ours, SenderHalf)
            and ours.oneshot
            and isinstance(theirs, ReceiverHalf)
            and theirs.oneshot
        ):
            raise DecodeError("a link with other channels than its own")
        refs.arrived(source, notes[0]).link_here(refs, self.target, ours, theirs)

    def _put(self, entry: Any) -> None:
        """Put a message or a question into the mailbox, or hold it until there is room."""
        cell = self.target
        try:
            if not cell.try_tell(entry):
                self._held, self._waiting = entry, True
                self._forget = cell.on_stopped(self._room)
                cell.on_room(self._room)
        except ActorStopped:
            cell.tell(entry)  # a dead letter, or an error for the asker
        except Exception as error:  # noqa: BLE001 - the failure log has it
            # The key function of a conflating mailbox is the user's code; the peer is not at fault.
            text = "%s: no key for a message from %s"
            cell.system.failure_log.log(logger, error, text, cell.path, self.halves.peer, actor=cell.path)
            if isinstance(entry, Ask):
                entry.fail(ActorError(f"{cell.path} has no key for this question", actor=cell.path))
            else:
                cell.system.dead_letter(entry, cell, "no key")

    def _room(self) -> None:
        if self._waiting:
            entry, self._held, self._waiting = self._held, None, False
            self._forget()
            self._put(entry)
            self.pump()


def _nothing() -> None:
    """Do nothing: the peer does not want the answer any more."""


class Task:
    """One message of a `pull` router at the peer, and the oneshot on which the peer learns that it is finished."""

    def __init__(self, export: Export, half: SenderHalf) -> None:
        halves = export.halves
        self._export = export
        self._entry: Any = None
        self._handles: tuple[Any, ...] = ()
        self._work: Work | None = None
        self._done = Promise(halves, self._withdraw)
        self._done.use(half)

    def begin(self, entry: Any, handles: tuple[Any, ...]) -> None:
        """Put the message into the actor's mailbox."""
        self._entry, self._handles = entry, handles
        self._export.tasks += 1
        self._work = Work(self._export.target, entry, self._end)

    def over(self, done: bool) -> None:
        """Report the end."""
        self._done.send(envelopes.DONE if done else envelopes.RETURNED)

    def _end(self, started: bool) -> None:
        entry = self._entry
        # A channel in the message has moved here with it, so no other actor can get them.
        returned = not started and all(isinstance(handle, Ref) for handle in self._handles)
        if returned and isinstance(entry, Question):
            entry.take_back()
        elif not started and not returned:
            self._export.target.tell(entry)  # a dead letter, or an error for the asker
        self.over(not returned)
        self._left()

    def _withdraw(self) -> None:
        if self._work is not None:
            if not self._work.withdraw():
                give_up(self._handles)
            self._left()

    def _left(self) -> None:
        self._work = None
        self._export.tasks -= 1
        self._export.pump()


class PeersQuestion(RemoteAsk, ABC):
    """A question from the peer."""

    __slots__ = ("_export", "_makers", "_refs", "_size")

    def __init__(self, export: Export, size: int) -> None:
        halves = export.halves
        super().__init__(None, export.target, halves.remote, halves.context)
        self._refs = halves.refs
        self._export = export
        self._size = size
        """Size of the question; 0 once it is over."""
        self._makers: tuple[trio.Event, ...] = ()
        """Set when there is room for its answer: one for each task that has waited for that since the last turn."""
        export.asked(size)

    @abstractmethod
    def reply(self, payload: bytes) -> None:
        """Send the answer or the failure, with the handles in the connection's packing."""

    def withdraw(self) -> None:
        super().withdraw()
        self._over()

    def _over(self) -> None:
        size, self._size = self._size, 0
        export, makers = self._export, self._makers
        export.answered(size)
        if makers:
            self._makers = ()
            for maker in makers:
                export.halves.makers.pop(maker, None)
                maker.set()
            export.halves.let_make()

    @property
    def has_room(self) -> bool:
        return self._export.halves.answers < ANSWERS_ROOM

    async def room(self) -> None:
        await trio.lowlevel.checkpoint()
        halves = self._export.halves
        while not (self.settled or self.has_room):
            maker = trio.Event()
            halves.makers[maker] = None
            self._makers = (*(each for each in self._makers if not each.is_set()), maker)
            try:
                await maker.wait()
            except BaseException:  # cancelled: the turn is the next one's
                halves.makers.pop(maker, None)
                self._makers = tuple(each for each in self._makers if each is not maker)
                halves.let_make()
                raise

    def _settle(self, value: Any, error: BaseException | None) -> None:
        super()._settle(value, error)
        try:
            self._reply(value, error)
        finally:
            self.value = self.error = None  # an error's frames hold this question, and it the message with its channels
            self._over()

    def _reply(self, value: Any, error: BaseException | None) -> None:
        refs = self._refs
        payload = b""
        if error is None:
            expected = answer_type(self.message)
            kind = type(self.message).__name__
            refs.halves.packing.channel = refs.answers
            try:
                payload = envelopes.ANSWER + refs.codec.encode(value, expected, attachments=refs.halves.packing)
                if refs.halves.packing.taken:
                    refs.halves.packing.require_room()
            except Exception as broken:  # noqa: BLE001 - the failure log has it
                path = self.target.path
                self.target.system.failure_log.log(logger, broken, "%s: an answer cannot travel", path, actor=path)
                error = ActorError(f"the answer to {kind} cannot travel: {broken}", actor=self.target.path)
            waiting, most = refs.halves.answers, refs.halves.max_answer_bytes
            if waiting and len(payload) > SMALL_ANSWER and waiting + len(payload) > most:
                refs.halves.packing.rollback()
                what = (
                    f"the answer to {kind}, {len(payload)} bytes, was given up: {waiting} bytes of answers wait for this system to take them, "
                    f"at most {most} (max_answer_bytes); ask fewer questions at a time"
                )
                error = ActorError(what, actor=self.target.path)
        self.reply(payload if error is None else envelopes.encode_failure(error))


class NumberedQuestion(PeersQuestion):
    """A question whose answer repeats its number."""

    __slots__ = ("_number", "_replies")

    def __init__(self, export: Export, size: int, replies: Replies, number: int) -> None:
        super().__init__(export, size)
        self._replies = replies
        self._number = number

    def reply(self, payload: bytes) -> None:
        self._replies.send(self._number, payload)


class Question(PeersQuestion):
    """A question that is answered on its oneshot."""

    __slots__ = ("_promise",)

    def __init__(self, export: Export, size: int, half: SenderHalf) -> None:
        super().__init__(export, size)
        halves = export.halves
        self._promise = Promise(halves, self.withdraw)
        self._promise.use(half)

    def take_back(self) -> None:
        """Do not answer, since no handler has started: the peer gives it to another actor."""
        self.withdraw()
        self._promise.finish()

    def reply(self, payload: bytes) -> None:
        self._promise.send(payload)
