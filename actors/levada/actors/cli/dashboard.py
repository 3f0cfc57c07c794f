"""The dashboard of ``levada serve --dashboard``, and of ``levada top --web``, which serves a program's console as a web page."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import trio

from levada.actors.console import connect_console
from levada.framework import ActorSystem
from levada.framework.errors import ConfigurationError

from .arguments import port

__all__ = ["add_arguments", "check_installed", "run", "serve_own_dashboard"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe ``--web`` and the arguments that need it."""
    web = parser.add_argument_group("in the browser")
    web.add_argument(
        "--web",
        action="store_true",
        help="serve a dashboard until Ctrl-C, and print the address that logs a browser in",
    )
    web.add_argument("--host", default="127.0.0.1", help="address to listen at (default: 127.0.0.1)")
    web.add_argument("--port", type=port, default=0, metavar="PORT", help="port to listen at (default: a free one)")
    web.add_argument(
        "--name",
        action="append",
        default=[],
        metavar="NAME",
        help="name of this machine in the browser's address bar; may be repeated",
    )
    web.add_argument("--cert", type=Path, metavar="FILE", help="PEM file with the certificate: serve HTTPS")
    web.add_argument("--key", type=Path, metavar="FILE", help="PEM file with its key (default: in the same file)")
    web.add_argument(
        "--plaintext",
        action="store_true",
        help="allow HTTP at an address other than loopback, where others can read it",
    )
    web.add_argument(
        "--actions", action="store_true", help="let browsers stop, kill and restart actors, if the console allows it"
    )
    web.add_argument(
        "--tracebacks", action="store_true", help="show texts and tracebacks of errors, if the console allows it"
    )
    web.add_argument(
        "--key-file",
        type=Path,
        metavar="FILE",
        help="file with the cookie key, made if it is missing: browsers stay logged in when this command restarts",
    )


def run(args: argparse.Namespace) -> int:
    """Serve the dashboard until Ctrl-C."""
    check_installed("levada top --web")
    if args.key is not None and args.cert is None:
        raise ConfigurationError("--key needs --cert")
    trio.run(_serve, args)
    return 0


def check_installed(what: str) -> None:
    """Check that the packages of the dashboard are installed.

    Args:
        what: the command, for the error.

    Raises:
        ConfigurationError: a package is missing.
    """
    missing = [name for name in ("h11", "wsproto") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigurationError(f"{what} needs {' and '.join(missing)}: pip install 'levada[dashboard]'")


@asynccontextmanager
async def serve_own_dashboard(shown: ActorSystem | Path | None, address: tuple[str, int] | None) -> AsyncIterator[None]:
    """Show this server to browsers while the block lasts, and print the address that logs a browser in.

    Args:
        shown: a system that has been entered, or the console of systems that follow one another; None only without an address.
        address: host and port to listen at; None: no dashboard.

    Raises:
        ConfigurationError: a package is missing, the address cannot be used, or other machines could reach it.
    """
    if address is None or shown is None:
        yield
        return
    check_installed("--dashboard")
    from levada.actors.dashboard import DashboardConfig, serve_console_dashboard, serve_dashboard

    host, port = address
    try:
        config = DashboardConfig(host=host, port=port)
    except (
        ConfigurationError
    ):  # other machines could reach it, and its text is about settings that this command has not
        raise ConfigurationError(
            f"--dashboard listens at addresses of this machine alone, such as 127.0.0.1, not at {host}: reach it through an SSH tunnel, "
            "or serve it with 'levada top --web', which has TLS"
        ) from None
    serving = (
        serve_dashboard(shown, config) if isinstance(shown, ActorSystem) else serve_console_dashboard(shown, config)
    )
    async with serving as dashboard:
        print(f"DASHBOARD {dashboard.login_url()}", flush=True)
        yield


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
        async with connect_console(
            args.path
        ):  # the browser would only say that the program is away, as it does while one restarts
            pass
        print(f"open {dashboard.login_url()}\nThe address works for one login; Ctrl-C ends the dashboard.", flush=True)
        await trio.sleep_forever()
