"""Conventions for RSocket metadata: the route of a request, credentials, MIME types and trace ids.

They are optional: the protocol cores carry metadata as bytes and never look inside. Each class here is a value with ``encode()`` and
``decode(octets)``. `decode` raises only `levada.framework.errors.DecodeError`, and a constructor refuses wrong values with `TypeError` or
`ValueError`.
"""

from __future__ import annotations

from levada.transports.rsocket.extensions.authentication import (
    Authentication,
    BearerAuthentication,
    OtherAuthentication,
    SimpleAuthentication,
)
from levada.transports.rsocket.extensions.composite import CompositeMetadata, Entry, Extension
from levada.transports.rsocket.extensions.mime import WELL_KNOWN_MIME_TYPES, AcceptableMimeTypes, DataMimeType
from levada.transports.rsocket.extensions.routing import Routing
from levada.transports.rsocket.extensions.tracing import ZipkinTracing

__all__ = [
    "WELL_KNOWN_MIME_TYPES", "AcceptableMimeTypes", "Authentication", "BearerAuthentication", "CompositeMetadata", "DataMimeType", "Entry",
    "Extension", "OtherAuthentication", "Routing", "SimpleAuthentication", "ZipkinTracing",
]  # fmt: skip
