"""``levada explain`` on captures of the three protocols whose frames it knows."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import pytest

from levada.actors import cli
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
        lines[1] == "REQUEST_RESPONSE stream=1 metadata=[route: 'desk', authentication: 9 octets, not shown] data=0xff"
    )
    assert "secret" not in "".join(lines)
    capture.write_bytes(framed(request.encode()))
    assert explain(capsys, "rsocket", "--composite", str(capture))[1] == lines[1:2]


@pytest.mark.parametrize(
    ("octets", "last"),
    [
        ("000006 00000001 2400 0000", "an unfinished frame"),
        ("000005 00000001 24", "no frame: "),
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
        ("00000003 00", "no frame: a length of 3, 12 at least (RX-4)"),
        ("0000000c 0009 0000 00000004", "no frame: "),
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
        f"v1 ENVELOPE {len(outer) - 6} octets",
        f"    v1 ENVELOPE {len(inner) - 6} octets",
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
    assert capsys.readouterr().err.startswith(f"levada: {capture} holds more than hexadecimal digits")
