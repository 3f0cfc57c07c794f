"""The demo's streaming queries, from log lines to results.

Each takes a data frame with the columns of `LogLine` and ``points``, and returns one with the columns of a class of `levada.actors.demo.rows`.
They run on Spark's own engine, except that actors give the points, and `anomalies`, whose state is kept by `Expectation` in Spark's Python workers.

The counts (`access_counts`, `auth_counts`, `kafka_counts`) have no window: in append mode the last window of a stream is never
complete, so a sum over windows is always short of the tail. A source is a query of its own: a watermark over logs of different
years drops the older ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import reduce
from typing import Any

import attrs
from pyspark.sql import Column, DataFrame, Row
from pyspark.sql import functions as f
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

from levada.actors.spark.asks import RemoteActor

from .scoring import score_by

__all__ = ["QUERIES", "SOURCES", "Expectation", "StreamQuery", "scores"]

# Apache's combined format: client, identity, user, [time], "request", status, size, "referrer", "user agent".
# Possessive: no step of it can match in another way, and Java takes 6 µs a line instead of 21.
_QUOTED = r'"((?:[^"\\]++|\\.)*+)"'
_HEAD = r"^(\S+) \S+ \S+ \[([^\]]+)\] "
ACCESS = rf"{_HEAD}{_QUOTED} (\d{{3}}) (\d+|-) {_QUOTED} {_QUOTED}$"
SYSLOG = r"^(\w{3} [ \d]\d [\d:]{8}) (\S+) ([^:\[]+)(?:\[\d+\])?: (.*)$"
LOG4J = r"(?s)^\[([\d-]+ [\d:]+),\d+\] (\w+) (.*)$"

YEAR = "2017"
"""Syslog lines have no year; the demo's log is from this one."""
LATE = "10 minutes"
GAP = "10 minutes"
SURE = 4
"""Hours observed before the first judgement."""
SUSPICIOUS = 10
"""Clients with so many points are reported."""
NEWS = 3.0
"""An hour this many standard deviations above the mean, or more, is reported."""
WEIGHT = 0.2
"""Weight of the newest hour in the expectation."""

_AUTH_MASKS = (
    (r"\b\d{1,3}(?:\.\d{1,3}){3}\b", "<ip>"),
    (r"(?<=user )(?!unknown|root)\S+|(?<=user=)\S+|(?<=for )(?!invalid|user)\S+", "<user>"),
    (r"SHA256:\S+", "<key>"),
    (r"\d+", "<n>"),
)
_KAFKA_MASKS = (
    (r"(?s)\n.*", ""),
    (r"(?:Map|List|Set|ArrayBuffer)\(.*\)(?= \()|\{.*\}|\[[\w.-]+,\d+\]", "<...>"),
    (r"\d+", "<n>"),
)
_PATH_MASKS = ((r"\?.*", "?"), (r"\d+", "<n>"), (r"^((?:/[^/]*){3})/.*", "$1/..."))


def scores(actor: RemoteActor) -> Callable[[Column], Column]:
    """Return a function of the column of lines: the points that an actor gives them. Each task asks it by Arrow batches."""
    make: Any = f.arrow_udf  # its stubs want the kind of function that it reads from the hints
    asked: Callable[[Column], Column] = make(score_by(actor), "bigint")
    return asked


def access_counts(lines: DataFrame) -> DataFrame:
    """Count the access log's lines by status, by day and by template, and points of suspicion by client; of a damaged line, say which and how."""
    text = f.col("text")
    quotes = f.length(text) - f.length(f.replace(text, f.lit('"'), f.lit("")))
    fault = f.when(
        f.regexp_like(text, f.lit(_HEAD)), f.concat(quotes.cast("string"), f.lit(" quotation marks, wanted 6"))
    ).otherwise("does not begin as a line of an access log")
    suspicious = f.struct(f.lit("suspicious").alias("kind"), f.col("client").alias("key"), f.col("points").alias("n"))
    path = _masked(f.coalesce(f.regexp_extract("request", r"^\S+ (\S+)", 1), f.lit("")), _PATH_MASKS)
    found = _counts(
        "access",
        _access(lines),
        _one("records", f.lit("")),
        _one("lines", f.lit("")),
        _one("damaged", f.concat(f.lit("octet "), f.col("offset").cast("string"), f.lit(": "), fault), _damaged()),
        _one("status", f.col("status"), ~_damaged()),
        _one("day", f.date_format("at", "yyyy-MM-dd"), f.col("at").isNotNull()),
        _one("template", f.concat(f.regexp_extract("request", r"^(\S+)", 1), f.lit(" "), path), ~_damaged()),
        f.when(f.col("points") > 0, suspicious),
    )
    return found.where((f.col("kind") != "suspicious") | (f.col("count") >= SUSPICIOUS))


def auth_counts(lines: DataFrame) -> DataFrame:
    """Count the auth log's lines by day and by template."""
    return _counts(
        "auth",
        _auth(lines),
        _one("records", f.lit("")),
        _one("lines", f.lit("")),
        _one("damaged", f.concat(f.lit("octet "), f.col("offset").cast("string")), f.col("at").isNull()),
        _one("day", f.date_format("at", "yyyy-MM-dd"), f.col("at").isNotNull()),
        _one("template", f.col("template"), f.col("at").isNotNull()),
    )


def kafka_counts(lines: DataFrame) -> DataFrame:
    """Count the events of Kafka's log, the lines that they have, and those with a stack trace, by level and by template."""
    level, message = (f.regexp_extract("text", LOG4J, group) for group in (2, 3))
    length = f.length("text") - f.length(f.replace(f.col("text"), f.lit("\n"), f.lit(""))) + 1
    return _counts(
        "kafka",
        lines.select("offset", "text", level.alias("level"), _masked(message, _KAFKA_MASKS).alias("template")),
        _one("records", f.lit("")),
        f.struct(f.lit("lines").alias("kind"), f.lit("").alias("key"), length.cast("long").alias("n")),
        _one("damaged", f.concat(f.lit("octet "), f.col("offset").cast("string")), f.col("level") == ""),
        _one("traces", f.lit(""), f.contains("text", f.lit("\n\tat "))),
        _one("level", f.col("level"), f.col("level") != ""),
        _one("template", f.col("template"), f.col("level") != ""),
    )


def other_counts(lines: DataFrame) -> DataFrame:
    """Count the lines of all other logs by template."""
    return _counts(
        "other",
        lines.select(_masked(f.col("text"), ((r"\d+", "<n>"),)).alias("template")),
        _one("records", f.lit("")),
        _one("lines", f.lit("")),
        _one("template", f.col("template")),
    )


def access_rates(lines: DataFrame) -> DataFrame:
    """Requests and errors of each hour, once the watermark is past it."""
    status = f.col("status").cast("int")
    return (
        _access(lines)
        .where(~_damaged())
        .withWatermark("at", LATE)
        .groupBy(f.window("at", "1 hour"))
        .agg(
            f.count("*").alias("requests"),
            f.count_if(status.between(400, 499)).alias("client_errors"),
            f.count_if(status >= 500).alias("server_errors"),
            f.coalesce(f.sum(f.expr("try_cast(size as bigint)")), f.lit(0)).alias("bytes_sent"),
        )
        .select(f.col("window.start").alias("start"), "requests", "client_errors", "server_errors", "bytes_sent")
    )


def auth_attacks(lines: DataFrame) -> DataFrame:
    """Sessions of three and more failed log-ins from one address."""
    address = f.regexp_extract("message", r" from (\d+\.\d+\.\d+\.\d+)", 1)
    user = f.regexp_extract("message", r"for (?:invalid user )?(\S*) from", 1)
    # Syslog joins repeated messages into one line: "message repeated 5 times: [ Failed password for ...]".
    times = f.coalesce(f.expr("try_cast(regexp_extract(message, 'repeated (\\\\d+) times', 1) as bigint)"), f.lit(1))
    return (
        _auth(lines)
        .where(f.col("message").contains("Failed password"))
        .select("at", address.alias("address"), user.alias("user"), times.alias("times"))
        .withWatermark("at", LATE)
        .groupBy(f.session_window("at", GAP), "address")
        .agg(f.sum("times").alias("failures"), f.size(f.collect_set("user")).cast("long").alias("users"))
        .where("failures >= 3")
        .select(
            "address",
            f.col("session_window.start").alias("start"),
            f.col("session_window.end").alias("end"),
            "failures",
            "users",
        )
    )


def auth_anomalies(lines: DataFrame) -> DataFrame:
    """Find hours with far more lines of a template than before: counts by hour in Spark's engine, then `Expectation` for each template."""
    return (
        _auth(lines)
        .where(f.col("at").isNotNull())
        .withWatermark("at", LATE)
        .groupBy(f.window("at", "1 hour"), "template")
        .agg(f.count("*").alias("count"))
        .select("template", f.col("window.start").alias("start"), "count")
        .groupBy("template")
        .transformWithState(
            statefulProcessor=Expectation(),
            outputStructType="template string, start timestamp, count bigint, expected double, score double",
            outputMode="Append",
            timeMode="None",
        )
    )


class Expectation(StatefulProcessor):  # type: ignore[misc]  # mypy is not shown pyspark
    """Keeps, for one template, the mean and the variance of its hourly counts, and reports the hours that stand out."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Open the state."""
        self._state = handle.getValueState("expectation", "hours int, mean double, variance double")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:  # noqa: N802, N803 - Spark's names
        """Judge the hours of one batch, in their order."""
        hours, mean, variance = self._state.get() or (0, 0.0, 0.0)
        for row in sorted(rows, key=lambda row: row.start):
            # The variance of random counts is about their mean; with less, every second line would raise an alarm.
            score = (row["count"] - mean) / max(variance, mean, 1.0) ** 0.5
            if hours >= SURE and score >= NEWS:
                yield Row(template=key[0], start=row.start, count=row["count"], expected=mean, score=score)
            step = row["count"] - mean
            share = max(WEIGHT, 1 / (hours + 1))
            mean += share * step
            variance = (1 - share) * (variance + share * step * step)
            hours += 1
        self._state.update((hours, mean, variance))

    def close(self) -> None:
        """Nothing is open."""


@attrs.frozen
class StreamQuery:
    """One of the queries and where its rows come from and go to."""

    name: str
    source: str
    """The `LogLine.source` that it takes."""
    mailbox: str
    """Where its rows go."""
    build: Callable[[DataFrame], DataFrame]
    mode: str = "append"
    """Complete: each batch brings all counts. Update mode would bring only changed counts, but Python sinks do not support it."""


SOURCES = ("access", "auth", "kafka", "other")
"""Kinds of lines."""
QUERIES = (
    StreamQuery("access_counts", "access", "counts", access_counts, "complete"),
    StreamQuery("auth_counts", "auth", "counts", auth_counts, "complete"),
    StreamQuery("kafka_counts", "kafka", "counts", kafka_counts, "complete"),
    StreamQuery("other_counts", "other", "counts", other_counts, "complete"),
    StreamQuery("access_rates", "access", "rates", access_rates),
    StreamQuery("auth_attacks", "auth", "attacks", auth_attacks),
    StreamQuery("auth_anomalies", "auth", "anomalies", auth_anomalies),
)


def _access(lines: DataFrame) -> DataFrame:
    groups = {"client": 1, "request": 3, "status": 4, "size": 5}
    columns = [f.regexp_extract("text", ACCESS, group).alias(name) for name, group in groups.items()]
    moment = f.try_to_timestamp(f.regexp_extract("text", _HEAD, 2), f.lit("dd/MMM/yyyy:HH:mm:ss Z"))
    return lines.select("offset", "text", "points", moment.alias("at"), *columns)


def _damaged() -> Column:
    return f.col("status") == ""


def _auth(lines: DataFrame) -> DataFrame:
    # Days below ten have a second blank; the year has to come first, or 29 February is no date.
    text = f.regexp_replace(f.concat(f.lit(f"{YEAR} "), f.regexp_extract("text", SYSLOG, 1)), " +", " ")
    program, message = (f.regexp_extract("text", SYSLOG, group) for group in (3, 4))
    return lines.select(
        "offset",
        f.try_to_timestamp(text, f.lit("yyyy MMM d HH:mm:ss")).alias("at"),
        message.alias("message"),
        f.concat(program, f.lit(": "), _masked(message, _AUTH_MASKS)).alias("template"),
    )


def _masked(text: Column, masks: tuple[tuple[str, str], ...]) -> Column:
    return reduce(lambda column, mask: f.regexp_replace(column, *mask), masks, text)


def _one(kind: str, key: Column, when: Column | None = None) -> Column:
    item = f.struct(f.lit(kind).alias("kind"), key.alias("key"), f.lit(1).cast("long").alias("n"))
    return item if when is None else f.when(when, item)


def _counts(source: str, records: DataFrame, *items: Column) -> DataFrame:
    """Count everything that a record gives in one aggregate: one query, one pass."""
    return (
        records.select(f.explode(f.array_compact(f.array(*items))).alias("item"))
        .groupBy("item.kind", "item.key")
        .agg(f.sum("item.n").alias("count"))
        .select(f.lit(source).alias("source"), "kind", "key", "count")
    )
