"""``levada call``: send one request to a server and print the answers."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import cast

import trio

from levada.actors import protocols
from levada.framework.errors import ConfigurationError, ConnectionLost, LevadaError
from levada.transports.plugins import resolve

from . import Subparsers
from .arguments import positive, seconds
from .calls import CallFailed, bytes_of, carrier_for, in_time, print_bytes, refuse

__all__ = ["add_parser", "run"]


def add_parser(subparsers: Subparsers) -> None:
    """Describe the common arguments and the options of the URL's protocol; without a URL, the options of every protocol."""
    parser = subparsers.add_parser(
        "call",
        help="send a request to a server and print the answers",
        description="Send one request and print the data of each answer: text as lines, other bytes unchanged. "
        "Without --stream, --channel, --fnf or --push it is a request with one answer.",
        epilog=f"URL: {', '.join(protocol.example for protocol in protocols.known() if _calls(protocol))}. "
        "DATA: text, @FILE for the content of a file, - for standard input. "
        "Exit codes: 0 success; 1 the answer was an error, or did not come in time; 2 a mistake, or no connection; 130 after Ctrl-C.",
    )
    parser.add_argument("url", metavar="URL")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--reply", dest="kind", action="store_const", const="response", help="one answer (default)")
    kinds.add_argument("--stream", dest="kind", action="store_const", const="stream", help="many answers")
    kinds.add_argument(
        "--channel",
        dest="kind",
        action="store_const",
        const="channel",
        help="many answers to many payloads: each --data is a payload; without --data, each line of standard input",
    )
    kinds.add_argument("--fnf", dest="kind", action="store_const", const="fnf", help="fire and forget: no answer")
    kinds.add_argument(
        "--push", dest="kind", action="store_const", const="push", help="push the --metadata, with no data"
    )
    parser.set_defaults(kind="response")
    parser.add_argument("--data", action="append", default=None, metavar="DATA", help="data to send (default: nothing)")
    parser.add_argument("--token-file", type=Path, metavar="FILE", help="file with a bearer token")
    parser.add_argument("--limit", type=positive, metavar="N", help="cancel after this many answers")
    parser.add_argument("--timeout", type=seconds, metavar="S", help="seconds for connecting and for all answers")
    parser.add_argument("--ca", type=Path, metavar="FILE", help="authorities to trust instead of the system's (PEM)")
    parser.add_argument("--cert", type=Path, metavar="FILE", help="certificate to show (PEM)")
    parser.add_argument("--key", type=Path, metavar="FILE", help="its key (PEM; default: in the same file)")
    parser.add_argument("--insecure", action="store_true", help="do not check the server's certificate")
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each answer")
    protocol = _named_in(subparsers.words)
    parser.set_defaults(protocol=protocol)
    # RSocket and ReactiveSocket share one part.
    for part in dict.fromkeys(each.call for each in (protocols.known() if protocol is None else [protocol])):
        if part is not None:
            resolve(part).add_arguments(parser)


def _calls(protocol: protocols.Protocol) -> bool:
    return protocol.call is not None or protocol.connect is not None


def _named_in(words: tuple[str, ...]) -> protocols.Protocol | None:
    """Return the protocol of the first word that is a URL."""
    for word in words:
        scheme, separator, _ = word.partition("://")
        protocol = protocols.find(scheme.partition("+")[0]) if separator else None
        if protocol is not None:
            return protocol
    return None


def run(args: argparse.Namespace) -> int:
    """Send the request; return 1 if it failed."""
    protocol, _ = protocols.of_url(args.url, _calls)
    if not _calls(protocol):
        instead = ": `levada ship` sends lines" if protocol.scheme == "lumberjack" else ""
        raise ConfigurationError(f"{protocol.scheme}:// takes no calls{instead}")
    if protocol != args.protocol:
        raise ConfigurationError(f"write {args.url} before arguments that look like another protocol's URL")
    try:
        if protocol.call is not None:
            trio.run(resolve(protocol.call).call, args)
        else:
            trio.run(_call, protocol, args)
    except CallFailed as error:
        print(f"levada: {error}", file=sys.stderr)
        return 1
    return 0


async def _call(protocol: protocols.Protocol, args: argparse.Namespace) -> None:
    """Send a request for a protocol that only says how to connect."""
    from levada.framework import ActorSystem

    refuse(args, protocol.scheme, "token_file", "limit")
    if args.kind != "response":
        raise ConfigurationError(f"--{args.kind} is not for {protocol.scheme}")
    data = args.data or []
    if len(data) > 1:
        raise ConfigurationError(f"{protocol.scheme} takes one --data")
    payload = bytes_of(data[0]) if data else b""
    connect = resolve(cast("protocols.Connect", protocol.connect))
    async with (
        ActorSystem("call") as system,
        in_time(connect(system, args.url, carrier=carrier_for(args)), args) as peer,
    ):
        try:
            answer = await peer.request(payload)
        except ConnectionLost:
            raise
        except LevadaError as error:
            raise CallFailed(str(error)) from error
        print_bytes(answer, as_json=args.json)
