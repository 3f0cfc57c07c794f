"""`read_mailbox`: the rows of a live mailbox as an Arrow stream, for DuckDB, Polars, pandas and all that reads one. Needs no pyspark."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence

import pyarrow as pa

from levada.framework.errors import ConfigurationError

from .positions import offsets_in, position
from .protocol import Description
from .worker import RemoteMailbox

__all__ = ["END", "read_mailbox"]

END = b"levada.end"
"""The key of the schema's metadata that says where the rows end."""


def read_mailbox(
    address: str,
    name: str,
    *,
    columns: Sequence[str] | None = None,
    after: str | bytes | None = None,
    token_file: str | os.PathLike[str] | None = None,
) -> pa.RecordBatchReader:
    """Read the rows that a mailbox has now, while its program runs. Blocks; works in any thread, process and task of Spark.

    The rows come partition after partition, a few blocks at a time, as the reader asks for them. Rows that are appended meanwhile are not read.
    From the log of a durable class, events are read. A reader can be read once, and dropping it ends the transfer.

    Args:
        address: `Bridge.address`.
        name: the mailbox.
        columns: names of columns, in any order; None: all.
        after: read only rows after the end of an earlier read, which is ``reader.schema.metadata[b"levada.end"]`` of that reader.
        token_file: `Bridge.token_file`, or its copy; not needed with the Unix socket.

    Returns:
        A reader. While it is read, a bridge that is away is waited for half a minute, and the read goes on at the same row.

    Raises:
        UnknownName: the bridge has no mailbox of this name.
        BridgeRefused, BridgeUnreachable: the bridge refuses this process, or no attempt can succeed.
        ConnectionLost: the bridge was away for half a minute.
        ConfigurationError: an address, the token file, a column or `after` cannot be used.
        EpochChanged, JournalBehind: the journal does not have the rows before `after`: it was created again, or replaced by an older copy.

    While it is read, also `OffsetGone` if retention has deleted rows that were not read yet. Libraries that get the stream as C structures turn
    errors into their own, whose text has the name of the class.
    """
    if isinstance(columns, str):
        raise ConfigurationError(f"columns is {columns!r}, wanted a list of names: {[columns]}")
    remote = RemoteMailbox(address, name, None if token_file is None else os.fspath(token_file))
    found = remote.describe()
    begun: Mapping[int, int] = found.first if after is None else _offsets_of(after, found, remote)
    whole = found.columns()
    names = whole.names if columns is None else list(columns)
    if not names or not set(names) <= set(whole.names):
        raise ConfigurationError(
            f"columns is {names}, wanted some of {', '.join(whole.names)}, the columns of mailbox {name}"
        )
    end = json.dumps(position(found, found.end))
    schema = pa.schema([whole.field(each).remove_metadata() for each in names], metadata={END: end})
    return pa.RecordBatchReader.from_batches(schema, _rows(remote, found, begun, whole, schema))


def _offsets_of(after: str | bytes, found: Description, remote: RemoteMailbox) -> Mapping[int, int]:
    try:
        place = json.loads(after)
    except ValueError:
        place = None
    if not isinstance(place, dict) or "epoch" not in place:
        raise ConfigurationError(
            f'after is {after!r}, wanted reader.schema.metadata[b"{END.decode()}"] of an earlier reader'
        )
    offsets, behind = offsets_in(place, found, remote, held="`after`", again="read without `after`")
    if behind is not None:
        raise behind
    return offsets


def _rows(
    remote: RemoteMailbox, found: Description, begun: Mapping[int, int], whole: pa.Schema, schema: pa.Schema
) -> Iterator[pa.RecordBatch]:
    for number, end in sorted(found.end.items()):
        start = begun.get(number, 0)
        for rows in remote.read(number, start, end, epoch=found.epoch, opening=found.opening, schema=whole):
            yield pa.RecordBatch.from_arrays(rows.select(schema.names).columns, schema=schema)
