"""Nodes with different versions of the app's message classes in one fleet, as in a rolling restart with new code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from levada.actors.aqueduct.schema import compare_classes, schemas
from levada.framework.text import printable

__all__ = ["Classes", "misfits"]

Classes: TypeAlias = dict[str, list[tuple[str, str, bool]]]
"""Message classes, as `levada.framework.codec.schema_of` describes them."""


def misfits(name: str, classes: Classes, up: Mapping[str, Classes]) -> tuple[str, list[str]]:
    """Compare the message classes of a node that starts with the classes of the driver and of the nodes that are up.

    A class may have grown: by fields at the end that have defaults. A class that only one side has is no difference.

    Returns:
        The first difference that cannot work, empty if there is none; and the fields that are renamed.
    """
    renamed: dict[str, None] = {}
    for other, known in {"the driver": schemas(classes), **up}.items():
        errors, remarks = compare_classes(known, classes, f"in {other}", f"in {name}")
        if errors:
            return printable(errors[0], 1000), []
        renamed |= dict.fromkeys(remarks)
    return "", [printable(text) for text in renamed]
