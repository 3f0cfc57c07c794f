"""``levada nodes``: show the nodes of a server, and restart them one after another."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import trio

from levada.actors.console import connect_console
from levada.framework.errors import CarrierError
from levada.framework.text import printable

from . import Subparsers
from .servers import console_of

__all__ = ["add_parser", "run"]

_COLUMNS = ("name", "state", "pid", "restarts", "host", "next start")


def add_parser(subparsers: Subparsers) -> None:
    """Describe the arguments."""
    parser = subparsers.add_parser(
        "nodes",
        help="show the nodes of a server, and restart them",
        description="Show the nodes of this user's running 'levada serve --nodes', or restart them one after another.",
        epilog="Exit codes: 0 success; 1 a node did not restart; 2 a mistake, or no such server.",
    )
    commands = parser.add_subparsers(title="commands", dest="do", metavar="COMMAND", required=True)
    listing = commands.add_parser(
        "ls",
        help="show the nodes",
        description="Show the nodes of a server, also while it starts or drains.",
        epilog="Columns: name, as in system.name; state: starting (its app is not ready yet), up, draining (it accepts no more clients, and ends "
        "when open work has ended) or down; pid and host of its process, or of its last one; restarts, how often it was started again; next "
        "start, for a node that was lost and is down: when it starts again. A node that is down without a next start stays down until "
        "'levada nodes restart'; the log says why.",
    )
    listing.add_argument("--json", action="store_true", help="print a line of JSON for each node")
    restarting = commands.add_parser(
        "restart",
        help="restart the nodes one after another, with the current code and files",
        description="Restart the nodes one after another: each drains, ends, and starts again with the current code; the next follows when it "
        "serves. The command stops at the first node that does not serve again.",
    )
    for each in (listing, restarting):
        each.add_argument("--pid", type=int, metavar="PID", help="process of the server, if you run several")


def run(args: argparse.Namespace) -> int:
    """Run the chosen subcommand."""
    path = str(console_of(args.pid, nodes=True))
    return trio.run(_list, path, args.json) if args.do == "ls" else trio.run(_restart, path)


async def _nodes(path: str) -> list[dict[str, Any]]:
    async with connect_console(path) as console:
        nodes: list[dict[str, Any]] = (await console.command("nodes"))["nodes"]
        return nodes


async def _list(path: str, as_json: bool) -> int:
    nodes = await _nodes(path)
    if as_json:
        for node in nodes:
            print(json.dumps(node))
        return 0
    rows = [_COLUMNS, *(tuple(map(printable, _row(node))) for node in nodes)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0


def _row(node: dict[str, Any]) -> list[str]:
    known = [node[column] for column in _COLUMNS[:-1]]
    seconds = node["starts_in"]
    return [*("" if value is None else str(value) for value in known), "" if seconds is None else f"in {seconds:.1f} s"]


async def _restart(path: str) -> int:
    for node in await _nodes(path):
        try:
            async with connect_console(path) as console:
                answer = await console.command("restart", timeout=float("inf"), node=node["name"])
        except CarrierError as error:
            print(f"levada: {error}", file=sys.stderr)
            return 1
        print(f"{printable(node['name'])} serves again as process {printable(str(answer['pid']))}", flush=True)
    return 0
