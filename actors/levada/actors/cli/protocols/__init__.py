"""What the command line does for each protocol of levada: the parts that the records of `levada.actors.protocols` name."""

from __future__ import annotations

__all__: list[str] = []
