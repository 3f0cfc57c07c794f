"""The tables of a log, and the statements that use them.

For the log ``accounts`` there are

* ``accounts``: the rows. ``_shard`` and ``_offset`` say where a row is; the other columns are the log's.
* ``accounts_shards``: for each shard its end, and the mark of its newest append. An append first moves the end, if it is where the append says, and
  so holds the lock of this row until its own rows are committed: of two owners one is fenced, and rows become visible in the order of offsets.
* ``accounts_trims``: for each shard that was trimmed, its oldest row, and how far rows are missing; and what it remembers of its archive.
* ``accounts_erased``: the offsets of other rows that are gone, because levada erased them, or because the log is a copy of one without them. All
  other rows are there, unless they were deleted by hand.
* ``accounts_log``: one row, with the epoch and the columns; and the epoch of the log of which this is a copy, until the copy is whole.
* ``accounts_openings``: where the shards ended each time a program connected to write.
* ``accounts_events``: a view of the events for people, without the rows and columns that only the shards need.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from functools import cached_property
from typing import Final

import attrs
import pyarrow as pa

from levada.actors.journal import JournalDamaged, SchemaMismatch
from levada.actors.journal.value_rows import ValueRows
from levada.framework.errors import ConfigurationError

from .addresses import PostgresAddress
from .values import Kind, kind_of

__all__ = ["FORMAT", "IN_ORDER", "LogTables", "name_of", "quoted"]

FORMAT: Final = 1
"""The version of the layout."""
MOST_COLUMNS: Final = 1500
"""PostgreSQL has 1600, and dropped columns count."""
LONGEST: Final = 63
"""The most bytes of the name of a column in PostgreSQL, which cuts off the rest."""
IN_ORDER: Final = "SELECT set_config('enable_sort', 'off', true), set_config('jit', 'off', true)"
"""Runs before a statement for rows in the order of an index, in the same transaction. The server does not know how many rows are wanted, and
once the table was analyzed it sorts all rows of the entity for each page: 28 ms instead of 12 for 4,096 of 10,000, and quadratic with more. In the
transaction, because a pooler would give other settings of the session to others. It does not know how many rows come either, and may compile the
statement, which takes 180 ms."""
_ROW_BYTES: Final = 64
_START: Final = "_offset >= (SELECT start FROM s)"
_LAST: Final = (1 << 63) - 1


def quoted(name: str) -> str:
    """Return a name as SQL has it."""
    return '"' + name.replace('"', '""') + '"'


def name_of(address: PostgresAddress, suffix: str = "") -> str:
    """Return the name of a table of a log in SQL."""
    *schema, table = address.table.split(".")
    return ".".join(map(quoted, [*schema, table + suffix]))


@attrs.frozen(eq=False, slots=False)
class LogTables:
    """The tables of a log with some columns, and the statements. Those for single questions are made once: 20 µs for thirteen columns."""

    address: PostgresAddress
    columns: pa.Schema
    kinds: list[Kind]
    _of_entities: dict[str | None, str] = attrs.field(factory=dict, init=False, repr=False)

    @classmethod
    def of(cls, address: PostgresAddress, columns: pa.Schema) -> LogTables:
        """Return the tables for these columns; `ConfigurationError` if PostgreSQL cannot have them."""
        if len(columns) and ("entity" not in columns.names or columns.field("entity").type != pa.string()):
            raise SchemaMismatch("PostgreSQL keeps the logs of durable actors: give the columns log_columns(events)")
        if len(columns) > MOST_COLUMNS:
            raise ConfigurationError(
                f"a log in PostgreSQL has {MOST_COLUMNS} columns at most, these are {len(columns)}"
            )
        long = [name for name in columns.names if len(name.encode()) > LONGEST]
        if long:
            raise ConfigurationError(f"{long[0]}: the name of a column in PostgreSQL has {LONGEST} bytes at most")
        return cls(address, columns, [kind_of(field) for field in columns])

    @cached_property
    def _struct(self) -> pa.StructType:
        return pa.struct(list(self.columns))

    def values_in(self, rows: ValueRows) -> list[bytes | None] | None:
        """Return the values of a row as PostgreSQL takes them; None if it is not one row of these columns, or has a value that needs Arrow."""
        if len(rows) != 1 or not rows.columns.equals(self._struct, check_metadata=True):
            return None
        found: list[bytes | None] = []
        try:
            for value, kind in zip(rows[0], self.kinds, strict=True):
                if value is None:
                    found.append(None)
                elif type(value) is kind.plain:
                    found.append(kind.value(value))
                else:
                    return None
        except (ValueError, struct.error):  # as columns, it has an error that tells more
            return None
        return found

    def name(self, suffix: str = "") -> str:
        """Return the name of a table in SQL."""
        return name_of(self.address, suffix)

    @property
    def types(self) -> dict[str, str]:
        """The type of each column in the table of rows, as PostgreSQL writes it."""
        found = {"_shard": "integer", "_offset": "bigint"}
        return found | {
            field.name: kind.column.partition(" COLLATE")[0]
            for field, kind in zip(self.columns, self.kinds, strict=True)
        }

    def definitions(self, first: int = 0) -> list[str]:
        """Return the definitions of the columns, from one on."""
        pairs = list(zip(self.columns, self.kinds, strict=True))[first:]
        return [f"{quoted(field.name)} {kind.column}{'' if field.nullable else ' NOT NULL'}" for field, kind in pairs]

    def creation(self) -> list[str]:
        """Return the statements that make the tables of a log without columns."""
        return [
            # Room for several versions of a row on a page, so that an append changes no index.
            f'CREATE TABLE {self.name("_shards")} (shard integer PRIMARY KEY, "end" bigint NOT NULL, append bigint NOT NULL) WITH (fillfactor = 50)',
            # Not in the rows of the shards, which each append changes.
            f"CREATE TABLE {self.name('_trims')} (shard integer PRIMARY KEY, first bigint NOT NULL DEFAULT 0, "
            "trimmed bigint NOT NULL DEFAULT 0, archive text NOT NULL DEFAULT '', archived bigint NOT NULL DEFAULT 0)",
            f"CREATE TABLE {self.name('_erased')} (shard integer, first bigint, "
            '"end" bigint NOT NULL, PRIMARY KEY (shard, first))',
            f"CREATE TABLE {self.name('_log')} (one boolean PRIMARY KEY DEFAULT true CHECK (one), format integer NOT NULL, "
            "epoch text NOT NULL, columns bytea NOT NULL, copy_of text)",
            f"CREATE TABLE {self.name('_openings')} (number bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, name text NOT NULL UNIQUE, "
            "at timestamptz NOT NULL DEFAULT now(), ends bigint[] NOT NULL)",
        ]

    def growth(self, first: int) -> list[str]:
        """Return the statements that add the columns from one on; the first ones make the table of rows."""
        if first:
            added = ", ".join(f"ADD COLUMN {each}" for each in self.definitions(first))
            return [f"ALTER TABLE {self.name()} {added}", f"DROP VIEW IF EXISTS {self.name('_events')}", self.view()]
        columns = ", ".join(self.definitions())
        index = quoted(f"{self.address.table.rpartition('.')[2]}_entities")
        return [
            f"CREATE TABLE {self.name()} (_shard integer NOT NULL, _offset bigint NOT NULL, {columns}, PRIMARY KEY (_shard, _offset))",
            f"CREATE INDEX {index} ON {self.name()} (_shard, entity, _offset)",
            self.view(),
        ]

    def view(self) -> str:
        """Return the statement that makes the view."""
        shown = ["_shard", "_offset", *(quoted(name) for name in self.columns.names if not name.startswith("_"))]
        where = " WHERE kind NOT LIKE '$%'" if "kind" in self.columns.names else ""
        return f"CREATE VIEW {self.name('_events')} AS SELECT {', '.join(shown)} FROM {self.name()}{where}"

    def append(self, *, copied: bool = False) -> str:
        """Return the statement of an append: the new end, the mark, the shard, its end before, and an array for each column.

        Args:
            copied: the rows are of another log, and the first array has their offsets.
        """
        # Not `FROM unnest(...)`: the server would make a table of each array first, which takes it a fifth of the time for 256 rows.
        if not copied:
            return self._insert("generate_series($4::bigint, $1::bigint - 1)", "unnest(${}::{}[])", 5)
        there = "SELECT range_agg(int8range(each, each + 1)) FROM unnest($5::bigint[]) AS u(each)"
        gone = f"(SELECT int8multirange(int8range($4::bigint, $1::bigint)) - coalesce(({there}), '{{}}') FROM fence)"
        noted = self._noted("$3::integer", gone)
        return self._insert("unnest($5::bigint[])", "unnest(${}::{}[])", 6, f", noted AS ({noted})")

    def append_one(self) -> str:
        """Return the statement of an append of one row: parameters as `append`, with a value for each column.

        For each array, the server makes a store of 16 KiB, whose memory it gives back: 23 to 45 µs of its time for one row, instead of 16.
        """
        return self._insert("$4::bigint", "${}::{}", 5)

    def _noted(self, shard: str, offsets: str) -> str:
        """Return a statement that notes rows that are gone: expressions for their shard, and for their offsets as a multirange."""
        return (
            f'INSERT INTO {self.name("_erased")} (shard, first, "end") SELECT {shard}, lower(each), upper(each) FROM unnest({offsets}) AS each '
            'ON CONFLICT (shard, first) DO UPDATE SET "end" = excluded."end"'
        )

    def _insert(self, offset: str, parameter: str, first: int, beside: str = "") -> str:
        """Return a statement that moves the end of a shard, and inserts rows if it was where the append begins.

        Args:
            offset: an expression for the offsets of the rows.
            parameter: how a value is taken from the parameter with a number and a type.
            first: the number of the parameter for the first column.
            beside: more that is done if it was.
        """
        names = ", ".join(map(quoted, self.columns.names))
        values = ", ".join(
            parameter.format(place, kind.sent)
            + ("" if kind.sent == kind.column.partition(" COLLATE")[0] else f"::{kind.column}")
            for place, kind in enumerate(self.kinds, first)
        )
        return (
            f'WITH fence AS (UPDATE {self.name("_shards")} SET "end" = $1::bigint, append = $2::bigint '
            f'WHERE shard = $3::integer AND "end" = $4::bigint RETURNING 1){beside} '
            f"INSERT INTO {self.name()} (_shard, _offset, {names}) SELECT $3::integer, {offset}, {values} FROM fence"
        )

    def end(self) -> str:
        """Return the statement for the end of a shard, and the mark of its newest append."""
        return f'SELECT "end", append FROM {self.name("_shards")} WHERE shard = $1::integer'

    @cached_property
    def extent(self) -> str:
        """The statement for the ends of all shards, in order, their first offsets and marks, how far their rows reach, and the newest opening."""
        newest = f"SELECT name FROM {self.name('_openings')} ORDER BY number DESC LIMIT 1"
        columns = ", ".join(
            f"array_agg({each} ORDER BY s.shard)"
            for each in ('s."end"', "coalesce(t.first, 0)", "coalesce(t.trimmed, 0)", self._reached)
        )
        return f"SELECT {columns}, ({newest}) FROM {self._shards}"

    def shards(self) -> str:
        """Return the statement for each shard, in their order: its number and end, how far its rows reach, and what ``accounts_trims`` has of it."""
        return (
            f"SELECT s.shard, s.\"end\", {self._reached}, coalesce(t.trimmed, 0), coalesce(t.archive, ''), coalesce(t.archived, 0) "
            f"FROM {self._shards} ORDER BY s.shard"
        )

    @property
    def _shards(self) -> str:
        return f"{self.name('_shards')} AS s LEFT JOIN {self.name('_trims')} AS t ON t.shard = s.shard"

    @property
    def _reached(self) -> str:
        """An expression for the offset behind the newest row of a shard, also if that row is gone. It is one look at an index."""
        if not len(self.columns):
            return 's."end"'
        erased = f'SELECT "end" FROM {self.name("_erased")} WHERE shard = s.shard ORDER BY first DESC LIMIT 1'
        return f"greatest((SELECT max(_offset) + 1 FROM {self.name()} WHERE _shard = s.shard), ({erased}), 0)"

    def require_reached(self, ends: Mapping[int, int], reached: Mapping[int, int]) -> None:
        """Raise `JournalDamaged` unless the rows of each shard reach to its end, and no further."""
        for shard, end in ends.items():
            there = reached[shard]
            if there < end:
                what = f"are gone from the table {self.name()}, which was changed by hand: put them back, or restore a backup"
            else:
                what = f"of the table {self.name()} are behind the end of the shard, and levada has not written them"
            if there != end:
                first, last = min(there, end), max(there, end) - 1
                raise JournalDamaged(f"rows {first} to {last} of shard {shard} {what}", path=self.address.shown)

    def missing(self, shard: str = "$1::integer", first: str = "$2::bigint", end: str = "$3::bigint") -> str:
        """Return the statement that counts rows which are not there, and should be, of one moment.

        Its rows have the shard, two offsets between which all rows should be there that were not erased, and the number of those that are not.

        Args:
            shard: an expression for the shard; null: each.
            first: for the first offset.
            end: for the offset behind the last one; it may be behind the end of the shard.
        """
        rows = f'SELECT count(*) FROM {self.name()} WHERE _shard = w.shard AND _offset >= w.first AND _offset < w."end"'
        erased = self.name("_erased")
        nearest = f"SELECT max(first) FROM {erased} WHERE shard = w.shard AND first <= w.first"
        gone = (
            f'SELECT sum(least("end", w."end") - greatest(first, w.first)) FROM {erased} '
            f'WHERE shard = w.shard AND first < w."end" AND "end" > w.first AND first >= coalesce(({nearest}), 0)'
        )
        places = (
            f'SELECT s.shard, greatest({first}, t.trimmed) AS first, least({end}, s."end") AS "end" '
            f"FROM {self._shards} WHERE s.shard = coalesce({shard}, s.shard)"
        )
        return (
            f'SELECT shard, first, "end", ("end" - first - ({rows}) - coalesce(({gone}), 0))::bigint FROM ({places}) AS w '
            'WHERE first < "end" ORDER BY shard'
        )

    def early(self) -> str:
        """Return the statement for the shards that have rows before their noted first one, and where that is."""
        rows = f"SELECT 1 FROM {self.name()} WHERE _shard = t.shard AND _offset < t.first"
        return f"SELECT shard, first FROM {self.name('_trims')} AS t WHERE EXISTS ({rows}) ORDER BY shard"

    def require_there(self, shard: int, first: int, end: int, missing: int) -> None:
        """Raise `JournalDamaged` if rows are `missing` between two offsets."""
        if missing > 0:  # what was noted by hand may overlap
            raise JournalDamaged(
                f"{missing} of the rows {first} to {end - 1} of shard {shard} are gone from the table {self.name()}, which was changed by hand: "
                "put them back, or restore a backup",
                path=self.address.shown,
            )

    def size(self) -> str:
        """The statement for the bytes of the rows and their indexes; null if there are no columns yet."""
        table = self.name().replace("'", "''")
        return f"SELECT pg_total_relation_size(to_regclass('{table}'))"

    def reach(self) -> str:
        """Return the statement for the reach of an opening: whether it is known, the ends now, and the lowest ends of later openings.

        If it is not known, a copy without it was restored: then the later ones are those that began after the time in its name, or the newest one.
        """
        openings = self.name("_openings")
        number = f"SELECT number FROM {openings} WHERE name = $1::text"
        began = "substring($1::text FROM '-([0-9]{10,18})$')::bigint"
        later = f"SELECT min(number) - 1 FROM {openings} WHERE extract(epoch FROM at) * 1000000 >= {began}"
        newest = f"SELECT max(number) - 1 FROM {openings} WHERE $1::text IS NOT NULL"
        since = f"coalesce(({number}), ({later}), ({newest}), 0)"
        lowest = (
            f"SELECT array_agg(low ORDER BY place) FROM (SELECT place, min(each) AS low FROM {openings}, "
            f"unnest(ends) WITH ORDINALITY AS u(each, place) WHERE number > {since} GROUP BY place) AS s"
        )
        known = f"SELECT ($1::text IS NULL OR EXISTS ({number}))::integer::bigint"
        return f'{known}, (SELECT array_agg("end" ORDER BY shard) FROM {self.name("_shards")}), ({lowest})'

    def _cut(self, where: str, *, newest: bool = False) -> str:
        """Return a query for the offset of the first row that does not fit, or null: one fits, and more, while they are not too large together.

        Its parameters: $1 the shard, $2 of `where`, $3 the first offset, $4 the most rows, $5 the most bytes.
        """
        sizes = [
            f"coalesce({'pg_column_size' if kind.column == 'jsonb' else 'octet_length'}({quoted(name)}), 0)"
            for name, kind in zip(self.columns.names, self.kinds, strict=True)
            if kind.counts
        ]
        size = " + ".join([str(_ROW_BYTES * (1 + len(self.kinds) // 8)), *sizes])
        order, first = ("_offset DESC", "max") if newest else ("_offset", "min")
        sized = f"SELECT _offset, {size} AS _size FROM {self.name()} WHERE _shard = $1::integer AND {where} ORDER BY {order} LIMIT $4::bigint"
        # Nearly all pages fit, and a window over whole rows, which tells how far they do, took a third of the time of a page.
        summed = f"SELECT *, sum(_size) OVER (ORDER BY {order} ROWS UNBOUNDED PRECEDING) AS _sum FROM ({sized}) AS a"
        cut = f"SELECT {first}(_offset) FROM ({summed}) AS b WHERE _sum > $5::bigint AND _sum <> _size"
        return f"SELECT CASE WHEN (SELECT sum(_size) FROM ({sized}) AS a) > $5::bigint THEN ({cut}) END AS cut"

    def _select(self, where: str, *, start: str = "$3::bigint", newest: bool = False) -> str:
        """Return a statement whose result is one row: the number of rows that fit, the offset of the first that does not, and arrays of columns.

        Args:
            where: which rows, from `_START` on.
            start: the first offset.
            newest: whether the last rows are wanted.
        """
        arrays = ["array_agg(_offset)"]
        for name, kind in zip(self.columns.names, self.kinds, strict=True):
            cast = "" if kind.sent == kind.column.partition(" COLLATE")[0] else f"::{kind.sent}"
            arrays.append(f"array_agg({quoted(name)}{cast})")
        columns = ", ".join(["_offset", *(quoted(name) for name in self.columns.names)])
        fits = (
            "_offset > coalesce((SELECT cut FROM c), -1)"
            if newest
            else f"_offset < coalesce((SELECT cut FROM c), {_LAST})"
        )
        rows = (
            f"SELECT {columns} FROM {self.name()} WHERE _shard = $1::integer AND {where} AND {fits} "
            f"ORDER BY _offset{' DESC' if newest else ''} LIMIT $4::bigint"
        )
        if newest:
            rows = f"SELECT * FROM ({rows}) AS d ORDER BY _offset"
        return (
            f"WITH s AS MATERIALIZED (SELECT {start} AS start), c AS MATERIALIZED ({self._cut(where, newest=newest)}) "
            f"SELECT count(*), (SELECT cut FROM c), {', '.join(arrays)} FROM ({rows}) AS e"
        )

    def entity(self, since: str | None) -> str:
        """Return the statement for rows of an entity: the shard, the entity, the first offset, most rows, most bytes.

        Args:
            since: a column of offsets; the newest row has the offset in it at which reading begins.
        """
        known = self._of_entities.get(since)
        if known is not None:
            return known
        start = "$3::bigint"
        if since is not None:
            newest = (
                f"SELECT {quoted(since)}::bigint FROM {self.name()} WHERE _shard = $1::integer AND entity = $2::text "
                "ORDER BY _offset DESC LIMIT 1"
            )
            start = f"greatest($3::bigint, ({newest}))"  # greatest() passes over null
        text = self._of_entities[since] = self._select(f"entity = $2::text AND {_START}", start=start)
        return text

    @cached_property
    def newest(self) -> str:
        """The statement for the newest rows of an entity, in order; parameters as `entity`."""
        return self._select(f"entity = $2::text AND {_START}", newest=True)

    @cached_property
    def rows(self) -> str:
        """The statement for rows of a shard: the shard, the offset behind the last one, the first offset, most rows, most bytes."""
        return self._select(f"_offset < $2::bigint AND {_START}")

    def within(self) -> str:
        """Return the statement for the offset of the first row that has no place in the bytes, or null; parameters as `rows`."""
        return self._cut("_offset < $2::bigint AND _offset >= $3::bigint")

    def erase(self) -> str:
        """Return the statement that erases rows of an entity, for their number: the shard, the entity, and the offset behind the last one."""
        gone = f"DELETE FROM {self.name()} WHERE _shard = $1::integer AND entity = $2::text AND _offset < $3::bigint RETURNING _offset"
        noted = self._noted("$1::integer", "(SELECT range_agg(int8range(_offset, _offset + 1)) FROM gone)")
        return f"WITH gone AS ({gone}), noted AS ({noted}) SELECT count(*) FROM gone"

    def _to_go(self) -> str:
        """Return the beginning of a statement, with the rows that may be trimmed as ``to_go``.

        Its parameters: $1 the shard, $2 the time, in seconds, before which rows are old, $3 the answers that stay, $4 the layout of snapshots, $5 the
        offset from which on rows stay.
        """
        return (
            "WITH old AS (SELECT coalesce(("
            f"SELECT _offset FROM {self.name()} WHERE _shard = $1::integer AND time >= to_timestamp($2::float8) ORDER BY _offset LIMIT 1), "
            f'(SELECT "end" FROM {self.name("_shards")} WHERE shard = $1::integer)) AS stop), '
            # One pass in the order of the index of entities.
            "ranked AS (SELECT _offset, ctid AS place_on_disk, _body IS NOT NULL AS answers, "
            "count(_body) OVER (PARTITION BY entity ORDER BY _offset DESC) AS place, "
            "max(_offset) FILTER (WHERE kind IN ('$snapshot', '$erased')) OVER (PARTITION BY entity) AS start, "
            "max(_offset) FILTER (WHERE kind = '$erased' OR kind = '$snapshot' AND (entity = '' OR $4::integer IS NULL OR _version = $4::integer)) "
            f"OVER (PARTITION BY entity) AS fitting FROM {self.name()} WHERE _shard = $1::integer), "
            "to_go AS (SELECT _offset, place_on_disk FROM ranked WHERE _offset < start AND fitting = start "
            "AND _offset < least($5::bigint, (SELECT stop FROM old)) AND (NOT answers OR place > $3::integer)) "
        )

    def last_to_go(self) -> str:
        """Return the statement for the offset of the last row that may be trimmed, or null; parameters as `_to_go`."""
        return f"{self._to_go()}SELECT max(_offset) FROM to_go"

    def mark(self) -> str:
        """Return the statement that notes how far rows are about to be trimmed; parameters as `_to_go`. Its result is empty if none are."""
        return (
            f"{self._to_go()}INSERT INTO {self.name('_trims')} AS t (shard, trimmed) SELECT $1::integer, max(_offset) + 1 FROM to_go "
            "HAVING max(_offset) IS NOT NULL ON CONFLICT (shard) DO UPDATE SET trimmed = greatest(t.trimmed, excluded.trimmed) RETURNING trimmed"
        )

    def trim(self) -> str:
        """Return the statement that deletes some of the rows that may be trimmed: at most $6; other parameters as `_to_go`."""
        return (
            # Not by their offsets: the server would look each of them up, in no order.
            f"{self._to_go()}DELETE FROM {self.name()} WHERE ctid = ANY (ARRAY"
            f"(SELECT place_on_disk FROM to_go WHERE _offset < (SELECT trimmed FROM {self.name('_trims')} WHERE shard = $1::integer) "
            "ORDER BY _offset LIMIT $6::bigint))"
        )

    def note_archive(self) -> str:
        """Return the statement that notes the archive of a shard: the shard, where it is or an empty text, and the offset behind its last row."""
        return (
            f"INSERT INTO {self.name('_trims')} (shard, archive, archived) VALUES ($1::integer, $2::text, $3::bigint) "
            "ON CONFLICT (shard) DO UPDATE SET archive = excluded.archive, archived = excluded.archived"
        )

    def forget_erased(self) -> str:
        """Return the statement that forgets which rows of a shard were erased, as far as it was trimmed."""
        trimmed = f"SELECT trimmed FROM {self.name('_trims')} WHERE shard = $1::integer"
        return f'DELETE FROM {self.name("_erased")} WHERE shard = $1::integer AND "end" <= ({trimmed})'

    def note_first(self) -> str:
        """Return the statement that notes the oldest row of a shard."""
        oldest = f"SELECT min(_offset) FROM {self.name()} WHERE _shard = $1::integer"
        end = f'SELECT "end" FROM {self.name("_shards")} WHERE shard = $1::integer'
        return f"UPDATE {self.name('_trims')} SET first = coalesce(({oldest}), ({end})) WHERE shard = $1::integer"
