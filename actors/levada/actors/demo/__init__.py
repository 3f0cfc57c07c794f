"""The pipeline behind ``levada demo``: real logs in, by Lumberjack; Spark in the middle; results out, by RSocket.

Needs all extras: ``pip install 'levada[all]'``. Begin with `levada.actors.demo.pipeline`.
"""

from __future__ import annotations

__all__: list[str] = []
