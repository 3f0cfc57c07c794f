"""Two cores on a network that delays, reorders, loses datagrams and lets resets overtake; two applications that do anything.

What must hold whatever happens are the invariants I-1 to I-10 of the specification's state machines, looked at from outside: octets,
events, and what the applications got.
"""

from __future__ import annotations

import random
from collections import defaultdict
from typing import Any

import attrs
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from levada.transports.aqueduct import (
    AqueductConfig,
    Attach,
    Delivery,
    Ended,
    Mode,
    ReceiverHalf,
    ReceiverState,
    SenderHalf,
    SenderState,
    Settled,
)

from .conftest import Pair, Side

Half = SenderHalf | ReceiverHalf


@attrs.define(eq=False)
class Sent:
    """A message and all that became of it."""

    half: SenderHalf
    mode: Mode
    serial: int
    settled: bool = False
    outcome: bool | None = None
    deliveries: list[Delivery] = attrs.Factory(list)

    @property
    def payload(self) -> bytes:
        return self.serial.to_bytes(4, "big") + bytes(self.serial % 40)


class Simulation:
    """Two cores, two applications and chance."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.log: list[Delivery] = []
        log = self.log

        class Recorded(Delivery):
            """Known as soon as it is processed, also if nobody ever takes it."""

            __slots__ = ()

            def __init__(self, *args: Any) -> None:
                super().__init__(*args)
                log.append(self)

        self.seen = 0
        small = AqueductConfig(
            window=rng.choice((2, 5, 256)),
            mailbox=rng.choice((2, 4, 256)),
            unreliable_window=6,
            max_unacked=rng.choice((60, 2**26)),
            max_untaken=rng.choice((60, 2**25)),
        )
        self.pair = Pair(client=small, server=small, delivery=Recorded)
        self.pair.first = rng.choice((None, None, True, False))
        self.sent: dict[int, Sent] = {}
        self.handles: dict[Side, list[Half]] = {side: [] for side in self.pair.sides}
        self.adopted: dict[Side, set[int]] = {side: {0} for side in self.pair.sides}
        self.ended: set[Half] = set()
        self.ordered: dict[SenderHalf, list[int]] = defaultdict(list)
        self.handles[self.pair.client].append(self.pair.sender)
        self.handles[self.pair.server].append(self.pair.receiver)

    # ------------------------------------------------ the applications

    def step(self) -> None:
        rng = self.rng
        side = rng.choice(self.pair.sides)
        what = rng.random()
        if what < 0.45:
            self.act(side)
        elif what < 0.9:
            self.pair.flush(side)
            for _ in range(rng.randrange(4)):
                self.pair.step(side, rng)
        else:
            self.pair.now += rng.choice((0.01, 0.06, 0.7))
            side.events += side.core.handle_timeout(self.pair.now)
        self.look()

    def act(self, side: Side) -> None:
        rng = self.rng
        handles = self.handles[side]
        if not handles:
            return
        half = rng.choice(handles[-6:] if rng.random() < 0.7 else handles)
        what = rng.random()
        if isinstance(half, SenderHalf):
            if what < 0.8:
                self.send(side, half)
            elif what < 0.9:
                half.cancel()
            elif half.state not in (SenderState.CANCEL_WAIT, SenderState.CANCELLING):
                half.finish()
        elif half.mailbox and what < 0.85:
            self.take(side, half)
        elif what > 0.9:
            half.close()

    def send(self, side: Side, half: SenderHalf) -> None:
        mode = self.rng.choice(tuple(Mode))
        if half.state not in (SenderState.OPEN, SenderState.UNATTACHED) or not half.has_room(mode):
            return
        attachments = self.rng.choices(tuple(Attach), k=self.rng.choice((0, 0, 0, 1, 1, 2, 3)))
        record = Sent(half, mode, len(self.sent))
        self.sent[record.serial] = record
        if mode is Mode.ORDERED:
            self.ordered[half].append(record.serial)
        self.handles[side] += half.send(record.payload, attachments, mode=mode, token=record)

    def take(self, side: Side, half: ReceiverHalf) -> None:
        message = half.take()
        what = self.rng.random()
        if what < 0.1:
            message.discard(lost=what < 0.05)
            return
        for attached in message.attachments:
            self.adopted[side].add(attached.id)
            self.handles[side].append(attached)

    def look(self) -> None:
        self.pair.collect()
        for delivery in self.log[self.seen :]:
            self.sent[serial_of(delivery.payload)].deliveries.append(delivery)
        self.seen = len(self.log)
        for side in self.pair.sides:
            assert side.closed is None, side.closed  # I-10
            for event in side.events:
                if isinstance(event, Settled):
                    for token in event.tokens:
                        assert isinstance(token, Sent)
                        assert not token.settled, "I-1: settled once"
                        token.settled, token.outcome = True, event.delivered
                        if event.delivered:
                            assert len(token.deliveries) == 1, "I-2: acked, so processed by one receiver"
                elif isinstance(event, Ended):
                    assert event.half not in self.ended
                    self.ended.add(event.half)
            side.events.clear()

    # ------------------------------------------------ the end

    def wind_up(self, *, closing: bool) -> None:
        """End all there is, with or without closing receivers, and let everything arrive."""
        for _ in range(60):
            for side in self.pair.sides:
                for half in list(self.handles[side]):
                    if isinstance(half, ReceiverHalf):
                        if closing and self.rng.random() < 0.7:
                            half.close()
                        while half.mailbox:
                            self.take(side, half)
                    elif half.state not in (SenderState.CANCEL_WAIT, SenderState.CANCELLING):
                        if self.rng.random() < 0.2:
                            half.cancel()
                        else:
                            half.finish()
            self.drain()
            if not self.pair.leftovers():
                break
        self.check()

    def drain(self) -> None:
        """Everything arrives, in a random order, and then the timers run."""
        moved = True
        while moved:
            moved = False
            for side in self.pair.sides:
                moved = bool(self.pair.flush(side)) or moved
                while self.pair.step(side, self.rng):
                    moved = True
                    self.look()
        self.pair.wait(3.0)
        self.look()

    def check(self) -> None:
        assert not self.pair.leftovers(), "I-5, I-9"
        for record in self.sent.values():
            assert record.settled, "I-1: settled"
            assert len(record.deliveries) <= 1, "I-2: processed once"
            assert not (record.deliveries and record.outcome is False), "I-2: processed, so never said not to be"
            if record.outcome is None:
                assert record.half.state is SenderState.LOST, "I-2: only a loss leaves it open"
        by_channel: dict[int, list[Sent]] = defaultdict(list)
        for record in self.sent.values():
            by_channel[record.half.id].append(record)
        for side in self.pair.sides:
            other = self.pair.peer(side)
            for half in self.handles[side]:
                assert half.state.value not in ("open", "unattached", "finishing", "close-wait", "cancel-wait"), "I-6"
                if half.known and half not in self.ended:
                    assert half.ended
                reliable = [r for r in by_channel[half.id] if r.mode is not Mode.UNRELIABLE]
                if half.state in (ReceiverState.FINISHED, SenderState.FINISHED):
                    assert all(r.deliveries for r in reliable), "I-3"
                if half.minted_here and half.id in self.adopted[other]:
                    assert half.state not in (ReceiverState.LOST, SenderState.LOST), "I-7"
        arrived: dict[int, list[int]] = defaultdict(list)
        for delivery in self.log:
            arrived[delivery.half.id].append(serial_of(delivery.payload))
        for sender, serials in self.ordered.items():
            got = [serial for serial in arrived[sender.id] if self.sent[serial].mode is Mode.ORDERED]
            assert got == serials[: len(got)], "I-4"


def serial_of(payload: bytes) -> int:
    return int.from_bytes(payload[:4], "big")


def simulate(seed: int, steps: int) -> None:
    """Let chance do anything for a while, then end everything and look."""
    rng = random.Random(seed)
    try:
        simulation = Simulation(rng)
        for _ in range(steps):
            simulation.step()
        simulation.wind_up(closing=rng.random() < 0.5)
    except BaseException as error:
        error.add_note(f"run {seed}, {steps} steps")
        raise


@pytest.mark.rule("I-1", "I-2", "I-3", "I-4", "I-5", "I-6", "I-7", "I-8", "I-9", "I-10", "I-14")
@pytest.mark.parametrize("group", [*range(8), *(pytest.param(group, marks=pytest.mark.ci) for group in range(8, 16))])
def test_i1_to_i10_whatever_happens(group: int) -> None:
    """The invariants of the state machines hold in every run; in half of them receivers never close."""
    for seed in range(group * 50, group * 50 + 50):
        simulate(seed, 150)


@pytest.mark.soak
@pytest.mark.rule("I-14")
def test_i14_thirty_thousand_runs() -> None:
    """As many as the model was checked with, and longer ones."""
    for seed in range(30_000):
        simulate(1_000_000 + seed, 100 + seed % 300)


class Whatever(RuleBasedStateMachine):
    """The same with each step chosen by hypothesis, which leaves out of a failure what it does not need."""

    def __init__(self) -> None:
        super().__init__()
        self.simulation = Simulation(random.Random(0))

    @rule(chance=st.integers(0, 2**32))
    def anything(self, chance: int) -> None:
        self.simulation.rng.seed(chance)
        self.simulation.step()

    def teardown(self) -> None:
        self.simulation.wind_up(closing=self.simulation.rng.random() < 0.5)


TestI14Whatever = pytest.mark.rule("I-14")(Whatever.TestCase)
