"""``levada explain``: print the frames in a capture."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from levada.actors import protocols
from levada.framework.errors import ConfigurationError
from levada.framework.text import printable
from levada.transports.plugins import resolve

from . import Subparsers

__all__ = ["add_parser", "run"]


def add_parser(subparsers: Subparsers) -> None:
    """Add the subcommand and its arguments."""
    parser = subparsers.add_parser(
        "explain",
        help="print the frames in a capture",
        description="Print the frames in a capture: the bytes of one direction of a connection, from its beginning or from the start of "
        "a frame, as Wireshark's 'Follow stream' saves them ('raw').",
        epilog="Exit codes: 0 the capture is well-formed; 1 part of it is not; 2 a mistake.",
    )
    choices = parser.add_subparsers(title="protocols", dest="protocol", metavar="PROTOCOL", required=True)
    for protocol in protocols.known(subparsers.words[:1]):
        if protocol.explain is None:
            continue
        explain = resolve(protocol.explain)
        own = choices.add_parser(protocol.scheme, help=explain.HELP)
        own.set_defaults(explain=explain)
        own.add_argument("file", metavar="FILE", help="the capture; - for standard input")
        own.add_argument("--hex", action="store_true", help="the file contains hexadecimal digits and white space")
        own.add_argument("--json", action="store_true", help="print a line of JSON for each frame")
        explain.add_arguments(own)


def run(args: argparse.Namespace) -> int:
    """Print a line for each frame; return 1 if a frame is malformed."""
    damaged = False
    for line in args.explain.explain(_read(args), args):
        damaged = damaged or line.damaged
        if args.json:
            print(
                json.dumps({"offset": line.offset, "length": line.length, "text": line.text, "damaged": line.damaged})
            )
        else:
            print(f"{line.offset:>10,} {line.length:>8,}  {printable(line.text)}")
    return 1 if damaged else 0


def _read(args: argparse.Namespace) -> bytes:
    try:
        data = sys.stdin.buffer.read() if args.file == "-" else Path(args.file).read_bytes()
    except OSError as error:
        raise ConfigurationError(f"cannot read {args.file}: {error.strerror}") from error
    if not args.hex:
        return data
    try:
        return bytes.fromhex(data.decode("ascii"))
    except ValueError as error:
        raise ConfigurationError(
            f"{args.file} must contain only hexadecimal digits and white space: {error}"
        ) from error
