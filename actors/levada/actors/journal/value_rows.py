"""`ValueRows`: rows of an append that are values of Python, and become columns where columns are wanted.

To put one row into columns, and to take it out again, goes through much code of Arrow. That is 30 µs in a loop; but for a command that comes alone,
when the caches of the processor have other things, it is 100 µs and more.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa

__all__ = ["ValueRows", "takes_values"]


class ValueRows(list[tuple[Any, ...]]):
    """Rows for a log in this process whose store takes them: of each the values for all columns, as Arrow takes them."""

    __slots__ = ("columns",)

    columns: pa.StructType
    """Has the columns as fields."""

    @property
    def batch(self) -> pa.RecordBatch:
        """The rows in columns; `pyarrow.ArrowException`, `OverflowError` or `UnicodeError` if a value does not fit."""
        # One array of structs takes a third of the time of an array for each column, for one row or for hundreds.
        return pa.RecordBatch.from_struct_array(pa.array(self, self.columns))


def takes_values(store: object) -> bool:
    """Return whether the logs of a store take `ValueRows`: it has an attribute of this name. Other logs get record batches."""
    return getattr(store, "takes_values", False)
