"""``levada interop aqueduct`` against a peer that knows no Aqueduct: octets written by hand from the protocol's page, on bare QUIC streams.

Streams are named by their QUIC numbers: 0, 4, … and 2, 6, … are the client's (this test's), 1, 5, … and 3, 7, … the server's, the
first of each pair for those with two directions. Channels: 0 is the entrypoint, 1 a sender for the server, 5 a oneshot one, 8 a receiver.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import attrs
import pytest
import trio

from levada.framework.errors import CarrierError, ConnectionLost, StreamWasReset
from levada.transports.quic import QuicConfig, QuicConnection, QuicStream, dial

pytestmark = [pytest.mark.loopback, pytest.mark.ci]

VERSION = "ef505fa6600f408e41515545445543540b302e302e302d4146544552"
CONNECTION_CONTROL = "0100"


@attrs.frozen
class Endpoint:
    url: str
    trust: QuicConfig


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    folder = tmp_path_factory.mktemp("certificates")
    command = [sys.executable, "-m", "levada.actors", "interop", "aqueduct", "--self-signed", str(folder)]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [*command, "--until-stdin-closes"], stdin=pipe, stdout=pipe, stderr=pipe, text=True
    ) as server:
        assert server.stdout is not None
        word, host, port, carrier = server.stdout.readline().split()
        assert (word, host, carrier) == ("LISTENING", "127.0.0.1", "quic")
        yield Endpoint(f"quic://{host}:{port}", QuicConfig(alpn=("aqueduct",), ca=folder / "ca.pem"))
        _, said = server.communicate(timeout=250)
        assert server.returncode == 0
        assert [line for line in said.splitlines() if "No common ALPN protocols" not in line] == []


class Peer:
    """Sends octets and keeps those that come, by stream."""

    def __init__(self, connection: QuicConnection) -> None:
        self.connection = connection
        self._streams: dict[int, QuicStream] = {}
        self._came: dict[int, str] = {}
        self._more = trio.Event()

    async def read_all(self, nursery: trio.Nursery) -> None:
        try:
            while True:
                self.read(nursery, await self.connection.accept_stream())
        except CarrierError:
            pass

    def read(self, nursery: trio.Nursery, stream: QuicStream) -> None:
        self._streams[stream.stream_id] = stream
        self._came[stream.stream_id] = ""
        nursery.start_soon(self._read, stream)

    async def _read(self, stream: QuicStream) -> None:
        try:
            while data := await stream.receive_some():
                self._note(stream, data.hex())
            self._note(stream, " end")
        except StreamWasReset as error:
            self._note(stream, f" reset {error.code}")
        except CarrierError:
            pass

    def _note(self, stream: QuicStream, what: str) -> None:
        self._came[stream.stream_id] += what
        self._more.set()
        self._more = trio.Event()

    async def gets(self, stream_id: int, wanted: str) -> None:
        """Wait until so much has come on a stream; it has to be just that."""
        with trio.fail_after(250):
            while len(self._came.get(stream_id, "")) < len(wanted):
                await self._more.wait()
        assert self._came[stream_id] == wanted, f"stream {stream_id}"

    async def opens(self, octets: str, *, unidirectional: bool = True) -> QuicStream:
        stream = await self.connection.open_stream(unidirectional=unidirectional)
        stream.send_nowait(bytes.fromhex(octets))
        return stream

    def sends(self, stream_id: int, octets: str, *, end: bool = False) -> None:
        self._streams[stream_id].send_nowait(bytes.fromhex(octets), fin=end)

    def resets(self, stream_id: int, code: int) -> None:
        self._streams[stream_id].reset(code)


@asynccontextmanager
async def connected(endpoint: Endpoint) -> AsyncIterator[Peer]:
    """Greet, and check the greeting: ConnectionControl comes back, then the server opens the entrypoint's control stream."""
    async with dial(endpoint.url, endpoint.trust) as connection, trio.open_nursery() as nursery:
        peer = Peer(connection)
        nursery.start_soon(peer.read_all, nursery)
        peer.read(nursery, await peer.opens(VERSION + CONNECTION_CONTROL, unidirectional=False))
        await peer.gets(0, VERSION + CONNECTION_CONTROL)
        await peer.gets(1, "0200")
        yield peer
        nursery.cancel_scope.cancel()


async def test_a_sender_at_index_0_gets_the_payload_and_is_finished(endpoint: Endpoint) -> None:
    """The scenario of the protocol's page, octet for octet."""
    async with connected(endpoint) as peer:
        await peer.opens("0300000101026869")
        await peer.gets(1, "0200" + "050101")
        await peer.gets(3, "03010000026869 end")
        await peer.gets(5, "0201" + "0701 end")
        peer.sends(5, "0501010800", end=True)


async def test_version_in_front_of_everything_until_the_server_has_greeted(endpoint: Endpoint) -> None:
    async with dial(endpoint.url, endpoint.trust) as connection, trio.open_nursery() as nursery:
        peer = Peer(connection)
        nursery.start_soon(peer.read_all, nursery)
        await peer.opens(VERSION + "0300000101026869")
        peer.read(nursery, await peer.opens(VERSION + CONNECTION_CONTROL, unidirectional=False))
        await peer.gets(0, VERSION + CONNECTION_CONTROL)
        await peer.gets(3, "03010000026869 end")
        nursery.cancel_scope.cancel()


async def test_a_receiver_is_consumed_until_it_finishes_and_counted_if_there_is_a_sender(endpoint: Endpoint) -> None:
    async with connected(endpoint) as peer:
        await peer.opens("0300000201080178")  # a sender, 1, and a receiver, 8; "x"
        await peer.gets(5, "0201")
        await peer.gets(3, "030100000178")
        await peer.gets(9, "0208")
        words = await peer.opens("030800000161" + "030801000162")
        words.send_nowait(b"", fin=True)
        await peer.gets(9, "0208" + "050102")
        peer.sends(9, "0702", end=True)
        await peer.gets(9, "0208" + "050102" + "0800 end")
        await peer.gets(3, "030100000178" + "030101000132 end")  # "2"
        await peer.gets(5, "0201" + "0702 end")


async def test_a_receiver_alone_is_only_consumed(endpoint: Endpoint) -> None:
    async with connected(endpoint) as peer:
        await peer.opens("03000001080178")
        await peer.gets(5, "0208")
        await peer.opens("030800000161")
        peer.sends(5, "0701", end=True)
        await peer.gets(5, "0208" + "050101" + "0800 end")


async def test_datagrams_both_ways_in(endpoint: Endpoint) -> None:
    """An unreliable message on the entrypoint, and an unreliable one on a receiver; each is declared, and acked as unreliable."""
    async with connected(endpoint) as peer:
        await peer.connection.send_datagram(bytes.fromhex("0300000201080178"))
        await peer.gets(9, "0208")
        await peer.connection.send_datagram(bytes.fromhex("030800000161"))
        peer.sends(9, "0401" + "0700", end=True)
        await peer.gets(9, "0208" + "060101" + "0800 end")
        await peer.gets(3, "030100000178" + "030101000131 end")
        peer.sends(1, "0401")
        await peer.gets(1, "0200" + "060101")


async def test_a_oneshot_sender_gets_the_payload_only(endpoint: Endpoint) -> None:
    async with connected(endpoint) as peer:
        await peer.opens("0300000105026869")
        await peer.gets(3, "03050000026869 end")
        await peer.gets(5, "0205" + "0701 end")


async def test_a_cancelled_receiver_cancels_the_sender(endpoint: Endpoint) -> None:
    async with connected(endpoint) as peer:
        await peer.opens("0300000201080178")
        await peer.gets(3, "030100000178")
        peer.sends(5, "050101")  # the server may give up its stream once it knows that we have seen it
        await peer.gets(9, "0208")
        peer.resets(9, 1)
        await peer.gets(9, "0208" + "0800 end")
        await peer.gets(5, "0201 reset 1")


async def test_a_sender_elsewhere_is_cancelled_and_a_message_without_channels_is_taken(endpoint: Endpoint) -> None:
    async with connected(endpoint) as peer:
        entry = await peer.opens("0300000208010178")  # the receiver is at index 0, the sender at index 1
        entry.send_nowait(bytes.fromhex("0300010003" + "616263"))
        await peer.gets(1, "0200" + "050102")
        await peer.gets(5, "0208")
        peer.sends(5, "0700", end=True)
        await peer.gets(5, "0208" + "0800 end")
        # The control stream of the sender is given up once this side is known to have seen it: a datagram that
        # never was is declared for that (D-22), and nacked here.
        await peer.gets(9, "0201" + "0401")
        peer.sends(9, "06020001")
        await peer.gets(9, "0201" + "0401 reset 1")


async def test_a_megabyte(endpoint: Endpoint) -> None:
    async with connected(endpoint) as peer:
        octets = "03000001" + "01" + "808040" + "5a" * 2**20
        await peer.opens(octets)
        await peer.gets(3, "03010000" + "808040" + "5a" * 2**20 + " end")


@pytest.mark.parametrize(
    ("octets", "rule"),
    [
        ("0a", "E-6"),  # no such frame
        ("030000018100", "E-1"),  # an attachment that is cut
        ("030100000178", "E-18"),  # on a channel that flows the other way
        ("03000001020178", "E-19"),  # a channel that the server would have to mint
        ("0300000001780300000001" + "78", "E-20"),  # the same number twice
    ],
)
async def test_a_broken_rule_closes_the_connection_with_code_1(endpoint: Endpoint, octets: str, rule: str) -> None:
    async with connected(endpoint) as peer:
        await peer.opens(octets)
        with trio.fail_after(250):
            reason = await peer.connection.wait_closed()
        assert (reason.code, reason.by_peer) == (1, True)
        assert rule in reason.text


async def test_another_protocol_name_is_refused(endpoint: Endpoint) -> None:
    with pytest.raises(ConnectionLost):
        async with dial(endpoint.url, attrs.evolve(endpoint.trust, alpn=("h3",))):
            pass
