"""Nodes with different versions of the app's message classes in one fleet, as in a rolling restart with new code."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from levada.actors.aqueduct.schema import compare_classes, schemas
from levada.transports.text import printable

from .messages import MemberState

if TYPE_CHECKING:
    from .fleet import Fleet
    from .node import FleetNode

__all__ = ["misfits"]

logger = logging.getLogger("levada.actors.nodes")


def misfits(fleet: Fleet, place: FleetNode, classes: dict[str, list[tuple[str, str, bool]]]) -> str:
    """Compare the message classes of a node that starts with the classes of the driver and of the nodes that are up, and keep them.

    A class may have grown: by fields at the end that have defaults. A class that only one side has is no difference. A renamed field is logged.

    Returns:
        The first difference that cannot work; empty if there is none.
    """
    others = [("the driver", schemas(classes))]
    for each in fleet.places:
        if each is not place and fleet.directory[each.name].state is MemberState.UP:
            if each.classes == classes:
                classes = each.classes  # one object for all nodes of a version
            others.append((each.name, each.classes))
    renamed: dict[str, None] = {}
    for name, known in others:
        errors, remarks = compare_classes(known, classes, f"in {name}", f"in {place.name}")
        if errors:
            return printable(errors[0], 1000)
        renamed |= dict.fromkeys(remarks)
    for text in renamed:
        logger.warning("message classes differ: %s", printable(text), extra={"node": place.name, "event": "schema"})
    place.classes = classes
    return ""
