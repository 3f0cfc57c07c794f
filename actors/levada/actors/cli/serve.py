"""``levada serve``: run an app, or a handler at URLs, as a process."""

from __future__ import annotations

import argparse
import contextlib
import inspect
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import trio

from levada.actors import protocols
from levada.actors.app_failures import failure_text, own_frames
from levada.actors.apps import App, app_of, find, freeze_heap, listed, reloaded
from levada.actors.authentication import Authenticate
from levada.actors.authenticators import BearerTokens, CertificateNames
from levada.actors.metrics.collecting import Metrics
from levada.actors.metrics.serving import Scrapes
from levada.framework import Actor, ActorSystem
from levada.framework.errors import ConfigurationError, LevadaError
from levada.framework.tracing import Tracing
from levada.transports.carriers import TlsConfig
from levada.transports.plugins import resolve

from . import Subparsers, needs_traceback, reloading
from .arguments import seconds
from .dashboard import serve_own_dashboard
from .health import serve_health
from .servers import serve_own_console
from .signals import RELOAD, Terminal, late_ones_dropped, third_one_exits

__all__ = ["WITHOUT", "add_parser", "handler", "node_app", "run", "tracing"]

logger = logging.getLogger("levada.serve")

WITHOUT = "SERVING without a listener"
"""What an app that yields no listener prints when it is ready."""
MOST_NODES = 256
_SOON = 1.0
"""Seconds after the second signal before a server that has not ended says why."""
_ARGUMENTS = "LEVADA_SERVE"  # an environment variable of nodes: URLs and paths, no secrets


def add_parser(subparsers: Subparsers) -> None:
    """Describe the arguments."""
    parser = subparsers.add_parser(
        "serve",
        help="run an app as a process that drains, reloads certificates and tokens, and has a health endpoint",
        description="Import an app and run it in an actor system. An app is an async generator function that takes the system and yields its "
        "listeners, or a function that returns an async context manager. With --url, serve a handler at these URLs instead: an async "
        "function or an actor class. Prints 'SERVING <url>' for each listener when all are ready, or 'SERVING without a listener'.",
        epilog="SIGTERM and Ctrl-C drain: no new clients, and time for open work; a second signal cuts it off; a third ends the process at once. "
        "SIGHUP reads the files of certificates and tokens again; a closed terminal drains, as SIGTERM does. "
        "With --nodes these signals go to all nodes; 'levada nodes restart' restarts "
        "them one after another. "
        "Exit codes: 0 after SIGTERM; 1 open work was cut off; 2 a mistake, or the app has failed; 130 after Ctrl-C.",
    )
    parser.add_argument("target", metavar="MODULE:NAME", help="what to run; the current folder is searched first")
    parser.add_argument(
        "--url",
        action="append",
        default=[],
        metavar="URL",
        help="serve a handler there: aqueduct://host:port, rsocket+tcp://host:port, lumberjack://host:port, …; may be repeated",
    )
    parser.add_argument("--cert", type=Path, metavar="FILE", help="with --url: certificate to show (PEM)")
    parser.add_argument("--key", type=Path, metavar="FILE", help="its key (PEM; default: in the same file)")
    parser.add_argument(
        "--client-ca",
        type=Path,
        metavar="FILE",
        help="with --url: clients must show a certificate from these authorities (PEM)",
    )
    parser.add_argument(
        "--tokens",
        type=Path,
        metavar="FILE",
        help="with --url: clients must send a bearer token from this file; 'levada token new' makes tokens",
    )
    parser.add_argument(
        "--self-signed",
        type=Path,
        metavar="DIR",
        help="with --url: make a certificate for localhost, and write it there",
    )
    parser.add_argument(
        "--nodes",
        type=_node_count,
        metavar="N",
        help="run N processes that share the addresses, or 'cores': one for each core; each has its own actors",
    )
    parser.add_argument(
        "--fence",
        type=Path,
        metavar="FILE",
        help="with --nodes: start no node before all processes of an earlier server with this file have ended, also after a kill -9, so that "
        "a singleton never runs twice; the file is made, and stays",
    )
    parser.add_argument(
        "--reload",
        action="store_true",
        help="for development: drain and start again when a Python file of the app's folder changes; without --nodes, the app runs on one node",
    )
    parser.add_argument(
        "--health",
        type=_address,
        metavar="HOST:PORT",
        help="health checks over HTTP: 200 while the app serves (with --nodes, while a node does), 503 while it starts and drains; the URL "
        "is printed as 'HEALTH <url>'; metrics for Prometheus at /metrics, with --nodes those of all nodes",
    )
    parser.add_argument(
        "--dashboard",
        type=_address,
        nargs="?",
        const=("127.0.0.1", 0),
        metavar="HOST:PORT",
        help="serve a dashboard for browsers at an address of this machine (default: 127.0.0.1 and a free port), and print the address that "
        "logs a browser in, once, as 'DASHBOARD <url>'; put this option after MODULE:NAME",
    )
    parser.add_argument(
        "--drain-timeout",
        type=seconds,
        default=10.0,
        metavar="S",
        help="seconds for open work at the end (default: 10)",
    )
    parser.add_argument(
        "--trace",
        action="store_true",
        help="record traces with OpenTelemetry's global tracer provider, which the module of the app sets up in each process",
    )
    parser.add_argument(
        "--log",
        choices=("debug", "info", "warning", "error"),
        default="warning",
        help="least severe log records to print on stderr (default: warning)",
    )


def run(args: argparse.Namespace) -> int:
    """Serve until a signal ends it."""
    if args.reload:
        reloading.check_installed()
        args.nodes = args.nodes or 1
        # A file that changes twice in a second may have the size and the time of its bytecode.
        sys.dont_write_bytecode = True
    if args.fence is not None and args.nodes is None:
        raise ConfigurationError("--fence needs --nodes: one process has no others that outlive it")
    if args.nodes is not None and not hasattr(socket, "AF_UNIX"):
        raise ConfigurationError("--nodes and --reload need Unix sockets, which this system does not have")
    found = find(args.target)
    app = _handler_app(found, args) if args.url else _app(found, args)
    with _logs_on_stderr(args.log), late_ones_dropped(RELOAD) as numbers:
        if args.nodes is None:
            return trio.run(_Run(app, args).main, numbers)
        from .serve_nodes import NodesRun, logs_of_nodes

        with logs_of_nodes():
            return trio.run(NodesRun(args).main, numbers)


def tracing(args: argparse.Namespace) -> Tracing | None:
    """Return the tracing of ``--trace``."""
    if not args.trace:
        return None
    try:
        from levada.actors.otel import OpenTelemetry
    except ModuleNotFoundError as error:
        raise ConfigurationError(str(error)) from error
    return OpenTelemetry()


def _is_app(found: Any) -> bool:
    return inspect.isasyncgenfunction(inspect.unwrap(found)) if callable(found) else False


def _app(found: Any, args: argparse.Namespace) -> App:
    for name in ("cert", "key", "self_signed", "client_ca", "tokens"):
        if getattr(args, name) is not None:
            raise ConfigurationError(f"--{name.replace('_', '-')} goes with --url; an app has its own settings")
    if inspect.iscoroutinefunction(found) or (inspect.isclass(found) and issubclass(found, Actor)):
        raise ConfigurationError(
            f"{args.target} is a handler, so it needs --url; an app is an async generator function that takes the system and yields its listeners"
        )
    return app_of(found, args.target)


def _handler_app(found: Any, args: argparse.Namespace) -> App:
    """Make an app of a handler and its URLs."""
    if _is_app(found):
        raise ConfigurationError(f"{args.target} is an app, which has its own URLs: leave out --url")
    if not callable(found):
        raise ConfigurationError(
            f"{args.target} is not a handler: expected an async function or an actor class, got {found!r}"
        )
    if args.self_signed is not None:
        _make_certificate(args)
    tls = _certificate(args)
    for url in args.url:
        _check(url, args, tls)
    if tls is not None and not any(protocols.of_url(url)[1] in protocols.SECURE for url in args.url):
        option = "--cert" if args.self_signed is None else "--self-signed"
        raise ConfigurationError(f"{option}: {args.url[0]} has no TLS, so nothing would be encrypted")
    authenticate = _authenticator(args)

    @asynccontextmanager
    async def app(system: ActorSystem) -> AsyncIterator[list[protocols.Served]]:
        async with AsyncExitStack() as stack:
            # Longer than --drain-timeout, because `_Run` cuts off late work and reports it.
            drain_timeout = args.drain_timeout + 5.0
            yield [
                await stack.enter_async_context(_serve(system, url, found, tls, drain_timeout, authenticate))
                for url in args.url
            ]

    return app


def node_app(args: argparse.Namespace) -> tuple[str, dict[str, str]]:
    """Return the name of the app that a node runs, and the node's environment, which has the arguments of `handler`."""
    environment = {"PYTHONDONTWRITEBYTECODE": "1"} if args.reload else {}
    if not args.url:
        return args.target, environment
    known = {name: getattr(args, name) for name in ("target", "url", "drain_timeout")}
    files = {name: getattr(args, name) for name in ("cert", "key", "client_ca", "tokens")}
    paths = {name: None if file is None else str(file) for name, file in files.items()}
    return f"{handler.__module__}:{handler.__name__}", environment | {_ARGUMENTS: json.dumps({**known, **paths})}


def handler(system: ActorSystem) -> AbstractAsyncContextManager[Any]:
    """The app of a node that serves a handler. Its arguments are in the environment, from `node_app`."""
    args = argparse.Namespace(**json.loads(os.environ[_ARGUMENTS]), self_signed=None)
    return _handler_app(find(args.target), args)(system)


def _check(url: str, args: argparse.Namespace, tls: TlsConfig | None) -> None:
    """Raise `ConfigurationError` for a URL that cannot be served with these arguments."""
    protocol, carrier = protocols.of_url(url, lambda protocol: protocol.serve is not None)
    if protocol.serve is None:
        raise ConfigurationError(f"a single handler cannot serve {protocol.scheme}://: write an app")
    if carrier in protocols.SECURE:
        if tls is None:
            raise ConfigurationError(f"{url} needs --cert FILE, or --self-signed DIR to make one")
    elif args.client_ca is not None:
        raise ConfigurationError(f"--client-ca: {url} has no TLS, so its clients show no certificates")
    if args.tokens is not None and not protocol.tokens:
        raise ConfigurationError(f"--tokens: clients of {protocol.scheme} cannot send a token")


def _serve(
    system: ActorSystem,
    url: str,
    handler: Any,
    tls: TlsConfig | None,
    drain_timeout: float,
    authenticate: Authenticate | None,
) -> AbstractAsyncContextManager[Any]:
    """Serve a handler at a URL of any protocol."""
    protocol, carrier = protocols.of_url(url)
    settings = protocols.carrier_settings(carrier, tls)
    assert protocol.serve is not None
    return resolve(protocol.serve)(
        system, url, handler, carrier=settings, drain_timeout=drain_timeout, authenticate=authenticate
    )


def _authenticator(args: argparse.Namespace) -> Authenticate | None:
    """Return the hook. With both options a client needs a certificate, and its token identifies it."""
    if args.tokens is not None:
        return BearerTokens(args.tokens)
    return None if args.client_ca is None else CertificateNames()


def _make_certificate(args: argparse.Namespace) -> None:
    """Make a certificate, and use it as ``--cert`` and ``--key``."""
    if args.cert is not None or args.key is not None:
        raise ConfigurationError("give either --self-signed or --cert and --key")
    from levada.actors.interop.certificates import make_certificates

    made = make_certificates(args.self_signed)
    args.cert, args.key, args.self_signed = made.certificate, made.key, None


def _certificate(args: argparse.Namespace) -> TlsConfig | None:
    if args.cert is None:
        if args.key is not None:
            raise ConfigurationError("--key needs --cert")
        return None
    asked: Literal["none", "required"] = "none" if args.client_ca is None else "required"
    return TlsConfig(certificate=args.cert, key=args.key, ca=args.client_ca, client_certificates=asked)


class _Run:
    """One run of an app: start, serve, drain."""

    def __init__(self, app: App, args: argparse.Namespace) -> None:
        self._app = app
        self._args = args
        self._state: Literal["starting", "serving", "draining"] = "starting"
        self._system: ActorSystem | None = None
        self._scrapes: Scrapes | None = None
        self._listeners: list[protocols.Served] = []
        self._end = trio.Event()
        self._first = 0
        """The first signal to end; 0 before it."""
        self._terminal = Terminal()
        self._patience = trio.CancelScope()
        """Around the app. Its deadline is the end of the drain."""
        self._start = trio.CancelScope()
        """The same, for a start that is given up: there is nothing to drain."""

    async def main(self, numbers: list[int]) -> int:
        """Run the app; return the exit code."""
        with trio.open_signal_receiver(*numbers) as signals, third_one_exits():
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._obey, signals)
                if self._args.health is not None:
                    url = await nursery.start(serve_health, *self._args.health, self._report, lambda: self._scrapes)
                    print(f"HEALTH {url}", flush=True)
                with self._patience:
                    try:
                        await self._serve()
                    except Exception as error:  # noqa: BLE001 - of the app, or of an actor
                        raise self._explained(error) from None
                nursery.cancel_scope.cancel()
        if self._patience.cancelled_caught:
            print(f"levada: open work was cut off (--drain-timeout {self._args.drain_timeout:g})", file=sys.stderr)
            return 1
        return 130 if self._first == signal.SIGINT else 0

    async def _serve(self) -> None:
        args = self._args
        async with (
            ActorSystem("serve", shutdown_timeout=args.drain_timeout, tracing=tracing(args)) as self._system,
            serve_own_console(self._system),
            serve_own_dashboard(self._system, args.dashboard),
        ):
            self._scrapes = Scrapes(Metrics(self._system))
            with self._start:
                async with self._app(self._system) as listeners:
                    self._listeners = listed(listeners, self._args.target)
                    freeze_heap()
                    self._state = "serving"
                    for listener in self._listeners:
                        print(f"SERVING {listener.url}", flush=True)
                    if not self._listeners:
                        print(WITHOUT, flush=True)
                    await self._end.wait()
                    self._state = "draining"

    def _explained(self, error: Exception) -> Exception:
        """Return an error that one line explains. Any other error is logged with its traceback in the app, which the programmer needs."""
        if not needs_traceback(error):
            return error
        logger.debug("its whole traceback", exc_info=error)
        own_frames(error, self._args.target)
        when = {"starting": "before its yield", "serving": "while it served", "draining": "at its end"}[self._state]
        logger.error("the app has failed", exc_info=error, extra={"event": "app_failed"})
        return LevadaError(f"{self._args.target} has failed {when}: {failure_text(error, self._args.target)}")

    async def _obey(self, signals: AsyncIterator[int]) -> None:
        times = 0
        async with trio.open_nursery() as nursery:
            async for number in signals:
                if number == RELOAD and not self._terminal.closed:
                    self._reload()
                    continue
                times += 1
                if times == 1:
                    self._first = number
                    self._end.set()
                    self._patience.deadline = trio.current_time() + self._args.drain_timeout
                    if self._state == "starting":
                        self._start.cancel()
                elif times == 2:
                    self._patience.cancel()
                    nursery.start_soon(self._say_what_is_left)

    async def _say_what_is_left(self) -> None:
        await trio.sleep(_SOON)
        what = "waits for blocking handlers and for hooks; one more signal ends the process at once"
        print(f"levada: {what}", file=sys.stderr, flush=True)

    def _reload(self) -> None:
        for line in reloaded(self._listeners):
            print(f"levada: {line}", file=sys.stderr, flush=True)

    async def _report(self) -> tuple[bool, Mapping[str, object]]:
        facts: dict[str, object] = {"state": self._state, "urls": [listener.url for listener in self._listeners]}
        if self._system is not None:
            statistics = self._system.statistics()
            facts |= {name: getattr(statistics, name) for name in ("actors", "failures", "restarts", "dead_letters")}
        return self._state == "serving", facts


@contextlib.contextmanager
def _logs_on_stderr(level: str) -> Iterator[None]:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    before = root.level
    root.addHandler(handler)
    root.setLevel(level.upper())
    try:
        yield
    finally:
        root.removeHandler(handler)
        root.setLevel(before)


def _address(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise argparse.ArgumentTypeError(f"expected HOST:PORT, got {text!r}")
    return host.strip("[]"), int(port)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _node_count(text: str) -> int:
    count = _cores() if text == "cores" else int(text) if text.isdecimal() else 0
    if not 1 <= count <= MOST_NODES:
        raise argparse.ArgumentTypeError(f"expected 1 to {MOST_NODES}, or 'cores', got {text!r}")
    return count
