"""Conventions on top of RSocket metadata: what a request is for, who asks, what its data is, which trace it belongs to.

Optional: the protocol cores carry metadata as bytes and never look inside. Each class here is a value with ``encode()`` and
``decode(octets)``; reading raises `levada.framework.errors.DecodeError` and nothing else, and building one from wrong values
raises `TypeError` or `ValueError`.
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
