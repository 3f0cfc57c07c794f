"""Authentication of clients: one hook for all protocols decides who a client is, and whether it is admitted.

A program passes ``authenticate`` to ``serve``: an async function of `Credentials`, or the ref of an actor that answers them. It returns an
`Identity`, or a `Refused` with the reason.

* The hook of a connection runs in a child actor of it, `Authenticator`, which ends with the connection.
* A listener runs `Authentication.at_once` hooks at a time; others wait in order. Waiting and deciding together may take
  `Authentication.timeout` seconds.
* A hook that fails, or returns something else, refuses. Its error is logged here, and the peer gets a neutral text.
* Each refusal is counted (`Gatekeeper.refused`), published as `PeerRefused`, and logged, but not with a line for each. None of these has a token.
"""

from __future__ import annotations

import hmac
import logging
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias, runtime_checkable

import attrs
import trio
from attrs import validators as v

from levada.framework import Actor, Asks, Identity, Reason, Ref
from levada.framework.embedding import FailureLog
from levada.framework.errors import ConfigurationError
from levada.framework.text import printable
from levada.transports.carriers import CarrierInfo
from levada.transports.carriers.admission import Admission

if TYPE_CHECKING:
    from levada.framework import ActorSystem

__all__ = [
    "BINDING", "Authenticate", "Authentication", "Authenticator", "Credentials", "Gatekeeper", "PeerRefused", "Refused", "Reloads", "acquire",
    "check_hook",
]  # fmt: skip

logger = logging.getLogger("levada.actors.authentication")

BINDING: Final = "channel-binding"
"""MAOP's pair with the channel binding of the client's end, in hexadecimal."""


def _check_retry_after(_: Any, attribute: Any, value: float | None) -> None:
    if value is not None and not (value >= 0 and math.isfinite(value)):
        raise ConfigurationError(f"retry_after is {value!r}, wanted a number of seconds")


def _encodable(reason: Any) -> Any:
    """Escape lone surrogates, which no protocol can send."""
    return reason.encode("utf-8", "backslashreplace").decode() if isinstance(reason, str) else reason


@attrs.frozen
class Refused:
    """A refusal: an ``authenticate`` hook returns it to turn a client, or a request, away."""

    reason: str = attrs.field(
        default="These credentials are not valid here.", converter=_encodable, validator=v.instance_of(str)
    )
    """A sentence for people. The peer sees it, so do not put tokens or personal data into it."""
    code: int | None = attrs.field(
        default=None, kw_only=True, validator=v.optional([v.instance_of(int), v.ge(0), v.lt(1 << 62)])
    )
    """A code of the protocol. None, or a code that the protocol does not have: its usual code for a refusal."""
    retry_after: float | None = attrs.field(default=None, kw_only=True, validator=_check_retry_after)
    """Seconds to wait before another attempt, in protocols that can say so."""


@attrs.frozen(kw_only=True)
class Credentials(Asks[Identity | Refused]):
    """A client's claims about itself, and its carrier's facts. The claims are well-formed and within limits, but not verified."""

    protocol: str
    """For example ``"aqueduct"``."""
    listener: str
    """The listener's URL."""
    info: CarrierInfo
    """The client's address, its TLS certificate, the user of a Unix socket, and more."""
    scheme: str = ""
    """Of the token, in lower case: ``"bearer"``, ``"simple"``, ``"basic"``, or another; empty if there is none."""
    user: str = ""
    """The user's name, in the schemes that have one."""
    token: bytes = attrs.field(default=b"", repr=False)
    """The token, or the user's password. Never logged."""
    headers: Mapping[str, bytes] = attrs.field(factory=dict[str, bytes], repr=False)
    """The client's headers (Aqueduct) or pairs (MAOP)."""
    setup: Any = attrs.field(default=None, repr=False)
    """The event that the protocol's core made of the client's greeting: RSocket's ``SetupReceived``, MAOP's ``AuthenticationReceived``."""
    early: bool = False
    """Whether this came as early data, which an attacker can replay."""
    identity: Identity | None = None
    """The connection's identity, if these are the credentials of one request (RSocket)."""

    @property
    def bound(self) -> bool:
        """Whether the client has bound its token to this connection, so that the token cannot have been forwarded.

        A MAOP client does so with ``connect(bind=True)``. False if it named none or another one, or if the carrier has no channel
        binding. Source: MA-19, RFC 9266.
        """
        own = self.info.channel_binding
        return own is not None and hmac.compare_digest(self.headers.get(BINDING, b""), own.hex().encode())


Authenticate: TypeAlias = Callable[[Credentials], Awaitable[Identity | Refused]] | Ref[Any]
"""Decides on a client: an async function, or the ref of an actor that answers `Credentials`."""


@runtime_checkable
class Reloads(Protocol):
    """A hook that reads files; a listener's ``reload`` calls its own."""

    def reload(self) -> None:
        """Read the files again.

        Raises:
            ConfigurationError: they cannot be used; the hook goes on as before.
        """


def check_hook(_: Any, attribute: Any, value: Any) -> None:
    """Refuse what cannot be a hook; a validator of attrs."""
    if not (isinstance(value, Ref) or callable(value)):
        raise ConfigurationError(f"authenticate is {type(value).__name__}, wanted an async function or a Ref")


@attrs.frozen
class Authentication:
    """An ``authenticate`` hook with its limits. `serve` takes the bare hook, too."""

    hook: Authenticate = attrs.field(validator=check_hook)
    """Decides."""
    timeout: float = attrs.field(default=5.0, kw_only=True, validator=v.gt(0.0))
    """Seconds from the client's credentials to the decision, waiting included; then the client is refused."""
    at_once: int = attrs.field(default=64, kw_only=True, validator=[v.instance_of(int), v.ge(1)])
    """Hooks that a listener runs at a time; other clients wait in order."""

    @classmethod
    def of(cls, authenticate: Authenticate | Authentication | None) -> Authentication | None:
        """Return the settings for the ``authenticate`` argument of ``serve``.

        Raises:
            ConfigurationError: it is neither an async function nor a ref.
        """
        if authenticate is None or isinstance(authenticate, Authentication):
            return authenticate
        return cls(authenticate)

    async def ask(self, credentials: Credentials) -> Identity | Refused:
        """Run the hook, without limits. Raises what the hook raises."""
        hook = self.hook
        answer = await (hook.ask(credentials, timeout=None) if isinstance(hook, Ref) else hook(credentials))
        if not isinstance(answer, Identity | Refused):
            raise TypeError(f"authenticate returned {type(answer).__name__}, wanted an Identity or a Refused")
        return answer


@attrs.frozen
class PeerRefused:
    """A client, or a request, was refused: an event of the system's event stream, for audits.

    Example:
        ``system.events.subscribe(PeerRefused, ref)``
    """

    protocol: str
    """For example ``"aqueduct"``."""
    listener: str
    """The listener's URL."""
    address: str
    """Where the peer is."""
    name: str
    """Its known name, the name it gave, or the subject of its certificate; empty if there is none."""
    reason: str
    """The text that the peer got."""
    at: float
    """When, in seconds since 1970."""


FAILED: Final = Refused("The server could not check these credentials.", retry_after=1.0)
LATE: Final = Refused("The server did not check these credentials in time.", retry_after=1.0)


async def acquire(places: trio.CapacityLimiter, place: object) -> None:
    """Take a place; a checkpoint only if this has to wait."""
    # With a hook that does not wait, a request with credentials takes 240 us this way, and 390 with two checkpoints.
    try:
        places.acquire_on_behalf_of_nowait(place)
    except trio.WouldBlock:
        await places.acquire_on_behalf_of(place)


class Gatekeeper:
    """Decides on the clients of one listener: runs its hook, counts the connections of tenants, and keeps account of refusals.

    Args:
        authentication: the hook and its limits; None lets every client in.
    """

    def __init__(self, authentication: Authentication | None) -> None:
        self.authentication = authentication
        self._places = trio.CapacityLimiter(authentication.at_once if authentication is not None else 1)
        self._tenants: Counter[str] = Counter()
        self._admission = Admission("")
        self._failures = FailureLog()

    @property
    def refused(self) -> int:
        """The number of refusals so far."""
        return self._admission.refused

    async def decide(self, credentials: Credentials) -> Identity | Refused:
        """Run the hook, within its limits. Never raises; the caller tells `refuse` of a refusal.

        Cancellation:
            the hook is cancelled.
        """
        authentication = self.authentication
        assert authentication is not None, "there is no hook to ask"
        place = object()
        with trio.move_on_after(authentication.timeout):
            await acquire(self._places, place)
            try:
                return await authentication.ask(credentials)
            except Exception as error:  # noqa: BLE001 - the failure log has it
                text = "%s: authenticate failed"
                self._failures.log(logger, error, text, credentials.listener, event="hook_failed")
                return FAILED
            finally:
                self._places.release_on_behalf_of(place)
        return LATE

    def reload(self) -> None:
        """Reload the files of the hook, if it has any.

        Raises:
            ConfigurationError: they cannot be used; the hook goes on as before.
        """
        if self.authentication is not None and isinstance(self.authentication.hook, Reloads):
            self.authentication.hook.reload()

    def enter(self, identity: Identity) -> Refused | None:
        """Count a connection of a tenant; return a refusal if the tenant has enough. `leave` ends it."""
        tenant, most = identity.tenant, identity.limits.max_connections
        count = self._tenants[tenant]
        if most is not None and count >= most:
            return Refused(f"Too many connections of this tenant: {count}, at most {most}.")
        self._tenants[tenant] += 1
        return None

    def leave(self, identity: Identity) -> None:
        """Uncount a connection that `enter` has counted."""
        tenant = identity.tenant
        self._tenants[tenant] -= 1
        if not self._tenants[tenant]:
            del self._tenants[tenant]

    def refuse(self, system: ActorSystem, credentials: Credentials, refusal: Refused, name: str = "") -> None:
        """Count, publish and log a refusal.

        Args:
            system: has the event stream.
            credentials: of the client or request.
            refusal: what the peer is told.
            name: the peer's, if it is known better than by what it said.
        """
        info = credentials.info
        name, reason = printable(name or credentials.user or info.peer_subject or "", 256), printable(refusal.reason)
        address = info.peer
        self._admission.url = credentials.listener
        self._admission.turn_away(f"{name} ({address})" if name else address, reason)
        system.events.publish(
            PeerRefused(
                credentials.protocol, credentials.listener, printable(address), name, reason, system.platform.time()
            )
        )


class Authenticator(Actor[Any]):
    """Decides on one client, then stops. If it is stopped first, the client is refused."""

    gatekeeper: Gatekeeper
    credentials: Credentials
    decided: Callable[[Identity | Refused], None]
    """Called once, with the decision."""
    answer: Identity | Refused = attrs.field(default=FAILED, init=False)
    """The decision, once there is one."""

    def started(self) -> None:
        """Run the hook, in a task: it is cancelled when this actor is stopped, as a handler would not be."""
        self.start_soon(self._decide)

    async def _decide(self) -> None:
        self.answer = await self.gatekeeper.decide(self.credentials)
        self.stop()

    def stopping(self, reason: Reason) -> None:
        """Hand the decision over."""
        self.decided(self.answer)
