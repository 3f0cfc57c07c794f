"""``levada token``: make a bearer token, and its line for the server's file."""

from __future__ import annotations

import argparse
import sys

from levada.framework import Identity

from . import Subparsers

__all__ = ["add_parser", "run"]


def add_parser(subparsers: Subparsers) -> None:
    """Describe the arguments."""
    parser = subparsers.add_parser(
        "token",
        help="make a bearer token, and its line for the server's file",
        description="Make bearer tokens for the clients of a server. The server's file contains SHA-256 digests, not the tokens.",
    )
    actions = parser.add_subparsers(title="actions", dest="action", metavar="ACTION", required=True)
    new = actions.add_parser(
        "new",
        help="make a token",
        description="Make a token of 256 random bits. The first line of the output is the token, for the client; the second line belongs "
        "in the server's file: `levada serve --tokens FILE`, or BearerTokens(FILE) in a program. "
        "A client can have several tokens at once, so add the new line, give the client its token, then remove the old line.",
        epilog="Exit codes: 0 a token was made; 2 a mistake.",
    )
    new.add_argument("name", metavar="NAME", help="name of the client, for handlers, logs and limits")
    new.add_argument(
        "--tenant",
        default="",
        metavar="NAME",
        help="tenant whose limits its connections count towards (default: the client's own)",
    )
    new.add_argument("--role", action="append", default=[], metavar="NAME", help="role of the client; may be repeated")


def run(args: argparse.Namespace) -> int:
    """Print the token and the line."""
    from levada.actors.authenticators import new_token

    token, line = new_token(Identity(args.name, tenant=args.tenant, roles=args.role))
    print(token.decode())
    print(line)
    if sys.stdout.isatty():
        print("levada: the first line is the client's token, the second is for the server's file", file=sys.stderr)
    return 0
