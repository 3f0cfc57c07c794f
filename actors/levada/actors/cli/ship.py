"""``levada ship``: follow files and send their lines to Lumberjack readers."""

from __future__ import annotations

import argparse
import json
import logging
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import attrs
import trio

from levada.actors.apps import freeze_heap
from levada.actors.lumberjack import (
    HostConfig,
    SpoolConfig,
    Tail,
    TailConfig,
    TailStatus,
    Writer,
    WriterConfig,
    WriterStatistics,
    connect,
    tail,
)
from levada.actors.lumberjack.tail_file import find_files
from levada.framework import ActorSystem
from levada.framework.errors import ConfigurationError
from levada.framework.text import printable
from levada.transports.carriers import TlsConfig

from . import Subparsers
from .arguments import seconds, whole

__all__ = ["add_parser", "run", "warnings_on_stderr"]


def add_parser(subparsers: Subparsers) -> None:
    """Describe the arguments."""
    parser = subparsers.add_parser(
        "ship",
        help="follow files and send their lines to Logstash, `levada receive` or another Lumberjack reader",
        description="Follow files, including rotated, truncated and new ones, and send each line at least once to a reader that speaks Lumberjack. "
        "With --registry, the next run continues after the last acknowledged line.",
        epilog="Exit codes: 0 all lines were acknowledged; 1 not all, or a file could not be read; 2 a mistake in the arguments; "
        "130 after Ctrl-C.",
    )
    parser.add_argument(
        "files", nargs="+", metavar="FILE", help="a file, or a quoted pattern such as '/var/log/**/*.log'"
    )
    parser.add_argument(
        "--to",
        action="append",
        required=True,
        metavar="URL",
        help="lumberjack://host:port or lumberjack+tls://host:port; if given more than once, the next one takes over after a failure",
    )
    parser.add_argument(
        "--balance", action="store_true", help="with more than one --to, use all of them at the same time"
    )
    parser.add_argument("--registry", metavar="DIR", help="folder that stores how far each file was shipped")
    parser.add_argument(
        "--once", action="store_true", help="ship the existing lines, wait until they are acknowledged, and end"
    )
    parser.add_argument(
        "--from",
        dest="start",
        choices=("beginning", "end"),
        default="beginning",
        help="where to start in files that are not in the registry (default: beginning)",
    )
    parser.add_argument("--multiline", metavar="REGEX", help="a line without a match belongs to the event before it")
    parser.add_argument(
        "--field", action="append", default=[], type=_field, metavar="KEY=TEXT", help="add this field to each event"
    )
    parser.add_argument("--v1", action="store_true", help="use version 1 (the first Lumberjack) instead of 2 (Beats)")
    parser.add_argument(
        "--compression", type=int, choices=range(10), default=3, metavar="N", help="0 (none) to 9 (default: 3)"
    )
    parser.add_argument(
        "--window", type=whole(1, 100_000), default=1024, metavar="N", help="events sent before an ack (default: 1024)"
    )
    parser.add_argument("--ca", metavar="FILE", help="authorities to trust instead of the system's (PEM)")
    parser.add_argument("--cert", metavar="FILE", help="certificate to show (PEM)")
    parser.add_argument("--key", metavar="FILE", help="its key (PEM; default: in the same file)")
    parser.add_argument("--insecure", action="store_true", help="do not check the reader's certificate")
    parser.add_argument(
        "--spool",
        metavar="DIR",
        help="keep lines on disk until they are acknowledged; the registry advances once they are there",
    )
    parser.add_argument(
        "--timeout", type=seconds, metavar="S", help="with --once, give up after S seconds, and --drain-timeout"
    )
    parser.add_argument(
        "--drain-timeout",
        type=seconds,
        default=5.0,
        metavar="S",
        help="seconds at the end for unacknowledged lines (default: 5)",
    )
    parser.add_argument(
        "--interval", type=seconds, metavar="S", help="seconds between reports (default: 10; on a terminal 0.5)"
    )
    parser.add_argument("--json", action="store_true", help="report as lines of JSON on stdout")


def run(args: argparse.Namespace) -> int:
    """Ship until Ctrl-C or SIGTERM, or with ``--once`` until all lines are acknowledged."""
    with warnings_on_stderr():
        return trio.run(_ship, args)


async def _ship(args: argparse.Namespace) -> int:
    follow = TailConfig(
        once=args.once,
        start=args.start,
        multiline=args.multiline,
        fields=dict(args.field),
        drain_timeout=args.drain_timeout,
    )
    nothing = [pattern for pattern in args.files if not find_files([pattern], follow.exclude)]
    if args.once and nothing == args.files:
        raise ConfigurationError(f"no file to ship: {' '.join(nothing)}; a folder is shipped as FOLDER/*")
    for pattern in nothing:
        print(f"levada: no file to ship yet: {printable(pattern)}", file=sys.stderr, flush=True)
    hosts = HostConfig(
        several="balance" if args.balance else "failover",
        tls=TlsConfig(ca=args.ca, certificate=args.cert, key=args.key, verify=not args.insecure),
    )
    config = WriterConfig(version=1 if args.v1 else 2, compression=args.compression, window=args.window)
    spool = None if args.spool is None else SpoolConfig(folder=args.spool)
    # Without a spool, `tail` has already waited for acknowledgements when the writer closes.
    patience = 0.0 if spool is None else args.drain_timeout
    report: _Report | None = None
    stop = _Stop(args.timeout if args.once else None)
    async with trio.open_nursery() as nursery:
        await nursery.start(stop.watch)
        with stop.everything:
            async with (
                ActorSystem("ship") as system,
                connect(system, args.to, config=config, hosts=hosts, spool=spool, close_timeout=patience) as writer,
                tail(system, args.files, writer.deliver, registry=args.registry, config=follow) as followed,
            ):
                freeze_heap()
                report = _Report(args, followed, writer)
                nursery.start_soon(report.run)
                stop.running = True
                with stop.body:
                    await followed.finished()
        nursery.cancel_scope.cancel()
    failed = report is None or report.finish()
    if stop.interrupted:
        return 130
    return 1 if failed or (args.once and stop.body.cancelled_caught) else 0


class _Stop:
    """Ends the work: in an orderly way on the first signal, at once on the second."""

    def __init__(self, timeout: float | None) -> None:
        self.body = trio.CancelScope(deadline=float("inf") if timeout is None else trio.current_time() + timeout)
        self.everything = trio.CancelScope()
        self.running = False
        """Whether lines may be under way. Before that, the first signal ends the work at once."""
        self.interrupted = False

    async def watch(self, task_status: trio.TaskStatus[None]) -> None:
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            task_status.started()
            async for number in signals:
                self.interrupted = self.interrupted or number == signal.SIGINT
                if self.body.cancel_called or not self.running:
                    self.everything.cancel()
                self.body.cancel()


class _Report:
    """Shows progress: one line that changes on a terminal, lines elsewhere, or JSON."""

    def __init__(self, args: argparse.Namespace, followed: Tail, writer: Writer) -> None:
        self.followed = followed
        self.writer = writer
        self.json = args.json
        self.spool = args.spool is not None
        self.live = not args.json and sys.stderr.isatty()
        self.interval = args.interval or (0.5 if self.live else 10.0)
        self.last = ""

    async def run(self) -> None:
        while True:
            await trio.sleep(self.interval)
            self.show("running")

    def finish(self) -> bool:
        """Show the final figures; return whether lines are missing."""
        status = self.followed.status()
        self.live = False
        self.show("done")
        left = status.lines_read - status.lines_acked
        if left and not self.json:
            print(f"levada: lines that are not acknowledged: {left:,}", file=sys.stderr)
        return bool(left or status.failures or status.bytes_behind)

    def show(self, state: str) -> None:
        status, writer = self.followed.status(), self.writer.statistics()
        if self.json:
            print(json.dumps({"state": state, **_as_json(status), "writer": _as_json(writer)}), flush=True)
            return
        text = f"{status.lines_acked:,} lines {'spooled' if self.spool else 'acknowledged'}, {status.bytes_behind:,} bytes behind"
        if state == "running":
            text += f", {status.files} files open, {writer.connections} connections"
        if self.live:
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
        elif text != self.last:
            clear = "\r\x1b[K" if sys.stderr.isatty() else ""
            print(f"{clear}{text}", file=sys.stderr, flush=True)
        self.last = text


def _as_json(status: TailStatus | WriterStatistics) -> dict[str, int]:
    return attrs.asdict(status)


class _OnStderr(logging.Handler):
    """Prints a warning on a line of its own, over the line of progress."""

    def emit(self, record: logging.LogRecord) -> None:
        clear = "\r\x1b[K" if sys.stderr.isatty() else ""
        print(f"{clear}levada: {printable(record.getMessage())}", file=sys.stderr, flush=True)


@contextmanager
def warnings_on_stderr() -> Iterator[None]:
    """While the block lasts, print warnings about Lumberjack and about refused peers on stderr."""
    handler = _OnStderr(logging.WARNING)
    ours = [logging.getLogger(name) for name in ("levada.actors.lumberjack", "levada.transports.carriers")]
    for logger in ours:
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger in ours:
            logger.removeHandler(handler)


def _field(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError(f"expected KEY=TEXT, got {text!r}")
    return key, value
