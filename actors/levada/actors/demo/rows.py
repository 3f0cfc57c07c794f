"""What travels through the demo's mailboxes: a line on its way to Spark, and what comes back; and what asks for that over Aqueduct."""

from __future__ import annotations

import datetime as dt

from levada.framework import Sender, message

__all__ = ["Anomaly", "Attack", "Count", "Follow", "LogLine", "Rate", "Result"]


@message("levada.demo.LogLine", frozen=True)
class LogLine:
    """One record of a log: a line, or an event of several lines."""

    source: str
    """``access``, ``auth``, ``kafka`` or ``other``: which of the queries takes it."""
    host: str
    file: str
    offset: int
    """Octets of the file before it."""
    text: str


@message("levada.demo.Count", frozen=True)
class Count:
    """How many there are so far; a later one of the same source, kind and key replaces it."""

    source: str
    kind: str
    """What is counted: ``lines``, ``records``, ``damaged``, ``status``, ``day``, ``level``, ``template``."""
    key: str
    """Which of them: ``404``, for example."""
    count: int


@message("levada.demo.Rate", frozen=True)
class Rate:
    """Requests of one hour, when the hour is over."""

    start: dt.datetime
    requests: int
    client_errors: int
    """With a status from 400 to 499."""
    server_errors: int
    """With a status of 500 or more."""
    octets: int


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
    """An hour in which a kind of line came far more often than the hours before let expect."""

    template: str
    start: dt.datetime
    count: int
    expected: float
    """Mean of the hours before in which it came, the later ones weighing more."""
    score: float
    """Standard deviations between the two."""


Result = Count | Rate | Attack | Anomaly


@message("levada.demo.Follow", frozen=True)
class Follow:
    """Asks for the results of one mailbox: those so far, and then those that come."""

    mailbox: str
    """``counts``, ``rates``, ``attacks`` or ``anomalies``; of another one the sender is cancelled."""
    rows: Sender[Result]
    """They are sent on it, until its receiver is closed."""
