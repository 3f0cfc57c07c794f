"""Bad input and much input: named answers, bounded memory, other operations unharmed."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from levada.framework.errors import LocalProtocolError
from levada.transports.maop import (
    CloseConnection,
    Completed,
    ConnectionEnded,
    ErrorCode,
    Execute,
    GateConfig,
    HandlerSpec,
    MaopConfig,
    ResponseTerms,
    StreamData,
)
from levada.transports.maop.frames import Block, BlockEnd, Done, Fail, Message, Proceed, Refuse, Request, Response
from levada.transports.maop.timers import MaopTimers

from .conftest import PLAIN, Wire

PIECES = [
    op.encode()
    for op in (
        Message(100, 0),
        Message(100, 5),
        Message(1, 2),
        Message(0, 2**64 - 1),
        Request(101, 0),
        Request(1, 2),
        Response(5),
        Proceed((1, 3, 5, 2**63)),
        Refuse(((1, 1, 1), (5, 0, 14))),
        Block(b"hello"),
        BlockEnd(5),
        Fail(1, 17, b"x"),
        Done(((3, 1, 1), (5, 2, 2))),
    )
]


@given(
    st.lists(
        st.tuples(
            st.integers(0, 12),
            st.one_of(st.sampled_from(PIECES), st.binary(max_size=30)),
            st.sampled_from(["data", "data", "data", "fin", "reset", "stop", "time"]),
        ),
        max_size=40,
    ),
    st.booleans(),
)
def test_no_input_breaks_a_core(steps: list[tuple[int, bytes, str]], client: bool) -> None:
    """Any octets on any stream, in any order: events and outputs, no exception; the last event of an end is its last."""
    wire, over = Wire(client=client), set[int]()
    for n in range(3):
        (wire.core.send_request if n else wire.core.send_message)(100, b"body" * n, now=0.0)
    for stream_id, data, what in steps:
        if stream_id in over and what in ("data", "fin", "reset"):
            continue  # nothing comes behind the end of a stream, or its reset, on any carrier
        if what in ("fin", "reset"):
            over.add(stream_id)
        if what == "reset":
            wire.events += wire.core.stream_reset(stream_id, 1, now=wire.now)
            wire.flush()
        elif what == "stop":
            wire.events += wire.core.stream_stopped(stream_id, 1, now=wire.now)
            wire.flush()
        elif what == "time":
            wire.wait(len(data))
        else:
            wire.give(stream_id, data, fin=what == "fin")
    ends = [e for e in wire.events if isinstance(e, ConnectionEnded)]
    assert len(ends) <= 1
    if ends:
        assert wire.events[-1] is ends[0]
        assert wire.core.next_deadline() is None
    wire.events += wire.core.connection_lost(0, "", now=wire.now)
    assert isinstance(wire.events[-1], ConnectionEnded)
    assert (wire.core.quota.operations, wire.core.quota.buffered, wire.core.operations) == (0, 0, 0)


@pytest.mark.rule("MA-6")
@pytest.mark.rule("MA-95")
@pytest.mark.parametrize("seed", range(8))
def test_ma6_ma95_cutting_changes_nothing(seed: int) -> None:
    """The same octets, whole or one by one, lead to the same events and the same octets of ours."""
    rng = random.Random(seed)
    for _ in range(30):
        data = b"".join(rng.choice(PIECES) for _ in range(rng.randrange(1, 6)))
        if rng.random() < 0.5:
            at = rng.randrange(len(data))
            data = data[:at] + bytes((rng.randrange(256),)) + data[at + 1 :]
        stream_id, fin = rng.choice((2, 4, 6)), rng.random() < 0.5
        results = []
        for size in (len(data), 1):
            wire = Wire(handlers={**PLAIN, 5: HandlerSpec()})
            for at in range(0, len(data), size):
                wire.events += wire.core.receive_stream_data(
                    stream_id, data[at : at + size], fin and at + size >= len(data), now=0.0
                )
            wire.flush()
            kinds = [(type(e).__name__, getattr(e, "stream_id", None), getattr(e, "code", None)) for e in wire.events]
            results.append((kinds, dict(wire.octets), wire.stops, wire.resets, wire.closed))
        # A single octet may be stopped where a whole piece had ended already; what is said to the peer is the same.
        assert results[0][0] == results[1][0]
        assert results[0][1] == results[1][1]
        assert results[0][4] == results[1][4]


@pytest.mark.ci
@pytest.mark.rule("MA-115")
def test_ma115_a_long_connection_keeps_nothing() -> None:
    """8,000 operations and as many refusals later nothing is left of them."""
    core = Wire().core
    header, wrong = Request(101, 0).encode(), Message(999, 5).encode()

    def run(start: int, count: int) -> None:
        for n in range(start, start + count):
            [event] = core.receive_stream_data(8 + 4 * n, header, True, now=n / 1000)
            assert isinstance(event, Execute)
            core.respond(8 + 4 * n, now=n / 1000)
            core.receive_stream_data(2 + 4 * n, wrong, True, now=n / 1000)
            core.handle_timeout(n / 1000)
            core.data_to_send(n / 1000)
            core.take_events()

    tracemalloc.start()
    try:
        run(0, 3000)
        before = tracemalloc.get_traced_memory()[0]
        run(3000, 5000)
        assert tracemalloc.get_traced_memory()[0] - before < 50_000
    finally:
        tracemalloc.stop()
    assert len(core.streams) == len(core.pool.streams)
    assert len(core.unacked) <= 1001


@pytest.mark.ci
@pytest.mark.rule("MA-131a")
def test_ma131a_many_operations_at_once() -> None:
    """20,000 in flight on one connection, each within 2 kB, and all of them complete."""
    config = MaopConfig(gate=GateConfig(max_inflight_ops=65_535, max_pending_approvals=65_535))
    wire = Wire(config=config)
    core, count = wire.core, 20_000
    header = Request(101, 0).encode()
    tracemalloc.start()
    try:
        for n in range(count):
            core.receive_stream_data(8 + 4 * n, header, True, now=0.0)
        core.data_to_send(0.0)
        assert tracemalloc.get_traced_memory()[0] / count < 2000
    finally:
        tracemalloc.stop()
    assert core.quota.operations == count
    for n in range(count):
        core.respond(8 + 4 * n, now=1.0)
    assert core.quota.operations == 0
    with pytest.raises(ValueError, match="max_inflight_ops"):
        MaopConfig(gate=GateConfig(max_inflight_ops=65_536))


def test_streams_that_never_finish_are_counted_and_given_up() -> None:
    wire = Wire(config=MaopConfig(gate=GateConfig(max_open_streams=10)))
    streams = [wire.uni() for _ in range(12)]
    for stream in streams:
        wire.give(stream, b"\0")
    refused = [s.target_stream_id for s in wire.signals() if isinstance(s, Fail) and s.error_code == 14]
    assert refused == streams[-len(refused) :]
    assert len(refused) >= 2
    wire.wait(31)
    assert wire.core.operations == 0


def test_streams_that_are_left_out_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("levada.transports.maop.core._MAX_HOLES", 50)
    wire = Wire()
    for n in range(60):
        wire.give(10 + 8 * n, Message(999, 0), fin=True)
    assert wire.closed is not None
    assert wire.closed.code == 0x10E


@pytest.mark.rule("MA-41")
@pytest.mark.rule("MA-114")
def test_ma41_ma114_what_a_handler_knows() -> None:
    """Session, names and metadata are the core's; stream, msg_id, priority, length and key are the operation's."""
    wire = Wire()
    stream = wire.bidi()
    [event] = wire.give(stream, Request(101, 0, priority=9, response_msg_id=42, timeout_ms=1500))
    assert isinstance(event, Execute)
    operation = event.operation
    assert (operation.stream_id, operation.msg_id, operation.priority, operation.length) == (stream, 101, 9, 0)
    assert (operation.response_msg_id, operation.response_timeout, operation.deadline) == (42, 1.5, 1.5)
    assert operation.is_request
    assert (wire.core.identifier, wire.core.identity) == ("c-42", "c-42")
    assert len(wire.core.session_id) == 16


def test_the_callers_mistakes_change_nothing() -> None:
    wire = Wire()
    core = wire.core
    stream = wire.bidi()
    wire.give(stream, Request(101, 5))
    wire.signals()
    before = (core.operations, len(core.streams), core.next_deadline())
    mistakes: list[Callable[[], object]] = [
        lambda: core.respond(stream, now=0.0),
        lambda: core.finish(stream, now=0.0),
        lambda: core.fail(stream, 17, "x", now=0.0),
        lambda: core.proceed(stream, now=0.0),
        lambda: core.refuse(stream, 14, now=0.0),
        lambda: core.end_body(stream, now=0.0),
        lambda: core.cancel(stream, now=0.0),
        lambda: core.cancel(wire.control, now=0.0),
        lambda: core.cancel(999_999, now=0.0),
        lambda: core.send_message(0, now=0.0),
        lambda: core.send_message(5, priority=256, now=0.0),
        lambda: core.send_message(5, None, length=2**64, now=0.0),
        lambda: core.send_request(5, response=ResponseTerms(timeout_ms=-1), now=0.0),
        lambda: core.send_request(5, response=ResponseTerms(msg_id=65_536), now=0.0),
        lambda: core.approve_client(now=0.0),
        lambda: core.disapprove_client(1, "", now=0.0),
        lambda: core.handshake_completed(now=0.0),
    ]
    for mistake in mistakes:
        with pytest.raises(LocalProtocolError):
            mistake()
    wire.flush()
    assert (core.operations, len(core.streams), core.next_deadline()) == before
    assert (wire.signals(), wire.opened[1:], wire.stops, wire.resets) == ([], [], {}, {})


def test_one_bad_operation_leaves_the_others_alone() -> None:
    wire = Wire()
    good, bad = wire.uni(), wire.uni()
    wire.give(good, Message(100, 3))
    wire.give(bad, Message(100, 3))
    wire.give(bad, b"\xff")
    [event] = wire.give(good, Block(b"abc"), BlockEnd(3))
    assert isinstance(event, Execute)
    mine = wire.core.send_message(100, now=0.0)
    wire.flush()
    assert wire.signal(Done(((mine, 1, 1),))) == [Completed(mine, None, None, 1, 1)]


class Owner:
    """Who has a deadline."""

    def __init__(self, then: Callable[[], None] = lambda: None) -> None:
        self.deadline: float | None = None
        self.filed: int | None = None
        self.woken: list[float] = []
        self.then = then

    def expire(self, now: float) -> None:
        self.woken.append(now)
        self.then()


def test_timers_are_bounded_by_who_uses_them() -> None:
    timers = MaopTimers()
    for n in range(10_000):
        owner = Owner()
        timers.set(owner, 1000.0 + n)
        for _ in range(n % 3):  # it is removed in its first turn, in its second one, or when it is filed
            assert timers.next() == 1000.0 + n
        timers.set(owner, None)
    assert timers.next() is None
    assert (len(timers._heap) < 200, timers._due, timers._fresh, timers._young) == (True, {}, [], [])
    moved, taken = Owner(), Owner()
    timers.set(moved, 1.0)
    timers.set(taken, 1.5)
    timers.set(moved, 3.0)
    timers.set(taken, None)
    assert timers.next() == 3.0
    timers.set(moved, 2.0)
    timers.expire(1.9)
    assert moved.woken == []
    timers.expire(2.0)
    assert [moved.woken, taken.woken, timers.next()] == [[2.0], [], None]


def test_who_is_woken_may_change_the_deadlines_of_others() -> None:
    timers = MaopTimers()
    taken, put_off = Owner(), Owner()

    def change() -> None:
        timers.set(taken, None)
        timers.set(put_off, 2.0)

    for owner in (Owner(change), taken, put_off):
        timers.set(owner, 1.0)
    timers.expire(1.0)
    assert [taken.woken, put_off.woken, timers.next()] == [[], [], 2.0]


@given(st.lists(st.tuples(st.integers(0, 3), st.none() | st.integers(0, 40)), max_size=60))
def test_deadlines_are_met_within_a_millisecond(steps: list[tuple[int, int | None]]) -> None:
    """Owner 3 is the clock; deadlines are quarters of a millisecond."""
    timers, now = MaopTimers(), 0.0
    owners = [Owner() for _ in range(3)]
    for who, quarters in steps:
        if who < 3:
            timers.set(owners[who], None if quarters is None else now + quarters / 4000)
            continue
        now += (quarters or 0) / 4000
        before = [owner.deadline for owner in owners]
        timers.expire(now)
        for owner, at in zip(owners, before, strict=True):
            if owner.deadline is None and at is not None:
                assert at - 0.00002 <= now
            elif at is not None:
                assert now < at + 0.001
        first = timers.next()
        waiting = [owner.deadline for owner in owners if owner.deadline is not None]
        assert (first is None) == (not waiting)
        assert first is None or first <= min(waiting) + 0.001


def test_outputs_of_a_closed_core_end_with_the_close() -> None:
    wire = Wire()
    wire.core.send_message(100, now=0.0)
    wire.core.close(ErrorCode.UNAUTHORIZED, "enough", now=0.0)
    outs = wire.core.data_to_send(0.0)
    assert outs[-1] == CloseConnection(0x101, "enough")
    assert [type(out) for out in outs].count(StreamData) == 1
    assert wire.core.data_to_send(0.0) == []
