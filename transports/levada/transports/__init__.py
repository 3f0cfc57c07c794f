"""What moves octets and what the octets mean: carriers, and protocol cores without I/O.

Of `levada.framework` only the errors, the buffers and `printable` are used here; actors that run the protocols are in `levada.actors`.
"""

from __future__ import annotations

__all__: list[str] = []
