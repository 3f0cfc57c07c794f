"""Handlers: the user's code for the operations of a peer, and the view of an operation that it gets."""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeAlias, TypeVar, overload

import attrs
import trio

from levada.framework import Actor, Reason, handles
from levada.framework.errors import ConfigurationError, DecodeError, LocalProtocolError
from levada.transports.maop import HandlerSpec

from .bodies import Body
from .errors import OperationError, Refuse

if TYPE_CHECKING:
    from levada.transports.maop import Received

    from .connection import MaopDriver
    from .peer import Peer

__all__ = [
    "BeforeExecute", "Call", "Code", "Handler", "Handlers", "OperationActor", "Raised", "Reply", "StartHandler",
    "handler_table",
]  # fmt: skip

T = TypeVar("T")


@attrs.frozen
class Reply:
    """An answer that is more than its bytes."""

    body: Body = b""
    """The answer's body, of any type that `Body` allows."""
    content_type: str | None = None
    """Content type of a Success; ``None`` for the default for this type of body."""
    length: int | None = None
    """How many bytes an async iterator will yield; ``None`` for undefined length."""


class Call:
    """One operation of a peer, as its handler sees it. Source: MA-114."""

    __slots__ = ("_chunks", "_connection", "_ended", "_news", "_whole", "operation")

    def __init__(self, operation: Received, connection: MaopDriver) -> None:
        self.operation = operation
        """The operation's header: ``msg_id``, ``length``, ``priority``, …"""
        self._connection = connection
        self._whole: bytes | None = None
        self._chunks: deque[bytes | memoryview] | None = None  # made when needed: an empty deque takes 760 bytes
        self._ended = False
        self._news: trio.Event | None = None

    @property
    def peer(self) -> Peer:
        """The peer that sent the operation; a handler may call it."""
        return self._connection.handle

    @property
    def msg_id(self) -> int:
        """The number that selects the handler."""
        return self.operation.msg_id

    @property
    def stream_id(self) -> int:
        """The operation's id within the session."""
        return self.operation.stream_id

    @property
    def is_request(self) -> bool:
        """Whether this is a Request, which wants a Response, and not a Message."""
        return self.operation.is_request

    @property
    def length(self) -> int | None:
        """The announced length in bytes; ``None`` for undefined length."""
        return self.operation.length

    @property
    def priority(self) -> int:
        """0 (first) to 255."""
        return self.operation.priority

    @property
    def response_id(self) -> int:
        """The kind of Response that the peer wants; 0 is Success."""
        return self.operation.response_msg_id

    @property
    def idempotency(self) -> bytes:
        """The idempotency key of 16 bytes, or ``b""`` without one."""
        return self.operation.idempotency_key

    @property
    def deadline(self) -> float:
        """When the Response must have begun, on `trio.current_time`'s clock; infinity without a limit, or while the body is still arriving."""
        deadline = self.operation.deadline
        return math.inf if deadline is None or not self._ended else deadline

    async def body(self) -> bytes:
        """Return the whole body; a streaming handler waits for its end here.

        Cancellation:
            the bytes taken so far are kept for the next call.
        """
        if self._whole is None:
            taken: list[bytes | memoryview] = []
            try:
                async for chunk in self:
                    taken.append(chunk)
            except BaseException:
                self._chunks = deque(taken)  # the whole body has arrived and was taken
                raise
            self._whole = b"".join(taken)
        return self._whole

    def __aiter__(self) -> Self:
        """Yield the body piece by piece, as it arrives if the handler is streaming.

        Treat the pieces as provisional until the iteration ends: it ends only if the body was complete and correct; otherwise the handler is
        cancelled. Source: MA-113.
        """
        return self

    async def __anext__(self) -> bytes | memoryview:
        while not self._chunks:
            if self._ended:
                raise StopAsyncIteration
            self._news = trio.Event()
            await self._news.wait()
        chunk = self._chunks.popleft()
        if self.operation.spec.streaming:
            self._connection.consumed(self.operation.stream_id, len(chunk))
        return chunk

    @overload
    def decode(self, expected: type[T]) -> T: ...
    @overload
    def decode(self, expected: Any = Any) -> Any: ...
    def decode(self, expected: Any = Any) -> Any:
        """Read the body as a message, or as any value that the codec knows.

        Raises:
            DecodeError: the body is not such a value; unless the handler catches this, the operation fails with INVALID_FORMAT.
            LocalProtocolError: a streaming handler has not awaited `body`.
        """
        if self._whole is None:
            raise LocalProtocolError("decode() needs the whole body: await call.body() first", rule="MA-113")
        return self._connection.config.codec.decode(self._whole, expected)

    def give(self, whole: bytes) -> None:
        """Take the whole body."""
        self._whole, self._ended = whole, True
        if whole:
            self._chunks = deque((whole,))

    def give_piece(self, piece: bytes | memoryview) -> None:
        """Take a piece of the body."""
        if self._chunks is None:
            self._chunks = deque()
        self._chunks.append(piece)
        self._wake()

    def give_end(self) -> None:
        """Record that the body is complete and correct."""
        self._ended = True
        self._wake()

    def _wake(self) -> None:
        if self._news is not None:
            self._news.set()
            self._news = None


@attrs.frozen(eq=False)
class BeforeExecute:
    """Tells an operation's actor to decide at the gate."""

    call: Call


@attrs.frozen(eq=False)
class StartHandler:
    """Tells an operation's actor to do the work."""

    call: Call


@attrs.frozen(eq=False)
class Raised:
    """Answer of an operation's actor: an exception that its code raised on purpose, which is not a failure of the actor."""

    error: Exception


class OperationActor(Actor[Any], ABC):
    """A handler with its own state for each operation: derive a class and pass it to `serve`, which spawns one actor per operation.

    If the actor fails, its operation fails with EXECUTION_ERROR. If the operation is cancelled, the actor is killed and `on_cancel` runs.
    """

    _cancelled: tuple[Call, str] | None = attrs.field(init=False, default=None)

    async def before_execute(self, call: Call) -> None:
        """Decide whether the operation may begin, without its body; raise `Refuse` to refuse it. Source: MA-113."""

    @abstractmethod
    async def execute(self, call: Call) -> Any:
        """Do the work; the return value answers a Request, see `Handler`. Source: MA-113."""

    async def on_cancel(self, call: Call, reason: str) -> None:
        """Undo the work: called once if `execute` or the transfer was cut short, never after success. Source: MA-113."""

    @handles
    async def on_before(self, m: BeforeExecute) -> Raised | None:
        """Run `before_execute`."""
        try:
            await self.before_execute(m.call)
        except Refuse as error:
            return Raised(error)
        return None

    @handles
    async def on_execute(self, m: StartHandler) -> Any:
        """Run `execute`."""
        try:
            return await self.execute(m.call)
        except (OperationError, DecodeError) as error:
            return Raised(error)

    def cancel(self, call: Call, reason: str) -> None:
        """Kill this actor because its operation is over; `on_cancel` runs first."""
        self._cancelled = (call, reason)
        self.ref.kill()

    async def stopping(self, reason: Reason) -> None:
        """Run `on_cancel` if the operation was cancelled."""
        if self._cancelled is not None:
            await self.on_cancel(*self._cancelled)


Executes: TypeAlias = Callable[[Call], Awaitable[Any]]
Undoes: TypeAlias = Callable[[Call, str], Awaitable[None]]


class Code(Protocol):
    """The user's code for all operations of one kind, or for a single operation."""

    async def before_execute(self, call: Call) -> None:
        """Decide at the gate."""

    async def execute(self, call: Call) -> Any:
        """Do the work."""

    async def undo(self, call: Call, reason: str) -> None:
        """Undo work that was cut short."""


class FunctionCode:
    """The functions of a `Handler`, used for all its operations."""

    __slots__ = ("_before", "_undo", "execute")

    def __init__(self, execute: Executes, before: Executes | None, undo: Undoes | None) -> None:
        self.execute = execute
        self._before = before
        self._undo = undo

    async def before_execute(self, call: Call) -> None:
        """Call the ``before_execute`` function, if there is one."""
        if self._before is not None:
            await self._before(call)

    async def undo(self, call: Call, reason: str) -> None:
        """Call the ``on_cancel`` function, if there is one."""
        if self._undo is not None:
            await self._undo(call, reason)


@attrs.frozen
class Handler:
    """Declaration and code for one msg_id. Source: MA-112, MA-113."""

    execute: Executes | Callable[[], OperationActor]
    """An async function of a `Call`, called when the body is complete (a streaming handler: when its first bytes are here); or a class
    derived from `OperationActor`, made for each operation. Its return value answers a Request: ``None``, bytes, a file, an async iterator, a
    message, or a `Reply`. A Message gets no answer. Raise `OperationError` to choose how the operation fails."""
    spec: HandlerSpec = attrs.field(factory=HandlerSpec, kw_only=True)
    """What the peer may do with this handler."""
    before_execute: Executes | None = attrs.field(default=None, kw_only=True)
    """Called at the gate, without the body; raises `Refuse` to refuse an operation. An `OperationActor` uses its method instead."""
    on_cancel: Undoes | None = attrs.field(default=None, kw_only=True)
    """Called once with the reason if the work or the transfer was cut short. An `OperationActor` uses its method instead."""

    code: Code | None = attrs.field(init=False, eq=False, repr=False)
    """The code for all operations; ``None`` if each operation has its own actor."""

    def __attrs_post_init__(self) -> None:
        made: Any = self.execute
        is_async = inspect.iscoroutinefunction(made) or inspect.iscoroutinefunction(type(made).__call__)
        if not is_async and (self.before_execute is not None or self.on_cancel is not None):
            raise ConfigurationError("an OperationActor has methods of its own: leave out before_execute and on_cancel")
        if inspect.isabstract(made):
            raise ConfigurationError(f"{made.__qualname__} has no method execute")
        if not is_async and not _makes_without_arguments(made):
            raise ConfigurationError(
                f"{made!r} is not a handler: give an async function of a Call, an OperationActor class, or a function that makes one"
            )
        object.__setattr__(self, "code", FunctionCode(made, self.before_execute, self.on_cancel) if is_async else None)

    def declared(self) -> HandlerSpec:
        """Return the declaration; it says that the gate is used if the handler decides there."""
        made: Any = self.execute
        decides = self.before_execute is not None or (
            isinstance(made, type)
            and issubclass(made, OperationActor)
            and made.before_execute is not OperationActor.before_execute
        )
        return attrs.evolve(self.spec, gated=True) if decides and not self.spec.gated else self.spec


def _makes_without_arguments(made: Any) -> bool:
    """Whether a call without arguments may return an actor; a sync function of a `Call` does not qualify."""
    if isinstance(made, type):
        return issubclass(made, OperationActor)
    try:
        inspect.signature(made).bind()
    except TypeError:
        return False
    except ValueError:  # written in C
        return callable(made)
    return True


Handlers: TypeAlias = Mapping[int, "Handler | Executes | type[OperationActor]"]
"""By msg_id, 2 to 65535: a `Handler`, or its code alone with the default declaration."""


def handler_table(handlers: Handlers | None) -> dict[int, Handler]:
    """Return the table with all short forms expanded.

    Raises:
        ConfigurationError: a msg_id is reserved, or an entry is not a handler.
    """
    table: dict[int, Handler] = {}
    for msg_id, given in (handlers or {}).items():
        if not isinstance(msg_id, int) or not 1 < msg_id < 65_536:
            raise ConfigurationError(f"the msg_id of a handler is {msg_id!r}, wanted 2 to 65535; 0 and 1 are native")
        if not callable(given) and not isinstance(given, Handler):
            raise ConfigurationError(
                f"the handler of {msg_id} is not a Handler, an async function or an actor class: {given!r}"
            )
        table[msg_id] = given if isinstance(given, Handler) else Handler(given)
    return table
