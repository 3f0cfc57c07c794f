"""Streams by their first octet, and the gate that each operation passes."""

from __future__ import annotations

import time
import tracemalloc
import weakref
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.pace import within

from levada.framework.errors import LocalProtocolError
from levada.transports.maop import (
    Audited,
    BodyWanted,
    Capability,
    Completed,
    ControlConfig,
    DedupStore,
    ErrorCode,
    Execute,
    Failed,
    FairQueue,
    GateConfig,
    HandlerSpec,
    MaopConfig,
    OperationCancelled,
    OperationOffered,
    Quota,
    Refused,
    ReplayWindow,
    TimesConfig,
)
from levada.transports.maop.frames import (
    UNDEFINED,
    Block,
    BlockEnd,
    Disconnect,
    Done,
    Fail,
    Message,
    Operation,
    Proceed,
    Refuse,
    Request,
    Response,
)

from .conftest import Wire

KEY = bytes(range(16))
IDEMPOTENT = Capability(0b11111)


def fails(wire: Wire) -> list[tuple[int, int]]:
    """What was failed: streams and codes."""
    return [(s.target_stream_id, s.error_code) for s in wire.signals() if isinstance(s, Fail)]


def refusals(wire: Wire) -> list[tuple[int, int, int]]:
    """What was refused: streams, hints, codes."""
    return [entry for s in wire.signals() if isinstance(s, Refuse) for entry in s.entries]


# ---------------------------------------------------------------- classification


@pytest.mark.rule("MA-9")
@pytest.mark.rule("MA-13")
@pytest.mark.parametrize("octet", [0x02, 0x05, 0x06, 0x0B, 0x0C, 0xFF])
def test_ma9_ma13_first_octets_that_begin_nothing(octet: int) -> None:
    """Fail 10, and the stream is stopped; a bidirectional one is reset too."""
    wire = Wire()
    uni, bidi = wire.uni(), wire.bidi()
    wire.give(uni, bytes((octet,)))
    wire.give(bidi, bytes((octet,)))
    assert fails(wire) == [(uni, 10), (bidi, 10)]
    assert wire.stops == {uni: 0x10A, bidi: 0x10A}
    assert wire.resets == {bidi: 0x10A}
    assert wire.give(uni, Message(100, 0), fin=True) == []


@pytest.mark.rule("MA-10")
def test_ma10_direction() -> None:
    """Message on a bidirectional stream, Request on a unidirectional one: 12."""
    wire = Wire()
    uni, bidi = wire.uni(), wire.bidi()
    wire.give(uni, Request(101, 0))
    wire.give(bidi, Message(100, 0))
    assert fails(wire) == [(uni, 12), (bidi, 12)]


@pytest.mark.rule("MA-11")
def test_ma11_one_operation_for_each_stream() -> None:
    """A second header: 12 before the terminal, dropped after it."""
    wire = Wire()
    one, two = wire.uni(), wire.uni()
    [event] = wire.give(one, Message(100, 0))
    assert isinstance(event, Execute)
    [event] = wire.give(one, Message(100, 0))
    assert isinstance(event, OperationCancelled)
    assert fails(wire) == [(one, 12)]
    wire.give(two, Message(100, 0))
    wire.core.finish(two, now=0.0)
    assert wire.give(two, Message(100, 0)) == []
    assert wire.stops[two] == 0x10B
    assert fails(wire) == []


@pytest.mark.rule("MA-12")
@pytest.mark.parametrize("operation", [Proceed((4,)), Refuse(()), Fail(4, 1), Done(()), Disconnect()])
def test_ma12_signals_on_a_data_stream(operation: Operation) -> None:
    """Fail 10 for that stream; the signal does not count."""
    wire = Wire()
    stream = wire.uni()
    wire.give(stream, Message(100, 0), operation)
    assert fails(wire) == [(stream, 10)]
    assert wire.closed is None


@pytest.mark.rule("MA-13")
def test_ma13_unknown_code_on_a_data_stream() -> None:
    """Fail 0."""
    wire = Wire()
    stream = wire.uni()
    wire.give(stream, Message(100, 5))
    assert wire.signals() == [Proceed((stream,))]
    wire.give(stream, b"\x0b")
    assert fails(wire) == [(stream, 0)]


@pytest.mark.rule("MA-14")
def test_ma14_streams_that_end_too_early() -> None:
    """With no octet: ignored. Inside the header: Fail 0."""
    wire = Wire()
    empty, cut = wire.uni(), wire.bidi()
    assert wire.give(empty, b"", fin=True) == []
    assert wire.signals() == []
    wire.give(cut, Request(101, 0).encode()[:7])
    wire.give(cut, b"", fin=True)
    assert fails(wire) == [(cut, 0)]
    assert wire.core.streams.keys() == set(wire.core.pool.streams)


@pytest.mark.rule("MA-42")
@pytest.mark.rule("MA-43a")
@pytest.mark.rule("MA-115")
def test_ma42_ma43a_ma115_numbers_of_streams_are_never_used_again() -> None:
    """What has ended stays known without an entry for each: octets are dropped, signals are late and not unknown."""
    wire = Wire()
    streams = [wire.uni() for _ in range(300)]
    for stream in reversed(streams):
        wire.give(stream, Message(100, 0), fin=True)
        wire.core.finish(stream, now=0.0)
    wire.signals()
    assert wire.give(streams[7], Message(100, 0), fin=True) == []
    assert not wire.core.streams.keys() & set(streams)
    mine = wire.core.send_message(100, now=0.0)
    wire.signal(Done(((mine, 1, 1),)), *[Proceed((mine,))] * 200)
    assert wire.core.signals.late == 200
    assert wire.core.signals.strikes == 0


@pytest.mark.rule("MA-3")
def test_ma3_streams_that_cannot_be() -> None:
    """Numbers from 2^62 on are unknown streams."""
    wire = Wire()
    wire.signal(Proceed((2**62, 2**64 - 1, 0)))
    assert wire.core.signals.late == 3


# ---------------------------------------------------------------- checks


@pytest.mark.rule("MA-43")
@pytest.mark.rule("MA-45")
@pytest.mark.rule("MA-51")
@pytest.mark.parametrize("size", [0, 5])
def test_ma43_ma45_ma51_unknown_handlers(size: int) -> None:
    """msg_id 0: 0 with an audit record. Unknown, or of the other kind: 16. The stream is stopped and reset."""
    wire = Wire(handlers={7: HandlerSpec(requests=False), 8: HandlerSpec(messages=False)})
    zero, unknown, other, another = wire.uni(), wire.bidi(), wire.bidi(), wire.uni()
    [event] = wire.give(zero, Message(0, size))
    assert isinstance(event, Audited)
    wire.give(unknown, Request(999, size))
    wire.give(other, Request(7, size))
    wire.give(another, Message(8, size))
    assert refusals(wire) == [(zero, 0, 0), (unknown, 0, 16), (other, 0, 16), (another, 0, 16)]
    assert wire.stops.keys() == {zero, unknown, other, another}
    assert wire.resets.keys() == {unknown, other}
    with pytest.raises(ValueError, match="native"):
        Wire(handlers={1: HandlerSpec()})


@pytest.mark.rule("MA-44")
@pytest.mark.rule("MA-54a")
@pytest.mark.rule("MA-54b")
@pytest.mark.rule("MA-54c")
@pytest.mark.rule("MA-112")
def test_ma44_ma54_the_first_failed_check_decides() -> None:
    """Right (1), undefined length (15), size (2), response (8)."""
    spec = HandlerSpec(role="admin", max_payload=10)
    for length, response, spec_, code in (
        (UNDEFINED, 9, spec, 1),
        (UNDEFINED, 9, HandlerSpec(), 15),
        (11, 9, HandlerSpec(max_payload=10), 2),
        (8 * 2**20 + 1, 0, HandlerSpec(), 2),
        (2**20, 0, HandlerSpec(max_payload=2**40), 2),
    ):
        wire = Wire(handlers={5: spec_}, config=MaopConfig(gate=GateConfig(max_buffer_bytes=2**20 - 1)))
        wire.give(wire.bidi(), Request(5, length, response_msg_id=response))
        assert [entry[2] for entry in refusals(wire)] == [code]
    admin = Wire(handlers={5: spec}, roles=frozenset({"admin"}))
    stream = admin.uni()
    admin.give(stream, Message(5, 10))
    assert admin.signals() == [Proceed((stream,))]
    streaming = Wire(handlers={5: HandlerSpec(max_payload=2**40, streaming=True)})
    stream = streaming.uni()
    streaming.give(stream, Message(5, 2**39))
    assert streaming.signals() == [Proceed((stream,))]


@pytest.mark.rule("MA-54a")
@pytest.mark.parametrize(
    ("default", "own", "taken"), [(True, None, False), (True, True, True), (False, None, True), (False, False, False)]
)
def test_ma54a_undefined_length(default: bool, own: bool | None, taken: bool) -> None:
    """The default refuses; a handler's own setting wins."""
    wire = Wire(
        handlers={5: HandlerSpec(allow_undefined_length=own)},
        config=MaopConfig(gate=GateConfig(refuse_undefined_length_by_default=default)),
    )
    stream = wire.uni()
    wire.give(stream, Message(5, UNDEFINED))
    assert wire.signals() == ([Proceed((stream,))] if taken else [Refuse(((stream, 0, 15),))])


@pytest.mark.rule("MA-63")
def test_ma63_a_response_that_the_handler_does_not_have() -> None:
    """Fail 8 before execution, in place of Proceed."""
    wire = Wire(handlers={5: HandlerSpec(responses={7})})
    one, two = wire.bidi(), wire.bidi()
    assert wire.give(one, Request(5, 0, response_msg_id=0)) == []
    wire.give(two, Request(5, 3, response_msg_id=7))
    assert wire.signals() == [Fail(one, 8, b"no response 0 here"), Proceed((two,))]


@pytest.mark.rule("MA-46")
@pytest.mark.rule("MA-47")
def test_ma46_ma47_what_needs_a_proceed() -> None:
    """A body does, and an empty Request gets one; an empty Message does not."""
    wire = Wire()
    one, two, three = wire.uni(), wire.bidi(), wire.uni()
    wire.give(one, Message(100, 0))
    assert wire.signals() == []
    wire.give(two, Request(101, 0))
    wire.give(three, Message(100, 3))
    assert wire.signals() == [Proceed((two,)), Proceed((three,))]
    core = wire.core
    mine = core.send_message(100, None, length=3, now=0.0)
    with pytest.raises(LocalProtocolError, match="wait for BodyWanted"):
        core.send_body(mine, b"abc", now=0.0)
    wire.flush()
    assert wire.signal(Proceed((mine,))) == [BodyWanted(mine)]
    core.send_body(mine, b"abc", now=0.0)
    core.end_body(mine, now=0.0)
    wire.flush()
    assert wire.body(mine) == [Message(100, 3), Block(b"abc"), BlockEnd(3)]


@pytest.mark.rule("MA-47")
def test_ma47_an_initiator_takes_both_forms() -> None:
    """Proceed or none for an empty Message, and for an empty Request."""
    for proceed in ([], [1]):
        wire = Wire()
        message, request = wire.core.send_message(100, now=0.0), wire.core.send_request(101, now=0.0)
        wire.flush()
        if proceed:
            assert wire.signal(Proceed((message, request))) == []
        assert wire.signal(Done(((message, 1, 2),))) == [Completed(message, None, None, 1, 2)]
        assert wire.give(request, Response(0, 1, 2), fin=True) == [Completed(request, b"", None, 1, 2, 0)]


@pytest.mark.rule("MA-48")
@pytest.mark.parametrize("first", [Proceed((1,)), None])
@pytest.mark.parametrize("second", [Proceed((1,)), Refuse(((1, 0, 14),))])
def test_ma48_one_decision_for_each_operation(first: Operation | None, second: Operation) -> None:
    """A second one: 6 here, reset, no Fail; after the end it is late."""
    wire = Wire()
    stream = wire.core.send_request(101, None, length=10, now=0.0)
    assert stream == 1
    wire.flush()
    wire.signal(first or Refuse(((stream, 0, 14),)))
    events = wire.signal(second)
    assert wire.signals() == []
    if first:
        assert events == [Failed(stream, 6, events[0].reason if isinstance(events[0], Failed) else "", False)]
        assert wire.resets == {stream: 0x106}
        wire.signal(second)
    assert wire.core.signals.late == 1


@pytest.mark.rule("MA-50")
def test_ma50_a_block_that_came_with_its_header() -> None:
    """Fail 1 and no Proceed, whatever the order of streams in the turn; a Block in a later turn is right."""
    wire = Wire()
    one, two = wire.uni(), wire.uni()
    wire.give(one, Message(100, 1), turn=False)
    wire.give(two, Message(100, 1), turn=False)
    wire.give(one, Block(b"x"), BlockEnd(1))
    assert wire.signals() == [
        Fail(one, 1, b"Block or Block End has no place here"),
        Proceed((two,)),
    ]
    [event] = wire.give(two, Block(b"x"), BlockEnd(1))
    assert isinstance(event, Execute)
    wider = Wire(config=MaopConfig(control=ControlConfig(proceed_coalesce=0.01)))
    stream = wider.uni()
    wider.give(stream, Message(100, 1))
    assert wider.signals() == []
    wider.wait(0.02)
    assert wider.signals() == [Proceed((stream,))]


@pytest.mark.rule("MA-51")
@pytest.mark.rule("MA-52")
def test_ma51_ma52_refused() -> None:
    """The initiator ends its side and reports code, private ones too, and hint."""
    wire = Wire()
    stream = wire.core.send_request(101, b"body", now=0.0)
    wire.flush()
    assert wire.signal(Refuse(((stream, 1500, 2000),))) == [Refused(stream, 2000, 1.5)]
    assert wire.resets == {stream: 0x10B}
    assert wire.body(stream) == [Request(101, 4)]


# ---------------------------------------------------------------- waiting


GATED = {5: HandlerSpec(gated=True)}


@pytest.mark.rule("MA-113")
def test_ma113_before_execute_decides() -> None:
    """An offered operation waits for the application; a refusal has its code."""
    wire = Wire(handlers=GATED)
    one, two, three = wire.bidi(), wire.uni(), wire.uni()
    for stream, operation in ((one, Request(5, 0)), (two, Message(5, 4)), (three, Message(5, 0))):
        [event] = wire.give(stream, operation)
        assert isinstance(event, OperationOffered)
        assert event.operation.stream_id == stream
    assert wire.signals() == []
    [event] = wire.core.proceed(one, now=0.0)
    assert isinstance(event, Execute)
    wire.core.proceed(two, now=0.0)
    wire.core.refuse(three, 2000, 0.5, now=0.0)
    wire.flush()
    written = wire.signals()
    assert [s for s in written if isinstance(s, Refuse)] == [Refuse(((three, 500, 2000),))]
    assert sorted(i for s in written if isinstance(s, Proceed) for i in s.stream_ids) == sorted((one, two))
    with pytest.raises(LocalProtocolError, match="no decision"):
        wire.core.proceed(one, now=0.0)
    with pytest.raises(LocalProtocolError, match="reserved"):
        wire.core.fail(one, 50, "", now=0.0)


@pytest.mark.rule("MA-53")
def test_ma53_pending_operations_are_bounded_in_number_and_time() -> None:
    """Above the number: 14 at once. After 10 s: 14 with a hint. The initiator's own wait is as long."""
    wire = Wire(handlers=GATED, config=MaopConfig(gate=GateConfig(max_pending_approvals=2)))
    one, two, three = wire.uni(), wire.uni(), wire.uni()
    for stream in (one, two, three):
        wire.give(stream, Message(5, 4))
    assert refusals(wire) == [(three, 1000, 14)]
    mine = wire.core.send_message(100, b"xyz", now=0.0)
    wire.wait(9.9)
    assert refusals(wire) == []
    events = wire.wait(0.2)
    assert sorted(refusals(wire)) == [(one, 1000, 14), (two, 1000, 14)]
    assert [e for e in events if isinstance(e, Failed)] == [
        Failed(mine, ErrorCode.TIMEOUT, "time is up in state HEADER_SENT", False, True)
    ]
    assert wire.resets[mine] == 0x10B
    assert [e.stream_id for e in events if isinstance(e, OperationCancelled)] == [one, two]


@pytest.mark.rule("MA-54")
def test_ma54_the_settings_say_when_to_try_again() -> None:
    """The hint of a refusal is the setting, in milliseconds."""
    wire = Wire(
        handlers=GATED,
        config=MaopConfig(
            gate=GateConfig(max_pending_approvals=1, capacity_retry=2.5), times=TimesConfig(approval_timeout=3.0)
        ),
    )
    one, two = wire.uni(), wire.uni()
    wire.give(one, Message(5, 4))
    wire.give(two, Message(5, 4))
    assert refusals(wire) == [(two, 2500, 14)]
    wire.wait(3.1)
    assert refusals(wire) == [(one, 2500, 14)]


@pytest.mark.rule("MA-54")
@pytest.mark.rule("MA-118")
def test_ma54_ma118_an_exhausted_quota_withholds_proceed() -> None:
    """Who waits goes when another ends, in the order of priorities; who waits too long is refused."""
    wire = Wire(config=MaopConfig(gate=GateConfig(max_inflight_ops=1)))
    first, low, high = wire.uni(), wire.uni(), wire.uni()
    wire.give(first, Message(100, 0))
    wire.give(low, Message(100, 1, priority=250))
    wire.give(high, Message(100, 1, priority=3))
    assert wire.signals() == []
    wire.core.finish(first, now=0.0)
    wire.flush()
    assert {type(s) for s in wire.signals()} == {Done, Proceed}
    assert wire.core.quota.operations == 1
    wire.give(high, b"", fin=True)
    assert [s for s in wire.signals() if isinstance(s, Proceed)] == [Proceed((low,))]
    late = wire.uni()
    wire.give(late, Message(100, 1))
    wire.wait(10.1)
    assert refusals(wire) == [(late, 1000, 14)]


@pytest.mark.rule("MA-118")
def test_ma118_octets_are_reserved_and_given_back() -> None:
    """A body that does not fit waits until others are complete; the quota is empty when all is over."""
    wire = Wire(config=MaopConfig(gate=GateConfig(max_buffer_bytes=100)))
    one, two = wire.uni(), wire.uni()
    wire.give(one, Message(100, 60))
    wire.give(two, Message(100, 60))
    assert wire.signals() == [Proceed((one,))]
    assert wire.core.quota.buffered == 60
    wire.give(one, Block(bytes(60)), BlockEnd(60), turn=False)
    assert wire.core.quota.buffered == 0
    wire.flush()
    assert wire.signals() == [Proceed((two,))]
    assert wire.core.quota.buffered == 60
    wire.core.finish(one, now=0.0)
    wire.events.extend(wire.core.stream_reset(two, 0, now=0.0))
    assert (wire.core.quota.operations, wire.core.quota.buffered) == (0, 0)


@pytest.mark.rule("MA-118")
def test_ma118_connections_of_one_identity_share_a_quota() -> None:
    """Room that one connection frees goes to the one that has waited longest, which is told, and no clock runs for it."""
    quota = Quota(1, 1000)
    wires = one, two, three, four = [Wire(quota=quota) for _ in range(4)]
    told: list[int] = []
    for number, wire in enumerate(wires):
        wire.core.wake = partial(told.append, number)
    for wire in (one, two, two, three, three, four, four, one):
        wire.give(wire.uni(), Message(100, 0))
    assert [len(wire.events) for wire in wires] == [1, 0, 0, 0]
    assert {wire.core.next_deadline() for wire in wires} == {10.0}
    two.core.stream_reset(2, 0, now=0.0)
    two.core.stream_reset(6, 0, now=0.0)  # it wants none any more
    one.core.finish(2, now=0.0)
    one.flush()
    assert (told, len(one.events)) == ([2], 1)  # the next in line, not the one that had it
    three.flush()
    assert [type(e) for e in three.events] == [Execute]
    three.core.finish(2, now=0.0)
    assert told == [2, 3]
    four.core.connection_lost(0, "gone", now=0.0)  # before its turn: the room is handed on
    assert told == [2, 3, 0]
    one.flush()
    assert len(one.events) == 2
    one.core.finish(6, now=0.0)
    three.flush()
    assert len(three.events) == 2
    three.core.finish(6, now=0.0)
    assert (quota.operations, quota.waiting) == (0, {})


@pytest.mark.rule("MA-118")
def test_ma118_the_place_of_a_lost_connection_goes_to_the_next_one() -> None:
    """An operation that was at work there is over."""
    quota = Quota(1, 1000)
    one, two = Wire(quota=quota), Wire(quota=quota)
    told: list[int] = []
    two.core.wake = partial(told.append, 2)
    for wire in (one, two):
        wire.give(wire.uni(), Message(100, 0))
    assert (len(one.events), len(two.events), told) == (1, 0, [])
    one.core.connection_lost(0, "gone", now=0.0)
    assert told == [2]
    two.flush()
    assert [type(e) for e in two.events] == [Execute]


@pytest.mark.rule("MA-128")
def test_ma128_new_operations_a_second() -> None:
    """Above the rate they wait."""
    wire = Wire(config=MaopConfig(gate=GateConfig(max_op_rate=2.0)))
    streams = [wire.uni() for _ in range(4)]
    for stream in streams:
        wire.give(stream, Message(100, 0))
    assert len(wire.events) == 2
    wire.wait(0.6)
    assert len(wire.events) == 3
    wire.wait(0.5)
    assert [e.operation.stream_id for e in wire.events if isinstance(e, Execute)] == streams


@pytest.mark.rule("MA-117")
def test_ma117_shares_follow_the_weights_and_age_lifts() -> None:
    """16, 8, 4, 2, 1 while all wait; in a class by priority, then by arrival; nobody starves."""
    queue: FairQueue[tuple[int, int]] = FairQueue()
    for n in range(1000):
        for priority in (0, 40, 100, 170, 230):
            queue.push((priority, n), priority, 0, 0.0)
    got = [queue.pop(0.0) for _ in range(310)]
    counts = [sum(e is not None and e[0] == p for e in got) for p in (0, 40, 100, 170, 230)]
    assert counts == [160, 80, 40, 20, 10]
    assert [e[1] for e in got if e is not None and e[0] == 0] == list(range(160))
    costs: FairQueue[tuple[str, int]] = FairQueue()
    for n in range(2000):
        costs.push(("big", n), 0, 15 * 65_536, 0.0)
        costs.push(("small", n), 128, 0, 0.0)
    seen = [taken[0] for taken in (costs.pop(0.0) for _ in range(1000)) if taken is not None]
    share = seen.count("big") * 16 / seen.count("small")
    assert 3.6 < share < 4.4
    old: FairQueue[object] = FairQueue()
    old.push("old", 255, 0, 0.0)
    for n in range(50):
        old.push(n, 0, 0, 2.0)
    assert old.pop(2.1) == "old"  # behind those that keep coming with a better priority it would starve
    lifted: FairQueue[object] = FairQueue()
    lifted.push("old", 255, 0, 0.0)
    for n in range(5):
        lifted.push(n, 160, 0, 0.5)
    assert lifted.pop(0.6) == "old"  # the first of the next class, however good the priorities in it are


class Caller:
    """Somebody who waits."""


@given(st.lists(st.tuples(st.sampled_from(["push", "pop", "remove", "again"]), st.integers(0, 255)), max_size=80))
def test_who_has_left_a_queue_does_not_come_out_of_it(steps: list[tuple[str, int]]) -> None:
    """A queue of which entries leave gives only those that are still in it."""
    queue: FairQueue[Caller] = FairQueue()
    waiting: list[Caller] = []
    gone: list[Caller] = []
    for step, number in steps:
        if step == "push":
            waiting.append(Caller())
            queue.push(waiting[-1], number, 0, 0.0)
        elif step == "pop":
            taken = queue.pop(0.0)
            assert (taken is None) == (not waiting)
            if taken is not None:
                waiting.remove(taken)
                gone.append(taken)
        elif step == "remove" and waiting:
            gone.append(waiting.pop(number % len(waiting)))
            assert queue.remove(gone[-1])
        elif step == "again" and gone:
            assert not queue.remove(gone[number % len(gone)])
        assert len(queue) == len(waiting)


@pytest.mark.ci
def test_all_who_wait_may_leave_at_once() -> None:
    """65,535 in any order take a fraction of a second; each used to look at all others, for minutes."""
    for order in (1, -1):
        queue: FairQueue[Caller] = FairQueue()
        callers = [Caller() for _ in range(65_535)]
        for caller in callers:
            queue.push(caller, 128, 0, 0.0)
        began = time.process_time()
        assert all(queue.remove(caller) for caller in callers[::order])
        assert within(time.process_time() - began, 1.0)
        assert (len(queue), queue.pop(0.0)) == (0, None)


def test_who_has_left_holds_no_memory() -> None:
    queue: FairQueue[Caller] = FairQueue()
    stays = Caller()
    queue.push(stays, 128, 0, 0.0)
    tracemalloc.start()
    try:
        for _ in range(10_000):
            caller = Caller()
            alive = weakref.ref(caller)
            queue.push(caller, 128, 0, 0.0)
            assert queue.remove(caller)
            del caller
            assert alive() is None
        assert tracemalloc.get_traced_memory()[0] < 10_000
    finally:
        tracemalloc.stop()
    assert queue.pop(0.0) is stays


@pytest.mark.rule("MA-50")
def test_ma50_the_window_of_a_proceed_ends_with_its_operation() -> None:
    """An operation that has failed meanwhile neither holds the window open nor begins it for others."""
    wire = Wire(config=MaopConfig(control=ControlConfig(proceed_coalesce=1.0)))
    first, second = wire.bidi(), wire.bidi()
    wire.give(first, Request(101, 5))
    wire.wait(0.5)
    wire.core.stream_reset(first, 0, now=wire.now)
    wire.flush()
    wire.give(second, Request(101, 5))
    wire.signals()
    wire.wait(0.9)
    assert [s for s in wire.signals() if isinstance(s, Proceed)] == []
    wire.wait(0.2)
    assert [s for s in wire.signals() if isinstance(s, Proceed)] == [Proceed((second,))]


# ---------------------------------------------------------------- repetition


def idempotent(**options: Any) -> Wire:
    return Wire(capabilities=IDEMPOTENT, config=MaopConfig(capabilities=IDEMPOTENT), **options)


@pytest.mark.rule("MA-122")
def test_ma122_the_field_of_the_key() -> None:
    """0 or 16 octets when both sides know it, else 3; not there at all when they do not."""
    wire = idempotent()
    one, two, three = wire.uni(), wire.bidi(), wire.uni()
    data = Message(100, 0, key=KEY).encode()
    for at in range(len(data)):
        wire.give(one, data[at : at + 1])
    [event] = wire.events
    assert isinstance(event, Execute)
    assert event.operation.idempotency_key == KEY
    wire.give(two, Request(101, 0, key=b""))
    wire.give(three, Message(100, 0).encode() + b"\x05")
    assert fails(wire) == [(three, 3)]
    mine = wire.core.send_message(100, key=KEY, now=0.0)
    wire.flush()
    assert wire.body(mine) == [Message(100, 0, key=KEY)]
    with pytest.raises(LocalProtocolError, match="wanted 16"):
        wire.core.send_message(100, key=b"short", now=0.0)
    with pytest.raises(LocalProtocolError, match="takes none"):
        Wire().core.send_message(100, key=KEY, now=0.0)


@pytest.mark.rule("MA-138")
@pytest.mark.parametrize("more", [Capability(0), Capability.IDEMPOTENCY], ids=["alone", "behind a key"])
def test_ma138_the_trace_field(more: Capability) -> None:
    """None or 55 to 567 octets when both sides know it, else 3; cut anywhere."""
    capabilities = Capability.TRACE | more
    key = KEY if more else None
    wire = Wire(capabilities=capabilities, config=MaopConfig(capabilities=capabilities))
    one, two = wire.uni(), wire.bidi()
    data = Message(100, 0, key=key, trace=b"t" * 60).encode()
    for at in range(len(data)):
        wire.give(one, data[at : at + 1])
    wire.give(two, Request(101, 0, key=key and bytes(16), trace=b"").encode())
    assert [event.operation.trace for event in wire.events if isinstance(event, Execute)] == [b"t" * 60, b""]
    for size in (1, 54, 568, 65535):
        bad = wire.uni()
        wire.give(bad, Message(100, 0, key=key and size.to_bytes(16, "big")).encode() + size.to_bytes(2, "big"))
        assert fails(wire) == [(bad, 3)]


@pytest.mark.rule("MA-121")
@pytest.mark.rule("MA-123")
def test_ma121_ma123_a_repetition_gets_the_stored_terminal() -> None:
    """Running: 6 with a hint. Finished: the same answer without execution. Failed: executed again."""
    wire = idempotent()
    one, two, three, four = wire.bidi(), wire.bidi(), wire.bidi(), wire.bidi()
    wire.give(one, Request(101, 0, key=KEY), fin=True)
    wire.give(two, Request(101, 0, key=KEY), fin=True)
    assert refusals(wire) == [(two, 1000, 6)]
    wire.now = 3.0
    wire.core.respond(one, b"hi", "text/plain", now=3.0)
    wire.flush()
    assert len(wire.events) == 1
    wire.give(three, Request(101, 0, key=KEY), fin=True)
    assert wire.octets[three] == wire.octets[one]
    assert len(wire.events) == 1
    wire.give(four, Request(101, 0, key=bytes(16)), fin=True)
    wire.core.fail(four, 17, "no", now=3.0)
    five = wire.bidi()
    [event] = wire.give(five, Request(101, 0, key=bytes(16)), fin=True)
    assert isinstance(event, Execute)
    m1, m2 = wire.uni(), wire.uni()
    wire.give(m1, Message(100, 0, key=KEY), fin=True)
    wire.core.finish(m1, now=3.0)
    wire.flush()
    wire.signals()
    assert wire.give(m2, Message(100, 0, key=KEY), fin=True) == []
    assert wire.signals() == [Done(((m2, 3000, 0),))]


@pytest.mark.rule("MA-123")
@pytest.mark.parametrize("streaming", [False, True], ids=["whole", "streaming"])
@pytest.mark.parametrize("length", [20, UNDEFINED], ids=["length", "undefined"])
def test_ma123_a_repetition_shows_its_body_first(streaming: bool, length: int) -> None:
    """The same body: the stored terminal. Another one: 6. Neither is executed, offered or held."""
    spec = HandlerSpec(streaming=streaming, gated=True, allow_undefined_length=True)
    wire = idempotent(handlers={100: spec})
    stream = wire.uni()
    wire.give(stream, Message(100, length, key=KEY))
    wire.core.proceed(stream, now=0.0)
    wire.flush()
    wire.give(stream, Block(b"a" * 20), BlockEnd(20), fin=True)
    if streaming:
        wire.core.body_consumed(stream, 20, now=0.0)
    wire.core.finish(stream, now=0.0)
    wire.flush()
    wire.signals()
    wire.events.clear()
    wire.now = 5.0
    same, other = wire.uni(), wire.uni()
    for stream, end, answer in (
        (same, b"a", Done(((same, 0, 0),))),
        (other, b"b", Fail(other, 6, b"the key was used with another body")),
    ):
        wire.give(stream, Message(100, length, key=KEY))
        assert wire.signals() == [Proceed((stream,))]
        wire.give(stream, Block(b"a" * 19))
        assert (wire.core.quota.operations, wire.core.quota.buffered) == (1, 0)
        wire.give(stream, Block(end), BlockEnd(20), fin=True)
        assert wire.signals() == [answer]
    assert wire.events == []
    assert (wire.core.quota.operations, wire.core.operations) == (0, 0)


@pytest.mark.rule("MA-123")
def test_ma123_another_body_is_refused_as_soon_as_it_shows() -> None:
    """Another length, or another response id of an empty body: Refuse 6 without a hint; the stored answer stays."""
    wire = idempotent()
    one = wire.bidi()
    wire.give(one, Request(101, 0, key=KEY), fin=True)
    wire.core.respond(one, b"hi", "text/plain", now=0.0)
    wire.flush()
    longer, endless, kind, same = wire.bidi(), wire.bidi(), wire.bidi(), wire.bidi()
    wire.give(longer, Request(101, 5, key=KEY))
    wire.give(kind, Request(101, 0, response_msg_id=42, key=KEY), fin=True)
    assert refusals(wire) == [(longer, 0, 6), (kind, 0, 6)]
    assert wire.stops[longer] == 0x106
    wire.give(endless, Request(101, UNDEFINED, key=KEY))
    assert refusals(wire) == [(endless, 0, 15)]
    wire.give(same, Request(101, 0, key=KEY), fin=True)
    assert wire.octets[same] == wire.octets[one]
    assert len(wire.events) == 1


@pytest.mark.rule("MA-123")
def test_ma123_the_body_of_a_repetition_has_the_limits_of_any_body() -> None:
    """Mismatched lengths are 4, a stall is 5, an early end is 7; the stored answer stays."""
    wire = idempotent()
    first = wire.uni()
    wire.give(first, Message(100, 4, key=KEY))
    wire.give(first, Block(b"body"), BlockEnd(4), fin=True)
    wire.core.finish(first, now=0.0)
    wire.flush()
    wire.signals()
    wrong, early, stalled, same = wire.uni(), wire.uni(), wire.uni(), wire.uni()
    for stream in (wrong, early, stalled, same):
        wire.give(stream, Message(100, 4, key=KEY))
    wire.signals()
    wire.give(wrong, Block(b"body!"))
    wire.give(early, Block(b"bo"), fin=True)
    wire.give(stalled, Block(b"bo"))
    wire.give(same, Block(b"body"), BlockEnd(4), fin=True)
    wire.wait(31.0)
    found = wire.signals()
    assert [(s.target_stream_id, s.error_code) for s in found if isinstance(s, Fail)] == [
        (wrong, 4),
        (early, 7),
        (stalled, 5),
    ]
    assert [s for s in found if isinstance(s, Done)] == [Done(((same, 0, 0),))]


@pytest.mark.rule("MA-123")
def test_ma123_large_responses_are_not_kept() -> None:
    """Above 64 KiB the repetition is refused by 6."""
    wire = idempotent()
    one, two, three, four = wire.bidi(), wire.bidi(), wire.bidi(), wire.bidi()
    wire.give(one, Request(101, 0, key=KEY), fin=True)
    wire.core.respond(one, bytes(70_000), "text/plain", now=0.0)
    wire.give(two, Request(101, 0, key=KEY), fin=True)
    assert refusals(wire) == [(two, 0, 6)]
    wire.give(three, Request(101, 0, key=bytes(16)), fin=True)
    wire.core.start_response(three, None, "text/plain", now=0.0)
    for _ in range(3):
        wire.core.send_body(three, bytes(1000), now=0.0)
    wire.core.end_body(three, now=0.0)
    wire.give(four, Request(101, 0, key=bytes(16)), fin=True)
    assert wire.octets[four].count(0) >= 3000
    store = DedupStore(ttl=10, max_entries=2, max_bytes=100)
    assert [store.begin(("a", 5, bytes((n,))), 0.0) for n in (1, 2, 2, 3)] == [True, True, False, True]
    assert len(store) == 2
    assert store.begin(("a", 5, b"\1"), 0.0) is True


@pytest.mark.rule("MA-124")
def test_ma124_replay_window_of_a_handler() -> None:
    """Off by default; a second operation inside it: 6."""
    wire = Wire(handlers={5: HandlerSpec(replay_window=2.0), 6: HandlerSpec()}, replay=ReplayWindow(1))
    one, two, three, four = wire.uni(), wire.uni(), wire.uni(), wire.uni()
    wire.give(one, Message(5, 0))
    wire.give(two, Message(5, 0))
    assert refusals(wire) == [(two, 0, 6)]
    wire.wait(2.1)
    wire.give(three, Message(5, 0))
    wire.give(four, Message(6, 0))
    assert refusals(wire) == []
