"""Fixed contracts that ``levada interop`` serves, one module for each protocol, so that other implementations can test against levada.

Each module has ``CARRIERS``, the carriers that it can serve on, ``add_arguments(parser)`` for arguments of its own, and
``serve(system, carrier, where, tls, args)``, an async context manager that yields a listener with a ``url``.
"""

from __future__ import annotations

__all__: list[str] = []
