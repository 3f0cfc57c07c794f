"""The data source ``mailbox`` of Spark: ``spark.read``, ``readStream``, ``write`` and ``writeStream`` with ``format("mailbox")``.

====================  ==========================================================================================================
option                means
====================  ==========================================================================================================
address               what `Bridge.address` says
tokenFile             path of the bridge's token file, or the name of one that was shipped; not needed beside the Unix socket
mailbox               name of the mailbox
schema                columns to read, as Spark's DDL; some of the mailbox's, in any order. Left out: all
group                 reading a stream: name under which the mailbox remembers what has been read, and keeps what has not
startingOffsets       ``earliest``, ``latest``, ``group`` (where the group has come to) or JSON such as ``{"0": 17}``; a checkpoint overrides it
maxRowsPerBatch       rows of a micro-batch at most
maxBytesPerBatch      octets of a micro-batch at most, in whole blocks of the journal, and one for each partition at least
minRowsPerBatch       begin no micro-batch with fewer rows…
maxTriggerDelay       …unless so much time has passed since the last one, such as ``500ms``, ``10s`` or ``2m`` (15m)
failOnDataLoss        ``false``: go on behind rows that retention has deleted, instead of failing (true)
jobId                 writing a batch: the same id again is the same batch, which is written once; left out: each is a new one
====================  ==========================================================================================================

Registered by `levada.actors.spark.session`, and found by Spark itself through the module ``pyspark_mailbox``. Instances travel to the
executors by pickle, so all they hold is plain data.
"""

from __future__ import annotations

from pyspark.sql.datasource import DataSource
from pyspark.sql.types import StructType

from .sink import BatchSink, StreamSink
from .source import BatchSource, Options, StreamSource, columns_for

__all__ = ["MailboxSource"]


class MailboxSource(DataSource):
    """A mailbox of a bridge, as Spark sees it."""

    @classmethod
    def name(cls) -> str:
        """What ``format`` takes."""
        return "mailbox"

    def schema(self) -> StructType | str:
        """Return the columns of the mailbox, or what option ``schema`` says: only Spark itself can read that, and planning compares it.

        Raises:
            SchemaMismatch: the mailbox has a column of a type that Spark does not have.
        """
        options = Options.read(self.options)
        return options.columns or columns_for(options.remote.describe().columns())

    def reader(self, schema: StructType) -> BatchSource:
        """Read what is there now."""
        return BatchSource(Options.read(self.options), schema)

    def streamReader(self, schema: StructType) -> StreamSource:  # noqa: N802 - Spark's name
        """Read what is there, and what comes."""
        return StreamSource(Options.read(self.options), schema)

    # The names of the parameters are Spark's: it passes them by keyword in one of two places.

    def writer(self, schema: StructType, overwrite: bool) -> BatchSink:
        """Append a batch, seen by readers when the job commits."""
        return BatchSink(Options.read(self.options), schema, overwrite=overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamSink:  # noqa: N802 - Spark's name
        """Append micro-batches, each once."""
        return StreamSink(Options.read(self.options), schema)
