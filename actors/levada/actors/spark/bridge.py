"""The bridge on the actors' side: mailboxes that Spark reads and writes, actors that executors ask, and subscriptions.

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

A Spark job then reads it with ``spark.readStream.format("mailbox").option("address", bridge.address).option("mailbox", "readings").load()``.

Access: a process must know the token, which is in a file that only the bridge's user can read. Over the Unix socket the process must also
belong to that user. Over TLS the certificate authenticates the bridge.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, cast, overload

import attrs
import pyarrow as pa
import trio

from levada.actors.authentication import Authenticate, Authentication
from levada.actors.descriptors import raise_descriptor_limit
from levada.actors.journal.actor import Journal
from levada.actors.journal.columns import Columns, Envelope, columns_of
from levada.actors.journal.config import JournalConfig
from levada.actors.journal.extent import Appended, Extent
from levada.actors.journal.ipc import rows_of_stream
from levada.actors.journal.ledger import Reach
from levada.actors.journal.places import archive_place
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
from levada.actors.journal.store import Store
from levada.actors.metrics.spark import bridge_samples
from levada.actors.rsocket import Request, RequestInvalid
from levada.framework import Actor, ActorSystem, Codec, Ref, Sample, Sender, bounded, handles, restart
from levada.framework.errors import ActorError, ActorStopped, ConfigurationError, LevadaError
from levada.framework.platform import PLATFORM
from levada.transports.rsocket import Payload

from .bridge_reading import JournalAway, blocks_of, require_epoch
from .bridge_subscription import Delivery, RowKey, Subscription
from .desk import BridgeConfig, Desk, SharedLimit, check_url, listening, message_of, shared_token, take_folder
from .protocol import (
    AppendedRows,
    BridgeError,
    CommitOffsets,
    Compare,
    Compared,
    Declare,
    DeliverBatch,
    DeliveredBatch,
    Describe,
    Description,
    DiscardBatch,
    MeasureRows,
    ReadBlocks,
    StageHead,
    Token,
    UnknownName,
    WaitForRows,
    failed,
    head_of,
    names,
    shown,
)

if TYPE_CHECKING:
    from levada.actors.durable import Shards
    from levada.actors.journal.archive import Archive
    from levada.framework.files import Files, StrPath

__all__ = ["Bridge", "Delivery", "Mailbox", "RowKey", "serve_bridge"]

M = TypeVar("M")
T = TypeVar("T")

logger = logging.getLogger("levada.actors.spark")

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")

CLEAN_EVERY = 60.0  # seconds
LONGEST_WAIT = 3600.0  # seconds that a process may wait for rows
OPENING = 30.0
"""Seconds for a restarted bridge to open its former mailboxes."""


@attrs.frozen(eq=False)
class Mailbox(Generic[M]):
    """A journal with a name. Made by `Bridge.mailbox`."""

    name: str
    ref: Ref[Any]
    """The `Journal` actor, which takes `Append`, `Read` and its other questions."""
    columns: Columns[M] | None
    """Columns of the message class; ``None`` if the mailbox was made with an Arrow schema."""
    log: pa.Schema | None = None
    """The columns that Spark sees, if this is the log of a durable class, which only its entities write."""
    journal: Ref[Any] | JournalAway = attrs.field(default=attrs.Factory(lambda self: self.ref, takes_self=True))
    """The journal, as the bridge asks it; it may be in another process."""
    archive: Archive | None = None
    """Where the trimmed rows of the log are."""

    async def append(
        self, rows: Sequence[M] | pa.RecordBatch, *, partition: int | None = None, key: str | bytes | None = None
    ) -> Appended:
        """Append rows; return when they are on disk. Waits while the journal is full. Raises the errors of `Append`.

        Cancellation:
            the rows may have been written.
        """
        return cast("Appended", await self.ref.ask(Append(rows, partition, key), timeout=None))


@attrs.frozen
class _Clean:
    """Drop the staged rows of jobs that were killed."""


class _Home(Actor[_Clean]):
    """The parent of a bridge's journals and subscriptions. It fails if a journal cannot be kept running."""

    max_age: float
    """`BridgeConfig.max_staged_age`."""

    def __attrs_post_init__(self) -> None:
        self.journals: list[Ref[Any]] = []
        self.pending: SharedLimit
        self.reads: SharedLimit

    def metrics(self) -> Iterable[Sample]:
        """Return the counts of the bridge."""
        pending, reads = self.pending, self.reads
        return bridge_samples(
            mailboxes=len(self.journals),
            pending_bytes=pending.used,
            reads=reads.used,
            refused=pending.refused + reads.refused,
        )

    def started(self) -> None:
        self.timers.every("clean", CLEAN_EVERY, _Clean())

    @handles
    async def clean(self, _: _Clean) -> None:
        """Drop the staged rows of jobs that were killed."""
        for journal in self.journals:
            try:
                dropped = await journal.ask(DiscardOlder(self.max_age), timeout=None)
            except ActorStopped:
                continue  # it is restarting, and is cleaned the next time
            for query, batch in dropped:
                logger.warning("batch %d of %s was never delivered", batch, query, extra={"event": "batch_dropped"})


class Bridge(Desk):
    """An open bridge. Made by `serve_bridge`."""

    def __init__(
        self, home: _Home, directory: Path, token: Token, config: BridgeConfig, authentication: Authentication | None
    ) -> None:
        super().__init__(directory, token, config, authentication)
        self._home = home
        self._mailboxes: dict[str, Mailbox[Any]] = {}
        self._columns: dict[str, tuple[str, bytes]] = {}
        """By mailbox: an opening of its journal, and the columns since then."""
        self._archived: dict[tuple[str, int], tuple[int, int]] = {}
        """By log and shard: how far it was trimmed, and where its archive began then."""
        files = PLATFORM.get().files
        self._missing = {path.name for kind in ("mailboxes", "logs") for path in files.glob(directory / kind, "*")}
        """Names of mailboxes on disk that are not open yet, and of logs that were open before."""
        self._subscriptions: dict[tuple[str, str], list[Ref[Any]]] = {}
        """By mailbox and group: the newest one."""
        self._named = trio.lowlevel.ParkingLot()
        """Woken for each new mailbox or actor."""
        self._opened_by = trio.current_time() + OPENING
        self._codec = Codec()
        self._reads = SharedLimit("streams of rows", config.max_reads, config.max_total_reads)
        home.pending, home.reads = self.pending, self._reads

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
        """Open a mailbox, or make it. Its journal is in ``mailboxes/NAME``.

        Args:
            name: letters, digits, dots, dashes and underscores, up to 100.
            columns: a message class or an Arrow schema. None: the mailbox's own columns, or `Envelope`'s for a new mailbox.
            partitions: the number of partitions, which is fixed when the mailbox is made. None: as in `config`, or 1.
            config: the settings of the journal.

        Raises:
            ConfigurationError: the name is invalid or taken, the journal has another number of partitions, or a new mailbox has a column that
                Spark cannot read.
            JournalError: the journal cannot be opened, see `Store.open`.

        Cancellation:
            the bridge has no such mailbox, though its files may exist.
        """
        self._check_name(name)
        settings = config or JournalConfig()
        if partitions is not None:
            settings = attrs.evolve(settings, partitions=partitions)
        folder = self.directory / "mailboxes" / name
        known: Columns[Any] | None = columns_of(columns) if isinstance(columns, type) else None
        schema = known.schema if known is not None else cast("pa.Schema | None", columns)
        platform = PLATFORM.get()
        if schema is not None and not platform.files.exists(folder):
            check_for_spark(schema)
        # Opened here first, so that an error reaches the caller instead of failing an actor later.
        opened = await platform.run_in_thread(partial(Store.open, folder, schema, settings))
        opened.close()
        if known is None and opened.schema.equals(columns_of(Envelope).schema):
            known = columns_of(Envelope)
        ref = self._home.spawn(
            partial(Journal, folder, columns, config=settings),
            name=name,
            mailbox=bounded(256),
            supervise=restart("transient", initial_backoff=0.1, max_backoff=5.0),
        )
        self._home.journals.append(ref)
        return self._open(Mailbox(name, ref, known))

    async def log(self, name: str, of: Shards[Any] | Ref[Any], *, archive: StrPath | None = None) -> None:
        """Show Spark the events of a durable class, as a mailbox that it cannot write to.

        Its columns are ``entity``, ``sequence``, ``command``, ``time``, ``kind`` (the wire name of the event), and the fields of all events. A field
        that an event does not have is null. Rows that are not events, and rows of erased entities, are left out. The rows of an entity come
        in order, in one partition. Rows that were trimmed are read from the archive, if there is one.

        Args:
            name: as for `mailbox`.
            of: the result of `levada.actors.durable.shards` in this process; or its journal, which may be in another process (`keeper`), or any
                `levada.actors.journal.TailedLog`.
            archive: where rows go that are trimmed, see `levada.actors.durable.Keep`. None: as ``shards(keep=…)`` has it.

        Raises:
            ConfigurationError: the name is invalid or taken, or the journal is not the log of a durable class.
            JournalError: the archive is out of reach.
            ActorStopped, ActorError: the journal is away.

        Cancellation:
            the bridge has no such mailbox.
        """
        self._check_name(name)
        journal = of if isinstance(of, Ref) else of.journal
        if journal is None:
            raise ConfigurationError("the log is read where shards() was called: open the bridge there")
        columns = shown(pa.ipc.read_schema(pa.py_buffer(await journal.ask(GetSchema(), timeout=None))))
        extent: Extent = await journal.ask(GetExtent(), timeout=None)
        asked: Ref[Any] | JournalAway = journal
        try:
            await journal.ask(Read(0, extent.end[0], extent.end[0]), timeout=None)
        except ActorStopped:
            raise
        except (TypeError, ActorError):  # blocks of mapped files do not travel, and another store has none
            asked = JournalAway(journal)
        place = archive_place(archive) if archive is not None else "" if isinstance(of, Ref) else of.archive
        opened, platform = None, PLATFORM.get()
        if place:
            from levada.actors.journal.archive import Archive  # Arrow's Parquet takes 50 ms

            opened = await platform.run_in_thread(Archive.at, place, platform.files)
        await platform.run_in_thread(_note, platform.files, self.directory / "logs" / name)
        self._open(Mailbox(name, journal, None, columns, asked, opened))

    def _check_name(self, name: str) -> None:
        if not _NAME.fullmatch(name):
            raise ConfigurationError(
                f"the name of a mailbox is {name!r}, wanted up to 100 letters, digits, '.', '-' and '_'"
            )
        if name in self._mailboxes:
            raise ConfigurationError(f"this bridge has a mailbox {name!r} already")

    def _open(self, made: Mailbox[Any]) -> Mailbox[Any]:
        self._mailboxes[made.name] = made
        self._missing.discard(made.name)
        self._named.unpark_all()
        return made

    def subscribe(
        self,
        name: str,
        target: Ref[Any] | Sender[Any],
        *,
        group: str,
        keyed: bool = True,
        at: Literal["first", "end"] = "first",
    ) -> Ref[Any]:
        """Deliver the rows of a mailbox to an actor or a sender, as messages of its class, from the group's offsets on.

        Rows come in order within each partition, at least once: the group's offsets are committed after rows were delivered, block by block.

        Args:
            name: a mailbox of this bridge that has a message class.
            target: an actor that is asked, or a sender that gets, a `Delivery` for each row. An actor is done with a row when its handler has
                returned.
            group: the name under which the offsets are kept. A group has one subscription at a time, and no query of Spark: a later subscription
                begins when the former one has ended.
            keyed: whether the target gets `Delivery` messages. False: it gets the rows' messages, and a row is done once it is in the target's
                mailbox.
            at: where a new group begins.

        Returns:
            The subscription, an actor to stop or watch. It ends with its target, and fails if the target's handler, or the journal, fails
            repeatedly on the same rows, or at once if the group is not text of up to 1,000 characters. When the journal restarts, it goes on.

        Raises:
            UnknownName: there is no such mailbox.
            ConfigurationError: the mailbox has no message class.
        """
        mailbox = self._find(name)
        if mailbox.columns is None:
            raise ConfigurationError(f"mailbox {name!r} has columns but no message class: give one to mailbox()")
        former = [ref for ref in self._subscriptions.get((name, group), ()) if ref.is_alive]
        found = self._home.spawn(partial(Subscription, mailbox, target, former, group=group, keyed=keyed, at=at))
        self._subscriptions[name, group] = [*former, found]
        return found

    def expose(self, name: str, ref: Ref[Any]) -> None:
        """Offer an actor to executors by a name; see `levada.actors.spark.asks`. The actor handles its own messages, or `AskRows`.

        After a restart, executors wait for names until all former mailboxes are open, so expose actors before you open the last mailbox.

        Raises:
            ConfigurationError: the name has a slash or is taken.
        """
        super().expose(name, ref)
        self._named.unpark_all()

    async def until_named(self, name: str, among: Mapping[str, object]) -> None:
        """Wait for a name, for `OPENING` seconds at most, while a restarted program is still opening its former mailboxes."""
        with trio.move_on_at(self._opened_by):
            while name not in among and self._missing:
                await self._named.park()

    async def _opened(self, name: str, *, to_write: bool = False) -> Mailbox[Any]:
        found = self._mailboxes.get(name)
        if found is None:
            await self.until_named(name, self._mailboxes)
            found = self._find(name)
        if to_write and found.log is not None:
            raise ConfigurationError(f"{name} is the log of a durable class, which only its entities write: ask them")
        return found

    def _find(self, name: str) -> Mailbox[Any]:
        found = self._mailboxes.get(name)
        if found is None:
            what = "is open, although it is on disk" if name in self._missing else "here"
            raise UnknownName(f"no mailbox {name!r} {what}; there are: {names(self._mailboxes)}", name)
        return found

    def answer(self, request: Request) -> Any:
        """Answer a request; the handler of the servers."""
        kind, _, rest = request.route.partition("/")
        name, _, verb = rest.partition("/")
        match kind, verb:
            case "mailbox", "read":
                return self._read(name, request)
            case "mailbox", "":
                return self.telling(self._question, name, request)
            case "mailbox", "stage" | "append":
                return self.telling(self._take, name, request)
        return super().answer(request)

    async def _question(self, name: str, request: Request) -> Any:
        question = message_of(request)
        answer = _ANSWERS.get(type(question))
        if answer is None:
            raise RequestInvalid(f"no question for a mailbox: {type(question).__name__}")
        mailbox = await self._opened(name, to_write=isinstance(question, DeliverBatch | DiscardBatch))
        if isinstance(question, MeasureRows) and mailbox.archive is not None:
            extent = await _describe(mailbox.journal, Describe())
            if question.start < extent.whole.get(question.partition, 0):
                return await PLATFORM.get().run_in_thread(_file_end, mailbox.archive, question)
        found = await answer(mailbox.journal, question)
        return await self._description(mailbox, found) if isinstance(found, Extent) else found

    async def _description(self, mailbox: Mailbox[Any], extent: Extent) -> Description:
        if mailbox.log is not None:
            columns = mailbox.log.serialize().to_pybytes()
        else:
            opening, columns = self._columns.get(mailbox.name, ("", b""))
            if opening != extent.opening:
                columns = await mailbox.journal.ask(GetSchema(), timeout=None)
                self._columns[mailbox.name] = extent.opening, columns
        first = extent.whole
        if mailbox.archive is not None:
            look = PLATFORM.get().run_in_thread
            first = await look(self._first_archived, mailbox.name, mailbox.archive, first)
        return Description(extent.epoch, first, dict(extent.end), columns, extent.opening)

    def _first_archived(self, name: str, archive: Archive, whole: Mapping[int, int]) -> dict[int, int]:
        """Return the offsets from which on log and archive have all rows. The archive is looked at after each trim."""
        found = {}
        for shard, end in whole.items():
            known = self._archived.get((name, shard), (0, 0))
            if known[0] != end:
                known = self._archived[name, shard] = end, archive.first(shard, end)
            found[shard] = known[1]
        return found

    async def _read(self, name: str, request: Request) -> AsyncIterator[Payload]:
        m: ReadBlocks = request.message(ReadBlocks)
        with self._reads.counted(request.connection, 1):
            try:
                mailbox = self._mailboxes.get(name) or await self._opened(name)
                async with aclosing(blocks_of(name, mailbox.journal, m, mailbox.archive)) as blocks:
                    async for payload in blocks:
                        yield payload
            except LevadaError as error:
                raise failed(error) from error

    async def _take(self, name: str, request: Request) -> Payload:
        journal = (await self._opened(name, to_write=True)).ref
        head = head_of(request.entries)
        batch = rows_of_stream(request.data)
        if isinstance(head, StageHead):
            rows = _made(StageRows, head.query, head.batch, head.part, head.attempt, batch, head.at)
            return Payload(self._codec.encode(await journal.ask(rows, timeout=None)))
        append = _made(Append, batch, head.partition, head.key)
        done = cast("Appended", await journal.ask(append, timeout=None))  # without `at` it is never fenced
        return Payload(self._codec.encode(AppendedRows(done.partition, done.first, done.count)))


def _note(files: Files, path: Path) -> None:
    """Make an empty file, unless it is there, and its folder."""
    files.make_folder(path.parent)
    with files.opened(path, os.O_WRONLY | os.O_CREAT):
        pass


def _made(kind: Callable[..., T], *args: Any) -> T:
    """Make a question from a peer's values.

    Raises:
        BridgeError: a value is invalid.
    """
    try:
        return kind(*args)
    except (TypeError, ValueError) as error:
        raise BridgeError(f"invalid request: {error.args[0]}") from error


async def _compare(journal: Any, m: Compare) -> Compared:
    reach: Reach = await journal.ask(GetReach(m.opening), timeout=None)
    return Compared(reach.known, dict(reach.ends))


async def _describe(journal: Any, _: Describe) -> Extent:
    return cast("Extent", await journal.ask(GetExtent(), timeout=None))


async def _wait(journal: Any, m: WaitForRows) -> Extent:
    with trio.move_on_after(m.seconds if 0 <= m.seconds <= LONGEST_WAIT else LONGEST_WAIT):
        return cast("Extent", await journal.ask(AwaitRows(m.after, m.rows), timeout=None))
    return await _describe(journal, Describe())


async def _measure(journal: Any, m: MeasureRows) -> int:
    return cast("int", await journal.ask(_made(OffsetWithin, m.partition, m.start, m.end, m.max_bytes), timeout=None))


def _file_end(archive: Archive, m: MeasureRows) -> int:
    """Return where a batch from the archive ends: with the file that it begins in, which has 64 MiB of rows at most."""
    ends = (file.end for file in archive.files(m.partition) if file.end > m.start)
    return min(m.end, next(ends, m.end))


async def _declare(journal: Any, m: Declare) -> dict[int, int]:
    return dict(await journal.ask(_made(DeclareGroup, m.group, "end" if m.at_end else "first"), timeout=None))


async def _commit(journal: Any, m: CommitOffsets) -> None:
    await require_epoch(journal, m.epoch)
    await journal.ask(_made(CommitGroup, m.group, m.offsets), timeout=None)


async def _deliver(journal: Any, m: DeliverBatch) -> DeliveredBatch:
    question = _made(Deliver, m.query, m.batch, m.winners, m.rows, m.after, m.accept_loss)
    done = await journal.ask(question, timeout=None)
    return DeliveredBatch(done.already, {number: list(between) for number, between in done.ranges.items()})


async def _discard(journal: Any, m: DiscardBatch) -> int:
    return cast("int", await journal.ask(_made(DiscardStaged, m.query, m.batch, m.part, m.attempt), timeout=None))


_ANSWERS: dict[type, Callable[[Any, Any], Awaitable[Any]]] = {
    Compare: _compare,
    Describe: _describe,
    WaitForRows: _wait,
    MeasureRows: _measure,
    Declare: _declare,
    CommitOffsets: _commit,
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
    """Open a bridge and listen. Leaving the block closes connections, writes pending appends, and closes mailboxes.

    After a restart, requests for a mailbox that is not open yet wait for it, for `OPENING` seconds at most.
    The process's soft limit of file descriptors is raised to its hard limit.

    Args:
        system: has been entered. It fails if a mailbox's journal cannot be kept running.
        directory: the folder of ``bridge.socket``, ``bridge.token`` and ``mailboxes``. It is made if it is missing, and only this user may be able
            to open it. The token stays the same as long as its file exists, so running jobs can reconnect after a restart.
        url: ``tls://host:port`` for executors on other machines; needs `BridgeConfig.tls`.
        authenticate: decides about clients that know the token, for example by their address, and names them: see
            `levada.actors.authentication`. Without it, all have the identity ``spark``.
        config: the settings of the bridge.

    Raises:
        ConfigurationError: the directory cannot be used or is open to other users, another bridge listens there, or the URL or the
            certificates cannot be used.

    Cancellation:
        connections are closed at once.
    """
    platform = PLATFORM.get()
    if platform.network is None:  # a simulated process has other descriptors
        raise_descriptor_limit()
    settings = config or BridgeConfig()
    folder = await platform.run_in_thread(take_folder, directory)
    check_url(url, settings)
    await platform.run_in_thread(platform.files.make_durable_folder, folder / "mailboxes")
    token = await shared_token(folder / "bridge.token", settings)
    home = _Home(settings.max_staged_age)
    ref: Ref[Any] = system.spawn(lambda: home, supervise="escalate")
    further = Authentication.of(authenticate)
    bridge = Bridge(home, folder, token, settings, further)
    try:
        async with listening(system, bridge, folder / "bridge.socket", url, settings):
            yield bridge
    finally:
        ref.stop()
    await ref.terminated()
