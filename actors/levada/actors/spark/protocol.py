"""The protocol of the bridge and Spark's processes: routes, questions, blocks of rows, errors, and the token file.

The wire is RSocket with composite metadata; the routing extension says where a request goes:

======================  ===================  ==================================================================================
route                   interaction          carries
======================  ===================  ==================================================================================
``mailbox/NAME``        request-response     one of the questions below, answered by a message
``mailbox/NAME/read``   request-stream       a `ReadBlocks`; each item is a block: an Arrow record batch message, and as metadata a `BlockHead`
``mailbox/NAME/stage``  request-response     an Arrow IPC stream of one batch, with a `StageHead` in the metadata; answered by the rows so far
``mailbox/NAME/append`` request-response     an Arrow IPC stream of one batch, with an `AppendHead`; answered by an `AppendedRows`
``ask/NAME``            request-response     a message for an actor, answered by its reply
``ask/NAME/batch``      request-response     an Arrow IPC stream for an actor, answered by another one
``hello``               request-response     nothing; the answer tells a process that it was let in, and whether the bridge traces
======================  ===================  ==================================================================================

A failure is answered with an error of code `PROBLEM`; `raised` turns its data into the exception of the actors' side.
Payloads are plain data: nothing is pickled. Both ends import this module, which starts nothing.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import attrs
import pyarrow as pa

from levada.actors.journal import errors as journal_errors
from levada.actors.journal.ipc import stream_of
from levada.actors.journal.log_events import event_columns
from levada.actors.rsocket import RequestFailed
from levada.framework import Asks, Codec, message
from levada.framework import errors as framework_errors
from levada.framework.errors import (
    ActorError,
    ActorStopped,
    AskTimeout,
    ConfigurationError,
    ConnectionLost,
    LevadaError,
)
from levada.framework.platform import PLATFORM
from levada.transports.private_files import warn_if_others_can_read
from levada.transports.rsocket import Payload
from levada.transports.rsocket.extensions import CompositeMetadata, Entry, Routing, ZipkinTracing

__all__ = [
    "PROBLEM", "REQUEST_ID", "WINDOW", "ActorFailed", "AppendHead", "AppendedRows", "BlockHead", "BridgeError",
    "BridgeRefused", "BridgeUnreachable", "CommitOffsets", "Compare", "Compared", "Declare", "DeliverBatch", "DeliveredBatch", "Describe",
    "Description", "DiscardBatch", "EpochChanged", "MeasureRows", "ReadBlocks", "StageHead", "Token", "UnknownName",
    "WaitForRows", "failed", "head_of", "host_id", "is_log", "names", "raised", "rows_payload", "shown",
]  # fmt: skip

PROBLEM = 0x301
"""The code of an error whose data is a `LevadaError` in msgpack. Codes above 0x300 belong to applications."""
WINDOW = 8
"""The number of blocks by which a reader or a writer may be ahead of the other side."""
HEAD = "application/vnd.levada.bridge+msgpack"
"""The MIME type of the metadata that describes the rows in the data: a `StageHead` or an `AppendHead`."""
REQUEST_ID = "application/vnd.levada.request-id"
"""The MIME type of the metadata that identifies a question; all attempts have the same id."""

_LOG = b"levada.log"
"""Marks the columns of a log. Its tasks leave out all rows but events, so the bridge can send blocks as they are on disk."""

_codec = Codec()


@attrs.define(eq=False, slots=False, str=False)
class BridgeError(LevadaError):
    """An error of the bridge or of the connection to it; the subclass says which."""


@attrs.define(eq=False, slots=False, str=False)
class BridgeRefused(BridgeError, PermissionError):
    """The bridge refuses this process: it has the wrong token or belongs to another user."""


@attrs.define(eq=False, slots=False, str=False)
class BridgeUnreachable(BridgeError, ConnectionLost):
    """No attempt can succeed: the address is for another machine, has no route, or a certificate that is not trusted. Nothing waits for it."""


@attrs.define(eq=False, slots=False, str=False)
class UnknownName(BridgeError, LookupError):
    """The bridge has no mailbox, or no actor, of this name."""

    name: str = ""
    """The unknown name."""


@attrs.define(eq=False, slots=False, str=False)
class EpochChanged(BridgeError):
    """Offsets belong to another journal: its directory was deleted and created again, or this is another mailbox."""

    wanted: str = ""
    """The epoch of the offsets."""
    found: str = ""
    """The epoch of the journal."""


@attrs.define(eq=False, slots=False, str=False)
class ActorFailed(ActorError):
    """An actor failed on a question; the text has its exception."""


_CLASSES: dict[str, type[LevadaError]] = {
    cls.__name__: cls
    for cls in (
        BridgeError,
        UnknownName,
        EpochChanged,
        ActorFailed,
        ActorStopped,
        AskTimeout,
        ConfigurationError,
        *(getattr(journal_errors, name) for name in journal_errors.__all__),
    )
}
_PLAIN = (str, int, float, bool, type(None))


def failed(error: LevadaError) -> RequestFailed:
    """Encode an error for the wire; `raised` decodes it at the other end."""
    kind = next((cls.__name__ for cls in type(error).__mro__ if cls.__name__ in _CLASSES), "BridgeError")
    fields: dict[str, Any] = {}
    for attribute in attrs.fields(_CLASSES[kind]):
        value = getattr(error, attribute.name)
        if isinstance(value, tuple) and all(isinstance(each, str) for each in value):
            fields[attribute.name] = list(value)
        elif isinstance(value, _PLAIN):
            fields[attribute.name] = value
    fields["detail"] = str(error) if kind == "BridgeError" else error.detail
    # `True` makes the last byte other than 0, because zeros at the end of an error's data count as a terminator.
    return RequestFailed(str(error), code=PROBLEM, data=_codec.encode([kind, fields, True]))


def raised(error: RequestFailed) -> LevadaError:
    """Decode the exception of the other end from an error; return any other error unchanged."""
    if error.code != PROBLEM:
        return error
    try:
        kind, fields, _ = _codec.decode(error.data, list[Any])
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()
        }
        return _CLASSES[kind](**values)
    except (framework_errors.DecodeError, KeyError, TypeError, ValueError, AttributeError):
        return BridgeError(f"the bridge sent an error that this version cannot read: {error.data[:200]!r}")


@message("levada.spark.Description", frozen=True)
class Description:
    """Columns and extent of a mailbox."""

    epoch: str
    """As in `levada.actors.journal.Extent`, like `opening`."""
    first: dict[int, int]
    """For each partition, the offset from which on nothing was trimmed."""
    end: dict[int, int]
    """For each partition, the offset after the newest row."""
    schema: bytes
    """The columns, as an Arrow IPC message."""
    opening: str

    def columns(self) -> pa.Schema:
        """Return the columns in `schema`."""
        return pa.ipc.read_schema(pa.py_buffer(self.schema))


@message("levada.spark.Describe", frozen=True)
class Describe(Asks[Description]):
    """Ask for a `Description`."""


@message("levada.spark.Compared", frozen=True)
class Compared:
    """How far rows are still the same: a `levada.actors.journal.Reach` as a message."""

    known: bool
    ends: dict[int, int]


@message("levada.spark.Compare", frozen=True)
class Compare(Asks[Compared]):
    """Ask how far the rows of an opening are still the same."""

    opening: str | None


@message("levada.spark.WaitForRows", frozen=True)
class WaitForRows(Asks[Description]):
    """Ask for a `Description` once there are `rows` rows, or after `seconds`."""

    after: dict[int, int]
    """For each partition, the offset at which counting starts."""
    rows: int
    seconds: float


@message("levada.spark.Measure", frozen=True)
class MeasureRows(Asks[int]):
    """Ask for the offset that `max_bytes` of rows reach."""

    partition: int
    start: int
    end: int
    max_bytes: int


@message("levada.spark.Declare", frozen=True)
class Declare(Asks[dict[int, int]]):
    """Declare a group; the answer is its offsets."""

    group: str
    at_end: bool = False


@message("levada.spark.Commit", frozen=True)
class CommitOffsets(Asks[None]):
    """Set the offsets of a group."""

    group: str
    epoch: str
    offsets: dict[int, int]


@message("levada.spark.DeliveredBatch", frozen=True)
class DeliveredBatch:
    """The place of a batch: a `levada.actors.journal.Delivered` as a message."""

    already: bool
    ranges: dict[int, list[int]]


@message("levada.spark.DeliverBatch", frozen=True)
class DeliverBatch(Asks[DeliveredBatch]):
    """Deliver a staged batch, once; see `levada.actors.journal.Deliver`."""

    query: str
    batch: int
    winners: dict[int, int]
    """For each part, the attempt that counts."""
    rows: dict[int, int] = attrs.field(factory=dict[int, int])
    """For each part, the number of staged rows."""
    after: int | None = None
    """As in `levada.actors.journal.Deliver`, like `accept_loss`."""
    accept_loss: bool = False


@message("levada.spark.DiscardBatch", frozen=True)
class DiscardBatch(Asks[int]):
    """Drop staged rows; see `levada.actors.journal.DiscardStaged`."""

    query: str
    batch: int
    part: int | None = None
    attempt: int | None = None


@message("levada.spark.ReadRows", frozen=True)
class ReadBlocks:
    """Read the rows of one partition from `start` up to `end`, a block at a time."""

    partition: int
    start: int
    end: int
    epoch: str
    opening: str | None = None
    """The opening of the offsets; None: any."""


@message("levada.spark.StageHead", frozen=True)
class StageHead:
    """Identifies the rows of a `levada.actors.journal.StageRows`."""

    query: str
    batch: int
    part: int
    attempt: int
    at: int = 0
    """The number of rows of this part before these. With it, rows that are repeated after a lost connection are staged once."""


@message("levada.spark.AppendHead", frozen=True)
class AppendHead:
    """Where these rows go, as in `levada.actors.journal.Append`."""

    partition: int | None = None
    key: str | None = None


@message("levada.spark.AppendedRows", frozen=True)
class AppendedRows:
    """Where rows went."""

    partition: int
    first: int
    count: int


Head = StageHead | AppendHead


def rows_payload(route: str, head: Head, batch: pa.RecordBatch, trace: Iterable[ZipkinTracing] = ()) -> Payload:
    """Make a request from rows and their head. `trace` comes from `levada.actors.spark.tracing.belonging_to`."""
    metadata = CompositeMetadata.of(Routing(route), Entry(HEAD, _codec.encode(head)), *trace)
    return Payload(stream_of(batch), metadata.encode())


def head_of(entries: CompositeMetadata) -> Head:
    """Return the head that `rows_payload` wrote; `DecodeError` if there is none."""
    data = next((entry.metadata for entry in entries.entries if entry.mime_type == HEAD), b"")
    head: Head = _codec.decode(data, StageHead | AppendHead)
    return head


_BLOCK_HEAD = struct.Struct(">QII")


@attrs.frozen
class BlockHead:
    """The metadata of each block in a stream of rows."""

    first: int
    """Offset of the first row asked for."""
    rows: int
    """Number of rows asked for."""
    skip: int
    """Rows of the message before them."""
    schema: bytes = b""
    """Columns of this block and the following ones, as an Arrow IPC message; empty: as the block before."""

    def encode(self) -> bytes:
        """Return the wire format."""
        return _BLOCK_HEAD.pack(self.first, self.rows, self.skip) + self.schema

    @classmethod
    def decode(cls, data: bytes) -> BlockHead:
        """Read the wire format; `BridgeError` if it is cut off."""
        if len(data) < _BLOCK_HEAD.size:
            raise BridgeError(f"the head of a block has {len(data)} bytes, wanted {_BLOCK_HEAD.size} or more")
        first, rows, skip = _BLOCK_HEAD.unpack_from(data)
        return cls(first, rows, skip, data[_BLOCK_HEAD.size :])


def shown(log: pa.Schema) -> pa.Schema:
    """Return the columns of the log of a durable class that Spark sees, marked as a log's; `ConfigurationError` if this is no such log."""
    return event_columns(log).with_metadata({_LOG: b""})


def is_log(columns: pa.Schema) -> bool:
    """Whether `shown` made these columns."""
    return _LOG in (columns.metadata or {})


def host_id() -> str:
    """Return an id of this machine and its boot, with which a process knows whether it can use the Unix socket."""
    boot, platform = "/proc/sys/kernel/random/boot_id", PLATFORM.get()
    text = platform.files.read(boot).decode() if platform.files.exists(boot) else ""
    return hashlib.sha256(f"{platform.host()} {text}".encode()).hexdigest()[:32]


@attrs.frozen
class Token:
    """The content of a token file: a secret, the machine, and for TLS the certificates to trust."""

    secret: str = attrs.field(repr=False)
    """64 hexadecimal digits."""
    host: str
    """`host_id` of the bridge's machine."""
    trust: str = ""
    """Certificates to trust, in PEM; empty: the system's."""

    @classmethod
    def make(cls, *, trust: str = "") -> Token:
        """Make a new token for a bridge on this machine."""
        return cls(PLATFORM.get().token_bytes(32).hex(), host_id(), trust)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Token:
        """Read a token file; warn if other users can read it.

        Raises:
            ConfigurationError: the file cannot be read, or is not a token file. The error has no part of the file's contents.
        """
        try:
            text = PLATFORM.get().files.read(path).decode("ascii")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not text"
            raise ConfigurationError(f"cannot read the token file {os.fspath(path)}: {reason}") from None
        warn_if_others_can_read(path, "the token of a bridge")
        lines = text.split("\n", 2)
        if len(lines) < 3 or len(lines[0]) != 64 or not set(lines[0]) <= set("0123456789abcdef"):
            raise ConfigurationError(f"{os.fspath(path)} is not a token file of a bridge")
        return cls(*lines)

    def write(self, path: Path) -> None:
        """Write a file that only its owner can read, atomically; it is on the disk when this returns."""
        files = PLATFORM.get().files
        files.replace(path, f"{self.secret}\n{self.host}\n{self.trust}".encode("ascii"))
        files.sync_folder(path.parent)


def names(found: Iterable[str]) -> str:
    """Return names as a text, sorted."""
    return ", ".join(sorted(found)) or "none"
