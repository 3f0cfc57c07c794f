"""``levada call maop://…`` against ``levada interop maop``."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
import pytest

from levada.actors import cli

pytestmark = pytest.mark.loopback

LEVADA = (sys.executable, "-m", "levada.actors")


@attrs.frozen
class Endpoint:
    url: str
    ca: Path
    token: Path


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    folder = tmp_path_factory.mktemp("maop")
    token = folder / "token"
    token.touch(mode=0o600)
    token.write_text("sesame\n")
    command = (
        *LEVADA,
        "interop",
        "maop",
        "--self-signed",
        str(folder),
        "--token-file",
        str(token),
        "--allow-anonymous",
    )
    with subprocess.Popen(
        [*command, "--until-stdin-closes"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        word, host, port, carrier = server.stdout.readline().split()
        assert (word, carrier) == ("LISTENING", "quic")
        yield Endpoint(f"maop://{host}:{port}", folder / "ca.pem", token)
        server.communicate(timeout=250)
        assert server.returncode == 0


Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(endpoint: Endpoint, capsys: pytest.CaptureFixture[str]) -> Call:
    def call(*arguments: str, token: Path | None = endpoint.token) -> tuple[int, str, str]:
        who = () if token is None else ("--token-file", str(token))
        code = cli.main(["call", endpoint.url, "--ca", str(endpoint.ca), *who, *arguments])
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


@pytest.mark.ci
def test_a_request_is_answered(call: Call) -> None:
    assert call("--id", "101", "--data", "hällo") == (0, "hällo\n", "")
    assert call("--id", "101", "--request", "--priority", "0", "--timeout", "20") == (0, "\n", "")


def test_json_has_data_and_content_type(call: Call, tmp_path: Path) -> None:
    code, out, _ = call("--id", "101", "--data", "x", "--json")
    assert (code, json.loads(out)) == (0, {"data": "x", "content_type": "application/octet-stream"})
    (tmp_path / "octets").write_bytes(b"\xff\x00")
    assert json.loads(call("--id", "101", "--data", f"@{tmp_path / 'octets'}", "--json")[1])["data_base64"] == "/wA="


def test_json_holds_so_much_and_no_more(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("levada.actors.cli.protocols.maop._MOST_AS_JSON", 1 << 20)
    (tmp_path / "octets").write_bytes(bytes((1 << 20) + 1))
    code, out, said = call("--id", "101", "--data", f"@{tmp_path / 'octets'}", "--json")
    assert (code, out) == (1, "")
    assert "CONTENT_TOO_LARGE" in said
    assert "--json collects at most 1 MiB" in said


@pytest.mark.ci
def test_a_large_answer_is_written_as_it_comes(endpoint: Endpoint, tmp_path: Path) -> None:
    octets = bytes(range(256)) * 8_000
    (tmp_path / "octets").write_bytes(octets)
    arguments = ("--ca", str(endpoint.ca), "--token-file", str(endpoint.token), "--id", "101")
    done = subprocess.run(
        [*LEVADA, "call", endpoint.url, *arguments, "--data", f"@{tmp_path / 'octets'}"],
        capture_output=True,
        check=True,
    )
    assert (done.stdout == octets, done.stderr) == (True, b"")


def test_a_message_has_no_answer(call: Call) -> None:
    assert call("--id", "100", "--message", "--data", "log line") == (0, "", "")
    code, out, _ = call("--id", "2", "--message", "--json")
    assert (code, sorted(json.loads(out))) == (0, ["started", "took"])


def test_without_a_token_the_client_is_anonymous(call: Call) -> None:
    assert call("--id", "101", "--data", "x", token=None) == (0, "x\n", "")


def test_what_the_peer_refuses_or_fails_is_exit_code_1(call: Call) -> None:
    assert call("--id", "102") == (1, "", "levada: EXECUTION_ERROR: this handler always fails\n")
    assert call("--id", "102", "--message") == (1, "", "levada: EXECUTION_ERROR: this handler always fails\n")
    assert call("--id", "999") == (1, "", "levada: refused by INCOMPATIBLE_MESSAGE\n")


@pytest.mark.ci
def test_no_answer_in_time_is_exit_code_1(call: Call) -> None:
    code, out, err = call("--id", "103", "--timeout", "1")
    assert (code, out) == (1, "")
    assert err in ("levada: TIMEOUT: time is up\n", "levada: no answer, or not all of them, within 1 s\n")


def test_a_wrong_token_is_exit_code_2(call: Call, tmp_path: Path) -> None:
    (tmp_path / "wrong").write_text("wrong")
    code, out, err = call("--id", "101", token=tmp_path / "wrong")
    assert (code, out, err) == (2, "", "levada: UNAUTHORIZED: These credentials are not valid here.\n")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "maop needs --id N, the msg_id of the handler"),
        (["--id", "101", "--limit", "5"], "--limit is not for maop"),
        (["--id", "101", "--stream"], "--stream is not for maop: use --request or --message"),
        (["--id", "101", "--request", "--message"], "give either --request or --message"),
        (["--id", "101", "--data", "a", "--data", "b"], "maop takes one --data"),
        (["--id", "101", "--data", "@/no/such/file"], "cannot read /no/such/file"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], complaint: str
) -> None:
    assert cli.main(["call", "maop://127.0.0.1:9", *arguments]) == 2
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert said.err.startswith(f"levada: {complaint}")


@pytest.mark.parametrize("arguments", [["--id", "0"], ["--id", "65536"], ["--id", "1", "--priority", "256"]])
def test_numbers_out_of_range_are_mistakes(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["call", "maop://127.0.0.1:9", *arguments])
    assert ended.value.code == 2
    assert "expected a whole number from " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "maop needs --token TOKEN or --token-file FILE, or --allow-anonymous"),
        (["--token", ""], "maop needs --token TOKEN or --token-file FILE, or --allow-anonymous"),
        (["--token", "a", "--token-file", "b"], "either --token or --token-file"),
        (["--token-file", "/no/such/file"], "cannot read /no/such/file"),
    ],
)
def test_mistakes_in_the_arguments_of_interop(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str], complaint: str
) -> None:
    assert cli.main(["interop", "maop", "--self-signed", str(tmp_path), *arguments]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"levada: {complaint}")
    assert err.count("\n") == 1
