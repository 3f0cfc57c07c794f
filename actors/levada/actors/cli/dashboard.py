"""``levada top --web``: a program's console as a page for the browser."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

import trio

from levada.framework.errors import ConfigurationError

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the arguments that go with ``--web``."""
    web = parser.add_argument_group("in the browser")
    web.add_argument(
        "--web", action="store_true", help="serve a dashboard until Ctrl-C, and print the address that logs in"
    )
    web.add_argument("--host", default="127.0.0.1", help="address to listen at (default: 127.0.0.1)")
    web.add_argument("--port", type=int, default=0, metavar="PORT", help="port to listen at (default: a free one)")
    web.add_argument(
        "--name",
        action="append",
        default=[],
        metavar="NAME",
        help="name of this machine in the browser; may be repeated",
    )
    web.add_argument("--cert", type=Path, metavar="FILE", help="PEM file with the certificate: serve HTTPS")
    web.add_argument("--key", type=Path, metavar="FILE", help="PEM file with its key (default: in the same file)")
    web.add_argument(
        "--plaintext",
        action="store_true",
        help="allow HTTP at an address other than loopback, where others can read it",
    )
    web.add_argument(
        "--actions", action="store_true", help="stop, kill and restart actors, if the program's console allows it"
    )
    web.add_argument(
        "--tracebacks", action="store_true", help="show texts of errors, if the program's console allows it"
    )
    web.add_argument(
        "--key-file",
        type=Path,
        metavar="FILE",
        help="file for the cookie key, so that browsers stay logged in when this command restarts",
    )


def run(args: argparse.Namespace) -> int:
    """Serve the dashboard until Ctrl-C."""
    missing = [name for name in ("h11", "wsproto") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigurationError(f"levada top --web needs {' and '.join(missing)}: pip install 'levada[dashboard]'")
    trio.run(_serve, args)
    return 0


async def _serve(args: argparse.Namespace) -> None:
    from levada.actors.dashboard import DashboardConfig, serve_console_dashboard
    from levada.transports.carriers.tls import TlsConfig

    config = DashboardConfig(
        host=args.host,
        port=args.port,
        names=args.name,
        tls=None if args.cert is None else TlsConfig(certificate=args.cert, key=args.key),
        plaintext=args.plaintext,
        actions=args.actions,
        tracebacks=args.tracebacks,
        key_file=args.key_file,
    )
    async with serve_console_dashboard(args.path, config) as dashboard:
        print(
            f"open {dashboard.login_url()}\nThe address is good for one login; Ctrl-C ends the dashboard.", flush=True
        )
        await trio.sleep_forever()
