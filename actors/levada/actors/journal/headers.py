"""The header of a segment file; `segments` says how it is laid out."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import attrs
import pyarrow as pa

from levada.framework.files import Files

from .blocks import padded
from .errors import JournalDamaged, JournalError
from .schema import fingerprint

__all__ = ["MAX_SCHEMA", "VERSION", "FileHeader"]

_FILE = struct.Struct("<8sIIQ16s16sI")
_BEFORE = struct.Struct("<QQ")  # from version 2 on
_SIZES = struct.Struct("<QQ")  # of segments from which rows were erased
_CRC = struct.Struct("<I")
_MAGIC = b"levadaJ1"
VERSION = 4
"""Of new segments. From this version on, a block says whether its append goes on in the next one."""
_ERASED = 3, 5
"""Of segments from which rows were erased: before such a mark, and with it."""
_NEWEST = 5
MAX_SCHEMA = 1 << 24


@attrs.frozen(kw_only=True)
class FileHeader:
    """What the first bytes of a segment file say."""

    partition: int
    first: int
    """Offset of the first row."""
    schema: pa.Schema
    fingerprint: bytes
    """Of the schema."""
    size: int
    """Bytes of the header."""
    before: tuple[int, int] | None
    """First offset and size of the segment before this one; None if there was none, or the header does not say."""
    version: int
    """Version of the format."""
    sizes: tuple[int, int]
    """If rows were erased: the size that the next segment names, and its own; zeros if it grew on."""

    @property
    def erased(self) -> bool:
        """Whether rows were erased from this segment."""
        return self.version in _ERASED

    @classmethod
    def make(
        cls,
        partition: int,
        first: int,
        schema: pa.Schema,
        journal: bytes,
        *,
        before: tuple[int, int] | None,
        erased: int | None,
        messages_size: int,
    ) -> tuple[FileHeader, bytes]:
        """Make the header of a new file; return it and its bytes.

        Args:
            partition: its number.
            first: offset of the first row.
            schema: columns.
            journal: sixteen bytes that identify it.
            before: first offset and size of the segment before.
            erased: the size that the next segment names, if rows were erased from this one; 0 if there is no next one.
            messages_size: bytes of the rows that it has from the beginning.
        """
        text = schema.serialize().to_pybytes()
        mark = fingerprint(schema)
        version = VERSION if erased is None else _NEWEST
        head = _FILE.pack(_MAGIC, version, partition, first, journal, mark, len(text))
        head += _BEFORE.pack(*(before or (0, 0)))
        sizes = (0, 0)
        if erased is not None:
            start = padded(len(head) + _SIZES.size + _CRC.size + len(text))
            sizes = (erased, start + messages_size if erased else 0)
            head += _SIZES.pack(*sizes)
        data = head + _CRC.pack(zlib.crc32(text, zlib.crc32(head))) + text
        data += bytes(padded(len(data)) - len(data))
        found = cls(
            partition=partition,
            first=first,
            schema=schema,
            fingerprint=mark,
            size=len(data),
            before=before,
            version=version,
            sizes=sizes,
        )
        return found, data

    @classmethod
    def read(cls, files: Files, path: Path, *, partition: int, journal: bytes) -> FileHeader:
        """Read the header of a file.

        Raises:
            JournalDamaged: it is not whole, or this is a file of another journal or partition.
            JournalError: written by a later version of this format.
        """
        with files.opened(path) as descriptor:
            head = files.pread(descriptor, _FILE.size, 0)
            if len(head) < _FILE.size or head[:8] != _MAGIC:
                raise JournalDamaged("this is no segment of a journal", path=str(path))
            _, version, number, first, owner, mark, length = _FILE.unpack(head)
            if not 1 <= version <= _NEWEST:
                raise JournalError(
                    f"format version {version}, this program reads 1 to {_NEWEST}: use the levada that wrote it or a later one",
                    path=str(path),
                )
            erased = version in _ERASED
            more = (_BEFORE.size if version > 1 else 0) + (_SIZES.size if erased else 0)
            head += files.pread(descriptor, more, len(head))
            rest = files.pread(descriptor, _CRC.size + length, len(head)) if length <= MAX_SCHEMA else b""
        text = rest[_CRC.size :]
        if len(rest) != _CRC.size + length or _CRC.pack(zlib.crc32(text, zlib.crc32(head))) != rest[: _CRC.size]:
            raise cls.damaged(path)
        if (owner, number, f"{first:020d}") != (journal, partition, path.stem):
            raise JournalDamaged(
                f"a segment of journal {owner.hex()}, partition {number}, offset {first}; it belongs somewhere else",
                path=str(path),
            )
        before = _BEFORE.unpack_from(head, _FILE.size) if version > 1 else (0, 0)
        sizes = _SIZES.unpack_from(head, _FILE.size + _BEFORE.size) if erased else (0, 0)
        return cls(
            partition=number,
            first=first,
            schema=pa.ipc.read_schema(pa.py_buffer(text)),
            fingerprint=mark,
            size=padded(len(head) + len(rest)),
            before=before if before[1] else None,
            version=version,
            sizes=sizes,
        )

    @staticmethod
    def damaged(path: Path) -> JournalDamaged:
        """Return the error for a header that is not whole."""
        return JournalDamaged("the header of this segment is damaged: restore this file from a copy", path=str(path))
