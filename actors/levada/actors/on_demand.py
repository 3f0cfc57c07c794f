"""Packages whose names are imported on first use."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from importlib import import_module

__all__ = ["on_demand"]


def on_demand(package: str, modules: Collection[str], names: Collection[str]) -> Callable[[str], object]:
    """Return the ``__getattr__`` of a package that looks for its public names in its modules, one after the other.

    Args:
        package: its ``__name__``.
        modules: the modules that have the names, those first that import least.
        names: the public names.
    """

    def find(name: str) -> object:
        if name in names:
            for module in modules:
                found: object = vars(import_module(f".{module}", package)).get(name)
                if found is not None:
                    setattr(sys.modules[package], name, found)
                    return found
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return find
