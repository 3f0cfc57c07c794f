"""Stream 0: who may in, what both sides agree on, and what happens to everybody else."""

from __future__ import annotations

from typing import Any

import pytest

from levada.framework.errors import LocalProtocolError
from levada.transports.maop import (
    Approved,
    Audited,
    AuthenticationConfig,
    AuthenticationReceived,
    Capability,
    ConnectionEnded,
    ConnectionState,
    Disapproved,
    ErrorCode,
    Execute,
    MaopConfig,
    MaopCore,
    Version,
)
from levada.transports.maop.authentication import Octets, Result, read_authentication, read_result
from levada.transports.maop.frames import Message, Proceed
from levada.transports.maop.rates import AttemptLimiter

from .conftest import SESSION, Wire, authentication


def result_of(wire: Wire) -> Result:
    reader = Octets(read_result())
    assert reader.feed(wire.octets[0])
    assert reader.rest == b""
    assert isinstance(reader.value, Result)
    return reader.value


def refused(data: bytes, code: ErrorCode, *, fin: bool = False, config: MaopConfig | None = None) -> Result:
    """Give a server something that it must refuse."""
    wire = Wire(approve=False, config=config)
    wire.give(0, data, fin=fin)
    result = result_of(wire)
    assert result.session_id is None
    assert result.code == code
    assert 0 in wire.finished
    return result


@pytest.mark.rule("MA-8")
@pytest.mark.rule("MA-15")
@pytest.mark.rule("MA-35")
def test_ma8_ma15_ma35_a_client_says_all_at_once_on_stream_0() -> None:
    """One write with the end of the stream; the capabilities are a pair."""
    wire = Wire(client=True, approve=False)
    assert [o.stream_id for o in wire.opened] == [0]
    assert 0 in wire.finished
    reader = Octets(read_authentication(MaopConfig()))
    assert reader.feed(wire.octets[0])
    assert reader.value == authentication(
        auth_type="bearer", pairs={"maop-capabilities": "000000000000000f"}, vendor="levada"
    )


@pytest.mark.rule("MA-6")
@pytest.mark.rule("MA-15")
def test_ma6_ma15_the_answer_does_not_wait_for_the_end() -> None:
    """The message delimits itself, and comes octet by octet."""
    wire = Wire(approve=False)
    data = authentication(pairs={"role": "ingest"}).encode()
    for at in range(len(data)):
        assert wire.events == []
        wire.give(0, data[at : at + 1])
    [event] = wire.events
    assert isinstance(event, AuthenticationReceived)
    assert (event.auth_type, event.token, event.pairs) == ("bearer", b"secret", {"role": "ingest"})
    assert "secret" not in repr(event)


@pytest.mark.rule("MA-16")
@pytest.mark.parametrize("data", [b"\x00", b"\x0a\x00", b"\x05Bea er"])
def test_ma16_garbage_shows_in_the_type(data: bytes) -> None:
    """Refused at once, without waiting for what it seems to announce."""
    refused(data, ErrorCode.INVALID_FORMAT)


@pytest.mark.rule("MA-17")
def test_ma17_too_much_too_little_and_twice() -> None:
    """Octets behind, an end inside: 0. The last value of a key counts."""
    good = authentication().encode()
    refused(good + b"x", ErrorCode.INVALID_FORMAT)
    for at in range(1, len(good)):
        refused(good[:at], ErrorCode.INVALID_FORMAT, fin=True)
    pair = b"\0\1a\0\1"
    twice = good.replace(b"secret\0", b"secret\2" + pair + b"1" + pair + b"2")
    wire = Wire(approve=False)
    [event] = wire.give(0, twice)
    assert isinstance(event, AuthenticationReceived)
    assert event.pairs == {"a": "2"}
    assert wire.give(0, b"later octets are dropped", fin=True) == []


@pytest.mark.rule("MA-18")
@pytest.mark.parametrize(
    ("changes", "config"),
    [
        ({"token": bytes(11)}, MaopConfig(authentication=AuthenticationConfig(max_token=10))),
        ({"pairs": {"a": "1", "b": "2"}}, MaopConfig(authentication=AuthenticationConfig(max_pairs=1))),
        ({"pairs": {"a": "x" * 100}}, MaopConfig(authentication=AuthenticationConfig(max_pair_bytes=64))),
    ],
)
def test_ma18_limits_are_checked_by_the_lengths(changes: dict[str, Any], config: MaopConfig) -> None:
    """Above a limit: 2, before the octets have come."""
    refused(
        authentication(**changes).encode()[: 14 if "token" in changes else 30],
        ErrorCode.CONTENT_TOO_LARGE,
        config=config,
    )


@pytest.mark.rule("MA-19")
@pytest.mark.rule("MA-22")
@pytest.mark.rule("MA-25")
def test_ma19_ma22_ma25_approval() -> None:
    """A random session, a name, in one write with the end, 32 octets at least."""
    wire = Wire(approve=False)
    wire.give(0, authentication(pairs={"region": "eu"}).encode(), fin=True)
    with pytest.raises(LocalProtocolError, match="1 to 255"):
        wire.core.approve_client("", now=0.0)
    [event] = wire.core.approve_client(now=0.0)
    wire.flush()
    assert isinstance(event, Approved)
    assert event.session_id == SESSION
    assert len(event.identifier) == 36
    assert len(wire.octets[0]) >= 32
    assert 0 in wire.finished
    assert wire.core.peer is not None
    assert result_of(wire).identifier == event.identifier
    short = Wire(approve=False, config=MaopConfig(vendor="x"))
    short.give(0, authentication().encode(), fin=True)
    with pytest.raises(LocalProtocolError, match="7 bytes"):
        short.core.approve_client("c", now=0.0)
    assert short.core.state is ConnectionState.DECIDING


@pytest.mark.rule("MA-23")
@pytest.mark.rule("MA-24")
@pytest.mark.rule("MA-27")
@pytest.mark.rule("MA-30")
def test_ma23_ma24_ma27_ma30_disapproval() -> None:
    """Hint, clean reason, at least 32 octets; then a linger and the close."""
    wire = Wire(approve=False)
    wire.give(0, authentication().encode(), fin=True)
    wire.core.disapprove_client(ErrorCode.UNAUTHORIZED, "no secret", 1.5, now=0.0)
    wire.flush()
    result = result_of(wire)
    assert (result.code, result.retry_after_ms) == (1, 1500)
    assert "secret" not in result.reason
    assert len(wire.octets[0]) >= 32
    with pytest.raises(LocalProtocolError):
        wire.core.approve_client(now=0.0)
    assert wire.give(0, authentication().encode()) == []
    wire.wait(0.9)
    assert wire.closed is None
    wire.wait(0.2)
    assert wire.closed is not None
    assert wire.closed.code == 0x101
    assert isinstance(wire.events[-1], ConnectionEnded)
    fixed = Wire(approve=False)
    fixed.give(0, authentication().encode(), fin=True)
    fixed.core.disapprove_client(ErrorCode.INVALID_FORMAT, "wrong forever", 9.0, now=0.0)
    fixed.flush()
    assert result_of(fixed).retry_after_ms == 0


@pytest.mark.rule("MA-20")
def test_ma20_deadline_of_authentication() -> None:
    """5 s from the handshake, then 1 and close."""
    wire = Wire(approve=False)
    wire.give(0, authentication().encode()[:5])
    wire.wait(4.9)
    assert wire.octets[0] == b""
    wire.wait(0.2)
    assert result_of(wire).code == ErrorCode.UNAUTHORIZED
    wire.wait(1.0)
    assert wire.closed is not None
    silent = Wire(approve=False, client=True)
    silent.wait(11)
    assert silent.closed is not None
    assert silent.closed.code == 0x105


@pytest.mark.rule("MA-21")
@pytest.mark.rule("MA-26")
def test_ma21_ma26_a_client_reads_results() -> None:
    """1 is approved, all else is not; what follows is ignored; the rest of the stream is stopped."""
    wire = Wire(client=True, approve=False)
    data = Result(Version(1, 0, 0), "acme", SESSION, "c-42").encode()
    for at in range(len(data) - 1):
        assert wire.give(0, data[at : at + 1]) == []
    [event] = wire.give(0, data[-1:] + b"and more")
    assert event == Approved(SESSION, "c-42", (1, 0, 0), "acme", Capability(0))
    assert wire.stops == {0: 0}
    wire = Wire(client=True, approve=False)
    refusal = Result(Version(1, 0, 0), "acme", None, "", 1, 1500, "denied").encode()
    first, last = wire.give(0, b"\x07" + refusal[1:], fin=True)
    assert first == Disapproved(1, 1.5, "denied")
    assert isinstance(last, ConnectionEnded)
    assert wire.closed is not None


@pytest.mark.rule("MA-26")
def test_ma26_a_client_that_leaves_stream_0_open() -> None:
    """It is ended 2 s after the result."""
    wire = Wire(approve=False)
    wire.give(0, authentication().encode())
    wire.core.approve_client("c-42", now=0.0)
    wire.flush()
    wire.wait(1.9)
    assert wire.stops == {}
    wire.wait(0.2)
    assert (wire.stops, wire.resets) == ({0: 0}, {})
    assert wire.closed is None


@pytest.mark.rule("MA-28")
@pytest.mark.parametrize("decided", [False, True])
def test_ma28_nothing_runs_before_approval(decided: bool) -> None:
    """Any other octet closes by 1; Disconnect closes by 0."""
    for stream_id, octet, code in ((4, b"\x01", 0x101), (2, b"\x00", 0x101), (2, b"\x0a", 0)):
        wire = Wire(approve=False)
        if decided:
            wire.give(0, authentication().encode())
        wire.give(stream_id, b"", fin=False)
        assert wire.closed is None
        wire.give(stream_id, octet)
        assert wire.closed is not None
        assert wire.closed.code == code


@pytest.mark.rule("MA-28")
def test_ma28_a_server_holds_no_resets_before_approval() -> None:
    """However many come, there is nothing that they could be for."""
    wire = Wire(approve=False)
    for _ in range(20_000):
        assert wire.core.stream_reset(4, 0, now=0.0) == []
    assert wire.closed is None
    assert wire.give(0, authentication().encode(), fin=True) != []


@pytest.mark.rule("MA-29")
def test_ma29_streams_that_overtake_the_result_wait_for_it() -> None:
    """A client holds them, within a bound."""
    wire = Wire(client=True, approve=False)
    assert wire.give(3, Message(100, 0), fin=True) == []
    assert wire.give(7, Message(100, 0)) == []
    assert wire.core.stream_reset(7, 0, now=0.0) == []
    events = wire.give(0, Result(Version(1, 0, 0), "acme", SESSION, "c-42").encode(), fin=True)
    assert [type(e).__name__ for e in events] == ["Approved", "Execute", "Execute", "OperationCancelled"]
    with pytest.raises(LocalProtocolError, match="no new operations"):
        Wire(client=True, approve=False).core.send_message(100, now=0.0)
    flood = Wire(client=True, approve=False)
    for _ in range(20):
        flood.give(3, bytes(100_000))
    assert flood.closed is not None
    assert flood.closed.code == 0x10E


@pytest.mark.rule("MA-32")
def test_ma32_malformed_version() -> None:
    """Refused by 0."""
    good = authentication().encode()
    refused(good.replace(b"\x051.0.0", b"\x051.0.x"), ErrorCode.INVALID_FORMAT)
    refused(good.replace(b"\x051.0.0", b"\x051.0.\xff"), ErrorCode.INVALID_FORMAT)


@pytest.mark.rule("MA-33")
def test_ma33_a_foreign_major_is_refused_by_either_side() -> None:
    """12 with an audit record; the client says Disconnect and closes."""
    wire = Wire(approve=False)
    first, second = wire.give(0, authentication(version=Version(2, 0, 0)).encode(), fin=True)
    assert isinstance(first, Audited)
    assert isinstance(second, Disapproved)
    assert result_of(wire).code == ErrorCode.PROTOCOL_VIOLATION
    client = Wire(client=True, approve=False)
    events = client.give(0, Result(Version(2, 0, 0), "acme", SESSION, "c-42").encode(), fin=True)
    assert [type(e) for e in events] == [Audited, Disapproved]
    assert client.octets[4] == b"\x0a"
    client.wait(0.5)
    assert client.closed is not None
    assert client.closed.code == 0x10C


@pytest.mark.rule("MA-34")
@pytest.mark.rule("MA-35")
@pytest.mark.rule("MA-36")
def test_ma34_ma35_ma36_what_both_sides_can_do() -> None:
    """The lower version; capabilities only if asked; the AND of both."""
    wire = Wire(approve=False, config=MaopConfig(capabilities=Capability(0b10001), version=Version(1, 1, 0)))
    wire.give(0, authentication(pairs={"maop-capabilities": "13"}, version=Version(1, 0, 7)).encode())
    [event] = wire.core.approve_client("c-42", now=0.0)
    wire.flush()
    assert isinstance(event, Approved)
    assert event.version == (1, 0, 7)
    assert event.capabilities == Capability(0x11)
    assert wire.core.idempotency
    assert str(result_of(wire).version) == "1.1.0+cap.0000000000000011"
    silent = Wire(approve=False)
    silent.give(0, authentication().encode())
    [event] = silent.core.approve_client("c-42", now=0.0)
    silent.flush()
    assert isinstance(event, Approved)
    assert event.capabilities == Capability(0)
    assert str(result_of(silent).version) == "1.0.0"


@pytest.mark.rule("MA-34a")
def test_ma34a_format_and_version_come_before_the_token() -> None:
    """The application is not asked about a client that cannot be served."""
    wire = Wire(approve=False)
    events = wire.give(0, authentication(token=b"wrong", version=Version(3, 0, 0)).encode())
    assert not [e for e in events if isinstance(e, AuthenticationReceived)]
    refused(authentication(version=Version(3, 0, 0)).encode() + b"x", ErrorCode.INVALID_FORMAT)


@pytest.mark.rule("MA-5")
def test_ma5_invalid_text_in_the_exchange_is_0() -> None:
    """Peers expect 0 here, not 9."""
    refused(authentication().encode().replace(b"acme", b"\xff\xff\xff\xff"), ErrorCode.INVALID_FORMAT)


@pytest.mark.rule("MA-125")
def test_ma125_octets_before_the_handshake_are_0rtt() -> None:
    """A server takes none."""
    core = MaopCore(client=False, random_bytes=bytes)
    [event] = core.receive_stream_data(4, b"\x01", False, now=0.0)
    assert isinstance(event, ConnectionEnded)
    assert event.code == 0x101


@pytest.mark.rule("MA-128")
def test_ma128_attempts_by_source_address() -> None:
    """20 a second, each address by itself, in bounded memory."""
    limiter = AttemptLimiter(addresses=2)
    assert [limiter.allow("a", 0.0) for _ in range(21)] == [True] * 20 + [False]
    assert limiter.allow("b", 0.0)
    assert limiter.allow("a", 0.05)
    assert limiter.allow("c", 0.05)
    assert limiter.allow("b", 0.05)


@pytest.mark.rule("MA-18")
def test_ma18_what_does_not_fit_is_the_callers_mistake() -> None:
    """Nothing is sent of a token, or a type, that no message can hold."""
    core = MaopCore(client=True, random_bytes=bytes)
    wrongs: tuple[dict[str, Any], ...] = (
        {"token": bytes(65_536)},
        {"auth_type": "a b"},
        {"pairs": {str(n): "" for n in range(256)}},
    )
    for wrong in wrongs:
        with pytest.raises(ValueError, match="MA-1"):
            core.handshake_completed(now=0.0, **wrong)
    assert core.data_to_send(0.0) == []
    assert core.handshake_completed(token=bytes(65_535), now=0.0) == []
    assert len(core.data_to_send(0.0)) == 2


def test_events_of_an_approved_server_begin_with_approval() -> None:
    wire = Wire()
    assert wire.core.state is ConnectionState.OPEN
    [event] = wire.give(2, Message(100, 0), fin=True)
    assert isinstance(event, Execute)
    assert wire.give(0, b"", fin=True) == []
    assert wire.signal(Proceed(())) == []
