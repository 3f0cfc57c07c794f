"""Lets Spark find ``format("mailbox")`` by itself: it looks for modules whose names begin with ``pyspark_``."""

from __future__ import annotations

from levada.actors.spark.datasource import MailboxSource as DefaultSource

__all__ = ["DefaultSource"]
