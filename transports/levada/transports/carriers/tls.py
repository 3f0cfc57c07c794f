"""Byte streams over TLS 1.2 and 1.3 on TCP: verified by default, with client certificates, ALPN, and reload of certificates.

URLs are ``tls://host:port``.  A stream ends with TLS's own end (close_notify); without it `receive_some` raises `ConnectionLost`, so an
attacker on the path cannot cut a stream short unnoticed.  There is no half-close: `send_eof` raises `NotImplementedError`.
"""

from __future__ import annotations

import ipaddress
import logging
import re
import socket as stdlib_socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from os import PathLike
from typing import Any, Literal

import attrs
import trio
from attrs import validators as v

from levada.framework.errors import ConfigurationError, ConnectionLost, IdleTimeout
from levada.framework.platform import PLATFORM
from levada.framework.text import texts
from levada.transports.carriers.admission import Admission
from levada.transports.carriers.contracts import CarrierInfo, Octets
from levada.transports.carriers.listeners import StreamListener
from levada.transports.carriers.places import share_of
from levada.transports.carriers.streams import (
    JoinedStream,
    StreamConfig,
    discard,
    host_and_port,
)
from levada.transports.carriers.tcp import TcpConfig, authority, bind, connect, let_in, prepare
from levada.transports.private_files import warn_if_others_can_read

__all__ = ["WRITTEN", "TlsConfig", "TlsListener", "alternative_name", "dial", "listen", "make_context", "subject_text"]

logger = logging.getLogger("levada.transports.carriers.tls")

File = str | PathLike[str]

_ALERT_LINGER = 1.0  # seconds for a peer to take the alert before the connection is closed


@attrs.frozen(kw_only=True)
class TlsConfig(StreamConfig):
    """How TLS connections behave. Immutable; derive with `attrs.evolve`."""

    certificate: File | None = None
    """PEM file with this side's certificate and its chain. A listener needs one; a client sends it if the server asks."""
    key: File | None = None
    """PEM file with the key of `certificate`; ``None`` for the same file."""
    key_password: str | None = attrs.field(default=None, repr=False)
    """Password of an encrypted key."""
    ca: File | bytes | None = None
    """PEM file, or PEM bytes, with the authorities to trust; ``None`` for the system's."""
    verify: bool = attrs.field(default=True, validator=v.instance_of(bool))
    """Whether a client checks the server's certificate and name. Without the check an attacker on the path can read and change everything."""
    server_name: str | None = None
    """Name that a client sends (SNI) and checks the certificate against; ``None`` for the host of the URL."""
    client_certificates: Literal["none", "optional", "required"] = attrs.field(
        default="none", validator=v.in_(["none", "optional", "required"])
    )
    """Whether a listener asks clients for certificates, verified against `ca`."""
    alpn: tuple[str, ...] = attrs.field(default=(), converter=texts)
    """Protocols to offer or to choose from, the preferred one first. `CarrierInfo.alpn` has the chosen one."""
    minimum_version: ssl.TLSVersion = attrs.field(
        default=ssl.TLSVersion.TLSv1_2, validator=v.in_([ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
    )
    """The oldest version of TLS to accept."""
    context: ssl.SSLContext | None = attrs.field(default=None, validator=v.optional(v.instance_of(ssl.SSLContext)))
    """Your own context, which replaces all settings above except `server_name`."""
    handshake_timeout: float = attrs.field(default=10.0, validator=v.gt(0))
    """Seconds that a handshake may take."""
    backlog: int = attrs.field(default=256, validator=[v.instance_of(int), v.ge(1)])
    """Most peers that are in their handshake or wait to be accepted. Any further peer ends the oldest handshake."""
    tcp: TcpConfig = attrs.field(factory=TcpConfig, validator=v.instance_of(TcpConfig))
    """Settings of the TCP connection below."""


def make_context(config: TlsConfig, purpose: ssl.Purpose) -> ssl.SSLContext:
    """Make the context of a client (``SERVER_AUTH``) or a listener.

    Raises:
        ConfigurationError: the settings cannot work, or a file cannot be read.
    """
    serving = purpose is ssl.Purpose.CLIENT_AUTH
    if config.context is not None:
        if config.context.protocol is (ssl.PROTOCOL_TLS_CLIENT if serving else ssl.PROTOCOL_TLS_SERVER):
            raise ConfigurationError(f"`context` is of the kind {config.context.protocol.name}, for the other side")
        return config.context
    if serving and config.certificate is None:
        raise ConfigurationError("a TLS listener needs a certificate: set `certificate` and `key`, or `context`")
    if serving and config.client_certificates != "none" and config.ca is None:
        raise ConfigurationError("client certificates need authorities to check them against: set `ca`")
    try:
        if isinstance(config.ca, bytes):
            context = ssl.create_default_context(purpose, cadata=config.ca.decode())
        else:
            context = ssl.create_default_context(purpose, cafile=config.ca)
        if config.certificate is not None:
            # Without a password argument, OpenSSL would ask for one on the terminal.
            context.load_cert_chain(config.certificate, config.key, config.key_password or "")
            warn_if_others_can_read(config.key or config.certificate, "a private key")
        if config.alpn:
            context.set_alpn_protocols(config.alpn)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        files = ", ".join(
            str(file) for file in (config.certificate, config.key, config.ca) if isinstance(file, str | PathLike)
        )
        raise ConfigurationError(f"cannot use the certificates in {files or 'the settings'}: {error}") from error
    context.minimum_version = config.minimum_version
    if serving:
        asked = {"none": ssl.CERT_NONE, "optional": ssl.CERT_OPTIONAL, "required": ssl.CERT_REQUIRED}
        context.verify_mode = asked[config.client_certificates]
    elif config.verify:
        context.hostname_checks_common_name = False  # RFC 9525, 6.3: names are alternative names
    else:
        logger.warning("TLS without verification: an attacker on the path can read and change everything")
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


class _Below(trio.abc.Stream):
    """The stream below TLS. Closing it leaves the socket open, so that the end of TLS reaches the peer before the end of TCP."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream

    async def send_all(self, data: Octets) -> None:
        await self._stream.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        await self._stream.wait_send_all_might_not_block()

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        return await self._stream.receive_some(max_bytes)

    async def aclose(self) -> None:
        await trio.lowlevel.checkpoint()


class _TlsStream(JoinedStream):
    """A joined stream that sends close_notify at its end."""

    async def _say_goodbye(self) -> None:
        await self._raw.aclose()


async def _send_alert(raw: trio.SocketStream, tls: trio.SSLStream[_Below]) -> None:
    """Send the alert that says why the handshake failed. OpenSSL has made it, but trio does not send it."""
    alert = tls._outgoing.read()
    if not alert:
        return
    with trio.move_on_after(_ALERT_LINGER):
        try:
            await raw.send_all(alert)
            raw.socket.shutdown(stdlib_socket.SHUT_WR)
            # A socket closed with unread bytes sends a reset, which can overtake the alert.
            while not discard(raw.socket):
                await trio.lowlevel.wait_readable(raw.socket)
        except (trio.BrokenResourceError, OSError):
            pass  # the peer is gone


async def _shake_hands(
    raw: trio.SocketStream, context: ssl.SSLContext, config: TlsConfig, *, server_name: str | None, serving: bool
) -> _TlsStream:
    """Make a TLS stream from a TCP stream, which is closed if the handshake fails."""
    since = trio.current_time()
    try:
        try:
            tls: trio.SSLStream[_Below] = trio.SSLStream(
                _Below(raw),
                context,
                server_hostname=None if serving else server_name,
                server_side=serving,
                https_compatible=False,
            )
        except ValueError as error:
            raise ConfigurationError(f"{server_name!r} cannot be the name of a server: {error}") from error
        info = prepare(raw, "tls", config.tcp)
        try:
            with trio.move_on_after(config.handshake_timeout) as scope:
                await tls.do_handshake()
        except trio.BrokenResourceError as error:
            cause = error.__cause__
            await _send_alert(raw, tls)
            raise ConnectionLost(f"the TLS handshake with {info.peer} failed: {cause or 'cut off'}") from cause
        finally:
            # This reference to the stream's own method is not needed again, and would keep 40 kB until the garbage collector runs.
            tls._handshook._afn = None  # type: ignore[assignment]
        if scope.cancelled_caught:
            raise IdleTimeout(f"no TLS handshake with {info.peer} within {config.handshake_timeout} s")
    except BaseException:
        raw.socket.close()
        raise
    info = with_agreed(info, tls, context, server_name)
    return _TlsStream(tls, raw.socket, info, config, half_close=False, straight=False, since=since)


def with_agreed(info: CarrierInfo, tls: Any, context: ssl.SSLContext, server_name: str | None) -> CarrierInfo:
    """Add to the facts of a connection what its TLS handshake has agreed on.

    Args:
        info: the facts of the connection below.
        tls: the side's `ssl.SSLObject`, or a stream with its methods.
        context: the context of this side.
        server_name: the name that the client has asked for.
    """
    shown = tls.getpeercert() or {}  # empty for a certificate that was not verified
    return attrs.evolve(
        info,
        alpn=tls.selected_alpn_protocol(),
        tls_version=tls.version(),
        peer_certificate=tls.getpeercert(binary_form=True) if context.verify_mode is not ssl.CERT_NONE else None,
        peer_subject=subject_text(shown.get("subject", ())),
        peer_names=tuple(
            alternative_name(kind, name) for kind, name in shown.get("subjectAltName", ()) if kind in WRITTEN
        ),
        server_name=server_name,
        resumed=bool(tls.session_reused),
    )


@asynccontextmanager
async def dial(url: str, config: TlsConfig | None = None) -> AsyncIterator[JoinedStream]:
    """Connect to ``tls://host:port`` and check the server's certificate; leaving the block closes the stream.

    Raises:
        ConnectionLost: no server answers at the URL, or its certificate is wrong.
        IdleTimeout: the connection or the handshake took too long.
        ConfigurationError: the URL is malformed, or the name or the certificates cannot be used.
    """
    config = config or TlsConfig()
    host, port = host_and_port(url, "tls")
    if (network := PLATFORM.get().network) is not None:
        from levada.transports.carriers import simulated_tls  # needs this module

        async with simulated_tls.dial(network, host, port, config) as other:
            yield other
        return
    context = make_context(config, ssl.Purpose.SERVER_AUTH)
    raw = await connect(host, port, config.tcp)
    async with await _shake_hands(
        raw, context, config, server_name=config.server_name or host, serving=False
    ) as stream:
        yield stream


_asked: dict[trio.lowlevel.Task, str | None] = {}
"""Names that clients have sent (SNI), by the task of the handshake."""


@attrs.frozen
class _NoteName:
    """Records the name that a client sends (SNI). A context has one, however many listeners use or reload the context."""

    others: Callable[[ssl.SSLObject, str, ssl.SSLContext], int | None] | None
    """The context's own callback."""

    def __call__(self, tls: ssl.SSLObject, name: str, used: ssl.SSLContext) -> int | None:
        """Called by a handshake in its task; without SNI the name is ``None``."""
        task = trio.lowlevel.current_task()
        if task in _asked:
            _asked[task] = name
        return None if self.others is None else self.others(tls, name, used)


@contextmanager
def asked_name() -> Iterator[Callable[[], str | None]]:
    """Within the block, this task does a server's side of a handshake; the function returns the name that the client has sent (SNI)."""
    task = trio.lowlevel.current_task()
    _asked[task] = None
    try:
        yield lambda: _asked[task]
    finally:
        del _asked[task]


def listening_context(config: TlsConfig, context: ssl.SSLContext | None) -> ssl.SSLContext:
    """Make the context of a listener, which notes the names that clients send.

    Args:
        config: names the files to read.
        context: replaces the settings.

    Raises:
        ConfigurationError: the files cannot be used, or the settings have none since they hold a context.
    """
    if context is None and config.context is not None:
        raise ConfigurationError(
            "the settings hold a context, so there are no files to read: pass a new context to reload()"
        )
    context = context or make_context(config, ssl.Purpose.CLIENT_AUTH)
    if not isinstance(context.sni_callback, _NoteName):
        context.sni_callback = _NoteName(context.sni_callback)
    return context


class TlsListener(StreamListener):
    """Accepts TLS connections after their handshakes; a `Listener`, made by `listen`."""

    def __init__(self, sockets: list[trio.SocketListener], config: TlsConfig) -> None:
        url = f"tls://{authority(sockets[0].socket.getsockname())}"
        super().__init__(url, sockets, config.backlog, Admission(url, config.tcp.max_connections_per_address))
        self._config = config
        self.reload(config.context)

    def reload(self, context: ssl.SSLContext | None = None) -> None:
        """Read the certificate files again, for new handshakes. Open connections are not affected.

        Args:
            context: replaces the settings.

        Raises:
            ConfigurationError: the files cannot be used; the old certificates stay in use.
        """
        self._context = listening_context(self._config, context)

    async def take_in(self, nursery: trio.Nursery, raw: trio.SocketStream) -> None:
        """Begin the handshake of an accepted socket."""
        entry = let_in(raw, self.admission)
        if entry is None:
            return
        peer, leave = entry

        async def shake_hands() -> JoinedStream:
            with asked_name() as asked:
                stream = await _shake_hands(raw, self._context, self._config, server_name=None, serving=True)
                stream.asked_for(asked())
            stream.at_end(leave)
            return stream

        def give_up() -> None:
            raw.socket.close()
            leave()

        await self.open_for(nursery, peer, share_of(peer), shake_hands, give_up)


@asynccontextmanager
async def listen(url: str, config: TlsConfig | None = None) -> AsyncIterator[TlsListener]:
    """Listen at ``tls://host:port``; leaving the block stops listening. Accepted connections stay open.

    Raises:
        ConfigurationError: the URL is malformed, the certificate is missing or cannot be used, or the address cannot be used.
    """
    config = config or TlsConfig()
    if (network := PLATFORM.get().network) is not None:
        from levada.transports.carriers import simulated_tls  # needs this module

        async with simulated_tls.listen(network, *host_and_port(url, "tls"), config) as other:
            yield other
        return
    make_context(config, ssl.Purpose.CLIENT_AUTH)  # find mistakes before taking the port
    sockets = await bind(url, "tls", config.tcp)
    async with TlsListener(sockets, config).running() as listener:
        yield listener


Attribute = tuple[str, str]

WRITTEN = frozenset({"DNS", "URI", "email", "IP Address"})
"""Kinds of alternative names that are written; others are left out."""

_SHORT = {
    "commonName": "CN",
    "localityName": "L",
    "stateOrProvinceName": "ST",
    "organizationName": "O",
    "organizationalUnitName": "OU",
    "countryName": "C",
    "streetAddress": "STREET",
    "domainComponent": "DC",
    "userId": "UID",
}
_SPECIAL = re.compile(r'[,+"\\<>;\x00]|\A[ #]| \Z')


def _escaped(found: re.Match[str]) -> str:
    return r"\00" if found[0] == "\0" else f"\\{found[0]}"


def subject_text(parts: Iterable[Iterable[Attribute]]) -> str | None:
    """Write a subject as in ``"CN=web-01,O=Example"``, in the order of the certificate; ``None`` if it is empty.

    Values are escaped as in RFC 4514, section 2.4, so that a comma inside a value does not end it.

    Args:
        parts: the relative distinguished names, each as pairs of a type, by OpenSSL's long name, and a value.
    """
    written = (
        "+".join(f"{_SHORT.get(kind, kind)}={_SPECIAL.sub(_escaped, value)}" for kind, value in part) for part in parts
    )
    return ",".join(written) or None


def alternative_name(kind: str, value: str) -> str:
    """Write a subject alternative name as in ``"DNS:web-01"``, IP addresses in their shortest form."""
    return f"{kind}:{ipaddress.ip_address(value.strip())}" if kind == "IP Address" else f"{kind}:{value}"
