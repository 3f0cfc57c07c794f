"""One end of QUIC on asyncio, with aioquic or qh3, for `test_quic_peers`; run as a program.

``quic_peer.py ENGINE serve FOLDER`` prints its port and echoes streams and datagrams; ``quic_peer.py ENGINE call FOLDER PORT`` has
20 streams and a datagram echoed and prints ``ok``.
"""

from __future__ import annotations

import asyncio
import importlib
import sys
from pathlib import Path
from typing import Any


async def echo(reader: Any, writer: Any) -> None:
    writer.write(await reader.read())
    writer.write_eof()


async def serve(engine: str, folder: Path) -> None:
    events = importlib.import_module(f"{engine}.quic.events")
    library = importlib.import_module(f"{engine}.asyncio")

    class Peer(library.QuicConnectionProtocol):  # type: ignore[misc,name-defined]  # the library is known at run time only
        def quic_event_received(self, event: Any) -> None:
            if isinstance(event, events.DatagramFrameReceived):
                self._quic.send_datagram_frame(event.data)
                self.transmit()
            super().quic_event_received(event)

    configuration = importlib.import_module(f"{engine}.quic.configuration").QuicConfiguration(
        is_client=False, alpn_protocols=["levada"], max_datagram_frame_size=65_535
    )
    configuration.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    tasks = set()

    def opened(reader: Any, writer: Any) -> None:
        task = asyncio.get_running_loop().create_task(echo(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    # With Retry, qh3 may send as much as it likes. Without, 2.0 and 2.1 fail at the limit for addresses that are not validated, a thirtieth
    # of the connections for good.
    server = await library.serve(
        "127.0.0.1", 0, configuration=configuration, create_protocol=Peer, stream_handler=opened, retry=engine == "qh3"
    )
    print(server._transport.get_extra_info("sockname")[1], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


async def call(engine: str, folder: Path, port: int) -> None:
    events = importlib.import_module(f"{engine}.quic.events")
    library = importlib.import_module(f"{engine}.asyncio")
    datagram: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    class Peer(library.QuicConnectionProtocol):  # type: ignore[misc,name-defined]  # as above
        def quic_event_received(self, event: Any) -> None:
            if isinstance(event, events.DatagramFrameReceived) and not datagram.done():
                datagram.set_result(event.data)
            super().quic_event_received(event)

    configuration = importlib.import_module(f"{engine}.quic.configuration").QuicConfiguration(
        is_client=True, alpn_protocols=["levada"], max_datagram_frame_size=65_535, server_name="localhost"
    )
    configuration.load_verify_locations(cafile=str(folder / "ca.pem"))
    configuration.load_cert_chain(str(folder / "cert.pem"), str(folder / "key.pem"))
    async with library.connect("127.0.0.1", port, configuration=configuration, create_protocol=Peer) as client:

        async def one(n: int) -> None:
            data = bytes([n]) * (10_000 * n + 1)
            reader, writer = await client.create_stream()
            writer.write(data)
            writer.write_eof()
            assert await reader.read() == data

        await asyncio.gather(*(one(n) for n in range(20)))
        client._quic.send_datagram_frame(b"datagram")
        client.transmit()
        assert await asyncio.wait_for(datagram, 5) == b"datagram"
        client.request_key_update()
        await one(3)
    print("ok", flush=True)


if __name__ == "__main__":
    engine, role, folder, *rest = sys.argv[1:]
    asyncio.run(serve(engine, Path(folder)) if role == "serve" else call(engine, Path(folder), int(rest[0])))
