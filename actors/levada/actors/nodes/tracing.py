"""Traces of nodes: how a node gets its `Tracing`, and how its spans name the node."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Final
from urllib.parse import quote

from levada.actors.apps import find
from levada.framework import ActorSystem
from levada.framework.platform import PLATFORM
from levada.framework.tracing import Tracing

__all__ = ["made_by", "resource", "tracing_in_nodes"]

_RESOURCE: Final = "OTEL_RESOURCE_ATTRIBUTES"
"""Source: OpenTelemetry, "Resource SDK": its SDKs add these attributes to the program's. If a name occurs twice, the last value counts."""


def tracing_in_nodes(system: ActorSystem) -> str:
    """Return the ``module:name`` of the function that makes the tracing of a driver's nodes; empty if they are not traced."""
    return "" if system.tracing is None else system.tracing.elsewhere


def made_by(target: str) -> Tracing | None:
    """Make the tracing of this process from the result of `tracing_in_nodes` in the driver."""
    tracing: Tracing | None = find(target)() if target else None
    return tracing


def resource(environment: Mapping[str, str], node: str) -> dict[str, str]:
    """Return the environment variables with which OpenTelemetry's SDK marks the spans of this start of a node.

    Args:
        environment: the environment of the node's process.
        node: the node's name.
    """
    known = environment.get(_RESOURCE)
    own = f"service.instance.id={uuid.UUID(bytes=PLATFORM.get().token_bytes(16), version=4)},levada.node={quote(node)}"
    return {_RESOURCE: f"{known},{own}" if known else own}
