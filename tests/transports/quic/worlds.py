"""``python -m tests.transports.quic.worlds FOLDER FIRST COUNT``: run worlds with QUIC; print the digest of each seed, and its virtual seconds."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import trio
from tests.transports.quic.conftest import Certificate

from levada.framework.errors import LevadaError
from levada.framework.testing.simulation import Faults, World, simulate
from levada.transports.carriers import Stream
from levada.transports.quic import QuicConfig, QuicIncoming, dial, listen

__all__ = ["FAULTS", "Echoes"]

FAULTS = Faults(strikes=8, every=2.0)


class Echoes:
    """A server of echoes and a client on two machines. The client sends its data again on a new connection until all of it has come back.

    Args:
        certificate: of the server, which has the name ``server``.
        pieces: how many pieces are sent.
        size: bytes of each.
    """

    def __init__(self, certificate: Certificate, *, pieces: int = 10, size: int = 4_000) -> None:
        self._server = QuicConfig(certificate=certificate.certificate, key=certificate.private_key, secret=bytes(32))
        self._client = QuicConfig(ca=certificate.certificate, idle_timeout=5.0, handshake_timeout=3.0)
        self._pieces = [bytes([number]) * size for number in range(pieces)]
        self.errors: list[str] = []
        """Why connections have ended."""

    async def run(self, world: World) -> None:
        """Run to the end of the client."""
        await world.start("echo", self.serve, machine="server", restart=0.5)
        client = await world.start("client", self.ask, machine="client")
        assert await client.wait() == 0

    async def serve(self) -> None:
        """Send everything back."""
        async with listen("quic://0.0.0.0:4433", self._server) as listener, trio.open_nursery() as nursery:
            while True:
                nursery.start_soon(self._answer, await listener.accept())

    async def _answer(self, incoming: QuicIncoming) -> None:
        try:
            async with incoming.accept() as connection:
                await connection.handshake()
                while True:
                    async with await connection.accept_stream() as stream:
                        await stream.send_all(await _whole(stream))
                        await stream.send_eof()
        except LevadaError:
            pass

    async def ask(self) -> None:
        """Send each piece until it has come back."""
        pieces = list(self._pieces)
        while pieces:
            try:
                async with dial("quic://server:4433", self._client) as connection:
                    while pieces:
                        async with await connection.open_stream() as stream:
                            await stream.send_all(pieces[0])
                            await stream.send_eof()
                            assert await _whole(stream) == pieces[0]
                        pieces.pop(0)
                        await trio.sleep(1)
            except LevadaError as error:
                self.errors.append(str(error))
                await trio.sleep(0.5)


async def _whole(stream: Stream) -> bytes:
    data = b""
    while piece := await stream.receive_some():
        data += piece
    return data


def main(folder: str, first: str, count: str) -> None:
    """Run worlds."""
    logging.disable(logging.CRITICAL)
    certificate = Certificate(Path(folder, "certificate.pem"), Path(folder, "key.pem"))
    for seed in range(int(first), int(first) + int(count)):
        found = simulate(Echoes(certificate).run, seeds=[seed], machines=["server", "client"], faults=FAULTS)
        print(seed, found.digests[seed], found.seconds, found.strikes, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
