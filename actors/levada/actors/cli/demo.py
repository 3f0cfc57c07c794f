"""``levada demo``: ship real logs through Lumberjack, actors, Spark, RSocket and Aqueduct, and check the counts."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import logging
import math
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import trio

from levada.framework.errors import ConfigurationError

from . import Subparsers
from .arguments import port, positive, real

if TYPE_CHECKING:
    from rich.console import Console

    from levada.actors.demo.live import Results
    from levada.actors.demo.pipeline import Pipeline

__all__ = ["add_parser", "run"]

OUTPUT = Path("demo-output")
TERMINAL_INTERVAL, LOG_INTERVAL = 0.2, 5.0  # seconds between reports
LAST = 1.0  # seconds to ask the queries for their last figures when serving ends
NEEDED = ("pyspark", "pyarrow", "cryptography")


def add_parser(subparsers: Subparsers) -> None:
    """Describe the arguments."""
    parser = subparsers.add_parser(
        "demo",
        help="run a log pipeline over Lumberjack, actors, Spark, RSocket and Aqueduct, and check its result",
        description="Ship real logs over Lumberjack with TLS to ingest actors, run streaming queries over them on Spark, "
        "and fetch the results over RSocket and over Aqueduct: counts by status, day and template, errors by hour, guessed passwords, "
        "unusual hours. Compare the counts with the known facts about these logs, and write a report in HTML.",
        epilog="Exit codes: 0 all counts are right; 1 a count is wrong; 2 a mistake in the arguments, or Spark or Java is missing; "
        "130 after Ctrl-C; with --serve 0 after SIGTERM.",
    )
    parser.add_argument(
        "--input",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="ship your own logs instead: Apache access logs, auth logs, log4j, others line by line; their counts are not verified",
    )
    parser.add_argument(
        "--rate", type=real("lines a second"), default=math.inf, metavar="N", help="ship at most N lines a second"
    )
    parser.add_argument(
        "--lines",
        type=positive,
        metavar="N",
        help="ship only the first N lines of each log; their counts are not verified",
    )
    parser.add_argument(
        "--batch-rows", type=positive, metavar="N", help="most lines in a Spark micro-batch (default: 50,000)"
    )
    parser.add_argument(
        "--nodes",
        type=positive,
        default=0,
        metavar="N",
        help="read and parse on N nodes: processes with their own ports",
    )
    parser.add_argument(
        "--serve", action="store_true", help="keep running, so that you can ship more files and follow the results"
    )
    parser.add_argument(
        "--watch", action="store_true", help="serve a dashboard, print its address, and keep running as with --serve"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (default: 127.0.0.1)")
    parser.add_argument(
        "--ports",
        nargs="+",
        type=port,
        default=[],
        metavar="PORT",
        help="ports of Lumberjack, RSocket and Aqueduct (default: free ones)",
    )
    parser.add_argument(
        "--keep",
        type=Path,
        metavar="DIR",
        help=f"write the report there instead of {OUTPUT}/, and keep journals, checkpoints and certificates beside it",
    )
    parser.add_argument("--json", action="store_true", help="write the results as JSON instead of tables")


def run(args: argparse.Namespace) -> int:
    """Run the pipeline; return 1 if a count is wrong."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigurationError(f"levada demo runs on Spark and needs {', '.join(missing)}: pip install 'levada[all]'")
    if len(args.ports) > 3:
        raise ConfigurationError(
            f"--ports has {len(args.ports)}, wanted at most three: for Lumberjack, RSocket and Aqueduct"
        )
    args.serve = args.serve or args.watch
    output = args.keep or OUTPUT
    with contextlib.ExitStack() as stack:
        try:
            output.mkdir(parents=True, exist_ok=True)
            if args.keep is None:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="levada-demo-")))
            else:
                folder = output / "run"
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(mode=0o700)
            stack.enter_context(_log_to(output / "demo.log"))
        except OSError as error:
            raise ConfigurationError(
                f"cannot write to {error.filename or output}: {error.strerror or error}"
            ) from error
        # Spark takes standard error while it starts; progress is shown on this copy.
        show = stack.enter_context(open(os.dup(sys.stderr.fileno()), "w", encoding=sys.stderr.encoding))
        return trio.run(_run, args, folder, output, show)


@contextlib.contextmanager
def _log_to(path: Path) -> Iterator[None]:
    """Keep warnings off the terminal: py4j logs many when Java ends."""
    handler = logging.FileHandler(path, "w", "utf-8")
    handler.setLevel(logging.WARNING)
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
        handler.close()


async def _run(args: argparse.Namespace, folder: Path, output: Path, show: TextIO) -> int:
    from levada.actors.demo.ingest import sources_of, unpack
    from levada.actors.demo.known import differences, mistakes
    from levada.actors.demo.pipeline import BATCH_ROWS, Pipeline, PipelineSettings, pipeline
    from levada.actors.demo.queries import SOURCES

    start = time.perf_counter()
    paths = tuple(args.input or unpack(folder / "logs", args.lines))
    ports = [*args.ports, 0, 0, 0]
    demo = Pipeline()
    stop, progress = _Stop(demo), _Progress(demo, show, start)
    settings = PipelineSettings(
        paths=paths,
        sources=frozenset(SOURCES) if args.serve else sources_of(paths),
        folder=folder,
        log=output / "spark.log",
        rate=args.rate,
        host=args.host,
        ports=(ports[0], ports[1], ports[2]),
        batch_rows=args.batch_rows or BATCH_ROWS,
        nodes=args.nodes,
        watch=(lambda url: progress.say(f"watch it in the browser: {url}")) if args.watch else None,
    )
    code = 0
    async with trio.open_nursery() as nursery:
        await nursery.start(stop.watch)
        nursery.start_soon(progress.show)
        with stop.scope:
            async with pipeline(settings, demo):
                await demo.finish()
                await progress.end()  # so that it does not draw over the next lines
                wrong = None if args.input or args.lines else mistakes(demo.results)
                differ = differences(demo.results, demo.by_channel)
                seconds = time.perf_counter() - start
                _write_report(output, demo, paths, seconds, wrong)
                _tell(args, demo, output, seconds, wrong, differ)
                code = 1 if wrong or differ else 0
                if args.serve:
                    demo.phase = "serving"
                    print(_invitation(demo), file=sys.stderr, flush=True)
                    received = sum(demo.results.taken.values())
                    try:
                        await trio.sleep_forever()
                    finally:
                        with trio.move_on_after(LAST, shield=True):
                            await demo.count_batches()
                        more = sum(demo.results.taken.values()) > received
                        _write_report(output, demo, paths, time.perf_counter() - start, None if more else wrong)
        nursery.cancel_scope.cancel()
    if stop.number == signal.SIGINT:
        return 130
    return code if stop.number == 0 or args.serve else 1


def _write_report(
    output: Path, demo: Pipeline, paths: Iterable[Path], seconds: float, wrong: Sequence[str] | None
) -> None:
    from levada.actors.demo.report import Facts, report

    facts = Facts(
        seconds=seconds,
        batches=demo.batches,
        shipped=demo.pace.shipped,
        files=[path.name for path in paths],
        mistakes=wrong,
    )
    (output / "report.html").write_text(report(demo.results, facts), "utf-8")


class _Stop:
    """Ends the pipeline on SIGINT and SIGTERM."""

    def __init__(self, demo: Pipeline) -> None:
        self._demo = demo
        self.scope = trio.CancelScope()
        self.number = 0
        """The signal that came."""

    async def watch(self, task_status: trio.TaskStatus[None]) -> None:
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            task_status.started()
            async for number in signals:
                self.number = self.number or number
                self._demo.phase = "stopping"
                self.scope.cancel()


class _Progress:
    """Shows progress: bars on a terminal if rich is installed, else a line for each phase and every few seconds."""

    def __init__(self, demo: Pipeline, out: TextIO, start: float) -> None:
        self._demo = demo
        self._out = out
        self._start = start
        self._scope = trio.CancelScope()
        self._gone = trio.Event()
        self._console: Console | None = None  # while there are bars

    def say(self, text: str) -> None:
        """Print a line, above the bars if there are any."""
        if self._console is None:
            print(text, file=self._out, flush=True)
        else:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    async def show(self) -> None:
        """Show progress until `end` is called."""
        try:
            with self._scope:
                if self._out.isatty() and importlib.util.find_spec("rich") is not None:
                    await self._bars()
                else:
                    await self._lines()
        finally:
            self._gone.set()

    async def end(self) -> None:
        """Clear the bars."""
        self._scope.cancel()
        await self._gone.wait()
        self._console = None

    async def _lines(self) -> None:
        demo, said, last = self._demo, "", 0.0
        while True:
            now = time.perf_counter()
            if demo.phase != said or now - last >= LOG_INTERVAL:
                said, last = demo.phase, now
                done = ", ".join(f"{count:,} {name}{_share(count, total)}" for name, count, total in self._counts())
                print(f"[{now - self._start:5.1f} s] {said}: {done}", file=self._out, flush=True)
            await trio.sleep(TERMINAL_INTERVAL)

    async def _bars(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (
            TextColumn("{task.description:24}"),
            BarColumn(),
            TextColumn("{task.fields[count]:>8}"),
            TimeElapsedColumn(),
        )
        # Refreshed below: rich would use a thread of its own.
        self._console = Console(file=self._out)
        with Progress(*columns, console=self._console, auto_refresh=False, transient=True) as progress:
            phase = progress.add_task(self._demo.phase, total=None, count="")
            bars = {name: progress.add_task(name, total=None, count="") for name, _, _ in self._counts()}
            while True:
                progress.update(phase, description=self._demo.phase)
                for name, count, total in self._counts():
                    progress.update(bars[name], completed=count, total=total, count=f"{count:,}")
                progress.refresh()
                await trio.sleep(TERMINAL_INTERVAL)

    def _counts(self) -> Iterator[tuple[str, int, int | None]]:
        """Yield each name with its count, and the total if it is known."""
        demo = self._demo
        shipped = demo.pace.shipped
        share = demo.pace.share
        # Estimated from the share of the bytes; exact when all are shipped.
        total = shipped if demo.shipped.is_set() else round(shipped / share) if share else None
        yield "records shipped", shipped, total
        yield "records counted", sum(demo.results.count(source, "records") for source in demo.sources), total
        yield "results received", sum(demo.results.taken.values()), None


def _share(count: int, total: int | None) -> str:
    return f" ({count / total:.0%})" if total else ""


def _tell(
    args: argparse.Namespace,
    demo: Pipeline,
    output: Path,
    seconds: float,
    wrong: Sequence[str] | None,
    differ: Sequence[str],
) -> None:
    """Print the result and its errors."""
    if args.json:
        verified = None if wrong is None else not (wrong or differ)
        facts = {
            "verified": verified,
            "micro_batches": demo.batches,
            "largest_batch": demo.largest,
            "lines_read": demo.read,
            "lines_scored": demo.scored,
        }
        print(json.dumps({**_as_json(demo.results), **facts}))
    else:
        print("\n".join(_summary(demo, seconds)))
        print(f"\nreport: {output / 'report.html'}")
    for mistake in (*(wrong or ()), *differ):
        print(f"levada: {mistake}", file=sys.stderr)
    if not demo.channels_url.startswith("aqueduct://"):
        print("levada: no QUIC, so Aqueduct stays within this process: pip install 'levada[quic]'", file=sys.stderr)
    if not differ and not args.json:
        print(f"the same {sum(demo.by_channel.taken.values()):,} results came over Aqueduct")
        if wrong == []:
            from levada.actors.demo.known import VERIFIED

            print(f"verified: {VERIFIED}")
    sys.stdout.flush()


def _as_json(results: Results) -> dict[str, object]:
    counts: dict[str, dict[str, dict[str, int]]] = {}
    for source, kind, _ in results.counts:
        counts.setdefault(source, {})[kind] = results.by_key(source, kind)
    return {
        "counts": counts,
        "rates": list(results.rates.values()),
        "attacks": list(results.attacks.values()),
        "anomalies": list(results.anomalies.values()),
    }


def _summary(demo: Pipeline, seconds: float) -> Iterator[str]:
    results = demo.results
    yield (
        f"{demo.pace.shipped:,} records shipped, {demo.batches} micro-batches, {sum(results.taken.values()):,} results received, "
        f"in {seconds:.1f} s"
    )
    for what, counts in (("read", demo.read), ("scored", demo.scored)):
        if len(counts) > 1:
            shares = (f"{node} {count / counts.total():.0%}" for node, count in sorted(counts.items()))
            yield f"lines {what}: {', '.join(shares)}"
    yield ""
    yield from _table(
        ["log", "records", "lines", "damaged"],
        [
            [source, *(f"{number:,}" for number in numbers)]
            for source in demo.sources
            if any(
                numbers := [
                    results.count(source, "records"),
                    results.count(source, "lines"),
                    sum(results.by_key(source, "damaged").values()),
                ]
            )
        ],
    )
    for source in demo.sources:
        for key in list(results.by_key(source, "damaged"))[:5]:
            yield f"damaged, and reported: {source}, {key}"
    for kind, heading in (("status", "status"), ("day", "day")):
        if found := results.by_key("access", kind):
            yield ""
            ordered = found if kind == "status" else dict(sorted(found.items()))
            yield from _table([heading, "lines"], [[key, f"{count:,}"] for key, count in ordered.items()])
    if suspicious := results.by_key("access", "suspicious"):
        yield ""
        yield f"clients with suspicious requests: {len(suspicious)}; the most points:"
        rows = [[client, str(points)] for client, points in list(suspicious.items())[:5]]
        yield from _table(["client", "points"], rows)
    if results.attacks:
        yield ""
        most = sorted(results.attacks.values(), key=lambda row: -row["failures"])[:5]
        yield f"{len(results.attacks)} sessions of guessed passwords; the largest:"
        rows = [[row["address"], row["start"][:16].replace("T", " "), str(row["failures"])] for row in most]
        yield from _table(["address", "from", "failures"], rows)
    if results.anomalies:
        yield ""
        most = sorted(results.anomalies.values(), key=lambda row: -row["score"])[:5]
        yield f"{len(results.anomalies)} kinds of lines stand out in some hour; the most unlikely:"
        rows = [[row["start"][:13].replace("T", " "), f"{row['score']:.0f}", row["template"][:70]] for row in most]
        yield from _table(["hour", "score", "line"], rows, left=(2,))
    if results.rates:
        yield ""
        worst = max(
            results.rates.values(), key=lambda row: (row["client_errors"] + row["server_errors"]) / row["requests"]
        )
        share = 100 * (worst["client_errors"] + worst["server_errors"]) / worst["requests"]
        yield f"{len(results.rates)} hours of requests; the worst, {worst['start'][:13].replace('T', ' ')}, had {share:.0f} % errors"


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[int] = ()) -> Iterator[str]:
    """Yield the lines of a table. The first column and the columns in `left` are aligned left, the others right."""
    lines = [list(headings), *map(list, rows)]
    widths = [max(len(line[at]) for line in lines) for at in range(len(headings))]
    for line in lines:
        cells = (
            f"{cell:{'<' if at == 0 or at in left else '>'}{width}}"
            for at, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        yield "  ".join(cells).rstrip()


def _invitation(demo: Pipeline) -> str:
    channels = ""
    if demo.channels_url.startswith("aqueduct://"):
        follow = "--tag levada.demo.Follow --data '[\"counts\"]' --stream"
        channels = f"\n  levada call {demo.channels_url} --ca {demo.ca} {follow}"
    to = " ".join(f"--to {url}" for url in demo.reader_urls) + " --balance" * (len(demo.reader_urls) > 1)
    return (
        f"serving until Ctrl-C; in another terminal:\n"
        f"  levada ship {to} --ca {demo.ca} FILE\n"
        f"  levada call {demo.door_url} --stream --route counts    # or rates, attacks, anomalies{channels}"
    )
