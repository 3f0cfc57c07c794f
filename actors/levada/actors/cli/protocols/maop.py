"""``levada call maop://…``: one Request, whose answer is printed while it arrives, or one Message."""

from __future__ import annotations

import argparse
import codecs
import json
import sys
from pathlib import Path
from typing import Any, Final

from levada.actors.cli.arguments import whole
from levada.actors.cli.calls import CallFailed, bytes_of, carrier_for, in_time, print_bytes, refuse, token_of
from levada.actors.cli.terminal import shown
from levada.actors.maop import Body, ErrorCode, OperationFailed, OperationRefused, Peer, PeerConfig, connect
from levada.framework import ActorSystem
from levada.framework.errors import ConfigurationError, ConnectionLost

__all__ = ["add_arguments", "call"]

_MOST_AS_JSON: Final = 16 * 2**20  # bytes of an answer, which --json collects before it prints


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of MAOP."""
    group = parser.add_argument_group(
        "maop",
        "A Request, whose answer is printed while it arrives, or with --message a Message, which has none. --data @FILE is sent while it is "
        "read. --token-file has the Bearer token of the connection; without it the client is anonymous (type Basic, no token).",
    )
    group.add_argument(
        "--id", dest="msg_id", type=whole(1, 65_535), metavar="N", help="msg_id of the handler, 1 to 65535"
    )
    group.add_argument("--request", action="store_true", help="send a Request (default)")
    group.add_argument("--message", action="store_true", help="send a Message")
    group.add_argument(
        "--priority", type=whole(0, 255), default=128, metavar="N", help="0, the most urgent, to 255 (default: 128)"
    )


async def call(args: argparse.Namespace) -> None:
    """Send, and print the answer.

    Raises:
        CallFailed: the peer refused the operation, or it failed.
        ConfigurationError: the arguments are invalid.
        ConnectionLost: no server answers there, or it does not let the client in.
    """
    body = _body(args)
    token = token_of(args)
    who: dict[str, Any] = {"auth_type": "Basic"} if token is None else {"token": token}
    config = PeerConfig(carrier=carrier_for(args))
    async with ActorSystem("call") as system, in_time(connect(system, args.url, config=config, **who), args) as peer:
        try:
            await (_message if args.message else _request)(peer, body, args)
        except OperationRefused as refused:
            again = "" if refused.retry_after is None else f"; again in {refused.retry_after:g} s"
            raise CallFailed(f"refused by {refused}{again}") from None
        except ConnectionLost:
            raise
        except OperationFailed as failed:
            hint = ""
            if args.json and not failed.by_peer and failed.code == ErrorCode.CONTENT_TOO_LARGE:
                hint = f" (--json collects at most {_MOST_AS_JSON >> 20} MiB: leave it out to get the bytes as they arrive)"
            raise CallFailed(f"{failed}{hint}") from None


async def _message(peer: Peer, body: Body, args: argparse.Namespace) -> None:
    done = await peer.message(args.msg_id, body, priority=args.priority)
    if args.json:
        print(json.dumps({"started": done.started, "took": done.took}), flush=True)


async def _request(peer: Peer, body: Body, args: argparse.Namespace) -> None:
    # --timeout bounds the whole call; without it the peer has the protocol's five seconds.
    times = {} if args.timeout is None else {"timeout": args.timeout}
    most = _MOST_AS_JSON if args.json else None
    async with peer.open_request(args.msg_id, body, priority=args.priority, max_response=most, **times) as reply:
        if args.json:
            data = b"".join([bytes(chunk) async for chunk in reply])
            print_bytes(data, as_json=True, content_type=reply.content_type)
            return
        decoder = codecs.getincrementaldecoder("utf-8")()
        text: str | None = ""  # the last chunk; None once a chunk was not text
        total = 0
        async for chunk in reply:
            total += len(chunk)
            text = _text(decoder, text, chunk)
            if not sys.stdout.isatty():
                sys.stdout.buffer.write(chunk)
                sys.stdout.buffer.flush()
            elif text is not None:
                print(shown(text), end="", flush=True)
        if _text(decoder, text, b"", final=True) is not None:
            print(flush=True)  # text ends as a line, as with other protocols
        elif sys.stdout.isatty():
            print(f"({total:,} bytes that are not text: redirect the output, or use --json)", flush=True)


def _text(
    decoder: codecs.IncrementalDecoder, before: str | None, data: bytes | memoryview, *, final: bool = False
) -> str | None:
    """Decode the next bytes. Return ``None`` from the first byte on that is not text."""
    try:
        return None if before is None else decoder.decode(bytes(data), final)
    except UnicodeDecodeError:
        return None


def _body(args: argparse.Namespace) -> Body:
    """Return the body to send; raise `ConfigurationError` for arguments that MAOP does not have."""
    refuse(args, "maop", "limit")
    if args.kind != "response":
        raise ConfigurationError(f"--{args.kind} is not for maop: use --request or --message")
    if args.request and args.message:
        raise ConfigurationError("give either --request or --message")
    if args.msg_id is None:
        raise ConfigurationError("maop needs --id N, the msg_id of the handler")
    data = args.data or []
    if len(data) > 1:
        raise ConfigurationError("maop takes one --data")
    if data and data[0].startswith("@"):
        path = Path(data[0][1:])
        if path.is_file():
            return path  # sent piece by piece
    return bytes_of(data[0]) if data else b""
