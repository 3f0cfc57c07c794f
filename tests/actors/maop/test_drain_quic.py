"""The end of a listener on a real QUIC socket, which its connections share."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from levada.actors.authenticators import BearerTokens
from levada.actors.interop.certificates import make_certificates
from levada.actors.maop import Call, OperationFailed, PeerConfig, connect, serve
from levada.framework import ActorSystem, Identity
from levada.framework.errors import ConnectionClosed, ConnectionLost
from levada.transports.maop import MaopConfig, TimesConfig
from levada.transports.quic import QuicConfig

pytestmark = pytest.mark.loopback


@pytest.mark.ci  # the time that the drain allows passes
@pytest.mark.rule("MA-92")
async def test_ma92_what_runs_when_a_listener_ends_may_finish(tmp_path: Path) -> None:
    """The request that runs is answered, the one that does not end in time fails by SHUTDOWN, and nothing new begins."""
    made = make_certificates(tmp_path)
    short_runs, endless_runs, leave = trio.Event(), trio.Event(), trio.Event()
    said: dict[int, object] = {}

    async def short(call: Call) -> bytes:
        short_runs.set()
        await leave.wait()
        return b"done"

    async def endless(call: Call) -> bytes:
        endless_runs.set()
        await trio.sleep_forever()
        return b""

    server = PeerConfig(
        carrier=QuicConfig(certificate=made.certificate, key=made.key),
        core=MaopConfig(times=TimesConfig(drain_timeout=2.0)),
    )
    client = PeerConfig(carrier=QuicConfig(ca=made.ca))

    async with ActorSystem() as system, trio.open_nursery() as nursery:
        async with serve(
            system,
            "maop://127.0.0.1:0",
            {101: short, 102: endless},
            authenticate=BearerTokens.of({b"x": Identity("c")}),
            config=server,
        ) as listener:
            connecting = connect(system, listener.url, token=b"x", config=client)
            peer = await connecting.__aenter__()

            async def ask(msg_id: int) -> None:
                try:
                    said[msg_id] = await peer.request(msg_id, timeout=None)
                except OperationFailed as error:
                    said[msg_id] = (error.code, error.detail)

            nursery.start_soon(ask, 102)
            nursery.start_soon(ask, 101)
            await short_runs.wait()
            await endless_runs.wait()
            nursery.start_soon(_set_soon, leave)
        await peer.terminated()
        with pytest.raises((ConnectionLost, ConnectionClosed)):
            await peer.request(101)
        await connecting.__aexit__(None, None, None)
    assert said == {101: b"done", 102: (11, "SHUTDOWN")}


async def _set_soon(event: trio.Event) -> None:
    """Let the listener begin to end before."""
    for _ in range(100):
        await trio.lowlevel.checkpoint()
    event.set()
