"""``levada explain`` on captures of the protocols whose frames it knows."""

from __future__ import annotations

import argparse
import datetime as dt
import json
import tracemalloc
import zlib
from pathlib import Path

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from levada.actors import cli
from levada.actors.explain import aqueduct, qmux
from levada.actors.explain.values import as_text, read_value
from levada.framework import Codec, Sender, channel, message
from levada.framework.codec import AttachmentKind
from levada.transports.aqueduct.frames import ConnectionControl, Message
from levada.transports.rsocket import Payload
from levada.transports.rsocket.extensions import CompositeMetadata, Routing, SimpleAuthentication
from levada.transports.rsocket.frames import FrameType, RequestFrame, ResumeFrame, SetupFrame

VECTORS = Path(__file__).parents[1] / "transports"


def explain(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[str]]:
    code = cli.main(["explain", *arguments])
    said = capsys.readouterr()
    assert said.err == ""
    return code, [line[21:] for line in said.out.splitlines()]


@pytest.fixture
def capture(tmp_path: Path) -> Path:
    return tmp_path / "capture"


def framed(*frames: bytes) -> bytes:
    return b"".join(len(frame).to_bytes(3, "big") + frame for frame in frames)


def test_all_vectors_of_rsocket(capsys: pytest.CaptureFixture[str], capture: Path) -> None:
    vectors = json.loads((VECTORS / "rsocket" / "data" / "vectors.json").read_text())["vectors"]
    capture.write_text("\n".join(vector["octets"] for vector in vectors))
    code, lines = explain(capsys, "rsocket", "--hex", str(capture))
    assert code == 0
    assert len(lines) >= len(vectors)
    assert lines[0] == (
        "SETUP version=1.0 keepalive_ms=500 lifetime_ms=30000 metadata_mime_type='text/plain' data_mime_type='application/cbor' "
        "metadata='m' data='hi' lease"
    )
    assert "REQUEST_CHANNEL stream=5 n=1 metadata='chan' data='a' complete" in lines
    assert "ERROR stream=1 APPLICATION_ERROR data='boom'" in lines
    assert "KEEPALIVE respond position=300 data='ping'" in lines


def test_composite_metadata_is_taken_apart_and_secrets_are_not_shown(
    capsys: pytest.CaptureFixture[str], capture: Path
) -> None:
    metadata = CompositeMetadata.of(Routing("desk"), SimpleAuthentication("me", "hush")).encode()
    setup = SetupFrame(
        version=(1, 0),
        keepalive_ms=1,
        lifetime_ms=1,
        token=b"very secret",
        metadata_mime_type=CompositeMetadata.MIME_TYPE,
        data_mime_type="a/b",
        payload=Payload(),
    )
    request = RequestFrame(type=FrameType.REQUEST_RESPONSE, stream_id=1, payload=Payload(b"\xff", metadata))
    resume = ResumeFrame(version=(1, 0), token=b"very secret", server_position=0, client_position=0)
    capture.write_bytes(framed(setup.encode(), request.encode(), resume.encode()))
    code, lines = explain(capsys, "rsocket", str(capture))
    assert code == 0
    assert (
        lines[1] == "REQUEST_RESPONSE stream=1 metadata=[route: 'desk', authentication: 9 bytes, not shown] data=0xff"
    )
    assert "secret" not in "".join(lines)
    capture.write_bytes(framed(request.encode()))
    assert explain(capsys, "rsocket", "--composite", str(capture))[1] == lines[1:2]


@pytest.mark.parametrize(
    ("octets", "last"),
    [
        ("000006 00000001 2400 0000", "an unfinished frame"),
        ("000005 00000001 24", "not a frame: "),
        ("00000a 00000000 fc00 00000000", "EXT"),
        ("000006 00000000 f800", "UNKNOWN type=62"),
    ],
)
def test_damaged_frames_of_rsocket(capsys: pytest.CaptureFixture[str], capture: Path, octets: str, last: str) -> None:
    capture.write_text(octets)
    code, lines = explain(capsys, "rsocket", "--hex", str(capture))
    assert lines[-1].startswith(last)
    assert code == (0 if last == "EXT" else 1)


def test_all_vectors_of_reactivesocket(capsys: pytest.CaptureFixture[str], capture: Path) -> None:
    vectors = json.loads((VECTORS / "reactivesocket" / "data" / "frame_vectors.json").read_text())["valid"]
    capture.write_text("\n".join(vector["hex"] for vector in vectors))
    code, lines = explain(capsys, "reactivesocket", "--hex", str(capture))
    assert code == 0
    assert len(lines) == len(vectors)
    assert "REQUEST_SUB stream=4 numbers=10 data='tick'" in lines
    assert "REQUEST_N stream=4 numbers=5" in lines


@pytest.mark.parametrize(
    ("octets", "last"),
    [
        ("00000010 0009", "an unfinished frame"),
        ("00000003 00", "not a frame: a length of 3, at least 12 (RX-4)"),
        ("0000000c 0009 0000 00000004", "not a frame: "),
    ],
)
def test_damaged_frames_of_reactivesocket(
    capsys: pytest.CaptureFixture[str], capture: Path, octets: str, last: str
) -> None:
    capture.write_text(octets)
    code, lines = explain(capsys, "reactivesocket", "--hex", str(capture))
    assert (code, len(lines)) == (1, 1)
    assert lines[0].startswith(last)


def test_lumberjack_with_envelopes(capsys: pytest.CaptureFixture[str], capture: Path) -> None:
    data = bytes.fromhex("3144 00000001 00000001 00000004 6c696e65 00000005 68656c6c6f")
    inner = b"1C" + len(packed := zlib.compress(data)).to_bytes(4, "big") + packed
    outer = b"1C" + len(packed := zlib.compress(inner + data)).to_bytes(4, "big") + packed
    capture.write_bytes(b"1W\0\0\0\2" + outer)
    code, lines = explain(capsys, "lumberjack", str(capture))
    assert code == 0
    assert lines == [
        "v1 WINDOW 2",
        f"v1 ENVELOPE {len(outer) - 6} bytes",
        f"    v1 ENVELOPE {len(inner) - 6} bytes",
        "        v1 DATA 1 {'line': 'hello'}",
        "    v1 DATA 1 {'line': 'hello'}",
    ]


def test_all_vectors_of_lumberjack(capsys: pytest.CaptureFixture[str], capture: Path) -> None:
    vectors = json.loads((VECTORS / "lumberjack" / "data" / "vectors.json").read_text())["vectors"]
    for name, vector in vectors.items():
        capture.write_text(vector["hex"])
        code, lines = explain(capsys, "lumberjack", "--hex", str(capture))
        # An ack from the writer, a D of version 2 and a change of version are well-formed frames in the wrong place.
        assert code == int(vector["bad"] and name not in ("V15", "V17", "V18")), (name, lines)


@pytest.mark.ci
def test_messages_that_would_take_much_memory_are_octets_to_it() -> None:
    """What a hostile peer sends is not made only to be shown."""
    nested = bytes(10_000)
    for _ in range(400):
        nested = msgpack.packb(msgpack.ExtType(2, b"\x92\xa1x" + nested))
    tracemalloc.start()
    for octets in (nested, msgpack.packb([None] * 200_000).replace(b"\xc0", b"\x80")):
        with pytest.raises(ValueError, match=r"not a value of the codec: (nested too deeply|too many items)"):
            read_value(octets)
    assert tracemalloc.get_traced_memory()[1] < 6_000_000
    tracemalloc.stop()


@pytest.mark.parametrize("level", [b"\x91", b"\x81\xa1a"])
def test_values_that_are_nested_too_deeply_to_be_shown(level: bytes) -> None:
    deepest = read_value(level * 200 + b"\xc0")
    assert as_text(deepest).count("null") == 1
    for levels in (201, 500, 1_000, 100_000):
        with pytest.raises(ValueError, match="not a value of the codec"):
            read_value(level * levels + b"\xc0")


def test_all_vectors_of_aqueduct(capsys: pytest.CaptureFixture[str], capture: Path) -> None:
    vectors = json.loads((VECTORS / "aqueduct" / "data" / "vectors.json").read_text())
    capture.write_text("\n".join(vector["hex"] for vector in vectors["frames"]))
    code, lines = explain(capsys, "aqueduct", "--hex", str(capture))
    assert (code, len(lines)) == (0, len(vectors["frames"]))
    for expected in (
        "VERSION 0.0.0-AFTER",
        "CONNECTION_CONTROL",
        "CHANNEL_CONTROL channel=0 (entrypoint)",
        "CHANNEL_CONTROL channel=1 (to client, client's)",
        "MESSAGE channel=0 (entrypoint) number=0 payload='hi'",
        "MESSAGE channel=0 (entrypoint) number=1 attached=[receiver 8, sender 1] payload='x'",
        "SENT_UNRELIABLE 3",
        "ACK_RELIABLE 2 left out, 1 acked",
        "ACK_NACK_UNRELIABLE 3 acked, 1 nacked, 2 acked",
        "FINISH_SENDER 5 messages",
        "CLOSE_RECEIVER",
        "CLOSE_RECEIVER 2 acked, 1 nacked",
        "CLOSED_CHANNEL_LOST channel=8 (to server, client's)",
    ):
        assert expected in lines
    for vector in vectors["bad_frames"]:
        capture.write_text(vector["hex"])
        code, lines = explain(capsys, "aqueduct", "--hex", str(capture))
        assert (code, vector["rule"] in lines[-1] or lines[-1] == "an unfinished frame") == (1, True), vector


@message("tests.explain.Follow")
class Follow:
    symbol: str
    prices: Sender[int]
    since: dt.datetime
    note: bytes


def test_messages_of_aqueduct_show_tag_and_fields_and_headers_no_secret(
    capsys: pytest.CaptureFixture[str], capture: Path
) -> None:
    sender, receiver = channel(int)
    with sender, receiver:
        follow = Follow("EURUSD", sender, dt.datetime(2026, 1, 2, tzinfo=dt.UTC), b"\xff")
        payload = Codec().encode(follow, attachments=Numbered())
    frames: list[ConnectionControl | Message] = [
        ConnectionControl((("levada-codec", b"1"), ("token", b"very secret"))),
        Message(2, 300, (13,), payload),
        Message(2, 301, (), b"\xc7\x01\x02\x90"),  # an ext value of the codec's type that is no message
    ]
    capture.write_bytes(b"".join(frame.encode() for frame in frames) + b"\x03\x00")
    assert explain(capsys, "aqueduct", str(capture)) == (
        1,
        [
            "CONNECTION_CONTROL levada-codec='1' token=(11 bytes, not shown)",
            "MESSAGE channel=2 (to server, server's) number=300 attached=[oneshot sender 13] "
            'payload=<tests.explain.Follow ["EURUSD", {"attachment": 0, "kind": "sender"}, "2026-01-02T00:00:00+00:00", {"base64": "/w=="}]>',
            "MESSAGE channel=2 (to server, server's) number=301 payload=0xc7010290",
            "an unfinished frame",
        ],
    )


@given(octets=st.binary(max_size=60), wrapped=st.booleans())
def test_any_octets_are_explained_to_their_end(octets: bytes, wrapped: bool) -> None:
    """Alone, and as the payload of a message whose first octets say that it is one of the codec's."""
    if wrapped:
        octets = Message(0, 0, (), b"\xc7" + bytes((len(octets),)) + b"\x02" + octets).encode()
    lines = list(aqueduct.explain(octets, argparse.Namespace()))
    assert [line.offset for line in lines] == [sum(line.length for line in lines[:at]) for at in range(len(lines))]
    assert sum(line.length for line in lines) == len(octets)
    assert not any(line.damaged for line in lines[:-1])


class Numbered:
    """Takes the handles of a message, by number."""

    def __init__(self) -> None:
        self.count = 0

    def attach(self, handle: object) -> tuple[AttachmentKind, int]:
        self.count += 1
        return AttachmentKind.SENDER, self.count - 1

    def rollback(self) -> None:
        raise AssertionError


def test_all_vectors_of_maop(capsys: pytest.CaptureFixture[str], capture: Path) -> None:
    vectors = json.loads((VECTORS / "maop" / "data" / "vectors.json").read_text())["vectors"]
    lines = []
    for vector in vectors:
        capture.write_text(vector["hex"])
        side = {"authentication": ["--stream0=client"], "result": ["--stream0=server"]}.get(vector["kind"], [])
        key = ["--idempotency"] if "key" in vector else []
        code, said = explain(capsys, "maop", "--hex", *side, *key, str(capture))
        assert (code, len(said)) == (0, 1), vector
        lines += said
    for expected in (
        "AUTHENTICATION bearer token=(6 bytes, not shown) 'role'=(6 bytes, not shown) version=1.0.0 vendor='acme'",
        "APPROVED session=000102030405060708090a0b0c0d0e0f identifier='c-42' version=1.0.0 vendor='acme'",
        "DISAPPROVED UNAUTHORIZED retry_after=1500ms reason='denied' version=1.0.0 vendor='acme'",
        "MESSAGE msg_id=100 length=5 priority=128",
        "REQUEST msg_id=101 length=0 priority=7 response_msg_id=0 timeout=5000ms",
        "RESPONSE length=26 start=2023-11-14T22:13:20.000+00:00 took=3ms",
        "PROCEED [2, 4]",
        "REFUSE [6: CAPACITY_LIMIT retry_after=250ms]",
        "BLOCK 5 'hello'",
        "BLOCK_END 5",
        "FAIL 4: EXECUTION_ERROR reason='boom'",
        "DONE [2: start=2023-11-14T22:13:20.000+00:00 took=3ms]",
        "DISCONNECT_REQUEST drain=3000ms reason='bye'",
        "DISCONNECT",
    ):
        assert expected in lines


def test_a_stream_of_maop(capsys: pytest.CaptureFixture[str], capture: Path) -> None:
    octets = (
        "00 0064 ffffffffffffffff 00 10 000102030405060708090a0b0c0d0e0f" + "05 00000001 ff" + "06 0000000000000001"
    )
    capture.write_text(octets)
    assert explain(capsys, "maop", "--hex", "--idempotency", str(capture)) == (
        0,
        [
            "MESSAGE msg_id=100 length=undefined priority=0 key=000102030405060708090a0b0c0d0e0f",
            "BLOCK 1 0xff",
            "BLOCK_END 1",
        ],
    )
    parent = f"00-{'a' * 32}-{'b' * 16}-01"
    capture.write_text(f"00 0064 0000000000000000 80 00 0037 {parent.encode().hex()}")
    assert explain(capsys, "maop", "--hex", "--idempotency", "--trace", str(capture)) == (
        0,
        [f"MESSAGE msg_id=100 length=0 priority=128 trace='{parent}'"],
    )
    capture.write_text("03 000a" + "".join(f"{n:016x}" for n in range(10)) + "08 0001" + "ff" * 20)
    assert explain(capsys, "maop", "--hex", str(capture)) == (
        0,
        ["PROCEED [0, 1, 2, 3, 4, 5, 6, 7, … (10)]", f"DONE [{2**64 - 1}: start={2**64 - 1} took={2**32 - 1}ms]"],
    )


@pytest.mark.parametrize(
    ("octets", "options", "last"),
    [
        ("0a 07 0000", [], "an unfinished operation"),
        ("0a 0b", [], "no operation: "),
        ("00 0064 0000000000000000 80 05", ["--idempotency"], "no operation: "),
        ("00 0064 0000000000000000 80 0036" + "61" * 54, ["--trace"], "no operation: "),
        ("06 42 65", ["--stream0=client"], "an unfinished authentication"),
        ("06 00", ["--stream0=client"], "no authentication: the authentication type has characters"),
        ("00 0001 00000000 0000 05 312e302e30 00 ff", ["--stream0=server"], "bytes behind the end"),
    ],
)
def test_damaged_operations_of_maop(
    capsys: pytest.CaptureFixture[str], capture: Path, octets: str, options: list[str], last: str
) -> None:
    capture.write_text(octets)
    code, lines = explain(capsys, "maop", "--hex", *options, str(capture))
    assert code == 1
    assert lines[-1].startswith(last)


def test_json_is_a_line_for_each_frame(capsys: pytest.CaptureFixture[str], capture: Path) -> None:
    capture.write_text("32 41 00000007 33")
    assert cli.main(["explain", "lumberjack", "--hex", "--json", str(capture)]) == 1
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == {"offset": 0, "length": 6, "text": "v2 ACK 7", "damaged": False}
    assert lines[1]["damaged"]


def test_mistakes(capsys: pytest.CaptureFixture[str], capture: Path) -> None:
    assert cli.main(["explain", "rsocket", str(capture)]) == 2
    assert capsys.readouterr().err == f"levada: cannot read {capture}: No such file or directory\n"
    capture.write_text("xyz")
    assert cli.main(["explain", "rsocket", "--hex", str(capture)]) == 2
    assert capsys.readouterr().err.startswith(f"levada: {capture} must contain only hexadecimal digits and white space")


def test_records_of_qmux(capsys: pytest.CaptureFixture[str], capture: Path) -> None:
    """The vectors of the protocol's reference."""
    capture.write_text(
        "4040ff5153300d0a0d0a37010480007530040480100000050480040000060480040000070480040000080240640902406420027ffec571c59429cd0845027ffe1d00"
        "050a00026869 0b0f000001610f0300026263 090c0480004000616263 050408509203 07240807412c4064 040508404d 051080100000"
        "06110480010000 06124065134064 0a1443e815040516071708 053103686579 0430686579 09f48c67529ef8c7bd01 09f48c67529ef8c7be01"
        "0a1d2a07736f206c6f6e67 041c0a0800 03000000 c000000000000013 0fc00000000000000080000000400477696465"
    )
    assert explain(capsys, "qmux", "--hex", str(capture)) == (
        0,
        [
            "record of 64 bytes",
            "QX_TRANSPORT_PARAMETERS max_idle_timeout_ms=30000 max_data=1048576 max_stream_data_bidi_local=262144 "
            "max_stream_data_bidi_remote=262144 max_stream_data_uni=262144 max_streams_bidi=100 max_streams_uni=100 "
            "max_datagram_frame_size=16382 reset_stream_at=True",
            "record of 5 bytes",
            "STREAM stream=0 (client's, bidirectional) offset=0 data='hi'",
            "record of 11 bytes",
            "STREAM stream=0 (client's, bidirectional) offset=0 end data='a'",
            "STREAM stream=3 (server's, unidirectional) offset=0 end data='bc'",
            "record of 9 bytes",
            "STREAM stream=4 (client's, bidirectional) offset=16384 data='abc'",
            "record of 5 bytes",
            "RESET_STREAM stream=8 (client's, bidirectional) code=4242 final_size=3",
            "record of 7 bytes",
            "RESET_STREAM_AT stream=8 (client's, bidirectional) code=7 final_size=300 reliable_size=100",
            "record of 4 bytes",
            "STOP_SENDING stream=8 (client's, bidirectional) code=77",
            "record of 5 bytes",
            "MAX_DATA maximum=1048576",
            "record of 6 bytes",
            "MAX_STREAM_DATA stream=4 (client's, bidirectional) maximum=65536",
            "record of 6 bytes",
            "MAX_STREAMS bidirectional maximum=101",
            "MAX_STREAMS unidirectional maximum=100",
            "record of 10 bytes",
            "DATA_BLOCKED limit=1000",
            "STREAM_DATA_BLOCKED stream=4 (client's, bidirectional) limit=5",
            "STREAMS_BLOCKED bidirectional limit=7",
            "STREAMS_BLOCKED unidirectional limit=8",
            "record of 5 bytes",
            "DATAGRAM data='hey'",
            "record of 4 bytes",
            "DATAGRAM data='hey'",
            "record of 9 bytes",
            "QX_PING number=1",
            "record of 9 bytes",
            "QX_PING answer number=1",
            "record of 10 bytes",
            "CONNECTION_CLOSE of the application code=42 reason='so long'",
            "record of 4 bytes",
            "CONNECTION_CLOSE of the transport PROTOCOL_VIOLATION frame=0x8 reason=''",
            "record of 3 bytes",
            "PADDING",
            "record of 19 bytes",
            "STREAM stream=0 (client's, bidirectional) offset=0 end data='wide'",
        ],
    )


@pytest.mark.parametrize(
    ("octets", "lines"),
    [
        ("7fff", ["record of 16,383 bytes, the capture has 0"]),
        ("40", ["an unfinished record"]),
        ("00", ["record of 0 bytes without a frame"]),
        (
            "060f00000268",
            [
                "record of 6 bytes, the capture has 5",
                "not a frame: 2 bytes in a frame, 1 in its record [QX-4]",
            ],
        ),
        ("020101", ["record of 2 bytes", "not a frame: frame type 0x1 does not exist here [QX-8]"]),
        (
            "0affffff",
            ["record of 10 bytes, the capture has 3", "not a frame: a frame is cut by the end of its record [QX-4]"],
        ),
    ],
)
def test_damaged_records_of_qmux(
    capsys: pytest.CaptureFixture[str], capture: Path, octets: str, lines: list[str]
) -> None:
    capture.write_text(octets)
    assert explain(capsys, "qmux", "--hex", str(capture)) == (1, lines)


def test_a_message_of_qmux_has_no_size(capsys: pytest.CaptureFixture[str], capture: Path) -> None:
    capture.write_text("0f00000161 f48c67529ef8c7bd07")
    assert explain(capsys, "qmux", "--websocket", "--hex", str(capture)) == (
        0,
        ["STREAM stream=0 (client's, bidirectional) offset=0 end data='a'", "QX_PING number=7"],
    )


@given(octets=st.binary(max_size=60), websocket=st.booleans())
def test_any_records_of_qmux_are_explained_to_their_end(octets: bytes, websocket: bool) -> None:
    at = 0
    for line in qmux.explain(octets, argparse.Namespace(websocket=websocket)):
        assert line.offset <= at  # nothing is left out; a record's frames come after it
        at = max(at, line.offset + line.length)
    assert at == len(octets)
