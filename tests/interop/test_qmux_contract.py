"""Our client goes through our own contract, over each carrier; and the command that serves it."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import trio
from tests.interop.qmux_client import EXPECTED, go_through

from levada.actors.interop import qmux as contract
from levada.actors.interop.certificates import SelfSigned, make_certificates
from levada.framework import ActorSystem
from levada.transports.carriers import TlsConfig
from levada.transports.carriers.websocket_config import WebSocketConfig
from levada.transports.qmux import QmuxConfig
from levada.transports.qmux.entry import dial

pytestmark = pytest.mark.loopback

PATIENCE = 40.0  # seconds


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> SelfSigned:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


def trusting(carrier: str, certificates: SelfSigned, *names: str) -> QmuxConfig:
    tls = TlsConfig(ca=certificates.ca, server_name="localhost")
    below: dict[str, Any] = {"tls": tls, "wss": WebSocketConfig(tls=tls)}
    return QmuxConfig(protocols=names, below=below.get(carrier))


@pytest.mark.ci
@pytest.mark.parametrize("carrier", contract.CARRIERS)
@pytest.mark.parametrize("name", contract.NAMES)
async def test_the_whole_contract(carrier: str, name: str, certificates: SelfSigned, tmp_path: Path) -> None:
    tls = None
    if carrier in ("tls", "wss"):
        tls = TlsConfig(certificate=certificates.certificate, key=certificates.key)
    where = str(tmp_path / "socket") if carrier == "unix" else "127.0.0.1:0"
    config = trusting(carrier, certificates, name)
    async with (
        ActorSystem() as system,
        contract.serve(system, carrier, where, tls, argparse.Namespace()) as listener,
    ):
        assert listener.url.startswith(f"qmux+{carrier}://")
        with trio.fail_after(PATIENCE):
            assert await go_through(lambda: dial(listener.url, config)) == EXPECTED


@pytest.mark.ci
@pytest.mark.parametrize("carrier", ["unix", "tcp"])
async def test_levada_interop_qmux(carrier: str, certificates: SelfSigned, tmp_path: Path) -> None:
    """One stream, which shows that the command serves what it says."""
    path = ["--path", str(tmp_path / "socket")] if carrier == "unix" else []
    command = [sys.executable, "-m", "levada.actors", "interop", "qmux", "--carrier", carrier, *path]
    pipe = subprocess.PIPE
    async with await trio.open_file(tmp_path / "errors", "wb") as errors:
        process = await trio.lowlevel.open_process(
            [*command, "--until-stdin-closes"], stdin=pipe, stdout=pipe, stderr=errors.wrapped
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            with trio.fail_after(PATIENCE):
                word, host, port, said = (await process.stdout.receive_some()).split()
                assert (word, said) == (b"LISTENING", carrier.encode())
                where = host.decode() if carrier == "unix" else f"{host.decode()}:{port.decode()}"
                async with dial(
                    f"qmux+{carrier}://{where}", trusting(carrier, certificates, "qmux-02.interop")
                ) as client:
                    stream = await client.open_stream()
                    stream.send_nowait(b"!send 3\n", fin=True)
                    assert await stream.receive_some() == bytes(range(3))
                await process.stdin.aclose()
                assert await process.wait() == 0
        finally:
            process.kill()
            with trio.CancelScope(shield=True):
                await process.wait()
                await process.stdout.aclose()
    assert (tmp_path / "errors").read_bytes() == b""
