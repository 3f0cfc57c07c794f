"""Actors that Spark's executors ask: the parts that bridges and nodes share, and `serve_asks` for nodes.

An executor asks a bridge in the driver, or the nodes themselves. Each node serves its own actors at a Unix socket in a folder that all nodes
share. So executors need only the name of the folder, and find a restarted node at the same path.

As with a bridge, a process must belong to the user, and know the token, which is in a file in that folder.
"""

from __future__ import annotations

import hmac
import os
import re
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, urlsplit

import attrs
import pyarrow as pa
import trio
from attrs import validators as v

from levada.actors.authentication import Authenticate, Authentication, Credentials, Refused
from levada.actors.journal.errors import JournalUnwritable
from levada.actors.journal.ipc import rows_of_stream, stream_of
from levada.actors.rsocket import (
    COMPOSITE,
    ConnectedPeer,
    CoreConfig,
    Request,
    RequestFailed,
    RequestInvalid,
    RequestRejected,
    ServerConfig,
    serve,
)
from levada.framework import ActorSystem, Codec, Identity, Ref
from levada.framework.errors import ActorStopped, ConfigurationError, DecodeError, LevadaError
from levada.framework.files import Files, folder_path
from levada.framework.platform import PLATFORM
from levada.framework.text import error_text, printable
from levada.transports.carriers import TlsConfig, UnixConfig
from levada.transports.core import MAX_CONNECTIONS
from levada.transports.rsocket import Payload

from .asks import AskRows
from .protocol import REQUEST_ID, ActorFailed, Token, UnknownName, failed, names
from .tracing import greeting

__all__ = [
    "BridgeConfig", "Desk", "SharedLimit", "check_url", "listening", "message_of", "serve_asks", "shared_token", "take_folder",
]  # fmt: skip

_CERTIFICATES = re.compile(r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----\n?", re.DOTALL)
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")

MAX_PAYLOAD = 64 << 20
"""The most bytes of a request."""
MAX_SETUP = 1 << 16
"""The most bytes that a process may send before it is admitted."""

_COUNT: Final = [v.instance_of(int), v.ge(1)]
_LOCKED: Final = 0.01  # seconds between looks at a folder while another node makes its token


@attrs.frozen(kw_only=True)
class BridgeConfig:
    """The settings of a bridge. Immutable; derive with `attrs.evolve`."""

    tls: TlsConfig | None = None
    """Certificate and key, for a bridge with a ``tls://`` URL. The token file gets the certificates, without the key, for executors to trust."""
    advertise: str | None = None
    """Host name or address of the TLS listener for executors; ``None``: the host of the URL, or of this machine if that is a wildcard."""
    allowed_uids: frozenset[int] | None = attrs.field(factory=lambda: frozenset({os.getuid()}))
    """Users whose processes may use the Unix socket; ``None``: every process that can open it and knows the token."""
    max_connections: int = attrs.field(default=MAX_CONNECTIONS, validator=_COUNT)
    """The most connected processes of Spark."""
    max_requests: int = attrs.field(default=1024, validator=_COUNT)
    """The most requests of one process at a time. One more is refused before any work, and the process repeats it a little later."""
    max_reads: int = attrs.field(default=64, validator=_COUNT)
    """The most streams of rows among these requests; each holds one block."""
    max_pending_bytes: int = attrs.field(default=64 << 20, validator=_COUNT)
    """The most bytes of rows and messages of one process that wait for the disk or for an actor. More are refused in the same way, but a single
    request may always have 64 MiB."""
    max_total_reads: int = attrs.field(default=320, validator=_COUNT)
    """The most streams of rows of all processes. A process gets at most a quarter of the free rest, so a new process finds room."""
    max_total_pending_bytes: int = attrs.field(default=320 << 20, validator=_COUNT)
    """The most waiting bytes of rows and messages of all processes; shared in the same way."""
    max_items: int = attrs.field(default=1 << 18, validator=_COUNT)
    """The most values in a message; see `Codec.max_items`."""
    max_staged_age: float = attrs.field(default=6 * 3600.0, validator=v.gt(0.0))
    """Seconds after which a staged batch is dropped to which no task has added rows and that no driver has delivered: its job was killed."""
    drain_timeout: float = attrs.field(default=5.0, validator=v.ge(0.0))
    """Seconds for pending requests at the end."""


class Desk:
    """Actors that executors ask by name. Made by `serve_asks`; a `Bridge` is one too.

    Args:
        directory: the folder with the token file.
        token: the token that a process must know.
        config: the limits.
        authentication: decides about clients that know the token.
    """

    def __init__(
        self, directory: Path, token: Token, config: BridgeConfig, authentication: Authentication | None
    ) -> None:
        self.directory = directory
        self.address = ""
        """For `RemoteActor`, and for the option ``address`` of a Spark source or sink: one URL or several, joined by commas."""
        self.token_file = directory / "bridge.token"
        """For `RemoteActor`, and for the option ``tokenFile``; not needed with the Unix socket."""
        self._secret = token.secret
        self._authentication = authentication
        self._exposed: dict[str, Ref[Any]] = {}
        self.pending = SharedLimit("bytes", config.max_pending_bytes, config.max_total_pending_bytes)

    def expose(self, name: str, ref: Ref[Any]) -> None:
        """Offer an actor to executors by a name; see `levada.actors.spark.asks`. The actor handles its own messages, or `AskRows`.

        Raises:
            ConfigurationError: the name has a slash or is taken.
        """
        if not name or "/" in name or self._exposed.get(name, ref) is not ref:
            raise ConfigurationError(f"the name is {name!r}, wanted one without '/' that is not taken")
        self._exposed[name] = ref

    async def until_named(self, name: str, among: Mapping[str, object]) -> None:
        """Wait while a name may still be exposed; here no wait is needed."""

    @property
    def authentication(self) -> Authentication:
        """The hook of the servers."""
        further = self._authentication
        return Authentication(self.admit) if further is None else attrs.evolve(further, hook=self.admit)

    async def admit(self, credentials: Credentials) -> Identity | Refused:
        """Decide about a client: by its token, then by the program's own hook."""
        known = credentials.scheme == "bearer" and hmac.compare_digest(credentials.token, self._secret.encode())
        if not known:
            return Refused("the token belongs to another bridge")
        if self._authentication is None:
            return Identity("spark")
        return await self._authentication.ask(attrs.evolve(credentials, scheme="", token=b""))

    def answer(self, request: Request) -> Any:
        """Answer a request; the handler of the servers."""
        kind, _, rest = request.route.partition("/")
        name, _, verb = rest.partition("/")
        match kind, verb:
            case "ask", "":
                return self.telling(self._ask_message, name, request)
            case "ask", "batch":
                return self.telling(self._ask_rows, name, request)
            case "hello", "":
                return Payload(greeting())
        raise RequestInvalid(f"no route {printable(request.route)!r}")

    async def telling(self, answer: Callable[[str, Request], Awaitable[Any]], name: str, request: Request) -> Any:
        """Answer a request, which counts as pending meanwhile. Errors keep their class and fields."""
        payload = request.payload
        size = len(payload.data) + len(payload.metadata or b"")
        with self.pending.counted(request.connection, size):
            try:
                return await answer(name, request)
            except (RequestFailed, DecodeError):
                raise
            except LevadaError as error:
                raise failed(error) from error
            except OSError as error:
                raise failed(JournalUnwritable(str(error))) from error

    async def _ask_message(self, name: str, request: Request) -> Any:
        return await self._ask(name, message_of(request))

    async def _ask(self, name: str, question: Any) -> Any:
        await self.until_named(name, self._exposed)
        ref = self._exposed.get(name)
        if ref is None:
            raise UnknownName(f"no actor is exposed as {name!r}; there are: {names(self._exposed)}", name)
        try:
            return await ref.ask(question, timeout=None)
        except ActorStopped as error:
            if error.__cause__ is None:
                raise
            text = f"{name} ({ref.path}) failed on this question: {error_text(error.__cause__)}"
            raise ActorFailed(text, ref.path) from error

    async def _ask_rows(self, name: str, request: Request) -> Payload:
        asked = rows_of_stream(request.data)
        tried = (entry.metadata for entry in request.entries.entries if entry.mime_type == REQUEST_ID)
        answer = await self._ask(name, AskRows(asked, next(tried, b"").decode("ascii", "replace")))
        if not isinstance(answer, pa.RecordBatch) or answer.num_rows != asked.num_rows:
            got = f"{answer.num_rows} rows" if isinstance(answer, pa.RecordBatch) else type(answer).__name__
            raise ActorFailed(f"{name} answered {asked.num_rows} rows by {got}", self._exposed[name].path)
        return Payload(stream_of(answer))


@attrs.define
class SharedLimit:
    """A limited resource that the connections of a bridge or a node share.

    A connection holds at most a quarter of the free rest. So a single connection gets a fifth of all, and each further connection leaves four
    fifths of the rest that it found: after ten connections a tenth is free.
    """

    _what: str
    _most: int
    """The limit of one connection."""
    _total: int
    _used: int = 0
    _held: Counter[ConnectedPeer] = attrs.field(factory=Counter)
    refused: int = attrs.field(default=0, init=False)
    """The number of refused requests."""

    @property
    def used(self) -> int:
        """The amount in use by all connections."""
        return self._used

    @contextmanager
    def counted(self, peer: ConnectedPeer, more: int) -> Iterator[None]:
        """Count `more` for a peer while the block lasts.

        Raises:
            RequestRejected: that exceeds a limit. A connection's only use is never too much for its own limit.
        """
        own, free = self._held[peer], self._total - self._used
        if own and own + more > self._most:
            self.refused += 1
            raise RequestRejected(
                f"{own} {self._what} of this connection wait, at most {self._most}; send it again later"
            )
        if self._used and (4 * (own + more) > free if own else more > free):
            self.refused += 1
            raise RequestRejected(
                f"{self._used} {self._what} of all connections wait, at most {self._total}; send it again later"
            )
        self._held[peer] += more
        self._used += more
        try:
            yield
        finally:
            self._used -= more
            self._held[peer] -= more
            if not self._held[peer]:
                del self._held[peer]


def message_of(request: Request) -> Any:
    """Return the message of a request.

    Raises:
        RequestInvalid: the request has no message.
    """
    if not request.holds_message:
        raise RequestInvalid("this route takes a message; its MIME type is missing")
    return request.message()


@asynccontextmanager
async def serve_asks(
    system: ActorSystem,
    directory: str | os.PathLike[str],
    actors: Mapping[str, Ref[Any]],
    *,
    url: str | None = None,
    authenticate: Authenticate | Authentication | None = None,
    config: BridgeConfig | None = None,
) -> AsyncIterator[Desk]:
    """Offer actors of this system to Spark's executors; for the app of nodes. Leaving the block closes connections.

    Executors ask all nodes of a folder with ``RemoteActor(name, "unix:///directory/*.socket")``.

    Args:
        system: has been entered. Its socket has its name, which is unique for each node.
        directory: the folder of the sockets and of ``bridge.token``, the same for all nodes. It is made if it is missing, and only this user may
            be able to open it.
        actors: the actors by name. Each handles its own messages, or `AskRows`; a router works too.
        url: as for `serve_bridge`.
        authenticate: as for `serve_bridge`.
        config: as for `serve_bridge`.

    Raises:
        ConfigurationError: the directory cannot be used or is open to other users, another system of this name serves there, the name is not
            a file name, or the URL or the certificates cannot be used.

    Cancellation:
        connections are closed at once.
    """
    settings = config or BridgeConfig()
    folder = await PLATFORM.get().run_in_thread(take_folder, directory)
    check_url(url, settings)
    if not _FILE.fullmatch(system.name):
        raise ConfigurationError(
            f"the name of the system is {system.name!r}, wanted letters, digits, '.', '-' and '_', for the name of a socket"
        )
    token = await shared_token(folder / "bridge.token", settings)
    desk = Desk(folder, token, settings, Authentication.of(authenticate))
    for name, ref in actors.items():
        desk.expose(name, ref)
    async with listening(system, desk, folder / f"{system.name}.socket", url, settings):
        yield desk


@asynccontextmanager
async def listening(
    system: ActorSystem, desk: Desk, path: Path, url: str | None, settings: BridgeConfig
) -> AsyncIterator[None]:
    """Listen for executors at a Unix socket, and with a URL also for other machines. Sets `Desk.address`."""
    common = ServerConfig(
        max_connections=settings.max_connections,
        max_fire_and_forget=1,  # no route uses it
        max_request_bytes=settings.max_pending_bytes,
        codec=Codec(max_items=settings.max_items),
        core=CoreConfig(
            metadata_mime_type=COMPOSITE,
            max_streams=settings.max_requests,
            max_reassembly=MAX_PAYLOAD,
            max_payload_size=MAX_PAYLOAD,
            max_setup_backlog=MAX_SETUP,
            drain_timeout=settings.drain_timeout,
        ),
    )
    async with AsyncExitStack() as stack:
        at, admission = quote(os.fsencode(path)), desk.authentication
        unix = attrs.evolve(common, carrier=UnixConfig(allowed_uids=settings.allowed_uids))
        await stack.enter_async_context(
            serve(system, f"rsocket+unix://{at}", desk.answer, authenticate=admission, config=unix)
        )
        desk.address = f"unix://{at}"
        if url is not None:
            tls = attrs.evolve(common, carrier=settings.tls)
            listener = await stack.enter_async_context(
                serve(system, f"rsocket+{url}", desk.answer, authenticate=admission, config=tls)
            )
            desk.address += f",{_advertised(listener.url, settings)}"
        yield


def check_url(url: str | None, settings: BridgeConfig) -> None:
    """Check the URL of the TLS listener.

    Raises:
        ConfigurationError: there is a URL without certificates, or the reverse, or the URL is not a ``tls://`` URL.
    """
    if (url is None) != (settings.tls is None):
        raise ConfigurationError(
            "a bridge for other machines needs both url='tls://host:port' and certificates in BridgeConfig(tls=…)"
        )
    if url is not None and urlsplit(url).scheme != "tls":
        raise ConfigurationError(f"the URL of a bridge for other machines is {url!r}, wanted tls://host:port")


def take_folder(directory: str | os.PathLike[str]) -> Path:
    """Make a folder that only this user can open, unless there is one. Blocks.

    Raises:
        ConfigurationError: it cannot be made, or it is open to other users.
    """
    folder, files = folder_path(directory).absolute(), PLATFORM.get().files
    try:
        files.make_durable_folder(folder)
        found = files.stat(folder)
    except OSError as error:
        raise ConfigurationError(f"cannot use the folder {folder}: {error.strerror or error}") from error
    if found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ConfigurationError(
            f"{folder} is for a token and must be open to this user only: it belongs to user {found.st_uid}, mode "
            f"{found.st_mode & 0o777:o} (chmod 700 it, or choose another folder)"
        )
    return folder


async def shared_token(path: Path, settings: BridgeConfig) -> Token:
    """Read the token of a folder, or make it. Nodes that start at the same time get the same token.

    Raises:
        ConfigurationError: the token or the certificates cannot be read, or the token cannot be written.

    Cancellation:
        the token may have been made.
    """
    platform = PLATFORM.get()
    with platform.files.opened(path.parent) as folder:
        while not _locked(platform.files, folder):  # noqa: ASYNC110 - by another process
            await trio.sleep(_LOCKED)
        return await platform.run_in_thread(_token, path, settings)


def _locked(files: Files, descriptor: int) -> bool:
    try:
        files.lock(descriptor)
    except BlockingIOError:
        return False
    return True


def _token(path: Path, settings: BridgeConfig) -> Token:
    trust = ""
    try:
        if settings.tls is not None and settings.tls.certificate is not None:
            trust = "".join(_CERTIFICATES.findall(Path(settings.tls.certificate).read_text("latin-1")))
        token = Token.make(trust=trust)
        if PLATFORM.get().files.exists(path):
            token = attrs.evolve(token, secret=Token.read(path).secret)
        token.write(path)
    except OSError as error:
        raise ConfigurationError(f"cannot use {error.filename or path}: {error.strerror or error}") from error
    return token


def _advertised(url: str, settings: BridgeConfig) -> str:
    parts = urlsplit(url.removeprefix("rsocket+"))
    host = settings.advertise or parts.hostname or ""
    if host in ("0.0.0.0", "::", ""):
        platform = PLATFORM.get()
        host = socket.getfqdn() if platform.network is None else platform.host()
    return f"tls://[{host}]:{parts.port}" if ":" in host else f"tls://{host}:{parts.port}"
