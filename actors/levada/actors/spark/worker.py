"""The bridge in Spark's processes, driver and executors: lasting connections, and calls that block.

A process has one connection to each bridge, made on first use and after a loss; a forked child makes its own.
Calls wait `PATIENCE` seconds for a bridge that is away, so the actors' side can restart under a running query. Then they repeat everything that
is idempotent: all but an append that was sent. Blocks of rows are identified by their position.

This module imports trio through the framework, and never runs it.
"""

from __future__ import annotations

import errno
import os
import ssl
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote, unquote_to_bytes, urlsplit

import attrs
import pyarrow as pa

from levada.actors.journal.log_events import events_of
from levada.actors.journal.schema import fit, joined
from levada.actors.rsocket import COMPOSITE, ClientConfig, CoreConfig, RequestFailed, RequestRejected, SetupRejected
from levada.actors.rsocket.blocking import BlockingPeer, PendingAnswer, RequestTimeout, connect
from levada.framework import Asks, Codec
from levada.framework.errors import ActorStopped, ConfigurationError, ConnectionClosed, ConnectionLost, LevadaError
from levada.framework.tracing import TraceHeaders
from levada.transports.carriers import TlsConfig, UnixConfig
from levada.transports.rsocket import Payload
from levada.transports.rsocket.extensions import BearerAuthentication, CompositeMetadata, ZipkinTracing

from .protocol import (
    WINDOW,
    AppendedRows,
    AppendHead,
    BlockHead,
    BridgeError,
    BridgeRefused,
    BridgeUnreachable,
    Describe,
    Description,
    MeasureRows,
    ReadBlocks,
    StageHead,
    Token,
    WaitForRows,
    host_id,
    is_log,
    raised,
    rows_payload,
)
from .tracing import TRACES, belonging_to

__all__ = ["RemoteMailbox", "addresses", "call", "connection", "traced"]

R = TypeVar("R")

CONNECT_TIMEOUT = 10.0
"""Seconds for a connection."""
TIMEOUT = 60.0
"""Default seconds for an answer."""
PATIENCE = 30.0
"""Seconds to wait for a bridge that is away."""
PAUSES = 0.05, 1.0
"""The first and the longest pause in seconds between attempts; each pause doubles the one before."""
BLOCK_ROWS, BLOCK_BYTES = 16_384, 4 << 20
"""The largest block that is sent, in rows and bytes, unless a single row is larger."""
HELD_ROWS = 4096
"""Rows of a log that Spark gets at once: they take about 0.7 of the CPU time of a plain mailbox's rows; block by block it was about 1.3."""

_codec = Codec()
_lock = threading.Lock()
_connections: dict[tuple[str, str | None], tuple[BlockingPeer, bool]] = {}
"""The connections, each with whether its bridge traces."""


def connection(address: str, token_file: str | None = None) -> BlockingPeer:
    """Return this process's connection to a bridge; connect if there is none.

    Args:
        address: `Bridge.address`: ``unix:///path`` or ``tls://host:port``, or several joined by commas. A Unix socket only works on the
            bridge's own machine.
        token_file: path, or the name of a file shipped with the job (``spark-submit --files``). None: ``bridge.token`` beside the Unix
            socket.

    Raises:
        BridgeRefused: the bridge refuses this process.
        BridgeUnreachable: no attempt can succeed with this address and token.
        ConnectionLost: no address answers.
        ConfigurationError: an address or the token file cannot be used.
    """
    key = (address, token_file)
    with _lock:
        found = _connections.get(key)
        if found is None or found[0].closed:
            found = _connections[key] = _connect(address, token_file)
        return found[0]


def traced(address: str, token_file: str | None, trace: TraceHeaders | None) -> list[ZipkinTracing]:
    """Return the metadata that puts a request into a trace; none if the bridge does not trace, or there is no connection yet.

    Args:
        address, token_file: as for `connection`.
        trace: the trace of requests from code without a span of its own.
    """
    found = _connections.get((address, token_file))
    return [] if found is None or not found[1] else belonging_to(trace)


def addresses(address: str) -> list[str]:
    """Return the address of each node; see `levada.actors.spark.asks.RemoteActor`. A pattern is expanded at each call."""
    found: list[str] = []
    for part in address.split(";"):
        url = part.strip()
        folder, _, name = url.removeprefix("unix://").rpartition("/")
        if url.startswith("unix://") and "*" in name:
            matching = Path(_unquoted(folder)).glob(_unquoted(name))
            found += sorted(f"unix://{folder}/{quote(os.fsencode(path.name))}" for path in matching)
        elif url:
            found.append(url)
    return found


def _unquoted(path: str) -> str:
    return os.fsdecode(unquote_to_bytes(path))


def _forget() -> None:
    """Close all connections in a forked child: they belong to the parent."""
    global _lock
    _lock = threading.Lock()
    for peer, _ in _connections.values():
        peer.close()
    _connections.clear()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_forget)


def _connect(address: str, token_file: str | None) -> tuple[BlockingPeer, bool]:
    urls = [_checked(part.strip()) for part in address.split(",") if part.strip()]
    if not urls:
        raise ConfigurationError("address is empty: give it the value of Bridge.address")
    path = _token_path(urls, token_file)
    token = Token.read(path)
    ways = [url for url in urls if urlsplit(url).scheme != "unix" or token.host == host_id()]
    if not ways:
        raise BridgeUnreachable(
            f"the bridge at {address} is on another machine: give it a tls:// URL (serve_bridge(url=…)) and this job its address"
        )
    failures: list[str] = []
    hopeless = True
    for url in ways:
        try:
            return _open(url, token)
        except SetupRejected as error:
            raise BridgeRefused(f"the bridge at {url} refuses this process: {error} ({path})") from error
        except ConnectionLost as error:
            failures.append(str(error))
            hopeless = hopeless and _is_hopeless(error)
        except (RequestTimeout, RequestRejected):
            # Not raised: callers wait for a bridge that is busy or closing, as for one that is away.
            failures.append(f"{url} takes connections and said nothing for {CONNECT_TIMEOUT:g} s")
            hopeless = False
    raise (BridgeUnreachable if hopeless else ConnectionLost)(f"no bridge answers: {'; '.join(failures)}")


def _checked(url: str) -> str:
    problem = ConfigurationError(f"the address is {url!r}, wanted unix:///path or tls://host:port")
    try:
        parts = urlsplit(url)
        is_tls = parts.scheme == "tls" and bool(parts.hostname) and parts.port is not None
    except ValueError:  # brackets or a port that are none
        raise problem from None
    if is_tls:
        return url
    if parts.scheme == "unix" and not parts.netloc and parts.path.startswith("/"):
        return f"unix://{parts.path}"
    raise problem


def _is_hopeless(error: ConnectionLost) -> bool:
    """Whether another attempt fails the same way. A refused connection or an unknown name may be of a bridge that starts again."""
    cause = error.__cause__
    if isinstance(cause, ssl.SSLCertVerificationError):
        return True
    return isinstance(cause, OSError) and cause.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH)


def _open(url: str, token: Token) -> tuple[BlockingPeer, bool]:
    setup = Payload(b"", CompositeMetadata.of(BearerAuthentication(token.secret)).encode())
    # A connection is closed here only if it did not work. A bridge that stands still would not end its side, so nothing waits for that.
    carrier = (
        UnixConfig(close_timeout=0)
        if urlsplit(url).scheme == "unix"
        else TlsConfig(context=_trusting(token), close_timeout=0)
    )
    core = CoreConfig(metadata_mime_type=COMPOSITE, setup_payload=setup)
    config = ClientConfig(core=core, window=WINDOW, carrier=carrier)
    peer = connect(f"rsocket+{url}", config=config, timeout=CONNECT_TIMEOUT)
    try:
        # SETUP has no answer: the first answer tells whether this process was let in.
        answer = peer.request_response(b"", route="hello", timeout=CONNECT_TIMEOUT)
    except BaseException:
        peer.close()
        raise
    return peer, answer.data == TRACES


def _token_path(urls: list[str], token_file: str | None) -> str:
    if token_file is None:
        for url in urls:
            if urlsplit(url).scheme == "unix":
                return str(Path(_unquoted(urlsplit(url).path)).with_name("bridge.token"))
        raise ConfigurationError(
            "token_file (as an option: tokenFile) is missing: without a Unix socket the address does not tell where the token is"
        )
    if not Path(token_file).exists() and not os.path.isabs(token_file):
        # Spark puts the folder of shipped files on the path, too. In the process of a stream's source, only that is right.
        found = [*_shipped(token_file), *(os.path.join(place, token_file) for place in sys.path)]
        return next(filter(os.path.exists, found), token_file)
    return token_file


def _shipped(name: str) -> list[str]:
    try:
        from pyspark import SparkFiles

        return [SparkFiles.get(name)]
    except (ModuleNotFoundError, AssertionError):
        return []  # not Spark's process, as for `levada.actors.spark.read_mailbox`, or a client of Spark Connect


def _trusting(token: Token) -> ssl.SSLContext:
    context = ssl.create_default_context(cadata=token.trust or None)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if token.trust:
        # A certificate in the token file is trusted as it is, even if it is the bridge's own and not an authority's.
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


_AWAY = ConnectionLost, ConnectionClosed, RequestRejected, ActorStopped
"""Errors while a bridge, or the journal of a mailbox, ends or starts again."""


class _Patience:
    """Waits for a bridge that is away."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.found()

    def found(self) -> None:
        """Reset: the bridge is there, and its next absence is counted from the start."""
        self._until: float | None = None
        self._pause = PAUSES[0]

    def wait(self, error: LevadaError, away: tuple[type[LevadaError], ...] = _AWAY) -> None:
        """Sleep a little, or raise the error of the actors' side if the bridge is not away, or has been away for too long."""
        problem = raised(error) if isinstance(error, RequestFailed) else error
        now = time.monotonic()
        if self._until is None:
            self._until = now + self._seconds
        if isinstance(problem, BridgeUnreachable) or not isinstance(problem, away) or now + self._pause > self._until:
            raise problem from (None if problem is error else error)
        time.sleep(self._pause)
        self._pause = min(2 * self._pause, PAUSES[1])


def call(
    address: str,
    token_file: str | None,
    use: Callable[[BlockingPeer], R],
    *,
    again: bool = False,
    patience: float | None = None,
) -> R:
    """Call `use` with the connection; raise errors of the actors' side with their own class.

    Args:
        address: see `connection`.
        token_file: see `connection`.
        use: the call.
        again: whether the call is idempotent, so that it is repeated after a lost connection.
        patience: seconds to wait for a bridge that is away. None: `PATIENCE`.

    Raises:
        LevadaError: an error of `use` or of `connection`.
    """
    waiting = _Patience(PATIENCE if patience is None else patience)
    while True:
        peer = _connected(address, token_file, waiting)
        since = time.monotonic()
        try:
            return use(peer)
        except (RequestFailed, *_AWAY) as error:
            if time.monotonic() - since > PATIENCE:
                waiting.found()
            waiting.wait(error, _AWAY if again else (RequestRejected,))


def _connected(address: str, token_file: str | None, waiting: _Patience) -> BlockingPeer:
    while True:
        try:
            return connection(address, token_file)
        except _AWAY as error:
            waiting.wait(error)


@attrs.frozen
class RemoteMailbox:
    """A mailbox, as Spark's processes see it. It is plain data and can be pickled: each call looks up the connection."""

    address: str
    name: str
    token_file: str | None = None
    trace: TraceHeaders | None = None
    """The trace of requests, if the code that makes them has no span."""

    def ask(self, question: Asks[R], *, timeout: float | None = TIMEOUT, patience: float | None = None) -> R:
        """Ask one of the questions of `levada.actors.spark.protocol`; all are idempotent.

        Raises:
            RequestTimeout: no answer in `timeout` seconds.
            LevadaError: an error of the actors' side, or of `connection`.
        """
        return self._call(
            lambda peer: peer.request_response(
                question, route=f"mailbox/{self.name}", metadata=self.traced() or None, timeout=timeout
            ),
            patience=patience,
        )

    def traced(self) -> list[ZipkinTracing]:
        """Return the metadata that puts a request into a trace; see `traced`."""
        return traced(self.address, self.token_file, self.trace)

    def describe(self) -> Description:
        """Ask for a description."""
        return self.ask(Describe())

    def wait_for_rows(self, after: dict[int, int], rows: int, seconds: float) -> Description:
        """Ask for a description once there are `rows` rows after these offsets, or after `seconds`."""
        return self.ask(WaitForRows(after, rows, seconds), timeout=seconds + TIMEOUT)

    def measure(self, partition: int, start: int, end: int, max_bytes: int) -> int:
        """Ask for the offset that `max_bytes` of rows reach."""
        return self.ask(MeasureRows(partition, start, end, max_bytes))

    def _call(self, use: Callable[[BlockingPeer], R], *, again: bool = True, patience: float | None = None) -> R:
        return call(self.address, self.token_file, use, again=again, patience=patience)

    def read(
        self, partition: int, start: int, end: int, *, epoch: str, schema: pa.Schema, opening: str | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Yield rows, with at most `WINDOW` blocks on their way. After a lost connection, continue at the same row.

        Args:
            partition: the number of the partition.
            start: the offset of the first row.
            end: the offset after the last row.
            epoch: the epoch of the offsets.
            schema: the wanted columns; older rows get defaults for missing columns. From the log of a durable class, only events are yielded.
            opening: the opening of the offsets; None: any.

        Raises:
            OffsetGone, EpochChanged, JournalBehind, JournalError: the rows are not there.
            SchemaMismatch: the columns do not fit.
        """
        waiting, of_log = _Patience(PATIENCE), is_log(schema)
        held = _Held(schema)
        while start < end:
            peer = _connected(self.address, self.token_file, waiting)
            try:
                for head, batch in self._blocks(peer, ReadBlocks(partition, start, end, epoch, opening)):
                    if head.first != start:
                        raise BridgeError(f"rows from {head.first} on came, where those from {start} on were due")
                    start += head.rows
                    waiting.found()
                    if of_log:
                        yield from held.add(batch, is_last=start == end)
                    elif batch.num_rows:
                        yield fit(batch, schema)
                if start < end:
                    raise BridgeError(f"rows ended at {start}, wanted up to {end}")
            except (RequestFailed, *_AWAY) as error:
                waiting.wait(error)

    def _blocks(self, peer: BlockingPeer, question: ReadBlocks) -> Iterator[tuple[BlockHead, pa.RecordBatch]]:
        route = f"mailbox/{self.name}/read"
        data, metadata = _codec.encode(question), self.traced() or None
        with peer.request_stream(data, route=route, metadata=metadata, window=WINDOW, timeout=TIMEOUT) as stream:
            schema: pa.Schema | None = None
            for item in stream:
                head = BlockHead.decode(item.metadata or b"")
                if head.schema:
                    schema = pa.ipc.read_schema(pa.py_buffer(head.schema))
                if schema is None:
                    raise BridgeError("the first block of a stream came without its columns")
                if item.data:
                    batch = pa.ipc.read_record_batch(pa.py_buffer(item.data), schema).slice(head.skip, head.rows)
                else:  # erased rows
                    batch = pa.RecordBatch.from_pylist([], schema)
                yield head, batch

    def stage(self, head: StageHead, batches: Iterable[pa.RecordBatch], *, timeout: float = TIMEOUT) -> int:
        """Stage rows, with at most `WINDOW` blocks on their way; return the number of rows. Continues when a bridge that was away is back.

        Raises:
            JournalFull, SchemaMismatch, JournalError: see `StageRows`.
            RequestTimeout: a block was not taken in `timeout` seconds.
            LevadaError: an error of `connection`.
        """
        staging = _Staging(self, head, timeout)
        try:
            for block in _blocks_of(batches):
                staging.send(block)
            return staging.finish()
        finally:
            staging.close()

    def append(
        self,
        batch: pa.RecordBatch,
        *,
        partition: int | None = None,
        key: str | None = None,
        timeout: float | None = TIMEOUT,
    ) -> AppendedRows:
        """Append rows directly, as `Mailbox.append` does. An append that was sent is not repeated, because it may have been written."""
        route, head = f"mailbox/{self.name}/append", AppendHead(partition, key)
        answer = self._call(
            lambda peer: peer.request_response(rows_payload(route, head, batch, self.traced()), timeout=timeout),
            again=False,
        )
        done: AppendedRows = _codec.decode(answer.data, AppendedRows)
        return done


@attrs.define(eq=False)
class _Sent:
    """A block on its way."""

    payload: Payload
    end: int
    """Rows up to the end of this one."""
    pending: PendingAnswer | None = None
    """The pending answer; None: not sent over this connection yet."""


class _Staging:
    """Rows of one task on their way into a stage. Blocks are kept until they are answered, and sent again if the bridge was away."""

    def __init__(self, mailbox: RemoteMailbox, head: StageHead, timeout: float) -> None:
        self._mailbox = mailbox
        self._head = head
        self._timeout = timeout
        self._sent: deque[_Sent] = deque()
        self._rows = 0
        self._waiting = _Patience(PATIENCE)

    def send(self, block: pa.RecordBatch) -> None:
        """Send one more block; wait while `WINDOW` are on their way."""
        while len(self._sent) >= WINDOW:
            self._take()
        to = self._head
        head = StageHead(to.query, to.batch, to.part, to.attempt, self._rows)
        self._rows += block.num_rows
        mailbox = self._mailbox
        _connected(mailbox.address, mailbox.token_file, self._waiting)  # which says whether the bridge traces
        payload = rows_payload(f"mailbox/{mailbox.name}/stage", head, block, mailbox.traced())
        self._sent.append(_Sent(payload, self._rows))
        self._push()

    def finish(self) -> int:
        """Wait until all blocks are staged; return the number of rows."""
        while self._sent:
            self._take()
        return self._rows

    def close(self) -> None:
        """Withdraw the blocks on their way."""
        for each in self._sent:
            if each.pending is not None:
                each.pending.cancel()
                each.pending = None

    def _push(self) -> None:
        """Send the blocks that are not on their way."""
        while any(each.pending is None for each in self._sent):
            peer = _connected(self._mailbox.address, self._mailbox.token_file, self._waiting)
            try:
                for each in self._sent:
                    if each.pending is None:
                        each.pending = peer.start_request(each.payload, timeout=self._timeout)
            except _AWAY as error:
                self.close()
                self._waiting.wait(error)

    def _take(self) -> None:
        """Wait for the answer to the oldest block."""
        oldest = self._sent[0]
        assert oldest.pending is not None
        try:
            answer: int = _codec.decode(oldest.pending.result(self._timeout).data, int)
        except (RequestFailed, *_AWAY) as error:
            # All blocks from this one on are sent again, in order: those behind it may have been refused for the gap.
            self.close()
            self._waiting.wait(error)
            self._push()
            return
        if answer != oldest.end:
            raise BridgeError(f"{answer} rows are staged where {oldest.end} should be")
        self._sent.popleft()
        self._waiting.found()


class _Held:
    """Collects the blocks of a log, because a block can be as small as one group of commands."""

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema
        self._blocks: list[pa.RecordBatch] = []
        self._rows = self._bytes = 0

    def add(self, block: pa.RecordBatch, *, is_last: bool) -> Iterator[pa.RecordBatch]:
        """Take a block; yield the events that are due."""
        if self._blocks and self._blocks[0].schema != block.schema:
            yield from self._events()
        if block.num_rows:
            self._blocks.append(block)
            self._rows += block.num_rows
            self._bytes += block.nbytes
        if is_last or self._rows >= HELD_ROWS or self._bytes >= BLOCK_BYTES:
            yield from self._events()

    def _events(self) -> Iterator[pa.RecordBatch]:
        if self._blocks:
            rows = joined(self._blocks)
            self._blocks, self._rows, self._bytes = [], 0, 0
            events = events_of(rows)
            if events.num_rows:
                yield fit(events, self._schema)


def _blocks_of(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        if not batch.num_rows:
            continue
        size = max(1, min(BLOCK_ROWS, BLOCK_BYTES * batch.num_rows // max(1, batch.nbytes)))
        for at in range(0, batch.num_rows, size):
            yield batch.slice(at, size)
