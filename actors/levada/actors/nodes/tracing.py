"""Traces of nodes: what makes the `Tracing` of a node, and how its spans differ from those of other nodes."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Final
from urllib.parse import quote

from levada.actors.apps import find
from levada.framework import ActorSystem
from levada.framework.tracing import Tracing

__all__ = ["made_by", "resource", "tracing_in_nodes"]

_RESOURCE: Final = "OTEL_RESOURCE_ATTRIBUTES"
"""Source: OpenTelemetry, "Resource SDK"; its SDKs add these attributes to those of the program. Of equal names the last one counts."""


def tracing_in_nodes(system: ActorSystem) -> str:
    """Return the ``module:name`` of what makes the tracing of a driver's nodes; empty if they are not traced."""
    return "" if system.tracing is None else system.tracing.elsewhere


def made_by(target: str) -> Tracing | None:
    """Make the tracing of this process, by what `tracing_in_nodes` returned in the driver's."""
    tracing: Tracing | None = find(target)() if target else None
    return tracing


def resource(environment: Mapping[str, str], node: str) -> dict[str, str]:
    """Return variables by which OpenTelemetry's SDK tells the spans of this start of a node from all others.

    Args:
        environment: of the node's process.
        node: its name.
    """
    known = environment.get(_RESOURCE)
    own = f"service.instance.id={uuid.uuid4()},levada.node={quote(node)}"
    return {_RESOURCE: f"{known},{own}" if known else own}
