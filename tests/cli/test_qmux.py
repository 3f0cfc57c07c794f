"""Aqueduct and MAOP over QMux on the command line: ``levada interop``, ``levada serve`` and ``levada call``."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from levada.actors import cli

pytestmark = pytest.mark.loopback

LEVADA = (sys.executable, "-m", "levada.actors")
CARRIERS = ["unix", *(pytest.param(name, marks=pytest.mark.ci) for name in ("tcp", "tls", "ws", "wss"))]


@contextmanager
def running(folder: Path, *arguments: str) -> Iterator[str]:
    """Run a command that serves; its first words."""
    with subprocess.Popen([*LEVADA, *arguments], stdout=subprocess.PIPE, cwd=folder, text=True) as server:
        assert server.stdout is not None
        try:
            yield server.stdout.readline().strip()
            server.terminate()
            server.communicate(timeout=250)
            assert server.returncode in (0, 130)
        finally:
            server.kill()


def trust(carrier: str, folder: Path) -> list[str]:
    return ["--ca", str(folder / "ca.pem")] if carrier in ("tls", "wss") else []


@pytest.mark.ci
@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize(
    ("protocol", "options", "arguments"),
    [("aqueduct", [], []), ("maop", ["--allow-anonymous"], ["--id", "101"])],
    ids=["aqueduct", "maop"],
)
def test_interop_and_call(
    protocol: str,
    options: list[str],
    arguments: list[str],
    carrier: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    where = ["--path", "socket"] if carrier == "unix" else ["--self-signed", "."]
    with running(tmp_path, "interop", protocol, "--carrier", carrier, *where, *options) as said:
        word, host, port, over = said.split()
        assert (word, over) == ("LISTENING", carrier)
        address = host if carrier == "unix" else f"{host}:{port}"
        url = f"{protocol}+{carrier}://{address}"
        code = cli.main(["call", url, *trust(carrier, tmp_path), *arguments, "--data", "hällo"])
        assert (code, capsys.readouterr()) == (0, ("hällo\n", ""))


@pytest.mark.ci
@pytest.mark.parametrize("carrier", CARRIERS)
def test_serve_and_call(carrier: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "desk.py").write_text(
        "from levada.framework import OneshotSender, message\n"
        "@message('tests.qmux.Ask')\n"
        "class Ask:\n"
        "    text: str\n"
        "    answer: OneshotSender[str]\n"
        "async def shout(m: Ask) -> None:\n"
        "    m.answer.send(m.text.upper())\n"
    )
    where = f"{tmp_path}/socket" if carrier == "unix" else "127.0.0.1:0"
    secure = ["--self-signed", "."] if carrier in ("tls", "wss") else []
    with running(tmp_path, "serve", "desk:shout", "--url", f"aqueduct+{carrier}://{where}", *secure) as said:
        word, url = said.split()
        assert (word, url.partition("://")[0]) == ("SERVING", f"aqueduct+{carrier}")
        asked = ["--tag", "tests.qmux.Ask", "--data", '["hello"]']
        code = cli.main(["call", url, *trust(carrier, tmp_path), *asked])
        assert (code, capsys.readouterr()) == (0, ("HELLO\n", ""))


def test_a_certificate_is_asked_for_and_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["interop", "aqueduct", "--carrier", "tls"]) == 2
    assert capsys.readouterr().err.startswith("levada: --carrier tls needs --cert FILE")
    assert cli.main(["call", "maop+unix:///nowhere", "--id", "1", "--insecure"]) == 2
    assert capsys.readouterr().err.startswith("levada: --insecure: qmux+unix has no TLS")
    assert cli.main(["call", f"maop+unix://{tmp_path}/nobody", "--id", "1"]) == 2
    assert "nobody" in capsys.readouterr().err
