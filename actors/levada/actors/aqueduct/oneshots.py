"""Oneshots that remote refs use themselves, without handles in the program: for answers and ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from levada.framework.embedding import Outcome, TerminalState
from levada.transports.aqueduct import Delivery

from .halves import SENDING, Halves, Letter
from .links import OwnHalf

__all__ = ["Awaited", "Promise"]


class Awaited(OwnHalf):
    """One value that the peer will send.

    Args:
        halves: the channels of the connection.
        got: called with the value.
        over: called if there will be no value, unless this side closed the oneshot; with ``FINISHED`` if the peer ended it in order.
        idle: whether a connection that closes in order does not wait for the value.
    """

    __slots__ = ("_calls", "half", "halves", "idle")

    attachment_kind: ClassVar[str] = "oneshot_sender"
    """The handle that the peer gets."""

    def __init__(
        self,
        halves: Halves,
        got: Callable[[Delivery], None],
        over: Callable[[TerminalState], None],
        *,
        idle: bool = False,
    ) -> None:
        self.halves = halves
        self._calls: tuple[Callable[[Delivery], None], Callable[[TerminalState], None]] | None = (got, over)
        """``None`` once settled: by a value, by its end, or by `close`. The callbacks' owner holds this object, so they go at once."""
        self.idle = idle
        self.half = None

    def close(self) -> None:
        """Stop waiting for the value; harmless if it has come, or if this was called before."""
        if self._calls is not None:
            self._calls = None
            if self.half is not None:
                self.half.close()
                self.halves.flush_soon()

    def begun(self) -> None:
        """Take the value, or close the half if nothing is wanted any more."""
        if self._calls is None:
            self.half.close()
        else:
            self.pump()

    def pump(self) -> None:
        """Take the value, if it has come."""
        half = self.half
        if half is not None and half.mailbox:
            delivery = half.take()
            calls, self._calls = self._calls, None
            if calls is None:
                delivery.discard()
            else:
                self.halves.received += 1
                calls[0](delivery)
            self.halves.flush_soon()

    def over(self) -> None:
        """Take the value, or say that there will be none."""
        self.pump()
        calls, self._calls = self._calls, None
        if calls is not None:
            calls[1](self.how_ended)


class Promise(OwnHalf):
    """One value that this side will send.

    Args:
        halves: the channels of the connection.
        gone: called when the peer does not want the value any more, or is out of reach.
        idle: as for `Awaited`.
    """

    __slots__ = ("_due", "_gone", "_size", "half", "halves", "idle")

    attachment_kind: ClassVar[str] = "oneshot_receiver"
    """The handle that the peer gets."""

    def __init__(self, halves: Halves, gone: Callable[[], None], *, idle: bool = False) -> None:
        self.halves = halves
        self._gone: Callable[[], None] | None = gone
        """``None`` once settled: by `send`, by `finish`, or by its end. The callback's owner holds this object, so it goes at once."""
        self.idle = idle
        self.half = None
        self._due: Letter | None = None
        """The value, until the message with the other half has left."""
        self._size = 0
        """Size of the value, while it is under way."""

    def send(self, payload: bytes) -> None:
        """Send the value, with the handles in the connection's packing; does nothing if it is settled."""
        packing = self.halves.packing
        if self._gone is None:
            packing.rollback()
            return
        self._gone = None
        self._due = Letter(self.halves, payload, None, packing.leave())
        self._size = len(payload)
        self.halves.answers += self._size
        self._go()

    def finish(self) -> None:
        """End the oneshot without a value; does nothing if it is settled."""
        if self._gone is not None:
            self._gone = None
            self._go()

    def _go(self) -> None:
        half = self.half
        if half is None:
            return
        letter, self._due = self._due, None
        if letter is None:
            if half.state in SENDING:
                half.finish()
        else:
            self.dispatch(letter)
        self.halves.flush_soon()

    def begun(self) -> None:
        """Send the value, or the end, if it is known."""
        if self._gone is None:
            self._go()

    def pump(self) -> None:
        """Do nothing: there is always room for one value."""

    def settled(self, letters: list[Any], outcome: Outcome) -> None:
        """Report the outcome of the value."""
        super().settled(letters, outcome)
        self._arrived()

    def _arrived(self) -> None:
        size, self._size = self._size, 0
        self.halves.answer_left(size)

    def over(self) -> None:
        """Give up what has not left, and say that the peer does not want the value, if it was not sent."""
        letter, self._due = self._due, None
        if letter is not None:
            letter.settle(Outcome.NOT_PROCESSED)
        self._arrived()
        gone, self._gone = self._gone, None
        if gone is not None:
            gone()
