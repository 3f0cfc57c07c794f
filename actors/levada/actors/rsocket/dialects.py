"""The two protocols that these actors speak: which core a URL's scheme stands for."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import cast

from levada.transports.rsocket import RSocketCore

__all__ = ["CoreFactory", "core_of"]

CoreFactory = Callable[..., RSocketCore]
"""`RSocketCore`, or the core of the other dialect, which has the same methods."""

_CORES = {
    "rsocket": ("levada.transports.rsocket", "RSocketCore"),
    "reactivesocket": ("levada.transports.reactivesocket", "ReactiveSocketCore"),
}


def core_of(dialect: str) -> CoreFactory:
    """Return the class of the core."""
    module, name = _CORES[dialect]
    return cast("CoreFactory", getattr(importlib.import_module(module), name))
