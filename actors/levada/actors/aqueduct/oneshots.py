"""Oneshots that remote refs use for answers and ends: records without handles, since the program never holds one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from levada.framework.embedding import Outcome, TerminalState
from levada.framework.errors import LocalProtocolError
from levada.transports.aqueduct import Delivery, ReceiverHalf, ReceiverState, SenderHalf, SenderState

from .halves import Halves, Letter

__all__ = ["ENDS", "SENDING", "Awaited", "Promise", "dispatch"]

SENDING = (SenderState.OPEN, SenderState.UNATTACHED)


class Awaited:
    """One value that the peer will send.

    Args:
        halves: the channels of the connection.
        got: called with the value.
        over: called if there will be no value, unless this side closed the oneshot; with ``FINISHED`` if the peer ended it in order.
        idle: whether a connection that closes in order does not wait for the value.
    """

    __slots__ = ("_calls", "_half", "_halves", "_idle")

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
        self._halves = halves
        self._calls: tuple[Callable[[Delivery], None], Callable[[TerminalState], None]] | None = (got, over)
        """``None`` once settled: by a value, by its end, or by `close`. The callbacks' owner holds this object, so they go at once."""
        self._idle = idle
        self._half: ReceiverHalf | None = None

    def close(self) -> None:
        """Stop waiting for the value; harmless if it has come, or if this was called before."""
        if self._calls is not None:
            self._calls = None
            if self._half is not None:
                self._half.close()
                self._halves.flush_soon()

    # `levada.actors.aqueduct.halves.Passenger`

    def bound(self, half: Any) -> Awaited:
        """Go on over this half, since the message has left."""
        self._half = half
        self._halves.inbound[half] = self
        if self._idle:
            self._halves.core.background.add(half)
        return self

    def forget(self) -> None:
        """Give up: the message will never leave."""
        self._settle(TerminalState.CONNECTION_LOST if self._halves.detail else TerminalState.LOST)

    def give_back(self) -> None:
        """Do nothing: the message could not be encoded."""

    # `levada.actors.aqueduct.halves.Record`

    def start(self) -> None:
        """Begin; the message with the half has been sent, or opened."""
        assert self._half is not None
        if self._half.ended:
            self.ended()
        elif self._calls is None:
            self._half.close()
        else:
            self.pump()

    def pump(self) -> None:
        """Take the value, if it has come."""
        half = self._half
        assert half is not None
        if half.mailbox:
            delivery = half.take()
            calls, self._calls = self._calls, None
            if calls is None:
                delivery.discard()
            else:
                self._halves.received += 1
                calls[0](delivery)
            self._halves.flush_soon()

    def ended(self) -> None:
        """End with the half, which is gone."""
        half = self._half
        assert half is not None
        self._halves.inbound.pop(half, None)
        self._halves.core.background.discard(half)
        self.pump()
        self._settle(ENDS.get(half.state, TerminalState.LOST))

    def _settle(self, state: TerminalState) -> None:
        calls, self._calls = self._calls, None
        if calls is not None:
            calls[1](state)


ENDS = {
    ReceiverState.FINISHED: TerminalState.FINISHED,
    ReceiverState.CANCELLED: TerminalState.CANCELLED,
    ReceiverState.CONNECTION_LOST: TerminalState.CONNECTION_LOST,
}


def dispatch(halves: Halves, half: SenderHalf, letter: Letter) -> None:
    """Send a letter over a half that has no actor."""
    try:
        made = half.send(letter.payload, [kind for _, kind in letter.attached], token=letter)
    except LocalProtocolError:
        letter.settle(Outcome.NOT_PROCESSED)  # it ended meanwhile
        return
    halves.sent += 1
    letter.payload = b""  # the core has it; this would keep it until the ack
    if made:  # the connection stands for halves without an actor
        halves.link(halves.connection.ref, half, made)
    attached, letter.attached = letter.attached, []
    for (passenger, _), other in zip(attached, made, strict=True):
        halves.bind(passenger, other)


class Promise:
    """One value that this side will send.

    Args:
        halves: the channels of the connection.
        gone: called when the peer does not want the value any more, or is out of reach.
        idle: as for `Awaited`.
    """

    __slots__ = ("_due", "_gone", "_half", "_halves", "_idle", "_octets")

    attachment_kind: ClassVar[str] = "oneshot_receiver"
    """The handle that the peer gets."""

    def __init__(self, halves: Halves, gone: Callable[[], None], *, idle: bool = False) -> None:
        self._halves = halves
        self._gone: Callable[[], None] | None = gone
        """``None`` once settled: by `send`, by `finish`, or by its end. The callback's owner holds this object, so it goes at once."""
        self._idle = idle
        self._half: SenderHalf | None = None
        self._due: Letter | None = None
        """The value, until the message with the other half has left."""
        self._octets = 0
        """Size of the value, while it is under way."""

    def send(self, payload: bytes) -> None:
        """Send the value, with the handles in the connection's packing; does nothing if it is settled."""
        packing = self._halves.packing
        if self._gone is None:
            packing.rollback()
            return
        attached = [(passenger, kind) for _, passenger, kind in packing.taken]
        packing.taken.clear()
        self._gone = None
        self._due = Letter(self._halves, payload, None, attached)
        self._octets = len(payload)
        self._halves.answers += self._octets
        self._go()

    def finish(self) -> None:
        """End the oneshot without a value; does nothing if it is settled."""
        if self._gone is not None:
            self._gone = None
            self._go()

    def _go(self) -> None:
        half = self._half
        if half is None:
            return
        letter, self._due = self._due, None
        if letter is None:
            if half.state in SENDING:
                half.finish()
        else:
            dispatch(self._halves, half, letter)
        self._halves.flush_soon()

    # `levada.actors.aqueduct.halves.Passenger`

    def bound(self, half: Any) -> Promise:
        """Go on over this half, since the message has left or arrived."""
        self._half = half
        self._halves.outbound[half] = self
        if self._idle:
            self._halves.core.background.add(half)
        return self

    def forget(self) -> None:
        """Give up: the message will never leave."""
        self._over()

    def give_back(self) -> None:
        """Do nothing: the message could not be encoded."""

    # `levada.actors.aqueduct.halves.Record`

    def start(self) -> None:
        """Begin; the message with the half has been sent, or opened."""
        assert self._half is not None
        if self._half.ended:
            self.ended()
        elif self._gone is None:
            self._go()

    def pump(self) -> None:
        """Do nothing: there is always room for one value."""

    def settled(self, letters: list[Any], outcome: Outcome) -> None:
        """Report the outcome of the value."""
        for letter in letters:
            letter.settle(outcome)
        self._arrived()

    def _arrived(self) -> None:
        octets, self._octets = self._octets, 0
        self._halves.answer_left(octets)

    def ended(self) -> None:
        """End with the half, which is gone."""
        half = self._half
        assert half is not None
        self._halves.outbound.pop(half, None)
        self._halves.core.background.discard(half)
        self._over()

    def _over(self) -> None:
        letter, self._due = self._due, None
        if letter is not None:
            letter.settle(Outcome.NOT_PROCESSED)
        self._arrived()
        gone, self._gone = self._gone, None
        if gone is not None:
            gone()
