"""``levada call``: send one request to a server and print what comes back."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import trio

from levada.framework import ActorSystem, Sender
from levada.framework.errors import ConfigurationError, EndOfChannel, ReceiverClosed
from levada.transports.private_files import warn_if_others_can_read

from . import Subparsers, stdin
from .octets import CallFailed, in_time, named, octets_of, print_octets

__all__ = ["add_parser", "run"]

SCHEMES = ("aqueduct", "maop", "rsocket", "reactivesocket")


def add_parser(subparsers: Subparsers) -> None:
    """Describe the arguments."""
    parser = subparsers.add_parser(
        "call",
        help="send a request to a server and print what comes back",
        description="Send one request and print the data of each answer: text as lines, other octets as they are. "
        "Without --stream, --channel, --fnf or --push it is a request with one answer.",
        epilog="URL: rsocket+tcp://host:port; also +tls, +ws, +wss, +unix, +quic, and reactivesocket+…; aqueduct://host:port; maop://host:port. "
        "DATA: text, @FILE for what a file holds, - for standard input. "
        "Exit codes: 0 answered; 1 the answer was an error, or there was none in time; 2 a mistake, or no connection; 130 after Ctrl-C.",
    )
    parser.add_argument("url", metavar="URL")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--reply", dest="kind", action="store_const", const="response", help="one answer: the default")
    kinds.add_argument("--stream", dest="kind", action="store_const", const="stream", help="many answers")
    kinds.add_argument(
        "--channel",
        dest="kind",
        action="store_const",
        const="channel",
        help="many answers to many payloads: each --data is one, and without any each line of standard input",
    )
    kinds.add_argument("--fnf", dest="kind", action="store_const", const="fnf", help="fire and forget: no answer")
    kinds.add_argument(
        "--push", dest="kind", action="store_const", const="push", help="push the --metadata, with no data"
    )
    parser.set_defaults(kind="response")
    parser.add_argument("--route", help="where the request is to go")
    parser.add_argument("--data", action="append", default=None, metavar="DATA", help="what to send (default: nothing)")
    parser.add_argument(
        "--metadata", metavar="DATA", help="metadata as octets, in the place of --route and --token-file"
    )
    parser.add_argument(
        "--metadata-type",
        metavar="MIME",
        help="of the connection (default: message/x.rsocket.composite-metadata.v0; with text/plain the route is the metadata)",
    )
    parser.add_argument(
        "--data-type",
        default="application/octet-stream",
        metavar="MIME",
        help="of the connection (default: application/octet-stream)",
    )
    parser.add_argument("--setup", metavar="DATA", help="data to send when connecting")
    parser.add_argument("--token-file", type=Path, metavar="FILE", help="file with a bearer token for the request")
    parser.add_argument(
        "--user", metavar="NAME", help="user name for the request; the password is the --token-file's content"
    )
    parser.add_argument("--limit", type=_number, metavar="N", help="cancel after so many answers")
    parser.add_argument("--window", type=_number, default=32, metavar="N", help="answers asked for ahead (default: 32)")
    parser.add_argument("--timeout", type=_seconds, metavar="S", help="seconds for connecting and for all answers")
    parser.add_argument("--ca", type=Path, metavar="FILE", help="authorities to trust instead of the system's (PEM)")
    parser.add_argument("--cert", type=Path, metavar="FILE", help="certificate to show (PEM)")
    parser.add_argument("--key", type=Path, metavar="FILE", help="its key (PEM; default: in the same file)")
    parser.add_argument("--insecure", action="store_true", help="do not check the server's certificate")
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each answer: data and metadata")
    group = parser.add_argument_group(
        "aqueduct",
        "The message has a sender in it that the answers come on, for one answer or, with --stream, for many; with --fnf it has none.",
    )
    group.add_argument(
        "--tag",
        metavar="TAG",
        help="send a message of the class with this tag; --data is a JSON array of its fields in the order of their definition, "
        'with "@reply" where the sender is to be (default: last). Without --tag the message is the octets of --data',
    )
    group.add_argument(
        "--lookup",
        metavar="NAME",
        help="ask the actor that the server exposes under this name, instead of its handler; the message is a question and has no sender",
    )
    group = parser.add_argument_group(
        "maop",
        "A Request, whose answer is printed as it comes, or with --message a Message, which has none. --data @FILE is sent as it is read. "
        "--token-file holds the Bearer token of the connection; without it the client is anonymous (type Basic, no token).",
    )
    group.add_argument("--id", dest="msg_id", type=_msg_id, metavar="N", help="msg_id of the handler, 1 to 65535")
    group.add_argument("--request", action="store_true", help="send a Request: the default")
    group.add_argument("--message", action="store_true", help="send a Message")
    group.add_argument("--priority", type=_priority, metavar="N", help="0, the most urgent, to 255 (default: 128)")


def run(args: argparse.Namespace) -> int:
    """Call."""
    dialect = args.url.partition("://")[0].partition("+")[0]
    if dialect not in SCHEMES:
        raise ConfigurationError(f"expected a URL like rsocket+tcp://host:port, got {args.url!r}")
    for name in ("tag", "lookup"):
        if getattr(args, name) is not None and dialect != "aqueduct":
            raise ConfigurationError(f"--{name} is not for {dialect}")
    try:
        trio.run(_call, args)
    except CallFailed as error:
        print(f"levada: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # Whoever read our output wants no more of it; the interpreter flushes it once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


async def _call(args: argparse.Namespace) -> None:
    if args.url.startswith("aqueduct"):
        from . import call_aqueduct

        await call_aqueduct.call(args)
    elif args.url.startswith("maop"):
        from . import call_maop

        await call_maop.call(args)
    else:
        await _call_rsocket(args)


async def _call_rsocket(args: argparse.Namespace) -> None:
    from levada.actors.rsocket import COMPOSITE, ClientConfig, CoreConfig, Payload, RequestFailed, connect

    core = CoreConfig(
        setup_payload=Payload(b"" if args.setup is None else octets_of(args.setup)),
        metadata_mime_type=args.metadata_type or COMPOSITE,
        data_mime_type=args.data_type,
    )
    config = ClientConfig(core=core, carrier=_carrier(args), window=args.window)
    metadata, data = _metadata(args), args.data or []
    if args.kind != "channel" and len(data) > 1:
        raise ConfigurationError("only a channel takes more than one --data")
    if args.kind == "push" and (args.metadata is None or data):
        raise ConfigurationError("--push needs --metadata, and takes no --data")
    where: dict[str, Any] = {"route": args.route, "metadata": metadata}
    first = octets_of(data[0]) if data else b""
    print_answer = _print_json if args.json else _print_data
    try:
        async with ActorSystem("call") as system, in_time(connect(system, args.url, config=config), args) as peer:
            match args.kind:
                case "response":
                    print_answer(await peer.request_response(first, **where))
                case "fnf":
                    await peer.fire_and_forget(first, **where)
                case "push":
                    await peer.metadata_push(octets_of(args.metadata))
                case "stream":
                    await _print_all(await peer.request_stream(first, **where), args.limit, print_answer)
                case "channel":
                    source = _given(data) if data else stdin.lines()
                    try:
                        first = await anext(source)
                    except StopAsyncIteration:
                        raise ConfigurationError("standard input is empty: a channel needs a payload") from None
                    sender, receiver = await peer.request_channel(first, **where)
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(_send_all, sender, source)
                        await _print_all(receiver, args.limit, print_answer)
                        nursery.cancel_scope.cancel()
    except* RequestFailed as failures:
        error: BaseException = failures
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        assert isinstance(error, RequestFailed)
        raise CallFailed(f"{_code(error.code)}: {error}") from None


async def _print_all(answers: Any, limit: int | None, print_answer: Callable[[Any], None]) -> None:
    left = float("inf") if limit is None else limit
    async with answers:
        while left > 0:
            try:
                print_answer(await answers.receive())
            except EndOfChannel:
                return
            left -= 1


async def _send_all(sender: Sender[Any], source: AsyncIterator[bytes]) -> None:
    with sender:
        try:
            async for payload in source:
                await sender.send(payload)
        except ReceiverClosed:
            pass  # the responder wants no more; its answers still come


async def _given(data: list[str]) -> AsyncIterator[bytes]:
    for text in data:
        yield octets_of(text)


# ---------------------------------------------------------------- arguments


def _metadata(args: argparse.Namespace) -> Any:
    from levada.transports.rsocket.extensions import BearerAuthentication, SimpleAuthentication

    if args.metadata is not None:
        if args.route is not None or args.token_file is not None:
            raise ConfigurationError("--metadata takes the place of --route and --token-file: give one or the other")
        return octets_of(args.metadata)
    if args.token_file is None:
        if args.user is not None:
            raise ConfigurationError("--user needs --token-file FILE with the password")
        return None
    warn_if_others_can_read(args.token_file, "a secret")
    secret = octets_of(f"@{args.token_file}").decode().rstrip("\r\n")
    return [SimpleAuthentication(args.user, secret) if args.user is not None else BearerAuthentication(secret)]


def _carrier(args: argparse.Namespace) -> Any:
    from levada.transports.carriers import TlsConfig

    scheme = args.url.partition("://")[0].partition("+")[2] or "tcp"
    given = [f"--{name}" for name in ("ca", "cert", "key", "insecure") if getattr(args, name)]
    if scheme not in ("tls", "wss", "quic"):
        if given:
            raise ConfigurationError(f"{', '.join(given)}: {scheme} has no TLS (use rsocket+tls, +wss or +quic)")
        return None
    if scheme == "quic":
        from levada.transports.quic import QuicConfig

        if args.cert is not None or args.key is not None:
            raise ConfigurationError("--cert, --key: client certificates do not work over QUIC")
        return QuicConfig(ca=args.ca, verify=not args.insecure)
    tls = TlsConfig(ca=args.ca, certificate=args.cert, key=args.key, verify=not args.insecure)
    if scheme == "tls":
        return tls
    from levada.transports.carriers.websocket_config import WebSocketConfig

    return WebSocketConfig(tls=tls)


# ---------------------------------------------------------------- output


def _print_data(payload: Any) -> None:
    print_octets(payload.data)


def _print_json(payload: Any) -> None:
    answer = named("data", payload.data)
    if payload.metadata is not None:
        answer |= named("metadata", payload.metadata)
    print(json.dumps(answer), flush=True)


def _code(code: int) -> str:
    from levada.transports.rsocket import ErrorCode

    try:
        return ErrorCode(code).name
    except ValueError:
        return f"error {code:#x}"


def _number(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, not {text}")
    return number


def _msg_id(text: str) -> int:
    return _between(text, 1, 65_535)


def _priority(text: str) -> int:
    return _between(text, 0, 255)


def _between(text: str, least: int, most: int) -> int:
    number = int(text)
    if not least <= number <= most:
        raise argparse.ArgumentTypeError(f"must be {least} to {most}, not {text}")
    return number


def _seconds(text: str) -> float:
    seconds = float(text)
    if not seconds > 0:
        raise argparse.ArgumentTypeError(f"must be more than 0 seconds, not {text}")
    return seconds
