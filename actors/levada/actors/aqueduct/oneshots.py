"""Oneshots that remote refs use for answers and ends: records without handles, since no code of the program ever holds one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from levada.framework.embedding import Outcome, TerminalState
from levada.framework.errors import LocalProtocolError
from levada.transports.aqueduct import Delivery, ReceiverHalf, ReceiverState, SenderHalf, SenderState

from .halves import Halves, Letter

__all__ = ["Awaited", "Promise"]

_SENDING = (SenderState.OPEN, SenderState.UNATTACHED)


class Awaited:
    """One value that the peer is to send.

    Args:
        halves: of the connection.
        got: called with the value.
        over: called if there will be none, unless this side closed it; with ``FINISHED`` if the peer ended it in order.
        idle: whether a connection that closes in order need not wait for it.
    """

    __slots__ = ("_calls", "_half", "_halves", "_idle")

    attachment_kind: ClassVar[str] = "oneshot_sender"
    """What the peer gets."""

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
        """``None`` once it is settled: by a value, by its end, or by `close`. Whoever is called holds this, so it must not stay longer."""
        self._idle = idle
        self._half: ReceiverHalf | None = None

    def close(self) -> None:
        """Want no value any more; harmless when it came, or was closed before."""
        if self._calls is not None:
            self._calls = None
            if self._half is not None:
                self._half.close()
                self._halves.flush_soon()

    # What a message that is being packed asks of it.

    def bound(self, half: Any) -> Awaited:
        """The message has left, and this is the half."""
        self._half = half
        self._halves.inbound[half] = self
        if self._idle:
            self._halves.core.background.add(half)
        return self

    def forget(self) -> None:
        """The message will never leave."""
        self._settle(TerminalState.CONNECTION_LOST if self._halves.detail else TerminalState.LOST)

    def give_back(self) -> None:
        """The message could not be written."""

    # What a record is.

    def start(self) -> None:
        """See `levada.actors.aqueduct.halves.Record`."""
        assert self._half is not None
        if self._half.ended:
            self.ended()
        elif self._calls is None:
            self._half.close()
        else:
            self.pump()

    def pump(self) -> None:
        """The value may be there."""
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
        """The half is gone."""
        half = self._half
        assert half is not None
        self._halves.inbound.pop(half, None)
        self._halves.core.background.discard(half)
        self.pump()
        self._settle(_ENDS.get(half.state, TerminalState.LOST))

    def _settle(self, state: TerminalState) -> None:
        calls, self._calls = self._calls, None
        if calls is not None:
            calls[1](state)


_ENDS = {
    ReceiverState.FINISHED: TerminalState.FINISHED,
    ReceiverState.CANCELLED: TerminalState.CANCELLED,
    ReceiverState.CONNECTION_LOST: TerminalState.CONNECTION_LOST,
}


class Promise:
    """One value that this side is to send.

    Args:
        halves: of the connection.
        gone: called when the peer wants none any more, or cannot be reached.
        idle: as for `Awaited`.
    """

    __slots__ = ("_due", "_gone", "_half", "_halves", "_idle")

    attachment_kind: ClassVar[str] = "oneshot_receiver"
    """What the peer gets."""

    def __init__(self, halves: Halves, gone: Callable[[], None], *, idle: bool = False) -> None:
        self._halves = halves
        self._gone: Callable[[], None] | None = gone
        """``None`` once it is settled: by `send`, by `finish`, or by its end. Whoever is called holds this, so it must not stay longer."""
        self._idle = idle
        self._half: SenderHalf | None = None
        self._due: Letter | None = None
        """To be sent as soon as the message with the other half has left."""

    def send(self, payload: bytes) -> None:
        """Send the value, with what is in the packing of the connection; nothing happens if it is settled."""
        packing = self._halves.packing
        if self._gone is None:
            packing.rollback()
            return
        attached = [(passenger, kind) for _, passenger, kind in packing.taken]
        packing.taken.clear()
        self._gone = None
        self._due = Letter(self._halves, payload, None, attached)
        self._go()

    def finish(self) -> None:
        """End it without a value; nothing happens if it is settled."""
        if self._gone is not None:
            self._gone = None
            self._go()

    def _go(self) -> None:
        half = self._half
        if half is None:
            return
        letter, self._due = self._due, None
        if letter is None:
            if half.state in _SENDING:
                half.finish()
        else:
            self._send(half, letter)
        self._halves.flush_soon()

    def _send(self, half: SenderHalf, letter: Letter) -> None:
        try:
            made = half.send(letter.payload, [kind for _, kind in letter.attached], token=letter)
        except LocalProtocolError:
            letter.settle(Outcome.NOT_PROCESSED)  # it ended meanwhile
            return
        self._halves.sent += 1
        if made:  # the connection stands for halves that are no actors
            self._halves.link(self._halves.connection.ref, half, made)
        attached, letter.attached = letter.attached, []
        for (passenger, _), other in zip(attached, made, strict=True):
            self._halves.bind(passenger, other)

    # What a message that is being packed asks of it.

    def bound(self, half: Any) -> Promise:
        """The message has left, or arrived, and this is the half."""
        self._half = half
        self._halves.outbound[half] = self
        if self._idle:
            self._halves.core.background.add(half)
        return self

    def forget(self) -> None:
        """The message will never leave."""
        self._over()

    def give_back(self) -> None:
        """The message could not be written."""

    # What a record is.

    def start(self) -> None:
        """See `levada.actors.aqueduct.halves.Record`."""
        assert self._half is not None
        if self._half.ended:
            self.ended()
        elif self._gone is None:
            self._go()

    def pump(self) -> None:
        """There is always room for one value."""

    def settled(self, letters: list[Any], outcome: Outcome) -> None:
        """It is known what became of the value."""
        for letter in letters:
            letter.settle(outcome)

    def ended(self) -> None:
        """The half is gone."""
        half = self._half
        assert half is not None
        self._halves.outbound.pop(half, None)
        self._halves.core.background.discard(half)
        self._over()

    def _over(self) -> None:
        letter, self._due = self._due, None
        if letter is not None:
            letter.settle(Outcome.NOT_PROCESSED)
        gone, self._gone = self._gone, None
        if gone is not None:
            gone()
