"""The data source ``mailbox`` of Spark: ``spark.read``, ``readStream``, ``write`` and ``writeStream`` with ``format("mailbox")``.

====================  ==========================================================================================================
option                meaning
====================  ==========================================================================================================
address               `Bridge.address`
tokenFile             path of the bridge's token file, or the name of a shipped file; not needed with the Unix socket
mailbox               name of the mailbox
schema                columns to read, as Spark's DDL, in any order. Default: all columns of the mailbox
group                 reading a stream: name of the group; the mailbox keeps the rows that it has not read
startingOffsets       ``earliest``, ``latest``, ``group`` (the group's offsets) or JSON such as ``{"0": 17}``; a checkpoint overrides it
maxRowsPerBatch       most rows of a micro-batch (1,000,000, without ``maxBytesPerBatch``)
maxBytesPerBatch      most bytes of a micro-batch, in whole blocks of the journal, at least one for each partition
minRowsPerBatch       least rows of a micro-batch…
maxTriggerDelay       …until this time has passed since the last one, such as ``500ms``, ``10s`` or ``2m`` (15m)
failOnDataLoss        reading, ``false``: skip rows that retention has deleted, instead of failing (true). Writing, ``false``: a batch that was
                      delivered before counts as delivered, whatever rows it has now; batches before it may be missing
traceparent           the trace that the requests of tasks belong to, for a bridge of a traced system
jobId                 writing a batch: the same rows with the same id are written once. Default: each job has a new id
====================  ==========================================================================================================

`levada.actors.spark.session` registers it, and Spark itself finds it through the module ``pyspark_mailbox``. Readers and writers travel to the
executors by pickle, so they hold plain data only. A source travels between Python processes of the driver.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from .session import require_pyspark

require_pyspark()

from pyspark.sql.datasource import DataSource  # noqa: E402 - an older pyspark lacks names that the modules below import
from pyspark.sql.types import StructType  # noqa: E402

from .sink import BatchSink, StreamSink  # noqa: E402
from .source import BatchSource, Options, StreamSource, columns_for  # noqa: E402

__all__ = ["MailboxSource"]


def _source(options: Mapping[str, str], path: list[str]) -> Any:
    """Make a source where it arrives.

    The process of a stream's source has the shipped files of no job on its path: Spark names a folder ``streaming_job``, which does not exist.
    The process that made the source has the right ones.
    """
    import os
    import sys

    sys.path += [place for place in path if place not in sys.path and os.path.exists(place)]
    from levada.actors.spark.datasource import MailboxSource

    return MailboxSource(dict(options))


# So Spark pickles its code and not its name: without the path there is no levada to look it up in.
_source.__module__ = "__main__"


class MailboxSource(DataSource):
    """A mailbox of a bridge, as Spark sees it."""

    @classmethod
    def name(cls) -> str:
        """Return the name for ``format``."""
        return "mailbox"

    def schema(self) -> StructType | str:
        """Return the option ``schema``, which Spark parses and planning checks, or the columns of the mailbox.

        Raises:
            SchemaMismatch: the mailbox has a column of a type that Spark does not have.
        """
        options = Options.read(self.options)
        return options.columns or columns_for(options.remote.describe().columns())

    def reader(self, schema: StructType) -> BatchSource:
        """Read the existing rows."""
        return BatchSource(Options.read(self.options), schema)

    def streamReader(self, schema: StructType) -> StreamSource:  # noqa: N802 - Spark's name
        """Read the existing rows, and new rows as they arrive."""
        return StreamSource(Options.read(self.options), schema)

    def __reduce__(self) -> tuple[Any, ...]:
        return _source, (self.options, sys.path)

    # The names of the parameters are Spark's: it passes them by keyword in one of two places.

    def writer(self, schema: StructType, overwrite: bool) -> BatchSink:
        """Append a batch; readers see it when the job commits."""
        return BatchSink(Options.read(self.options), schema, overwrite=overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamSink:  # noqa: N802 - Spark's name
        """Append micro-batches, each once."""
        return StreamSink(Options.read(self.options), schema)
