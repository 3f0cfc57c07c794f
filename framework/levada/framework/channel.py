"""Typed channels: a `Sender` and a `Receiver` with a bounded window between them, and the single-value pair `oneshot`.

For every channel:

* **Bounded.** A sender has at most `window` messages under way; then ``send`` waits and ``send_nowait`` raises.
* **Fair.** Waiting senders and receivers are served first come, first served.
* **All or nothing.** A cancelled ``send`` did not send, a cancelled ``receive`` took nothing; waiting for an end changes nothing.
* **The end is explicit.** `TerminalState` names each way to end, each has its own exception, and an end is final.
  Messages queued before a finish or a loss can still be received; ``cancel()`` and ``close()`` discard them.
* **Not every await yields.** ``send`` with room and ``receive`` with a message waiting cost no step of trio and do not notice a
  cancellation; every 128th call on a handle is a checkpoint, so that a loop does not starve other tasks. After a large message from a
  network, ``receive`` lets other tasks run for as long as decoding it took.
* **One thread.** A channel belongs to the thread of the trio run that made it, or that first waited on it. A call from another thread
  that would wake a task, move a message on or end the channel raises `WrongThread` and changes nothing.
* **One owner.** A handle that is sent inside a message belongs to the receiver of the message. If the message goes to another process, the
  handle is *moved* and raises `HandleMoved` from then on. Within a process the same object arrives, and only `levada.framework.testing.strict`
  notices that it is sent twice. The other half stays and works as before.

A handle that is collected before its channel ended gives a `ResourceWarning`: a forgotten sender cancels its channel, a forgotten
receiver closes it, a forgotten oneshot sender finishes without a value. The other side learns of it at the next step of the trio loop.
"""

# Measured on two shared cores with Python 3.11 and trio 0.35; in brackets trio.open_memory_channel(256):
#   send_nowait + receive_nowait                                 0.22 µs  (0.37)
#   await send, with room / await receive, with a message        0.37 / 0.28 µs, including their share of the 128th call's checkpoint
#   await send + async for, between two tasks, window 256        0.72 µs  (8.8: two steps of trio for each message)
#   send_nowait into a mailbox, by to_mailbox                    1.0 µs
#   a channel made and finished / held                           4 µs / 1.5 kB

from __future__ import annotations

import sys
import warnings
from _thread import get_ident
from collections.abc import Callable, Generator
from functools import partial
from typing import Any, ClassVar, Generic, Literal, NoReturn, Self, TypeVar, overload

import trio
from trio.lowlevel import Abort, checkpoint, current_task, enable_ki_protection, reschedule, wait_task_rescheduled

from ._runtime.channel_core import ENDED, OPEN, ChannelCore, Mode, Outcome, Receipt, TerminalState, handles_in
from ._runtime.channel_mailbox import Destination, MailboxFeed
from ._runtime.reasons import describe_end, reason_of_block, reason_of_end
from ._runtime.tracing import make_core
from .annotations import is_value
from .errors import (
    ChannelCancelled,
    ChannelError,
    ConfigurationError,
    EndOfChannel,
    HandleMoved,
    HandleNotForwardable,
    NoValue,
    SenderFinished,
    Undelivered,
    loss_of,
)
from .links import Failed, Reason

__all__ = [
    "Destination", "Mode", "OneshotReceiver", "OneshotSender", "Outcome", "Receipt", "Receiver", "Sender",
    "TerminalState", "channel", "forward", "oneshot",
]  # fmt: skip

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
T_contra = TypeVar("T_contra", contravariant=True)

WINDOW = 256
"""The default number of messages under way."""
_UNYIELDED = 127
"""Calls on a handle between two checkpoints, as a mask: 0.2 ms. With 63, what a loop sends leaves in shorter bursts, and a message of 100 bytes
over QUIC takes a tenth more."""


class _Handle:
    """One end of a channel, as its owner holds it."""

    __slots__ = ("__weakref__", "_bound", "_calls", "_core", "_half", "_live", "_moved", "_other_half", "_waiting")

    attachment_kind: ClassVar[str]
    """How the message codec marks a handle of this class inside a message."""

    _given_up: ClassVar[tuple[TerminalState, str]]
    """How the channel ends when the owner of this handle has ended, and what the owner did with it."""

    _sends: ClassVar[bool]

    def __init__(self, core: ChannelCore) -> None:
        self._core = core
        self._half, self._other_half = (core.sender, core.receiver) if self._sends else (core.receiver, core.sender)
        self._live = True
        """Whether messages may pass: not moved, not finished by its owner, not bound to a mailbox."""
        self._moved: str | None = None
        """Where this handle was sent, if it was."""
        self._calls = 0
        self._waiting = 0
        """The number of tasks inside ``send`` on this sender."""
        self._bound = False
        """Whether the messages of this receiver go to a mailbox."""

    @property
    def name(self) -> str:
        """The name of the channel, as in logs and errors."""
        return self._core.name

    @property
    def item_type(self) -> Any:
        """The type given to `channel` or `oneshot`; tells the codec how to decode."""
        return self._core.item_type

    @property
    def state(self) -> TerminalState:
        """How this half ended, or OPEN. A moved handle raises `HandleMoved`."""
        if self._moved is not None:
            raise self._refusal()
        return self._half.state

    @property
    def mode(self) -> Mode:
        """How the messages travel."""
        return self._core.mode

    @property
    def window(self) -> int:
        """The number of messages that may be under way."""
        return self._core.window

    @property
    def queued(self) -> int:
        """Messages in this process that the receiver has not taken."""
        return len(self._core.queue)

    async def terminated(self) -> TerminalState:
        """Wait until this half has ended; return how. A cancellation only ends the wait.

        Raises:
            HandleMoved: the handle was sent away before.
        """
        if self._moved is not None:
            raise self._refusal()
        half = self._half
        if half.state is not OPEN:
            await checkpoint()
            return half.state
        self._core.bind_thread()
        remove = half.on_terminated(partial(reschedule, current_task()))

        def abort(_: object) -> Abort:
            remove()
            return Abort.SUCCEEDED

        await wait_task_rescheduled(abort)
        return half.state

    def on_terminated(self, callback: Callable[[TerminalState, ChannelError | None], None]) -> Callable[[], None]:
        """Call ``callback(state, error)`` once when this half has ended, at once if it has; ``Actor.watch`` uses this.

        Args:
            callback: runs inside the call that ended the channel; must be quick and not raise. The error is None for FINISHED, otherwise
                the error that the next use of the handle would raise.

        Returns:
            A function that undoes this; calling it twice or too late does nothing.
        """
        if self._moved is not None:
            raise self._refusal()
        half, core = self._half, self._core
        core.check_thread()
        return half.on_terminated(
            lambda: callback(half.state, None if half.state is TerminalState.FINISHED else half.error(core.name))
        )

    def take_over(self, where: str) -> ChannelCore:
        """Move this handle into a message: for the layer that carries the message. See `levada.framework.embedding`.

        Args:
            where: for the text of `HandleMoved`, for example ``"message 17 to /peer"``.

        Returns:
            The core of the channel. It keeps its messages and waiting tasks.

        Raises:
            HandleMoved: it was sent away before, or its messages go to a mailbox.
            HandleNotForwardable: the other half is in another system, so this one must stay.
            ChannelError: its owner has finished, cancelled or closed it.
        """
        if not self._live:
            raise self._refusal()
        if self._other_half.away:
            what = "the other half is in another system, so this one stays here; make another channel and pass the messages on with forward()"
            raise HandleNotForwardable(f"channel {self.name}: {what}", channel=self.name)
        self._live, self._moved = False, where
        self._half.away += 1
        return self._core

    def give_back(self) -> None:
        """Undo `take_over`, if the message was never sent and its carrier has not used the core."""
        self._live, self._moved = True, None
        self._half.away -= 1

    def drop(self, *, lost: bool) -> None:
        """Record, without a warning, that a channel dropped the message with this handle.

        Args:
            lost: no one else can have the handle, because the message was about to leave: end the channel as LOST, as if the message was
                lost in transit. Otherwise the channel ends when the last reference to the handle is gone.
        """
        core = self._core
        if self._moved is None:
            core.abandoned = True
            if lost and self._live:
                self._live, self._moved = False, "a message that was dropped"
                # The receiver that stayed can still take the messages of a lost sender.
                core.end_soon(partial(core.end, TerminalState.LOST, discard=self._half is core.receiver))

    @property
    def in_use(self) -> bool:
        """Whether the handle is not moved, finished, closed or bound to a mailbox, and its half is open."""
        return self._live and self._half.state is OPEN

    def disown(self, reason: Reason) -> None:
        """End the channel because the actor that held this handle has ended, unless the handle was moved or finished."""
        if self.in_use:
            state, role = self._given_up
            cause = reason.error if isinstance(reason, Failed) else None
            detail = f"the actor that {role} {describe_end(reason)}"
            self._core.end(state, detail=detail, cause=cause, reason=reason_of_end(reason))

    def _refusal(self) -> ChannelError:
        """Make the error of a handle that was moved, or whose half has ended."""
        if self._moved is not None:
            return HandleMoved(f"channel {self.name}: this handle went away with {self._moved}", channel=self.name)
        return self._half.error(self.name)

    def _forgotten(self, consequence: str, ending: Callable[..., None], *args: object) -> None:
        # If both halves are forgotten together, warn once. The warning comes last: where warnings are errors, it raises.
        core = self._core
        first, core.abandoned = not core.abandoned, True
        core.end_soon(ending, *args)
        if first:
            text = f"{self!r} was forgotten before the channel ended; {consequence}"
            warnings.warn(text, ResourceWarning, stacklevel=3, source=self)

    def __repr__(self) -> str:
        core = self._core
        here = f"{self._half.state.value}, {len(core.queue)} of {core.window} queued"
        return f"<{type(self).__name__} of channel {core.name}: {here if self._moved is None else f'went away with {self._moved}'}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"a {type(self).__name__} has one owner: it is moved inside messages and not copied or pickled")


class _SendingHalf(_Handle):
    """The common part of `Sender` and `OneshotSender`."""

    __slots__ = ()
    _given_up = TerminalState.CANCELLED, "sent"
    _sends = True

    @enable_ki_protection
    def finish_nowait(self) -> None:
        """Send no more messages; queued ones are still delivered. Tasks inside ``send`` on this handle get `SenderFinished`.

        Does nothing if repeated or if the channel has ended. A moved handle raises `HandleMoved`.
        """
        if self._moved is not None:
            raise self._refusal()
        if self._live and self._half.state is OPEN:
            if get_ident() != self._core.thread:  # saves the call
                self._core.check_thread()
            self._live = False
            self._core.finish_producer(self if self._waiting else None)

    async def finish(self) -> None:
        """Send no more messages, and wait until the receiver has taken everything or was closed.

        A channel finishes with its last sender: while other clones are open this returns at once, and only the last one learns of
        undelivered messages.

        Raises:
            Undelivered: the receiver was closed before it took all messages, or an unreliable channel dropped some.
            ChannelCancelled: this sender or a clone of it was cancelled.
            ChannelLost, ChannelConnectionLost: the other half was lost.
            HandleMoved: the handle was sent away.

        Cancellation: the sender stays finished; only the wait ends.
        """
        self.finish_nowait()
        core = self._core
        if core.producers and core.sender.state is OPEN:
            await checkpoint()
            return
        state = await self.terminated()
        if state not in (TerminalState.FINISHED, TerminalState.RECEIVER_CLOSED):
            raise core.sender.error(core.name)
        if core.undelivered:
            what = f"channel {core.name}: {core.undelivered} messages were not taken by the receiver ({state.value})"
            raise Undelivered(what, channel=core.name, count=core.undelivered)

    @enable_ki_protection
    def cancel(self, reason: str = "") -> None:
        """Cancel the channel, clones included: queued messages are discarded, the receiver gets `ChannelCancelled`.

        Does nothing if repeated or if the channel has ended. A moved handle raises `HandleMoved`.

        Args:
            reason: why, for the receiver's `ChannelCancelled.reason`. In another process it comes behind the messages that are there, and not
                at all if the window is full.
        """
        if self._moved is not None:
            raise self._refusal()
        if self._half.state is OPEN:
            self._core.check_thread()
            self._live = False
            self._core.end(TerminalState.CANCELLED, reason=reason)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> bool | None:
        if self._moved is not None:
            return False
        if error is None:
            self.finish_nowait()
            return False
        self.cancel(reason_of_block(error))
        if isinstance(error, BaseExceptionGroup):
            cancelled, rest = error.split(trio.Cancelled)
            if cancelled is not None and rest is not None and self.says_reader_left(rest):
                try:
                    raise cancelled  # the reader left just when the block was cancelled
                finally:
                    del cancelled, rest, error  # this frame is in its traceback
        return self.says_reader_left(error)

    def says_reader_left(self, error: BaseException) -> bool:
        """Whether an error, or each error of a group, came from this sender or a clone of it because the reader left.

        For code that has no block of the sender. `ReceiverClosed` and `ChannelConnectionLost` of other channels are other errors.
        """
        return self._half.says_reader_left(error)

    def _refusal(self) -> ChannelError:
        if not self._live and self._moved is None:
            text = f"channel {self.name}: this sender was finished or cancelled before"
            return SenderFinished(text, channel=self.name)
        return super()._refusal()


class Sender(_SendingHalf, Generic[T_contra]):
    """The sending end of a channel; made by `channel` and by `clone`.

    As a context manager it finishes at a normal end of the block and cancels after an exception. ``with`` does not wait for the
    receiver, ``async with`` does (see `finish`). A handle that was moved inside the block is left alone.

    A reader that leaves is a normal end of a stream: if a call on this sender, or on a clone, raises `ReceiverClosed` or
    `ChannelConnectionLost` and the error leaves the block, the block ends there and the program goes on behind it. So does ``async with``
    if the reader leaves before it has taken everything; `state` tells. The block passes on all other errors, those of other channels too,
    and a group of errors unless all of them say that this reader left.
    """

    __slots__ = ()
    attachment_kind = "sender"

    def ordered(self, window: int = WINDOW) -> Self:
        """Deliver all messages in the order of sending; the default. For a channel that has ended the choice does not matter: `send` raises.

        Args:
            window: how many messages may be under way before ``send`` waits, 1 or more.

        Raises:
            ConfigurationError: the channel has been used, or the window is not a number above 0.
            SenderFinished, HandleMoved: as for `send`.
        """
        return self._choose(Mode.ORDERED, window)

    def unordered(self, window: int = WINDOW) -> Self:
        """Deliver all messages; over a network a late one does not delay the next. Otherwise like `ordered`."""
        return self._choose(Mode.UNORDERED, window)

    def unreliable(self, buffer: int = WINDOW) -> Self:
        """Never wait: a full buffer of `buffer` messages (1 or more) drops the oldest, a network may drop any. Otherwise like `ordered`."""
        return self._choose(Mode.UNRELIABLE, buffer)

    def _choose(self, mode: Mode, window: int) -> Self:
        core = self._core
        if not self._live:
            raise self._refusal()
        if self._half.state is not OPEN:
            return self  # the reader has left: a normal end of a stream, which the next call tells
        if core.used:
            raise ConfigurationError(f"channel {core.name} has been used; choose {mode.value} before the first message")
        if not isinstance(window, int) or window < 1:
            raise ConfigurationError(f"the window is {window!r}, wanted 1 message or more")
        core.mode, core.window, core.limit = mode, window, window
        return self

    @overload
    async def send(self, message: T_contra, *, receipt: Literal[False] = False) -> None: ...
    @overload
    async def send(self, message: T_contra, *, receipt: Literal[True]) -> Receipt: ...
    @enable_ki_protection
    async def send(self, message: T_contra, *, receipt: bool = False) -> Receipt | None:
        """Send a message, waiting for room in the window if there is none.

        Args:
            receipt: return a `Receipt`, which gets the outcome of the message.

        Raises:
            SenderFinished: this sender was finished or cancelled.
            ReceiverClosed: the receiver wants no more.
            ChannelCancelled: a clone of this sender was cancelled.
            ChannelLost, ChannelConnectionLost: the other half was lost.
            HandleMoved: the handle was sent away.

        Cancellation: the message was not sent.
        """
        self._calls = calls = self._calls + 1
        if not calls & _UNYIELDED:
            await checkpoint()
        if not self._live:
            raise self._refusal()
        core = self._core
        if not receipt:
            if not core.accept(message):
                await self._wait_to_send(message)
            return None
        tracked = core.track(message)
        if not core.accept(tracked):
            await self._wait_to_send(tracked)
        return tracked.receipt

    async def _wait_to_send(self, entry: Any) -> None:
        if self._half.state is not OPEN:
            raise self._refusal()
        self._waiting += 1
        try:
            admitted = await self._core.wait_to_put(self, entry)
        finally:
            self._waiting -= 1
        if not admitted:
            raise self._refusal()

    @enable_ki_protection
    def send_nowait(self, message: T_contra) -> None:
        """Send a message if there is room.

        Raises:
            trio.WouldBlock: the window is full; nothing was sent.
            ChannelError: as for `send`.
        """
        if not self._live:
            raise self._refusal()
        if not self._core.accept(message):
            if self._half.state is not OPEN:
                raise self._refusal()
            raise trio.WouldBlock

    def clone(self) -> Sender[T_contra]:
        """Make a sender for another producer; the channel finishes when all its senders have.

        Raises:
            ChannelError: as for `send`.
        """
        if not self._live or self._half.state is not OPEN:
            raise self._refusal()
        self._core.producers += 1
        return Sender(self._core)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> bool | None:
        if error is not None or self._moved is not None:
            return self.__exit__(kind, error, _)
        try:
            await self.finish()
        except ChannelError:
            if not self._half.reader_left:
                raise
        return False

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if self._live and self._half.state is OPEN and not is_finalizing():
            ending = partial(self._core.end, TerminalState.CANCELLED, reason="it was forgotten")
            self._forgotten("it is cancelled now; finish() or cancel() it", ending)


class OneshotSender(_SendingHalf, Generic[T_contra]):
    """Sends one value; made by `oneshot`.

    As a context manager (``with``) it finishes at a normal end of the block, so the receiver gets `NoValue` if no value was sent, and
    cancels after an exception. As with a `Sender`, the block ends quietly if the reader left.
    """

    __slots__ = ()
    attachment_kind = "oneshot_sender"

    @enable_ki_protection
    def send(self, value: T_contra) -> None:
        """Send the value. Never waits. ``await sender.finish()`` tells whether it was taken.

        Raises:
            SenderFinished: a value was sent before, or the sender was finished or cancelled.
            ReceiverClosed, ChannelLost, ChannelConnectionLost: the receiver is gone.
            HandleMoved: the handle was sent away.
        """
        if not self._live or self._half.state is not OPEN:
            raise self._refusal()
        self._core.check_thread()
        self._core.accept(value)
        self.finish_nowait()

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if self._live and self._half.state is OPEN and not is_finalizing():
            self._forgotten("it ends without a value; send() one or finish_nowait()", self._core.finish_producer)


class _ReceivingHalf(_Handle, Generic[T_co]):
    """The common part of `Receiver` and `OneshotReceiver`."""

    __slots__ = ()
    _given_up = TerminalState.RECEIVER_CLOSED, "received"
    _sends = False

    @enable_ki_protection
    async def receive(self) -> T_co:
        """Take the next message, or wait for one. Several tasks may wait; first come, first served.

        Raises:
            EndOfChannel: the channel was finished, and everything was taken.
            NoValue: a oneshot ended without a value.
            ChannelCancelled: the sender cancelled the channel.
            ChannelLost, ChannelConnectionLost: the other half was lost, and everything that had arrived was taken.
            ReceiverClosed: this receiver was closed.
            HandleMoved: the handle was sent away, or its messages go to a mailbox.
            DecodeError: this message came over a network and cannot be decoded; the next call returns the next message.

        Cancellation: no message was taken.
        """
        self._calls = calls = self._calls + 1
        if not calls & _UNYIELDED:
            await checkpoint()
        core = self._core
        if core.queue and self._live:
            if core.putters or core.enveloped or core.pending:
                if get_ident() != core.thread:
                    core.check_thread()
                if core.rest is not None:
                    await core.let_others_run()
                    return await self.receive()
                return core.took(core.queue.popleft())  # type: ignore[no-any-return]
            return core.queue.popleft()  # type: ignore[no-any-return]
        if self._live and self._half.state is OPEN:
            message: T_co = core.came(await wait_task_rescheduled(core.stand_to_take()))
            if message is not ENDED:
                return message
        raise self._refusal()

    @enable_ki_protection
    def receive_nowait(self) -> T_co:
        """Take the next message if there is one.

        Raises:
            trio.WouldBlock: there is none.
            ChannelError, DecodeError: as for `receive`.
        """
        core = self._core
        if core.queue and self._live:
            if core.putters or core.enveloped or core.pending:
                core.check_thread()
                return core.took(core.queue.popleft())  # type: ignore[no-any-return]
            return core.queue.popleft()  # type: ignore[no-any-return]
        if not self._live or self._half.state is not OPEN:
            raise self._refusal()
        raise trio.WouldBlock

    @enable_ki_protection
    def close(self) -> None:
        """Receive no more messages: queued ones are discarded; senders, and tasks inside ``receive`` here, get `ReceiverClosed`.

        Does nothing if repeated or if the channel has ended. A moved handle raises `HandleMoved`.
        """
        if self._moved is not None:
            raise self._refusal()
        if self._half.state is OPEN:
            self._core.check_thread()
            self._live = False
            self._core.end(TerminalState.RECEIVER_CLOSED)

    @overload
    def to_mailbox(self, ref: Destination[T_co]) -> None: ...
    @overload
    def to_mailbox(self, ref: Destination[T], wrap: Callable[[T_co], T]) -> None: ...
    @enable_ki_protection
    def to_mailbox(self, ref: Destination[Any], wrap: Callable[[Any], Any] | None = None) -> None:
        """Put every message into an actor's mailbox from now on, queued ones first. Returns at once and starts no task.

        ``send`` puts a message straight into the mailbox, so a hop costs no step of trio. While a bounded mailbox is full, messages stay
        in the channel's window, so senders wait for the actor. An actor that stops closes the receiver.

        This handle returns no more messages; `close`, `state`, `terminated` and watching still work. The end of the channel puts nothing
        into the mailbox: an actor may watch the receiver, and its ``Down`` comes behind the last message.

        Args:
            ref: an actor's ref, or any other `Destination`.
            wrap: turns a message into the one the actor handles. It runs inside the sender's ``send`` and should be quick. If it raises,
                the error is logged and the receiver closed. A message that cannot be decoded is logged and left out.

        Raises:
            HandleMoved: the handle was sent away or bound to a mailbox before.
            ReceiverClosed: it was closed before.
        """
        if not self._live:
            raise self._refusal()
        self._core.bind_thread()
        feed = MailboxFeed(self._core, ref, wrap)
        self._live, self._bound = False, True
        feed.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._moved is None:
            self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.__exit__()

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if self._live and self._half.state is OPEN and not is_finalizing():
            self._forgotten("it is closed now; close() it", self._core.end, TerminalState.RECEIVER_CLOSED)

    def _refusal(self) -> ChannelError:
        if self._bound:
            return HandleMoved(f"channel {self.name}: the messages of this receiver go to a mailbox", channel=self.name)
        return super()._refusal()


class Receiver(_ReceivingHalf[T_co]):
    """The receiving end of a channel; made by `channel`. It has one owner, and any of the owner's tasks may receive.

    ``async for message in receiver`` ends when the channel is finished, and raises like `receive` if it ends otherwise.
    As a context manager (``with`` and ``async with`` do the same) it closes at the end of the block, unless it was moved inside.
    """

    __slots__ = ()
    attachment_kind = "receiver"

    def __aiter__(self) -> Self:
        return self

    @enable_ki_protection
    async def __anext__(self) -> T_co:
        core, calls = self._core, self._calls + 1
        if core.queue and self._live and calls & _UNYIELDED and core.rest is None and get_ident() == core.thread:
            self._calls = calls  # as `receive`, without a second coroutine: a tenth of a message over a connection
            return core.took(core.queue.popleft())  # type: ignore[no-any-return]
        if not core.queue and self._live and calls & _UNYIELDED and self._half.state is OPEN:
            self._calls = calls
            message: T_co = core.came(await wait_task_rescheduled(core.stand_to_take()))
            if message is not ENDED:
                return message
        if self._live and self._half.state is TerminalState.FINISHED:
            raise StopAsyncIteration
        try:
            return await self.receive()
        except EndOfChannel:
            raise StopAsyncIteration from None


class OneshotReceiver(_ReceivingHalf[T_co]):
    """Receives one value; made by `oneshot`. ``value = await receiver`` is short for `receive`.

    A second call raises `EndOfChannel`. As a context manager it closes at the end of the block, unless it was moved inside.
    """

    __slots__ = ()
    attachment_kind = "oneshot_receiver"

    def __await__(self) -> Generator[Any, Any, T_co]:
        return self.receive().__await__()

    def _refusal(self) -> ChannelError:
        error = super()._refusal()
        if isinstance(error, EndOfChannel) and not self._core.used:
            return NoValue(f"oneshot {self.name} ended without a value", channel=self.name)
        return error


@overload
def channel(item: type[T], *, name: str | None = None) -> tuple[Sender[T], Receiver[T]]: ...
@overload
def channel(item: None, *, name: str | None = None) -> tuple[Sender[None], Receiver[None]]: ...
@overload
def channel(item: Any, *, name: str | None = None) -> tuple[Sender[Any], Receiver[Any]]: ...
def channel(item: Any, *, name: str | None = None) -> tuple[Sender[Any], Receiver[Any]]:
    """Make a channel and return both ends. It is local until one of them is sent inside a message.

    Args:
        item: the type of the messages. For a union, annotate the variables (``Sender[A | B]``). ``send`` does not check it; over a
            network it tells the codec how to decode.
        name: for logs and errors; the default is the name of the type.

    Raises:
        ConfigurationError: `item` is a value, not a type.

    Example:
        >>> sender, receiver = channel(str)
        >>> sender.send_nowait("first")
        >>> sender.finish_nowait()
        >>> receiver.receive_nowait(), receiver.state
        ('first', <TerminalState.FINISHED: 'finished'>)
    """
    if item.__class__ is not type:
        _check_item(item)
    core = make_core(item, WINDOW, name)
    return Sender(core), Receiver(core)


@overload
def oneshot(item: type[T], *, name: str | None = None) -> tuple[OneshotSender[T], OneshotReceiver[T]]: ...
@overload
def oneshot(item: None, *, name: str | None = None) -> tuple[OneshotSender[None], OneshotReceiver[None]]: ...
@overload
def oneshot(item: Any, *, name: str | None = None) -> tuple[OneshotSender[Any], OneshotReceiver[Any]]: ...
def oneshot(item: Any, *, name: str | None = None) -> tuple[OneshotSender[Any], OneshotReceiver[Any]]:
    """Make a channel for one value; ``value = await receiver`` waits for it.

    Args:
        item: the type of the value, as for `channel`.
        name: for logs and errors; the default is the name of the type.

    Example:
        >>> done, answer = oneshot(int)
        >>> done.send(7)
        >>> answer.receive_nowait()
        7
    """
    if item.__class__ is not type:
        _check_item(item)
    core = make_core(item, 1, name)
    return OneshotSender(core), OneshotReceiver(core)


def _check_item(item: Any) -> None:
    if is_value(item):
        raise ConfigurationError(f"the channel is of {item!r:.100}, wanted the class of its messages, or an annotation")


async def forward(receiver: Receiver[T], sender: Sender[T]) -> TerminalState:
    """Pass the messages of a channel on to another channel until either ends, then end the other one too.

    For a process between two others, because a handle that came from another process cannot be sent on (`HandleNotForwardable`): make a
    channel, send its other end on, and forward. Room is passed on as well: one message is here at a time, so the writer waits while the
    window of `sender` is full.

    * If the writer finishes, so does `sender`, and this waits until the last reader has taken everything.
    * If the writer cancels or is lost, `sender` is cancelled; the last reader gets the messages that it has already got, then
      `ChannelCancelled` with the writer's reason, or the loss.
    * If the last reader leaves or is lost, `receiver` is closed. The message that is here then is dropped, and channels in it end as lost.

    Args:
        receiver: the channel to read from, in any mode.
        sender: the channel to write to; its mode and window are its own.

    Returns:
        How the half that ended first has ended.

    Raises:
        TypeError, ValueError, LevadaError: a message cannot be decoded, or cannot travel: it has a channel that came from another process
            (`HandleNotForwardable`), say. Both channels have been ended, and those in the message are lost.

    Cancellation:
        both channels are ended, as in a block of each.
    """
    with sender, receiver, trio.CancelScope() as passing:
        forget = sender.on_terminated(lambda *_: passing.cancel())
        try:
            async for message in receiver:
                try:
                    await sender.send(message)
                except BaseException:
                    for handle in handles_in(message):
                        handle.drop(lost=True)  # otherwise its peers would wait until the message is collected
                    raise
            await sender.finish()
        except ChannelError as error:
            if sender.state is OPEN:
                if receiver.state in (OPEN, TerminalState.FINISHED):
                    raise
                detail = f"what it forwards has ended: {error}"
                reason = error.reason if isinstance(error, ChannelCancelled) else loss_of(error)
                sender._core.end(TerminalState.CANCELLED, detail=detail, cause=error, reason=reason)
                return receiver.state
        finally:
            forget()
    return sender.state
