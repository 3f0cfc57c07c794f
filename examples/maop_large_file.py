"""A large file by MAOP: its length is announced and approved first, it travels in blocks, and it is stored whole or not at all."""

from __future__ import annotations

import hashlib
import random
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from uuid import uuid4

import trio

from levada.actors.authenticators import BearerTokens
from levada.actors.maop import Call, Handler, HandlerSpec, OperationRefused, connect, serve
from levada.framework import ActorSystem, Identity

STORE = 100
MIB = 2**20


class Vault:
    """Keeps files; what does not arrive whole leaves nothing behind."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.stored: list[str] = []

    async def store(self, call: Call) -> None:
        part = self.folder / f"{call.stream_id}.part"
        digest = hashlib.sha256()
        async with await trio.open_file(part, "wb") as file:
            async for chunk in call:  # as they come, at the speed of this loop
                digest.update(chunk)
                await file.write(chunk)
        # The loop has ended, so all octets that were announced are here. Before that nothing counts.
        part.rename(self.folder / digest.hexdigest())
        self.stored.append(digest.hexdigest())

    async def undo(self, call: Call, reason: str) -> None:
        (self.folder / f"{call.stream_id}.part").unlink(missing_ok=True)


async def broken_off(path: Path) -> AsyncIterator[bytes]:
    """Half of a file, and then no more."""
    with path.open("rb") as file:
        for _ in range(16):
            yield file.read(MIB)
    raise OSError("the disk is gone")


async def main(big: Path, bigger: Path, vault: Vault) -> None:
    spec = HandlerSpec(requests=False, streaming=True, max_payload=64 * MIB)
    handlers = {STORE: Handler(vault.store, spec=spec, on_cancel=vault.undo)}
    async with (
        ActorSystem() as system,
        serve(
            system, "maop+memory://vault", handlers, authenticate=BearerTokens.of({b"secret": Identity("office-1")})
        ) as listener,
        connect(system, listener.url, token=b"secret") as peer,
    ):
        key = uuid4().bytes
        await peer.message(STORE, big, idempotency=key)
        print("32 MiB stored")
        # After a failure nobody knows whether the other side was through; with the same key it is safe to send it again.
        await peer.message(STORE, big, idempotency=key)
        print(f"sent again with the same key: stored {len(vault.stored)} time")
        try:
            await peer.message(STORE, bigger)
        except OperationRefused as refused:
            print("65 MiB:", refused)
        try:
            await peer.message(STORE, broken_off(big), length=32 * MIB)
        except OSError as error:
            print("half-way:", error)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        files = [Path(name, text) for text in ("backup", "archive", "vault")]
        files[0].write_bytes(random.Random(1).randbytes(32 * MIB))
        files[1].write_bytes(bytes(65 * MIB))
        files[2].mkdir()
        trio.run(main, files[0], files[1], Vault(files[2]))
        assert [path.name for path in files[2].iterdir()] == [hashlib.sha256(files[0].read_bytes()).hexdigest()]
        print("in the vault there is 1 file, as it was sent")
