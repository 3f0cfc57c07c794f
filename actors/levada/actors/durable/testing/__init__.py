"""Tools for tests of stores that keep logs of durable actors."""

from __future__ import annotations

from ._promises import MadeLog, Maker
from .check_log import LogCheck, check_log, log_checks
from .faulty_log import FaultyLog

__all__ = ["FaultyLog", "LogCheck", "MadeLog", "Maker", "check_log", "log_checks"]
