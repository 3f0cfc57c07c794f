"""Reads the log of a durable class by its documented format alone: no code of levada is used.

``docs/explanation/journal.md`` has the layout of the folder and of segments, ``docs/explanation/durable.md`` the columns.
"""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from typing import Any

import pytest

pa: Any = pytest.importorskip("pyarrow")

_FILE = struct.Struct("<8sIIQ16s16sI")
_BLOCK = struct.Struct("<4sIIIQQqQ")


def padded(size: int) -> int:
    return -(-size // 8) * 8


def read_segment(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a segment, each with its offset."""
    octets = path.read_bytes()
    magic, version, _, first, _, _, size = _FILE.unpack_from(octets)
    assert (magic, version, first) == (b"levadaJ1", 4, int(path.stem))
    at = _FILE.size + 16  # the segment before
    text = octets[at + 4 : at + 4 + size]
    assert int.from_bytes(octets[at : at + 4], "little") == zlib.crc32(text, zlib.crc32(octets[:at]))
    schema = pa.ipc.read_schema(pa.py_buffer(text))
    at = padded(at + 4 + size)
    rows: list[dict[str, Any]] = []
    while at < len(octets):
        magic, length, checksum, count, offset, transaction, _, _ = _BLOCK.unpack_from(octets, at)
        # The highest bit says that the append goes on in the next block.
        assert (magic, offset, transaction & ~(1 << 63)) == (b"LvB1", first + len(rows), 0)
        start = at + _BLOCK.size
        text = octets[start : start + length]
        assert checksum == zlib.crc32(text, zlib.crc32(octets[at + 12 : start], length))
        batch = pa.ipc.read_record_batch(pa.py_buffer(text), schema)
        assert batch.num_rows == count
        rows += [{"offset": offset + place, **row} for place, row in enumerate(batch.to_pylist())]
        at += padded(_BLOCK.size + length)
    return rows


def read_log(folder: Path) -> list[list[dict[str, Any]]]:
    """Return the rows of each shard."""
    found = []
    for partition in sorted(folder.glob("partition-*")):
        rows: list[dict[str, Any]] = []
        for segment in sorted(partition.glob("*.segment")):
            assert int(segment.stem) == len(rows)
            rows += read_segment(segment)
        found.append(rows)
    return found


def check_rows(shards: list[list[dict[str, Any]]], answers: dict[str, int]) -> dict[str, int]:
    """Check rows of `tests.actors.durable.purses` against the answers that came for each command; return the totals of entities.

    Each command is there once. Each row was written by the owner of its shard at that time. Each answer is the sum of all rows of its entity so far.
    """
    totals: dict[str, int] = {}
    sequences: dict[str, int] = {}
    commands: set[str] = set()
    for number, rows in enumerate(shards):
        owner = b""
        for row in rows:
            if row["kind"] == "$owned":
                owner = row["_data"]
            if row["kind"].startswith("$"):
                continue
            entity, command = row["entity"], row["command"]
            assert zlib.crc32(entity.encode()) % len(shards) == number
            assert owner.endswith(row["by"].encode()), f"{row} was written while the shard was of {owner!r}"
            assert row["sequence"] == sequences.get(entity, 0) + 1
            assert command not in commands, f"{row} is there twice"
            sequences[entity] = row["sequence"]
            totals[entity] = totals.get(entity, 0) + row["amount"]
            commands.add(command)
            assert answers[command] == totals[entity], row
    assert commands == set(answers)
    return totals
