"""The protocols of the command line, by the scheme of their URLs.

A `Protocol` is a record of functions. With one, ``levada call``, ``levada serve``, ``levada explain`` and ``levada interop`` work for a
protocol. `register` adds a record for one program. A package adds one for every program by an entry point of the group
``levada.protocols`` with the name of the scheme. It is loaded when a command names the scheme, and cannot replace a protocol of levada.
``docs/how-to/add-a-protocol.md`` has a complete example.

A protocol is imported when it is first used.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, Final
from typing import Protocol as Contract

import attrs

from levada.actors.stream_carriers import carrier_of
from levada.framework.errors import ConfigurationError
from levada.transports.plugins import Part, Plugins, name_of

if TYPE_CHECKING:
    from levada.actors.authentication import Authenticate
    from levada.actors.explain import Line
    from levada.framework import ActorSystem
    from levada.transports.carriers import TlsConfig

__all__ = [
    "SECURE", "Call", "Connect", "Explain", "Interop", "Protocol", "Requests", "Serve", "Served", "carrier_settings", "find", "known",
    "of_url", "register",
]  # fmt: skip

SECURE: Final = ("tls", "wss", "quic", "qmux+tls", "qmux+wss")
"""Carriers whose listeners need a certificate."""


class Served(Contract):
    """A listener. If it has ``reload()``, that is called when the process is told to read its files (certificates, tokens) again."""

    @property
    def url(self) -> str:
        """The URL that clients connect to, with the real port."""
        ...


class Serve(Contract):
    """Serves one handler at a URL."""

    def __call__(
        self,
        system: ActorSystem,
        url: str,
        handler: Any,
        *,
        carrier: Any,
        drain_timeout: float,
        authenticate: Authenticate | None,
    ) -> AbstractAsyncContextManager[Served]:
        """Serve until the block is left.

        Args:
            system: has been entered.
            url: the user's URL.
            handler: an async function or an actor class.
            carrier: settings of the URL's carrier; ``None`` means the defaults.
            drain_timeout: seconds that open work has to end when the block is left.
            authenticate: decides which clients are admitted; ``None`` admits all.
        """
        ...


class Requests(Contract):
    """A connection that ``levada call`` sends its data on."""

    async def request(self, data: bytes) -> bytes:
        """Send a request and return the answer. An error other than a lost connection counts as an answer, too: the failure."""
        ...


class Connect(Contract):
    """Connects to a URL."""

    def __call__(self, system: ActorSystem, url: str, *, carrier: Any) -> AbstractAsyncContextManager[Requests]:
        """Connect until the block is left; arguments as for `Serve`."""
        ...


class Call(Contract):
    """The part of ``levada call`` for a protocol that has more than requests; may be a module."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the protocol's own options."""
        ...

    async def call(self, args: argparse.Namespace) -> None:
        """Connect, send, and print the answers.

        Raises:
            CallFailed: the answer was an error, or there was none in time.
            LevadaError: there was no connection, or the arguments make no sense.
        """
        ...


class Explain(Contract):
    """The part of ``levada explain`` for a protocol; may be a module."""

    HELP: str
    """The contents of a capture."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add options."""
        ...

    def explain(self, data: bytes, args: argparse.Namespace) -> Iterator[Line]:
        """Explain the bytes of one direction. Malformed bytes give lines, too, and no errors."""
        ...


class Interop(Contract):
    """The fixed contract that ``levada interop`` serves, for other implementations to test against; may be a module."""

    CARRIERS: tuple[str, ...]
    """Carriers that it runs over, the usual one first."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add options."""
        ...

    def serve(
        self, system: ActorSystem, carrier: str, where: str, tls: TlsConfig | None, args: argparse.Namespace
    ) -> AbstractAsyncContextManager[Served]:
        """Serve until the block is left.

        Args:
            system: has been entered.
            carrier: one of `CARRIERS`.
            where: ``host:port``, or the path of a Unix socket.
            tls: certificate and key, for the carriers that need them.
            args: of the command line; ``protocol`` is the scheme.
        """
        ...


@attrs.frozen(kw_only=True)
class Protocol:
    """A protocol, for `register` or an entry point of the group ``levada.protocols``.

    Each part is an object, or its name as in an entry point (``"package.module:serve"``), which is imported when it is first used.
    A command that needs a missing part says so.
    """

    scheme: str
    """The scheme of its URLs: ``"rsocket"`` for ``rsocket+tcp://host:port``."""
    example: str
    """An example of a URL, for help and error texts."""
    carrier: str = "tcp"
    """The carrier of a URL that names none: ``maop://host:port`` is ``maop+quic://host:port``."""
    streams: bool = False
    """Whether it needs a carrier of many streams, so that its URLs mean what `levada.actors.stream_carriers` says."""
    serve: Part[Serve] | None = None
    """For ``levada serve --url``; left out by a protocol that takes more than one handler."""
    tokens: bool = False
    """Whether its clients can send a bearer token, for ``levada serve --tokens``."""
    connect: Part[Connect] | None = None
    """For ``levada call``."""
    call: Part[Call] | None = None
    """For ``levada call``, instead of `connect`."""
    explain: Part[Explain] | None = None
    """For ``levada explain``."""
    interop: Part[Interop] | None = None
    """For ``levada interop``."""

    def __str__(self) -> str:
        parts = (self.serve, self.connect, self.call, self.explain, self.interop)
        return next((name_of(part) for part in parts if part is not None), self.example)


_COMMANDS = "levada.actors.cli.protocols"
_PROTOCOLS = Plugins(
    "levada.protocols",
    Protocol,
    {
        "aqueduct": Protocol(
            scheme="aqueduct",
            example="aqueduct://host:port",
            carrier="quic",
            streams=True,
            serve=f"{_COMMANDS}.aqueduct:serve",
            tokens=True,
            call=f"{_COMMANDS}.aqueduct",
            explain="levada.actors.explain.aqueduct",
            interop="levada.actors.interop.aqueduct",
        ),
        "rsocket": Protocol(
            scheme="rsocket",
            example="rsocket+tcp://host:port",
            serve=f"{_COMMANDS}.rsocket:serve",
            tokens=True,
            call=f"{_COMMANDS}.rsocket",
            explain="levada.actors.explain.rsocket",
            interop="levada.actors.interop.rsocket",
        ),
        "reactivesocket": Protocol(
            scheme="reactivesocket",
            example="reactivesocket+tcp://host:port",
            serve=f"{_COMMANDS}.rsocket:serve",
            tokens=True,
            call=f"{_COMMANDS}.rsocket",
            explain="levada.actors.explain.reactivesocket",
            interop="levada.actors.interop.rsocket",
        ),
        "maop": Protocol(
            scheme="maop",
            example="maop://host:port",
            carrier="quic",
            streams=True,
            call=f"{_COMMANDS}.maop",
            explain="levada.actors.explain.maop",
            interop="levada.actors.interop.maop",
        ),
        "lumberjack": Protocol(
            scheme="lumberjack",
            example="lumberjack://host:port",
            serve=f"{_COMMANDS}.lumberjack:serve",
            explain="levada.actors.explain.lumberjack",
            interop="levada.actors.interop.lumberjack",
        ),
        "qmux": Protocol(
            scheme="qmux",
            example="qmux+tcp://host:port",
            explain="levada.actors.explain.qmux",
            interop="levada.actors.interop.qmux",
        ),
    },
)


def register(protocol: Protocol) -> None:
    """Add a protocol to the command line. Registering an equal one again changes nothing.

    Raises:
        ConfigurationError: the scheme is taken, or is not a scheme.
    """
    _PROTOCOLS.register(protocol.scheme, protocol)


def find(scheme: str) -> Protocol | None:
    """Return the protocol of a scheme (without a ``+`` and a carrier), or ``None``. The package of a protocol is loaded here.

    Raises:
        ConfigurationError: the package cannot be loaded, or two packages have the scheme.
    """
    return _PROTOCOLS.find(scheme)


def known(schemes: Iterable[str] = ()) -> list[Protocol]:
    """Return the protocols of levada, of the program, and of packages that have one of these schemes."""
    for scheme in schemes:
        find(scheme)
    return [protocol for scheme in _PROTOCOLS if (protocol := find(scheme)) is not None]


def of_url(url: str, can: Callable[[Protocol], bool] = lambda _: True) -> tuple[Protocol, str]:
    """Return the protocol of a URL, and the scheme of its carrier.

    Args:
        url: the user's URL.
        can: whether a protocol can do what is wanted; an error names only these.

    Raises:
        ConfigurationError: the URL has no known protocol, or the protocol cannot be loaded.

    Example:
        >>> [(protocol.scheme, carrier) for protocol, carrier in map(of_url, ["rsocket+wss://example.org", "maop+wss://example.org"])]
        [('rsocket', 'wss'), ('maop', 'qmux+wss')]
    """
    name, separator, _ = url.partition("://")
    scheme, _, carrier = name.partition("+")
    protocol = find(scheme) if separator else None
    if protocol is None:
        examples = ", ".join(protocol.example for protocol in known() if can(protocol))
        raise ConfigurationError(
            f"no protocol for {url!r}: expected {examples}, or a scheme of an installed package (entry point group levada.protocols)"
            f"{_PROTOCOLS.hint(scheme)}"
        )
    carrier = carrier or protocol.carrier
    return protocol, carrier_of(carrier) if protocol.streams else carrier


def carrier_settings(carrier: str, tls: TlsConfig | None) -> Any:
    """Return settings with these certificates for a carrier that takes them, otherwise ``None``.

    Raises:
        ConfigurationError: the carrier's extra is not installed.
    """
    if tls is None or carrier not in SECURE:
        return None
    if carrier == "tls":
        return tls
    if carrier == "wss":
        from levada.transports.carriers.websocket_config import WebSocketConfig

        return WebSocketConfig(tls=tls)
    if carrier.startswith("qmux+"):
        from levada.transports.qmux import QmuxConfig

        return QmuxConfig(below=carrier_settings(carrier.removeprefix("qmux+"), tls))
    try:
        from levada.transports.quic import QuicConfig
    except ModuleNotFoundError as error:
        raise ConfigurationError(f"quic:// needs {error.name}: pip install 'levada[quic]'") from error
    return QuicConfig(
        certificate=tls.certificate,
        key=tls.key,
        ca=tls.ca,
        verify=tls.verify,
        client_certificates=tls.client_certificates,
    )
