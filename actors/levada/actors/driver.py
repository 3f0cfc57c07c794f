"""The driver of connections: one actor runs a core on a carrier.

`Driver` is the part that every protocol shares: phases, timer, dispatch of events, the beginning and the end. Below it are the two
kinds of carrier: `levada.actors.single` for one stream of bytes or messages, `levada.actors.multiplexed` for many streams. A
protocol derives from one of them and adds its event handlers.

The rules:

* `Driver.phase` changes in `Driver._go` only, by the table `PHASES`.
* One task, `Driver._main`, gets carriers and runs them. When it ends, so does the actor.
* Events are applied by direct calls, in the task that caused them. Their handlers are sync and run no code of users.
* The core keeps the time. The actor has one timer, set to `Core.next_deadline`. It is only ever moved to an earlier time.
* The core ends the connection, whichever side asked for it: its last event reaches `Driver.ended`. Every operation has ended by then.
"""

from __future__ import annotations

import logging
import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from enum import Enum, auto
from typing import Any, ClassVar, Final, Generic, Protocol, TypeVar

import attrs
import trio

from levada.actors.authentication import FAILED, Authenticator, Credentials, Gatekeeper, Refused
from levada.actors.metrics.connections import connection_samples
from levada.framework import FlowWindow, Identity, Lost, Normal, Reason, Ref, RemotePeer, Sample, handles
from levada.framework.embedding import ActorPhase, ConnectionActor, LocalRef, local_ref, release
from levada.framework.errors import (
    ActorStopped,
    CarrierError,
    ConfigurationError,
    ConnectionClosed,
    ConnectionLost,
    LevadaError,
)
from levada.framework.text import printable
from levada.transports.carriers import CarrierInfo, CarrierStatistics
from levada.transports.carriers.places import Place
from levada.transports.core import Core

__all__ = ["DUE", "PHASES", "Driver", "Due", "Phase"]


class Phase(Enum):
    """The state of a connection."""

    NEW = auto()
    """Its task has not begun."""
    CONNECTING = auto()
    """There is no carrier yet."""
    GREETING = auto()
    """There is a carrier, but not both sides have let each other in."""
    EARLY = auto()
    """The same, but work may begin already."""
    OPEN = auto()
    """Work may begin."""
    SUSPENDED = auto()
    """The session waits for another carrier."""
    DRAINING = auto()
    """This side begins no new work."""
    LEAVING = auto()
    """The peer takes no new work."""
    CLOSED = auto()
    """This side has ended it."""
    LOST = auto()
    """The peer, the network or a mistake has ended it, or there never was a carrier."""


class Change(Enum):
    """What moves a connection from one phase to another."""

    BEGIN = auto()
    CONNECT = auto()
    CONNECT_EARLY = auto()
    GREET = auto()
    SUSPEND = auto()
    RESUME = auto()
    DRAIN = auto()
    LEAVE = auto()
    CLOSE = auto()
    LOSE = auto()


_BEFORE: Final = (Phase.NEW, Phase.CONNECTING, Phase.GREETING)
_CARRIED: Final = (Phase.GREETING, Phase.EARLY, Phase.OPEN, Phase.SUSPENDED, Phase.DRAINING, Phase.LEAVING)
_USABLE: Final = (Phase.EARLY, Phase.OPEN, Phase.SUSPENDED)
_GREETING: Final = (Phase.GREETING, Phase.EARLY)
_ENDED: Final = (Phase.CLOSED, Phase.LOST)

PHASES: Final[Mapping[tuple[Phase, Change], Phase]] = {
    (Phase.NEW, Change.BEGIN): Phase.CONNECTING,
    (Phase.CONNECTING, Change.CONNECT): Phase.GREETING,
    (Phase.CONNECTING, Change.CONNECT_EARLY): Phase.EARLY,
    (Phase.GREETING, Change.GREET): Phase.OPEN,
    (Phase.EARLY, Change.GREET): Phase.OPEN,
    (Phase.EARLY, Change.SUSPEND): Phase.SUSPENDED,
    (Phase.OPEN, Change.SUSPEND): Phase.SUSPENDED,
    (Phase.SUSPENDED, Change.SUSPEND): Phase.SUSPENDED,  # another carrier that did not take the session on
    (Phase.SUSPENDED, Change.RESUME): Phase.OPEN,
    (Phase.OPEN, Change.RESUME): Phase.OPEN,  # the peer came on another carrier before this side missed the first
    **{(phase, Change.DRAIN): Phase.DRAINING for phase in _CARRIED},
    **{(phase, Change.LEAVE): Phase.LEAVING for phase in _CARRIED},
    (Phase.DRAINING, Change.LEAVE): Phase.DRAINING,
    **{(phase, Change.CLOSE): Phase.CLOSED for phase in (Phase.NEW, Phase.CONNECTING, *_CARRIED)},
    **{(phase, Change.LOSE): Phase.LOST for phase in (Phase.NEW, Phase.CONNECTING, *_CARRIED)},
}
"""All transitions; any other is a mistake of the protocol's driver."""


class Due:
    """The core's deadline has passed."""

    __slots__ = ()


DUE: Final = Due()
"""The one instance of `Due`."""


class Acceptor(Protocol):
    """A listener, as its connections know it."""

    url: str
    """What it listens at."""
    gatekeeper: Gatekeeper
    """Decides on clients."""
    trust_traces: bool | None
    """Whether to continue the traces of clients; None: only of clients with an identity."""

    def admit(self, connection: Any) -> None:
        """Record that a connection has let its client in."""
        ...


class Ended(Protocol):
    """The last event of a core."""

    @property
    def code(self) -> int:
        """The code it ended with; 0 if there is none."""
        ...


C = TypeVar("C", bound=Core[Any, Any])


class Driver(ConnectionActor, Generic[C]):
    """One connection of either side.

    A protocol says how to get carriers and run them (`carry`), and what to do for each class of event (`events`).
    """

    protocol: ClassVar[str]
    """The protocol's name, in logs."""
    events: ClassVar[Mapping[type, Callable[[Any, Any], None]]]
    """What to do for each class of event of the core. The handler of the last event calls `ended`."""
    keeps_when_greeted: ClassVar[bool] = True
    """Whether a client that was let in has said a whole message, so that its connection keeps its place; otherwise the protocol calls
    `keep_place`."""

    def __attrs_post_init__(self) -> None:
        self.core: C
        """Set before there is a carrier, at the latest when `connected` is called."""
        self.phase = Phase.NEW
        self.info: CarrierInfo | None = None
        """Facts about the carrier; None before there is one."""
        self.identity: Identity | None = None
        """Who the client is, once the listener's hook has admitted it."""
        self.remote: RemotePeer | None = None
        """The other end; None before there is a carrier."""
        self.end: Any = None
        """The core's last event, once the connection is over."""
        self.acceptor: Acceptor | None = None
        """The listener of a server's connection."""
        self.place: Place | None = None
        """The place of a server's connection at its listener."""
        self.turn_away: Callable[[], None] = lambda: None
        """Turns away the carrier that a server's listener accepted."""
        self.own: LocalRef
        """Its own ref, once it has started: `Actor.ref` and `local_ref` are calls."""
        self.unusable = trio.Event()
        """Set when no new work may begin: at the end, or when either side drains."""
        self.over = trio.Event()
        """Set when the connection is over."""
        self._reason = ""
        self._settled = trio.Event()
        self.refusal: LevadaError | OSError | None = None
        """Why work could never begin."""
        self._carrying = trio.CancelScope()
        self._gone = trio.Event()
        self._armed = math.inf
        self._authenticator: Ref[Any] | None = None
        self._credentials: Credentials | None = None

    @property
    def drain_limit(self) -> float:
        """Seconds that open work has when this side closes, if the core does not end the drain itself."""
        return math.inf

    @abstractmethod
    async def carry(self) -> None:
        """Get a carrier and run it until the connection is over. Calls `connected` when there is one."""

    @abstractmethod
    def flush(self) -> bool:
        """Hand the core's output to the carrier; return whether there was any."""

    def time_out(self, now: float) -> list[Any]:
        """Make the core do what is due."""
        return self.core.handle_timeout(now)

    def begin_drain(self, now: float) -> list[Any]:
        """Stop new work of the core."""
        return self.core.drain(now)

    async def wind_up(self) -> None:
        """Wait for work that must be over before the actor ends; the carrier is gone."""

    def release(self) -> None:
        """Drop everything that refers back to this actor, so that it is freed without the garbage collector. Its task has ended."""

    def refuse(self) -> None:
        """Turn away the carrier that was accepted: the actor ends before its task began."""
        self.turn_away()

    def _go(self, change: Change) -> None:
        phase = self.phase = PHASES[self.phase, change]
        if phase not in _BEFORE:
            if phase in _ENDED and self.refusal is None and not self._settled.is_set():
                self.refusal = self.error()
            self._settled.set()
            if phase not in _USABLE:
                self.unusable.set()
                if phase in _ENDED:
                    self.over.set()

    def connected(self, info: CarrierInfo, *, early: bool = False) -> None:
        """Record that there is a carrier; with `early`, work may begin before the peer has greeted."""
        self.meet(info)
        # In any other phase it was just closed, and `carry` is cancelled at its next checkpoint.
        if self.phase is Phase.CONNECTING:
            self._go(Change.CONNECT_EARLY if early else Change.CONNECT)

    def meet(self, info: CarrierInfo) -> None:
        """Record who is at the other end, in `info` and `remote`."""
        self.info = info
        trusted = True if self.acceptor is None else self.acceptor.trust_traces
        self.remote = RemotePeer(
            self.protocol,
            printable(info.peer),
            self.identity,
            info,
            trace_trusted=self.identity is not None if trusted is None else trusted,
        )

    @property
    def remote_peer(self) -> RemotePeer | None:
        """The other end, for `Actor.peer` of this actor and its children."""
        return self.remote

    @abstractmethod
    def carrier_statistics(self) -> CarrierStatistics | None:
        """Return the counters of the carrier now in use."""

    def all_statistics(self) -> CarrierStatistics | None:
        """Return the counters of all carriers of this connection."""
        return self.carrier_statistics()

    @property
    def dialect_name(self) -> str:
        """The protocol's name in URLs, which tells dialects apart."""
        return self.protocol

    @property
    def side(self) -> str:
        """``client`` or ``server``."""
        return "client" if self.acceptor is None else "server"

    def metrics(self) -> Iterable[Sample]:
        """Return the figures of every protocol; each adds its own."""
        opened, lost = self.info is not None, self.phase is Phase.LOST
        return connection_samples(
            self.dialect_name,
            self.side,
            self.phase.name.lower(),
            self.all_statistics(),
            opened=int(opened),
            lost=int(opened and lost),
            failed=int(lost and not opened),
        )

    def figures(self) -> dict[str, object]:
        """Return the protocol's own figures for `report`, of a connection that has a core."""
        return {}

    def flow(self, queued: int) -> FlowWindow:
        """Return the protocol's `window`, of a connection that has a core, and a carrier in which so many bytes are queued."""
        return FlowWindow(None, None, queued, "bytes")

    @property
    def window(self) -> FlowWindow | None:
        """What flow control lets pass now; None of a connection that has no carrier."""
        if self.remote is None or self.phase in _ENDED or (statistics := self.carrier_statistics()) is None:
            return None
        return self.flow(statistics.unsent)

    async def report(self) -> dict[str, object]:
        """Return the peer, the phase and the counters."""
        statistics, remote = self.carrier_statistics(), self.remote
        return {
            "protocol": self.protocol,
            "side": self.side,
            "phase": self.phase.name,
            "address": "" if remote is None else printable(remote.address),
            "identity": "" if remote is None or remote.identity is None else printable(remote.identity.name),
            **({} if statistics is None else attrs.asdict(statistics)),
            **({} if remote is None or self.phase in _ENDED else self.figures()),
        }

    @property
    def credentials(self) -> Credentials:
        """What the carrier shows of the client; a protocol adds what the client says."""
        acceptor, info = self.acceptor, self.info
        assert info is not None, "there is no carrier"
        return Credentials(
            protocol=self.protocol,
            listener="" if acceptor is None else acceptor.url,
            info=info,
            early=info.early_data_accepted is True,
        )

    def authenticate(self, credentials: Credentials) -> None:
        """Ask the listener to decide on its client; `admitted` or `refused` follows, at once if the listener has no hook.

        Neither follows if the connection ends before the decision.
        """
        acceptor = self.acceptor
        if acceptor is None or acceptor.gatekeeper.authentication is None:
            self.admitted(None)
            return
        gatekeeper, self._credentials = acceptor.gatekeeper, credentials
        try:
            self._authenticator = self.spawn(
                Authenticator, gatekeeper, credentials, self._decided, name="authenticator"
            )
        except ActorStopped:  # the connection is ending
            pass

    def _decided(self, answer: Identity | Refused) -> None:
        try:
            self._act_on(answer)
        except Exception as error:  # noqa: BLE001 - the failure log has it
            # Otherwise the client would wait for an answer that never comes.
            self.log_failure(
                error, "%s: the decision about the client could not be carried out", self.who, event="decision_failed"
            )
            self.record_refusal(FAILED)
            self.shut(reason=FAILED.reason)

    def _act_on(self, answer: Identity | Refused) -> None:
        acceptor = self.acceptor
        if (
            self._credentials is None
            or acceptor is None
            or self.info is None
            or self.own.phase is not ActorPhase.RUNNING
            or self.phase not in _GREETING
        ):
            return
        name = ""
        if isinstance(answer, Identity):
            name = answer.name
            refusal = acceptor.gatekeeper.enter(answer)
            if refusal is None:
                self.identity = answer
                self.meet(self.info)
                self.admitted(answer)
                self._credentials = None  # a token is not kept
                return
            answer = refusal
        self.record_refusal(answer, name)
        self.refused(answer)

    def record_refusal(self, refusal: Refused, name: str = "") -> None:
        """Count, publish and log that the client is refused, once."""
        if self._credentials is not None and self.acceptor is not None:
            self.acceptor.gatekeeper.refuse(self.system, self._credentials, refusal, name)
            self._credentials = None

    def cancel_authentication(self) -> None:
        """End the hook: its decision no longer matters."""
        self._credentials = None
        if self._authenticator is not None:
            self._authenticator.kill()

    def admitted(self, identity: Identity | None) -> None:
        """Admit the client; `identity` is None if the listener has no hook. Called by `authenticate`."""
        self.greeted()

    def refused(self, refusal: Refused) -> None:
        """Close the connection, with the code and text of the refusal. Called by `authenticate`."""
        self.shut(refusal.code or 0, refusal.reason)

    def greeted(self) -> None:
        """Record that both sides have let each other in."""
        if self.phase in _GREETING:
            self._go(Change.GREET)
            if self.acceptor is not None:
                self.acceptor.admit(self)
                if self.keeps_when_greeted:
                    self.keep_place()

    def keep_place(self) -> None:
        """Make no more room for newer connections."""
        if self.place is not None:
            self.place.keep()

    def make_room(self) -> None:
        """End at once, because a newer connection needs the place."""
        self.shut(reason="made room for another connection")
        self._carrying.cancel()  # so that a peer that does not read cannot hold it up

    def suspended(self) -> None:
        """Record that the session has no carrier for now."""
        self._go(Change.SUSPEND)
        if self.place is not None:
            self.place.give_way()

    def resumed(self) -> None:
        """Record that the session has a carrier again."""
        self._go(Change.RESUME)
        self.keep_place()

    def leaving(self) -> None:
        """Record that the peer takes no new work."""
        self._go(Change.LEAVE)

    def ended(self, event: Ended, reason: str) -> None:
        """Record that the core has ended; the handler of its last event calls this.

        Args:
            event: the last event.
            reason: what the peer, the network or this side said about it.
        """
        self.end, self._reason = event, printable(reason)
        if self.phase not in _ENDED:
            self._go(Change.CLOSE if self.phase is Phase.DRAINING else Change.LOSE)
        self.log_end(event)
        self.timers.cancel_all()
        self.cancel_authentication()

    def apply(self, events: list[Any]) -> None:
        """Call the handlers of events."""
        table = self.events
        for event in events:
            table[type(event)](self, event)

    def retime(self) -> None:
        """Move the timer to the core's deadline, if that is earlier."""
        deadline = self.core.next_deadline()
        if deadline is not None and deadline < self._armed and self.end is None:
            self._armed = deadline
            self.timers.at("core", deadline, DUE)

    @handles
    def on_due(self, m: Due) -> None:
        """Tell the core that its deadline has passed."""
        self._armed = math.inf
        self.apply(self.time_out(trio.current_time()))
        self.flush()
        self.retime()

    def started(self) -> None:
        """Begin to connect, in a task of this actor."""
        self.own = local_ref(self)
        self.start_soon(self._main)

    async def _main(self) -> None:
        if self.phase is not Phase.NEW:
            return  # ended before it began
        self._go(Change.BEGIN)
        try:
            with self._carrying:
                await self.carry()
        except (CarrierError, ConfigurationError, OSError) as error:
            if self.info is None:
                self.refusal = error
            # A client's `opened` raises it; a server's mistake shows only in the log.
            mistaken = self.acceptor is not None and isinstance(error, ConfigurationError)
            self.log(logging.WARNING if mistaken else logging.DEBUG, "carrier_failed", "%s", error)
        finally:
            self.lost(0, "the connection was given up")
            self._gone.set()
        await self.wind_up()
        release(self, self.why())

    async def opened(self) -> None:
        """Wait until work may begin.

        Raises:
            ConnectionLost: no server answers there, or not in this protocol.
            ConnectionClosed: this side has closed it meanwhile.
            ConfigurationError: the URL or the settings cannot work.
        """
        await self._settled.wait()
        if self.refusal is not None:
            raise self.refusal

    def check_open(self) -> None:
        """Refuse new work that could not be done.

        Raises:
            ConnectionClosed: this side has closed the connection, or is closing it.
            ConnectionLost: the peer or the network has, or the peer is closing it.
        """
        if self.phase not in _USABLE:
            raise self.error()

    def error(self) -> CarrierError:
        """Make the error for new work on a connection that takes none."""
        if self.phase is Phase.DRAINING:
            return ConnectionClosed("this side is closing the connection")
        if self.phase is Phase.CLOSED:
            return ConnectionClosed("this side closed the connection")
        if self.phase is Phase.LEAVING:
            return ConnectionLost("the peer is closing the connection and takes no new work")
        if self.end is None:
            return ConnectionLost("there is no connection")
        reason = self._reason or f"closed with code {self.end.code}"
        return ConnectionLost(f"the connection was lost: {reason}", code=self.end.code)

    def why(self) -> Reason:
        """Return why the connection has ended: `Normal` if this side closed it, else `Lost`. It becomes the reason of the actor."""
        if self.phase is Phase.CLOSED:
            return Normal()
        return Lost("" if self.info is None else self.info.peer)

    def lost(self, code: int, reason: str) -> None:
        """Record that the carrier has ended by itself; a session that can be resumed continues without one."""
        if self.phase in _CARRIED:
            self.apply(self.core.connection_lost(code, reason, trio.current_time()))
            self.retime()
        elif self.phase is Phase.CONNECTING:
            self._go(Change.LOSE)

    async def aclose(self) -> None:
        """Begin no new work, let open work finish in time, then close. A second call is harmless.

        Cancellation:
            closed at once.
        """
        try:
            if self.phase in _CARRIED:
                self._go(Change.DRAIN)
                self.apply(self.begin_drain(trio.current_time()))
                self.flush()
                self.retime()
                with trio.move_on_after(self.drain_limit):
                    await self._gone.wait()
        finally:
            self.shut()
        await self.ref.terminated()

    def shut(self, code: int = 0, reason: str = "") -> None:
        """Close at once: open work fails, the carrier sends its queue and closes, and the actor ends."""
        if self.phase in _CARRIED:
            self._go(Change.CLOSE)
            self.apply(self.core.close(code, reason, trio.current_time()))
            self.flush()
        elif self.phase not in _ENDED:
            begun = self.phase is Phase.CONNECTING
            self._go(Change.CLOSE)
            if begun:
                self._carrying.cancel()
            else:
                self.refuse()
                self._gone.set()
                self.ref.stop(now=True)

    async def stopping(self, reason: Reason) -> None:
        """Close the connection if it is still open, and wait for the carrier."""
        self.shut(reason=f"its actor ended: {type(reason).__name__.lower()}")
        await self._gone.wait()
        self.release()

    def undelivered(self, messages: list[Any]) -> None:
        """Ignore timers and turns that came too late."""

    def extra(self, event: str) -> dict[str, object]:
        """Return the fields of a log record."""
        fields: dict[str, object] = {"protocol": self.protocol, "actor": self.ref.path, "event": event}
        if self.remote is not None:
            fields["connection_id"] = str(self.remote)
        return fields

    @property
    def who(self) -> str:
        """The actor's path, and the client's name if it is known: for logs."""
        return f"{self.ref.path} ({printable(self.identity.name)})" if self.identity is not None else self.ref.path

    def log_end(self, event: Any) -> None:
        """Log how the connection ended."""
        self.log(logging.INFO, "ended", "ended: %s, code %s", self._reason or "no reason given", event.code)

    def log(self, level: int, event: str, text: str, *arguments: object) -> None:
        """Log a line about this connection, under the protocol's logger."""
        logger = logging.getLogger(f"levada.actors.{self.protocol}")
        if logger.isEnabledFor(level):
            logger.log(level, "%s: %s", self.who, printable(text % arguments), extra=self.extra(event))

    def log_failure(self, error: BaseException, text: str, *arguments: object, event: str) -> None:
        """Log an exception of the user's code, under the protocol's logger: see `FailureLog.log`."""
        logger = logging.getLogger(f"levada.actors.{self.protocol}")
        self.system.failure_log.log(logger, error, text, *arguments, **self.extra(event))
