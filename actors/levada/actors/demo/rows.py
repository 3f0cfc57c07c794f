"""The messages of the demo: a line on its way to Spark, the results, and the request for results over Aqueduct."""

from __future__ import annotations

import datetime as dt

from levada.framework import Asks, Sender, message

__all__ = ["Anomaly", "Attack", "Count", "Follow", "Lines", "LogLine", "RateRow", "Result", "Scored"]


@message("levada.demo.LogLine", frozen=True)
class LogLine:
    """One record of a log: a line, or an event of several lines."""

    source: str
    """``access``, ``auth``, ``kafka`` or ``other``: which of the queries takes it."""
    host: str
    file: str
    offset: int
    """Bytes of the file before the line."""
    text: str


@message("levada.demo.Lines", frozen=True)
class Lines(Asks[None]):
    """Lines of one file, on their way to the journal; answered when they are on the disk."""

    rows: bytes
    """Columns ``source``, ``offset`` and ``text`` of `LogLine`, as an Arrow stream."""
    host: str
    """The same for all lines, as is the file."""
    file: str
    writer: str
    """The shipper that has numbered these lines; empty: they have no numbers, and may come twice."""
    numbers: list[tuple[int, int]]
    """The numbers of the lines, as ranges: the first, and the one behind the last."""
    node: str
    """Where they were read: the name of the node, or of the only system."""


@message("levada.demo.Scored", frozen=True)
class Scored:
    """Some lines have been scored."""

    node: str
    """Where: the name of the node, or of the only system."""
    lines: int


@message("levada.demo.Count", frozen=True)
class Count:
    """A count so far; a later one of the same source, kind and key replaces it."""

    source: str
    kind: str
    """The things counted: ``lines``, ``records``, ``damaged``, ``status``, ``day``, ``level``, ``template``, ``suspicious``."""
    key: str
    """Which of them: ``404``, for example."""
    count: int


@message("levada.demo.Rate", frozen=True)
class RateRow:
    """Requests of one hour, when the hour is over."""

    start: dt.datetime
    requests: int
    client_errors: int
    """With a status from 400 to 499."""
    server_errors: int
    """With a status of 500 or more."""
    bytes_sent: int


@message("levada.demo.Attack", frozen=True)
class Attack:
    """A session of failed log-ins from one address: none followed another by more than ten minutes."""

    address: str
    start: dt.datetime
    end: dt.datetime
    """Ten minutes after the last one."""
    failures: int
    users: int
    """Different names that were tried."""


@message("levada.demo.Anomaly", frozen=True)
class Anomaly:
    """An hour with far more lines of one kind than the hours before suggest."""

    template: str
    start: dt.datetime
    count: int
    expected: float
    """Mean of the earlier hours with such lines; later hours weigh more."""
    score: float
    """Standard deviations between the two."""


Result = Count | RateRow | Attack | Anomaly


@message("levada.demo.Follow", frozen=True)
class Follow:
    """Asks for the results of one mailbox, the past ones and then the new ones."""

    mailbox: str
    """``counts``, ``rates``, ``attacks`` or ``anomalies``; for any other name the sender is cancelled."""
    rows: Sender[Result]
    """Takes the results, until its receiver is closed."""
