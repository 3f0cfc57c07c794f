"""Handler tables: from the class of a message to its handler, built when an actor class is defined."""

from __future__ import annotations

import functools
import inspect
import sys
import types
from abc import ABCMeta
from collections import abc
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Final,
    Generic,
    Literal,
    TypeVar,
    Union,
    get_args,
    get_origin,
    is_typeddict,
    overload,
)

import outcome
from trio.lowlevel import disable_ki_protection

from ._runtime.dispatch import RUNTIME_ENTRIES
from .annotations import expand
from .errors import ConfigurationError
from .message import Answered, Asks, Unasked, reply_type
from .text import text_of

__all__ = [
    "Behaviour", "blocking", "build_table", "find_handler", "flatten", "handles", "refuse_generator", "unprotected",
]  # fmt: skip

M_co = TypeVar("M_co", covariant=True)
M_contra = TypeVar("M_contra", contravariant=True)
A_co = TypeVar("A_co", covariant=True)
M = TypeVar("M")
R = TypeVar("R")
S = TypeVar("S")
F = TypeVar("F", bound=Callable[..., Any])

_MARK = "__levada_handles__"


class _Marked:
    """The arguments of `@handles`, kept until the class is complete."""

    def __init__(self, types_: tuple[Any, ...], names: dict[str, Any]) -> None:
        self.types = types_
        self.names = names


class _Handler(Generic[M_co, A_co]):
    """A handler of `M_co` that answers with an `A_co`, for type checkers: this is how pyright compares an answer with its question.

    pyright finds both types by ``handles.__new__``, then binds them to the ``self`` of this ``__init__``.  An `Answered` fixes its `R`, so an
    answer of another type does not fit; a message that is not a question is `Unasked`, and leaves `R` to the answer.  mypy reads the
    ``__new__`` alone.  A handler is covariant in its message only here: one that overrides another may take more, and not less.
    """

    if TYPE_CHECKING:

        def __init__(
            self: _Handler[Unasked | Answered[R], R | Awaitable[R | None] | None], *message_types: Any
        ) -> None: ...


class handles(_Handler[M_contra, A_co]):  # type: ignore[type-var]  # pyright: ignore[reportInvalidTypeArguments]  # noqa: N801
    """Mark a method as the handler of a class of messages, a union of classes, or several.

    Bare ``@handles`` reads the annotation of the method's parameter; ``@handles(T)`` always works.  The method may be sync or async.
    Its return value is the answer to an ask.
    """

    @overload
    def __new__(cls, *message_types: type | types.UnionType | None) -> _Marks: ...
    @overload
    def __new__(cls, function: Callable[[S, M_contra], A_co], /) -> handles[M_contra, A_co]: ...  # pyright: ignore[reportOverlappingOverload]
    @overload
    def __new__(cls, *message_types: Any) -> _Marks: ...
    def __new__(cls, *message_types: Any) -> Any:  # noqa: D102 - the class says it
        frame = sys._getframe(1)
        names: dict[str, Any] = {}
        outer = frame.f_back
        if outer is not None and outer.f_globals is frame.f_globals and outer.f_locals is not outer.f_globals:
            names.update(outer.f_locals)
        names.update(frame.f_locals)
        above = dict(frame.f_locals) if "__qualname__" in frame.f_locals else {}  # in the body of the class

        def mark(function: F, message_types: tuple[Any, ...] = message_types) -> F:
            if not hasattr(function, "__code__"):
                raise _no_method(function, text_of(function, repr))
            if is_handler(above.get(function.__name__)):
                raise ConfigurationError(
                    f"{function.__qualname__} is the name of two handlers: the second would replace the first"
                )
            setattr(function, _MARK, _Marked(message_types, names))
            return function

        if len(message_types) == 1:
            if inspect.isfunction(message_types[0]):
                return mark(message_types[0], ())
            found = message_types[0]
            if hasattr(found, "__wrapped__") and not isinstance(found, type):  # functools.cache around it
                raise _no_method(found, getattr(found, "__qualname__", text_of(found, repr)))
            if isinstance(found, (*_DESCRIPTORS, functools.partial, functools.partialmethod)):
                raise _no_method(found, text_of(found, repr))
        return mark

    if TYPE_CHECKING:

        @overload
        def __get__(self, actor: None, owner: type) -> Callable[[Any, M_contra], A_co]: ...
        @overload
        def __get__(self, actor: object, owner: type) -> Callable[[M_contra], A_co]: ...
        def __get__(self, actor: object, owner: type) -> Any: ...

        @overload  # what a decorator above `handles` takes
        def __call__(self, actor: Any, message: M_contra, /) -> A_co: ...
        @overload  # what pyright compares with the method of a protocol
        def __call__(self, m: M_contra) -> A_co: ...
        def __call__(self, *message: Any, **named: Any) -> Any: ...  # noqa: D102


if TYPE_CHECKING:

    class _Marks(handles[Any, Any]):
        """What ``@handles(T)`` makes of a method: the method."""

        def __call__(self, function: F, /) -> F: ...  # type: ignore[override]


def flatten(annotation: Any) -> list[type]:
    """List the classes in an annotation: the members of a union, the class of a generic alias."""
    annotation = expand(annotation)
    if get_origin(annotation) in (Union, types.UnionType):
        return [kind for part in get_args(annotation) for kind in flatten(part)]
    if annotation is None:
        return [type(None)]
    if annotation is Any:
        return [object]
    origin = get_origin(annotation)
    return [origin if origin is not None else annotation]


def _message_types(owner: str, function: Callable[..., Any]) -> list[type]:
    marked: _Marked = getattr(function, _MARK)
    where = f"{owner}.{function.__name__}"
    refuse_generator(function, where)
    if marked.types:
        found = [kind for annotation in marked.types for kind in flatten(annotation)]
    else:
        plain = inspect.unwrap(function)
        parameters = list(plain.__code__.co_varnames[: plain.__code__.co_argcount])
        if len(parameters) != 2:
            raise ConfigurationError(f"the handler {where} takes {parameters!r}, wanted self and one message")
        annotation = plain.__annotations__.get(parameters[1])
        if annotation is None:
            raise ConfigurationError(
                f"{where}: annotate {parameters[1]!r} with the message class, or write @handles(TheClass)"
            )
        if isinstance(annotation, str):
            try:
                annotation = eval(annotation, plain.__globals__, marked.names)
            except Exception as error:
                raise ConfigurationError(
                    f"{where}: cannot resolve the annotation {annotation!r} ({error}); define the class first or write @handles(TheClass)"
                ) from error
        found = flatten(annotation)
    for kind in found:
        if not isinstance(kind, type):
            raise ConfigurationError(f"{where}: {kind!r} is not a class of messages")
    _check_answer(where, function, found, marked.names)
    marked.types, marked.names = tuple(found), {}
    return found


def _check_answer(where: str, function: Any, kinds: Sequence[type], names: dict[str, Any]) -> None:
    """Refuse a handler whose annotation says that its answer is never what a question promises. What is not certain is accepted."""
    plain = inspect.unwrap(function)
    answer = getattr(plain, "__annotations__", {}).get("return", Any)
    for kind in kinds:
        if not issubclass(kind, Asks) or kind is Asks:
            continue
        try:
            while isinstance(answer, str):
                answer = eval(answer, plain.__globals__, names)
            promised = reply_type(kind)
        except Exception:  # noqa: BLE001 - a name that is defined later; type checkers know it
            continue
        if not _may_answer(answer, promised):
            asks = f"Asks[{_shown(promised)}]"
            raise ConfigurationError(
                f"{where} answers with {_shown(answer)}, and {kind.__name__} is {asks}: correct one of the two"
            )


def _may_answer(answer: Any, promised: Any) -> bool:
    """Whether a handler with this annotation may answer with a value of the promised type.

    A handler that answers later (`Actor.reply_later`) may be annotated with None.
    """
    if get_origin(answer) in (abc.Awaitable, abc.Coroutine):
        return _may_answer(get_args(answer)[-1], promised)
    return answer is None or _overlap(answer, promised)


def _overlap(one: Any, other: Any) -> bool:
    """Whether a value may be of both types, as far as their outermost classes say."""
    ones, others = _members(one), _members(other)
    return any(_classes_overlap(first, second) for first in ones for second in others)


def _members(annotation: Any) -> list[Any]:
    """List the classes of an annotation; for all that is not a class, `Any`."""
    annotation = expand(annotation)
    origin = get_origin(annotation)
    if origin in (Union, types.UnionType):
        return [kind for part in get_args(annotation) for kind in _members(part)]
    if origin is Literal:
        return [type(value) for value in get_args(annotation)]
    if annotation is None:
        return [type(None)]
    kind = origin or annotation
    return [kind if isinstance(kind, type) else Any]


_WIDER = {(int, float), (int, complex), (float, complex), (bytearray, bytes), (memoryview, bytes)}
"""Where the second is wanted, type checkers take the first (PEP 484), so a function of the second may return it."""


def _classes_overlap(one: Any, other: Any) -> bool:
    # A class may have subclasses that are virtual, or be described by a protocol: of abstract classes nothing is certain.
    if one is Any or other is Any or any(isinstance(kind, ABCMeta) or is_typeddict(kind) for kind in (one, other)):
        return True
    return issubclass(one, other) or issubclass(other, one) or bool({(one, other), (other, one)} & _WIDER)


def _shown(annotation: Any) -> str:
    return annotation.__qualname__ if type(annotation) is type else str(annotation)


def refuse_generator(function: Any, where: str) -> None:
    """Raise `ConfigurationError` if `function` yields: the runtime would not run the generator."""
    if _makes_generator(function):
        raise ConfigurationError(
            f"{where} yields, but the runtime does not run generators; return or await instead, and send several values by a channel"
        )


def _makes_generator(function: Any) -> bool:
    """Whether a call makes a generator that cannot be awaited; a generator of `types.coroutine` can."""
    if inspect.isasyncgenfunction(function):
        return True
    return inspect.isgeneratorfunction(function) and not function.__code__.co_flags & inspect.CO_ITERABLE_COROUTINE


def is_handler(function: object) -> bool:
    """Whether a method was marked with `handles`."""
    return hasattr(function, _MARK)


_DESCRIPTORS: Final = (staticmethod, classmethod, property, functools.cached_property)


def _no_method(found: object, where: str) -> ConfigurationError:
    return ConfigurationError(
        f"{where} is a {type(found).__name__}: a handler is a plain method of self and one message"
    )


def _hides(base: type, name: str, value: object, handlers: Iterable[str]) -> ConfigurationError | None:
    """Return the error for what is no handler, although it looks like one or has the name of one."""
    if isinstance(value, _DESCRIPTORS):
        inner = getattr(value, "__func__", None) or getattr(value, "fget", None) or getattr(value, "func", None)
        if is_handler(inner) or name in handlers:
            return _no_method(value, f"{base.__name__}.{name}")
    elif name in handlers and not callable(value):
        return ConfigurationError(
            f"{base.__name__}.{name} hides the handler of that name of a base: give it another name"
        )
    return None


def build_table(cls: type) -> dict[Any, Any]:
    """Collect the handlers of a class and its bases; a subclass's handler replaces its base's."""
    table: dict[Any, Any] = {}
    names: dict[Any, str] = {}
    for base in reversed(cls.__mro__):
        here: dict[Any, str] = {}
        for name, function in list(vars(base).items()):
            if (hidden := _hides(base, name, function, names.values())) is not None:
                raise hidden
            if not is_handler(function):
                # A method that overrides a base's handler handles the same class of messages.
                for kind, known in names.items():
                    if known == name and inspect.isfunction(function):
                        refuse_generator(function, f"{base.__name__}.{name}")
                        _check_answer(f"{base.__name__}.{name}", function, [kind], {})
                        table[kind] = unprotected(function)
                continue
            for kind in _message_types(base.__name__, function):
                if kind in here:
                    raise ConfigurationError(
                        f"{base.__name__} handles {kind.__name__} twice: in {here[kind]} and in {name}"
                    )
                here[kind] = name
                table[kind] = unprotected(function)
        for kind, known in names.items():
            if known in here.values() and kind not in here:
                raise ConfigurationError(
                    f"{base.__name__}.{known} replaces the handler of {kind.__name__} and does not handle it: give it another name"
                )
        for field in vars(base).get("__attrs_attrs__", ()):
            if field.name in names.values() and not field.inherited:
                raise ConfigurationError(
                    f"{base.__name__}.{field.name} is a field, and hides the handler of that name: rename one"
                )
        names.update(here)
    # Under None: the sync handlers, which an ask may call inline.
    table[None] = {kind: handler for kind, handler in table.items() if not inspect.iscoroutinefunction(handler)}
    table.update(RUNTIME_ENTRIES)
    return table


def unprotected(function: Any) -> Any:
    """Allow Ctrl-C to interrupt the user's code, although the runtime that calls it is protected."""
    if hasattr(function, "__code__"):
        disable_ki_protection(function)
    return function


def find_handler(kind: type, table: dict[Any, Any]) -> Any:
    """Return the handler of a message class or of its nearest base, and cache it in the table; ``None`` if there is none."""
    for base in kind.__mro__:
        handler = table.get(base)
        if handler is not None:
            table[kind] = handler
            if base in table[None]:
                table[None][kind] = handler
            return handler
    return None


def blocking(function: Callable[[Any, M], R]) -> Callable[[Any, M], Awaitable[R]]:
    """Run a sync handler in a thread, at most ``blocking_threads`` (a setting of the system) at a time.

    The actor handles nothing else meanwhile; other actors go on.  Write it below ``@handles``.  A thread cannot be cancelled: a killed
    actor waits for it.
    """
    refuse_generator(function, function.__qualname__)
    if inspect.iscoroutinefunction(function):
        raise ConfigurationError(f"{function.__qualname__} is async, and waits without a thread: leave @blocking out")

    @functools.wraps(function)
    async def in_thread(self: Any, message: M) -> R:
        system = self.system
        done: outcome.Outcome[R] = await system.platform.run_in_thread(
            _captured, function, [(self, message)], limiter=system.blocking_limiter
        )
        return done.unwrap()

    return in_thread


def _captured(function: Callable[..., R], given: list[tuple[Any, ...]]) -> outcome.Outcome[R]:
    """Call with the arguments in `given`. The frames of an error have those of the thread as callers, which must keep no message."""
    try:
        return outcome.Value(function(*given.pop()))
    except BaseException as error:  # noqa: BLE001 - it is raised in the actor's task
        return outcome.Error(error)


class Behaviour:
    """A set of handlers for `Actor.become`: derive and write ``@handles`` methods. ``self`` is the actor; there are no instances."""

    _table: ClassVar[dict[Any, Any]]

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        cls._table = build_table(cls)
