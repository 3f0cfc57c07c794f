"""The program behind ``levada demo``: real log lines through a small system of actors, and a result that is known beforehand."""

from __future__ import annotations

from .log_summary import KNOWN, Summary, log_lines, mistakes, summarise

__all__ = ["KNOWN", "Summary", "log_lines", "mistakes", "summarise"]
