"""A gibibyte in one body takes no more memory than a mebibyte."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from levada.actors.authenticators import BearerTokens
from levada.actors.maop import Call, Handler, HandlerSpec, connect, serve
from levada.framework import ActorSystem, Identity

CHUNK = bytes(range(256)) * 4096


def resident() -> int:
    """Octets of memory that this process uses now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.release
@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc for the memory in use")
@pytest.mark.parametrize("defined", [True, False])
async def test_a_gibibyte_with_flat_memory(defined: bool) -> None:
    """Blocks go out as the reader takes them, of known length and of undefined."""
    digest = hashlib.sha256()
    most = 0

    async def take(call: Call) -> None:
        nonlocal most
        async for chunk in call:
            digest.update(chunk)
            most = max(most, resident())

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(1024):
            yield CHUNK

    spec = HandlerSpec(streaming=True, allow_undefined_length=True, max_payload=2**40)
    async with (
        ActorSystem() as system,
        serve(
            system,
            "maop+memory://soak",
            {100: Handler(take, spec=spec)},
            authenticate=BearerTokens.of({b"x": Identity("c")}),
        ) as listener,
        connect(system, listener.url, token=b"x") as peer,
    ):
        before = resident()
        await peer.message(100, chunks(), length=2**30 if defined else None)
        assert listener.metrics.upload_latency_ms.count == 1
    expected = hashlib.sha256()
    for _ in range(1024):
        expected.update(CHUNK)
    assert digest.digest() == expected.digest()
    assert most - before < 48 * 2**20
