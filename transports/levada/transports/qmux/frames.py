"""Layouts of QMux: integers, frames, transport parameters."""

from __future__ import annotations

from typing import Final

import attrs

__all__ = ["DEFAULT_MAX_RECORD", "Parameters"]

DEFAULT_MAX_RECORD: Final = 16_382
"""Largest Size unless the receiver declares more. Source: QX-3, QX-18."""


@attrs.frozen(kw_only=True)
class Parameters:
    """What one side declares. Source: QX-14."""

    max_idle_timeout_ms: int = 0
    """0 for none."""
    max_data: int = 0
    """Bytes of all streams together."""
    max_stream_data_bidi_local: int = 0
    """Bytes of a bidirectional stream that the declarer opens."""
    max_stream_data_bidi_remote: int = 0
    """Bytes of a bidirectional stream that the other side opens."""
    max_stream_data_uni: int = 0
    """Bytes of a unidirectional stream."""
    max_streams_bidi: int = 0
    """Bidirectional streams."""
    max_streams_uni: int = 0
    """Unidirectional streams."""
    max_datagram_frame_size: int = 0
    """Bytes of a DATAGRAM frame, type and length included; 0 if none is taken."""
    max_record_size: int = DEFAULT_MAX_RECORD
    """The largest Size of a record."""
    reset_stream_at: bool = False
    """Whether RESET_STREAM_AT is taken."""
