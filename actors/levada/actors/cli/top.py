"""``levada top``: watch the actors of a running program."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterator

import trio

from levada.actors.console import SORTS, Snapshot, connect_console, table, text
from levada.actors.console.view import HEADINGS, NUMBERS, headline
from levada.framework.errors import ConfigurationError

from . import Subparsers, dashboard
from .arguments import positive, real
from .servers import console_of

__all__ = ["add_parser", "run"]

STATE_STYLES = {"waiting": "yellow", "restarting": "red", "stopping": "magenta", "ready": "green"}


def add_parser(subparsers: Subparsers) -> None:
    """Describe the arguments."""
    parser = subparsers.add_parser(
        "top",
        help="watch the actors of a running program",
        description="Show the actors of a 'levada serve', or of another program that serves a console (levada.actors.console.serve_console), "
        "repeatedly until Ctrl-C or the key q. On a terminal the screen is redrawn; elsewhere snapshots follow one another. "
        "The actors of nodes are shown below their node.",
    )
    parser.add_argument(
        "path", metavar="PATH", nargs="?", help="socket of the console (default: the one of 'levada serve')"
    )
    parser.add_argument("--pid", type=int, help="without PATH: process of 'levada serve', if you run several")
    parser.add_argument("--once", action="store_true", help="print one snapshot and end")
    parser.add_argument("--json", action="store_true", help="write each snapshot as one line of JSON")
    parser.add_argument(
        "--interval",
        type=real("seconds", 0.1, 300),
        default=1.0,
        metavar="S",
        help="seconds between snapshots, 0.1 to 300 (default: 1)",
    )
    parser.add_argument("--sort", choices=SORTS, default="tree", help="order of the actors (default: tree)")
    parser.add_argument("--depth", type=positive, metavar="N", help="levels below the root to show (default: all)")
    parser.add_argument(
        "--limit", type=positive, default=1000, metavar="N", help="fetch at most this many actors (default: 1000)"
    )
    dashboard.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Watch until Ctrl-C or the key q; with ``--once``, print one snapshot. The end of the watched program is an error."""
    if args.path is None:
        args.path = str(console_of(args.pid))
    elif args.pid is not None:
        raise ConfigurationError("give either PATH or --pid")
    if args.web:
        return dashboard.run(args)
    # rich belongs to the extra `cli`.
    live = not args.json and not args.once and sys.stdout.isatty() and importlib.util.find_spec("rich") is not None
    if live:
        _watch_live(args)
    else:
        trio.run(_watch, args, _write_json if args.json else _write_text(args))
    return 0


async def _watch(args: argparse.Namespace, draw: Callable[[Snapshot, Snapshot | None], None]) -> None:
    async with connect_console(args.path) as console:
        previous: Snapshot | None = None
        while True:
            snapshot = await console.snapshot(limit=args.limit)
            draw(snapshot, previous)
            if args.once:
                return
            previous = snapshot
            await trio.sleep(args.interval)


def _write_json(snapshot: Snapshot, _: Snapshot | None) -> None:
    print(json.dumps(snapshot.to_json(), separators=(",", ":")), flush=True)


def _write_text(args: argparse.Namespace) -> Callable[[Snapshot, Snapshot | None], None]:
    def draw(snapshot: Snapshot, previous: Snapshot | None) -> None:
        gap = "\n" if previous is not None else ""
        print(gap + text(snapshot, previous=previous, sort=args.sort, depth=args.depth), end="", flush=True)

    return draw


def _watch_live(args: argparse.Namespace) -> None:
    from rich.console import Console, Group
    from rich.live import Live
    from rich.table import Table
    from rich.text import Text

    screen = Console()

    def draw(snapshot: Snapshot, previous: Snapshot | None) -> None:
        head = [
            Text(line, style="bold" if number == 0 else "") for number, line in enumerate(headline(snapshot, previous))
        ]
        grid = Table(box=None, header_style="reverse", expand=True, pad_edge=False)
        for number, heading in enumerate(HEADINGS):
            grid.add_column(heading, justify="right" if number in NUMBERS else "left", no_wrap=True)
        rows = table(snapshot, previous=previous, sort=args.sort, depth=args.depth)
        room = max(1, screen.height - len(head) - 3)
        for row in rows[:room]:
            grid.add_row(
                *(Text(cell, style=STATE_STYLES.get(cell, "") if n == 2 else "") for n, cell in enumerate(row))
            )
        more = [Text(f"… {len(rows) - room:,} more (a taller window, --depth or --sort)")] if len(rows) > room else []
        live.update(Group(*head, grid, *more), refresh=True)

    with Live(console=screen, screen=True, auto_refresh=False) as live, _keys() as keyboard:
        trio.run(_watch_until_q, args, draw, keyboard)


async def _watch_until_q(
    args: argparse.Namespace, draw: Callable[[Snapshot, Snapshot | None], None], keyboard: int | None
) -> None:
    async with trio.open_nursery() as nursery:
        if keyboard is not None:
            nursery.start_soon(_read_keys, keyboard, nursery.cancel_scope)
        await _watch(args, draw)


async def _read_keys(keyboard: int, watching: trio.CancelScope) -> None:
    while True:
        await trio.lowlevel.wait_readable(keyboard)
        keys = os.read(keyboard, 100)
        if b"q" in keys.lower():
            watching.cancel()
        if not keys:  # the terminal is gone
            return


@contextlib.contextmanager
def _keys() -> Iterator[int | None]:
    """Make keys readable at once, without an echo, and yield the terminal's file descriptor; None if there is no terminal."""
    if sys.platform == "win32" or not sys.stdin.isatty():
        yield None
        return
    import termios
    import tty

    keyboard = sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)
    tty.setcbreak(keyboard)  # Ctrl-C still interrupts
    try:
        yield keyboard
    finally:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)
