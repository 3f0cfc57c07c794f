"""The parts of the command line that belong to one protocol each. The records of `levada.actors.protocols` name them."""

from __future__ import annotations

__all__: list[str] = []
