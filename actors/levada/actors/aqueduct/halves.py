"""Between the channels of a program and the halves of a connection: what is sent, what arrives, handles that travel, and the ends.

* A channel has one half here and one at the peer. What stands in for the peer's half is an `Outbound` (the peer receives) or an
  `Inbound` (the peer sends): a record, not an actor, that is driven by calls from the channel and by events from the connection.
* A message is encoded inside the ``send`` that sends it, which is also when the handles in it move: all of them, or none. It is
  decoded in the ``receive`` that takes it, so that what cannot be decoded is that receiver's `DecodeError` and nobody else's.
* A channel that travels keeps its queue. What was sent before is encoded when it leaves; what cannot be is logged and not delivered.
* Nothing here recurses: channels that travel in messages of channels that travel are begun one after the other.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Final, Protocol, TypeAlias

from levada.framework import OneshotReceiver, OneshotSender, Receiver, Sender
from levada.framework.channel import WINDOW
from levada.framework.channel_core import ChannelCore, Envelope, Mode, TerminalState, Tracked
from levada.framework.codec import AttachmentKind, Codec
from levada.framework.errors import ChannelError, HandleMoved, HandleNotForwardable, LocalProtocolError
from levada.transports import aqueduct
from levada.transports.aqueduct import (
    AqueductCore,
    Attach,
    Delivery,
    ReceiverHalf,
    ReceiverState,
    SenderHalf,
    SenderState,
)

__all__ = ["Arrival", "Halves", "Inbound", "Letter", "Outbound", "give_up"]

logger = logging.getLogger("levada.actors.aqueduct")

_OPEN = TerminalState.OPEN

_MODES: Final = {
    Mode.ORDERED: aqueduct.Mode.ORDERED,
    Mode.UNORDERED: aqueduct.Mode.UNORDERED,
    Mode.UNRELIABLE: aqueduct.Mode.UNRELIABLE,
}
_KINDS: Final = {
    Sender: (AttachmentKind.SENDER, Attach.SENDER),
    Receiver: (AttachmentKind.RECEIVER, Attach.RECEIVER),
    OneshotSender: (AttachmentKind.ONESHOT_SENDER, Attach.ONESHOT_SENDER),
    OneshotReceiver: (AttachmentKind.ONESHOT_RECEIVER, Attach.ONESHOT_RECEIVER),
}

# A member of an enum takes several times as long to look up as a name; these are wanted for each message.
_ORDERED, _ORDERED_HERE = aqueduct.Mode.ORDERED, Mode.ORDERED
_SENDING: Final = (SenderState.OPEN, SenderState.UNATTACHED)

Half: TypeAlias = SenderHalf | ReceiverHalf


class Record(Protocol):
    """What stands in for a peer's half."""

    def start(self) -> None:
        """Begin; the message that the half travels in has been sent, or opened."""
        ...


class Halves:
    """The channels of one connection that have a half at the peer.

    Args:
        core: of the connection.
        codec: writes and reads messages.
        peer: name of the peer, for errors.
        turn: sees to it that what the core has to say and to send is taken, soon.
    """

    def __init__(self, core: AqueductCore, codec: Codec, peer: str, turn: Callable[[], None]) -> None:
        self.core = core
        self.turn = turn
        self.codec = codec
        self.peer = peer
        self.outbound: dict[SenderHalf, Outbound] = {}
        self.inbound: dict[ReceiverHalf, Inbound] = {}
        self.detail = ""
        """How the connection ended, when it has."""
        self.cause: BaseException | None = None
        self.sent = self.received = self.undelivered = 0
        self._starting: deque[Record] = deque()
        self._busy = False

    def bind(self, channel: ChannelCore, half: Half) -> None:
        """Let a channel go on at the peer."""
        self._starting.append(
            Outbound(self, channel, half) if isinstance(half, SenderHalf) else Inbound(self, channel, half)
        )
        if self._busy:
            return
        self._busy = True
        try:
            while self._starting:
                self._starting.popleft().start()
        finally:
            self._busy = False

    def end(self, channel: ChannelCore, state: TerminalState, *, discard: bool = True) -> None:
        """End a channel the way its half ended."""
        if state is TerminalState.CONNECTION_LOST:
            channel.end(state, discard=discard, detail=self.detail, cause=self.cause)
        else:
            channel.end(state, discard=discard)

    def forget(self, channel: ChannelCore) -> None:
        """End a channel whose other half was in a message that never left."""
        self.end(channel, TerminalState.CONNECTION_LOST if self.detail else TerminalState.LOST)

    def has_room(self, channels: int) -> bool:
        """Whether so many channels more may be made."""
        core = self.core
        live = len(core.halves) + len(core.unclaimed) + len(core.links.tombstones)
        return live + channels <= core.config.max_channels


# ---------------------------------------------------------------- messages


class Letter(Envelope):
    """A message on its way to the peer: its octets, and what is to be told when it is known what became of it."""

    __slots__ = ("attached", "halves", "payload", "tracked")

    def __init__(
        self, halves: Halves, payload: bytes, tracked: Tracked | None, attached: list[tuple[ChannelCore, Attach]]
    ) -> None:
        self.halves = halves
        self.payload = payload
        self.tracked = tracked
        self.attached = attached
        """Channels that travel with it; empty from when it has left, as the core knows of them then."""

    def settle(self, delivered: bool) -> None:
        """See `Envelope.settle`."""
        if not delivered:
            self.halves.undelivered += 1
        if self.tracked is not None:
            self.tracked.settle(delivered)
        if self.attached:
            attached, self.attached = self.attached, []
            for channel, _ in attached:
                self.halves.forget(channel)


class Packing:
    """The handles of one message, as `levada.framework.codec.Attachments`."""

    __slots__ = ("outbound", "taken")

    def __init__(self, outbound: Outbound) -> None:
        self.outbound = outbound
        self.taken: list[tuple[Any, ChannelCore, Attach]] = []

    def attach(self, handle: Any) -> tuple[AttachmentKind, int]:
        """Take a handle from its owner."""
        kinds = _KINDS.get(type(handle))
        if kinds is None:
            raise HandleNotForwardable(
                f"a {type(handle).__name__} cannot travel in a message; send a Sender that leads to it"
            )
        where = f"a message on channel {self.outbound.channel.name} to {self.outbound.halves.peer}"
        self.taken.append((handle, handle.take_over(where), kinds[1]))
        return kinds[0], len(self.taken) - 1

    def rollback(self) -> None:
        """Give all of them back."""
        while self.taken:
            self.taken.pop()[0].give_back()


def give_up(handles: Iterable[Any]) -> None:
    """Cancel senders and close receivers that nobody will use."""
    for handle in handles:
        try:
            handle.cancel() if isinstance(handle, Sender | OneshotSender) else handle.close()
        except HandleMoved:
            pass  # somebody does use it


class Arrival(Envelope):
    """A message from the peer, decoded when it is taken. Source: AQ-33, AQ-34."""

    __slots__ = ("delivery", "halves", "handles", "item_type")

    def __init__(self, halves: Halves, delivery: Delivery, item_type: Any) -> None:
        self.halves = halves
        self.delivery = delivery
        self.item_type = item_type
        self.handles: tuple[Any, ...] = ()
        """What was in the message, once it is open."""

    def open(self) -> Any:
        """See `Envelope.open`.

        Raises:
            DecodeError: the octets are no such message, or use an attachment wrongly; everything attached is given up.
        """
        delivery, codec = self.delivery, self.halves.codec
        if not delivery.attachments:
            return codec.decode(delivery.payload, self.item_type)
        used: dict[int, Any] = {}

        def detach(number: int, kind: AttachmentKind, item: Any) -> Any:
            handle = used[number] = self._handle(delivery.attachments[number], kind, item)
            return handle

        try:
            message = codec.decode(delivery.payload, self.item_type, detach=detach)
        except BaseException:
            give_up(used.values())
            delivery.discard()
            self.halves.turn()
            raise
        unused = [half for number, half in enumerate(delivery.attachments) if number not in used]
        if unused:
            logger.warning("%s: %d attachments that no field names", self.halves.peer, len(unused))
            for half in unused:
                half.cancel() if isinstance(half, SenderHalf) else half.close()
        self.halves.turn()
        self.handles = tuple(used.values())
        return message

    def _handle(self, half: Half, kind: AttachmentKind, item: Any) -> Any:
        sends = isinstance(half, SenderHalf)
        expected = (AttachmentKind.SENDER if sends else AttachmentKind.RECEIVER) + (2 if half.oneshot else 0)
        if kind != expected:
            raise ValueError(f"it is a {AttachmentKind(expected).name.lower()}, not a {kind.name.lower()}")
        name = f"{getattr(item, '__name__', item)}#{half.id}"
        channel = ChannelCore(item, 1 if half.oneshot else WINDOW, name)
        (channel.receiver if sends else channel.sender).away = 1
        self.halves.bind(channel, half)
        if half.oneshot:
            return OneshotSender(channel) if sends else OneshotReceiver(channel)
        return Sender(channel) if sends else Receiver(channel)

    def settle(self, delivered: bool) -> None:
        """See `Envelope.settle`."""
        if not delivered:
            lost = self.delivery.half.state in (ReceiverState.CANCELLED, ReceiverState.LOST)
            self.delivery.discard(lost=lost)
            self.halves.turn()


# ---------------------------------------------------------------- the peer receives


class Outbound:
    """The place of a receiver that is at the peer: takes what is sent on the channel, as far as the window lets it."""

    __slots__ = ("_busy", "channel", "half", "halves")

    def __init__(self, halves: Halves, channel: ChannelCore, half: SenderHalf) -> None:
        self.halves = halves
        self.channel = channel
        self.half = half
        self._busy = False
        halves.outbound[half] = self

    def start(self) -> None:
        """See `Record.start`."""
        self.channel.sender.on_terminated(self._ended_here)
        self.channel.consume(self.pump, self.prepare)
        if self.half.ended:
            self.ended()

    def prepare(self, entry: Any) -> Letter:
        """Encode a message, and take the handles in it; raises what ``send`` raises. Source: AQ-26."""
        tracked = entry if isinstance(entry, Tracked) else None
        message = entry if tracked is None else tracked.message
        halves, channel = self.halves, self.channel
        packing = Packing(self)
        payload = halves.codec.encode(message, channel.item_type, attachments=packing)
        if not packing.taken:
            return Letter(halves, payload, tracked, [])
        attached = [(core, kind) for _, core, kind in packing.taken]
        if not halves.has_room(len(attached)):
            packing.rollback()
            limit = halves.core.config.max_channels
            raise ChannelError(f"more than {limit} channels (raise max_channels, or end some)", channel=channel.name)
        return Letter(halves, payload, tracked, attached)

    def pump(self) -> None:
        """Send what is queued while there is room, then the end if it has come."""
        if self._busy:
            return
        self._busy = True
        channel, half = self.channel, self.half
        try:
            mode = _ORDERED if channel.mode is _ORDERED_HERE else _MODES[channel.mode]
            queue = channel.queue
            while queue and half.state in _SENDING and half.has_room(mode):
                self._send(channel.take(), mode)
            if channel.pending is not None and not channel.queue and channel.sender.state is _OPEN:
                half.finish()
        finally:
            self._busy = False
        self.halves.turn()

    def _send(self, entry: Any, mode: aqueduct.Mode) -> None:
        letter = entry
        if type(entry) is not Letter:  # it was queued before the channel travelled
            try:
                letter = self.prepare(entry)
            except Exception:
                logger.exception("channel %s: a message that was queued cannot travel", self.channel.name)
                self.channel.settle(entry, delivered=False)
                return
        kinds = [kind for _, kind in letter.attached] if letter.attached else ()
        try:
            made = self.half.send(letter.payload, kinds, mode=mode, token=letter)
        except LocalProtocolError as error:
            logger.error("channel %s: a message was not sent: %s", self.channel.name, error)
            self.channel.settle(letter, delivered=False)
            return
        self.halves.sent += 1
        letter.payload = b""  # the core has it; this would keep it until the ack
        if made:
            attached, letter.attached = letter.attached, []
            for (channel, _), half in zip(attached, made, strict=True):
                self.halves.bind(channel, half)

    def settled(self, letters: list[Any], *, delivered: bool) -> None:
        """It is known what became of messages."""
        settle = self.channel.settle
        for letter in letters:
            settle(letter, delivered=delivered)

    def ended(self) -> None:
        """The half is gone. Source: section 8 of the protocol."""
        state = self.half.state
        self.halves.outbound.pop(self.half, None)
        self.halves.end(self.channel, _SENDER_ENDS[state])

    def _ended_here(self) -> None:
        """The channel has ended, by its owner or the peer; finishing is the peer's to confirm."""
        if not self.half.ended:
            if self.channel.sender.state is TerminalState.FINISHED:
                self.half.finish()
            else:
                self.half.cancel()
            self.halves.turn()


_SENDER_ENDS: Final = {
    SenderState.FINISHED: TerminalState.FINISHED,
    SenderState.CANCELLED: TerminalState.CANCELLED,
    SenderState.RECEIVER_CLOSED: TerminalState.RECEIVER_CLOSED,
    SenderState.LOST: TerminalState.LOST,
    SenderState.CONNECTION_LOST: TerminalState.CONNECTION_LOST,
}


# ---------------------------------------------------------------- the peer sends


class Inbound:
    """The place of a sender that is at the peer: puts what arrives into the channel, while that has room."""

    __slots__ = ("_busy", "_final", "_held", "_waiting", "channel", "half", "halves")

    def __init__(self, halves: Halves, channel: ChannelCore, half: ReceiverHalf) -> None:
        self.halves = halves
        self.channel = channel
        self.half = half
        self._held: Arrival | None = None
        """Taken, and the channel had no room."""
        self._waiting = False
        """Whether the channel will call when it has."""
        self._final: TerminalState | None = None
        """How the channel ends when everything that arrived is in it."""
        self._busy = False
        halves.inbound[half] = self

    def start(self) -> None:
        """See `Record.start`."""
        self.channel.sender.on_terminated(self._ended_here)
        if self.half.ended:
            self.ended()
        else:
            self.pump()

    def pump(self) -> None:
        """Put what has arrived into the channel."""
        if self._busy or self._waiting:
            return
        self._busy = True
        try:
            self._move()
        finally:
            self._busy = False
        self.halves.turn()

    def _move(self) -> None:
        channel, half, halves = self.channel, self.half, self.halves
        mailbox = half.mailbox
        while channel.sender.state is _OPEN:
            arrival = self._held
            if arrival is None:
                if not mailbox:
                    break
                arrival = self._held = Arrival(halves, half.take(), channel.item_type)
                halves.received += 1
            self._held = None
            if not channel.offer(arrival, self._room):
                self._held, self._waiting = arrival, True
                return
        if self._final is not None and self._held is None and not mailbox:
            final, self._final = self._final, None
            if final is TerminalState.FINISHED:
                channel.finish_producer()
            else:
                halves.end(channel, final, discard=False)

    def _room(self) -> None:
        self._waiting = False
        self.pump()

    def ended(self) -> None:
        """The half is gone; what is in its mailbox is still to be had, unless it was cancelled or lost."""
        state = self.half.state
        self.halves.inbound.pop(self.half, None)
        if state in (ReceiverState.CANCELLED, ReceiverState.CLOSED):
            self.halves.end(self.channel, _RECEIVER_ENDS[state])
        else:
            self._final = _RECEIVER_ENDS[state]
            self.pump()

    def _ended_here(self) -> None:
        """The channel has ended: by its receiver, or as the half did."""
        if self._held is not None:
            held, self._held = self._held, None
            held.settle(False)
        self.half.close()
        self.halves.turn()


_RECEIVER_ENDS: Final = {
    ReceiverState.FINISHED: TerminalState.FINISHED,
    ReceiverState.CANCELLED: TerminalState.CANCELLED,
    ReceiverState.CLOSED: TerminalState.RECEIVER_CLOSED,
    ReceiverState.LOST: TerminalState.LOST,
    ReceiverState.CONNECTION_LOST: TerminalState.CONNECTION_LOST,
}
