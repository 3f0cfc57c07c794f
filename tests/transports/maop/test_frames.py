"""Layouts: golden vectors, every cut, every flipped octet; versions, reasons, codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from levada.transports.maop import (
    ALPN,
    UNDEFINED,
    Capability,
    ErrorCode,
    MaopConfig,
    Operation,
    close_code,
    code_name,
    decode_operation,
    decode_operations,
    frames,
    parse_version,
    sanitise,
)
from levada.transports.maop.authentication import Authentication, Octets, Result, read_authentication, read_result
from levada.transports.maop.codes import OperationFault
from levada.transports.maop.versions import parse_capabilities

DATA = json.loads((Path(__file__).parent / "data" / "vectors.json").read_text("utf-8"))
VECTORS: list[dict[str, Any]] = DATA["vectors"]
OPERATIONS = [v for v in VECTORS if v["kind"] not in ("authentication", "result")]


def built(vector: dict[str, Any]) -> Operation:
    """Make the operation that a vector describes."""
    fields = {k: v for k, v in vector.items() if k not in ("name", "hex", "kind", "idempotency")}
    for name in ("chunk", "reason", "key"):
        if name in fields:
            fields[name] = bytes.fromhex(fields[name])
    for name in ("entries", "stream_ids"):
        if name in fields:
            fields[name] = tuple(tuple(e) if isinstance(e, list) else e for e in fields[name])
    if "payload_len" in fields:
        fields["payload_len"] = int(fields["payload_len"])
    made: Operation = getattr(frames, vector["kind"])(**fields)
    return made


def read_exchange(vector: dict[str, Any], data: bytes, size: int) -> Authentication | Result | None:
    reader: Octets[Any] = Octets(
        read_authentication(MaopConfig()) if vector["kind"] == "authentication" else read_result()
    )
    for at in range(0, len(data), size):
        reader.feed(data[at : at + size])
    return reader.value


@pytest.mark.rule("MA-4")
@pytest.mark.rule("MA-38")
@pytest.mark.rule("MA-39")
@pytest.mark.rule("MA-40")
@pytest.mark.parametrize("vector", OPERATIONS, ids=lambda v: v["name"])
def test_ma4_ma38_ma39_ma40_operations_have_the_golden_octets(vector: dict[str, Any]) -> None:
    """Big-endian, no padding, counts may be 0, Disconnect is one octet."""
    data, keys = bytes.fromhex(vector["hex"]), vector.get("idempotency", False)
    operation = built(vector)
    assert operation.encode() == data
    assert decode_operation(data, idempotency=keys) == (operation, len(data))
    assert [decode_operation(data[:at], idempotency=keys) for at in range(len(data))] == [None] * len(data)


@pytest.mark.rule("MA-15")
@pytest.mark.rule("MA-21")
@pytest.mark.parametrize("vector", [v for v in VECTORS if v not in OPERATIONS], ids=lambda v: v["name"])
def test_ma15_ma21_the_exchange_has_the_golden_octets_in_any_cutting(vector: dict[str, Any]) -> None:
    """The message and both results; each octet may come alone."""
    data = bytes.fromhex(vector["hex"])
    for size in (1, 2, 7, len(data)):
        read = read_exchange(vector, data, size)
        assert read is not None
        again = attrs.evolve(read, auth_type="Bearer") if isinstance(read, Authentication) else read
        assert again.encode() == data
        assert str(read.version) == vector["version"]
        assert read.vendor == vector["vendor"]


@pytest.mark.parametrize("vector", VECTORS, ids=lambda v: v["name"])
def test_every_flipped_octet_is_read_or_named(vector: dict[str, Any]) -> None:
    """Whatever a changed octet makes of a vector, only named errors come out."""
    good = bytes.fromhex(vector["hex"])
    texts: list[str] = []
    for at in range(len(good)):
        for change in (0x01, 0x80, 0xFF):
            data = good[:at] + bytes((good[at] ^ change,)) + good[at + 1 :]
            try:
                if vector in OPERATIONS:
                    decode_operation(data, idempotency=vector.get("idempotency", False))
                else:
                    read_exchange(vector, data, 5)
            except (ValueError, OperationFault) as error:
                texts.append(str(error))
    assert texts
    assert all(texts)


@given(st.lists(st.sampled_from([built(v) for v in OPERATIONS if "idempotency" not in v])))
def test_operations_come_out_as_they_went_in(operations: list[Operation]) -> None:
    data = b"".join(operation.encode() for operation in operations)
    assert list(decode_operations(data)) == operations


def test_an_unfinished_or_unknown_operation_is_named() -> None:
    with pytest.raises(ValueError, match="MA-13"):
        decode_operation(b"\x0b")
    with pytest.raises(ValueError, match="3 bytes are no whole operation"):
        list(decode_operations(b"\x05\0\0"))


@pytest.mark.rule("MA-13")
@pytest.mark.rule("MA-37")
def test_ma13_ma37_codes_and_sizes_never_change() -> None:
    """Op codes 0x00 to 0x0A and the sizes of their headers."""
    assert [op.value for op in frames.Op] == list(range(11))
    heads = [frames.MESSAGE, frames.REQUEST, frames.RESPONSE, frames.BLOCK, frames.BLOCK_END, frames.FAIL]
    assert [head.size for head in heads] == [12, 18, 21, 5, 9, 13]
    assert {op: entry.size for op, entry in frames.ENTRIES.items()} == {3: 8, 4: 14, 8: 20}


@pytest.mark.rule("MA-1")
def test_ma1_alpn() -> None:
    """The name in the handshake."""
    assert ALPN == "maop/1"


@pytest.mark.rule("MA-57")
def test_ma57_the_sentinel_of_undefined_length() -> None:
    """All ones."""
    assert UNDEFINED.to_bytes(8, "big") == b"\xff" * 8


@pytest.mark.rule("MA-7")
def test_ma7_close_codes_are_shifted() -> None:
    """0 is an orderly end, errors begin at 0x100."""
    assert [close_code(code) for code in (ErrorCode.INVALID_FORMAT, ErrorCode.CAPACITY_LIMIT)] == [0x100, 0x10E]


@pytest.mark.rule("MA-77")
def test_ma77_unknown_codes_are_shown_as_such() -> None:
    """UNKNOWN_ERROR(n)."""
    assert code_name(17) == "EXECUTION_ERROR"
    assert code_name(50) == "UNKNOWN_ERROR(50)"


@pytest.mark.rule("MA-31")
def test_ma31_versions() -> None:
    """SemVer 2.0.0, and no identifier that begins with a hyphen."""
    assert [text for text in DATA["versions"]["right"] if str(parse_version(text)) != text] == []
    assert [text for text in DATA["versions"]["wrong"] if parse_version(text) is not None] == []
    assert parse_version("1.0.0+" + "a" * 250) is None


@pytest.mark.rule("MA-36")
def test_ma36_malformed_capabilities_count_as_none() -> None:
    """1 to 16 hex digits; unknown bits are kept and harmless."""
    assert parse_capabilities("1F") == Capability(0x1F)
    assert [int(parse_capabilities(text)) for text in ("", "xyz", "0" * 17, "-1", "0x1")] == [0] * 5
    assert parse_capabilities("ffffffffffffffff") & Capability(0x11) == Capability(0x11)


@pytest.mark.rule("MA-78")
@pytest.mark.rule("MA-24")
def test_ma24_ma78_reasons_are_short_clean_and_hold_no_secrets() -> None:
    """512 octets, cut at a character with the audit id behind; no tokens, control characters or traces."""
    cut = sanitise("é" * 400, "7f3a")
    assert len(cut) <= 512
    assert cut.endswith("é [7f3a]".encode())
    assert cut.decode() == "é" * 252 + " [7f3a]"
    assert sanitise("Authorization: Bearer abc.def, so no", "") == b"Authorization: ***, so no"
    assert sanitise("password=hunter2", "") == b"password=***"
    assert sanitise("got s3cr3t here", "", secrets=("s3cr3t",)) == b"got *** here"
    assert sanitise("one\r\ntwo\x1b[31m", "") == b"one  two [31m"
    assert sanitise("bad\nTraceback (most recent call last):\n  File", "") == b"bad"


@pytest.mark.rule("MA-5")
def test_ma5_text_is_sent_in_nfc() -> None:
    """A letter and its accent become one."""
    assert sanitise("e\u0301", "") == "é".encode()
