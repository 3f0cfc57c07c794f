"""``levada call`` and ``levada serve --url`` for ``rsocket+tcp://…`` and ``reactivesocket+tcp://…``."""

from __future__ import annotations

import argparse
import json
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Any

import trio

from levada.actors.authentication import Authenticate
from levada.actors.cli import stdin
from levada.actors.cli.arguments import positive
from levada.actors.cli.calls import CallFailed, bytes_of, carrier_for, in_time, named, print_all, print_bytes, token_of
from levada.actors.rsocket import (
    COMPOSITE,
    ClientConfig,
    CoreConfig,
    Listener,
    Payload,
    RequestFailed,
    ServerConfig,
    SetupRejected,
    connect,
)
from levada.actors.rsocket import serve as serve_rsocket
from levada.actors.rsocket.errors import NEEDS_STREAM
from levada.framework import ActorSystem, Sender
from levada.framework.errors import ConfigurationError
from levada.transports.rsocket import ErrorCode
from levada.transports.rsocket.extensions import BearerAuthentication, CompositeMetadata, SimpleAuthentication

__all__ = ["add_arguments", "call", "serve"]


def serve(
    system: ActorSystem,
    url: str,
    handler: Any,
    *,
    carrier: Any,
    drain_timeout: float,
    authenticate: Authenticate | None,
) -> AbstractAsyncContextManager[Listener]:
    """Serve one handler."""
    config = ServerConfig(carrier=carrier, core=CoreConfig(drain_timeout=drain_timeout))
    return serve_rsocket(system, url, handler, authenticate=authenticate, config=config)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of RSocket."""
    group = parser.add_argument_group(
        "rsocket", "Carriers: rsocket+tcp, +tls, +ws, +wss, +unix, +quic; likewise reactivesocket."
    )
    group.add_argument("--route", help="route of the request")
    group.add_argument("--metadata", metavar="DATA", help="metadata of the request, instead of --route")
    group.add_argument(
        "--metadata-type",
        metavar="MIME",
        help="metadata type of the connection (default: message/x.rsocket.composite-metadata.v0; with text/plain the route is the metadata)",
    )
    group.add_argument(
        "--data-type",
        default="application/octet-stream",
        metavar="MIME",
        help="data type of the connection (default: application/octet-stream)",
    )
    group.add_argument("--setup", metavar="DATA", help="data to send when connecting")
    group.add_argument(
        "--user", metavar="NAME", help="user name for the connection; the --token-file holds the password"
    )
    group.add_argument(
        "--window", type=positive, default=32, metavar="N", help="answers requested in advance (default: 32)"
    )


async def call(args: argparse.Namespace) -> None:
    """Send, and print the answers.

    Raises:
        CallFailed: the answer was an error, or did not come in time.
        ConfigurationError: the arguments are invalid.
        ConnectionLost: no server answers there.
    """
    metadata_type = args.metadata_type or COMPOSITE
    core = CoreConfig(
        setup_payload=Payload(b"" if args.setup is None else bytes_of(args.setup), _credentials(args, metadata_type)),
        metadata_mime_type=metadata_type,
        data_mime_type=args.data_type,
    )
    config = ClientConfig(core=core, carrier=carrier_for(args), window=args.window)
    metadata, data = _metadata(args), args.data or []
    if args.kind != "channel" and len(data) > 1:
        raise ConfigurationError("only a channel takes more than one --data")
    if args.kind == "push" and (args.metadata is None or data):
        raise ConfigurationError("--push needs --metadata, and takes no --data")
    where: dict[str, Any] = {"route": args.route, "metadata": metadata}
    first = bytes_of(data[0]) if data else b""
    print_answer = _print_json if args.json else _print_data
    try:
        async with (
            ActorSystem("call") as system,
            in_time(connect(system, args.url, config=config), args, SetupRejected) as peer,
        ):
            match args.kind:
                case "response":
                    print_answer(await peer.request_response(first, **where))
                case "fnf":
                    await peer.fire_and_forget(first, **where)
                case "push":
                    await peer.metadata_push(bytes_of(args.metadata))
                case "stream":
                    await print_all(await peer.request_stream(first, **where), args, print_answer)
                case "channel":
                    source = _given(data) if data else stdin.lines()
                    try:
                        first = await anext(source)
                    except StopAsyncIteration:
                        raise ConfigurationError("standard input is empty, and --channel needs a payload") from None
                    sender, receiver = await peer.request_channel(first, **where)
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(_send_all, sender, source)
                        await print_all(receiver, args, print_answer)
                        nursery.cancel_scope.cancel()
    except* RequestFailed as failures:
        error: BaseException = failures
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        assert isinstance(error, RequestFailed)
        hint = " (--stream)" if error.detail == NEEDS_STREAM else ""
        raise CallFailed(f"{_code(error.code)}: {error}{hint}") from None


async def _send_all(sender: Sender[Any], source: AsyncIterator[bytes]) -> None:
    with sender:  # ends when the responder has cancelled; its answers may still arrive
        async for payload in source:
            await sender.send(payload)


async def _given(data: list[str]) -> AsyncIterator[bytes]:
    for text in data:
        yield bytes_of(text)


def _metadata(args: argparse.Namespace) -> Any:
    if args.metadata is None:
        return None
    if args.route is not None:
        raise ConfigurationError("give either --metadata or --route")
    return bytes_of(args.metadata)


def _credentials(args: argparse.Namespace, metadata_type: str) -> bytes | None:
    """Return the metadata of SETUP."""
    token = token_of(args)
    if token is None:
        if args.user is not None:
            raise ConfigurationError("--user needs --token-file FILE with the password")
        return None
    if metadata_type != COMPOSITE:
        raise ConfigurationError(f"--token-file: metadata of type {metadata_type} has no place for a token")
    try:
        secret = token.decode()
    except UnicodeDecodeError:
        raise ConfigurationError(f"{args.token_file} is not text in UTF-8") from None
    shown = SimpleAuthentication(args.user, secret) if args.user is not None else BearerAuthentication(secret)
    return CompositeMetadata.of(shown).encode()


def _print_data(payload: Any) -> None:
    print_bytes(payload.data)


def _print_json(payload: Any) -> None:
    answer = named("data", payload.data)
    if payload.metadata is not None:
        answer |= named("metadata", payload.metadata)
    print(json.dumps(answer), flush=True)


def _code(code: int) -> str:
    try:
        return ErrorCode(code).name
    except ValueError:
        return f"error {code:#x}"
