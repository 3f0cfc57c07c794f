"""What a peer can cost a bridge: bytes and seconds of processor time, before it has been let in and after; what an honest one waits beside it.

Bridge, attacker and honest client are one process here, so what is measured is more than what the bridge spends. Margins are wide: the bounds are
those of ``docs/reference/peer-cost.md``, and without the limits that hold them each of these costs ten to a million times as much.
"""

from __future__ import annotations

import gc
import logging
import random
import socket
import struct
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

pa = pytest.importorskip("pyarrow")
pytest.importorskip("levada.actors.spark", exc_type=ImportError)

from tests.pace import within  # noqa: E402

from levada.actors.journal import (  # noqa: E402
    GetExtent,
    JournalConfig,
    SchemaMismatch,
    columns_of,
    ipc,
)
from levada.actors.journal.ipc import MAX_HEAD, _Table, rows_of_stream  # noqa: E402
from levada.actors.rsocket import COMPOSITE, MESSAGES, RequestFailed, RequestRejected  # noqa: E402
from levada.actors.rsocket.server import ServerConnection  # noqa: E402
from levada.actors.spark import BridgeConfig  # noqa: E402
from levada.actors.spark.asks import EachRow  # noqa: E402
from levada.actors.spark.desk import MAX_SETUP  # noqa: E402
from levada.actors.spark.protocol import (  # noqa: E402
    HEAD,
    AppendHead,
    CommitOffsets,
    Declare,
    DeliverBatch,
    Describe,
    DiscardBatch,
    MeasureRows,
    ReadBlocks,
    StageHead,
    Token,
    WaitForRows,
    raised,
    rows_payload,
)
from levada.actors.spark.worker import RemoteMailbox, connection  # noqa: E402
from levada.framework import Actor, Asks, Codec, handles, message  # noqa: E402
from levada.framework.errors import LevadaError  # noqa: E402
from levada.transports.rsocket import Payload  # noqa: E402
from levada.transports.rsocket.extensions import BearerAuthentication, CompositeMetadata, DataMimeType, Entry, Routing  # noqa: E402

if TYPE_CHECKING:
    from .conftest import Actors

pytestmark = [pytest.mark.ci, pytest.mark.loopback]

MIB = 1 << 20


@message("cost.Line")
class Line:
    text: str


@message("cost.Answer")
class Answer:
    number: int


@message("cost.Question")
class Question(Asks[Answer]):
    text: str


class Desk(Actor[Question]):
    @handles
    def answer(self, m: Question) -> Answer:
        return Answer(len(m.text))


COLUMNS = columns_of(Line)
MIME = DataMimeType(MESSAGES).encode()
SETUP, REQUEST, STREAM = 1, 4, 6
"""Types of frames."""


@pytest.fixture(autouse=True)
def no_traceback(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Nothing that a peer sends is a failure of the bridge."""
    yield
    failures = [record.getMessage() for record in caplog.records if record.exc_info or record.levelno >= logging.ERROR]
    assert failures == []


@pytest.fixture
def desk(make_actors: Callable[..., Actors]) -> Actors:
    actors = make_actors()
    small = JournalConfig(segment_bytes=4 * MIB, max_bytes=8 * MIB, retain_bytes=None, block_bytes=MIB)
    actors.mailbox("lines", Line)
    actors.mailbox("small", Line, config=small)

    def expose() -> None:
        desk = actors.system.spawn(Desk)
        actors.bridge.expose("desk", desk)
        actors.bridge.expose("rows", actors.system.spawn(EachRow, desk, Question))

    actors.do(expose)
    return actors


# ---------------------------------------------------------------- measuring


POOLS: list[Any] = []
"""Kept for good: a buffer that outlives its pool crashes the interpreter when it is freed."""


@contextmanager
def costs(octets: int, seconds: float) -> Iterator[None]:
    """Require that the block takes no more memory at any moment, Arrow's included, and no more processor time, than this."""
    usual = pa.default_memory_pool()
    pool = pa.proxy_memory_pool(usual)
    POOLS.extend((usual, pool))
    pa.set_memory_pool(pool)
    gc.collect()
    tracemalloc.start(1)
    try:
        before = tracemalloc.get_traced_memory()[0]
        start = time.process_time()
        yield
        spent = time.process_time() - start
        peak = tracemalloc.get_traced_memory()[1] - before + (pool.max_memory() or 0)
    finally:
        tracemalloc.stop()
        pa.set_memory_pool(usual)
    assert peak < octets + (1 << 20)  # of which the test itself has some
    assert within(spent, seconds)


@contextmanager
def honest(actors: Actors, name: str = "lines") -> Iterator[None]:
    """Require that another client, which has a connection, is answered after the block within a second of processor time of all."""
    lines = RemoteMailbox(
        actors.bridge.address + ",", name
    )  # with a comma it is another address, and another connection
    lines.describe()
    yield
    start = time.process_time()
    lines.describe()
    assert within(time.process_time() - start, 1.0)


def frame(kind: int, stream_id: int, metadata: bytes | None, data: bytes = b"", *, fixed: bytes = b"") -> bytes:
    flags = 0 if metadata is None else 0x100
    body = fixed + (b"" if metadata is None else len(metadata).to_bytes(3, "big") + metadata) + data
    octets = struct.pack(">IH", stream_id, kind << 10 | flags) + body
    return len(octets).to_bytes(3, "big") + octets


def setup(metadata: bytes, data: bytes = b"") -> bytes:
    mime = bytes([len(COMPOSITE)]) + COMPOSITE.encode() + b"\x01x"
    return frame(SETUP, 0, metadata, data, fixed=struct.pack(">HHII", 1, 0, 20_000, 90_000) + mime)


def knock(actors: Actors) -> socket.socket:
    client = socket.socket(socket.AF_UNIX)
    client.settimeout(20)
    client.connect(actors.bridge.address.removeprefix("unix://"))
    return client


def let_in(actors: Actors) -> socket.socket:
    """A client with the token, which sends what it likes and reads when it likes."""
    client = knock(actors)
    token = Token.read(actors.bridge.token_file).secret
    client.sendall(setup(CompositeMetadata.of(BearerAuthentication(token)).encode()))
    client.sendall(frame(REQUEST, 1, routed("hello")))
    assert client.recv(100)
    return client


def closed(client: socket.socket) -> bytes:
    """What comes until the bridge closes the connection."""
    got = b""
    try:
        while octets := client.recv(65536):
            got += octets
    except ConnectionResetError:
        pass
    return got


def routed(route: str, *more: Entry) -> bytes:
    return CompositeMetadata.of(Routing(route), *more).encode()


def asking(route: str) -> bytes:
    """Metadata of a message."""
    return CompositeMetadata.of(Routing(route), DataMimeType(MESSAGES)).encode()


def refused(actors: Actors, payload: Payload) -> LevadaError:
    with pytest.raises(RequestFailed) as failure:
        connection(actors.bridge.address).request_response(payload, timeout=150)
    return raised(failure.value)


# ---------------------------------------------------------------- before it is let in


def test_a_client_that_says_nothing_or_half_of_something_costs_little(desk: Actors) -> None:
    """Fifty of them, each with all but the last octet of the largest SETUP."""
    largest = setup(b"", bytes(MAX_SETUP - 100))[:-1]
    with honest(desk), costs(50 * (MAX_SETUP + 64 * 1024), 2.0):
        clients = [knock(desk) for _ in range(50)]
        for client in clients:
            client.sendall(largest)
        desk.do(lambda: None)
    for client in clients:
        client.close()


def test_a_larger_setup_is_refused_before_it_has_come(desk: Actors) -> None:
    with honest(desk), costs(2 * MIB, 1.0), knock(desk) as client:
        client.sendall((16 * MIB - 1).to_bytes(3, "big") + bytes(10))
        assert b"wanted" in closed(client)


def test_a_setup_full_of_entries_is_refused(desk: Actors) -> None:
    with honest(desk), costs(4 * MIB, 1.0), knock(desk) as client:
        client.sendall(setup(b"\x80\0\0\0" * (MAX_SETUP // 4 - 100)))
        assert b"more than 1000 entries" in closed(client)


def test_what_is_sent_behind_a_wrong_token_is_not_kept(desk: Actors) -> None:
    with honest(desk), costs(4 * MIB, 2.0), knock(desk) as client:
        client.sendall(setup(CompositeMetadata.of(BearerAuthentication("0" * 64)).encode()))
        assert b"the token belongs to another bridge" in closed(client)


# ---------------------------------------------------------------- with the token: Arrow


def stream_of(batch: Any, **options: Any) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_batch(batch)
    octets: bytes = sink.getvalue().to_pybytes()
    return octets


BOMB_ROWS = 20_000_000


@pytest.fixture(scope="module")
def compressed() -> bytes:
    """160 MB in 5 kB."""
    return stream_of(
        pa.record_batch(
            {"text": pa.Array.from_buffers(pa.int64(), BOMB_ROWS, [None, pa.py_buffer(bytes(8 * BOMB_ROWS))])}
        ),
        compression="zstd",
    )


@pytest.mark.parametrize(
    ("route", "head"),
    [
        ("mailbox/lines/append", AppendHead()),
        ("mailbox/lines/stage", StageHead("q", 0, 0, 1)),
        ("ask/rows/batch", AppendHead()),
    ],
)
def test_compressed_rows_are_refused_and_never_grow(desk: Actors, compressed: bytes, route: str, head: Any) -> None:
    payload = Payload(compressed, routed(route, Entry(HEAD, Codec().encode(head))))
    with honest(desk), costs(2 * MIB, 1.0):
        assert "compressed buffers are not taken" in str(refused(desk, payload))


def test_a_dictionary_may_be_neither_compressed_nor_missing() -> None:
    words = pa.record_batch({"w": pa.array(["a" * 1000] * 3 + ["b"]).dictionary_encode()})
    assert rows_of_stream(stream_of(words)).equals(words)
    with pytest.raises(SchemaMismatch, match="compressed"):
        rows_of_stream(stream_of(words, compression="lz4"))


def test_rows_that_take_no_octets_are_counted() -> None:
    with pytest.raises(SchemaMismatch, match="say that they are 1000000000 rows"), costs(MIB, 1.0):
        rows_of_stream(stream_of(pa.record_batch([pa.nulls(10**9)], names=["n"])))


def _head(stream: bytearray) -> tuple[memoryview, _Table]:
    """The first description in a stream, which may be written to, and its header."""
    length = struct.unpack_from("<i", stream, 4)[0]
    head = memoryview(stream)[8 : 8 + length]
    header = _Table(head, struct.unpack_from("<I", head)[0]).table(2)
    assert header is not None
    return head, header


def test_a_name_may_not_stand_for_many_columns() -> None:
    """Otherwise 60 kB become 100 MB, and 256 kB a gigabyte and more."""
    names = ["n" * 50_000, *map(str, range(200))]
    stream = bytearray(stream_of(pa.record_batch([pa.array([], pa.int8())] * len(names), names=names)))
    head, schema = _head(stream)
    places = list(schema.items(1, 4))
    [first] = [at + struct.unpack_from("<I", head, at)[0] for at in places[:1]]
    for at in places[1:]:
        struct.pack_into("<I", head, at, first - at)
    with pytest.raises(SchemaMismatch, match="used twice"), costs(MIB, 1.0):
        rows_of_stream(bytes(stream))


def test_a_description_has_a_bound() -> None:
    many = pa.schema([(f"{n} " + "a long name" * 100, pa.int64()) for n in range(MAX_HEAD // 1000)])
    with pytest.raises(SchemaMismatch, match=f"at most {MAX_HEAD}"), costs(4 * MIB, 1.0):
        rows_of_stream(
            stream_of(many.empty_table().to_batches()[0] if many.empty_table().to_batches() else _empty(many))
        )


def _empty(schema: Any) -> Any:
    return pa.RecordBatch.from_arrays([pa.array([], field.type) for field in schema], schema=schema)


def test_one_buffer_may_not_be_several_columns() -> None:
    """Otherwise 8 MB and a hundred columns are 800 MB."""
    columns = 100
    batch = pa.record_batch([pa.array(range(100_000))] * columns, names=list(map(str, range(columns))))
    stream = bytearray(stream_of(batch))
    at = 8 + struct.unpack_from("<i", stream, 4)[0]
    length = struct.unpack_from("<i", stream, at + 4)[0]
    head = memoryview(stream)[at + 8 : at + 8 + length]
    message = _Table(head, struct.unpack_from("<I", head)[0])
    inner = message.table(2)
    assert inner is not None
    places = list(inner.items(2, 16))
    for place in places[1::2]:  # the values of each column; those before them say which are null
        head[place : place + 16] = head[places[1] : places[1] + 16]
    body = message.place(3)
    assert body is not None
    struct.pack_into("<q", head, body, 800_000)
    cut = bytes(stream[: at + 8 + length + 800_000])
    with (
        pytest.raises(SchemaMismatch, match="buffers of more than the 800000 bytes that there are"),
        costs(4 * MIB, 1.0),
    ):
        rows_of_stream(cut)


@pytest.mark.parametrize("offset", [-1, 1 << 30])
def test_offsets_that_point_elsewhere_are_refused(offset: int) -> None:
    """Whoever reads such rows reads memory that is not theirs, and dies."""
    stream = stream_of(pa.record_batch({"text": ["abc", "def", "ghi"]}))
    good = struct.pack("<4i", 0, 3, 6, 9)
    assert stream.count(good) == 1
    with pytest.raises(SchemaMismatch, match="these bytes are not rows"):
        rows_of_stream(stream.replace(good, struct.pack("<4i", 0, offset, 6, 9)))


@pytest.mark.parametrize("dictionary", [True, False])
def test_streams_that_were_damaged_are_read_or_refused(*, dictionary: bool) -> None:
    """Also those whose columns are known from an earlier stream: without dictionaries, the batch is read alone."""
    words = pa.array(["x", "y"])
    batch = pa.record_batch(
        {
            "s": ["a", None],
            "l": [[1], [2, 3]],
            "d": words.dictionary_encode() if dictionary else words,
            "v": pa.array(["x" * 20, "y"], pa.string_view()),
            "m": pa.array([[("k", {"n": 1})]] * 2, pa.map_(pa.string(), pa.struct([("n", pa.int64())]))),
            "t": pa.array([1, 2], pa.timestamp("us", "Europe/Berlin")),
        }
    ).replace_schema_metadata({"key": "value"})
    stream = stream_of(batch)
    for _ in range(2):
        assert rows_of_stream(stream).equals(batch, check_metadata=True)
    head = 8 + struct.unpack_from("<i", stream, 4)[0]
    lot = random.Random(0)
    with costs(4 * MIB, 30.0):
        for number in range(800):
            damaged = bytearray(stream)
            for _ in range(lot.choice((1, 1, 2, 8))):
                damaged[lot.randrange(head * (number % 2), len(damaged))] = lot.choice(
                    (0, 1, 0x7F, 0xFF, lot.randrange(256))
                )
            try:
                rows_of_stream(bytes(damaged))
            except SchemaMismatch:
                pass
    for end in range(0, len(stream) - 8, 8):
        with pytest.raises(SchemaMismatch):
            rows_of_stream(stream[:end])


@pytest.mark.parametrize(
    "batch",
    [
        pytest.param(pa.record_batch({"n": [1, 2], "s": ["a", None]}), id="plain"),
        pytest.param(pa.record_batch({"n": [1]}).replace_schema_metadata({"key": "value"}), id="metadata"),
        pytest.param(pa.record_batch({"w": pa.array(["a", "a"]).dictionary_encode()}), id="dictionary"),
        pytest.param(
            pa.record_batch({"l": pa.array([["a"]], pa.list_(pa.dictionary(pa.int8(), pa.string())))}), id="within"
        ),
        pytest.param(pa.record_batch({"n": pa.array([], pa.int64())}), id="no rows"),
        pytest.param(pa.record_batch({"n": [1, 2, 3]}).slice(1, 1), id="slice"),
        pytest.param(pa.RecordBatch.from_arrays([], names=[]), id="no columns"),
    ],
)
def test_streams_are_those_of_arrow(batch: Any) -> None:
    """The first time, and when the columns are known."""
    for _ in range(2):
        stream = ipc.stream_of(batch)
        assert stream == stream_of(batch)
        assert rows_of_stream(stream).equals(batch, check_metadata=True)


def test_rows_of_known_columns_are_judged_as_others() -> None:
    plain, nulls = pa.record_batch({"n": [1, 2]}), pa.record_batch([pa.nulls(1)], names=["n"])
    for batch in (plain, nulls):
        assert rows_of_stream(stream_of(batch)).equals(batch)
    with pytest.raises(SchemaMismatch, match="compressed buffers are not taken"):
        rows_of_stream(stream_of(pa.record_batch({"n": [0] * 1000}), compression="zstd"))
    with pytest.raises(SchemaMismatch, match="say that they are 1000000000 rows"), costs(MIB, 1.0):
        rows_of_stream(stream_of(pa.record_batch([pa.nulls(10**9)], names=["n"])))
    stream, end = stream_of(plain), b"\xff\xff\xff\xff\0\0\0\0"
    start = 8 + struct.unpack_from("<i", stream, 4)[0]
    batch = stream[start : -len(end)]
    with pytest.raises(SchemaMismatch, match="2 batches, wanted one"):
        rows_of_stream(stream[:start] + batch + batch + end)
    with pytest.raises(SchemaMismatch, match="0 batches, wanted one"):
        rows_of_stream(stream[:start] + end)


# ---------------------------------------------------------------- with the token: messages and metadata


def test_metadata_full_of_entries_is_refused(desk: Actors) -> None:
    payload = Payload(b"", routed("hello") + b"\x80\0\0\0" * MIB)
    with honest(desk), costs(32 * MIB, 2.0):
        assert "more than 1000 entries" in str(refused(desk, payload))


@pytest.mark.parametrize("route", ["mailbox/lines", "ask/desk"])
def test_a_message_of_many_values_is_refused(desk: Actors, route: str) -> None:
    """2 MB of empty maps are counted before they are made."""
    values = b"\xdd" + struct.pack(">I", 2 * MIB) + b"\x80" * (2 * MIB)
    with honest(desk), costs(32 * MIB, 2.0):
        assert "max_items" in str(refused(desk, Payload(values, asking(route))))


@pytest.mark.parametrize("route", ["mailbox/lines", "ask/desk"])
def test_a_question_that_is_not_called_a_message_is_refused(desk: Actors, route: str) -> None:
    question = Describe() if route == "mailbox/lines" else Question("x")
    assert "takes a message" in str(refused(desk, Payload(Codec().encode(question), routed(route))))


def test_questions_that_no_journal_takes_are_refused_and_do_not_end_it(desk: Actors) -> None:
    large = 1 << 63
    questions: list[Any] = [
        DeliverBatch("q", large, {}),
        DeliverBatch("q", -1, {0: 1}),
        DeliverBatch("q" * 1001, 0, {}),
        DiscardBatch("q", large),
        Declare("g" * 1001),
        CommitOffsets("unknown", "", {large: large}),
        MeasureRows(large, 0, 1, 1),
        MeasureRows(0, -large, large, -1),
        Answer(1),
    ]
    peer = connection(desk.bridge.address)
    for question in questions:
        with pytest.raises(RequestFailed):
            peer.request_response(question, route="mailbox/lines", timeout=100)
    for head in (StageHead("q", large, 0, 1), StageHead("q" * 1001, 0, 0, 1), StageHead("q", 0, -1, 1)):
        payload = rows_payload("mailbox/lines/stage", head, COLUMNS.encode([Line("x")]))
        assert "invalid request" in str(refused(desk, payload))
    for seconds in (float("nan"), float("inf"), -1.0):
        assert peer.request_response(WaitForRows({}, 0, seconds), route="mailbox/lines", timeout=100).end == {0: 0}
    # The actor's own messages only, as everywhere: others are a failure of the question, not of the actor.
    for stranger in (Describe(), Answer(1), Line("x")):
        with pytest.raises(RequestFailed):
            peer.request_response(stranger, route="ask/desk", timeout=100)
    assert peer.request_response(Question("abc"), route="ask/desk", timeout=100) == Answer(3)
    assert RemoteMailbox(desk.bridge.address, "lines").describe().end == {0: 0}


def test_octets_of_any_kind_on_any_route_are_answered(desk: Actors) -> None:
    lot = random.Random(0)
    codec, peer = Codec(), connection(desk.bridge.address)
    seeds = [
        codec.encode(Describe()),
        codec.encode(ReadBlocks(0, 0, 5, "e")),
        codec.encode(CommitOffsets("g", "e", {0: 1})),
        codec.encode(Question("x")),
        stream_of(COLUMNS.encode([Line("x")])),
        b"",
    ]
    routes = ["mailbox/lines", "mailbox/lines/stage", "mailbox/lines/append", "ask/desk", "ask/rows/batch", "hello"]
    routes += ["\x1b[2J", "mailbox//", "ask/\n/batch"]
    heads = [codec.encode(StageHead("q", 0, 0, 1)), codec.encode(AppendHead()), b"\xc1", b""]
    for _ in range(200):
        octets = bytearray(lot.choice(seeds))
        for _ in range(lot.randrange(3)):
            if octets:
                octets[lot.randrange(len(octets))] = lot.randrange(256)
        entries = (
            Entry(HEAD, lot.choice(heads)),
            *([Entry(DataMimeType.MIME_TYPE, MIME)] if lot.random() < 0.5 else []),
        )
        payload = Payload(bytes(octets), routed(lot.choice(routes), *entries))
        try:
            peer.request_response(payload, timeout=150)
        except RequestFailed:
            pass
        with pytest.raises(RequestFailed):
            list(peer.request_stream(Payload(bytes(octets), routed("mailbox/lines/read")), timeout=150))


# ---------------------------------------------------------------- with the token: many, and slow


def full(actors: Actors) -> Payload:
    """Fill the mailbox ``small``; return a request for one more row, which waits for room."""
    small, block = actors.mailboxes["small"], "x" * MIB
    for _ in range(7):
        actors.do(lambda: small.append([Line(block)]))
    return rows_payload("mailbox/small/append", AppendHead(), COLUMNS.encode([Line(block)]))


def test_rows_that_wait_for_a_full_journal_have_a_bound(desk: Actors) -> None:
    """The requests above it are refused, and may be sent again; another process is answered, and may stage."""
    config = BridgeConfig()
    payload = full(desk)
    sent = 110  # MiB. The client's queue is in this process too, and may have room for all. A bridge without a bound would hold two copies.
    with honest(desk, "small"), costs(sent * MIB + config.max_pending_bytes + 24 * MIB, 10.0):
        peer = connection(desk.bridge.address)
        waiting = [peer.start_request(payload, timeout=150) for _ in range(sent)]
        for each in waiting[config.max_pending_bytes // MIB :]:
            with pytest.raises(RequestRejected, match="at most"):
                each.result(150)
    other = RemoteMailbox(desk.bridge.address + ",", "small")
    assert other.stage(StageHead("q", 0, 0, 1), [COLUMNS.encode([Line("y")])]) == 1
    for each in waiting:
        each.cancel()
    assert desk.ask(desk.mailboxes["small"], GetExtent()).end[0] == 7


def test_rows_of_all_connections_have_a_bound(make_actors: Callable[..., Actors]) -> None:
    """Six that add to a full journal hold no more than the total together, and leave room for a seventh."""
    config = BridgeConfig(max_pending_bytes=8 * MIB, max_total_pending_bytes=20 * MIB)
    desk = make_actors(config=config)
    small = JournalConfig(segment_bytes=4 * MIB, max_bytes=8 * MIB, retain_bytes=None, block_bytes=MIB)
    desk.mailbox("lines", Line)
    desk.mailbox("small", Line, config=small)
    payload = full(desk)
    sent = 30
    with honest(desk):
        waiting = []
        for number in range(2, 8):
            peer = connection(desk.bridge.address + "," * number)
            asked = [peer.start_request(payload, timeout=150) for _ in range(sent)]
            with pytest.raises(RequestRejected, match="at most"):
                asked[-1].result(150)
            peer.request_response(Payload(b"", routed("hello")), timeout=150)
            waiting += asked
        assert sum(not each.future.done() for each in waiting) == 4 + 3 + 2 + 2 + 1 + 1
    lines = RemoteMailbox(desk.bridge.address + ",", "lines")
    assert lines.append(COLUMNS.encode([Line("y" * MIB)]), partition=0).count == 1
    for each in waiting:
        each.cancel()


def test_the_settings_say_how_many_requests_and_streams_of_rows_there_are(make_actors: Callable[..., Actors]) -> None:
    """A process has at most two requests at a time, one stream of rows among them, and all processes have two streams."""
    desk = make_actors(config=BridgeConfig(max_requests=2, max_reads=1, max_total_reads=2))
    lines = desk.mailbox("lines", Line)
    for _ in range(4):
        desk.do(lambda: lines.append([Line("x" * MIB)]))
    epoch = RemoteMailbox(desk.bridge.address, "lines").describe().epoch
    question = Payload(Codec().encode(ReadBlocks(0, 0, 4, epoch)), routed("mailbox/lines/read"))
    peers = [connection(desk.bridge.address + "," * number) for number in range(1, 4)]
    reading = [peers[0].request_stream(question, window=1, timeout=150)]
    next(reading[0])
    with pytest.raises(RequestRejected, match="1 streams of rows of this connection wait, at most 1"):
        next(peers[0].request_stream(question, window=1, timeout=150))
    waiting = peers[0].start_request(WaitForRows({0: 4}, 1, 100.0), route="mailbox/lines", timeout=150)
    with pytest.raises(RequestRejected, match="too many streams are open"):
        peers[0].request_response(Payload(b"", routed("hello")), timeout=150)
    reading.append(peers[1].request_stream(question, window=1, timeout=150))
    next(reading[1])
    with pytest.raises(RequestRejected, match="2 streams of rows of all connections wait, at most 2"):
        next(peers[2].request_stream(question, window=1, timeout=150))
    waiting.cancel()


def test_streams_of_rows_that_nobody_takes_have_a_bound(desk: Actors) -> None:
    """Each has a block in hand; a few more are in the queues."""
    made, block = desk.mailboxes["lines"], "x" * MIB
    for _ in range(4):
        desk.do(lambda: made.append([Line(block)]))
    epoch = RemoteMailbox(desk.bridge.address, "lines").describe().epoch
    question = Codec().encode(ReadBlocks(0, 0, 4, epoch))
    config = BridgeConfig()
    frames = b"".join(
        frame(STREAM, 2 * n + 3, routed("mailbox/lines/read"), question, fixed=struct.pack(">I", 100))
        for n in range(500)
    )
    with honest(desk), costs((config.max_reads + 32) * MIB, 10.0), let_in(desk) as client:
        client.sendall(frames)
        desk.do(lambda: None)
        RemoteMailbox(desk.bridge.address + ",", "lines").describe()


def test_many_small_requests_hold_nobody_up(desk: Actors) -> None:
    """Whose answers are not read: the bridge stops reading then."""
    question = frame(REQUEST, 0, asking("mailbox/lines"), Codec().encode(Describe()))
    frames = bytearray()
    for n in range(1_500):
        frames += question[:3] + struct.pack(">I", 2 * n + 3) + question[7:]
    with honest(desk), costs(32 * MIB, 20.0), let_in(desk) as client:
        client.setblocking(False)
        sent = 0
        for _ in range(10):
            try:
                sent += client.send(memoryview(frames)[sent : sent + 65536])
            except BlockingIOError:
                RemoteMailbox(desk.bridge.address + ",", "lines").describe()
        assert sent


# ---------------------------------------------------------------- what stays


def test_a_closed_connection_leaves_nothing_without_the_collector(desk: Actors) -> None:
    """Half a large frame, rows that wait, a stream that nobody takes."""
    made = desk.mailboxes["lines"]
    desk.do(lambda: made.append([Line("x" * MIB)]))
    epoch = RemoteMailbox(desk.bridge.address + ",", "lines").describe().epoch
    read = frame(
        STREAM, 3, routed("mailbox/lines/read"), Codec().encode(ReadBlocks(0, 0, 1, epoch)), fixed=struct.pack(">I", 9)
    )
    wait = Codec().encode(WaitForRows({}, 1000, 3000.0))
    half = (16 * MIB - 1).to_bytes(3, "big") + struct.pack(">IH", 7, REQUEST << 10) + bytes(8 * MIB)

    def come_and_go() -> None:
        with let_in(desk) as client:
            client.sendall(read)
            client.sendall(frame(REQUEST, 5, asking("mailbox/lines"), wait))
            client.sendall(half)
            RemoteMailbox(desk.bridge.address + ",", "lines").describe()
        until_gone()

    def until_gone() -> None:
        deadline = time.monotonic() + 150
        while sum(issubclass(type(each), ServerConnection) for each in gc.get_objects()) > 1:
            assert time.monotonic() < deadline, "the connection is still there"
            RemoteMailbox(desk.bridge.address + ",", "lines").describe()

    gc.collect()
    gc.disable()
    try:
        come_and_go()
        tracemalloc.start(1)
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(3):
            come_and_go()
        assert tracemalloc.get_traced_memory()[0] - before < MIB
    finally:
        tracemalloc.stop()
        gc.enable()
