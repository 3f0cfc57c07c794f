"""`FakeRef`: a ref with nothing behind it."""

# ruff: noqa: D102 - the methods of a ref are described in levada.framework.ref

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import trio

from levada.framework._runtime.ask import Ask
from levada.framework._runtime.cell import Cell
from levada.framework._runtime.phase import RUNNING, STOPPED, ActorPhase
from levada.framework.errors import ActorStopped
from levada.framework.links import KILLED, NORMAL, SHUTDOWN, Exit, Reason
from levada.framework.ref import DEFAULT_TIMEOUT, FromThread, Ref

__all__ = ["FakeRef"]


class FakeRef(Ref[Any]):
    """A ref that records all calls, for code under test that needs a `Ref`: in fields, watched, linked, in groups.

    It needs no system. Only `ask`, `send` and `terminated` need a trio run.

    Args:
        answers: for each class of question the answer; a function (not a class) is called with the question; an exception is raised.
            A subclass of a question gets the answer of its base.
        path: what `path` says.

    Example:
        >>> import trio
        >>> from levada.framework import Asks, message
        >>> @message
        ... class Total(Asks[int]):
        ...     account: str
        >>> bank = FakeRef({Total: lambda question: len(question.account)})
        >>> bank.tell("hello")
        >>> trio.run(bank.ask, Total("abc"))
        3
        >>> bank.told, bank.asked
        (['hello'], [Total(account='abc')])
    """

    __slots__ = (
        "__weakref__", "_gone", "_links", "_path", "_watchers", "answers", "asked", "exits", "reason", "sent", "stops",
        "told",
    )  # fmt: skip

    def __init__(self, answers: Mapping[type, Any] | None = None, *, path: str = "/fake") -> None:
        self._path = path
        self.answers = dict(answers or {})
        """Answers by class of question; may be changed at any time."""
        self.told: list[Any] = []
        """Messages of `tell`, from other threads too."""
        self.sent: list[Any] = []
        """Messages of `send`."""
        self.asked: list[Any] = []
        """Questions."""
        self.stops: list[str] = []
        """``"stop"``, ``"stop now"`` and ``"kill"``, in order. Each of them ends it."""
        self.exits: list[Exit] = []
        """Exit signals of linked actors; it survives them."""
        self.reason: Reason | None = None
        """Why it ended, or ``None``."""
        self._watchers: dict[Hashable, Callable[[Reason], None]] = {}
        self._gone: trio.Event | None = None
        self._links: dict[Cell, None] = {}

    def end(self, reason: Reason = NORMAL) -> None:
        """End, as an actor would: watchers get their `Down`, linked actors their exit signal; once only."""
        if self.reason is not None:
            return
        self.reason = reason
        if self._gone is not None:
            self._gone.set()
        for ended in list(self._watchers.values()):
            ended(reason)
        self._watchers.clear()
        links, self._links = self._links, {}
        for cell in links:
            cell.exited(self, reason)

    @property
    def path(self) -> str:
        return self._path

    @property
    def incarnation(self) -> int:
        return id(self)

    @property
    def is_alive(self) -> bool:
        return self.reason is None

    def tell(self, message: Any) -> None:
        self.told.append(message)

    async def send(self, message: Any) -> None:
        await trio.lowlevel.checkpoint()
        self._refuse_if_ended(message)
        self.sent.append(message)

    async def ask(self, message: Any, *, timeout: float | None = DEFAULT_TIMEOUT) -> Any:
        """Answer from `answers`; AssertionError if there is none for this class of question."""
        await trio.lowlevel.checkpoint()
        return self._answer(message)

    def stop(self, *, now: bool = False) -> None:
        self.stops.append("stop now" if now else "stop")
        self.end(SHUTDOWN)

    def kill(self) -> None:
        self.stops.append("kill")
        self.end(KILLED)

    async def terminated(self) -> Reason:
        await trio.lowlevel.checkpoint()
        if self.reason is None:
            if self._gone is None:
                self._gone = trio.Event()
            await self._gone.wait()
        assert self.reason is not None
        return self.reason

    @property
    def from_thread(self) -> FromThread[Any]:
        return _FakeFromThread(self)

    def _answer(self, message: Any) -> Any:
        self._refuse_if_ended(message)
        self.asked.append(message)
        for base in type(message).__mro__:
            if base in self.answers:
                answer = self.answers[base]
                if isinstance(answer, BaseException):
                    raise answer
                return answer(message) if callable(answer) and not isinstance(answer, type) else answer
        raise AssertionError(f"{self!r} has no answer to {message!r}: FakeRef({{{type(message).__name__}: …}})")

    def _refuse_if_ended(self, message: Any) -> None:
        if self.reason is not None:
            what = f"{self.path} has stopped ({type(self.reason).__name__.lower()})"
            raise ActorStopped(what, actor=self.path, reason=self.reason, message=message)

    def try_tell(self, message: Any) -> bool:
        """Record a message from a channel as told."""
        self._refuse_if_ended(message)
        self.told.append(message)
        return True

    def on_room(self, callback: Callable[[], None]) -> Callable[[], None]:
        """There is always room."""
        callback()
        return lambda: None

    def on_stopped(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call back at the end, at once if it has come."""
        key = object()
        self.add_watcher(key, lambda _: callback())
        return lambda: self.forget_watcher(key)

    def enqueue(self, question: Ask) -> None:
        """Take the envelope of an ask that a router hands on."""
        try:
            question.answer(self._answer(question.message))
        except Exception as error:  # noqa: BLE001 - whatever the table says to raise is for the asker
            question.fail(error)

    def depth(self) -> int:
        return len(self.told) + len(self.sent)

    def add_watcher(self, key: Hashable, ended: Callable[[Reason], None]) -> None:
        if self.reason is not None:
            ended(self.reason)
        else:
            self._watchers[key] = ended

    def forget_watcher(self, key: Hashable) -> None:
        self._watchers.pop(key, None)

    def tie(self, other: Cell) -> None:
        self._links[other] = None

    def untie(self, other: Cell) -> None:
        self._links.pop(other, None)

    def exited(self, other: Cell, reason: Reason) -> None:
        self.untie(other)
        self.exits.append(Exit(other, reason))

    @property
    def phase(self) -> ActorPhase:
        """Running until `end`."""
        return RUNNING if self.reason is None else STOPPED


class _FakeFromThread(FromThread[Any]):
    __slots__ = ("_ref",)

    def __init__(self, ref: FakeRef) -> None:
        self._ref = ref

    def tell(self, message: Any) -> None:
        self._ref.tell(message)

    def ask(self, message: Any, *, timeout: float | None = DEFAULT_TIMEOUT) -> Any:
        return self._ref._answer(message)
