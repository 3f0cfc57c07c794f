"""``levada call`` against ``levada interop``, each a process of its own or, where only the output counts, in this one."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from levada.actors import cli

pytestmark = pytest.mark.loopback

LEVADA = (sys.executable, "-m", "levada.actors")


class Endpoint:
    """``levada interop`` as a process."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [*LEVADA, "interop", *arguments, "--until-stdin-closes"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        word, self.host, self.port, self.carrier = self.process.stdout.readline().split()
        assert word == "LISTENING"

    def end(self) -> tuple[int, str]:
        """End it by closing its standard input; gives the exit code and what it said on stderr."""
        _, said = self.process.communicate(timeout=250)
        return self.process.returncode, said


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    endpoint = Endpoint("rsocket")
    yield f"rsocket+tcp://127.0.0.1:{endpoint.port}"
    assert endpoint.end() == (0, "")


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.main(["call", *arguments])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_one_answer_is_printed_as_text(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(capsys, url, "--route", "echo", "--data", "hällo") == (0, "hällo\n", "")


def test_json_has_data_and_metadata(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, url, "--route", "echo", "--data", "x", "--metadata-type", "text/plain", "--json")
    assert (code, json.loads(out)) == (0, {"data": "x", "metadata": "echo"})


def test_octets_that_are_no_text_stay_as_they_are(
    url: str, capsysbinary: pytest.CaptureFixture[bytes], tmp_path: Path
) -> None:
    (tmp_path / "octets").write_bytes(b"\xff\x00\n")
    assert cli.main(["call", url, "--route", "echo", "--data", f"@{tmp_path / 'octets'}"]) == 0
    assert capsysbinary.readouterr().out == b"\xff\x00\n"
    assert cli.main(["call", url, "--route", "echo", "--data", f"@{tmp_path / 'octets'}", "--json"]) == 0
    assert json.loads(capsysbinary.readouterr().out)["data_base64"] == "/wAK"


def test_a_stream_is_a_line_for_each_answer(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(capsys, url, "--route", "count", "--data", "5", "--stream") == (0, "0\n1\n2\n3\n4\n", "")


def test_a_limit_cancels_a_stream(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(
        capsys, url, "--route", "count", "--data", "100000000", "--stream", "--limit", "3", "--window", "2"
    )
    assert (code, out) == (0, "0\n1\n2\n")


def test_a_channel_takes_each_data(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(capsys, url, "--route", "chan", "--channel", "--data", "a", "--data", "b") == (0, "a\nb\n", "")


@pytest.mark.ci
def test_a_channel_takes_lines_of_standard_input(url: str) -> None:
    done = subprocess.run(
        [*LEVADA, "call", url, "--route", "chan", "--channel"],
        input=b"one\ntwo\nthree",
        capture_output=True,
        check=True,
    )
    assert (done.stdout, done.stderr) == (b"one\ntwo\nthree\n", b"")


def test_fire_and_forget_prints_nothing(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, before, _ = call(capsys, url, "--route", "fnf-count")
    assert call(capsys, url, "--route", "fnf", "--fnf") == (0, "", "")
    after = before
    while after == before:  # the server counts in its own time
        _, after, _ = call(capsys, url, "--route", "fnf-count")
    assert int(after) == int(before) + 1


def test_an_error_of_the_responder_is_exit_code_1(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(capsys, url, "--route", "fail", "--data", "no") == (1, "", "levada: APPLICATION_ERROR: no\n")
    assert call(capsys, url, "--route", "fail", "--data", "no", "--stream") == (
        1,
        "",
        "levada: APPLICATION_ERROR: no\n",
    )
    assert call(capsys, url, "--route", "nowhere") == (1, "", "levada: APPLICATION_ERROR: unknown route: nowhere\n")


_ANSWERS_AND_WAITS = """
import trio
from levada.framework import Actor, OneshotSender, Sender, message
from levada.actors.rsocket import route

class Desk(Actor):
    @route("none")
    async def none(self, data: bytes):
        print("ASKED", flush=True)
        await trio.sleep_forever()

    @route("once")
    async def once(self, data: bytes) -> bytes:
        return data

    @route("some")
    async def some(self, data: bytes):
        for number in range(int(data)):
            yield b"%d" % number
        await trio.sleep_forever()

@message("tests.call.Once")
class Once:
    reply: OneshotSender[str]

@message("tests.call.Some")
class Some:
    count: int
    reply: Sender[str]

async def desk(m: Once | Some) -> None:
    if isinstance(m, Once):
        print("ASKED", flush=True)
    else:
        for number in range(m.count):
            await m.reply.send(str(number))
    await trio.sleep_forever()
"""


@pytest.mark.ci
def test_a_request_that_is_answered_by_a_stream_names_the_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other way round works: one answer is a stream of one."""
    (tmp_path / "app.py").write_text(_ANSWERS_AND_WAITS)
    served = [*LEVADA, "serve", "app:Desk", "--url", "rsocket+tcp://127.0.0.1:0"]
    with subprocess.Popen(served, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = server.stdout.readline().split()[1]
        said = "levada: INVALID: this is answered by a stream; send a request-stream (--stream)\n"
        assert call(capsys, url, "--route", "some", "--data", "5") == (1, "", said)
        assert call(capsys, url, "--route", "once", "--data", "it", "--stream") == (0, "it\n", "")
        server.kill()


@pytest.mark.ci
@pytest.mark.parametrize(
    ("target", "scheme", "options", "answers"),
    [
        ("Desk", "rsocket+tcp", ["--route", "none"], 0),
        ("Desk", "reactivesocket+tcp", ["--route", "none"], 0),
        ("Desk", "rsocket+tcp", ["--route", "some", "--data", "1", "--stream"], 1),
        ("Desk", "rsocket+tcp", ["--route", "some", "--data", "3", "--channel"], 3),
        ("desk", "aqueduct+tls", ["--tag", "tests.call.Once"], 0),
        ("desk", "aqueduct+tls", ["--tag", "tests.call.Some", "--data", "[3]", "--stream"], 3),
    ],
)
def test_a_server_that_is_killed_during_a_call(
    target: str, scheme: str, options: list[str], answers: int, tmp_path: Path
) -> None:
    """The client hears that the connection to the server was lost, and after how many answers."""
    (tmp_path / "app.py").write_text(_ANSWERS_AND_WAITS)
    made = ["--self-signed", "made"] if scheme.endswith("tls") else []
    served = [*LEVADA, "serve", f"app:{target}", "--url", f"{scheme}://127.0.0.1:0", *made]
    with subprocess.Popen(served, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = server.stdout.readline().split()[1]
        trusted = ["--ca", str(tmp_path / "made" / "ca.pem")] if made else []
        with subprocess.Popen(
            [*LEVADA, "call", url, *options, *trusted], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as client:
            assert client.stdout is not None
            if answers:
                assert [client.stdout.readline() for _ in range(answers)] == [f"{n}\n" for n in range(answers)]
            else:
                assert server.stdout.readline() == "ASKED\n"
            server.kill()
            out, err = client.communicate(timeout=250)
    after = {0: "", 1: ", after one answer; call again", 3: ", after 3 answers; call again"}[answers]
    assert (client.returncode, out) == (2, "")
    assert re.fullmatch(
        rf"levada: the connection to {re.escape(url)} was lost: (?!channel|the connection was lost)[^;]+{after}\n", err
    )


@pytest.mark.ci
def test_no_answer_in_time_is_exit_code_1(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capsys, url, "--route", "slow", "--timeout", "0.5")
    assert (code, out, err) == (1, "", "levada: no answer, or not all of them, within 0.5 s\n")


@pytest.mark.parametrize(
    ("url", "hint"),
    [
        ("rsoket+tcp://localhost:80", "(entry point group levada.protocols); is it rsocket?\n"),
        ("rsocket+tcq://localhost:80", "(entry point group levada.carriers); is it tcp?\n"),
        ("http://localhost:80", "(entry point group levada.protocols)\n"),
    ],
)
def test_a_scheme_that_is_nearly_right(capsys: pytest.CaptureFixture[str], url: str, hint: str) -> None:
    code, out, err = call(capsys, url)
    assert (code, out) == (2, "")
    assert err.endswith(hint)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (
            ["http://localhost:80"],
            "no protocol for 'http://localhost:80': expected aqueduct://host:port, rsocket+tcp://host:port, "
            "reactivesocket+tcp://host:port, maop://host:port, or a scheme of an installed package",
        ),
        (["rsocket+udp://localhost:80"], "no carrier for 'rsocket+udp://localhost:80'"),
        (
            ["rsocket+tpc://localhost:80"],
            "no carrier for 'rsocket+tpc://localhost:80': the carrier is one of memory, tcp, ",
        ),
        (
            ["rsocket+tcp://localhost"],
            "there is no port in 'rsocket+tcp://localhost': expected rsocket+tcp://host:port\n",
        ),
        (["rsocket+tcp://:80"], "there is no host in 'rsocket+tcp://:80': expected rsocket+tcp://host:port\n"),
        (
            ["aqueduct+tls://localhost", "--tag", "x"],
            "there is no port in 'aqueduct+tls://localhost': expected aqueduct+tls://host:port\n",
        ),
        (
            ["aqueduct://localhost", "--tag", "x"],
            "there is no port in 'aqueduct://localhost': expected aqueduct://host:port\n",
        ),
        (["aqueduct://localhost:0", "--tag", "x"], "port 0 is for listeners: expected aqueduct://host:port, got "),
        (["rsocket+tcp://localhost:80", "--ca", "x"], "--ca: tcp has no TLS, use +tls, +wss or +quic"),
        (["rsocket+tcp://localhost:80", "--data", "a", "--data", "b"], "only a channel takes more than one --data"),
        (["lumberjack://localhost:80"], "lumberjack:// takes no calls: `levada ship` sends lines"),
        (
            ["--data", "maop://x", "rsocket://localhost:80"],
            "write rsocket://localhost:80 before arguments that look like",
        ),
        (["rsocket+tcp://localhost:80", "--push"], "--push needs --metadata, and takes no --data"),
        (["rsocket+tcp://localhost:80", "--user", "me"], "--user needs --token-file FILE with the password"),
        (["rsocket+tcp://localhost:80", "--route", "a", "--metadata", "b"], "give either --metadata or --route"),
        (["rsocket+tcp://localhost:80", "--data", "@/no/such/file"], "cannot read /no/such/file"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], complaint: str
) -> None:
    code, out, err = call(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith(f"levada: {complaint}")
    assert err.count("\n") == 1


@pytest.mark.ci
def test_ctrl_c_cancels_the_request(url: str) -> None:
    process = subprocess.Popen(
        [*LEVADA, "call", url, "--route", "chan", "--channel"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("begun\n")
    process.stdin.flush()
    assert process.stdout.readline() == "begun\n"
    process.send_signal(signal.SIGINT)
    assert process.wait(250) == 130
    assert process.communicate() == ("", "levada: interrupted\n")


@pytest.mark.ci
@pytest.mark.parametrize("carrier", ["tls", "ws", "wss", "quic", "unix"])
@pytest.mark.parametrize("protocol", ["rsocket", pytest.param("reactivesocket", marks=pytest.mark.release)])
def test_every_carrier_of_both_dialects(
    protocol: str, carrier: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    secure = carrier in ("tls", "wss", "quic")
    path = os.path.relpath(tmp_path / "s") if carrier == "unix" else ""
    endpoint = Endpoint(
        protocol,
        *["--carrier", carrier],
        *(["--self-signed", str(tmp_path / "made")] if secure else []),
        *(["--path", path] if path else []),
    )
    try:
        assert endpoint.carrier == carrier
        where = endpoint.host if path else f"{endpoint.host}:{endpoint.port}"
        trusted = ["--ca", str(tmp_path / "made" / "ca.pem")] if secure else []
        got = call(capsys, f"{protocol}+{carrier}://{where}", "--route", "len", "--data", "1234567", *trusted)
        assert got == (0, "7\n", "")
    finally:
        assert endpoint.end() == (0, "")


@pytest.mark.ci
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_interop_ends_by_signals(number: signal.Signals) -> None:
    endpoint = Endpoint("rsocket")
    endpoint.process.send_signal(number)
    endpoint.process.wait(250)  # it does not wait for the end of standard input
    assert endpoint.end() == (0, "")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--carrier", "tls"], "--carrier tls needs --cert FILE, or --self-signed DIR to make one"),
        (["--carrier", "unix"], "--carrier unix needs --path SOCKET"),
        (["--key", "k"], "--key needs --cert"),
        (["--self-signed", "d", "--cert", "c"], "give either --self-signed or --cert and --key"),
        (["--host", "203.0.113.1"], "cannot listen at"),
    ],
)
def test_mistakes_in_the_arguments_of_interop(
    capsys: pytest.CaptureFixture[str], arguments: list[str], complaint: str
) -> None:
    assert cli.main(["interop", "rsocket", *arguments]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"levada: {complaint}")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("url", "option"),
    [("rsocket+tcp://localhost:80", "--tag"), ("maop://localhost:80", "--route"), ("aqueduct://localhost:80", "--id")],
)
def test_an_option_of_another_protocol_is_refused(capsys: pytest.CaptureFixture[str], url: str, option: str) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(["call", url, option, "5"])
    assert exit_.value.code == 2
    assert f"unrecognized arguments: {option} 5" in capsys.readouterr().err


def test_help_has_the_options_of_the_protocol_that_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, options in (
        (["--help"], {"--route", "--tag", "--id"}),
        (["maop://localhost:80", "--help"], {"--id"}),
        (["reactivesocket://localhost:80", "--help"], {"--route"}),
    ):
        with pytest.raises(SystemExit):
            cli.main(["call", *arguments])
        said = capsys.readouterr().out
        assert {option for option in ("--route", "--tag", "--id") if f"{option} " in said} == options
