"""The contract of ``levada interop maop``: the clients it lets in, and its handlers.

A client is let in with the authentication type Bearer and exactly the token of ``--token`` or, with ``--allow-anonymous``, with the type
Basic and an empty token. Without a decision within 5 seconds a client is turned away. The protocol name is ``maop/1`` over QUIC and
``qmux-02.maop-1`` over QMux.

======  ===================  ==================================================================================================
msg_id  kind                 does
======  ===================  ==================================================================================================
1       Message and Request  the native Test
2       Message              takes the body
100     Message              takes the body, also one of undefined length
101     Request              the body comes back as a Success of ``application/octet-stream``; undefined length is refused
102     Message and Request  always fails with EXECUTION_ERROR
103     Request              after 10 seconds a Success of ``application/octet-stream`` with an empty body
======  ===================  ==================================================================================================

Bodies have at most 8 MiB. A Response of any kind but Success (0) fails with ID_MISMATCH.
"""

from __future__ import annotations

import argparse
import hmac
import uuid
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import attrs
import trio

from levada.actors.authentication import Credentials, Refused
from levada.actors.maop import (
    Call,
    Handler,
    HandlerSpec,
    Listener,
    OperationError,
    PeerConfig,
    Reply,
    TimesConfig,
)
from levada.actors.maop import serve as serve_maop
from levada.actors.protocols import carrier_settings
from levada.actors.stream_carriers import carrier_of
from levada.framework import ActorSystem, Identity
from levada.framework.errors import ConfigurationError
from levada.transports.carriers import TlsConfig

__all__ = ["CARRIERS", "HANDLERS", "add_arguments", "authenticator", "serve"]

CARRIERS = ("quic", "tcp", "unix", "tls", "ws", "wss")
_LIMIT = 8 * 2**20  # bytes of a body


async def _take(call: Call) -> None:
    async for _ in call:
        pass


async def _echo(call: Call) -> Reply:
    return Reply(await call.body(), "application/octet-stream")


async def _fail(call: Call) -> None:
    raise OperationError(detail="this handler always fails")


async def _sleep(call: Call) -> Reply:
    await trio.sleep(10)
    return Reply(b"", "application/octet-stream")


def _spec(
    *, messages: bool = False, requests: bool = False, undefined: bool = False, streaming: bool = False
) -> HandlerSpec:
    return HandlerSpec(
        messages=messages, requests=requests, max_payload=_LIMIT, allow_undefined_length=undefined, streaming=streaming
    )


HANDLERS = {
    2: Handler(_take, spec=_spec(messages=True, streaming=True)),
    100: Handler(_take, spec=_spec(messages=True, undefined=True, streaming=True)),
    101: Handler(_echo, spec=_spec(requests=True)),
    102: Handler(_fail, spec=_spec(messages=True, requests=True)),
    103: Handler(_sleep, spec=_spec(requests=True)),
}
"""What the endpoint executes, by msg_id."""


class Authenticator:
    """Lets in clients that know the token."""

    def __init__(self, token: bytes | None, *, anonymous: bool) -> None:
        self._token = token
        self._anonymous = anonymous

    async def __call__(self, asked: Credentials) -> Identity | Refused:
        """Decide about a client."""
        if asked.scheme == "bearer" and self._token is not None and hmac.compare_digest(asked.token, self._token):
            return Identity(str(uuid.uuid4()))
        if asked.scheme == "basic" and not asked.token and self._anonymous:
            return Identity(str(uuid.uuid4()))
        return Refused()


def authenticator(args: argparse.Namespace) -> Authenticator:
    """Make the authenticator that the command line describes.

    Raises:
        ConfigurationError: no client would be let in, or the token is given twice or cannot be read.
    """
    if args.token is not None and args.token_file is not None:
        raise ConfigurationError("either --token or --token-file")
    token: bytes | None = None
    if args.token is not None:
        token = args.token.encode("utf-8", "surrogateescape")
    elif args.token_file is not None:
        try:
            token = args.token_file.read_bytes().rstrip(b"\r\n")
        except OSError as error:
            raise ConfigurationError(f"cannot read {args.token_file}: {error.strerror}") from error
    if not token and not args.allow_anonymous:
        raise ConfigurationError("maop needs --token TOKEN or --token-file FILE, or --allow-anonymous")
    return Authenticator(token or None, anonymous=args.allow_anonymous)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that say who is let in."""
    parser.add_argument("--token", metavar="TOKEN", help="bearer token that clients must give")
    parser.add_argument(
        "--token-file", type=Path, metavar="FILE", help="file with that token, which other users cannot see"
    )
    parser.add_argument("--allow-anonymous", action="store_true", help="also accept the type Basic with an empty token")
    parser.add_argument(
        "--proceed-coalesce",
        type=_milliseconds,
        default=0.0,
        metavar="MS",
        help="how long a Proceed may wait for others (default: 0, the end of the turn)",
    )
    parser.add_argument(
        "--control-batch-max", type=_batch, default=256, metavar="N", help="entries of one signal (default: 256)"
    )


def _milliseconds(text: str) -> float:
    milliseconds = float(text)
    if not 0 <= milliseconds < 60_000:
        raise argparse.ArgumentTypeError(f"is {text}, wanted 0 to 60000")
    return milliseconds


def _batch(text: str) -> int:
    number = int(text)
    if not 1 <= number <= 65_535:
        raise argparse.ArgumentTypeError(f"is {text}, wanted 1 to 65535")
    return number


def serve(
    system: ActorSystem, carrier: str, where: str, tls: TlsConfig | None, args: argparse.Namespace
) -> AbstractAsyncContextManager[Listener]:
    """Serve the contract; arguments as for `levada.actors.interop.rsocket.serve`."""
    authenticate = authenticator(args)
    # Testers connect from one address as often as they like, and do not wait for a long drain.
    core = PeerConfig().core
    control = attrs.evolve(
        core.control, proceed_coalesce=args.proceed_coalesce / 1000, control_batch_max=args.control_batch_max
    )
    core = attrs.evolve(core, control=control, times=TimesConfig(drain_timeout=1.0))
    config = PeerConfig(core=core, carrier=carrier_settings(carrier_of(carrier), tls), max_attempts=None)
    return serve_maop(system, f"maop+{carrier}://{where}", HANDLERS, authenticate=authenticate, config=config)
