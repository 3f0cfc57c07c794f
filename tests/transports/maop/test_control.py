"""The control pool, both ways: order, batches, limits, strikes."""

from __future__ import annotations

import pytest

from levada.transports.maop import (
    Completed,
    ConnectionEnded,
    ControlConfig,
    GateConfig,
    HandlerSpec,
    MaopConfig,
    StreamUnblocked,
)
from levada.transports.maop.frames import (
    Block,
    BlockEnd,
    Disconnect,
    DisconnectRequest,
    Done,
    Fail,
    Message,
    Operation,
    Proceed,
    Refuse,
    Request,
    Response,
    decode_operations,
)

from .conftest import Pair, Wire


@pytest.mark.rule("MA-81")
@pytest.mark.rule("MA-83")
@pytest.mark.rule("MA-84")
def test_ma81_ma83_ma84_streams_are_opened_by_their_first_signals() -> None:
    """As many as the pool has, each by a signal; those of one operation share a stream."""
    wire = Wire()
    assert wire.opened == []
    streams = [wire.uni() for _ in range(8)]
    for stream in streams:
        wire.give(stream, Message(100, 1))
        wire.give(stream, Block(b"x"), BlockEnd(1))
        wire.core.finish(stream, now=0.0)
        wire.flush()
    assert [(o.stream_id, o.unidirectional, o.priority) for o in wire.opened] == [
        (1, False, -1),
        (5, False, -1),
        (9, False, -1),
        (13, False, -1),
    ]
    for place, stream in enumerate((1, 5, 9, 13)):
        assert list(decode_operations(wire.octets[stream])) == [
            op for s in streams if (s >> 2) % 4 == place for op in (Proceed((s,)), Done(((s, 0, 0),)))
        ]


@pytest.mark.rule("MA-82")
def test_ma82_both_kinds_and_the_reverse_side() -> None:
    """We send on bidirectional streams unless told otherwise; we read all three."""
    uni = Wire(config=MaopConfig(control=ControlConfig(control_stream_kind="uni")))
    uni.give(uni.uni(), Message(100, 1))
    assert [(o.stream_id, o.unidirectional) for o in uni.opened] == [(3, True)]
    wire = Wire()
    mine = [wire.core.send_message(100, now=0.0) for _ in range(3)]
    wire.give(wire.uni(), Message(100, 1))
    [control] = wire.core.pool.streams
    done = [Done(((stream, 1, 1),)) for stream in mine]
    assert wire.give(wire.bidi(), done[0]) == [Completed(mine[0], None, None, 1, 1)]
    assert wire.give(wire.uni(), done[1]) == [Completed(mine[1], None, None, 1, 1)]
    assert wire.give(control, done[2]) == [Completed(mine[2], None, None, 1, 1)]
    assert control not in wire.finished
    assert wire.core.signals.strikes == 0


@pytest.mark.rule("MA-85")
@pytest.mark.rule("MA-38")
def test_ma38_ma85_order_and_batches_of_a_backlog() -> None:
    """Refuse, Fail, Done, Proceed, Disconnect Request; at most 256 entries in each."""
    wire = Wire(
        config=MaopConfig(
            control=ControlConfig(global_control_pool_size=1, control_batch_max=2),
            gate=GateConfig(max_inflight_ops=100),
        )
    )
    first = wire.uni()
    wire.give(first, Message(100, 1))
    [control] = wire.core.pool.streams
    wire.core.set_control_writable(control, False)
    streams = [wire.uni() for _ in range(7)]
    for stream in streams[:3]:
        wire.give(stream, Message(100, 5))
    for stream in streams[3:5]:
        wire.give(stream, Message(100, 0))
        wire.core.finish(stream, now=0.0)
    wire.give(streams[5], Message(100, 0), Block(b"x"))
    wire.give(streams[6], Message(999, 0))
    wire.core.request_disconnect(5.0, "", now=0.0)
    wire.flush()
    assert wire.signals() == [Proceed((first,))]
    wire.core.set_control_writable(control, True)
    wire.flush()
    assert wire.signals() == [
        Refuse(((streams[6], 0, 16),)),
        Fail(streams[5], 4, b"Block or Block End has no place here"),
        Done(((streams[3], 0, 0), (streams[4], 0, 0))),
        Proceed(tuple(streams[:2])),
        Proceed((streams[2],)),
        DisconnectRequest(5000),
    ]


@pytest.mark.rule("MA-85")
def test_ma85_a_backlog_pauses_approvals_and_is_bounded() -> None:
    """Above the ring nobody is let in; far above it the connection ends."""
    wire = Wire(config=MaopConfig(control=ControlConfig(global_control_pool_size=1, control_ring=10)))
    wire.give(wire.uni(), Message(100, 1))
    wire.core.set_control_writable(1, False)
    for _ in range(11):
        wire.give(wire.uni(), Message(999, 0), fin=True)
    wire.give(wire.uni(), Message(100, 0), fin=True)
    assert wire.core.gate.pending == 1
    wire.core.set_control_writable(1, True)
    wire.flush()
    wire.wait(0.1)
    assert wire.core.gate.pending == 0
    wire.core.set_control_writable(1, False)
    for _ in range(50):
        wire.give(wire.uni(), Message(999, 0), fin=True)
    assert wire.closed is not None
    assert wire.closed.code == 0x10E


@pytest.mark.rule("MA-130")
def test_ma130_little_credit() -> None:
    """Control streams share what there is; one is set aside for them."""
    wire = Wire()
    wire.core.stream_credit(bidirectional=1, unidirectional=0)
    assert not wire.core.can_open(request=True)
    assert not wire.core.can_open(request=False)
    for _ in range(6):
        wire.give(wire.uni(), Message(100, 1))
    assert [o.stream_id for o in wire.opened] == [1]
    assert len(wire.signals()) == 6
    broke = Wire()
    broke.core.stream_credit(bidirectional=0, unidirectional=0)
    broke.give(broke.uni(), Message(100, 1))
    assert broke.opened == []
    broke.core.stream_credit(bidirectional=3, unidirectional=0)
    broke.flush()
    assert [o.stream_id for o in broke.opened] == [1]
    assert broke.core.can_open(request=True)


@pytest.mark.rule("MA-86")
@pytest.mark.rule("MA-88a")
def test_ma86_ma88a_control_streams_that_end() -> None:
    """Between signals: nothing. Inside one: a strike. What waits on a stopped one goes to the next, what was written does not."""
    wire = Wire()
    assert wire.give(wire.uni(), Proceed(()), fin=True) == []
    assert wire.core.signals.strikes == 0
    wire.give(wire.uni(), Proceed((1, 2)).encode()[:-3], fin=True)
    assert wire.core.signals.strikes == 1
    half = wire.uni()
    wire.give(half, b"\x07\0")
    wire.core.stream_reset(half, 0, now=0.0)
    assert wire.core.signals.strikes == 2
    one, two = wire.uni(), wire.uni()
    wire.give(one, Message(100, 1))
    [control] = wire.core.pool.streams
    wire.core.set_control_writable(control, False)
    wire.give(one, Block(b"x"), BlockEnd(1))
    wire.core.finish(one, now=0.0)
    wire.flush()
    wire.signals()
    wire.core.stream_stopped(control, 0, now=0.0)
    wire.flush()
    assert wire.signals() == [Done(((one, 0, 0),))]
    assert control not in wire.core.pool.streams
    for n in range(20):
        wire.give(two if n == 0 else wire.uni(), Message(999, 0), fin=True)
        for stream in list(wire.core.pool.streams):
            wire.core.stream_stopped(stream, 0, now=0.0)
    wire.flush()
    assert wire.closed is not None
    assert wire.closed.code == 0x10C


@pytest.mark.rule("MA-87")
def test_ma87_more_than_16_control_streams() -> None:
    """Both kinds together; those that have ended do not count."""
    wire = Wire()
    for _ in range(20):
        wire.give(wire.uni(), Proceed(()), fin=True)
    for n in range(16):
        wire.give(wire.uni() if n % 2 else wire.bidi(), Proceed(()))
    assert wire.closed is None
    wire.give(wire.bidi(), Proceed(()))
    assert wire.closed is not None
    assert wire.closed.code == 0x10C


@pytest.mark.rule("MA-87")
def test_ma87_the_settings_say_how_many_control_streams() -> None:
    """Two are taken, and a third ends the connection."""
    wire = Wire(config=MaopConfig(control=ControlConfig(max_control_streams=2)))
    wire.give(wire.uni(), Proceed(()))
    wire.give(wire.bidi(), Proceed(()))
    assert wire.closed is None
    wire.give(wire.uni(), Proceed(()))
    assert wire.closed is not None
    assert wire.closed.code == 0x10C


@pytest.mark.rule("MA-88")
def test_ma88_a_flood_of_signals() -> None:
    """Reading pauses until the bucket has refilled; after 5 s of that the connection ends."""
    wire = Wire(config=MaopConfig(control=ControlConfig(signal_rate=100.0, signal_burst=10, unknown_signal_rate=10**6)))
    mine = [wire.core.send_message(100, now=0.0) for _ in range(30)]
    wire.flush()
    done = Done(tuple((stream, 1, 1) for stream in mine))
    assert len(wire.signal(done)) == 10
    assert wire.core.is_blocked(wire.control)
    events = wire.wait(1.0)
    assert [e for e in events if isinstance(e, StreamUnblocked)] == [StreamUnblocked(wire.control)]
    assert len([e for e in events if isinstance(e, Completed)]) == 20
    wire.wait(1.5)  # else it is the same flood
    wire.signal(Proceed((1,) * 5000))
    wire.wait(4.9)
    assert wire.closed is None
    wire.wait(0.2)
    assert wire.closed is not None
    assert wire.closed.code == 0x10E


@pytest.mark.rule("MA-88")
@pytest.mark.parametrize("flood", [Proceed(()).encode() * 4000, Fail(1, 1, bytes(60_000)).encode() * 40])
def test_ma88_floods_are_held_within_a_bound(flood: bytes) -> None:
    """An owner that goes on reading makes the connection end, not memory grow."""
    wire = Wire(
        config=MaopConfig(
            control=ControlConfig(signal_rate=10.0, signal_burst=10, unknown_signal_rate=10**6),
            gate=GateConfig(stream_window=100_000),
        )
    )
    for at in range(0, len(flood), 10_000):
        wire.give(wire.control, flood[at : at + 10_000])
        assert sum(len(s._buffer) for s in wire.core.signals.blocked) <= 100_000
    for _ in range(20):
        wire.give(wire.control, bytes(10_000))
    assert wire.closed is not None
    assert isinstance(wire.events[-1], ConnectionEnded)


@pytest.mark.rule("MA-12")
@pytest.mark.parametrize("octets", [Message(100, 0), Request(101, 0), Response(0), Block(b""), BlockEnd(0), b"\x0b"])
def test_ma12_a_control_stream_that_carries_something_else(octets: Operation | bytes) -> None:
    """Fail 10 with its own number, stop, a strike; the third closes by 12."""
    wire = Wire()
    for n in range(1, 4):
        stream = wire.uni()
        wire.give(stream, Proceed(()), octets)
        if n < 3:
            assert [(s.target_stream_id, s.error_code) for s in wire.signals() if isinstance(s, Fail)] == [(stream, 10)]
            assert wire.stops[stream] == 0x10A
            assert wire.give(stream, Proceed((1,))) == []
        assert wire.core.signals.strikes == n
    assert wire.closed is not None
    assert wire.closed.code == 0x10C


@pytest.mark.rule("MA-49")
def test_ma49_signals_for_unknown_streams() -> None:
    """Ignored and counted; 100 in a second are a strike."""
    wire = Wire()
    wire.give(wire.uni(), Message(100, 1))
    own = 2
    wire.signal(Proceed((own, 0, 400)), Refuse(((own, 0, 1),)), Fail(8, 1, b"x"))
    assert wire.core.signals.late == 5
    wire.signal(Proceed((999,) * 94))
    assert wire.core.signals.strikes == 0
    wire.signal(Proceed((999,)))
    assert wire.core.signals.strikes == 1
    wire.now = 2.0
    wire.signal(Proceed((999,) * 99))
    assert wire.core.signals.strikes == 1


@pytest.mark.rule("MA-6")
@pytest.mark.rule("MA-38")
def test_ma6_ma38_signals_in_any_cutting() -> None:
    """Each octet may come alone; a batch is acted on entry by entry."""
    wires = [Wire() for _ in range(3)]
    for wire, size in zip(wires, (1, 3, 1000), strict=True):
        mine = [wire.core.send_message(100, now=0.0) for _ in range(4)]
        wire.flush()
        data = b"".join(
            op.encode()
            for op in (
                Done(tuple((stream, 1, 2) for stream in mine[:2])),
                Proceed(()),
                Refuse(((mine[2], 5, 14),)),
                Fail(mine[3], 17, "é".encode()),
                DisconnectRequest(1000, b"bye"),
            )
        )
        for at in range(0, len(data), size):
            wire.signal(data[at : at + size])
    assert [str(e) for e in wires[0].events] == [str(e) for e in wires[1].events] == [str(e) for e in wires[2].events]
    assert len(wires[0].events) == 5


@pytest.mark.rule("MA-5")
def test_ma5_text_of_a_signal_that_is_not_utf8() -> None:
    """9 for the control stream, a strike; the signal counts without its text."""
    wire = Wire()
    stream = wire.core.send_message(100, now=0.0)
    wire.flush()
    [event] = wire.signal(Fail(stream, 17, b"\xff"))
    assert getattr(event, "reason", None) == ""
    assert [(s.target_stream_id, s.error_code) for s in wire.signals() if isinstance(s, Fail)] == [(wire.control, 9)]
    assert wire.core.signals.strikes == 1


@pytest.mark.rule("MA-45")
@pytest.mark.rule("MA-119")
def test_ma45_ma119_two_cores_and_many_operations() -> None:
    """Everything completes, whatever the order between operations; order is kept within each stream only."""
    pair = Pair(handlers={5: HandlerSpec()})
    mine = [pair.client.send_message(5, bytes(n * 1000), now=0.0) for n in range(20)]
    pair.pump()
    for event in pair.events[1]:
        pair.server.finish(event.operation.stream_id, now=0.0)  # type: ignore[union-attr] # all are Execute
    pair.pump()
    assert sorted(e.stream_id for e in pair.events[0] if isinstance(e, Completed)) == mine
    assert (pair.client.operations, pair.server.operations) == (0, 0)
    assert pair.server.quota.buffered == pair.server.quota.operations == 0


def test_disconnect_is_a_signal_of_one_octet() -> None:
    wire = Wire()
    [event] = wire.signal(Disconnect())
    assert event == ConnectionEnded(0, "the peer disconnected", None)
