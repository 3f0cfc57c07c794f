"""Counters for an exporter of metrics."""

from __future__ import annotations

from collections import Counter

import attrs

__all__ = ["Statistics"]


@attrs.define
class Statistics:
    """The counters of a connection. Source: MA-133."""

    opened: int = 0
    """Operations of this side."""
    received: int = 0
    """Operations of the peer whose stream was classified."""
    approved: int = 0
    """Operations of the peer that passed the gate."""
    done: int = 0
    """Operations of the peer that succeeded."""
    block_bytes: int = 0
    """Bytes received on data streams."""
    streams_aborted: int = 0
    """Streams that the peer has reset."""
    responses_unacked: int = 0
    """Responses that the requester never acknowledged."""
    invalid_content_types: int = 0
    """Successes received with an invalid content type."""
    refused: Counter[int] = attrs.Factory(Counter)
    """Refuses sent, by code."""
    failed: Counter[int] = attrs.Factory(Counter)
    """Fails sent and received, and failures found here, by code."""
