"""The schemas of the message classes that two programs exchange: sent in a connection header, compared before the first message.

Each side lists the classes reachable from the type of the entrypoint's messages, through fields and through channels in them. The other
side looks up each tag among all its own classes. A class that could not be decoded ends the connection at once, and the error's text
names the difference. A difference that may still work is logged.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, get_args

from levada.framework.codec import Codec, schema_of
from levada.framework.errors import ConfigurationError, DecodeError
from levada.framework.message import BY_TAG, field_types, is_message

__all__ = ["SCHEMA", "compare_classes", "compare_schema", "schema_header", "schemas"]

SCHEMA = "levada-schema"
"""Name of the connection header. Its value is a msgpack map from tags to lists of fields: name, type, whether it has a default."""
_WIRE = dict[str, list[tuple[str, str, bool]]]
_CODEC = Codec(max_bytes=2**15)


def schema_header(item_type: Any) -> tuple[tuple[str, bytes], ...]:
    """Make the header for an entrypoint; no header if it takes anything, or if there are too many classes for one."""
    try:
        return _header(item_type)
    except (ConfigurationError, ValueError):
        return ()  # sending a message of such a class raises the error


@lru_cache(64)  # it takes 0.5 ms for ten classes, at each end of each connection
def _header(item_type: Any) -> tuple[tuple[str, bytes], ...]:
    schema = schema_of(_classes(item_type))
    return ((SCHEMA, _CODEC.encode(schema, _WIRE)),) if schema else ()


def _classes(item_type: Any) -> Iterator[type]:
    """Yield the message classes that an annotation names, and those that their fields name."""
    seen: set[Any] = set()
    todo = [item_type]
    while todo:
        annotation = todo.pop()
        annotation = getattr(annotation, "__supertype__", getattr(annotation, "__value__", annotation))
        if not isinstance(annotation, Hashable) or annotation in seen:
            continue
        seen.add(annotation)
        todo += get_args(annotation)
        if is_message(annotation):
            yield annotation
            todo += field_types(annotation).values()


def schemas(tags: Iterable[str]) -> dict[str, list[tuple[str, str, bool]]]:
    """Describe the message classes of this process with these tags, see `levada.framework.codec.schema_of`; except those that cannot travel."""
    found: dict[str, list[tuple[str, str, bool]]] = {}
    for tag in tags:
        cls = BY_TAG.get(tag)
        if cls is not None:
            try:
                found |= schema_of([cls])
            except ConfigurationError:
                pass  # a field of the class cannot travel, so its messages never do
    return found


def compare_schema(header: bytes) -> tuple[list[str], list[str]]:
    """Compare a peer's classes with the classes that have the same tags here.

    Returns:
        The differences that cannot work, and the differences that may.
    """
    try:
        theirs = _CODEC.decode(header, _WIRE)
    except DecodeError as error:
        return [f"{SCHEMA} cannot be read: {error}"], []
    errors, remarks = compare_classes(schemas(theirs), theirs)
    return errors, [f"{tag}: there is no such class here" for tag in theirs if tag not in BY_TAG] + remarks


def compare_classes(
    ours: Mapping[str, Sequence[tuple[str, str, bool]]],
    theirs: Mapping[str, Sequence[tuple[str, str, bool]]],
    here: str = "here",
    there: str = "there",
) -> tuple[list[str], list[str]]:
    """Compare the message classes of two programs that both have. Later fields of one of them are no difference if they have defaults.

    Args:
        ours: the classes of one program, as `levada.framework.codec.schema_of` describes them.
        theirs: the classes of the other program.
        here: the place of `ours`, for the texts.
        there: the place of `theirs`.

    Returns:
        The differences that cannot work, and the differences that may.
    """
    errors: list[str] = []
    remarks: list[str] = []
    for tag, fields in theirs.items():
        own = ours.get(tag, fields)
        if own == fields:
            continue
        for (name, kind, _), (their_name, their_kind, _) in zip(own, fields, strict=False):
            if kind != their_kind:
                errors.append(f"{tag}: {name}: {kind} {here}, {their_name}: {their_kind} {there}")
            elif name != their_name:
                remarks.append(f"{tag}: {name} {here} is called {their_name} {there}")
        for more, place in ((own[len(fields) :], there), (fields[len(own) :], here)):
            errors += [
                f"{tag}: {name} has no default, and is missing {place}" for name, _, default in more if not default
            ]
    return errors, remarks
