"""``levada receive``: print or spool what Lumberjack writers send."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from typing import Any

import trio

from levada.framework import ActorSystem

from . import Subparsers
from .ship import warnings_on_stderr

__all__ = ["add_parser", "run"]


def add_parser(subparsers: Subparsers) -> None:
    """Describe the arguments."""
    parser = subparsers.add_parser(
        "receive",
        help="print or spool what Filebeat, Logstash's forwarders or `levada ship` send",
        description="Listen for writers that speak Lumberjack, version 1 or 2, and print the lines that they send, or write them to a folder. "
        "An event is acknowledged when it is printed and flushed, or on the disk. "
        "The number of events is told on stderr at the end and on SIGUSR1.",
        epilog="Exit codes: 0 after SIGTERM or when nobody reads the output any more; 2 a mistake in the arguments; 130 after Ctrl-C.",
    )
    parser.add_argument(
        "url", metavar="URL", help="lumberjack://host:port or lumberjack+tls://host:port; port 0 takes a free one"
    )
    output = parser.add_mutually_exclusive_group()
    output.add_argument(
        "--spool", metavar="DIR", help="write files of JSON lines there, synced before they are acknowledged"
    )
    output.add_argument("--json", action="store_true", help="print each event as a line of JSON, not only its text")
    parser.add_argument("--cert", metavar="FILE", help="certificate for lumberjack+tls (PEM)")
    parser.add_argument("--key", metavar="FILE", help="its key (PEM; default: in the same file)")
    parser.add_argument(
        "--client-ca", metavar="FILE", help="writers must show a certificate of these authorities (PEM)"
    )


def run(args: argparse.Namespace) -> int:
    """Receive until SIGTERM, Ctrl-C, or until nobody reads the output."""
    with warnings_on_stderr():
        return trio.run(_receive, args)
