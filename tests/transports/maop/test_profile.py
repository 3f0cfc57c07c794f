"""What a peer has to have at least, in one session each: the eleven operations, the native messages, the gate, foreign majors."""

from __future__ import annotations

from typing import Any

import pytest

from levada.transports.maop import (
    ALPN,
    AuthenticationReceived,
    Completed,
    Disapproved,
    ErrorCode,
    Execute,
    Failed,
    HandlerSpec,
    MaopConfig,
    Operation,
    Refused,
    Version,
)
from levada.transports.maop.frames import (
    Block,
    BlockEnd,
    Disconnect,
    DisconnectRequest,
    Done,
    Fail,
    Message,
    Op,
    Proceed,
    Refuse,
    Request,
    Response,
)

from .conftest import Wire, authentication


@pytest.mark.rule("MA-43b")
@pytest.mark.parametrize("version", [Version(1, 0, 0), Version(1, 9, 3)], ids=str)
def test_ma43b_native_messages_of_the_effective_version(version: Version) -> None:
    """1.0 has 0 and 1, whatever the peer knows beyond; the next ids are the application's."""
    wire = Wire(approve=False, handlers={2: HandlerSpec()}, config=MaopConfig(version=Version(1, 0, 0)))
    wire.give(0, authentication(version=version).encode(), fin=True)
    wire.core.approve_client("c-42", now=0.0)
    wire.flush()
    assert wire.core.version == (1, 0, 0)
    opaque, test, own, unknown = wire.uni(), wire.bidi(), wire.bidi(), wire.bidi()
    wire.control = wire.bidi()
    wire.give(opaque, Message(0, 5))
    wire.give(test, Request(1, 0), fin=True)
    [execute] = wire.give(own, Request(2, 0), fin=True)
    wire.give(unknown, Request(3, 0), fin=True)
    assert isinstance(execute, Execute)
    assert execute.operation.msg_id == 2
    assert refused(wire.signals()) == {opaque: 0, unknown: 16}
    assert test not in wire.resets


def refused(signals: list[Operation]) -> dict[int, int]:
    """Find the codes of refusals, by stream."""
    return {entry[0]: entry[2] for signal in signals if isinstance(signal, Refuse) for entry in signal.entries}


@pytest.mark.rule("MA-135")
def test_ma135_all_that_a_peer_needs() -> None:
    """ALPN and authentication; all eleven operations, read and written; the gate; bodies without Block End are dropped."""
    assert ALPN == "maop/1"
    wire = Wire(approve=False)
    core = wire.core
    wrote: list[Any] = []
    [question] = wire.give(0, authentication().encode(), fin=True)
    assert isinstance(question, AuthenticationReceived)
    core.approve_client("c-42", now=0.0)
    wire.flush()
    wire.control = wire.bidi()

    # Theirs: a body that passes the gate, one that breaks off, and one that does not pass.
    whole, broken, foreign, answered = wire.uni(), wire.uni(), wire.uni(), wire.bidi()
    wire.give(whole, Message(100, 5))
    wire.give(broken, Message(100, 5))
    wire.give(foreign, Message(999, 5))
    wrote += wire.signals()
    [execute] = wire.give(whole, Block(b"hello"), BlockEnd(5), fin=True)
    assert isinstance(execute, Execute)
    assert execute.body == b"hello"
    core.finish(whole, now=0.0)
    assert wire.give(broken, Block(b"hello"), fin=True) == []
    wire.give(answered, Request(101, 0), fin=True)
    core.respond(answered, b"answer", "text/plain", now=0.0)
    wire.flush()
    wrote += wire.signals() + wire.body(answered)
    assert refused(wrote) == {foreign: 16}
    assert [(s.target_stream_id, s.error_code) for s in wrote if isinstance(s, Fail)] == [
        (broken, ErrorCode.ORDER_VIOLATION)
    ]

    # Ours: one that is done, one that is answered, one that is refused, one that fails.
    done = core.send_message(100, b"body", now=0.0)
    asked, unwanted, failing = (core.send_request(101, b"", now=0.0) for _ in range(3))
    wire.flush()
    wire.signal(Proceed((done,)))
    wrote += wire.body(done) + wire.body(asked)
    outcomes: list[Any] = [
        *wire.signal(Done(((done, 1, 2),))),
        *wire.give(asked, Response(0), fin=True),
        *wire.signal(Refuse(((unwanted, 0, 14),))),
        *wire.signal(Fail(failing, 17, b"no")),
    ]
    assert [(type(event), event.stream_id) for event in outcomes] == [
        (Completed, done),
        (Completed, asked),
        (Refused, unwanted),
        (Failed, failing),
    ]

    # The end.
    core.request_disconnect(1.0, "", now=0.0)
    wire.flush()
    wire.signal(DisconnectRequest(500))
    core.control_acknowledged(now=0.0)
    wire.flush()
    wrote += wire.signals()
    assert {type(operation).op for operation in wrote} == set(Op)
    wire.signal(Disconnect())
    assert wire.closed is not None
    assert wire.closed.code == 0
    assert core.signals.strikes == 0


@pytest.mark.rule("MA-135")
def test_ma135_a_foreign_major_ends_the_connection() -> None:
    """Another major version is disapproved, and the connection closed."""
    wire = Wire(approve=False)
    events = wire.give(0, authentication(version=Version(2, 0, 0)).encode(), fin=True)
    assert Disapproved in map(type, events)
    wire.wait(10)
    assert wire.closed is not None
    assert wire.closed.code == 0x10C
