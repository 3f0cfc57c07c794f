"""Connections, streams and bridges as supervised actors, and the command line.

The layer on top: it may use `levada.framework` and `levada.transports`, and neither of them knows it.
"""

from __future__ import annotations

__all__: list[str] = []
