"""`strict`: systems that look for mistakes which otherwise show only under load, over a network, or never.

A strict system encodes every message when it is sent and when it is handled, to check that it did not change in between.  Handles inside
(refs, senders, receivers) are counted, not moved.  Messages that the codec cannot encode are not checked, or, with ``codec=True``,
refused at once.  Of levada's own messages only what they carry for the app is checked.  A strict system also checks that each handler
closes its cancel scopes and nurseries (successive handlers of one actor may run in different tasks, and the task of this one goes on with
other actors) and returns no coroutine that it has not awaited.

A violation ends the system and comes out of its block, so no supervisor can hide it.  The cells of a strict system replace the handler
table of their class by a `_StrictTable`, which wraps each handler.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CoroutineType
from typing import Any, ClassVar, cast

import attrs
from trio.lowlevel import current_task

from levada.framework._runtime.ask import Ask, content_of
from levada.framework._runtime.cell import NO_HANDLERS, Cell
from levada.framework._runtime.dispatch import RUNTIME_ENTRIES
from levada.framework._runtime.kinds import StrictBoundedCell, StrictCell, StrictStoreCell
from levada.framework._runtime.scheduler import coroutine_of
from levada.framework._runtime.tokens import Start
from levada.framework._wire import AttachmentKind, kind_of
from levada.framework.codec import Codec
from levada.framework.errors import ConfigurationError, DecodeError, LevadaError
from levada.framework.links import Reason
from levada.framework.ref import DEFAULT_TIMEOUT
from levada.framework.system import ActorSystem

__all__ = ["StrictViolation", "strict"]


class StrictViolation(AssertionError):
    """Code under test broke a rule that `strict` watches over; the text says which, and where."""


def strict(*, codec: bool = False) -> type[ActorSystem]:
    """Return a class of strict systems; use it like `ActorSystem`.

    Besides the checks of ``ActorSystem(strict=True)`` it finds

    * a message that was changed after it was sent and before it was handled;
    * with `codec`, a message that would not survive a connection: its class is no message class, a field holds a wrong value, or the
      decoded message differs (checked in the call that sends it);
    * an end of a channel that is sent again before its first message was handled: its receiver has it. `Sender.clone` makes another;
    * a cancel scope or a nursery that a handler entered and did not leave.  Use `Actor.enter` for longer contexts.

    Each raises `StrictViolation`, on the spot and out of the system's block.

    Example:
        >>> import trio
        >>> from levada.framework import Actor, handles, message
        >>> @message
        ... class Order:
        ...     lines: list[str]
        >>> class Shop(Actor[Order]):
        ...     @handles
        ...     def order(self, m: Order) -> None: ...
        >>> async def main() -> None:
        ...     async with strict()() as system:
        ...         order = Order(["tea"])
        ...         system.spawn(Shop, name="shop").tell(order)
        ...         order.lines.append("milk")
        >>> trio.run(main)
        Traceback (most recent call last):
        ...
        levada.framework.testing.strict.StrictViolation: Order(lines=['tea', 'milk']) was changed between tell and its handling by /shop: ...
    """
    return _CodecSystem if codec else _StrictSystem


@attrs.define
class _Seal:
    """The encoding of a message when it was sent."""

    message: Any
    data: bytes
    halves: list[Any]
    """The ends of channels in the message."""
    pending: int = 1
    """The number of deliveries that have not been handled."""


def _of_app(entry: Any) -> list[Any]:
    """Return the app's messages in a mailbox entry. Entries and messages of levada itself carry them in their fields."""
    message = content_of(entry)
    kind = type(message)
    if not _is_own(kind):
        return [message]
    fields = attrs.fields(kind) if attrs.has(kind) else ()
    values = [getattr(message, field.name, None) for field in fields]
    return [each for each in values if hasattr(type(each), "__message_tag__") and not _is_own(type(each))]


def _is_own(kind: type) -> bool:
    module = kind.__module__
    if module.startswith("levada.framework."):
        return not hasattr(kind, "__message_tag__")
    return module.startswith(("levada.actors.", "levada.transports."))


class _StrictSystem(ActorSystem):
    """An `ActorSystem` with the checks of `strict`."""

    _codec: ClassVar[bool] = False

    def __init__(self, *args: Any, **settings: Any) -> None:
        settings["strict"] = True
        super().__init__(*args, **settings)
        self._seals: dict[int, _Seal] = {}
        """By id; the seal holds the message, so no id is given out again."""
        self._under_way: dict[int, str] = {}
        """Where each end of a channel is being sent to, by its id."""

    def install(self, *args: Any, **keywords: Any) -> Cell:
        cell = super().install(*args, **keywords)
        cell.__class__ = _STRICT[type(cell)]
        return cell

    def strict_check(self, cell: Cell, message: Any) -> None:
        super().strict_check(cell, message)
        for each in _of_app(message):
            self._seal(cell, each)

    def _seal(self, cell: Cell, message: Any) -> None:
        handles = _Handles()
        try:
            data = Codec().encode(message, attachments=handles)
        except (TypeError, ValueError, LevadaError) as error:
            if self._codec:
                raise self.violation(f"{type(message).__name__} for {cell.path} cannot travel: {error}") from error
            return
        if self._codec:
            self._make_round_trip(cell, message, data, handles)
        seal = self._seals.get(id(message))
        if seal is None:
            halves = [each for each in handles.taken if hasattr(each, "take_over")]
            for half in halves:
                if id(half) in self._under_way:
                    to = self._under_way[id(half)]
                    raise self.violation(f"{half!r} was sent to {to}, and again to {cell.path}: it has one owner")
                self._under_way[id(half)] = cell.path
            self._seals[id(message)] = _Seal(message, data, halves)
        elif seal.data != data:
            raise self.violation(f"{message!r} was changed after it was sent and sent again, to {cell.path}: {_WHY}")
        else:
            seal.pending += 1

    def _make_round_trip(self, cell: Cell, message: Any, data: bytes, handles: _Handles) -> None:
        where = f"{type(message).__name__} for {cell.path}"
        try:
            arrived = Codec().decode(data, detach=handles.detach)
        except (DecodeError, ConfigurationError) as error:
            raise self.violation(f"{where} would not arrive: {error}") from error
        if Codec().encode(arrived, attachments=_Handles()) != data or type(arrived) is not type(message):
            raise self.violation(f"{where} would arrive as {arrived!r}, not as {message!r}")

    def unseal(self, cell: Cell, message: Any) -> None:
        """Compare a message that is about to be handled with its encoding when it was sent."""
        for each in _of_app(message):
            seal = self._seals.get(id(each))
            if seal is None:
                continue
            self._opened(seal)
            try:
                data = Codec().encode(each, attachments=_Handles())
            except (TypeError, ValueError, LevadaError):
                data = b""
            if data != seal.data:
                raise self.violation(f"{each!r} was changed between tell and its handling by {cell.path}: {_WHY}")

    def forget(self, message: Any) -> None:
        """Stop tracking a message that will not be handled: its sender may change it again."""
        for each in _of_app(message):
            seal = self._seals.get(id(each))
            if seal is not None:
                self._opened(seal)

    def _opened(self, seal: _Seal) -> None:
        """Count one copy less in the mailboxes."""
        seal.pending -= 1
        if not seal.pending:
            del self._seals[id(seal.message)]
            for half in seal.halves:
                self._under_way.pop(id(half), None)

    def violation(self, text: str) -> StrictViolation:
        """Make the error, and let the system end with it."""
        error = StrictViolation(text)
        self.crash(error)
        return error


class _CodecSystem(_StrictSystem):
    """The same with the round trip of each message."""

    _codec = True


_WHY = "a message belongs to its receiver once it is sent; send a copy, or make the class frozen"


class _Handles:
    """Attachments that are not moved: only their encoding matters here."""

    def __init__(self) -> None:
        self.taken: list[Any] = []

    def attach(self, handle: Any, /) -> tuple[AttachmentKind, int]:
        kind = kind_of(type(handle))
        assert kind is not None
        self.taken.append(handle)
        return kind, len(self.taken) - 1

    def rollback(self) -> None:
        """Nothing was taken."""

    def detach(self, number: int, kind: AttachmentKind, item: Any, note: bytes = b"") -> Any:
        return self.taken[number]


_TABLE: Any = vars(Cell)["_table"]
"""The slot that `_Checks._table` stands before."""


class _Checks(Cell):
    """The checks of a strict system's cells; mixed into each kind of cell."""

    __slots__ = ()

    def _get_table(self) -> dict[Any, Any]:
        table: dict[Any, Any] = _TABLE.__get__(self)
        return table if table is NO_HANDLERS else _StrictTable(table)

    def _set_table(self, table: dict[Any, Any]) -> None:
        _TABLE.__set__(self, table)

    _table: Any = property(_get_table, _set_table)

    async def ask(self, message: Any, *, timeout: float | None = DEFAULT_TIMEOUT) -> Any:
        system = _system_of(self)
        try:
            return await super().ask(message, timeout=timeout)
        except BaseException:
            system.forget(message)  # does nothing if a handler has started with it
            raise

    def take_messages(self) -> list[Any]:
        entries = super().take_messages()
        for entry in entries:
            _system_of(self).forget(entry)
        return entries

    def end(self, reason: Reason) -> Any:
        self.__class__ = _PLAIN[type(self)]  # type: ignore[assignment]
        return self.end(reason)


def _system_of(cell: Cell) -> _StrictSystem:
    return cast("_StrictSystem", cell.system)


class _CheckedCell(_Checks, StrictCell):
    __slots__ = ()


class _CheckedBoundedCell(_Checks, StrictBoundedCell):
    __slots__ = ()

    async def send(self, message: Any) -> None:
        # `send` puts the message in without a tell.
        system = _system_of(self)
        system.strict_check(self, message)
        try:
            await super().send(message)
        except BaseException:
            system.forget(message)
            raise

    def _drop(self, message: Any) -> None:
        _system_of(self).forget(message)
        super()._drop(message)


class _CheckedStoreCell(_Checks, StrictStoreCell):
    __slots__ = ()

    def tell(self, message: Any) -> None:
        if self._key is not None and not isinstance(message, Ask):
            # The older one of this key, if there is one.
            _system_of(self).forget(self._store.get(self._key(content_of(message))))
        super().tell(message)

    def _drop(self, message: Any) -> None:
        _system_of(self).forget(message)
        super()._drop(message)


_STRICT: dict[type[Cell], type[Cell]] = {
    StrictCell: _CheckedCell,
    StrictBoundedCell: _CheckedBoundedCell,
    StrictStoreCell: _CheckedStoreCell,
}
_PLAIN = {checked: plain for plain, checked in _STRICT.items()}


class _StrictTable(dict[Any, Any]):
    """A view of a handler table that wraps each handler of the user in `_Watched`."""

    __slots__ = ("plain",)

    def __init__(self, plain: dict[Any, Any]) -> None:
        super().__init__()
        self.plain = plain

    def __getitem__(self, kind: Any) -> Any:
        if kind is None:
            return {}  # no inline calls: they pass no envelope
        return _watched(kind, self.plain[kind])

    def get(self, kind: Any, default: Any = None) -> Any:
        return self[kind] if kind in self.plain else default

    def __setitem__(self, kind: Any, handler: Any) -> None:
        self.plain[kind] = handler.plain if isinstance(handler, _Watched) else handler


def _watched(kind: Any, handler: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return handler if kind in RUNTIME_ENTRIES and kind is not Start else _Watched(handler)


class _Watched:
    """A handler, and the checks before and after it."""

    __slots__ = ("plain",)

    def __init__(self, plain: Callable[[Any, Any], Any]) -> None:
        self.plain = plain

    def __call__(self, actor: Any, message: Any) -> Any:
        cell = actor._cell
        cell.system.unseal(cell, message)
        before = _open_scope()
        result = None
        try:
            result = self.plain(actor, message)
        finally:
            if _open_scope() is not before:
                self._report(cell, message, "a cancel scope")
                _close_scopes(before)
        coroutine = result if type(result) is CoroutineType else coroutine_of(result)
        return self._finish(cell, message, coroutine) if coroutine is not None else result

    async def _finish(self, cell: Cell, message: Any, coroutine: Any) -> Any:
        before = _open_scope()
        nurseries = current_task().child_nurseries
        count = len(nurseries)
        try:
            result = await coroutine
            if type(result) is CoroutineType:
                system: Any = cell.system
                system.violation(f"{self._name} returned the coroutine {result.__qualname__}: await it")
            return result
        finally:
            if _open_scope() is not before:
                nursery = len(current_task().child_nurseries) > count
                self._report(cell, message, "a nursery" if nursery else "a cancel scope")
                await _close_nurseries(count)
                _close_scopes(before)

    @property
    def _name(self) -> str:
        return getattr(self.plain, "__qualname__", repr(self.plain))

    def _report(self, cell: Cell, message: Any, what: str) -> None:
        system: Any = cell.system
        kind = type(message).__name__
        system.violation(
            f"{self._name} left {what} open when it was done with {kind} in {cell.path}; the next handler may run in another task: use self.enter()"
        )


# trio has no public interface for the open scopes of a task. The next three use its names from 0.27 to 0.35.


def _open_scope() -> Any:
    """Return the status object of the innermost cancel scope of this task; a nursery has one too."""
    task: Any = current_task()
    return task._cancel_status


def _close_scopes(outer: Any) -> None:
    """Leave the scopes that a handler left open, so that the worker's own scope is not corrupted."""
    while (status := _open_scope()) is not outer:
        status._scope.__exit__(None, None, None)


async def _close_nurseries(count: int) -> None:
    while len(nurseries := current_task().child_nurseries) > count:
        nursery: Any = nurseries[-1]
        nursery.cancel_scope.cancel()
        await nursery._nested_child_finished(None)
