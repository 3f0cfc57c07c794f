"""Text of peers, made fit for a log line, an error text or a terminal: the function is the framework's, whose errors use it too."""

from __future__ import annotations

from levada.framework.text import printable

__all__ = ["printable"]
