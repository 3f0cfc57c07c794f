"""Actors of levada that nodes may start in their driver, which imports no code of the app."""

from __future__ import annotations

from importlib import import_module
from typing import Final, Generic, TypeVar

from levada.framework import Actor
from levada.framework.errors import ConfigurationError
from levada.framework.text import printable

__all__ = ["DRIVER", "DriverActor", "driver_actor"]

M = TypeVar("M")

DRIVER: Final = "the driver"
"""The place of such an actor; no node can have this name."""


class DriverActor(Actor[M], Generic[M]):
    """An actor that nodes may start in their driver, by `levada.actors.nodes.Nodes.join`. It has no arguments."""


def driver_actor(name: str) -> type[DriverActor[object]]:
    """Import a class that nodes may start in the driver. Call it in a thread: an import can take long.

    Raises:
        ConfigurationError: the class is not of levada, or no such class.
    """
    module, _, cls = name.partition(":")
    if module.startswith("levada.actors."):
        found = getattr(import_module(module), cls, None)
        if isinstance(found, type) and issubclass(found, DriverActor):
            return found
    raise ConfigurationError(f"{printable(name)} cannot run in the driver: only actors of levada do")
