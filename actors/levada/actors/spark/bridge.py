"""The actors' end of the bridge: mailboxes that Spark reads and writes, actors that its executors ask, subscriptions.

Example:
    >>> import tempfile
    >>> import trio
    >>> from levada.framework import ActorSystem, message
    >>> from levada.actors.spark.bridge import serve_bridge
    >>> @message("docs.Reading")
    ... class Reading:
    ...     sensor: str
    ...     value: float
    >>> async def main(directory: str) -> None:
    ...     async with ActorSystem() as system, serve_bridge(system, directory) as bridge:
    ...         readings = await bridge.mailbox("readings", Reading)
    ...         print(await readings.append([Reading("north", 21.5)]))
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     trio.run(main, directory)
    Appended(partition=0, first=0, count=1, repeated=0)

A Spark job then reads it by ``spark.readStream.format("mailbox").option("address", bridge.address).option("mailbox", "readings").load()``.

Access: a process must know the token, which is in a file that only the bridge's user may read. Over the Unix socket it must also belong to that
user, as do the socket's file and folder. Over TLS the certificate authenticates the bridge.
"""

from __future__ import annotations

import hmac
import logging
import os
import re
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar, cast, overload
from urllib.parse import quote, urlsplit

import attrs
import pyarrow as pa
import trio

from levada.actors.authentication import Authenticate, Authentication, Credentials, Refused
from levada.actors.journal.actor import Journal
from levada.actors.journal.columns import Columns, Envelope, columns_of
from levada.actors.journal.config import JournalConfig
from levada.actors.journal.errors import JournalBehind, JournalError, JournalUnwritable
from levada.actors.journal.extent import Appended, Extent
from levada.actors.journal.ipc import rows_of_stream, stream_of
from levada.actors.journal.ledger import Reach
from levada.actors.journal.questions import (
    Append,
    AwaitRows,
    CommitGroup,
    DeclareGroup,
    Deliver,
    DiscardOlder,
    DiscardStaged,
    GetExtent,
    GetReach,
    GetSchema,
    OffsetWithin,
    Read,
    StageRows,
)
from levada.actors.journal.schema import check_for_spark
from levada.actors.journal.segments import Block
from levada.actors.journal.store import Store
from levada.actors.rsocket import (
    COMPOSITE,
    ConnectedPeer,
    CoreConfig,
    Request,
    RequestFailed,
    RequestInvalid,
    RequestRejected,
    ServerConfig,
    serve,
)
from levada.framework import Actor, ActorSystem, Codec, Identity, Ref, Sender, bounded, handles, restart
from levada.framework.errors import ActorStopped, ConfigurationError, DecodeError, LevadaError
from levada.transports.carriers import TlsConfig, UnixConfig
from levada.transports.rsocket import Payload
from levada.transports.text import printable

from .asks import AskRows
from .bridge_subscription import Delivery, RowKey, Subscription
from .protocol import (
    REQUEST_ID,
    ActorFailed,
    AppendedRows,
    BlockHead,
    BridgeError,
    Commit,
    Compare,
    Compared,
    Declare,
    DeliverBatch,
    DeliveredBatch,
    Describe,
    Description,
    DiscardBatch,
    EpochChanged,
    Measure,
    ReadRows,
    StageHead,
    Token,
    UnknownName,
    WaitForRows,
    failed,
    head_of,
    names,
)

__all__ = ["Bridge", "BridgeConfig", "Delivery", "Mailbox", "RowKey", "serve_bridge"]

M = TypeVar("M")
T = TypeVar("T")

logger = logging.getLogger("levada.actors.spark")

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_CERTIFICATES = re.compile(r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----\n?", re.DOTALL)

CLEAN_EVERY = 60.0  # seconds
LONGEST_WAIT = 3600.0  # seconds that a process may wait for rows
MAX_PAYLOAD = 64 << 20
"""Bytes of one request."""
MAX_SETUP = 1 << 16
"""Bytes that a process may send before it is let in."""
OPENING = 30.0
"""Seconds that a restarted bridge has to open the mailboxes it had."""
READ_OCTETS = 4 << 20
"""Bytes of blocks taken from the journal at a time, for one stream; a block is at least one."""


@attrs.frozen(kw_only=True)
class BridgeConfig:
    """How a bridge behaves. Immutable; derive with `attrs.evolve`."""

    tls: TlsConfig | None = None
    """Certificate and key, for a bridge with a ``tls://`` URL. The token file has the certificates, without the key, for executors to trust."""
    advertise: str | None = None
    """Host name or address of the TLS listener for executors; ``None``: the host of the URL, or of this machine if that is a wildcard."""
    allowed_uids: frozenset[int] | None = attrs.field(factory=lambda: frozenset({os.getuid()}))
    """Users whose processes may use the Unix socket; ``None``: any process that can open it and has the token."""
    max_connections: int = 1024
    """Processes of Spark at once."""
    max_requests: int = 1024
    """Requests of one process at once. One more is refused before anything is done, and the process sends it again a little later."""
    max_reads: int = 64
    """Streams of rows among these requests; each holds one block."""
    max_pending_bytes: int = 64 << 20
    """Bytes of rows and messages of one process that wait for the disk or for an actor. More are refused in the same way, except that a single
    request may have 64 MiB."""
    max_total_reads: int = 320
    """Streams of rows of all processes. A process gets a quarter of the rest at most, so a new process finds room."""
    max_total_pending_bytes: int = 320 << 20
    """Bytes of rows and messages of all processes that wait; shared in the same way."""
    max_items: int = 1 << 18
    """Values in a message; see `Codec.max_items`."""
    max_staged_age: float = 6 * 3600.0
    """Seconds after which a staged batch is dropped if no task added rows and no driver delivered it: its job was killed."""
    drain: float = 5.0
    """Seconds that pending requests get at the end."""


@attrs.frozen(eq=False)
class Mailbox(Generic[M]):
    """A journal behind a name. Made by `Bridge.mailbox`."""

    name: str
    ref: Ref[Any]
    """The `Journal`: takes `Append`, `Read` and all its other questions."""
    columns: Columns[M] | None
    """Columns of the message class; ``None`` if the mailbox was made with an Arrow schema."""

    async def append(
        self, rows: Sequence[M] | pa.RecordBatch, *, partition: int | None = None, key: str | bytes | None = None
    ) -> Appended:
        """Append rows; return when they are on the disk, and wait while the journal is full. Raises as `Append` fails.

        Cancellation:
            the rows may have been written.
        """
        return cast("Appended", await self.ref.ask(Append(rows, partition, key), timeout=None))


@attrs.frozen
class _Clean:
    """Time to drop batches of jobs that were killed."""


class _Home(Actor[_Clean]):
    """Parent of the journals and subscriptions of a bridge; fails if a journal cannot be kept running."""

    max_age: float
    """`BridgeConfig.max_staged_age`."""

    def __attrs_post_init__(self) -> None:
        self.journals: list[Ref[Any]] = []

    def started(self) -> None:
        self.timers.every("clean", CLEAN_EVERY, _Clean())

    @handles
    async def clean(self, _: _Clean) -> None:
        """Drop the staged rows of jobs that were killed."""
        for journal in self.journals:
            try:
                dropped = await journal.ask(DiscardOlder(self.max_age), timeout=None)
            except ActorStopped:
                continue  # it starts again, and is cleaned the next time
            for query, batch in dropped:
                logger.warning("batch %d of %s was never delivered", batch, query, extra={"event": "batch_dropped"})


class Bridge:
    """An open bridge. Made by `serve_bridge`."""

    def __init__(
        self, home: _Home, directory: Path, token: Token, config: BridgeConfig, authentication: Authentication | None
    ) -> None:
        self.directory = directory
        self.address = ""
        """For the option ``address`` of a Spark source or sink: one URL or several, joined by commas."""
        self.token_file = directory / "bridge.token"
        """For the option ``tokenFile``; not needed with the Unix socket."""
        self._home = home
        self._secret = token.secret
        self._authentication = authentication
        self._mailboxes: dict[str, Mailbox[Any]] = {}
        self._exposed: dict[str, Ref[Any]] = {}
        self._missing = {path.name for path in (directory / "mailboxes").glob("*")}
        """Mailboxes on the disk that have not been opened."""
        self._named = trio.Event()
        """Set, and replaced, for each new mailbox or actor."""
        self._opened_by = trio.current_time() + OPENING
        self._codec = Codec()
        self._pending = _Share("bytes", config.max_pending_bytes, config.max_total_pending_bytes)
        self._reads = _Share("streams of rows", config.max_reads, config.max_total_reads)

    @overload
    async def mailbox(
        self, name: str, columns: type[M], *, partitions: int | None = None, config: JournalConfig | None = None
    ) -> Mailbox[M]: ...
    @overload
    async def mailbox(
        self,
        name: str,
        columns: pa.Schema | None = None,
        *,
        partitions: int | None = None,
        config: JournalConfig | None = None,
    ) -> Mailbox[Any]: ...
    async def mailbox(
        self,
        name: str,
        columns: type | pa.Schema | None = None,
        *,
        partitions: int | None = None,
        config: JournalConfig | None = None,
    ) -> Mailbox[Any]:
        """Open a mailbox, or make it; its journal is in ``mailboxes/NAME``.

        Args:
            name: letters, digits, dots, dashes and underscores.
            columns: a message class, an Arrow schema, or None for the mailbox's own, or `Envelope`'s for a new mailbox.
            partitions: their number, which is fixed when the mailbox is made. None: as in `config`, or 1.
            config: how the journal is kept.

        Raises:
            ConfigurationError: the name is not valid or taken, the journal has another number of partitions, or a new one has a column that
                Spark cannot read.
            JournalError: the journal cannot be opened, see `Store.open`.

        Cancellation:
            the bridge has no such mailbox, though its files may exist.
        """
        if not _NAME.fullmatch(name):
            raise ConfigurationError(f"a mailbox is named by letters, digits, '.', '-' and '_', not {name!r}")
        if name in self._mailboxes:
            raise ConfigurationError(f"this bridge has a mailbox {name!r} already")
        settings = config or JournalConfig()
        if partitions is not None:
            settings = attrs.evolve(settings, partitions=partitions)
        folder = self.directory / "mailboxes" / name
        known: Columns[Any] | None = columns_of(columns) if isinstance(columns, type) else None
        schema = known.schema if known is not None else cast("pa.Schema | None", columns)
        if schema is not None and not folder.exists():
            check_for_spark(schema)
        # Opened here first, so that an error reaches the caller and is not a failure of an actor later.
        opened = await trio.to_thread.run_sync(partial(Store.open, folder, schema, settings))
        opened.close()
        if known is None and opened.schema.equals(columns_of(Envelope).schema):
            known = columns_of(Envelope)
        ref = self._home.spawn(
            partial(Journal, folder, columns, config=settings),
            name=name,
            mailbox=bounded(256),
            supervise=restart("transient", backoff=(0.1, 5.0)),
        )
        self._home.journals.append(ref)
        made = self._mailboxes[name] = Mailbox(name, ref, known)
        self._missing.discard(name)
        self._tell_named()
        return made

    def expose(self, name: str, ref: Ref[Any]) -> None:
        """Let executors ask an actor by a name; see `levada.actors.spark.asks`. It takes its own messages, or `AskRows`.

        Executors of a restarted bridge wait until all its mailboxes are open, so expose actors before you open the last one.

        Raises:
            ConfigurationError: the name has a slash or is taken.
        """
        if not name or "/" in name or self._exposed.get(name, ref) is not ref:
            raise ConfigurationError(f"an actor is exposed by a name of its own without '/', not {name!r}")
        self._exposed[name] = ref
        self._tell_named()

    def subscribe(
        self,
        name: str,
        target: Ref[Any] | Sender[Any],
        *,
        group: str,
        keyed: bool = True,
        at: Literal["first", "end"] = "first",
    ) -> Ref[Any]:
        """Give the rows of a mailbox to an actor or to a sender, as messages of its class, from the group's offsets on.

        In order within each partition. At least once: the group's offsets are set after rows were handed over, some at a time.

        Args:
            name: a mailbox of this bridge, with a message class.
            target: asked, or sent, a `Delivery` for each row. An actor is done with a row when its handler has returned.
            group: name under which the offsets are kept; one subscription for each group at a time.
            keyed: False: the target gets the bare messages; a row is done with as soon as it is in the mailbox.
            at: where a new group begins.

        Returns:
            The subscription, to be stopped or watched. It ends with its target, and fails if the target's handler fails repeatedly on the
            same row.

        Raises:
            UnknownName: there is no such mailbox.
            ConfigurationError: the mailbox has no message class.
        """
        mailbox = self._find(name)
        if mailbox.columns is None:
            raise ConfigurationError(f"mailbox {name!r} has columns but no message class: give one to mailbox()")
        return self._home.spawn(partial(Subscription, mailbox, target, group=group, keyed=keyed, at=at))

    def _tell_named(self) -> None:
        self._named.set()
        self._named = trio.Event()

    async def _until_named(self, name: str, among: Mapping[str, object]) -> None:
        """Wait for a name while the application, after a restart, still opens the mailboxes it had."""
        with trio.move_on_at(self._opened_by):
            while name not in among and self._missing:
                await self._named.wait()

    async def _journal(self, name: str) -> Ref[Any]:
        await self._until_named(name, self._mailboxes)
        return self._find(name).ref

    def _find(self, name: str) -> Mailbox[Any]:
        found = self._mailboxes.get(name)
        if found is None:
            what = "is open, though it is on the disk" if name in self._missing else "here"
            raise UnknownName(f"no mailbox {name!r} {what}; there are: {names(self._mailboxes)}", name)
        return found

    async def admit(self, credentials: Credentials) -> Identity | Refused:
        """Decide on a client by its token, then by the program's own hook; the hook of the servers."""
        known = credentials.scheme == "bearer" and hmac.compare_digest(credentials.token, self._secret.encode())
        if not known:
            return Refused("the token belongs to another bridge")
        if self._authentication is None:
            return Identity("spark")
        return await self._authentication.ask(attrs.evolve(credentials, scheme="", token=b""))

    def answer(self, request: Request) -> Any:
        """Answer a request; the handler of the servers."""
        kind, _, rest = request.route.partition("/")
        name, _, verb = rest.partition("/")
        match kind, verb:
            case "mailbox", "read":
                return self._read(name, request)
            case "mailbox", "":
                return self._telling(self._question, name, request)
            case "mailbox", "stage" | "append":
                return self._telling(self._take, name, request)
            case "ask", "":
                return self._telling(self._ask_message, name, request)
            case "ask", "batch":
                return self._telling(self._ask_rows, name, request)
            case "hello", "":
                return Payload(b"")
        raise RequestInvalid(f"no route {printable(request.route)!r}")

    async def _telling(self, answer: Callable[[str, Request], Awaitable[Any]], name: str, request: Request) -> Any:
        """Answer, with errors that keep their class and fields, while the request counts as pending."""
        size = len(request.data) + len(request.metadata or b"")
        with self._pending.counted(request.connection, size):
            try:
                return await answer(name, request)
            except (RequestFailed, DecodeError):
                raise
            except LevadaError as error:
                raise failed(error) from error
            except OSError as error:
                raise failed(JournalUnwritable(str(error))) from error

    async def _question(self, name: str, request: Request) -> Any:
        question = _message_of(request)
        answer = _ANSWERS.get(type(question))
        if answer is None:
            raise RequestInvalid(f"no question for a mailbox: {type(question).__name__}")
        journal = await self._journal(name)
        return await answer(journal, question)

    async def _read(self, name: str, request: Request) -> AsyncIterator[Payload]:
        m: ReadRows = request.message(ReadRows)
        with self._reads.counted(request.connection, 1):
            try:
                journal = await self._journal(name)
                await _require_epoch(journal, m.epoch)
                await _require_rows(journal, m)
                start, schema = m.start, None
                while start < m.end:
                    question = Read(m.partition, start, m.end, READ_OCTETS)
                    blocks: list[Block] = await journal.ask(question, timeout=None)
                    if not blocks:
                        raise JournalError(
                            f"rows {start} to {m.end} of partition {m.partition} of {name} are not there"
                        )
                    for block in blocks:
                        columns = b"" if block.schema is schema else block.schema.serialize().to_pybytes()
                        head = BlockHead(block.first, block.rows, block.skip, columns)
                        yield Payload(block.octets.to_pybytes(), head.encode())
                        schema, start = block.schema, block.end
            except LevadaError as error:
                raise failed(error) from error

    async def _take(self, name: str, request: Request) -> Payload:
        journal = await self._journal(name)
        head = head_of(request.entries)
        batch = rows_of_stream(request.data)
        if isinstance(head, StageHead):
            rows = _made(StageRows, head.query, head.batch, head.part, head.attempt, batch, head.at)
            return Payload(self._codec.encode(await journal.ask(rows, timeout=None)))
        append = _made(Append, batch, head.partition, head.key)
        done = cast("Appended", await journal.ask(append, timeout=None))  # without `at` it is never fenced
        return Payload(self._codec.encode(AppendedRows(done.partition, done.first, done.count)))

    async def _ask_message(self, name: str, request: Request) -> Any:
        return await self._ask(name, _message_of(request))

    async def _ask(self, name: str, question: Any) -> Any:
        await self._until_named(name, self._exposed)
        ref = self._exposed.get(name)
        if ref is None:
            raise UnknownName(f"no actor is exposed as {name!r}; there are: {names(self._exposed)}", name)
        try:
            return await ref.ask(question, timeout=None)
        except ActorStopped as error:
            if error.__cause__ is None:
                raise
            text = f"{name} ({ref.path}) failed on this question: {error.__cause__!r}"
            raise ActorFailed(text, ref.path) from error

    async def _ask_rows(self, name: str, request: Request) -> Payload:
        asked = rows_of_stream(request.data)
        tried = (entry.metadata for entry in request.entries.entries if entry.mime_type == REQUEST_ID)
        answer = await self._ask(name, AskRows(asked, next(tried, b"").decode("ascii", "replace")))
        if not isinstance(answer, pa.RecordBatch) or answer.num_rows != asked.num_rows:
            got = f"{answer.num_rows} rows" if isinstance(answer, pa.RecordBatch) else type(answer).__name__
            raise ActorFailed(f"{name} answered {asked.num_rows} rows by {got}", self._exposed[name].path)
        return Payload(stream_of(answer))


@attrs.define
class _Share:
    """A limited resource, shared by the connections of a bridge.

    One connection holds a quarter of the free rest at most. So one alone takes a fifth of all, and each of several that never let go leaves
    four fifths of what it found: ten leave a tenth.
    """

    _what: str
    _most: int
    """Limit of one connection."""
    _total: int
    _used: int = 0
    _held: Counter[ConnectedPeer] = attrs.field(factory=Counter)

    @contextmanager
    def counted(self, peer: ConnectedPeer, more: int) -> Iterator[None]:
        """Count `more` of a peer while the block runs; refuse if that is too much, unless it is the only one."""
        own, free = self._held[peer], self._total - self._used
        if own and own + more > self._most:
            raise RequestRejected(
                f"{own} {self._what} of this connection wait, at most {self._most}; send it again later"
            )
        if self._used and (4 * (own + more) > free if own else more > free):
            raise RequestRejected(
                f"{self._used} {self._what} of all connections wait, at most {self._total}; send it again later"
            )
        self._held[peer] += more
        self._used += more
        try:
            yield
        finally:
            self._used -= more
            self._held[peer] -= more
            if not self._held[peer]:
                del self._held[peer]


def _message_of(request: Request) -> Any:
    if not request.holds_message:
        raise RequestInvalid("this route takes a message; its MIME type is missing")
    return request.message()


def _made(kind: Callable[..., T], *args: Any) -> T:
    """Make a question of a peer's values; a value that it does not take is the peer's fault."""
    try:
        return kind(*args)
    except (TypeError, ValueError) as error:
        raise BridgeError(f"no such question: {error.args[0]}") from error


async def _require_epoch(journal: Ref[Any], wanted: str) -> None:
    extent: Extent = await journal.ask(GetExtent(), timeout=None)
    if extent.epoch != wanted:
        raise EpochChanged(
            f"these offsets are of journal {wanted}, and now there is {extent.epoch}: it was deleted and made anew, or this is another bridge. "
            "Start the query with a new checkpoint",
            wanted,
            extent.epoch,
        )


async def _require_rows(journal: Ref[Any], m: ReadRows) -> None:
    """Require that the rows are still the same as when the task was planned."""
    if m.opening is not None:
        reach: Reach = await journal.ask(GetReach(m.opening), timeout=None)
        kept = reach.ends.get(m.partition, m.end)
        if not reach.known or kept < m.end:
            raise JournalBehind(
                f"partition {m.partition}: rows {m.start} to {m.end - 1} were asked for as they were when the journal was open as {m.opening}, "
                f"and since then it was put back to row {kept}",
                opening=m.opening,
                partition=m.partition,
                wanted=m.end,
                kept=kept,
            )


async def _compare(journal: Ref[Any], m: Compare) -> Compared:
    reach: Reach = await journal.ask(GetReach(m.opening), timeout=None)
    return Compared(reach.known, dict(reach.ends))


async def _describe(journal: Ref[Any], _: Describe) -> Description:
    extent: Extent = await journal.ask(GetExtent(), timeout=None)
    return await _description(journal, extent)


async def _description(journal: Ref[Any], extent: Extent) -> Description:
    schema: pa.Schema = await journal.ask(GetSchema(), timeout=None)
    return Description(
        extent.epoch, dict(extent.first), dict(extent.end), schema.serialize().to_pybytes(), extent.opening
    )


async def _wait(journal: Ref[Any], m: WaitForRows) -> Description:
    with trio.move_on_after(m.seconds if 0 <= m.seconds <= LONGEST_WAIT else LONGEST_WAIT):
        await journal.ask(AwaitRows(m.after, m.rows), timeout=None)
    return await _describe(journal, Describe())


async def _measure(journal: Ref[Any], m: Measure) -> int:
    return cast("int", await journal.ask(_made(OffsetWithin, m.partition, m.start, m.end, m.max_bytes), timeout=None))


async def _declare(journal: Ref[Any], m: Declare) -> dict[int, int]:
    return dict(await journal.ask(_made(DeclareGroup, m.group, "end" if m.at_end else "first"), timeout=None))


async def _commit(journal: Ref[Any], m: Commit) -> None:
    await _require_epoch(journal, m.epoch)
    await journal.ask(_made(CommitGroup, m.group, m.offsets), timeout=None)


async def _deliver(journal: Ref[Any], m: DeliverBatch) -> DeliveredBatch:
    done = await journal.ask(_made(Deliver, m.query, m.batch, m.winners, m.rows), timeout=None)
    return DeliveredBatch(done.already, {number: list(between) for number, between in done.ranges.items()})


async def _discard(journal: Ref[Any], m: DiscardBatch) -> int:
    return cast("int", await journal.ask(_made(DiscardStaged, m.query, m.batch, m.part, m.attempt), timeout=None))


_ANSWERS: dict[type, Callable[[Ref[Any], Any], Awaitable[Any]]] = {
    Compare: _compare,
    Describe: _describe,
    WaitForRows: _wait,
    Measure: _measure,
    Declare: _declare,
    Commit: _commit,
    DeliverBatch: _deliver,
    DiscardBatch: _discard,
}


@asynccontextmanager
async def serve_bridge(
    system: ActorSystem,
    directory: str | os.PathLike[str],
    *,
    url: str | None = None,
    authenticate: Authenticate | Authentication | None = None,
    config: BridgeConfig | None = None,
) -> AsyncIterator[Bridge]:
    """Open a bridge and listen. Leaving the block closes connections, then mailboxes, whose appends are written first.

    After a restart, requests for a mailbox that is not open yet wait until it is, for `OPENING` seconds at most.

    Args:
        system: has been entered. It fails if a mailbox's journal cannot be kept running.
        directory: made if it is not there, and this user's alone. Holds ``bridge.socket``, ``bridge.token`` and ``mailboxes``. The token stays
            the same as long as its file exists, so that running jobs come back after a restart.
        url: ``tls://host:port``, for executors on other machines; with `BridgeConfig.tls`.
        authenticate: decides further on clients that know the token, for example by their address, and names them: see
            `levada.actors.authentication`. Without it, they all have the identity ``spark``.
        config: see `BridgeConfig`.

    Raises:
        ConfigurationError: the directory is open to others or another bridge listens there, or the URL or the certificates cannot be used.

    Cancellation:
        connections are closed at once.
    """
    settings = config or BridgeConfig()
    folder = _take_folder(directory)
    if (url is None) != (settings.tls is None):
        raise ConfigurationError(
            "a bridge for other machines takes both: url='tls://host:port', and certificates in BridgeConfig(tls=…)"
        )
    if url is not None and urlsplit(url).scheme != "tls":
        raise ConfigurationError(f"a bridge for other machines listens at tls://host:port, not {url!r}")
    token = _token(folder / "bridge.token", settings)
    home = _Home(settings.max_staged_age)
    ref: Ref[Any] = system.spawn(lambda: home, supervise="escalate")
    further = Authentication.of(authenticate)
    bridge = Bridge(home, folder, token, settings, further)
    admission = Authentication(bridge.admit) if further is None else attrs.evolve(further, hook=bridge.admit)
    common = ServerConfig(
        drain=settings.drain,
        max_connections=settings.max_connections,
        max_fire_and_forget=1,  # no route uses it
        max_request_octets=settings.max_pending_bytes,
        codec=Codec(max_items=settings.max_items),
        core=CoreConfig(
            metadata_mime_type=COMPOSITE,
            max_streams=settings.max_requests,
            max_reassembly=MAX_PAYLOAD,
            max_payload_size=MAX_PAYLOAD,
            max_setup_backlog=MAX_SETUP,
        ),
    )
    try:
        async with AsyncExitStack() as stack:
            at = quote(str(folder / "bridge.socket"))
            unix = attrs.evolve(common, carrier=UnixConfig(allowed_uids=settings.allowed_uids))
            await stack.enter_async_context(
                serve(system, f"rsocket+unix://{at}", bridge.answer, authenticate=admission, config=unix)
            )
            bridge.address = f"unix://{at}"
            if url is not None:
                tls = attrs.evolve(common, carrier=settings.tls)
                listener = await stack.enter_async_context(
                    serve(system, f"rsocket+{url}", bridge.answer, authenticate=admission, config=tls)
                )
                bridge.address += f",{_advertised(listener.url, settings)}"
            yield bridge
    finally:
        ref.stop()
    await ref.terminated()


def _take_folder(directory: str | os.PathLike[str]) -> Path:
    folder = Path(directory).absolute()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ConfigurationError(
            f"{folder} holds a token and must be this user's alone: it belongs to user {found.st_uid}, mode "
            f"{found.st_mode & 0o777:o} (chmod 700, or choose another one)"
        )
    (folder / "mailboxes").mkdir(mode=0o700, exist_ok=True)
    return folder


def _token(path: Path, settings: BridgeConfig) -> Token:
    trust = ""
    if settings.tls is not None and settings.tls.certificate is not None:
        trust = "".join(_CERTIFICATES.findall(Path(settings.tls.certificate).read_text()))
    token = Token.make(trust=trust)
    if path.exists():
        token = attrs.evolve(token, secret=Token.read(path).secret)
    token.write(path)
    return token


def _advertised(url: str, settings: BridgeConfig) -> str:
    parts = urlsplit(url.removeprefix("rsocket+"))
    host = settings.advertise or parts.hostname or ""
    if host in ("0.0.0.0", "::", ""):
        host = socket.getfqdn()
    return f"tls://[{host}]:{parts.port}" if ":" in host else f"tls://{host}:{parts.port}"
