"""Two cores and two applications that do anything, on a network that delivers streams in any order and cuts octets anywhere.

What must hold whatever happens: both sides agree that no rule was broken, each operation of either side ends exactly once and as its
counterpart allows, bodies arrive whole, and when all is over nothing is left in any table or quota.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from levada.framework.errors import LocalProtocolError
from levada.transports.maop import (
    BodyEnded,
    BodyReceived,
    BodyWanted,
    Capability,
    Completed,
    ConnectionEnded,
    ControlConfig,
    Execute,
    Failed,
    GateConfig,
    HandlerSpec,
    MaopConfig,
    OperationCancelled,
    OperationOffered,
    Received,
    Refused,
    ResponseTerms,
)

from .conftest import Pair

HANDLERS = {
    5: HandlerSpec(),
    6: HandlerSpec(gated=True),
    7: HandlerSpec(streaming=True, allow_undefined_length=True),
    8: HandlerSpec(max_payload=10),
}
KEYS = Capability(0b11111)
# What a correct peer and a slow or impatient application can lead to; everything else would be a mistake of a core.
ALLOWED = {5, 11, 14, 17}


class Simulation:
    """Two cores, two applications and chance."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        config = MaopConfig(
            capabilities=KEYS,
            max_block_chunk_size=rng.choice((1, 7, 131_072)),
            max_blocks_per_message=100_000,
            gate=GateConfig(max_inflight_ops=rng.choice((2, 5, 1024))),
            control=ControlConfig(
                global_control_pool_size=rng.choice((1, 3)), proceed_coalesce=rng.choice((0.0, 0.01))
            ),
        )
        self.pair = Pair(client=config, server=config, handlers=HANDLERS)
        self.bodies: dict[tuple[int, int], bytes] = {}
        self.ended: Counter[tuple[int, int]] = Counter()
        self.executed: Counter[tuple[int, int]] = Counter()
        self.cancelled: set[tuple[int, int]] = set()
        self.received: dict[tuple[int, int], bytes] = {}
        self.offered: dict[int, list[int]] = {0: [], 1: []}
        self.running: dict[int, list[Received]] = {0: [], 1: []}
        self.wanted: dict[int, list[int]] = {0: [], 1: []}
        self.seen = [0, 0]

    def step(self) -> None:
        rng, side = self.rng, self.rng.randrange(2)
        what = rng.random()
        if what < 0.25:
            self.begin(side)
        elif what < 0.5:
            self.act(side)
        elif what < 0.9:
            self.pair.flush(side)
            for _ in range(rng.randrange(6)):
                self.pair.step(1 - side, rng)
        else:
            self.pair.now += rng.choice((0.001, 0.02, 0.5, 2.0))
            self.pair.events[side].extend(self.pair.cores[side].handle_timeout(self.pair.now))
        self.look()

    def begin(self, side: int) -> None:
        rng, core, now = self.rng, self.pair.cores[side], self.pair.now
        body = bytes(rng.randrange(256) for _ in range(rng.choice((0, 0, 1, 30))))
        msg_id = rng.choice(tuple(HANDLERS))
        streamed = msg_id == 7 and rng.random() < 0.7
        options: dict[str, Any] = {"priority": rng.randrange(256), "now": now}
        if streamed:
            options["length"] = rng.choice((None, len(body)))
        given = None if streamed else body
        if rng.random() < 0.5:
            stream_id = core.send_message(msg_id, given, **options)
        else:
            terms = ResponseTerms(timeout_ms=rng.choice((0, 100, 5000)), streamed=rng.random() < 0.3)
            stream_id = core.send_request(msg_id, given, response=terms, **options)
        self.bodies[side, stream_id] = body

    def act(self, side: int) -> None:
        rng, core, now = self.rng, self.pair.cores[side], self.pair.now
        live = [s for (o, s) in self.bodies if o == side and not self.ended[o, s]]
        if live and rng.random() < 0.15:
            stream_id = rng.choice(live)
            core.cancel(stream_id, now=now)
            self.ended[side, stream_id] += 1
        elif self.wanted[side] and rng.random() < 0.5:
            stream_id = self.wanted[side].pop()
            body = self.bodies[side, stream_id]
            if not self.ended[side, stream_id]:
                try:
                    for at in range(0, len(body), 11):
                        core.send_body(stream_id, body[at : at + 11], now=now)
                    core.end_body(stream_id, now=now)
                except LocalProtocolError:
                    pass  # the peer has stopped it, and its reason is on the way
        elif self.offered[side] and rng.random() < 0.7:
            stream_id = self.offered[side].pop()
            if rng.random() < 0.8:
                self.pair.events[side].extend(core.proceed(stream_id, now=now))
            else:
                core.refuse(stream_id, 14, 0.5, now=now)
        elif self.running[side]:
            operation = self.running[side].pop(rng.randrange(len(self.running[side])))
            self.answer(side, operation)

    def answer(self, side: int, operation: Received) -> None:
        rng, core, now = self.rng, self.pair.cores[side], self.pair.now
        stream_id = operation.stream_id
        if rng.random() < 0.2:
            core.fail(stream_id, 17, "no", now=now)
        elif not operation.is_request:
            core.finish(stream_id, now=now)
        else:
            body = self.received.get((side, stream_id), b"")
            if rng.random() < 0.5:
                core.respond(stream_id, body, "a/b", now=now)
            else:
                core.start_response(stream_id, rng.choice((None, len(body))) if body else None, "a/b", now=now)
                core.send_body(stream_id, body, now=now)
                core.end_body(stream_id, now=now)

    def look(self) -> None:
        for side in (0, 1):
            for event in self.pair.events[side][self.seen[side] :]:
                self.note(side, event)
            self.seen[side] = len(self.pair.events[side])
            assert self.pair.closed[side] is None, self.pair.closed[side]

    def note(self, side: int, event: object) -> None:
        match event:
            case OperationOffered(operation):
                self.offered[side].append(operation.stream_id)
            case Execute(operation, body):
                key = (side, operation.stream_id)
                self.executed[key] += 1
                assert self.executed[key] == 1
                self.received[key] = body or b""
                if body is not None:
                    assert body == self.bodies[1 - side, operation.stream_id]
                    self.running[side].append(operation)
            case BodyReceived(stream_id, data):
                if (side, stream_id) not in self.bodies:
                    self.received[side, stream_id] += data
                    self.pair.cores[side].body_consumed(stream_id, len(data), now=self.pair.now)
            case BodyEnded(stream_id, total):
                assert self.received[side, stream_id] == self.bodies[1 - side, stream_id]
                assert total == len(self.received[side, stream_id])
                self.running[side].append(
                    next(
                        e.operation
                        for e in self.pair.events[side]
                        if isinstance(e, Execute) and e.operation.stream_id == stream_id
                    )
                )
            case OperationCancelled(stream_id, code, _):
                assert (side, stream_id) not in self.cancelled
                self.cancelled.add((side, stream_id))
                assert code in ALLOWED, event
                self.running[side] = [op for op in self.running[side] if op.stream_id != stream_id]
                self.offered[side] = [i for i in self.offered[side] if i != stream_id]
            case BodyWanted(stream_id):
                self.wanted[side].append(stream_id)
            case Completed(stream_id, body, kind, _, _):
                self.ended[side, stream_id] += 1
                assert self.executed[1 - side, stream_id] == 1
                if body is not None and kind is not None:
                    assert body == self.bodies[side, stream_id]
            case Refused(stream_id, code, _):
                self.ended[side, stream_id] += 1
                assert self.executed[1 - side, stream_id] == 0
                assert code in (2, 14), event
            case Failed(stream_id, code, _, _, not_executed):
                self.ended[side, stream_id] += 1
                assert code in ALLOWED, event
                if not_executed:
                    assert self.executed[1 - side, stream_id] == 0
            case ConnectionEnded():
                raise AssertionError(event)
            case _:
                pass
        assert all(count == 1 for count in self.ended.values()), event

    def settle(self) -> None:
        """Let everybody finish; then nothing may be left."""
        for _ in range(10):
            self.pair.pump()
            self.look()
            for side in (0, 1):
                while self.offered[side] or self.running[side]:
                    self.act(side)
                    self.look()
        self.pair.wait(100.0)
        self.look()
        for side in (0, 1):
            for operation in self.running[side]:
                self.answer(side, operation)
            self.running[side] = []
        self.pair.pump()
        self.pair.wait(100.0)
        self.look()
        for side, core in enumerate(self.pair.cores):
            for (owner, stream_id), count in self.ended.items():
                assert owner != side or count == 1, stream_id
            assert core.signals.strikes == 0
            assert core.gate.pending == 0
            assert not core.unacked
            assert core.operations == 0
            assert core.quota.operations == 0
            assert core.streams.keys() <= {s for other in self.pair.cores for s in other.pool.streams}
            assert core.quota.buffered == 0


class Machine(RuleBasedStateMachine):
    """The simulation, steered by hypothesis so that failures shrink."""

    def __init__(self) -> None:
        super().__init__()
        self.simulation: Simulation | None = None

    @rule(seed=st.integers(0, 2**32), steps=st.integers(1, 20))
    def go(self, seed: int, steps: int) -> None:
        rng = random.Random(seed)
        if self.simulation is None:
            self.simulation = Simulation(rng)
        self.simulation.rng = rng
        for _ in range(steps):
            self.simulation.step()

    def teardown(self) -> None:
        if self.simulation is not None:
            self.simulation.settle()


TestMachine = pytest.mark.rule("MA-76")(pytest.mark.rule("MA-6")(Machine.TestCase))


@pytest.mark.parametrize("seed", range(20))
def test_random_schedules(seed: int) -> None:
    simulation = Simulation(random.Random(seed))
    for _ in range(300):
        simulation.step()
    simulation.settle()


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(20, 320))
def test_many_random_schedules(seed: int) -> None:
    simulation = Simulation(random.Random(seed))
    for _ in range(1000):
        simulation.step()
    simulation.settle()
