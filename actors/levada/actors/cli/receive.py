"""``levada receive``: print or spool what Lumberjack writers send."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from abc import ABC, abstractmethod
from typing import Any

import trio

from levada.actors.authenticators import CertificateNames
from levada.actors.lumberjack import Reader, Unit, serve
from levada.actors.lumberjack.spool import prepare_spool, store_unit
from levada.framework import ActorSystem
from levada.framework.errors import ConfigurationError
from levada.framework.files import folder_path
from levada.framework.platform import PLATFORM
from levada.framework.text import printable
from levada.transports.carriers import TlsConfig
from levada.transports.lumberjack import encode_text

from . import Subparsers
from .ship import warnings_on_stderr
from .signals import COUNT, RELOAD, late_ones_dropped
from .terminal import shown

__all__ = ["add_parser", "run"]

_RETRY = 1.0
"""Seconds until a disk that refuses a unit is tried again."""


def add_parser(subparsers: Subparsers) -> None:
    """Describe the arguments."""
    parser = subparsers.add_parser(
        "receive",
        help="print or spool events from Filebeat, Logstash's forwarders or `levada ship`",
        description="Listen for writers that speak Lumberjack, version 1 or 2, and print their lines, or write them to a folder. "
        "An event is acknowledged once it is printed and flushed, or on disk. "
        "The number of events is printed on stderr at the end and on SIGUSR1; SIGHUP reads the certificate again.",
        epilog="Exit codes: 0 after SIGTERM or when the output was closed; 2 a mistake in the arguments; 130 after Ctrl-C.",
    )
    parser.add_argument(
        "url", metavar="URL", help="lumberjack://host:port or lumberjack+tls://host:port; port 0 takes a free one"
    )
    output = parser.add_mutually_exclusive_group()
    output.add_argument(
        "--spool", metavar="DIR", help="write files of JSON lines there, synced before they are acknowledged"
    )
    output.add_argument("--json", action="store_true", help="print each event as a line of JSON, not only its text")
    parser.add_argument("--cert", metavar="FILE", help="certificate for lumberjack+tls (PEM)")
    parser.add_argument("--key", metavar="FILE", help="its key (PEM; default: in the same file)")
    parser.add_argument(
        "--client-ca", metavar="FILE", help="writers must show a certificate of these authorities (PEM)"
    )


def run(args: argparse.Namespace) -> int:
    """Receive until SIGTERM, Ctrl-C, or until the output is closed."""
    with warnings_on_stderr(), late_ones_dropped(COUNT, RELOAD) as numbers:
        return trio.run(_receive, args, numbers)


async def _receive(args: argparse.Namespace, numbers: list[int]) -> int:
    if (args.cert is not None) != args.url.startswith("lumberjack+tls:"):
        raise ConfigurationError("--cert goes with a URL of lumberjack+tls://, which needs it")
    if args.cert is None and (args.key is not None or args.client_ca is not None):
        raise ConfigurationError("--key and --client-ca need --cert and a URL of lumberjack+tls://")
    carrier = None
    if args.cert is not None:
        carrier = TlsConfig(
            certificate=args.cert,
            key=args.key,
            ca=args.client_ca,
            client_certificates="none" if args.client_ca is None else "required",
        )
    last = 0
    with trio.open_signal_receiver(*numbers) as signals:
        authenticate = None if args.client_ca is None else CertificateNames()
        async with ActorSystem("receive") as system:
            output = _Printer(as_json=args.json) if args.spool is None else _Spooler(args.spool)
            async with (
                serve(system, args.url, output.take, carrier=carrier, authenticate=authenticate) as reader,
                trio.open_nursery() as nursery,
            ):
                print(f"listening on {reader.url}", file=sys.stderr, flush=True)
                nursery.start_soon(_when_closed, output, nursery.cancel_scope)
                async for last in signals:
                    if last == COUNT:
                        output.tell_count()
                    elif last == RELOAD:
                        _reload(reader)
                    else:
                        if output.refusal:  # there is nothing to wait for: the disk takes no unit, and none is acked
                            system.root.kill()
                        nursery.cancel_scope.cancel()
        output.tell_count()
    return 130 if last == signal.SIGINT else 0


class _Output(ABC):
    """Takes units, and counts the events that are printed or on disk."""

    def __init__(self) -> None:
        self.count = 0
        self.closed = trio.Event()
        self.refusal = ""
        """Why the last unit could not be taken, while units wait for that; else empty."""

    async def take(self, unit: Unit) -> None:
        await self.put(unit)
        self.count += len(unit.events)

    @abstractmethod
    async def put(self, unit: Unit) -> None: ...

    def tell_count(self) -> None:
        print(f"{self.count} events", file=sys.stderr, flush=True)


class _Printer(_Output):
    """Prints events; a unit is taken once it is flushed."""

    def __init__(self, *, as_json: bool) -> None:
        super().__init__()
        self._as_json = as_json
        self._turn = trio.Lock()

    async def put(self, unit: Unit) -> None:
        data = encode_text(shown("".join(map(self._line, unit.events))))
        async with self._turn:
            try:
                # In a thread, because the output may be slow. A cancellation abandons it, so it cannot delay the end.
                await PLATFORM.get().run_in_thread(_write, data, abandon_on_cancel=True)
            except OSError:
                self.closed.set()
                raise

    def _line(self, event: dict[str, Any]) -> str:
        text = event.get("line", event.get("message"))
        if self._as_json or not isinstance(text, str):
            return json.dumps(event, separators=(",", ":")) + "\n"
        return text + "\n"


class _Spooler(_Output):
    """Writes each unit to a file; a unit is taken once it is on disk. While the disk refuses it, it waits, and its writer with it."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self._folder = folder_path(folder)
        try:
            prepare_spool(self._folder)
        except OSError as error:
            raise ConfigurationError(f"cannot write to {folder}: {error.strerror or error}") from error

    async def put(self, unit: Unit) -> None:
        while True:
            try:
                await PLATFORM.get().run_in_thread(self._store, unit)
            except OSError as error:
                self._note(error.strerror or str(error))
            else:
                self._note("")
                return
            await trio.sleep(_RETRY)

    def _store(self, unit: Unit) -> None:
        if self.refusal:  # the folder may be gone
            prepare_spool(self._folder)
        store_unit(self._folder, unit)

    def _note(self, refusal: str) -> None:
        """Say once that the disk refuses events, and once that it takes them again."""
        folder = printable(str(self._folder))
        if refusal and not self.refusal:
            print(
                f"levada: cannot write to {folder}: {refusal}; writers keep their events", file=sys.stderr, flush=True
            )
        elif self.refusal and not refusal:
            print(f"levada: writes to {folder} again", file=sys.stderr, flush=True)
        self.refusal = refusal


def _write(data: bytes) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


async def _when_closed(output: _Output, scope: trio.CancelScope) -> None:
    await output.closed.wait()
    # The interpreter flushes the output once more when it exits.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    scope.cancel()


def _reload(reader: Reader) -> None:
    try:
        reader.reload()
    except ConfigurationError as error:
        print(f"levada: {error}", file=sys.stderr, flush=True)
