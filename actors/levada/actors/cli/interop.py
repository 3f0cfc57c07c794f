"""``levada interop``: serve a fixed, documented contract that other implementations can test against."""

from __future__ import annotations

import argparse
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from levada.actors import protocols
from levada.framework import ActorSystem
from levada.framework.errors import ConfigurationError
from levada.transports.carriers import TlsConfig
from levada.transports.plugins import resolve

from . import Subparsers, stdin
from .arguments import port

if TYPE_CHECKING:
    from collections.abc import Awaitable

__all__ = ["add_parser", "run"]


def add_parser(subparsers: Subparsers) -> None:
    """Describe the arguments."""
    parser = subparsers.add_parser(
        "interop",
        help="serve a fixed contract that other implementations can test against",
        description="Serve the contract of a protocol, which the documentation of the command line lists, and print "
        "'LISTENING <host> <port> <carrier>' when ready.",
        epilog="SIGINT, SIGTERM or, with --until-stdin-closes, the end of standard input ends it with exit code 0.",
    )
    choices = parser.add_subparsers(title="protocols", dest="protocol", metavar="PROTOCOL", required=True)
    for protocol in protocols.known(subparsers.words[:1]):
        if protocol.interop is None:
            continue
        contract = resolve(protocol.interop)
        own = choices.add_parser(protocol.scheme, help=f"over {', '.join(contract.CARRIERS)}")
        own.set_defaults(contract=contract)
        own.add_argument("--host", default="127.0.0.1", help="address to listen at (default: 127.0.0.1)")
        own.add_argument("--port", type=port, default=0, help="port to listen at (default: a free one)")
        own.add_argument(
            "--carrier",
            choices=contract.CARRIERS,
            default=contract.CARRIERS[0],
            help=f"default: {contract.CARRIERS[0]}",
        )
        if "unix" in contract.CARRIERS:
            own.add_argument("--path", type=Path, help="with --carrier unix: path of the socket")
        own.add_argument("--cert", type=Path, metavar="FILE", help="certificate to show (PEM)")
        own.add_argument("--key", type=Path, metavar="FILE", help="its key (PEM; default: in the same file)")
        own.add_argument(
            "--self-signed",
            type=Path,
            metavar="DIR",
            help="make a certificate for localhost, 127.0.0.1 and ::1, and write ca.pem, cert.pem and key.pem there",
        )
        own.add_argument("--until-stdin-closes", action="store_true", help="end when standard input does")
        contract.add_arguments(own)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal, or the end of standard input."""
    tls = _certificate(args)
    if args.carrier in protocols.SECURE and tls is None:
        raise ConfigurationError(f"--carrier {args.carrier} needs --cert FILE, or --self-signed DIR to make one")
    if args.carrier == "unix" and args.path is None:
        raise ConfigurationError("--carrier unix needs --path SOCKET")
    trio.run(_serve, args.contract, tls, args)
    return 0


async def _serve(contract: protocols.Interop, tls: TlsConfig | None, args: argparse.Namespace) -> None:
    host = f"[{args.host}]" if ":" in args.host else args.host
    where = str(args.path.absolute()) if args.carrier == "unix" else f"{host}:{args.port}"
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async with (
            ActorSystem("interop") as system,
            contract.serve(system, args.carrier, where, tls, args) as listener,
            trio.open_nursery() as nursery,
        ):
            if args.carrier == "unix":
                print(f"LISTENING {where} 0 unix", flush=True)
            else:
                port = int(listener.url.partition("://")[2].partition("/")[0].rpartition(":")[2])
                print(f"LISTENING {args.host} {port} {args.carrier}", flush=True)
            end = nursery.cancel_scope.cancel
            nursery.start_soon(_then, signals.__anext__, end)
            if args.until_stdin_closes:
                nursery.start_soon(_then, _stdin_closed, end)


async def _then(wait: Callable[[], Awaitable[object]], end: Callable[[], None]) -> None:
    await wait()
    end()


async def _stdin_closed() -> None:
    async for _ in stdin.chunks():
        pass


def _certificate(args: argparse.Namespace) -> TlsConfig | None:
    if args.self_signed is not None:
        if args.cert is not None or args.key is not None:
            raise ConfigurationError("give either --self-signed or --cert and --key")
        from levada.actors.interop.certificates import make_certificates

        made = make_certificates(args.self_signed)
        return TlsConfig(certificate=made.certificate, key=made.key)
    if args.key is not None and args.cert is None:
        raise ConfigurationError("--key needs --cert")
    return None if args.cert is None else TlsConfig(certificate=args.cert, key=args.key)
