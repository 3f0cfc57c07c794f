"""``levada help``: the same as ``--help`` after a command."""

from __future__ import annotations

import argparse

from . import Subparsers, main

__all__ = ["add_parser", "run"]


def add_parser(subparsers: Subparsers) -> None:
    """Describe the arguments."""
    parser = subparsers.add_parser(
        "help",
        help="describe a command in full",
        description="Do what `levada COMMAND --help` does, also for a part of a command: `levada help journal ls`.",
    )
    parser.add_argument("words", nargs="*", metavar="COMMAND", help="the command (default: list all)")


def run(args: argparse.Namespace) -> int:
    """Print the help of a command, and exit."""
    return main([*args.words, "--help"])
