"""`Receiver.to_mailbox`: messages go from a channel straight into an actor's mailbox."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, TypeVar

from trio import current_time
from trio.lowlevel import spawn_system_task

from levada.framework.errors import ActorStopped, ChannelCancelled, DecodeError
from levada.framework.text import printable

from .ask import RemoteTell, content_of
from .cell import Cell
from .channel_core import NOT_PROCESSED, OPEN, PROCESSED, ChannelCore, Envelope, TerminalState, let_others_run
from .tracing import TracedChannel

__all__ = ["Destination", "MailboxFeed"]

M_contra = TypeVar("M_contra", contravariant=True)

logger = logging.getLogger("levada.framework.channel")


class Destination(Protocol[M_contra]):
    """The part of an actor's ref that `Receiver.to_mailbox` uses. All calls are made in the trio thread and return at once."""

    def try_tell(self, message: M_contra) -> bool:
        """Put a message into the mailbox; do nothing and return False if there is no room.

        A mailbox that drops on overflow returns True. A stopped actor raises `ActorStopped`.
        """
        ...

    def on_room(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback` once when the mailbox has room; return a function that undoes this.

        Callbacks are called in order, one for each free place.
        """
        ...

    def on_stopped(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback` once when the actor has stopped, at once if it has; return a function that undoes this."""
        ...


class MailboxFeed:
    """Moves messages from a channel into a mailbox: a consumer of the core, driven by calls instead of a task."""

    def __init__(self, core: ChannelCore, ref: Destination[Any], wrap: Callable[[Any], Any] | None) -> None:
        self._core = core
        self._ref = ref
        self._wrap = wrap
        self._opener: object = None
        """In a traced system, the context of the messages."""
        if isinstance(core, TracedChannel) and isinstance(ref, Cell) and ref.traced:
            self._wrap, self._opener = partial(core.told, wrap), core.opener
        self._held: tuple[Any, Any] | None = None
        """An entry and its message, taken from the channel, for which the mailbox had no room."""
        self._waiting = False
        """Whether the mailbox will call when it has room."""
        self._leave_line: Callable[[], None]
        self._busy = False
        self._forget = ref.on_stopped(self._stopped)

    def start(self) -> None:
        """Take the receiver's place and move the messages that are queued."""
        self._core.receiver.on_terminated(self._forget)
        self._core.receiver.on_terminated(self._drop_held)
        self._core.consume(self._pump)

    def _pump(self) -> None:
        # The mailbox or `wrap` may send on this channel. The outer call then moves that message, so the order is kept.
        if self._busy or self._waiting:
            return
        self._busy = True
        try:
            while self._core.receiver.state is OPEN and self._move_one():
                pass
        finally:
            self._busy = False

    def _move_one(self) -> bool:
        """Move a message, if there is one and the mailbox has room; return whether to go on."""
        core, began = self._core, None
        if self._held is None:
            if not core.queue:
                if core.pending is not None:
                    core.end_pending()
                return False
            entry = core.take()
            try:
                if isinstance(entry, Envelope) and entry.large:
                    began = current_time()
                message = entry.open() if isinstance(entry, Envelope) else entry
                if self._wrap is not None:
                    message = self._wrap(message)
                peer = entry.peer if isinstance(entry, Envelope) else None
                if peer is not None and isinstance(self._ref, Cell):
                    message = RemoteTell(content_of(message), peer, entry.context or self._opener)
            except DecodeError as error:
                warn = self._ref.system.log_unreadable.line if isinstance(self._ref, Cell) else logger.warning
                warn("channel %s: a message cannot be read: %s", core.name, printable(str(error)))
                core.settle(entry, outcome=PROCESSED)
                return True
            except ChannelCancelled:  # it was the sender's reason, which has ended the channel
                core.settle(entry, outcome=PROCESSED)
                return False
            except Exception as error:
                text = "channel %s: a message cannot be put into a mailbox; the receiver is closed"
                if isinstance(self._ref, Cell):  # outside of a system no peer sends
                    self._ref.system.failure_log.log(logger, error, text, core.name)
                else:
                    logger.exception(text, core.name)
                self._held = entry, None
                core.end(TerminalState.RECEIVER_CLOSED, detail="a message could not be put into the receiver's mailbox")
                return False
            self._held = entry, message
        entry, message = self._held
        try:
            fits = self._ref.try_tell(message)
        except ActorStopped:
            self._stopped()
            return False
        if not fits:
            self._waiting = True
            self._leave_line = self._ref.on_room(self._room)
        elif self._held is not None:  # otherwise the mailbox took the message and then stopped its actor
            self._held = None
            core.settle(entry, outcome=PROCESSED)
            if began is not None:
                self._waiting, self._leave_line = True, _nothing
                spawn_system_task(self._rest, current_time() - began)
                return False
        return fits and (core.pending is not None or bool(core.queue))

    async def _rest(self, seconds: float) -> None:
        await let_others_run(seconds)
        self._room()

    def _room(self) -> None:
        if self._waiting:
            self._waiting = False
            self._leave_line = _nothing  # the old value refers to this feed
            self._pump()

    def _stopped(self) -> None:
        self._core.end(TerminalState.RECEIVER_CLOSED, detail="the actor that received has stopped")

    def _drop_held(self) -> None:
        if self._waiting:
            self._waiting = False
            self._leave_line()
            self._leave_line = _nothing
        if self._held is not None:
            (entry, _), self._held = self._held, None
            self._core.settle(entry, outcome=NOT_PROCESSED)


def _nothing() -> None:
    """The placeholder of `_leave_line`."""
