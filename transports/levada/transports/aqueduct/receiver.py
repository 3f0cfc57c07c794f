"""The receiving half of a channel: processed messages, acks and nacks, the mailbox, and the ways it ends.

A message is *processed* when it enters the mailbox. While the mailbox is full, messages on streams stay unread, which closes the sender's
window; datagrams are dropped and later nacked (AQ-40).

The mailbox outlives the half: a finished channel is read to its end. A channel that finishes before the message that attaches it arrives
waits for that message, *unclaimed* (AQ-30).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from functools import partial
from typing import TYPE_CHECKING, Any

from .codes import LimitExceeded, ResetCode, violation
from .events import Ended, Readable
from .frames import LARGEST, MORE, ONESHOT, SHORT, encode_int, encode_ranges, rest_of_number, split_runs
from .links import ChannelHalf
from .sender import SenderHalf
from .state import RECEIVER, ReceiverInput, ReceiverState, StreamPosition

if TYPE_CHECKING:
    from .core import AqueductCore
    from .streams import AqueductStream

__all__ = ["NO_MESSAGES", "Delivery", "ReceiverHalf"]

NO_MESSAGES: Any = ()
"""The mailbox while it is empty. A deque takes 760 bytes."""

_OPEN, _UNATTACHED = ReceiverState.OPEN, ReceiverState.UNATTACHED
_FINISHING, _CLOSE_WAIT = ReceiverState.FINISHING, ReceiverState.CLOSE_WAIT

_MAX_RUNS = 4096
"""Ints in one frame that we send: a peer may limit the array."""


class Delivery:
    """A message for the application; its payload is decoded only then (AQ-33). An owner may give the core a subclass of it."""

    __slots__ = ("_size", "attachments", "half", "payload")

    def __init__(self, half: ReceiverHalf, payload: bytes, attachments: tuple[SenderHalf | ReceiverHalf, ...]) -> None:
        self.half = half
        """The receiver it came to."""
        self.payload = payload
        """The bytes that were sent."""
        self.attachments = attachments
        """Halves of the attached channels, by index; each may have ended already."""
        self._size = len(payload)  # that count as untaken

    def __repr__(self) -> str:
        return f"<Delivery of {len(self.payload)} bytes on {self.half.id}, attached {[h.id for h in self.attachments]}>"

    def release(self) -> bool:
        """Stop counting a message taken with ``release=False``: the application has it, or never will. A second call does nothing.

        Returns:
            Whether a stream was read on, so that there may be events and output.
        """
        size = self._size
        if not size:
            return False
        self._size = 0
        half = self.half
        if half.stalled:
            return half.released(size)
        half.untaken -= size
        half.core.held -= size
        return False

    def discard(self, *, lost: bool = False) -> None:
        """Drop a message taken from the mailbox that will not be used, with everything attached to it.

        Args:
            lost: the channel was cancelled or lost, and the peer's halves are told *lost*. Otherwise this program did not want the message:
                attached receivers are closed, attached senders cancelled.

        Source: AQ-34, AQ-50.
        """
        core = self.half.core
        for half in self.attachments:
            core.links.later(half.tear_down if lost else half.cancel if isinstance(half, SenderHalf) else half.close)
        core.settle()


class ReceiverHalf(ChannelHalf):
    """One local receiver, made by the core and used by the owner of the channel."""

    __slots__ = (
        "_acked", "_acked_ahead", "_ahead", "_arrived", "_count", "_finish", "_frontier", "_head", "_next", "_noted", "_pending",
        "_pending_bytes", "_threshold", "acking", "claimed", "core", "mailbox", "stalled", "total", "untaken",
        "user_data",
    )  # fmt: skip

    state: ReceiverState

    def __init__(self, core: AqueductCore, channel: int, *, minted_here: bool) -> None:
        super().__init__(channel, minted_here=minted_here, reachable=not minted_here)
        self.core = core
        self.state = _UNATTACHED
        self.claimed = minted_here
        """Whether the message that attaches it has come, or none will."""
        self.mailbox: deque[Delivery] = NO_MESSAGES
        """Messages processed and not taken. Read only: take them with `take`."""
        self.acking = False
        """Whether the core will make it ack."""
        self.total = 0
        """Datagrams that were declared."""
        self.untaken = 0
        """Bytes that the application has not received."""
        self.user_data: Any = None
        """For the owner of the half; the core does not look at it."""
        self._head = b"\x03" + encode_int(channel)
        # Reliable: all below `_next` were processed, and those in `_ahead`; all below `_acked` were acked, and those in `_acked_ahead`.
        self._next = 0
        self._ahead: set[int] | None = None
        self._acked = 0
        self._acked_ahead: set[int] | None = None
        self._pending = 0  # processed and not acked
        self._pending_bytes = 0
        self._noted = 0  # of the pending messages, after half of the ack delay
        self._threshold = core.config.window // 2 or 1
        self._finish: int | None = None
        # Unreliable: all below `_frontier` were settled; `_arrived` holds those processed above.
        self._frontier = 0
        self._arrived: set[int] | None = None
        self._count = 0  # datagrams processed
        self.stalled: list[AqueductStream] | None = None
        """Streams that wait for room."""

    def take(self, *, release: bool = True) -> Delivery:
        """Take the oldest message. Source: AQ-33, AQ-40.

        Args:
            release: False if the owner has its own queue: the bytes then count until `Delivery.release`.

        The attachments now belong to the application. It uses, closes or cancels each one, or calls `Delivery.discard`.

        Raises:
            IndexError: the mailbox is empty.
        """
        mailbox = self.mailbox
        if not mailbox:
            raise IndexError("the mailbox is empty")
        message = mailbox.popleft()
        if not mailbox:
            self.mailbox = NO_MESSAGES
        for half in message.attachments:
            half.known = True
        if release:
            size, message._size = message._size, 0
            self.untaken -= size
            self.core.held -= size
        if self.stalled:
            self.released(0)
        return message

    def take_into(self, queue: deque[Any], most: int) -> int:
        """Take so many messages at most, each as ``take(release=False)`` does, and put them into the owner's own queue; return how many.

        All messages of a batch of packets cost 0.05 µs each, a call of `take` for each 0.2.
        """
        mailbox = self.mailbox
        count = len(mailbox)
        if count <= most:
            taken: Collection[Delivery] = mailbox
            self.mailbox = NO_MESSAGES
        else:
            taken = [mailbox.popleft() for _ in range(most)]
            count = len(taken)
        for message in taken:
            if message.attachments:
                for half in message.attachments:
                    half.known = True
        queue.extend(taken)
        if self.stalled:
            self.released(0)
        return count

    def released(self, size: int) -> bool:
        """Stop counting bytes; return whether a stream was read on."""
        self.untaken -= size
        self.core.held -= size
        # Half empty, so that a stalled stream is not restarted for each single message.
        if self.stalled and len(self.mailbox) <= self.core.config.mailbox // 2 and not self._full():
            self._resume()
            self.core.settle()
            return True
        return False

    def close(self) -> None:
        """Take no more messages: the mailbox is dropped, and the sender is told *receiver closed*. A second call does nothing.

        Source: AQ-43, AQ-50, AQ-51.
        """
        self.drop_mailbox(lost=False)
        if not self.ended:
            self.state = RECEIVER[self.state, ReceiverInput.CLOSE]
            if self.state is not _CLOSE_WAIT:
                self._close()
        self.core.settle()

    def tear_down(self) -> None:
        """End the half because the message that carried it is discarded unread. The remote side is told *lost*. Source: AQ-50."""
        self.drop_mailbox(lost=True)
        if self.ended:
            return
        if self.control is None or self.control.gate_open:
            self.lose()
        else:
            self.state = RECEIVER[self.state, ReceiverInput.CLOSE]
            if self.state is not _CLOSE_WAIT:
                self._close()

    def process(self, number: int, attached: tuple[int, ...], payload: bytes) -> bool:
        """Process a message from a stream. Return False, with no effect, if the mailbox has no room. Source: AQ-28, AQ-29."""
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
        # `_full` and `_deliver` in place take 0.7 of the time.
        if (
            len(mailbox) >= config.mailbox
            or self.untaken >= config.mailbox_bytes
            or (core.held >= config.max_untaken and self.untaken)
        ):
            return False
        if mailbox is NO_MESSAGES:
            mailbox = self.mailbox = deque()
        mailbox.append(core.delivery(self, payload, core.receive_attachments(attached) if attached else ()))
        self.untaken += size
        core.held += size
        if len(mailbox) == 1 and self.known:
            core.events.append(Readable(self))
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
        self._pending_bytes += size
        if not self.acking:
            self.acking = True
            core.ack_later(self)
        if self._pending >= self._threshold or self._pending_bytes > config.window_bytes >> 1:
            core.ack_now[self] = None
        if self._finish is not None:
            self.maybe_finish()
        return True

    def process_run(self, data: bytes, at: int) -> int:
        """Process messages that follow the one of this channel that was processed just now; return where they end in `data`.

        It takes the next numbers, without attachments and below 16,384 bytes. Whatever else comes, and bad messages, `process` takes.
        A message of 100 bytes takes a third of the time of `decode_message` and `process`.
        """
        if self._ahead or self._finish is not None or self.state is _CLOSE_WAIT or self.id & ONESHOT:
            return at
        core, mailbox, number, size = self.core, self.mailbox, self._next, len(data)
        config = core.config
        end = min(number + config.mailbox - len(mailbox), LARGEST)
        most = min(config.mailbox_bytes - self.untaken, config.max_untaken - core.held)
        first, taken = number, 0
        make, append, head = core.delivery, mailbox.append, self._head
        try:
            while number < end:  # for each 128 numbers, which differ in one byte
                low, rest = number & 0x7F, rest_of_number(number)
                width = len(head) + 1 + len(rest)
                for octet in (SHORT if number < 0x80 else MORE)[low : low + end - number]:
                    start = at + width
                    if data[at:start] != head + octet + rest or taken >= most:
                        break
                    length = data[start]
                    start += 1
                    if length >= 0x80:
                        second = data[start]
                        start += 1
                        length += (second << 7) - 0x80
                        if not 0 < second < 0x80 or length > config.max_message:
                            break
                    behind = start + length
                    if behind > size:
                        break
                    append(make(self, data[start:behind], ()))
                    number, taken, at = number + 1, taken + length, behind
                else:
                    continue
                break
        except IndexError:
            pass  # the next message is cut
        self._next = number
        self._pending += number - first
        self._pending_bytes += taken
        self.untaken += taken
        core.held += taken
        if self._pending >= self._threshold or self._pending_bytes > config.window_bytes >> 1:
            core.ack_now[self] = None
        return at

    def process_unreliable(self, number: int, attached: tuple[int, ...], payload: bytes) -> None:
        """Process a message from a datagram if there is room. Source: AQ-28, AQ-40."""
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
            self.acking = True
            self.core.ack_later(self)
        if self._finish is not None:
            self.maybe_finish()

    def stall(self, stream: AqueductStream) -> None:
        """Queue a stream to be read when there is room."""
        if self.stalled is None:
            self.stalled = []
        self.stalled.append(stream)

    def attached(self, control: AqueductStream) -> None:
        """Record that the control stream exists. Source: section 8."""
        self.control = control
        before = self.state
        self.state = RECEIVER[self.state, ReceiverInput.ATTACHED]
        if before is _CLOSE_WAIT:
            self._close()
        elif self._pending >= self._threshold:
            self.core.ack_now[self] = None
        elif (self._pending or self._arrived) and not self.acking:
            self.acking = True
            self.core.ack_later(self)

    def declared(self, count: int) -> None:
        """Process SentUnreliable. Source: AQ-36, AQ-37."""
        self.total += count
        if self.total > LARGEST:
            raise violation("E-4", f"{self.total} datagrams on channel {self.id}")
        if self.id & ONESHOT:
            self._check_oneshot(self._next, self._count)
        if count:
            self.core.nack_later(self, self.total)
            if self.minted_here and self.total == count > self._count and self.control is not None:
                # Only that the control stream is known. A sender that cancels waits for this (D-22), and the nack would take a second.
                self.control.write(b"\x06\x00")

    def finish_announced(self, count: int) -> None:
        """Process FinishSender. Source: AQ-42."""
        if self._next > count or (self._ahead and max(self._ahead) >= count):
            raise violation("E-26", f"{count} on channel {self.id}")
        if self._arrived and max(self._arrived) >= self.total:
            raise violation("E-21", f"{self.total} datagrams on channel {self.id}")
        if self.id & ONESHOT and count + self.total > 1:
            raise violation("E-5", f"{count + self.total} messages")
        self._finish = count
        self.state = RECEIVER[self.state, ReceiverInput.FINISH_SENDER]
        self.maybe_finish()

    def sender_reset(self, code: int) -> None:
        """Process a reset of the sender's direction. Source: AQ-46, AQ-48."""
        if code == ResetCode.LOST:
            self.lose()
            return
        self.state = RECEIVER[self.state, ReceiverInput.CANCELLED]
        self.drop_mailbox(lost=True)
        self._close()

    def ack(self, *, due: bool) -> None:
        """Ack the processed messages. Source: AQ-35, AQ-36.

        Args:
            due: the ack delay is over. If no message came in its second half, the sender's window may be smaller than ours and full: from
                now on half as many messages are acked at once, until more come in one turn.
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
        """Settle the datagrams below `end`, whose time is over. Source: AQ-36, AQ-42."""
        if not self.ended:
            self.settle_to(end)
            if self._finish is not None:
                self.maybe_finish()

    def about_to_ack(self) -> None:
        """Record that half of the ack delay is over."""
        self._noted = self._pending

    def maybe_finish(self) -> None:
        """Close if everything declared has been settled. Source: AQ-42."""
        if self._next != self._finish:
            return
        if self._arrived and self._frontier + len(self._arrived) == self.total:
            self.settle_to(self.total)
        if self._frontier == self.total:
            self.state = RECEIVER[self.state, ReceiverInput.COMPLETE]
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
        """Lose the half. `told` says whether the peer said so, which makes no difference for a receiver. Source: AQ-48, AQ-56."""
        if self.control is not None:
            self.control.reset(ResetCode.LOST)
        self.state = RECEIVER[self.state, ReceiverInput.LOST]
        self.drop_mailbox(lost=True)
        self._gone()

    def connection_lost(self) -> None:
        """End with the connection. The mailbox keeps its messages. Source: AQ-19."""
        self.state = RECEIVER[self.state, ReceiverInput.CONNECTION_CLOSED]
        self._gone()

    def drop_mailbox(self, *, lost: bool) -> None:
        """Discard untaken messages with their attachments, now and whenever the half is claimed. Source: AQ-50."""
        for message in self.mailbox:
            self.untaken -= len(message.payload)
            self.core.held -= len(message.payload)
            if message.attachments:
                self.core.links.later(partial(message.discard, lost=lost))
        self.mailbox = NO_MESSAGES
        if self.stalled:
            self.core.links.later(self._resume)

    def _full(self) -> bool:
        """Whether a message has to wait. An empty mailbox always takes one, so no channel can stop another one forever."""
        core, config = self.core, self.core.config
        return (
            len(self.mailbox) >= config.mailbox
            or self.untaken >= config.mailbox_bytes
            or (core.held >= config.max_untaken and self.untaken > 0)
        )

    def _deliver(self, attached: tuple[int, ...], payload: bytes) -> None:
        if self.mailbox is NO_MESSAGES:
            self.mailbox = deque()
        mailbox = self.mailbox
        core = self.core
        mailbox.append(core.delivery(self, payload, core.receive_attachments(attached) if attached else ()))
        self.untaken += len(payload)
        core.held += len(payload)
        if len(mailbox) == 1 and self.known:
            core.events.append(Readable(self))

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
        """Ack everything processed, each number once, starting with the lowest unacked one. Source: AQ-35."""
        if not self._pending:
            return
        assert self.control is not None
        self._pending = self._pending_bytes = 0
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
        """Send the final acks, and end. Source: AQ-38, AQ-43 (D-19)."""
        control = self.control
        assert control is not None
        if self._arrived:
            self.settle_to(max(self._arrived) + 1)
        self._ack_reliable()
        control.write(b"\x08\x00", fin=True)
        self._gone()
        self.core.links.leave_tombstone(self)

    def _gone(self) -> None:
        """Remove the half. The state has been set."""
        self._ahead = self._acked_ahead = self._arrived = None
        if self.control is not None:
            self.control.half = None
            self.control.place = StreamPosition.DISCARD
        if self.stalled:
            self.core.links.later(self._resume)
        self.core.forget(self)
        if self.known:
            self.core.events.append(Ended(self))
