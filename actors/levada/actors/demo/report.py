"""The report: one HTML file with drawings in it, which needs nothing else and runs no scripts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

import attrs

from .live import Results

__all__ = ["Facts", "report"]

WIDTH, HEIGHT, LEFT, BOTTOM = 860, 220, 48, 34
TOP = 12

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2733; --faint: #68788a; --line: #d5dde5; --paper: #fff; --a: #2f7dc4; --b: #e0953a; --c: #c8403a; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4eaf0; --faint: #93a3b3; --line: #37434f; --paper: #161c22; --a: #5aa5e8; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 900px; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.6em; margin-bottom: 0 } h2 { font-size: 1.15em; margin: 2em 0 .3em }
p { margin: .3em 0; color: var(--faint) } .good { color: #2b8a4b } .bad { color: var(--c) }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
td, th { text-align: left; padding: .15em .8em .15em 0; border-bottom: 1px solid var(--line); vertical-align: top; overflow-wrap: anywhere }
td.n, th.n { text-align: right; white-space: nowrap; overflow-wrap: normal }
svg { width: 100%; height: auto } svg text { font-size: 11px; fill: var(--faint) }
.a { fill: var(--a) } .b { fill: var(--b) } .c { fill: var(--c) } .axis { stroke: var(--line) }
"""


@attrs.frozen(kw_only=True)
class Facts:
    """What a run was, besides its results."""

    seconds: float
    batches: int
    """Micro-batches of all queries."""
    shipped: int
    """Records."""
    files: Sequence[str]
    mistakes: Sequence[str] | None
    """Differences to what is known; None: nothing is known about these files."""


def report(results: Results, facts: Facts) -> str:
    """Write the report; the text of an HTML file."""
    rates = sorted(results.rates.values(), key=lambda row: row["start"])
    attacks = sorted(results.attacks.values(), key=lambda row: -row["failures"])
    anomalies = sorted(results.anomalies.values(), key=lambda row: -row["score"])
    parts = [
        "<h1>What the logs say</h1>",
        f"<p>{facts.shipped:,} records of {escape(', '.join(facts.files))}; {facts.batches} micro-batches in {facts.seconds:.1f} s.</p>",
        *_verdict(facts.mistakes),
    ]
    if results.count("access", "lines"):
        statuses, days = results.by_key("access", "status"), results.by_key("access", "day")
        parts += [
            "<h2>Web server: requests by hour</h2>",
            "<p>Errors of clients (4xx) and of the server (5xx) are on top. An hour is here once the watermark is past it, the last one is not.</p>",
            _columns([(_hour(row["start"]), _stack(row)) for row in rates]),
            "<h2>Web server: share of errors by hour, in per cent</h2>",
            _columns([(_hour(row["start"]), (0.0, _errors(row), 0.0)) for row in rates]),
            "<h2>Web server: answers by status</h2>",
            _bars(statuses),
            "<h2>Web server: lines by day</h2>",
            _bars(dict(sorted(days.items()))),
            *_list("Web server: damaged lines", results.by_key("access", "damaged")),
            *_list("Web server: what is asked for most", results.by_key("access", "template")),
        ]
    if results.count("auth", "lines"):
        parts += [
            "<h2>Log-ins: attacks by guessing passwords</h2>",
            "<p>Sessions of failed log-ins from one address, with no ten minutes between two of them.</p>",
            _table(
                ["address", "from", "until", "#users", "#failures"],
                ([a["address"], _hour(a["start"]), _hour(a["end"]), a["users"], a["failures"]] for a in attacks[:15]),
            ),
            "<h2>Log-ins: lines by day</h2>",
            _columns([(day, (float(count), 0.0, 0.0)) for day, count in sorted(results.by_key("auth", "day").items())]),
            "<h2>Log-ins: hours that stand out</h2>",
            "<p>Kinds of lines that came far more often than in the hours before; the score is in standard deviations.</p>",
            _table(
                ["hour", "line", "#expected", "#came", "#score"],
                (
                    [_hour(a["start"]), a["template"], f"{a['expected']:.1f}", a["count"], f"{a['score']:.1f}"]
                    for a in anomalies[:15]
                ),
            ),
            *_list("Log-ins: most frequent kinds of lines", results.by_key("auth", "template")),
        ]
    if results.count("kafka", "lines"):
        traces = results.count("kafka", "traces")
        parts += [
            "<h2>Kafka: events by level</h2>",
            f"<p>{results.count('kafka', 'records'):,} events of {results.count('kafka', 'lines'):,} lines; {traces} have a stack trace.</p>",
            _bars(results.by_key("kafka", "level")),
            *_list("Kafka: most frequent events", results.by_key("kafka", "template")),
        ]
    body = "\n".join(parts)
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>What the logs say</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body>\n{body}\n</body></html>\n'
    )


def _verdict(mistakes: Sequence[str] | None) -> list[str]:
    if mistakes is None:
        return []
    if not mistakes:
        return ['<p class="good">Verified: all counts are those that are known for these logs.</p>']
    return [f'<p class="bad">Wrong: {escape(mistake)}</p>' for mistake in mistakes]


def _stack(row: Mapping[str, int]) -> tuple[float, float, float]:
    client, server = row["client_errors"], row["server_errors"]
    return float(row["requests"] - client - server), float(client), float(server)


def _errors(row: Mapping[str, int]) -> float:
    return 100 * (row["client_errors"] + row["server_errors"]) / max(row["requests"], 1)


def _hour(moment: str) -> str:
    return moment[:16].replace("T", " ")


def _columns(items: Sequence[tuple[str, tuple[float, float, float]]]) -> str:
    """Draw upright columns of three parts each."""
    if not items:
        return "<p>Nothing yet.</p>"
    most = max(sum(parts) for _, parts in items) or 1.0
    step = (WIDTH - LEFT) / len(items)
    drawn = []
    for at, (label, parts) in enumerate(items):
        x, y = LEFT + at * step, float(HEIGHT - BOTTOM)
        rectangles = []
        for kind, part in zip("abc", parts, strict=True):
            height = part / most * (HEIGHT - BOTTOM - TOP)
            y -= height
            if height:
                rectangles.append(
                    f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{step * 0.85:.1f}" height="{height:.1f}"/>'
                )
        drawn.append(f"<g><title>{escape(label)}: {sum(parts):,.6g}</title>{''.join(rectangles)}</g>")
        if at % max(1, len(items) // 6) == 0:
            drawn.append(f'<text x="{x:.1f}" y="{HEIGHT - 14}">{escape(label)}</text>')
    for share in (0.0, 0.5, 1.0):
        y = HEIGHT - BOTTOM - share * (HEIGHT - BOTTOM - TOP)
        drawn.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH}" y1="{y}" y2="{y}"/>')
        drawn.append(f'<text x="{LEFT - 6}" y="{y + 4}" text-anchor="end">{most * share:,.4g}</text>')
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(drawn)}</svg>'


def _bars(counts: Mapping[str, int]) -> str:
    """Draw lying bars."""
    most = max(counts.values(), default=1)
    drawn = []
    for at, (key, count) in enumerate(counts.items()):
        y, width = at * 22, count / most * (WIDTH - 240)
        drawn.append(f'<text x="92" y="{y + 15}" text-anchor="end">{escape(key)}</text>')
        drawn.append(f'<rect class="a" x="100" y="{y + 3}" width="{max(width, 1):.1f}" height="16"/>')
        drawn.append(f'<text x="{108 + width:.1f}" y="{y + 15}">{count:,}</text>')
    return f'<svg viewBox="0 0 {WIDTH} {max(len(counts), 1) * 22}" role="img">{"".join(drawn)}</svg>'


def _list(title: str, counts: Mapping[str, int], most: int = 12) -> list[str]:
    rows = ([key, count] for key, count in list(counts.items())[:most])
    return [f"<h2>{escape(title)}</h2>", _table([f"{len(counts):,} of them", "#times"], rows)] if counts else []


def _table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Write a table; columns whose heading begins with ``#`` hold numbers."""
    marks = [' class="n"' if heading.startswith("#") else "" for heading in headings]
    head = "".join(
        f"<th{mark}>{escape(heading.lstrip('#'))}</th>" for mark, heading in zip(marks, headings, strict=True)
    )
    lines = []
    for row in rows:
        cells = (f"{cell:,}" if isinstance(cell, int) else escape(str(cell)) for cell in row)
        lines.append(
            "<tr>" + "".join(f"<td{mark}>{cell}</td>" for mark, cell in zip(marks, cells, strict=True)) + "</tr>"
        )
    return f"<table><tr>{head}</tr>{''.join(lines)}</table>"
