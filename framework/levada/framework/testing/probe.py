"""`Probe`: an actor for tests.

Private fields used here: ``Cell._asking``.
"""

from __future__ import annotations

import reprlib
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar, overload

import trio

from levada.framework._runtime.ask import Reply
from levada.framework.actor import Actor
from levada.framework.handlers import handles
from levada.framework.ref import Ref
from levada.framework.system import ActorSystem

__all__ = ["Probe"]

T = TypeVar("T")

_ANY: Any = object()


class Probe:
    """An actor that keeps its messages, in order, until the test takes them. Times are seconds on trio's clock.

    A test expects a class, a predicate (a function of a message), or a value that the message must equal.
    A probe survives the end of linked actors: it gets `Exit` messages.

    Args:
        system: where its actor is spawned, a running system.
        name: of the actor.

    Example:
        >>> import trio
        >>> from levada.framework import ActorSystem, Asks, message
        >>> @message
        ... class Price:
        ...     bid: float
        >>> @message
        ... class Ready(Asks[bool]):
        ...     pass
        >>> async def main() -> None:
        ...     async with ActorSystem() as system, trio.open_nursery() as nursery:
        ...         probe = Probe(system)
        ...         probe.ref.tell(Price(1.08))
        ...         print(await probe.expect(Price))
        ...         nursery.start_soon(probe.ref.ask, Ready())
        ...         await probe.expect(Ready)
        ...         probe.reply(True)
        >>> trio.run(main)
        Price(bid=1.08)
    """

    def __init__(self, system: ActorSystem, *, name: str | None = None) -> None:
        self._queue: deque[tuple[Any, Reply[Any] | None]] = deque()
        self._parked = trio.lowlevel.ParkingLot()
        self._question: Reply[Any] | None = None
        self._last: Any = None
        self._actor = _ProbeActor(self)
        self.ref: Ref[Any] = system.spawn(lambda: self._actor, name=name)
        """The ref to give to the code under test."""
        self.received: list[Any] = []
        """Every message so far, taken or not."""

    @overload
    async def expect(self, what: type[T], *, within: float = 3.0) -> T: ...
    @overload
    async def expect(self, what: Callable[[Any], object], *, within: float = 3.0) -> Any: ...
    @overload
    async def expect(self, what: T, *, within: float = 3.0) -> T: ...
    @overload
    async def expect(self, *, within: float = 3.0) -> Any: ...
    async def expect(self, what: Any = _ANY, *, within: float = 3.0) -> Any:
        """Take the next message, which must match `what`; by default any message does.

        Raises:
            AssertionError: it does not match (it is taken in any case), or none came in time.

        Cancellation: no message was taken.
        """
        message = await self._next(what, trio.current_time() + within, within)
        assert _fits(message, what), f"expected {_text(what)}, got {reprlib.repr(message)}"
        return message

    @overload
    async def fish(self, what: type[T], *, within: float = 3.0) -> T: ...
    @overload
    async def fish(self, what: Callable[[Any], object], *, within: float = 3.0) -> Any: ...
    @overload
    async def fish(self, what: T, *, within: float = 3.0) -> T: ...
    async def fish(self, what: Any, *, within: float = 3.0) -> Any:
        """Take messages until one matches `what`; drop the others.

        Raises:
            AssertionError: none came in time; lists the others.

        Cancellation: dropped messages are gone from the queue; they are still in `received`.
        """
        deadline = trio.current_time() + within
        while True:
            message = await self._next(what, deadline, within)
            if _fits(message, what):
                return message

    async def expect_none(self, *, during: float = 1.0) -> None:
        """Wait for `during` seconds; raise `AssertionError` if a message is queued or comes. It stays in the queue."""
        with trio.move_on_after(during):
            await self._wait()
        assert not self._queue, f"expected no message for {during:g} s, got {reprlib.repr(self._queue[0][0])}"

    def reply(self, value: Any) -> None:
        """Answer the last question from `expect` or `fish`; raise `AssertionError` if it was no ask or has an answer."""
        self._take_question().send(value)

    def fail(self, error: Exception) -> None:
        """Fail the last question from `expect` or `fish` with `error`; otherwise like `reply`."""
        self._take_question().fail(error)

    def watch(self, ref: Any) -> None:
        """Get a `Down` message when an actor or a channel ends."""
        self._actor.watch(ref)

    def _take_question(self) -> Reply[Any]:
        question, self._question = self._question, None
        assert question is not None, f"{reprlib.repr(self._last)} waits for no answer"
        return question

    def _keep(self, message: Any, question: Reply[Any] | None) -> None:
        self._queue.append((message, question))
        self.received.append(message)
        self._parked.unpark_all()

    async def _wait(self) -> None:
        while not self._queue:
            await self._parked.park()

    async def _next(self, what: Any, deadline: float, within: float) -> Any:
        with trio.CancelScope(deadline=deadline):
            await self._wait()
        if not self._queue:
            so_far = ", ".join(map(reprlib.repr, self.received[-5:])) or "nothing"
            raise AssertionError(f"expected {_text(what)} within {within:g} s; came so far: {so_far}")
        self._last, self._question = self._queue.popleft()
        return self._last

    def __repr__(self) -> str:
        return f"<Probe {self.ref.path}, {len(self._queue)} waiting>"


def _fits(message: Any, what: Any) -> bool:
    if what is _ANY:
        return True
    if isinstance(what, type):
        return isinstance(message, what)
    return bool(what(message) if callable(what) else message == what)


def _text(what: Any) -> str:
    if what is _ANY:
        return "a message"
    if callable(what):
        return getattr(what, "__qualname__", repr(what))
    return reprlib.repr(what)


class _ProbeActor(Actor[Any]):
    trap_exits = True

    probe: Probe

    @handles
    def keep(self, m: object) -> None:
        question = self._bound()._asking
        is_ask = question is not None and question.message is m
        self.probe._keep(m, self.reply_later() if is_ask else None)
