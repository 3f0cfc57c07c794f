"""Handlers: the values that a user may pass to `connect` and `serve`, and how a request reaches its handler.

The annotation of a route method's parameter decides its argument:

====================================  ================================================================================
annotation                            gets
====================================  ================================================================================
none, or `Request`                    the request
`Payload`, `bytes`                    the payload; its data
a message class                       the data, decoded
``Receiver[…]`` of one of these       all payloads of a channel (of another request: the one it has), each as that
====================================  ================================================================================

A route method runs in the actor of its stream, not in the mailbox of the object it belongs to. So a slow method does not hold up others,
and several may be under way on one object. All run in one thread, so nothing changes between two awaits. An exception fails the stream,
not the object.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import attrs

from levada.framework import Actor, Receiver, Ref
from levada.framework.embedding import ask_for, send_for
from levada.framework.errors import ConfigurationError
from levada.framework.handlers import unprotected
from levada.framework.text import printable
from levada.transports.rsocket import Payload
from levada.transports.rsocket.events import Interaction

from .errors import ApplicationError, RequestInvalid, RequestRejected
from .requests import Request, Responder

__all__ = ["Handler", "Routes", "make_responder", "route"]

F = TypeVar("F", bound=Callable[..., Any])

_MARK = "__levada_route__"

Handler = Callable[[Request], Any] | Callable[[], Actor[Any]] | type[Actor[Any]] | Ref[Any] | None
"""An async (or sync) function of one `Request`; an actor class with `route` methods, or a `functools.partial` of one; a ref that answers
messages; or ``None``, which refuses all requests.

The answer is a `Payload`, bytes, a message, ``None`` for nothing, or, for streams and channels, an async iterable of these."""


def route(name: str) -> Callable[[F], F]:
    """Mark a method of an actor class as the handler of one route.

    It may be sync or async and return one answer, or be an async generator, or return a `Receiver` or another async iterable.

    Example:
        >>> from levada.framework import Actor
        >>> class Desk(Actor):
        ...     @route("double")
        ...     async def double(self, data: bytes) -> bytes:
        ...         return data * 2
        ...     @route("count")
        ...     async def count(self, data: bytes):
        ...         for number in range(int(data)):
        ...             yield b"%d" % number
    """
    frame = sys._getframe(1)
    names = {**(frame.f_back.f_locals if frame.f_back is not None else {}), **frame.f_locals}

    def mark(function: F) -> F:
        setattr(function, _MARK, (name, names))
        unprotected(function)
        return function

    return mark


@attrs.frozen
class _Route:
    """One route method and how to call it."""

    method: str
    arguments: tuple[Callable[[Request], Any], ...]

    def call(self, actor: Actor[Any], request: Request) -> Any:
        return getattr(actor, self.method)(*[argument(request) for argument in self.arguments])


class Routes:
    """The routes of an actor class, and the object that answers them for one connection.

    Args:
        factory: makes the object; called again if the actor restarts.
    """

    def __init__(self, factory: Callable[[], Actor[Any]], table: dict[str, _Route]) -> None:
        self._factory = factory
        self._table = table
        self._actor: Actor[Any] | None = None

    def make(self) -> Actor[Any]:
        """Make the object that answers from now on; a factory for `Actor.spawn`."""
        self._actor = self._factory()
        return self._actor

    def __call__(self, request: Request) -> Any:
        """Call the method of the request's route."""
        name = request.route
        found = self._table.get(name)
        if found is None:
            # Without composite metadata, it may have 64 MiB.
            raise ApplicationError(f"unknown route: {printable(name)}" if name else "the request names no route")
        if self._actor is None:
            raise RequestRejected("the handler has ended")
        return found.call(self._actor, request)


def make_responder(handler: Handler) -> Responder:
    """Return the function that answers the requests of one connection.

    Raises:
        ConfigurationError: `handler` is no handler of any kind, or an actor class with no route or with a route that cannot be called.
    """
    if handler is None:
        return _refuse
    if isinstance(handler, Ref):
        return functools.partial(_ask, handler)
    cls = handler.func if isinstance(handler, functools.partial) else handler
    if isinstance(cls, type):
        if not issubclass(cls, Actor):
            raise ConfigurationError(f"{cls.__name__} is no actor class")
        return Routes(handler, route_table(cls))  # type: ignore[arg-type]  # calling it makes the actor
    if not callable(handler):
        raise ConfigurationError(f"the handler is {handler!r}, wanted a function, an actor class or a ref")
    responder: Responder = unprotected(handler)
    return responder


def _refuse(_: Request) -> Any:
    raise RequestRejected("no handler")


async def _ask(ref: Ref[Any], request: Request) -> Any:
    if not request.holds_message:
        raise RequestInvalid("only messages are answered here")
    message = request.message()
    if request.kind is Interaction.FIRE_AND_FORGET:
        await send_for(request.peer, ref, message)
        return None
    return await ask_for(request.peer, ref, message)


@functools.cache
def route_table(cls: type[Actor[Any]]) -> dict[str, _Route]:
    """Collect the routes of a class and its bases."""
    table: dict[str, _Route] = {}
    for name in dir(cls):
        function = inspect.getattr_static(cls, name, None)
        marked = getattr(function, _MARK, None)
        if marked is not None:
            path, names = marked
            if path in table:
                raise ConfigurationError(
                    f"{cls.__name__} has the route {path!r} twice: {table[path].method} and {name}"
                )
            table[path] = _Route(name, _arguments(cls, function, names))
    if not table:
        raise ConfigurationError(
            f'{cls.__name__} has no method with @route: mark those that answer requests, as in @route("quote")'
        )
    return table


def _arguments(cls: type, function: Any, names: dict[str, Any]) -> tuple[Callable[[Request], Any], ...]:
    where = f"{cls.__name__}.{function.__name__}"
    try:
        hints = get_type_hints(function, function.__globals__, names)
    except Exception as error:
        raise ConfigurationError(f"{where}: cannot resolve its annotations ({error})") from error
    parameters = list(inspect.signature(function).parameters)[1:]
    return tuple(_argument(where, hints.get(parameter, Request)) for parameter in parameters)


def _argument(where: str, annotation: Any) -> Callable[[Request], Any]:
    if annotation is Request or annotation is Any:
        return lambda request: request
    if get_origin(annotation) is Receiver or annotation is Receiver:
        item = _converter(where, (get_args(annotation) or (Payload,))[0])
        return lambda request: request.receive(functools.partial(item, request))
    converter = _converter(where, annotation)
    return lambda request: converter(request, request.payload)


def _converter(where: str, annotation: Any) -> Callable[[Request, Payload], Any]:
    if annotation is Payload or annotation is Any:
        return lambda _, payload: payload
    if annotation is bytes:
        return lambda _, payload: payload.data
    if hasattr(annotation, "__message_tag__"):
        return lambda request, payload: request.read(payload, annotation)
    raise ConfigurationError(
        f"{where}: the argument of a route is {annotation!r}, wanted Request, Payload, bytes, a message class or a Receiver of these"
    )
