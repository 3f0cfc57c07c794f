"""Carriers, which move bytes, and protocol cores without I/O, which give the bytes a meaning.

These packages use only the errors and `printable` of `levada.framework`. The actors that run the protocols are in `levada.actors`.
"""

from __future__ import annotations

__all__: list[str] = []
