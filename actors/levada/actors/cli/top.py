"""``levada top``: watch the actors of a running program."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import trio

from levada.actors.console import SORTS, Snapshot, View, connect_console, text
from levada.framework.errors import ConfigurationError

from . import Subparsers, dashboard
from .arguments import positive, real
from .servers import console_of

__all__ = ["add_parser", "run"]

_OVERVIEW: Final = View(page="overview", count=1)
_Troubles = Sequence[dict[str, Any]]
"""The troubles of the moment, as on the dashboard's overview: `levada.actors.console.trouble.Trouble` as JSON, with ``node`` for one of a node."""
_Draw = Callable[[Snapshot, Snapshot | None, _Troubles], None]


def add_parser(subparsers: Subparsers) -> None:
    """Describe the arguments."""
    parser = subparsers.add_parser(
        "top",
        help="watch the actors of a running program",
        description="Show the actors of a 'levada serve', or of another program that serves a console (levada.actors.console.serve_console), "
        "repeatedly until Ctrl-C or the key q. On a terminal the program's own actors come first, and keys scroll, fold, filter and sort them; "
        "elsewhere snapshots follow one another. The actors of nodes are shown below their node.",
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


async def _watch(args: argparse.Namespace, draw: _Draw) -> None:
    async with connect_console(args.path) as console:
        previous: Snapshot | None = None
        while True:
            snapshot = await console.snapshot(limit=args.limit)
            draw(snapshot, previous, (await console.view(_OVERVIEW))["troubles"])
            if args.once:
                return
            previous = snapshot
            await trio.sleep(args.interval)


def _sentences(troubles: _Troubles) -> list[str]:
    return [f"{each['node']}: {each['text']}" if each.get("node") else each["text"] for each in troubles]


def _write_json(snapshot: Snapshot, _: Snapshot | None, troubles: _Troubles) -> None:
    print(json.dumps({**snapshot.to_json(), "troubles": troubles}, separators=(",", ":")), flush=True)


def _write_text(args: argparse.Namespace) -> _Draw:
    def draw(snapshot: Snapshot, previous: Snapshot | None, troubles: _Troubles) -> None:
        gap = "\n" if previous is not None else ""
        wrong = "".join(f"! {each}\n" for each in _sentences(troubles))
        print(gap + wrong + text(snapshot, previous=previous, sort=args.sort, depth=args.depth), end="", flush=True)

    return draw


def _watch_live(args: argparse.Namespace) -> None:
    from rich.console import Console, Group
    from rich.live import Live

    from .screen import Screen, keys_in

    terminal = Console()
    screen = Screen(sort=args.sort, depth=args.depth)

    def draw() -> None:
        live.update(Group(*screen.lines(terminal.width, terminal.height)), refresh=True)

    def take(snapshot: Snapshot, previous: Snapshot | None, troubles: _Troubles) -> None:
        screen.take(snapshot, previous, _sentences(troubles))
        draw()

    async def read_keys(keyboard: int, watching: trio.CancelScope) -> None:
        while True:
            await trio.lowlevel.wait_readable(keyboard)
            data = os.read(keyboard, 100)
            if not data:  # the terminal is gone
                return
            if any(map(screen.press, keys_in(data))):
                watching.cancel()
            draw()

    async def watch(keyboard: int | None) -> None:
        async with trio.open_nursery() as nursery:
            if keyboard is not None:
                nursery.start_soon(read_keys, keyboard, nursery.cancel_scope)
            await _watch(args, take)

    with Live(console=terminal, screen=True, auto_refresh=False) as live, _keys() as keyboard:
        trio.run(watch, keyboard)


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
