"""QMux with other implementations at the other end, as server and as client: the Rust crate qmux, and npm's @moq/qmux.

Each server keeps the contract of ``levada interop qmux``, and each client goes through it and says what it found.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
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

pytestmark = [pytest.mark.loopback, pytest.mark.release]

HERE = Path(__file__).parent
SOURCES = HERE / "qmux_rust"
PATIENCE = 60.0  # seconds

RUST = [("rust", carrier) for carrier in ("tcp", "tls", "ws", "wss")]
NODE = [("node", carrier) for carrier in ("ws", "wss")]


@attrs.frozen
class Peer:
    """How the other end is started: ``serve CARRIER [CERT KEY]``, and ``call CARRIER PORT [CA]``."""

    command: list[str]
    environment: dict[str, str]


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> SelfSigned:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def rust(peer_folder: Callable[[str, object], Path]) -> Peer:
    """The program of the crate, built by cargo."""
    if shutil.which("cargo") is None:
        pytest.skip("cargo is needed to build the peer of the crate qmux")
    names = ("Cargo.toml", "Cargo.lock")
    target = peer_folder("qmux", [(SOURCES / name).read_text() for name in names])
    manifest = ["--locked", "--manifest-path", str(SOURCES / "Cargo.toml")]
    fetched = subprocess.run(["cargo", "fetch", *manifest], capture_output=True, text=True)
    if fetched.returncode:
        pytest.skip(f"the crate qmux cannot be fetched: {fetched.stderr.strip()[-300:]}")
    command = ["cargo", "build", "--quiet", *manifest, "--target-dir", str(target)]
    subprocess.run(command, check=True)
    return Peer([str(target / "debug" / "qmux-peer")], {})


@pytest.fixture(scope="module")
def node(node_packages: Callable[..., Path]) -> Peer:
    """The program of the npm package; Node runs it as it is."""
    packages = node_packages("@moq/qmux@0.3.3", "ws@8.23.0")
    return Peer(["node", str(HERE / "node" / "qmux.cjs")], {"NODE_PATH": str(packages)})


@pytest.fixture
def peer(request: pytest.FixtureRequest, name: str) -> Peer:
    found: Peer = request.getfixturevalue(name)
    return found


@asynccontextmanager
async def their_server(peer: Peer, carrier: str, certificates: SelfSigned) -> AsyncIterator[int]:
    """A server of theirs; its port. It may have ended before the block does: a crate's server cuts a transport only so."""
    files = [str(certificates.certificate), str(certificates.key)] if carrier in ("tls", "wss") else []
    pipe = subprocess.PIPE
    command = [*peer.command, "serve", carrier, *files]
    environment = {**os.environ, **peer.environment}
    process = await trio.lowlevel.open_process(command, stdin=pipe, stdout=pipe, env=environment)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        line = await process.stdout.receive_some()
        assert line.startswith(b"LISTENING ")
        yield int(line.split()[1])
    finally:
        with trio.CancelScope(shield=True):
            await process.stdin.aclose()
            await process.wait()
            await process.stdout.aclose()


@pytest.mark.parametrize(("name", "carrier"), RUST + NODE)
async def test_our_client_goes_through_their_server(peer: Peer, carrier: str, certificates: SelfSigned) -> None:
    tls = TlsConfig(ca=certificates.ca, server_name="localhost")
    below: dict[str, Any] = {"tls": tls, "wss": WebSocketConfig(tls=tls)}
    config = QmuxConfig(protocols=("qmux-02.interop",), below=below.get(carrier))
    async with their_server(peer, carrier, certificates) as port:
        with trio.fail_after(PATIENCE):
            assert await go_through(lambda: dial(f"qmux+{carrier}://127.0.0.1:{port}", config)) == EXPECTED


@pytest.mark.parametrize(("name", "carrier"), RUST + NODE)
async def test_their_client_goes_through_our_server(peer: Peer, carrier: str, certificates: SelfSigned) -> None:
    secure = carrier in ("tls", "wss")
    tls = TlsConfig(certificate=certificates.certificate, key=certificates.key) if secure else None
    environment = {**os.environ, **peer.environment}
    async with (
        ActorSystem() as system,
        contract.serve(system, carrier, "127.0.0.1:0", tls, argparse.Namespace()) as listener,
    ):
        port = listener.url.rpartition(":")[2]
        command = [*peer.command, "call", carrier, port, *([str(certificates.ca)] if secure else [])]
        with trio.fail_after(PATIENCE):
            done = await trio.run_process(command, capture_stdout=True, env=environment)
    assert json.loads(done.stdout) == EXPECTED
