"""Handlers: what a program does with the operations of its peers, and what it sees of each."""

from __future__ import annotations

import inspect
import math
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

    from .peer import Peer

__all__ = [
    "BeforeExecute", "Call", "Code", "Execute", "Handler", "Handlers", "OperationActor", "Raised", "Reply", "handler_table",
]  # fmt: skip

T = TypeVar("T")


@attrs.frozen
class Reply:
    """An answer with more than octets."""

    body: Body = b""
    """See `Body`."""
    content_type: str | None = None
    """Of a Success; ``None`` for the usual one of such a body."""
    length: int | None = None
    """Octets that an async iterator will give; ``None`` for undefined length."""


class Call:
    """One operation of a peer, as its handler sees it. Source: MA-114."""

    __slots__ = ("_body", "_chunks", "_consumed", "_ended", "_news", "_whole", "operation", "peer")

    def __init__(self, operation: Received, peer: Peer, consumed: Callable[[int, int], None] | None) -> None:
        self.operation = operation
        """Its header: ``msg_id``, ``length``, ``priority``, …"""
        self.peer = peer
        """Whose it is; calls of one's own may be made on it."""
        self._consumed = consumed
        self._whole: bytes | None = None
        self._chunks: deque[bytes | memoryview] | None = None  # made when wanted: an empty one takes 760 octets
        self._ended = False
        self._news: trio.Event | None = None

    @property
    def msg_id(self) -> int:
        """Names the handler."""
        return self.operation.msg_id

    @property
    def stream_id(self) -> int:
        """Its identity within the session."""
        return self.operation.stream_id

    @property
    def is_request(self) -> bool:
        """Whether a Response is wanted; else a Message."""
        return self.operation.is_request

    @property
    def length(self) -> int | None:
        """Octets announced; ``None`` for undefined length."""
        return self.operation.length

    @property
    def priority(self) -> int:
        """0 (first) to 255."""
        return self.operation.priority

    @property
    def response_id(self) -> int:
        """Kind of Response that is wanted; 0 is Success."""
        return self.operation.response_msg_id

    @property
    def idempotency(self) -> bytes:
        """The idempotency key, 16 octets or none."""
        return self.operation.idempotency_key

    @property
    def deadline(self) -> float:
        """When the Response must have begun, on `trio.current_time`'s clock; infinity without limit, or while the body comes."""
        deadline = self.operation.deadline
        return math.inf if deadline is None or not self._ended else deadline

    async def body(self) -> bytes:
        """Return the whole body; a streaming handler waits for its end here.

        Cancellation:
            what was taken is kept for the next call.
        """
        if self._whole is None:
            taken: list[bytes | memoryview] = []
            try:
                async for chunk in self:
                    taken.append(chunk)
            except BaseException:
                self._chunks = deque(taken)  # all that had come was taken
                raise
            self._whole = b"".join(taken)
        return self._whole

    def __aiter__(self) -> Self:
        """Give the body piece by piece, as it comes if the handler is streaming.

        Nothing that is done with it counts before the end was seen: the iteration ends only if the body was complete and right; else the
        handler is cancelled. Source: MA-113.
        """
        return self

    async def __anext__(self) -> bytes | memoryview:
        while not self._chunks:
            if self._ended:
                raise StopAsyncIteration
            self._news = trio.Event()
            await self._news.wait()
        chunk = self._chunks.popleft()
        if self._consumed is not None:
            self._consumed(self.operation.stream_id, len(chunk))
        return chunk

    @overload
    def decode(self, expected: type[T]) -> T: ...
    @overload
    def decode(self, expected: Any = Any) -> Any: ...
    def decode(self, expected: Any = Any) -> Any:
        """Read the body as a message, or as any value that the codec knows.

        Raises:
            DecodeError: it is none; the operation fails by INVALID_FORMAT unless the handler catches this.
            LocalProtocolError: a streaming handler has not awaited `body`.
        """
        if self._whole is None:
            raise LocalProtocolError("decode() needs the whole body: await call.body() first", rule="MA-113")
        return self.peer.codec.decode(self._whole, expected)

    def give(self, whole: bytes) -> None:
        """The body is here."""
        self._whole, self._ended = whole, True
        if whole:
            self._chunks = deque((whole,))

    def give_piece(self, piece: bytes | memoryview) -> None:
        """A piece of it is."""
        if self._chunks is None:
            self._chunks = deque()
        self._chunks.append(piece)
        self._wake()

    def give_end(self) -> None:
        """It is complete and right."""
        self._ended = True
        self._wake()

    def _wake(self) -> None:
        if self._news is not None:
            self._news.set()
            self._news = None


@attrs.frozen(eq=False)
class BeforeExecute:
    """To an operation's actor: decide at the gate."""

    call: Call


@attrs.frozen(eq=False)
class Execute:
    """To an operation's actor: do the work."""

    call: Call


@attrs.frozen(eq=False)
class Raised:
    """An answer of an operation's actor: what it raised on purpose, which is no failure of the actor."""

    error: Exception


class OperationActor(Actor[Any]):
    """A handler with state of its own for each operation: derive, and give the class to `serve`. One is spawned for each operation.

    Its failure is the operation's, by EXECUTION_ERROR; when the operation is cancelled, it is killed and `on_cancel` runs.
    """

    _cancelled: tuple[Call, str] | None = attrs.field(init=False, default=None)

    async def before_execute(self, call: Call) -> None:
        """Decide whether the operation may begin, without its body; raise `Refuse` to turn it down. Source: MA-113."""

    async def execute(self, call: Call) -> Any:
        """Do the work; what is returned is the answer to a Request, see `Handler`. Source: MA-113."""
        raise NotImplementedError

    async def on_cancel(self, call: Call, reason: str) -> None:
        """Undo: called once if `execute` or the transfer was cut short, never after success. Source: MA-113."""

    @handles
    async def on_before(self, m: BeforeExecute) -> Raised | None:
        """See `before_execute`."""
        try:
            await self.before_execute(m.call)
        except Refuse as error:
            return Raised(error)
        return None

    @handles
    async def on_execute(self, m: Execute) -> Any:
        """See `execute`."""
        try:
            return await self.execute(m.call)
        except (OperationError, DecodeError) as error:
            return Raised(error)

    def cancel(self, call: Call, reason: str) -> None:
        """End it, because its operation is over."""
        self._cancelled = (call, reason)
        self.ref.kill()

    async def stopping(self, reason: Reason) -> None:
        """See `Actor.stopping`."""
        if self._cancelled is not None:
            await self.on_cancel(*self._cancelled)


Executes: TypeAlias = Callable[[Call], Awaitable[Any]]
Undoes: TypeAlias = Callable[[Call, str], Awaitable[None]]


class Code(Protocol):
    """What runs for operations of one kind, or for one."""

    async def before_execute(self, call: Call) -> None:
        """Decide at the gate."""

    async def execute(self, call: Call) -> Any:
        """Do the work."""

    async def undo(self, call: Call, reason: str) -> None:
        """It was cut short."""

    def close(self) -> None:
        """The operation has ended."""


class FunctionCode:
    """Functions of a `Handler`, for all its operations."""

    __slots__ = ("_before", "_undo", "execute")

    def __init__(self, execute: Executes, before: Executes | None, undo: Undoes | None) -> None:
        self.execute = execute
        self._before = before
        self._undo = undo

    async def before_execute(self, call: Call) -> None:
        """See `Code`."""
        if self._before is not None:
            await self._before(call)

    async def undo(self, call: Call, reason: str) -> None:
        """See `Code`."""
        if self._undo is not None:
            await self._undo(call, reason)

    def close(self) -> None:
        """See `Code`."""


@attrs.frozen
class Handler:
    """What is done with one msg_id: declaration and code. Source: MA-112, MA-113."""

    execute: Executes | Callable[[], OperationActor]
    """An async function of a `Call`, called when the body is complete (a streaming handler: when its first octets are here); or a class
    derived from `OperationActor`, made for each operation. The answer to a Request is what it returns: ``None``, octets, a file, an async
    iterator, a message, or a `Reply`; to a Message nothing is answered. Raise `OperationError` to choose how the operation fails."""
    spec: HandlerSpec = attrs.field(factory=HandlerSpec, kw_only=True)
    """What the peer may do with it."""
    before_execute: Executes | None = attrs.field(default=None, kw_only=True)
    """Called at the gate, without the body; raises `Refuse` to turn an operation down. Of an actor it is the method."""
    on_cancel: Undoes | None = attrs.field(default=None, kw_only=True)
    """Called once with the reason if the work or the transfer was cut short. Of an actor it is the method."""

    code: Code | None = attrs.field(init=False, eq=False, repr=False)
    """What runs; ``None`` if an actor is made for each operation."""

    def __attrs_post_init__(self) -> None:
        made: Any = self.execute
        is_async = inspect.iscoroutinefunction(made) or inspect.iscoroutinefunction(type(made).__call__)
        if not is_async and (self.before_execute is not None or self.on_cancel is not None):
            raise ConfigurationError("the methods of an actor decide and undo: give no functions for that")
        if not is_async and not _makes_without_arguments(made):
            raise ConfigurationError(
                f"{made!r} handles nothing: it is no async function of a Call, and no OperationActor or function that makes one"
            )
        object.__setattr__(self, "code", FunctionCode(made, self.before_execute, self.on_cancel) if is_async else None)

    def declared(self) -> HandlerSpec:
        """Return the declaration; one who decides at the gate is asked there."""
        made: Any = self.execute
        decides = self.before_execute is not None or (
            isinstance(made, type)
            and issubclass(made, OperationActor)
            and made.before_execute is not OperationActor.before_execute
        )
        return attrs.evolve(self.spec, gated=True) if decides and not self.spec.gated else self.spec


def _makes_without_arguments(made: Any) -> bool:
    """Whether a call without arguments may give an actor; a function of a `Call` that is not async may not."""
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
"""By msg_id, 2 to 65535: a `Handler`, or one whose declaration is the default."""


def handler_table(handlers: Handlers | None) -> dict[int, Handler]:
    """Complete short forms.

    Raises:
        ConfigurationError: a msg_id that is no application's, or something that handles nothing.
    """
    table: dict[int, Handler] = {}
    for msg_id, given in (handlers or {}).items():
        if not isinstance(msg_id, int) or not 1 < msg_id < 65_536:
            raise ConfigurationError(f"handlers have msg_ids from 2 to 65535, not {msg_id!r}; 0 and 1 are native")
        if not callable(given) and not isinstance(given, Handler):
            raise ConfigurationError(f"the handler of {msg_id} is no Handler, async function or actor class: {given!r}")
        table[msg_id] = given if isinstance(given, Handler) else Handler(given)
    return table
