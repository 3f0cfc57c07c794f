"""One fault in an exchange that is otherwise right: the connection closes by a named rule, or goes on; nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from levada.transports.aqueduct import PROTOCOL_ERRORS, Attach, CloseCode, ConnectionEnded, Mode, SenderHalf
from levada.transports.aqueduct.frames import (
    VERSION,
    AckNackUnreliable,
    AckReliable,
    ChannelControl,
    CloseReceiver,
    ConnectionControl,
    FinishSender,
    Message,
    SentUnreliable,
)

from .conftest import Wire
from .test_frames import VECTORS

EXCHANGES: dict[str, tuple[bool, list[tuple[int, bytes, bool]]]] = {
    "to a server": (
        False,
        [
            (0, VERSION + ConnectionControl((("k", b"v"),)).encode(), False),
            (2, VERSION + Message(0, 0, (8, 1, 4), b"abc").encode() + Message(0, 1).encode(), False),
            (6, VERSION + Message(8, 0, (), b"x").encode(), True),
            (1, SentUnreliable(2).encode() + FinishSender(2).encode(), True),
            (5, SentUnreliable(1).encode(), False),
            (9, AckReliable(()).encode() + CloseReceiver().encode(), True),
        ],
    ),
    "to a client": (
        True,
        [
            (0, VERSION + ConnectionControl().encode(), False),
            (1, ChannelControl(0).encode() + AckReliable((2,)).encode() + AckNackUnreliable((1, 1)).encode(), False),
            (5, ChannelControl(1).encode() + SentUnreliable(1).encode() + FinishSender(1).encode(), True),
            (3, Message(1, 0, (2, 3), b"yes").encode(), True),
            (1, CloseReceiver((1,)).encode(), True),
        ],
    ),
}


def play(make: Callable[..., Wire], client: bool, steps: list[tuple[int, bytes, bool]]) -> str:
    """Let a core take an exchange; the rule that was broken, if one was."""
    w = make(client=client, greet=False)
    w.core.handshake_completed(1170)
    if client:
        w.sender.send(b"", [Attach.SENDER])
        w.sender.send(b"")
        w.sender.send(b"")
        for _ in range(2):
            w.sender.send(b"", mode=Mode.UNRELIABLE)
    w.flush()
    for stream, data, fin in steps:
        w.give(stream, data, fin=fin)
        if w.core.state.value == "offered":
            w.core.accept()
    w.wait(3)
    if w.closed is None:
        return "none"
    ended = [event for event in w.events if isinstance(event, ConnectionEnded)]
    assert len(ended) == 1
    rule = ended[0].error.rule if ended[0].error else ""
    if w.closed.code == CloseCode.LIMIT:
        assert rule.startswith("AQ-")
    else:
        assert w.closed.code == CloseCode.PROTOCOL_ERROR
        assert rule in PROTOCOL_ERRORS
    return rule


@pytest.mark.parametrize("name", EXCHANGES)
def test_the_exchanges_are_right(wire: Callable[..., Wire], name: str) -> None:
    assert play(wire, *EXCHANGES[name]) == "none"


def mutations(data: bytes) -> Iterator[bytes]:
    for at in range(len(data)):
        for value in {data[at] ^ 1, data[at] ^ 0x80, (data[at] + 1) & 0xFF, 0, 0xFF} - {data[at]}:
            yield data[:at] + bytes((value,)) + data[at + 1 :]
        yield data[:at] + data[at + 1 :]


@pytest.mark.rule("I-12")
@pytest.mark.parametrize("name", EXCHANGES)
def test_i12_one_changed_octet(wire: Callable[..., Wire], name: str) -> None:
    """One changed or missing octet in one stream: closed with code 1 (or 4, by a length), or not; never an exception or a hang."""
    client, steps = EXCHANGES[name]
    seen = set()
    for index, (stream, data, fin) in enumerate(steps):
        for changed in mutations(data):
            seen.add(play(wire, client, [*steps[:index], (stream, changed, fin), *steps[index + 1 :]]))
    assert {"none", "E-1", "E-6", "E-7", "E-8", "E-9", "E-18" if not client else "E-25"} <= seen


@pytest.mark.rule("AQ-11", "I-12")
@pytest.mark.parametrize("name", EXCHANGES)
def test_i12_every_cut_gives_the_same(wire: Callable[..., Wire], name: str) -> None:
    """Cut anywhere, a stream says what it says in one piece."""
    client, steps = EXCHANGES[name]
    for index, (stream, data, fin) in enumerate(steps):
        for cut in range(len(data) + 1):
            halves = [(stream, data[:cut], False), (stream, data[cut:], fin)]
            assert play(wire, client, [*steps[:index], *halves, *steps[index + 1 :]]) == "none"
    octets = [
        (stream, data[n : n + 1], fin and n == len(data) - 1) for stream, data, fin in steps for n in range(len(data))
    ]
    assert play(wire, client, octets) == "none"


@pytest.mark.rule("AQ-24", "AQ-43", "AQ-44")
def test_the_scenario_of_the_vectors(wire: Callable[..., Wire]) -> None:
    """The echo exchange, octet for octet, from both sides."""
    for role in ("client", "server"):
        w = wire(client=role == "client", greet=False)
        w.core.handshake_completed(1170)
        expected: dict[int, bytes] = {}
        if role == "client":
            w.flush()
        for by, stream, octets, fin in VECTORS["scenario"]["steps"]:
            data = bytes.fromhex(octets)
            if by == role:
                expected[stream] = expected.get(stream, b"") + data
                if stream == 2:
                    w.sender.send(b"hi", [Attach.SENDER])
                elif stream == 3:
                    reply = w.receiver.take().attachments[0]
                    assert isinstance(reply, SenderHalf)
                    reply.send(b"hi")
                    reply.finish()
                w.wait(0.1)
            else:
                w.give(stream, data, fin=fin)
                if w.core.state.value == "offered":
                    w.core.accept()
                    w.flush()
        w.wait(0.1)
        assert dict(w.octets) == expected
        assert w.closed is None


@given(st.lists(st.tuples(st.integers(0, 7), st.binary(max_size=12), st.booleans()), max_size=12))
def test_random_octets(steps: list[tuple[int, bytes, bool]]) -> None:
    play(Wire, False, [(0, VERSION + b"\x01\x00", False), *steps])
