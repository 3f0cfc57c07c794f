"""Two programs that do anything with their channels: the words of the cores' simulation, spoken by handles over a real connection.

A `World` is moved by chance: both sides send in all modes with channels of all kinds inside, take, drop, finish, cancel and close. What
the invariants of the specification say about halves is looked at through handles, receipts and messages, and through what is left.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from typing import Any

import attrs
import trio

from levada.framework import OneshotReceiver, OneshotSender, Receiver, Sender, TerminalState, channel, message, oneshot
from levada.framework.channel import Mode, Receipt
from levada.framework.errors import ChannelError

from .conftest import Ends

Handle = Sender[Any] | Receiver[Any] | OneshotSender[Any] | OneshotReceiver[Any]
SENDERS = (Sender, OneshotSender)


@message("tests.aqueduct.Load")
class Load:
    """A message that carries channels."""

    serial: int
    numbers: list[int] = attrs.field(factory=list)
    """Of the channels whose halves are in it."""
    handles: list[Any] = attrs.field(factory=list)


@attrs.define(eq=False)
class Sent:
    """A message, and what became of it."""

    number: int
    receipt: Receipt | None = None
    taken: bool = False


@attrs.define(eq=False)
class Channel:
    """A channel, and what passed on it."""

    mode: Mode
    halves: list[Handle] = attrs.Factory(list)
    """Those that either program got."""
    sent: list[int] = attrs.Factory(list)
    taken: list[int] = attrs.Factory(list)


def give_up(half: Handle) -> None:
    if isinstance(half, SENDERS):
        half.cancel()
    else:
        half.close()


def tasks() -> int:
    """Count the tasks of the whole run."""
    count, todo = 0, [trio.lowlevel.current_root_task()]
    while todo:
        task = todo.pop()
        assert task is not None
        count += 1
        todo += [child for nursery in task.child_nurseries for child in nursery.child_tasks]
    return count


class World:
    """Two programs and chance.

    Args:
        ends: the connection; nothing has been sent on it.
        rng: chance.
        pauses: seconds that may pass between two steps.
        settle: waits until everything that is under way has arrived and all timers have run.
        most: channels that may be open at once.
    """

    def __init__(
        self,
        ends: Ends,
        rng: random.Random,
        pauses: tuple[float, ...],
        settle: Callable[[], Awaitable[None]],
        most: int = 60,
    ) -> None:
        self.ends = ends
        self.rng = rng
        self.pauses = pauses
        self.settle = settle
        self.most = most
        self.messages = self.serial = self.made = 0
        self.sent: dict[int, Sent] = {}
        self.channels: dict[int, Channel] = {}
        self.handles: tuple[list[tuple[int, Any]], ...] = ([], [])
        self.rest: tuple[object, ...] | None = None
        self.forget()

    def forget(self) -> None:
        """Begin anew with the entrypoint."""
        self.sent.clear()
        self.channels = {0: Channel(Mode.ORDERED)}
        for held, entry in zip(self.handles, (self.ends.peer.entry, self.ends.got), strict=True):
            held[:] = [(0, entry)]

    # ------------------------------------------------ the programs

    async def run(self, messages: int) -> None:
        """Do anything until so many messages have been sent."""
        end = self.messages + messages
        while self.messages < end:
            for _ in range(self.rng.randrange(1, 30)):
                await self.act(self.rng.randrange(2))
            await trio.sleep(self.rng.choice(self.pauses))

    async def act(self, side: int) -> None:
        rng, handles = self.rng, self.handles[side]
        number, half = rng.choice(handles[-8:] if rng.random() < 0.7 else handles) if handles else (0, None)
        if half is None:
            return
        if number and half.state is not TerminalState.OPEN:
            handles.remove((number, half))
            return
        what = rng.random()
        if number and len(self.channels) > self.most:
            what = 0.8 + what / 5
        if not isinstance(half, SENDERS):
            if what < 0.9 or not number:
                for _ in range(rng.randrange(6)):
                    self.take(side, number, half)
            else:
                half.close()
        elif what < 0.9 or not number:
            for _ in range(rng.choice((1, 1, 4))):
                await self.send(side, number, half)
        elif what < 0.95:
            half.cancel()
        else:
            half.finish_nowait()

    async def send(self, side: int, number: int, half: Any) -> None:
        """Send a message, perhaps with channels inside; if it cannot be sent now, they are given up."""
        rng, channel = self.rng, self.channels[number]
        room = len(self.channels) < self.most
        made = [self.make() for _ in range(rng.choice((0, 0, 0, 0, 1, 2)) if room else 0)]
        serial, self.serial = self.serial, self.serial + 1
        record = self.sent[serial] = Sent(number)
        channel.sent.append(serial)
        load = Load(serial, [made_number for made_number, _, _ in made], [there for _, _, there in made])
        try:
            if isinstance(half, OneshotSender):
                half.send(load)
            else:
                with trio.CancelScope(deadline=-1):  # without waiting
                    record.receipt = await half.send(load, receipt=True)
                if record.receipt is None:
                    raise trio.WouldBlock
        except (trio.WouldBlock, ChannelError):
            del self.sent[serial]
            channel.sent.remove(serial)
            for made_number, here, there in made:
                del self.channels[made_number]
                give_up(there)
                give_up(here)
            return
        self.messages += 1
        for made_number, here, _ in made:
            self.hold(side, made_number, here)

    def make(self) -> tuple[int, Handle, Handle]:
        """Make a channel; return its number, the half that stays and the one that travels."""
        rng = self.rng
        self.made += 1
        mode = rng.choice(tuple(Mode))
        sender: Any
        receiver: Any
        if rng.random() < 0.3:
            mode = Mode.ORDERED
            sender, receiver = oneshot(Load)
        else:
            sender, receiver = channel(Load)
            if mode is Mode.UNRELIABLE:
                sender.unreliable(16)
            else:
                (sender.ordered if mode is Mode.ORDERED else sender.unordered)(rng.choice((2, 16, 256)))
        self.channels[self.made] = Channel(mode)
        here, there = (sender, receiver) if rng.random() < 0.5 else (receiver, sender)
        return self.made, here, there

    def hold(self, side: int, number: int, half: Handle) -> None:
        self.channels[number].halves.append(half)
        self.handles[side].append((number, half))

    def take(self, side: int, number: int, half: Any) -> bool:
        """Take a message and what is in it, or drop it; whether there was one."""
        try:
            load = half.receive_nowait()
        except (trio.WouldBlock, ChannelError):
            return False
        record = self.sent[load.serial]
        assert record.number == number, "it came on its channel"
        assert not record.taken, "I-2: processed once"
        record.taken = True
        self.channels[number].taken.append(load.serial)
        dropped = self.rng.random() < 0.1
        for inner, there in zip(load.numbers, load.handles, strict=True):
            if dropped:
                give_up(there)
            else:
                self.hold(side, inner, there)
        return True

    # ------------------------------------------------ the end

    async def wind_up(self, *, closing: bool) -> None:
        """End all channels but the entrypoint, with or without closing receivers, let everything arrive, and look."""
        for _ in range(60):
            for side in (0, 1):
                for number, half in self.handles[side]:  # which grows by what is taken
                    if not isinstance(half, SENDERS):
                        while self.take(side, number, half):
                            pass
                        if number and closing and self.rng.random() < 0.7:
                            half.close()
                    elif number and half.state is TerminalState.OPEN:
                        if self.rng.random() < 0.2:
                            half.cancel()
                        else:
                            half.finish_nowait()
            await self.settle()
            if not any(self.ends.left()) and not any(self.ends.got._core.queue):
                break
        self.check()
        self.forget()

    def check(self) -> None:
        assert not self.ends.peer.is_over, "I-10"
        assert not any(self.ends.left()), f"I-5, I-9: {self.ends.left()}"
        assert not any(end.core.unacked or end.core.crowded for end in (self.ends.client, self.ends.server)), "I-5"
        rest = (tasks(), self.ends.client.streams, self.ends.server.streams)
        assert self.rest in (None, rest), f"I-5: tasks and streams are {rest}, were {self.rest}"
        self.rest = rest
        for serial, record in self.sent.items():
            channel = self.channels[record.number]
            if record.receipt is None:
                continue
            assert record.receipt.delivered is not None, f"I-1: message {serial} is not settled"
            if record.taken and not record.receipt.delivered:
                states = [half.state for half in channel.halves]
                assert TerminalState.LOST in states, f"I-2: message {serial} was taken and nacked: {states}"
        for number, channel in self.channels.items():
            if not number:
                continue
            for half in channel.halves:
                assert half.state is not TerminalState.OPEN, f"I-6: channel {number}, {half!r}"
                if half.state is TerminalState.FINISHED and channel.mode is not Mode.UNRELIABLE:
                    if isinstance(half, SENDERS):
                        receipts = [self.sent[serial].receipt for serial in channel.sent]
                        assert all(receipt is None or receipt.delivered for receipt in receipts), f"I-3: {number}"
                    else:
                        assert sorted(channel.taken) == channel.sent, f"I-3: channel {number}"
            if channel.mode is Mode.ORDERED:
                assert channel.taken == channel.sent[: len(channel.taken)], f"I-4: channel {number}"
