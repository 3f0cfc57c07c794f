"""The receiver's half of a channel: which messages were processed, acks and nacks, the mailbox, and the ways in which it ends.

A message is *processed* when it enters the mailbox. A mailbox without room leaves messages that came on streams unread, so that the
sender's window closes, and drops datagrams, which are nacked in time (AQ-40).

The mailbox outlives the half: a finished channel is read to its end, and a channel that was finished before the message came that
attaches it waits, *unclaimed*, for that message (AQ-30).
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING

from .errors import LimitExceeded, ResetCode, violation
from .events import Ended, Readable
from .frames import LARGEST, encode_ranges, split_runs
from .ids import ONESHOT
from .sender import SenderHalf
from .state import RECEIVER, Place, ReceiverInput, ReceiverState

if TYPE_CHECKING:
    from .core import AqueductCore
    from .streams import Stream
    from .timers import NackDue

__all__ = ["Delivery", "ReceiverHalf"]

_OPEN, _UNATTACHED = ReceiverState.OPEN, ReceiverState.UNATTACHED
_FINISHING, _CLOSE_WAIT = ReceiverState.FINISHING, ReceiverState.CLOSE_WAIT

_MAX_RUNS = 4096
"""Ints in one frame of ours: a peer may limit the array that it accepts."""


class Delivery:
    """A message as the application gets it; what it means is decoded only then (AQ-33)."""

    __slots__ = ("_octets", "attachments", "half", "payload")

    def __init__(self, half: ReceiverHalf, payload: bytes, attachments: tuple[SenderHalf | ReceiverHalf, ...]) -> None:
        self.half = half
        """The receiver that it came to."""
        self.payload = payload
        """Octets, as they were sent."""
        self.attachments = attachments
        """Halves of the channels that came with it, by index; each may have ended already."""
        self._octets = 0  # that count as untaken

    def __repr__(self) -> str:
        return (
            f"<Delivery of {len(self.payload)} octets on {self.half.id}, attached {[h.id for h in self.attachments]}>"
        )

    def release(self) -> bool:
        """Have a message that was taken with ``release=False`` count no more: the application has got it, or never will.

        Returns:
            Whether a stream was read on for that, so that there may be events and output. Once more does nothing.
        """
        octets = self._octets
        if not octets:
            return False
        self._octets = 0
        half = self.half
        if half.stalled:
            return half.released(octets)
        half.untaken -= octets
        half.core.held -= octets
        return False

    def discard(self, *, lost: bool = False) -> None:
        """Drop a message that was taken from the mailbox and that nobody will look at, with everything attached to it.

        Args:
            lost: the channel was cancelled or lost, so that the peer's halves hear *lost*; otherwise this program did not want it, and
                attached receivers are closed, attached senders cancelled.

        Source: AQ-34, AQ-50.
        """
        core = self.half.core
        for half in self.attachments:
            core.links.later(half.tear_down if lost else half.cancel if isinstance(half, SenderHalf) else half.close)
        core.settle()


class ReceiverHalf:
    """One local receiver; made by the core, used by whoever holds the channel."""

    __slots__ = (
        "_acked",
        "_acked_ahead",
        "_ahead",
        "_arrived",
        "_count",
        "_finish",
        "_frontier",
        "_next",
        "_noted",
        "_pending",
        "_pending_octets",
        "_threshold",
        "acking",
        "claimed",
        "control",
        "core",
        "id",
        "known",
        "mailbox",
        "minted_here",
        "nack",
        "reachable",
        "stalled",
        "state",
        "total",
        "untaken",
    )

    def __init__(self, core: AqueductCore, channel: int, *, minted_here: bool) -> None:
        self.core = core
        self.id = channel
        """Channel id."""
        self.state = _UNATTACHED
        """Open, ending, or how it ended."""
        self.minted_here = minted_here
        self.reachable = not minted_here
        """As that of a sender; only `Links` looks."""
        self.known = minted_here
        """Whether the application has this handle, so that events about it make sense."""
        self.claimed = minted_here
        """Whether the message that attaches it has come, or there will be none."""
        self.control: Stream | None = None
        self.mailbox: deque[Delivery] = deque()
        """Messages that were processed and not taken; look, but take with `take`."""
        self.acking = False
        """Whether the core will make it ack."""
        self.total = 0
        """Datagrams that were declared."""
        self.nack: NackDue | None = None
        """When the datagrams that were declared last are settled."""
        self.untaken = 0
        """Octets that the application has not got."""
        # Reliable: all below `_next` were processed, and those in `_ahead`; all below `_acked` were acked, and those in `_acked_ahead`.
        self._next = 0
        self._ahead: set[int] | None = None
        self._acked = 0
        self._acked_ahead: set[int] | None = None
        self._pending = 0  # processed and not acked
        self._pending_octets = 0
        self._noted = 0  # of those, after half of the ack delay
        self._threshold = core.config.window // 2 or 1
        self._finish: int | None = None
        # Unreliable: all below `_frontier` were settled; `_arrived` holds those processed above.
        self._frontier = 0
        self._arrived: set[int] | None = None
        self._count = 0  # datagrams processed
        self.stalled: list[Stream] | None = None
        """Streams that wait for room."""

    def __repr__(self) -> str:
        return f"<ReceiverHalf {self.id} {self.state.value}>"

    # ------------------------------------------------ the application

    @property
    def oneshot(self) -> bool:
        """Whether the channel carries at most one message."""
        return bool(self.id & ONESHOT)

    @property
    def ended(self) -> bool:
        """Whether the half is gone; its mailbox may still hold messages."""
        return self.core.halves.get(self.id) is not self

    def take(self, *, release: bool = True) -> Delivery:
        """Take the oldest message.

        Args:
            release: its octets count no more; otherwise they count until `Delivery.release`, for an owner who has a queue of its own.

        Its attachments are the application's from now on: each is used, closed or cancelled, or the message is given to
        `Delivery.discard`.

        Raises:
            IndexError: the mailbox is empty.

        Source: AQ-33, AQ-40.
        """
        message = self.mailbox.popleft()
        for half in message.attachments:
            half.known = True
        if not release:
            message._octets = len(message.payload)
            if self.stalled:
                self.released(0)
        else:
            self.released(len(message.payload))
        return message

    def released(self, octets: int) -> bool:
        """So many octets count no more; whether a stream was read on for that."""
        self.untaken -= octets
        self.core.held -= octets
        # Half empty, so that a stalled stream is not started again for each single message.
        if self.stalled and len(self.mailbox) <= self.core.config.mailbox // 2 and not self._full():
            self._resume()
            self.core.settle()
            return True
        return False

    def close(self) -> None:
        """Take no more: what is in the mailbox is dropped, and the sender hears *receiver closed*. Once more, it does nothing.

        Source: AQ-43, AQ-50, AQ-51.
        """
        self.drop_mailbox(lost=False)
        if not self.ended:
            self._go(ReceiverInput.CLOSE)
            if self.state is not _CLOSE_WAIT:
                self._close()
        self.core.settle()

    def tear_down(self) -> None:
        """End it because the message in which it came is discarded unread: the remote side hears *lost*. Source: AQ-50."""
        self.drop_mailbox(lost=True)
        if self.ended:
            return
        if self.control is None or self.control.gate_open:
            self.lose()
        else:
            self._go(ReceiverInput.CLOSE)
            if self.state is not _CLOSE_WAIT:
                self._close()

    # ------------------------------------------------ messages

    def process(self, number: int, attached: tuple[int, ...], payload: bytes) -> bool:
        """Process a message that came on a stream; false if the mailbox has no room, and nothing happened.

        Source: AQ-28, AQ-29.
        """
        if self.state is _CLOSE_WAIT:
            return True
        ahead = self._ahead
        if number < self._next or (ahead is not None and number in ahead):
            raise violation("E-20", f"{number} on channel {self.id}")
        if number == LARGEST or (self._finish is not None and number >= self._finish):
            raise violation("E-21", f"reliable {number} on channel {self.id}")
        if self.id & ONESHOT:
            self._check_oneshot(self._next + 1, self._count)
        core, mailbox, size = self.core, self.mailbox, len(payload)
        config = core.config
        # `_full` and `_deliver` in place: 0.7 of the time.
        if (
            len(mailbox) >= config.mailbox
            or self.untaken >= config.mailbox_octets
            or (core.held >= config.max_untaken and self.untaken)
        ):
            return False
        mailbox.append(Delivery(self, payload, core.receive_attachments(attached) if attached else ()))
        self.untaken += size
        core.held += size
        if len(mailbox) == 1 and self.known:
            core.emit(Readable(self))
        if number == self._next:
            self._next = number + 1
            if ahead:
                while self._next in ahead:
                    ahead.remove(self._next)
                    self._next += 1
        else:
            if ahead is None:
                ahead = self._ahead = set()
            ahead.add(number)
            if len(ahead) > config.max_ranges:
                raise LimitExceeded(
                    f"{len(ahead)} messages of channel {self.id} before number {self._next}", rule="AQ-28"
                )
        self._pending += 1
        self._pending_octets += size
        if not self.acking:
            core.ack_later(self)
        if self._pending == self._threshold or self._pending_octets > config.window_octets >> 1:
            core.ack_now.append(self)
        if self._finish is not None:
            self.maybe_finish()
        return True

    def process_unreliable(self, number: int, attached: tuple[int, ...], payload: bytes) -> None:
        """Process a message that came as a datagram, if there is room. Source: AQ-28, AQ-40."""
        if self.state is _CLOSE_WAIT or number < self._frontier:
            return
        arrived = self._arrived
        if arrived is None:
            arrived = self._arrived = set()
        if number in arrived:
            return
        if number == LARGEST or (self._finish is not None and number >= self.total):
            raise violation("E-21", f"unreliable {number} on channel {self.id}")
        if self.id & ONESHOT:
            self._check_oneshot(self._next, self._count + 1)
        if self._full() or len(arrived) >= self.core.config.max_ranges:
            return
        self._deliver(attached, payload)
        arrived.add(number)
        self._count += 1
        if not self.acking:
            self.core.ack_later(self)
        if self._finish is not None:
            self.maybe_finish()

    def stall(self, stream: Stream) -> None:
        """Have a stream read on when there is room."""
        if self.stalled is None:
            self.stalled = []
        self.stalled.append(stream)

    # ------------------------------------------------ the control stream

    def attached(self, control: Stream) -> None:
        """The control stream is there. Source: section 8."""
        self.control = control
        before = self.state
        self._go(ReceiverInput.ATTACHED)
        if before is _CLOSE_WAIT:
            self._close()
        elif self._pending >= self._threshold:
            self.core.ack_now.append(self)
        elif (self._pending or self._arrived) and not self.acking:
            self.core.ack_later(self)

    def gate_opened(self) -> None:
        """Nothing of a receiver waits for the gate."""

    def declared(self, count: int) -> None:
        """SentUnreliable came. Source: AQ-36, AQ-37."""
        self.total += count
        if self.total > LARGEST:
            raise violation("E-4", f"{self.total} datagrams on channel {self.id}")
        if self.id & ONESHOT:
            self._check_oneshot(self._next, self._count)
        if count:
            self.core.nack_later(self)

    def finish_announced(self, count: int) -> None:
        """FinishSender came. Source: AQ-42."""
        if self._next > count or (self._ahead and max(self._ahead) >= count):
            raise violation("E-26", f"{count} on channel {self.id}")
        if self._arrived and max(self._arrived) >= self.total:
            raise violation("E-21", f"{self.total} datagrams on channel {self.id}")
        if self.id & ONESHOT and count + self.total > 1:
            raise violation("E-5", f"{count + self.total} messages")
        self._finish = count
        self._go(ReceiverInput.FINISH_SENDER)
        self.maybe_finish()

    def sender_reset(self, code: int) -> None:
        """The sender's direction was reset. Source: AQ-46, AQ-48."""
        if code == ResetCode.LOST:
            self.lose()
            return
        self._go(ReceiverInput.CANCELLED)
        self.drop_mailbox(lost=True)
        self._close()

    def ack(self, *, due: bool) -> None:
        """Ack what was processed.

        Args:
            due: the ack delay is over. If nothing came in its second half, the sender's window may be smaller than ours and full:
                from now on half as many messages are acked at once, until more come in one turn.

        Source: AQ-35, AQ-36.
        """
        if self.control is None or self.ended:
            return
        if not due:
            self._threshold = max(self._threshold, min(self._pending, self.core.config.window) // 2)
        elif self._pending and self._pending == self._noted:
            self._threshold = min(self._threshold, self._pending // 2 or 1)
        self._ack_reliable()
        arrived = self._arrived
        if arrived:
            end = self._frontier
            while end in arrived:
                end += 1
            self.settle_to(end)

    def settle_due(self, end: int) -> None:
        """Datagrams below `end` had their time. Source: AQ-36, AQ-42."""
        if not self.ended:
            self.settle_to(end)
            if self._finish is not None:
                self.maybe_finish()

    def about_to_ack(self) -> None:
        """Half of the ack delay is over."""
        self._noted = self._pending

    def maybe_finish(self) -> None:
        """Close if everything that was declared has been settled. Source: AQ-42."""
        if self._next != self._finish:
            return
        arrived = self._arrived or ()
        if self._frontier + len(arrived) == self.total:
            self.settle_to(self.total)
        if self._frontier == self.total:
            self._go(ReceiverInput.COMPLETE)
            self._close()

    def settle_to(self, end: int) -> None:
        """Ack or nack every datagram below `end`. Source: AQ-36."""
        arrived = self._arrived or set()
        numbers = sorted(number for number in arrived if number < end)
        arrived.difference_update(numbers)
        runs = split_runs(numbers, self._frontier)
        last = numbers[-1] + 1 if numbers else self._frontier
        if last < end:
            runs += (end - last,) if runs else (0, end - last)
        self._frontier = max(end, self._frontier)
        for at in range(0, len(runs), _MAX_RUNS):  # an even number, so that each frame begins with acks
            assert self.control is not None
            self.control.write(b"\x06" + encode_ranges(runs[at : at + _MAX_RUNS]))

    def lose(self, *, told: bool = False) -> None:
        """It is lost. Source: AQ-48, AQ-56.

        Args:
            told: the peer said so; for a receiver it makes no difference.
        """
        if self.control is not None:
            self.control.reset(ResetCode.LOST)
        self._go(ReceiverInput.LOST)
        self.drop_mailbox(lost=True)
        self._gone()

    def take_acked_links(self) -> list[int]:
        """A receiver carries no channels."""
        return []

    def connection_lost(self) -> None:
        """The connection is over. What is in the mailbox stays. Source: AQ-19."""
        self._go(ReceiverInput.CONNECTION_CLOSED)
        self._gone()

    def drop_mailbox(self, *, lost: bool) -> None:
        """Discard what was not taken, and what is attached to it; and whatever is claimed later. Source: AQ-50."""
        for message in self.mailbox:
            self.untaken -= len(message.payload)
            self.core.held -= len(message.payload)
            if message.attachments:
                self.core.links.later(partial(message.discard, lost=lost))
        self.mailbox.clear()
        if self.stalled:
            self.core.links.later(self._resume)

    # ------------------------------------------------ inside

    def _go(self, what: ReceiverInput) -> None:
        self.state = RECEIVER[self.state, what]

    def _full(self) -> bool:
        """Whether a message has to wait; one is always let in, so that no channel can stop another for good."""
        core, config = self.core, self.core.config
        return (
            len(self.mailbox) >= config.mailbox
            or self.untaken >= config.mailbox_octets
            or (core.held >= config.max_untaken and self.untaken > 0)
        )

    def _deliver(self, attached: tuple[int, ...], payload: bytes) -> None:
        mailbox = self.mailbox
        mailbox.append(Delivery(self, payload, self.core.receive_attachments(attached) if attached else ()))
        self.untaken += len(payload)
        self.core.held += len(payload)
        if len(mailbox) == 1 and self.known:
            self.core.emit(Readable(self))

    def _check_oneshot(self, reliable: int, unreliable: int) -> None:
        """Refuse more than one message, received or declared. Source: AQ-7 (D-3)."""
        count = reliable + len(self._ahead or ()) + max(self.total, unreliable)
        if count > 1:
            raise violation("E-5", f"{count} on channel {self.id}")

    def _resume(self) -> None:
        stalled, self.stalled = self.stalled or [], None
        for stream in stalled:
            self.core.unblock(stream)

    def _ack_reliable(self) -> None:
        """Ack everything processed, each number once, from the lowest that was not acked. Source: AQ-35."""
        if not self._pending:
            return
        assert self.control is not None
        self._pending = self._pending_octets = 0
        ahead, acked = self._ahead, self._acked_ahead
        if not ahead and not acked:
            runs = [self._next - self._acked]
            self._acked = self._next
        else:
            ahead, acked = ahead or set(), acked or set()
            numbers = [n for n in range(self._acked, self._next) if n not in acked] + sorted(ahead - acked)
            runs = split_runs(numbers, self._acked)
            acked.update(numbers)
            while self._acked in acked:
                acked.remove(self._acked)
                self._acked += 1
            self._acked_ahead = acked
        self.control.write(b"\x05" + encode_ranges(runs))

    def _close(self) -> None:
        """Say what was processed, and end. Source: AQ-38, AQ-43 (D-19)."""
        control = self.control
        assert control is not None
        if self._arrived:
            self.settle_to(max(self._arrived) + 1)
        self._ack_reliable()
        control.write(b"\x08\x00")
        control.finish()
        self._gone()
        self.core.links.leave_tombstone(self)

    def _gone(self) -> None:
        """Forget the half. The state has been set."""
        self._ahead = self._acked_ahead = self._arrived = None
        self.nack = None
        if self.control is not None:
            self.control.half = None
            self.control.place = Place.DISCARD
        if self.stalled:
            self.core.links.later(self._resume)
        self.core.forget(self)
        if self.known:
            self.core.emit(Ended(self))
