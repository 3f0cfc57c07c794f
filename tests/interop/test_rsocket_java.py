"""rsocket-java, as a client: payloads at and above its largest frame both ways, and a drain that lets its streams end.

Maven fetches it from Maven Central when the tests run; without Maven they are skipped.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import trio

from levada.actors.rsocket import Request, connect, serve
from levada.framework import ActorSystem

pytestmark = [pytest.mark.release, pytest.mark.loopback]

HERE = Path(__file__).parent / "java"
LARGEST = 16_777_212  # octets of a frame, with its header of 6, that rsocket-java takes
ANSWERS = [LARGEST - 6, LARGEST - 5, LARGEST - 4, LARGEST - 3, LARGEST - 2, 17_000_000, 40_000_000]


@pytest.fixture(scope="module")
def classpath(tmp_path_factory: pytest.TempPathFactory) -> str:
    """rsocket-core and rsocket-transport-netty with all that they need."""
    maven = shutil.which("mvn")
    if maven is None or shutil.which("java") is None:
        pytest.skip("mvn and java are needed for rsocket-java")
    folder = tmp_path_factory.mktemp("java")
    shutil.copy(HERE / "pom.xml", folder)
    command = [maven, "-q", "-B", "dependency:build-classpath", "-Dmdep.outputFile=classpath"]
    made = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"Maven got no rsocket-java: {made.stdout[-500:]}{made.stderr[-500:]}")
    return (folder / "classpath").read_text(encoding="utf-8")


def peer(classpath: str, url: str, *arguments: object) -> list[str]:
    port = url.rpartition(":")[2]
    return ["java", "-cp", classpath, str(HERE / "Peer.java"), port, *map(str, arguments)]


async def run(classpath: str, url: str, *arguments: object) -> list[str]:
    done = await trio.run_process(peer(classpath, url, *arguments), capture_stdout=True)
    return str(done.stdout.decode()).splitlines()


@pytest.mark.rule("RS-86")
async def test_answers_at_the_edge_of_a_frame_arrive(classpath: str) -> None:
    """One octet more than 16,777,212 and it would drop the frame in silence; so larger payloads come in fragments."""

    async def handler(request: Request) -> bytes:
        return bytes(int(request.data))

    async with ActorSystem() as system, serve(system, "rsocket+tcp://127.0.0.1:0", handler) as listener:
        assert await run(classpath, listener.url, "ask", 0, *ANSWERS) == [str(size) for size in ANSWERS]


@pytest.mark.rule("RS-78")
@pytest.mark.parametrize("fragment", [0, 1 << 20], ids=["in its largest frames", "in fragments"])
async def test_large_payloads_go_both_ways(classpath: str, fragment: int) -> None:
    async def echo(request: Request) -> Any:
        return request.payload

    sizes = [1000, LARGEST - 6] if not fragment else [LARGEST - 6, LARGEST, 17_000_000, 40_000_000]
    async with ActorSystem() as system, serve(system, "rsocket+tcp://127.0.0.1:0", echo) as listener:
        assert await run(classpath, listener.url, "echo", fragment, *sizes) == [f"{size} the same" for size in sizes]


@pytest.mark.rule("RS-31")
async def test_a_drain_lets_its_streams_end(classpath: str) -> None:
    """It fails its open streams when it gets CONNECTION_CLOSE, and so gets it behind the last of them."""
    go_on = trio.Event()
    begun = trio.Event()

    async def handler(request: Request) -> Any:
        async def numbers() -> AsyncIterator[bytes]:
            yield b"first"
            begun.set()
            await go_on.wait()
            for _ in range(100):
                yield b"more"

        return numbers()

    lines: list[str] = []
    async with (
        ActorSystem() as system,
        serve(system, "rsocket+tcp://127.0.0.1:0", handler) as listener,
        trio.open_nursery() as nursery,
        connect(system, listener.url) as other,
    ):

        @nursery.start_soon
        async def java() -> None:
            lines.extend(await run(classpath, listener.url, "stream", 0))

        await begun.wait()
        nursery.start_soon(listener.aclose)
        # Another client learns by it that the drain has begun: it has no streams.
        await other.terminated()
        go_on.set()
    assert lines == ["first", *["more"] * 100, "complete 101", "closed"]
