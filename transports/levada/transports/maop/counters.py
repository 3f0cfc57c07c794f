"""What an exporter of metrics asks for."""

from __future__ import annotations

from collections import Counter

import attrs

__all__ = ["Statistics"]


@attrs.define
class Statistics:
    """What has happened on a connection. Source: MA-133."""

    opened: int = 0
    """Operations of ours."""
    received: int = 0
    """Operations of the peer whose stream has been classified."""
    approved: int = 0
    """Operations of the peer that passed the gate."""
    done: int = 0
    """Operations of the peer that ended well."""
    block_octets: int = 0
    """Octets received on data streams."""
    streams_aborted: int = 0
    """Streams that the peer has reset."""
    responses_unacked: int = 0
    """Responses of which the requester said nothing."""
    invalid_content_types: int = 0
    """Successes received whose content type is none."""
    refused: Counter[int] = attrs.Factory(Counter)
    """Refuses sent, by code."""
    failed: Counter[int] = attrs.Factory(Counter)
    """Fails sent and received, and failures found here, by code."""
