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

from levada.actors.aqueduct.refs import RefState, RemoteRef
from levada.framework import (
    Actor,
    Asks,
    OneshotReceiver,
    OneshotSender,
    Receiver,
    Ref,
    Sender,
    TerminalState,
    channel,
    handles,
    message,
    oneshot,
)
from levada.framework.channel import Mode, Outcome, Receipt
from levada.framework.errors import ActorError, ChannelError, NoValue

from .conftest import Ends

Handle = Sender[Any] | Receiver[Any] | OneshotSender[Any] | OneshotReceiver[Any]
SENDERS = (Sender, OneshotSender)


@message("tests.aqueduct.Plain")
class Plain:
    """A message that carries nothing."""

    serial: int


@message("tests.aqueduct.Load")
class Load:
    """A message that carries channels."""

    serial: int
    numbers: list[int] = attrs.field(factory=list)
    """Of the channels whose halves are in it."""
    handles: list[Any] = attrs.field(factory=list)
    leaf: int = 0
    """Number of the actor, if there is one in it."""
    refs: list[Any] = attrs.field(factory=list)
    """Of that actor."""


@message("tests.aqueduct.HowMany")
class HowMany(Asks[int]):
    """How many numbers came?"""


class Leaf(Actor[Any]):
    """Gets the numbers from 0 on from whoever holds its ref."""

    told = 0
    """Numbers that were on their way to it."""
    got = 0
    in_order = True

    @handles(int)
    def number(self, m: int) -> None:
        self.in_order &= m == self.got
        self.got += 1

    @handles
    def how_many(self, m: HowMany) -> int:
        return self.got


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
    """Count the tasks of the whole run, but those that a QMux connection starts when it first has to wait."""
    count, todo = 0, [trio.lowlevel.current_root_task()]
    while todo:
        task = todo.pop()
        assert task is not None
        count += not task.name.startswith("levada writer of qmux+")
        todo += [child for nursery in task.child_nurseries for child in nursery.child_tasks]
    return count


class World:
    """Two programs and chance.

    Args:
        ends: the connection; nothing has been sent on it.
        rng: chance.
        pauses: seconds that may pass between two steps.
        settle: waits until everything that is under way has arrived and all timers have run.
        most: handles that may be open at once.
        run: messages sent on a channel in one go, on average; channels and refs are in as many messages fewer.
    """

    def __init__(
        self,
        ends: Ends,
        rng: random.Random,
        pauses: tuple[float, ...],
        settle: Callable[[], Awaitable[None]],
        *,
        most: int = 60,
        run: int = 2,
    ) -> None:
        self.ends = ends
        self.client, self.server = ends.client, ends.server
        self.rng = rng
        self.pauses = pauses
        self.settle = settle
        self.most = most
        self.run_length = run
        self.messages = self.serial = self.made = self.actors = 0
        self.sent: dict[int, Sent] = {}
        self.channels: dict[int, Channel] = {}
        self.leaves: dict[int, tuple[Leaf, Ref[Any]]] = {}
        self.handles: tuple[list[tuple[int, Any]], ...] = ([], [])
        self.refs: list[tuple[int, RemoteRef]] = []
        self.asking: trio.Nursery
        self.rest: tuple[int, ...] | None = None
        """Tasks and streams when everything has ended."""
        self.forget()

    def forget(self) -> None:
        """Begin anew with the entrypoint."""
        self.sent.clear()
        self.channels = {0: Channel(Mode.ORDERED)}
        self.leaves.clear()
        for held, entry in zip(self.handles, (self.ends.peer.entry, self.ends.got), strict=True):
            held[:] = [(0, entry)]

    # ------------------------------------------------ the programs

    async def run(self, messages: int) -> None:
        """Do anything until so many messages have been sent, or the connection is lost."""
        end = self.messages + messages
        async with trio.open_nursery() as self.asking:
            while self.messages < end and not self.ends.peer.closed:
                for _ in range(self.rng.randrange(1, 30)):
                    await self.act(self.rng.randrange(2))
                await trio.sleep(self.rng.choice(self.pauses))

    def some(self, mean: int) -> int:
        """Draw a number from 1 on."""
        return 1 + int(self.rng.expovariate(1 / mean))

    async def act(self, side: int) -> None:
        rng, handles = self.rng, self.handles[side]
        if self.refs and rng.random() < 0.1:
            self.use_ref()
        number, half = rng.choice(handles[-8:] if rng.random() < 0.7 else handles) if handles else (0, None)
        if half is None:
            return
        if number and half.state is not TerminalState.OPEN:
            handles.remove((number, half))
            return
        what = rng.random()
        if number and len(self.handles[0]) + len(self.handles[1]) > self.most:
            what = 0.8 + what / 5
        if not isinstance(half, SENDERS):
            if what < 0.9 or not number:
                for _ in range(self.some(2 * self.run_length)):
                    if not self.take(side, number, half):
                        break
            else:
                half.close()
        elif what < 0.9 or not number:
            await self.send(side, number, half, self.some(self.run_length))
        elif what < 0.95:
            half.cancel()
        else:
            half.finish_nowait()

    def use_ref(self) -> None:
        """Tell an actor at the other side something, ask it, watch it, stop it, or give its ref up."""
        rng = self.rng
        at = rng.randrange(len(self.refs))
        number, ref = self.refs[at]
        leaf, cell = self.leaves[number]
        what = rng.random()
        if what < 0.6:
            for _ in range(self.some(self.run_length)):
                if not ref.is_alive:
                    break
                try:
                    ref.tell(leaf.told)
                except ActorError:
                    break  # the window is full
                leaf.told += 1
        elif what < 0.8:
            self.asking.start_soon(self.ask, ref)
        elif what < 0.85:
            ref.on_stopped(lambda: None)
        elif what < 0.9:
            cell.stop()
        else:
            del self.refs[at]

    async def ask(self, ref: RemoteRef) -> None:
        with trio.move_on_after(self.rng.choice((0, 0.03, 60))):
            try:
                await ref.ask(HowMany())
            except (ActorError, ChannelError, NoValue):
                pass

    async def send(self, side: int, number: int, half: Any, count: int) -> None:
        """Send messages, perhaps with channels inside, while there is room."""
        with trio.CancelScope(deadline=-1):  # without waiting
            for _ in range(count):
                if not await self.send_one(side, number, half):
                    break

    async def send_one(self, side: int, number: int, half: Any) -> bool:
        """Send a message; if it cannot be sent now, the channels in it are given up."""
        rng, channel = self.rng, self.channels[number]
        serial, self.serial = self.serial, self.serial + 1
        load: Plain | Load = Plain(serial)
        made: list[tuple[int, Handle, Handle]] = []
        if rng.random() < 0.7 / self.run_length and len(self.handles[0]) + len(self.handles[1]) < self.most:
            made = [self.make() for _ in range(rng.choice((1, 1, 2)))]
            load = Load(serial, [made_number for made_number, _, _ in made], [there for _, _, there in made])
            if rng.random() < 0.2:
                self.actors += 1
                leaf = Leaf()
                cell = self.ends.system.spawn(lambda: leaf)
                self.leaves[self.actors] = leaf, cell
                load.leaf, load.refs = self.actors, [cell] * rng.choice((1, 1, 2))
        record = self.sent[serial] = Sent(number)
        channel.sent.append(serial)
        done = False
        try:
            if isinstance(half, OneshotSender):
                half.send(load)
            else:
                record.receipt = await half.send(load, receipt=True)
            done = True
        except ChannelError:
            pass
        finally:
            if done:
                self.messages += 1
                for made_number, here, _ in made:
                    self.hold(side, made_number, here)
            else:
                del self.sent[serial]
                channel.sent.pop()
                for made_number, here, there in made:
                    del self.channels[made_number]
                    give_up(there)
                    give_up(here)
        return done

    def make(self) -> tuple[int, Handle, Handle]:
        """Make a channel; return its number, the half that stays and the one that travels."""
        rng = self.rng
        self.made += 1
        mode = rng.choice(tuple(Mode))
        sender: Any
        receiver: Any
        if rng.random() < 0.3:
            mode = Mode.ORDERED
            sender, receiver = oneshot(Any)
        else:
            sender, receiver = channel(Any)
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
        if type(load) is Load:
            dropped = self.rng.random() < 0.1
            for inner, there in zip(load.numbers, load.handles, strict=True):
                if dropped:
                    give_up(there)
                else:
                    self.hold(side, inner, there)
            if load.refs and not dropped:
                first = load.refs[
                    0
                ]  # lost, if this side's connection was when it was taken, and then no copy is of the same ref
                assert first.state is RefState.LOST or all(ref is first for ref in load.refs), "RF-14"
                self.refs.append((load.leaf, load.refs[0]))
        return True

    # ------------------------------------------------ the end

    async def wind_up(self, *, closing: bool) -> None:
        """End all channels but the entrypoint, with or without closing receivers, let everything arrive, and look."""
        for _ in range(60):
            self.end_handles(closing=closing)
            await self.settle()
            if not any(self.ends.left()) and not any(self.ends.got._core.queue):
                break
        self.check()
        self.forget()

    async def after(self) -> None:
        """The connection has ended: take what had arrived, and look."""
        await self.settle()
        for _ in range(2):
            self.end_handles(closing=True)
            await self.settle()
        self.check()
        self.forget()
        await self.settle()

    def end_handles(self, *, closing: bool) -> None:
        """End what the programs hold, and take what came."""
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
        self.refs.clear()

    def check(self) -> None:
        """Look at everything that was sent, and at what is left."""
        over = self.ends.peer.closed
        ends = (self.client, self.server)
        for end in ends:
            core, halves = end.core, end.halves
            entry = not over
            assert len(core.halves) == entry, f"I-5: {core.halves}"
            assert not any((core.unclaimed, core.links.tombstones)), "I-9"
            # What had arrived at a lost connection stays until it is taken, if ever.
            assert over or not core.held, f"I-5: {core.held} octets"
            assert len(halves.records) == entry, "I-5"
            assert not any((core.unacked, core.crowded, core.background)), "I-5"
            assert not end.refs._remote, "a ref that nobody holds"
        if not over:
            rest = (tasks(), self.client.stream_count, self.server.stream_count)
            assert self.rest in (None, rest), f"I-5: tasks and streams are {rest}, were {self.rest}"
            self.rest = rest
        for number, (leaf, cell) in self.leaves.items():
            assert leaf.in_order, f"RF-15: actor {number}"
            assert leaf.got <= leaf.told
            cell.stop()
        for serial, record in self.sent.items():
            if record.receipt is None:
                continue
            assert record.receipt.outcome is not None, f"I-1: message {serial} is not settled"
            if record.taken:
                assert record.receipt.outcome is not Outcome.NOT_PROCESSED, f"I-2: message {serial} was taken"
            if record.receipt.outcome is Outcome.UNKNOWN and not over:
                # A cancelled sender's half may be lost before the ack has come, which its handle does not show any more.
                states = {half.state for half in self.channels[record.number].halves}
                assert states & {TerminalState.LOST, TerminalState.CANCELLED}, (
                    f"I-2: message {serial} is in doubt: {states}"
                )
        for number, passed in self.channels.items():
            if not number:
                continue
            for half in passed.halves:
                assert half.state is not TerminalState.OPEN, f"I-6: channel {number}, {half!r}"
                if half.state is TerminalState.FINISHED and passed.mode is not Mode.UNRELIABLE:
                    if isinstance(half, SENDERS):
                        receipts = [self.sent[serial].receipt for serial in passed.sent]
                        assert all(receipt is None or receipt.outcome for receipt in receipts), f"I-3: {number}"
                    else:
                        assert sorted(passed.taken) == passed.sent, f"I-3: channel {number}"
            if passed.mode is Mode.ORDERED:
                assert passed.taken == passed.sent[: len(passed.taken)], f"I-4: channel {number}"
