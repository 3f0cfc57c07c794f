"""The parts of ``levada call`` that all protocols share: reading arguments and certificates, printing, time limits and failures."""

from __future__ import annotations

import argparse
import base64
import json
import math
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import trio

from levada.actors.protocols import SECURE, carrier_settings, of_url
from levada.framework import Receiver
from levada.framework.errors import ChannelError, ConfigurationError, ConnectionLost, EndOfChannel, LevadaError
from levada.transports.carriers import TlsConfig
from levada.transports.private_files import warn_if_others_can_read

from .terminal import shown

__all__ = [
    "CallFailed", "bytes_of", "carrier_for", "in_time", "named", "print_all", "print_bytes", "refuse", "token_of",
]  # fmt: skip


class CallFailed(LevadaError):
    """The answer was an error, or did not come in time."""


PeerT = TypeVar("PeerT")
AnswerT = TypeVar("AnswerT")


@asynccontextmanager
async def in_time(
    connecting: AbstractAsyncContextManager[PeerT], args: argparse.Namespace, *refusals: type[ConnectionLost]
) -> AsyncIterator[PeerT]:
    """Connect and work with the peer, within ``--timeout``.

    Args:
        connecting: gives the peer.
        args: of the command line.
        refusals: what a server that refuses the client is known by; raised unchanged.

    Raises:
        ConnectionLost: the time ran out before there was a connection, or the connection was lost.
        CallFailed: the time ran out before the work was done.
    """
    connected = False
    try:
        with trio.move_on_after(math.inf if args.timeout is None else args.timeout) as scope:
            async with connecting as peer:
                connected = True
                yield peer
    except* ConnectionLost as losses:
        lost: BaseException = losses
        while isinstance(lost, BaseExceptionGroup):
            lost = lost.exceptions[0]
        assert isinstance(lost, ConnectionLost)
        if not connected or isinstance(lost, refusals):
            raise lost from lost.__cause__
        raise ConnectionLost(f"the connection to {args.url} was lost: {_why(lost)}") from lost
    if scope.cancelled_caught:
        if connected:
            raise CallFailed(f"no answer, or not all of them, within {args.timeout:g} s")
        raise ConnectionLost(f"no connection to {args.url} within {args.timeout:g} s")


def _why(lost: ConnectionLost) -> str:
    """Return why a connection was lost, without words before that say that it was."""
    channel = f"channel {lost.channel}: " if isinstance(lost, ChannelError) else ""
    return lost.detail.removeprefix(channel).rpartition("the connection was lost: ")[2]


def carrier_for(args: argparse.Namespace) -> Any:
    """Return settings for the URL's carrier with the certificates of the command line; ``None`` for a carrier without TLS.

    Raises:
        ConfigurationError: certificates are given, and the carrier has no TLS.
    """
    _, carrier = of_url(args.url)
    given = [f"--{name}" for name in ("ca", "cert", "key", "insecure") if getattr(args, name)]
    if given and carrier not in SECURE:
        raise ConfigurationError(f"{', '.join(given)}: {carrier} has no TLS, use +tls, +wss or +quic")
    return carrier_settings(
        carrier, TlsConfig(ca=args.ca, certificate=args.cert, key=args.key, verify=not args.insecure)
    )


def token_of(args: argparse.Namespace) -> bytes | None:
    """Return the token or password in the ``--token-file``; ``None`` without that option.

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


def bytes_of(text: str) -> bytes:
    """Return the bytes of an argument, of the file that it names (``@FILE``), or of standard input (``-``).

    Raises:
        ConfigurationError: the file cannot be read.
    """
    if text == "-":
        return sys.stdin.buffer.read()
    if text.startswith("@"):
        try:
            return Path(text[1:]).read_bytes()
        except OSError as error:
            raise ConfigurationError(f"cannot read {text[1:]}: {error.strerror}") from error
    return text.encode("utf-8", "surrogateescape")


async def print_all(
    answers: Receiver[AnswerT], args: argparse.Namespace, print_answer: Callable[[AnswerT], None]
) -> None:
    """Print answers until their end, or as many as ``--limit`` says.

    Raises:
        ConnectionLost: the connection was lost before; the text has the number of answers.
    """
    count = 0
    async with answers:
        while count != args.limit:
            try:
                answer = await answers.receive()
            except EndOfChannel:
                return
            except ConnectionLost as lost:
                origin = lost.__cause__ if isinstance(lost.__cause__, ConnectionLost) else lost
                if not count:
                    raise origin from None
                answered = f"{count} answers" if count > 1 else "one answer"
                raise ConnectionLost(f"{_why(origin)}, after {answered}; call again") from lost
            print_answer(answer)
            count += 1


def print_bytes(data: bytes, *, as_json: bool = False, **facts: str | None) -> None:
    """Print an answer: text as a line, other bytes unchanged; or as a line of JSON, together with the facts that are not None."""
    if as_json:
        known = {name: fact for name, fact in facts.items() if fact is not None}
        print(json.dumps(named("data", data) | known), flush=True)
        return
    try:
        print(shown(data.decode()), flush=True)
    except UnicodeDecodeError:
        if sys.stdout.isatty():
            print(f"({len(data):,} bytes that are not text: redirect the output, or use --json)", flush=True)
        else:
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()


def named(name: str, data: bytes) -> dict[str, str]:
    """Return bytes as text under their name, or in base64 under a name that says so."""
    try:
        return {name: data.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(data).decode()}
