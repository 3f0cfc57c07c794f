"""The end of the bridge in Spark's processes, driver and executors: connections that are kept, and calls that block.

A process has one connection for each bridge, made when it is first needed and made again when it was lost; a forked child makes its own.
A bridge that is away is waited for, `PATIENCE` seconds each time, so that the actors' side may start again under a running query: all that may
be done twice without harm is done again, which is all but an append that was sent. Blocks of rows are told apart by their place.

Imports trio, by way of the framework, and never runs it.
"""

from __future__ import annotations

import os
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar
from urllib.parse import unquote, urlsplit

import attrs
import pyarrow as pa

from levada.actors.rsocket import COMPOSITE, ClientConfig, CoreConfig, RequestFailed, RequestRejected, SetupRejected
from levada.actors.rsocket.blocking import BlockingPeer, PendingAnswer, RequestTimeout, connect
from levada.framework import Asks, Codec
from levada.framework.errors import ActorStopped, ConfigurationError, ConnectionClosed, ConnectionLost, LevadaError
from levada.transports.carriers import TlsConfig
from levada.transports.rsocket import Payload
from levada.transports.rsocket.extensions import BearerAuthentication, CompositeMetadata

from .protocol import (
    WINDOW,
    AppendedRows,
    AppendHead,
    BlockHead,
    BridgeError,
    BridgeRefused,
    Describe,
    Description,
    Measure,
    ReadRows,
    StageHead,
    Token,
    WaitForRows,
    host_id,
    raised,
    rows_payload,
)
from .schema import fit

__all__ = ["RemoteMailbox", "call", "connection"]

R = TypeVar("R")

CONNECT_TIMEOUT = 10.0
"""Seconds for a connection."""
TIMEOUT = 60.0
"""Seconds for an answer, unless told otherwise."""
PATIENCE = 30.0
"""Seconds for which a bridge that is away is waited for."""
PAUSES = 0.05, 1.0
"""Seconds before the next try, and the most; doubled from one to the other."""
BLOCK_ROWS, BLOCK_OCTETS = 16_384, 4 << 20
"""Size of a block that is sent, at most, unless a single row is larger."""

_codec = Codec()
_lock = threading.Lock()
_connections: dict[tuple[str, str | None], BlockingPeer] = {}


def connection(address: str, token_file: str | None = None) -> BlockingPeer:
    """Return this process's connection to a bridge; make it if there is none, or none any more.

    Args:
        address: ``unix:///path`` and ``tls://host:port``, one or several joined by commas: what `Bridge.address` says. A Unix socket is the way on
            the bridge's own machine only.
        token_file: path, or the name of a file that was shipped with the job (``spark-submit --files``). None: ``bridge.token`` beside the Unix
            socket.

    Raises:
        BridgeRefused: the bridge does not let this process in.
        ConnectionLost: nobody answers at any of the addresses.
        ConfigurationError: an address or a token file that cannot be used.
    """
    key = (address, token_file)
    with _lock:
        peer = _connections.get(key)
        if peer is None or peer.closed:
            peer = _connections[key] = _connect(address, token_file)
        return peer


def _forget() -> None:
    """In a forked child: what is there belongs to the parent."""
    global _lock
    _lock = threading.Lock()
    for peer in _connections.values():
        peer.close()
    _connections.clear()


os.register_at_fork(after_in_child=_forget)


def _connect(address: str, token_file: str | None) -> BlockingPeer:
    urls = [part.strip() for part in address.split(",") if part.strip()]
    if not urls:
        raise ConfigurationError("option address is empty: give what Bridge.address says")
    path = _token_path(urls, token_file)
    token = Token.read(path)
    ways = [url for url in urls if urlsplit(url).scheme != "unix" or token.host == host_id()]
    if not ways:
        raise ConnectionLost(
            f"the bridge at {address} is on another machine: give it a tls:// URL (serve_bridge(url=…)) and this job its address"
        )
    failures: list[str] = []
    for url in ways:
        try:
            return _open(url, token)
        except SetupRejected as error:
            raise BridgeRefused(f"the bridge at {url} refuses this process: {error} ({path})") from error
        except ConnectionLost as error:
            failures.append(str(error))
        except (RequestTimeout, RequestRejected):
            # Not raised as it is: a bridge on a busy machine, or that is closing, is waited for like one that is not there.
            failures.append(f"{url} takes connections and said nothing for {CONNECT_TIMEOUT:g} s")
    raise ConnectionLost(f"no bridge answers: {'; '.join(failures)}")


def _open(url: str, token: Token) -> BlockingPeer:
    setup = Payload(b"", CompositeMetadata.of(BearerAuthentication(token.secret)).encode())
    config = ClientConfig(core=CoreConfig(metadata_mime_type=COMPOSITE, setup_payload=setup), window=WINDOW)
    parts = urlsplit(url)
    if parts.scheme == "tls":
        config = attrs.evolve(config, carrier=TlsConfig(context=_trusting(token)))
    elif parts.scheme == "unix":
        url = f"unix://{parts.path}"
    else:
        raise ConfigurationError(f"an address is unix:///path or tls://host:port, not {url!r}")
    peer = connect(f"rsocket+{url}", config=config, timeout=CONNECT_TIMEOUT)
    try:
        # SETUP is not answered: the first answer tells whether this process was let in.
        peer.request_response(b"", route="hello", timeout=CONNECT_TIMEOUT)
    except BaseException:
        peer.close()
        raise
    return peer


def _token_path(urls: list[str], token_file: str | None) -> str:
    if token_file is None:
        for url in urls:
            if urlsplit(url).scheme == "unix":
                return str(Path(unquote(urlsplit(url).path)).with_name("bridge.token"))
        raise ConfigurationError(
            "option tokenFile is missing: an address without a Unix socket does not tell where the token is"
        )
    if not Path(token_file).exists() and not os.path.isabs(token_file):
        from pyspark import SparkFiles

        return str(SparkFiles.get(token_file))
    return token_file


def _trusting(token: Token) -> ssl.SSLContext:
    context = ssl.create_default_context(cadata=token.trust or None)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if token.trust:
        # What is in the token file is trusted as it is, also where it is no authority's but the bridge's own certificate.
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


# ---------------------------------------------------------------- calls


_AWAY = ConnectionLost, ConnectionClosed, RequestRejected, ActorStopped
"""What a bridge says, or does not say, that ends or starts again; or the journal of a mailbox that does."""


class _Patience:
    """How long a bridge that is away is waited for."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.found()

    def found(self) -> None:
        """It is there: the next time that it is away is another one."""
        self._until: float | None = None
        self._pause = PAUSES[0]

    def wait(self, error: LevadaError, away: tuple[type[LevadaError], ...] = _AWAY) -> None:
        """Sleep a little; or raise what the actors' side met, if that says not that the bridge is away, or it has been for too long."""
        problem = raised(error) if isinstance(error, RequestFailed) else error
        now = time.monotonic()
        if self._until is None:
            self._until = now + self._seconds
        if not isinstance(problem, away) or now + self._pause > self._until:
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
    """Do something with the connection; errors of the actors' side are raised as what they were there.

    Args:
        address: see `connection`.
        token_file: see `connection`.
        use: what to do.
        again: it may be done twice, so do it again if the connection is lost meanwhile.
        patience: seconds to wait for a bridge that is away. None: `PATIENCE`.

    Raises:
        LevadaError: what `use` raises, and what `connection` does.
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
    """A mailbox as Spark's processes see it. Plain data, may be pickled: the connection is looked up at each call."""

    address: str
    name: str
    token_file: str | None = None

    # ------------------------------------------------------------ questions

    def ask(self, question: Asks[R], *, timeout: float | None = TIMEOUT, patience: float | None = None) -> R:
        """Ask one of the questions of `levada.actors.spark.protocol`; all may be asked twice.

        Raises:
            RequestTimeout: no answer in `timeout` seconds.
            LevadaError: what the actors' side raises, and what `connection` does.
        """
        return self._call(
            lambda peer: peer.request_response(question, route=f"mailbox/{self.name}", timeout=timeout),
            patience=patience,
        )

    def describe(self) -> Description:
        """Ask what there is."""
        return self.ask(Describe())

    def wait_for_rows(self, after: dict[int, int], rows: int, seconds: float) -> Description:
        """Ask what there is, once there are so many rows behind these offsets, or `seconds` later."""
        return self.ask(WaitForRows(after, rows, seconds), timeout=seconds + TIMEOUT)

    def measure(self, partition: int, start: int, end: int, max_bytes: int) -> int:
        """Ask how far so many octets of rows reach."""
        return self.ask(Measure(partition, start, end, max_bytes))

    def _call(self, use: Callable[[BlockingPeer], R], *, again: bool = True, patience: float | None = None) -> R:
        return call(self.address, self.token_file, use, again=again, patience=patience)

    # ------------------------------------------------------------ reading

    def read(
        self, partition: int, start: int, end: int, *, epoch: str, schema: pa.Schema, opening: str | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Yield rows, with at most `WINDOW` blocks on their way; goes on where it was when the connection is lost.

        Args:
            partition: its number.
            start: offset of the first row.
            end: offset behind the last one.
            epoch: of the journal that the offsets belong to.
            schema: the columns wanted; older rows get defaults for those they do not have.
            opening: of the journal that the offsets belong to; None: any.

        Raises:
            OffsetGone, EpochChanged, JournalBehind, JournalError: the rows are not there.
            SchemaMismatch: the columns do not fit.
        """
        waiting = _Patience(PATIENCE)
        while start < end:
            peer = _connected(self.address, self.token_file, waiting)
            try:
                for head, batch in self._blocks(peer, ReadRows(partition, start, end, epoch, opening)):
                    if head.first != start:
                        raise BridgeError(f"rows from {head.first} on came, where those from {start} on were due")
                    start += head.rows
                    waiting.found()
                    yield fit(batch, schema)
                if start < end:
                    raise BridgeError(f"rows ended at {start}, wanted up to {end}")
            except (RequestFailed, *_AWAY) as error:
                waiting.wait(error)

    def _blocks(self, peer: BlockingPeer, question: ReadRows) -> Iterator[tuple[BlockHead, pa.RecordBatch]]:
        route = f"mailbox/{self.name}/read"
        with peer.request_stream(_codec.encode(question), route=route, window=WINDOW, timeout=TIMEOUT) as stream:
            schema: pa.Schema | None = None
            for item in stream:
                head = BlockHead.decode(item.metadata or b"")
                if head.schema:
                    schema = pa.ipc.read_schema(pa.py_buffer(head.schema))
                if schema is None:
                    raise BridgeError("the first block of a stream came without its columns")
                yield head, pa.ipc.read_record_batch(pa.py_buffer(item.data), schema).slice(head.skip, head.rows)

    # ------------------------------------------------------------ writing

    def stage(self, head: StageHead, batches: Iterable[pa.RecordBatch], *, timeout: float = TIMEOUT) -> int:
        """Put rows aside, with at most `WINDOW` blocks on their way; return how many. Goes on when a bridge that was away is back.

        Raises:
            JournalFull, SchemaMismatch, JournalError: see `StageRows`.
            RequestTimeout: a block was not taken in `timeout` seconds.
            LevadaError: what `connection` raises.
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
        """Append rows at once, as `Mailbox.append`; once sent, not tried again, as nobody can tell whether a lost one was written."""
        payload = rows_payload(f"mailbox/{self.name}/append", AppendHead(partition, key), batch)
        answer = self._call(lambda peer: peer.request_response(payload, timeout=timeout), again=False)
        done: AppendedRows = _codec.decode(answer.data, AppendedRows)
        return done


@attrs.define(eq=False)
class _Sent:
    """A block on its way."""

    payload: Payload
    end: int
    """Rows up to the end of this one."""
    pending: PendingAnswer | None = None
    """None: not on this connection yet."""


class _Staging:
    """Rows of one task on their way into a stage. Blocks are kept until they are answered, and sent again when the bridge was away."""

    def __init__(self, mailbox: RemoteMailbox, head: StageHead, timeout: float) -> None:
        self._mailbox = mailbox
        self._head = head
        self._timeout = timeout
        self._sent: deque[_Sent] = deque()
        self._rows = 0
        self._waiting = _Patience(PATIENCE)

    def send(self, block: pa.RecordBatch) -> None:
        """Send one more; waits while `WINDOW` are on their way."""
        while len(self._sent) >= WINDOW:
            self._take()
        to = self._head
        head = StageHead(to.query, to.batch, to.part, to.attempt, self._rows)
        self._rows += block.num_rows
        self._sent.append(_Sent(rows_payload(f"mailbox/{self._mailbox.name}/stage", head, block), self._rows))
        self._push()

    def finish(self) -> int:
        """Wait until all are staged; return how many rows."""
        while self._sent:
            self._take()
        return self._rows

    def close(self) -> None:
        """Withdraw what is under way."""
        for each in self._sent:
            if each.pending is not None:
                each.pending.cancel()
                each.pending = None

    def _push(self) -> None:
        """Send what is not on its way."""
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
            # In order, and from this one on: the blocks behind it may have been refused for the gap.
            self.close()
            self._waiting.wait(error)
            self._push()
            return
        if answer != oldest.end:
            raise BridgeError(f"{answer} rows are staged where {oldest.end} should be")
        self._sent.popleft()
        self._waiting.found()


def _blocks_of(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        if not batch.num_rows:
            continue
        size = max(1, min(BLOCK_ROWS, BLOCK_OCTETS * batch.num_rows // max(1, batch.nbytes)))
        for at in range(0, batch.num_rows, size):
            yield batch.slice(at, size)
