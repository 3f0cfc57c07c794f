"""``levada interop maop`` against a peer that knows no MAOP: octets written by hand from the protocol's page, on bare QUIC streams.

Streams are named by their QUIC numbers: 0 is the authentication's, 4, 8, … and 2, 6, … are the client's (this test's), 1, 5, … the
control streams of the server. What is expected is a regular expression over hexadecimal digits; `TIMES` stands for a start and a duration.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import attrs
import pytest
import trio

from levada.framework.errors import CarrierError, ConnectionLost, StreamWasReset
from levada.transports.quic import QuicConfig, QuicConnection, QuicStream, dial

pytestmark = [pytest.mark.loopback, pytest.mark.ci]

AUTHENTICATION = "06 426561726572 0006 736563726574 01 0004 726f6c65 0006 696e67657374 05 312e302e30 04 61636d65"
"""Of the protocol's page: Bearer, "secret", role=ingest, 1.0.0, acme."""
APPROVED = "01 [0-9a-f]{32} 24 [0-9a-f]{72} 05312e302e30 06 6c6576616461 end"
"""A session, a name of 36 characters, 1.0.0, "levada"."""
TIMES = "[0-9a-f]{16} 0000[0-9a-f]{4}"
OCTET_STREAM = "18 6170706c69636174696f6e2f6f637465742d73747265616d"
UNDEFINED = "ffffffffffffffff"


def u64(number: int) -> str:
    return f"{number:016x}"


def proceed(stream_id: int) -> str:
    return f"03 0001 {u64(stream_id)}"


def refuse(stream_id: int, code: int) -> str:
    return f"04 0001 {u64(stream_id)} [0-9a-f]{{8}} {code:04x}"


def done(stream_id: int) -> str:
    return f"08 0001 {u64(stream_id)} {TIMES}"


def fail(stream_id: int, code: int) -> str:
    return f"07 {u64(stream_id)} {code:04x} ([0-9a-f]{{4}}) (?:[0-9a-f]{{2}})*"


def request(
    msg_id: int, length: str = u64(0), *, priority: int = 128, response: int = 0, timeout_ms: int = 5000
) -> str:
    return f"01 {msg_id:04x} {length} {priority:02x} {response:04x} {timeout_ms:08x}"


def message(msg_id: int, length: str = u64(0)) -> str:
    return f"00 {msg_id:04x} {length} 80"


def body(*chunks: str) -> str:
    blocks = "".join(f"05 {len(chunk) // 2:08x} {chunk}" for chunk in chunks)
    return blocks + f"06 {u64(sum(len(chunk) // 2 for chunk in chunks))}"


@attrs.frozen
class Endpoint:
    url: str
    trust: QuicConfig


@contextmanager
def serving(folder: Path) -> Iterator[tuple[Endpoint, subprocess.Popen[str]]]:
    """Run the endpoint in a process of its own."""
    command = [sys.executable, "-m", "levada.actors", "interop", "maop", "--token", "secret"]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [*command, "--self-signed", str(folder), "--until-stdin-closes"],
        stdin=pipe,
        stdout=pipe,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as server:
        assert server.stdout is not None
        word, host, port, carrier = server.stdout.readline().split()
        assert (word, host, carrier) == ("LISTENING", "127.0.0.1", "quic")
        yield Endpoint(f"quic://{host}:{port}", QuicConfig(alpn=("maop/1",), ca=folder / "ca.pem")), server
        server.communicate(timeout=250)
        assert server.returncode == 0


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    with serving(tmp_path_factory.mktemp("certificates")) as (endpoint, _):
        yield endpoint


class Peer:
    """Sends octets and keeps those that come, by stream."""

    def __init__(self, connection: QuicConnection, nursery: trio.Nursery) -> None:
        self.connection = connection
        self._octets: dict[int, bytearray] = {}
        self._ends: dict[int, str] = {}
        self._nursery = nursery
        self._streams: dict[int, QuicStream] = {}
        self._more = trio.Event()
        nursery.start_soon(self._accept)

    async def _accept(self) -> None:
        try:
            while True:
                self._begin(await self.connection.accept_stream())
        except CarrierError:
            pass

    def _begin(self, stream: QuicStream) -> None:
        self._streams[stream.stream_id] = stream
        self._octets[stream.stream_id] = bytearray()
        self._nursery.start_soon(self._read, stream)

    async def _read(self, stream: QuicStream) -> None:
        try:
            while data := await stream.receive_some():
                self._octets[stream.stream_id] += data
                self._tell()
            self._ends[stream.stream_id] = "end"
        except StreamWasReset as error:
            self._ends[stream.stream_id] = f"reset{error.code:x}"
        except CarrierError:
            pass
        self._tell()

    def _tell(self) -> None:
        self._more.set()
        self._more = trio.Event()

    def came(self, stream_id: int) -> str:
        """What came on a stream, in hexadecimal digits, and how it ended."""
        return self._octets.get(stream_id, b"").hex() + self._ends.get(stream_id, "")

    async def whole(self, stream_id: int) -> bytes:
        """Wait for the end of a stream; gives what came."""
        with trio.fail_after(300):
            while stream_id not in self._ends:
                await self._more.wait()
        assert self._ends[stream_id] == "end"
        return bytes(self._octets[stream_id])

    async def opens(self, octets: str, *, uni: bool = False, fin: bool = False) -> int:
        """Open a stream by these octets; gives its number."""
        stream = await self.connection.open_stream(unidirectional=uni)
        if uni:
            self._streams[stream.stream_id] = stream
        else:
            self._begin(stream)
        await stream.send_all(bytes.fromhex(octets))
        if fin:
            await stream.send_eof()
        return stream.stream_id

    async def sends(self, stream_id: int, octets: str, *, fin: bool = False) -> None:
        await self._streams[stream_id].send_all(bytes.fromhex(octets))
        if fin:
            await self._streams[stream_id].send_eof()

    def gives_up(self, stream_id: int) -> None:
        """RESET_STREAM; of a stream whose end was sent, STOP_SENDING."""
        self._streams[stream_id].stop(0x10B)

    def resets(self, stream_id: int) -> None:
        self._streams[stream_id].reset(0x10B)

    async def stopped(self, stream_id: int) -> int | None:
        """Wait until the server wants no more on a stream; gives the code."""
        with trio.fail_after(250):
            return await self._streams[stream_id].stopped()

    async def gets(self, stream_id: int, wanted: str) -> str:
        """Wait until exactly this has come on a stream."""
        pattern = re.compile(wanted.replace(" ", ""))
        with trio.move_on_after(50):
            while not pattern.fullmatch(self.came(stream_id)):
                await self._more.wait()
        assert pattern.fullmatch(self.came(stream_id)), f"stream {stream_id}: {self.came(stream_id)}"
        return self.came(stream_id)

    async def signals(self, *wanted: str) -> list[str]:
        """Wait until just these signals have come on the server's control streams, in any order."""
        patterns = [re.compile(signal.replace(" ", "")) for signal in wanted]
        with trio.move_on_after(50):
            while len(self.signalled()) < len(wanted):
                await self._more.wait()
        came = self.signalled()
        assert len(came) == len(wanted), came
        for pattern in patterns:
            assert [signal for signal in came if pattern.fullmatch(signal)], (pattern.pattern, came)
        return came

    async def hears(self, wanted: str) -> list[str]:
        """Wait for a signal; gives all that have come."""
        pattern = re.compile(wanted.replace(" ", ""))
        with trio.fail_after(250):
            while not any(map(pattern.fullmatch, self.signalled())):
                await self._more.wait()
        return self.signalled()

    def signalled(self) -> list[str]:
        """Take what came on the server's streams apart: each entry of a batch is a signal of its own."""
        found = []
        entries = {3: 8, 4: 14, 8: 20}
        for stream_id, octets in self._octets.items():
            data = bytes(octets) if stream_id % 4 == 1 else b""
            while data:
                op = data[0]
                if op in entries:
                    count, data = int.from_bytes(data[1:3], "big"), data[3:]
                    for _ in range(count):
                        found.append(f"{op:02x}0001" + data[: entries[op]].hex())
                        data = data[entries[op] :]
                    continue
                size = {7: 13 + int.from_bytes(data[11:13], "big"), 9: 7 + int.from_bytes(data[5:7], "big"), 10: 1}[op]
                found.append(data[:size].hex())
                data = data[size:]
        return found


@asynccontextmanager
async def connected(endpoint: Endpoint) -> AsyncIterator[Peer]:
    async with dial(endpoint.url, endpoint.trust) as connection, trio.open_nursery() as nursery:
        yield Peer(connection, nursery)
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def approved(endpoint: Endpoint) -> AsyncIterator[Peer]:
    async with connected(endpoint) as peer:
        assert await peer.opens(AUTHENTICATION, fin=True) == 0
        assert len(await peer.gets(0, APPROVED)) >= 64
        yield peer


async def closed(peer: Peer) -> tuple[int | None, bool]:
    with trio.fail_after(250):
        reason = await peer.connection.wait_closed()
    return reason.code, reason.by_peer


# ---------------------------------------------------------------- authentication


@pytest.mark.rule("MA-15")
@pytest.mark.rule("MA-25")
async def test_ma15_ma25_the_result_comes_before_fin_in_at_least_32_octets(endpoint: Endpoint) -> None:
    """The message delimits itself: the server does not wait for FIN."""
    async with connected(endpoint) as peer:
        await peer.opens(AUTHENTICATION)
        await peer.gets(0, APPROVED)


@pytest.mark.rule("MA-33")
@pytest.mark.parametrize(
    ("octets", "code"),
    [
        ("06 426561726572 0005 77726f6e67 00 05 312e302e30 00", 1),  # "wrong"
        ("06 426561726572 0000 00 05 312e302e30 00", 1),  # no token
        ("05 4261736963 0000 00 05 312e302e30 00", 1),  # Basic, anonymous
        ("05 4261736963 0006 736563726574 00 05 312e302e30 00", 1),  # Basic with the token
        ("06 426561726572 0006 736563726574 00 05 322e302e30 00", 12),  # 2.0.0
        ("06 426561726572 0006 736563726574 00 05 30312e302e 00", 0),  # "01.0."
        ("06 42656120726572 00", 0),  # a blank in the type
        ("06 426561726572 0006 736563726574 00 05 312e302e30 00 ff", 0),  # more behind the end
    ],
)
async def test_ma33_who_is_not_let_in_gets_a_result_with_a_code(endpoint: Endpoint, octets: str, code: int) -> None:
    """Disapproved with code, and no hint to try again for what that cannot mend."""
    async with connected(endpoint) as peer:
        await peer.opens(octets, fin=True)
        came = await peer.gets(
            0, f"00 {code:04x} 00000000 [0-9a-f]{{4}} (?:[0-9a-f]{{2}})* 05312e302e30 06 6c6576616461 end"
        )
        assert len(came) // 2 >= 32
        assert "736563726574" not in came


@pytest.mark.rule("MA-27")
async def test_ma27_the_close_comes_a_second_after_the_result(endpoint: Endpoint) -> None:
    """By the server, with 0x100 and the code, if the client has not closed by then."""
    async with connected(endpoint) as peer:
        await peer.opens("05 4261736963 0000 00 05 322e302e30 00", fin=True)
        await peer.whole(0)
        assert await closed(peer) == (0x10C, True)


@pytest.mark.rule("MA-28")
async def test_ma28_operations_before_approval_close_the_connection(endpoint: Endpoint) -> None:
    """UNAUTHORIZED, and nothing is executed."""
    async with connected(endpoint) as peer:
        await peer.opens(message(100), uni=True, fin=True)
        assert await closed(peer) == (0x101, True)


@pytest.mark.rule("MA-1")
async def test_ma1_another_protocol_name_is_refused(endpoint: Endpoint) -> None:
    """The handshake ends without a common ALPN."""
    with pytest.raises(ConnectionLost):
        async with dial(endpoint.url, attrs.evolve(endpoint.trust, alpn=("maop/2",))):
            pass


@pytest.mark.rule("MA-20")
@pytest.mark.release
async def test_ma20_there_are_five_seconds_to_authenticate(endpoint: Endpoint) -> None:
    """Then Disapproved by UNAUTHORIZED. That it comes no later is tested in virtual time."""
    began = time.monotonic()  # before the handshake, from whose end the peer counts
    async with connected(endpoint) as peer:
        await peer.opens("06 4265")
        await peer.gets(0, "00 0001 00000000 .*end")
        assert time.monotonic() - began >= 5


# ---------------------------------------------------------------- the contract's handlers


async def test_101_answers_what_it_got(endpoint: Endpoint) -> None:
    async with approved(endpoint) as peer:
        stream = await peer.opens(request(101, u64(5)))
        assert stream == 4
        await peer.signals(proceed(4))
        before = int(time.time() * 1000)
        await peer.sends(4, body("6865", "6c6c6f"), fin=True)
        answer = f"{OCTET_STREAM} 68656c6c6f"
        came = await peer.gets(4, f"02 {u64(30)} {TIMES} 05 0000001e {answer} 06 {u64(30)} end")
        assert abs(int(came[18:34], 16) - before) < 60_000
        await peer.opens(f"08 0001 {u64(4)} {u64(before)} 00000000")  # Done opens our control stream
        empty = await peer.opens(request(101), fin=True)
        await peer.gets(empty, f"02 {u64(25)} {TIMES} 05 00000019 {OCTET_STREAM} 06 {u64(25)} end")
        await peer.signals(proceed(4), proceed(empty))


async def test_101_takes_8_mib_and_not_an_octet_more(endpoint: Endpoint) -> None:
    async with approved(endpoint) as peer:
        most = 8 * 2**20
        await peer.opens(request(101, u64(most + 1)))
        await peer.signals(refuse(4, 2))
        assert await peer.stopped(4) == 0x102
        await peer.opens(request(101, u64(most), timeout_ms=60_000))
        await peer.signals(refuse(4, 2), proceed(8))
        await peer.sends(8, body("5a" * most), fin=True)
        came = await peer.whole(8)
        assert came[:9] == bytes.fromhex(f"02{u64(most + 25)}")
        assert came[-9:] == bytes.fromhex(f"06{u64(most + 25)}")
        assert came.count(b"\x5a") >= most


@pytest.mark.parametrize("uni", [True, False])
async def test_102_always_fails(endpoint: Endpoint, uni: bool) -> None:
    async with approved(endpoint) as peer:
        stream = await peer.opens(message(102) if uni else request(102), uni=uni, fin=True)
        if not uni:
            await peer.gets(stream, "reset111")
        came = await peer.hears(fail(stream, 17))
        # A Proceed that is not on its way when the handler fails is not sent any more: the Fail decides.
        assert came[:-1] in ([], [] if uni else [proceed(stream).replace(" ", "")])


@pytest.mark.rule("MA-61")
async def test_ma61_103_is_cancelled_by_giving_its_stream_up(endpoint: Endpoint) -> None:
    """The handler had started, so Fail CANCELLED says that there may be effects."""
    async with approved(endpoint) as peer:
        await peer.opens(request(103, timeout_ms=60_000), fin=True)
        await peer.signals(proceed(4))
        peer.gives_up(4)
        await peer.signals(proceed(4), fail(4, 11))


@pytest.mark.rule("MA-68")
async def test_ma68_103_is_too_late_for_a_short_timeout(endpoint: Endpoint) -> None:
    """The Response does not begin in time: Fail TIMEOUT."""
    async with approved(endpoint) as peer:
        await peer.opens(request(103, timeout_ms=100), fin=True)
        await peer.signals(proceed(4), fail(4, 5))


@pytest.mark.parametrize("msg_id", [2, 100])
async def test_messages_are_taken(endpoint: Endpoint, msg_id: int) -> None:
    async with approved(endpoint) as peer:
        first = await peer.opens(message(msg_id, u64(5)), uni=True)
        await peer.signals(proceed(first))
        await peer.sends(first, body("68656c6c6f"), fin=True)
        await peer.signals(proceed(first), done(first))
        second = await peer.opens(message(msg_id), uni=True, fin=True)
        await peer.signals(proceed(first), done(first), done(second))


async def test_100_takes_an_undefined_length_up_to_8_mib(endpoint: Endpoint) -> None:
    async with approved(endpoint) as peer:
        await peer.opens(message(100, UNDEFINED), uni=True)
        await peer.signals(proceed(2))
        await peer.sends(2, body("6865", "", "6c6c6f"), fin=True)
        await peer.signals(proceed(2), done(2))
        await peer.opens(message(100, UNDEFINED), uni=True)
        await peer.signals(proceed(2), done(2), proceed(6))
        await peer.sends(6, "05 00800001")  # the header alone says that it is too much (MA-58)
        await peer.signals(proceed(2), done(2), proceed(6), fail(6, 2))
        assert await peer.stopped(6) == 0x102


@pytest.mark.parametrize(
    ("octets", "uni", "signal"),
    [
        (request(101, UNDEFINED), False, refuse(4, 15)),
        (message(2, UNDEFINED), True, refuse(2, 15)),
        (message(100, u64(8 * 2**20 + 1)), True, refuse(2, 2)),
        (request(101, response=42), False, fail(4, 8)),
        (request(1, u64(2), response=42), False, fail(4, 8)),
        (message(0), True, refuse(2, 0)),
        (message(999), True, refuse(2, 16)),
        (request(2), False, refuse(4, 16)),
        (message(101), True, refuse(2, 16)),
        (message(100), False, fail(4, 12)),
        (request(101), True, fail(2, 12)),
        (message(100, u64(5)) + body("68656c6c6f"), True, fail(2, 1)),
        ("0b", True, fail(2, 10)),
        ("02", False, fail(4, 10)),
        ("00 0064", True, fail(2, 0)),  # FIN inside the header
    ],
)
async def test_what_is_not_taken_has_its_code(endpoint: Endpoint, octets: str, uni: bool, signal: str) -> None:
    async with approved(endpoint) as peer:
        await peer.opens(octets, uni=uni, fin=True)
        await peer.signals(signal)


# ---------------------------------------------------------------- the native Test


@pytest.mark.rule("MA-102")
@pytest.mark.rule("MA-103")
@pytest.mark.rule("MA-104")
@pytest.mark.rule("MA-105")
@pytest.mark.parametrize(
    ("payload", "length", "blocks"),
    [
        ("0000", 0, []),
        ("0040", 1024, [1024]),
        ("0060", 1024, [256] * 4),
        ("00a1", None, [256] * 8),
    ],
)
async def test_ma102_ma103_ma104_ma105_the_four_classic_tests(
    endpoint: Endpoint, payload: str, length: int | None, blocks: list[int]
) -> None:
    """Nothing; one Block of known length; several; several of undefined length."""
    async with approved(endpoint) as peer:
        await peer.opens(request(1, u64(2)))
        await peer.signals(proceed(4))
        await peer.sends(4, body(payload), fin=True)
        announced = UNDEFINED if length is None else u64(length)
        came = await peer.gets(4, f"02 {announced} {TIMES} .*end")
        data, at, sizes = bytes.fromhex(came[:-3]), 21, []
        while at < len(data) and data[at] == 5:
            sizes.append(int.from_bytes(data[at + 1 : at + 5], "big"))
            at += 5 + sizes[-1]
        assert sizes == blocks
        assert data[at:].hex() == (f"06{u64(sum(blocks))}" if blocks else "")
        if blocks:
            assert data[26:51].hex() == OCTET_STREAM.replace(" ", "")


@pytest.mark.rule("MA-100")
@pytest.mark.parametrize("payload", ["0100", "00c0"])
async def test_ma100_another_type_or_mode_of_test_fails_behind_the_gate(endpoint: Endpoint, payload: str) -> None:
    """Fail UNSUPPORTED_TEST_TYPE: the payload had to be seen first."""
    async with approved(endpoint) as peer:
        await peer.opens(request(1, u64(2)))
        await peer.signals(proceed(4))
        await peer.sends(4, body(payload), fin=True)
        await peer.signals(proceed(4), fail(4, 13))


# ---------------------------------------------------------------- the end


@pytest.mark.rule("MA-93")
async def test_ma93_disconnect_closes_with_0(endpoint: Endpoint) -> None:
    """At once, and in order."""
    async with approved(endpoint) as peer:
        await peer.opens("0a")
        assert await closed(peer) == (0, True)


@pytest.mark.rule("MA-92")
async def test_ma92_a_disconnect_request_ends_what_runs_by_the_time_that_it_gives(endpoint: Endpoint) -> None:
    """What is left then fails by CANCELLED with the reason SHUTDOWN, and Disconnect comes last."""
    async with approved(endpoint) as peer:
        await peer.opens(request(103, timeout_ms=60_000), fin=True)
        await peer.signals(proceed(4))
        await peer.opens("09 000000c8 0003 627965")  # 200 ms, "bye"
        assert await closed(peer) == (0, True)
        await peer.signals(proceed(4), fail(4, 11), "0a")
        assert any(b"SHUTDOWN".hex() in signal for signal in peer.signalled())


@pytest.mark.rule("MA-89")
async def test_ma89_sigterm_asks_for_the_end_and_cancels_what_is_left(tmp_path: Path) -> None:
    """A Disconnect Request with the time that there is, Fail for what did not end in it, Disconnect, and the close by 0."""
    with serving(tmp_path) as (endpoint, server):
        async with approved(endpoint) as peer:
            await peer.opens(request(103, timeout_ms=60_000), fin=True)
            await peer.signals(proceed(4))
            server.send_signal(signal.SIGTERM)
            assert await closed(peer) == (0, True)
            await peer.signals(proceed(4), "09 000003e8 0000", fail(4, 11), "0a")
