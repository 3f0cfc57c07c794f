"""What ``levada call`` does alike for every protocol: bytes of arguments, certificates, printing, time, and failure."""

from __future__ import annotations

import argparse
import base64
import json
import math
import sys
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import trio

from levada.actors.protocols import SECURE, carrier_settings, of_url
from levada.framework.errors import ConfigurationError, ConnectionLost, LevadaError
from levada.transports.carriers import TlsConfig
from levada.transports.private_files import warn_if_others_can_read
from levada.transports.text import printable

__all__ = [
    "CallFailed",
    "bytes_of",
    "carrier_for",
    "in_time",
    "named",
    "positive",
    "print_bytes",
    "refuse",
    "shown",
    "token_of",
]


class CallFailed(LevadaError):
    """The responder answered with an error, or not in time."""


PeerT = TypeVar("PeerT")


@asynccontextmanager
async def in_time(connecting: AbstractAsyncContextManager[PeerT], args: argparse.Namespace) -> AsyncIterator[PeerT]:
    """Connect and work with the peer, within ``--timeout``.

    Raises:
        ConnectionLost: the time was over before there was a connection.
        CallFailed: the time was over before the work was done.
    """
    connected = False
    with trio.move_on_after(math.inf if args.timeout is None else args.timeout) as scope:
        async with connecting as peer:
            connected = True
            yield peer
    if scope.cancelled_caught:
        if connected:
            raise CallFailed(f"no answer, or not all of them, within {args.timeout:g} s")
        raise ConnectionLost(f"no connection to {args.url} within {args.timeout:g} s")


def carrier_for(args: argparse.Namespace) -> Any:
    """Return settings for the URL's carrier with the certificates of the command line; ``None`` for one without TLS.

    Raises:
        ConfigurationError: the carrier has no use for them.
    """
    _, carrier = of_url(args.url)
    given = [f"--{name}" for name in ("ca", "cert", "key", "insecure") if getattr(args, name)]
    if given and carrier not in SECURE:
        raise ConfigurationError(f"{', '.join(given)}: {carrier} has no TLS: use +tls, +wss or +quic")
    return carrier_settings(
        carrier, TlsConfig(ca=args.ca, certificate=args.cert, key=args.key, verify=not args.insecure)
    )


def token_of(args: argparse.Namespace) -> bytes | None:
    """Return the token, or the password, in the ``--token-file``; ``None`` if there is none.

    Raises:
        ConfigurationError: the file cannot be read, or is empty.
    """
    if args.token_file is None:
        return None
    warn_if_others_can_read(args.token_file, "a secret")
    token = bytes_of(f"@{args.token_file}").rstrip(b"\r\n")
    if not token:
        raise ConfigurationError(f"--token-file: {args.token_file} is empty")
    return token


def refuse(args: argparse.Namespace, scheme: str, *names: str) -> None:
    """Refuse common options that a protocol does not have.

    Raises:
        ConfigurationError: one of them was given.
    """
    for name in names:
        if getattr(args, name) is not None:
            raise ConfigurationError(f"--{name.replace('_', '-')} is not for {scheme}")


def positive(text: str) -> int:
    """Read a whole number above 0, for argparse."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, not {text}")
    return number


def bytes_of(text: str) -> bytes:
    """Return the bytes that an argument stands for: its own, a file's, or standard input's.

    Raises:
        ConfigurationError: a file that cannot be read.
    """
    if text == "-":
        return sys.stdin.buffer.read()
    if text.startswith("@"):
        try:
            return Path(text[1:]).read_bytes()
        except OSError as error:
            raise ConfigurationError(f"cannot read {text[1:]}: {error.strerror}") from error
    return text.encode("utf-8", "surrogateescape")


def print_bytes(octets: bytes, *, as_json: bool = False, **facts: str | None) -> None:
    """Print an answer: text as a line, other bytes as they are; as JSON with the facts that are known."""
    if as_json:
        known = {name: fact for name, fact in facts.items() if fact is not None}
        print(json.dumps(named("data", octets) | known), flush=True)
        return
    try:
        print(shown(octets.decode()), flush=True)
    except UnicodeDecodeError:
        if sys.stdout.isatty():
            print(f"({len(octets):,} bytes that are not text: redirect the output, or use --json)", flush=True)
        else:
            sys.stdout.buffer.write(octets)
            sys.stdout.buffer.flush()


def shown(text: str) -> str:
    """Make a peer's text fit for standard output: a terminal gets escapes in the place of control characters, a file the text itself."""
    if not sys.stdout.isatty():
        return text
    return "\n".join(printable(line, 6 * len(line)) for line in text.split("\n"))


def named(name: str, octets: bytes) -> dict[str, str]:
    """Return bytes as text under their name, or in base64 under a name that says so."""
    try:
        return {name: octets.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(octets).decode()}
