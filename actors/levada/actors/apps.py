"""Apps: async generator functions that take an actor system, serve until they are told to end, and yield their listeners.

``levada serve`` runs one app in one process, `levada.actors.nodes` runs it in many.
"""

from __future__ import annotations

import difflib
import gc
import importlib
import inspect
import os
import sys
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import TracebackType
from typing import Any, Final

from levada.actors.protocols import Served
from levada.framework import ActorSystem
from levada.framework.errors import ConfigurationError

from .app_failures import import_failed, passed_app

__all__ = ["App", "app_of", "find", "freeze_heap", "importable", "listed", "reloaded"]

_APP = "an app is an async generator function of the system that yields its listeners"

App = Callable[[ActorSystem], AbstractAsyncContextManager[Any]]
"""Serves until the block is left. It yields its listeners, one or several, or None."""


def _folder() -> str:
    """Return the current folder; empty if it was removed."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return ""


def find(target: str) -> Any:
    """Import the object of ``module:name``.

    Raises:
        AppImportFailed: the module raises while it is imported.
        ConfigurationError: there is no such module, or it has no such name.

    Example:
        >>> find("math:sqroot")
        Traceback (most recent call last):
        ...
        levada.framework.errors.ConfigurationError: nothing is named 'sqroot' in module math; is it 'sqrt'?
    """
    name, colon, attribute = target.partition(":")
    if name.endswith(".py") or "/" in name:
        module = name.removesuffix(".py").strip("./").replace("/", ".")
        raise ConfigurationError(
            f"{target!r} names a file, wanted its module and the app in it: {module}:{attribute or 'app'}"
        )
    if not colon or not all(part.isidentifier() for part in (*name.split("."), *attribute.split("."))):
        raise ConfigurationError(f"expected MODULE:NAME, as in desk:app or shop.desk:app, got {target!r}")
    folder = _folder()
    if folder and folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        found: Any = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise import_failed(name, error, folder) from error  # it is there, and something that it imports is not
        where = folder or "the current folder, which was removed,"
        raise ConfigurationError(f"no module named {error.name!r} in {where} or among the installed packages") from None
    except (Exception, SystemExit) as error:
        raise import_failed(name, error, folder) from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            where = found.__name__ if inspect.isclass(found) else f"module {name}"
            near = difflib.get_close_matches(part, dir(found), 1)
            hint = f"; is it {near[0]!r}?" if near else ""
            raise ConfigurationError(f"nothing is named {part!r} in {where}{hint}")
        found = getattr(found, part)
    return found


def freeze_heap() -> None:
    """Hide everything that this process has made so far from the garbage collector: most of it stays until the end.

    Later collections look only at newer objects. Otherwise each full collection looks at all modules and classes, 45,000 objects in a small
    server, while everything else waits.
    """
    gc.collect()
    gc.freeze()


_AGAIN: Final = ("generator didn't stop", "async generator ignored GeneratorExit")


class _Checked(AbstractAsyncContextManager[Any, "bool | None"]):
    """Runs an app's context manager. An async generator that yields again, after an error too, is a mistake of the app with a sentence."""

    def __init__(self, context: AbstractAsyncContextManager[Any], target: str) -> None:
        self._context = context
        self._target = target

    async def __aenter__(self) -> Any:
        return await self._context.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        try:
            return await self._context.__aexit__(kind, error, traceback)
        except (RuntimeError, BaseExceptionGroup) as wrong:
            if not _yielded_again(wrong, self._target):
                raise
            when = "more than once" if error is None else "again after an error"
            raise ConfigurationError(f"{self._target} yields {when}; {_APP}") from None


def _yielded_again(error: BaseException, target: str) -> bool:
    """Return whether `asynccontextmanager` complains about a further yield. A nursery around that yield wraps how it ends the generator."""
    if isinstance(error, BaseExceptionGroup):
        return any(_yielded_again(each, target) for each in error.exceptions)
    again = isinstance(error, RuntimeError) and str(error).startswith(_AGAIN)
    return isinstance(error, GeneratorExit) or (again and not passed_app(error, target))


class _Generated(AbstractAsyncContextManager[Any, "bool | None"]):
    """Runs an app that is an async generator, as `asynccontextmanager` does, whose first step would complain without the app's name."""

    def __init__(self, steps: AsyncGenerator[Any, None], target: str) -> None:
        self._steps = steps
        self._target = target
        self._context = asynccontextmanager(lambda: steps)()

    async def __aenter__(self) -> Any:
        async for listeners in self._steps:
            return listeners
        raise ConfigurationError(f"{self._target} ended without a yield; {_APP}")

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        return await self._context.__aexit__(kind, error, traceback)


def app_of(found: Any, target: str) -> App:
    """Return an app as a function that makes a context manager.

    Args:
        found: an async generator function, or a function that returns an async context manager.
        target: its name, for the error.

    Raises:
        ConfigurationError: it is neither; at once, or when it is called.
    """
    generates = inspect.isasyncgenfunction(found)
    other = inspect.iscoroutinefunction(found) or inspect.isgeneratorfunction(found)
    if not callable(found) or other or (inspect.isclass(found) and not hasattr(found, "__aenter__")):
        raise ConfigurationError(f"{target} is no app: {_APP}; got {found!r}")
    make: Any = found

    def begin(system: ActorSystem) -> AbstractAsyncContextManager[Any]:
        try:
            context = make(system)
        except TypeError as error:
            raise ConfigurationError(f"{target} is no app, as it does not take a system ({error}); {_APP}") from error
        if generates:
            context = _Generated(context, target)
        if not isinstance(context, AbstractAsyncContextManager):
            raise ConfigurationError(f"{target} gave {context!r}, expected an async context manager; {_APP}")
        return _Checked(context, target)

    return begin


def importable(thing: Any) -> str:
    """Return ``module:name`` of a function or class that another process can import.

    Args:
        thing: the function or class, or already such a text.

    Raises:
        ConfigurationError: it is in the program's main module or inside a function, or it has no name.

    Example:
        >>> from collections import OrderedDict
        >>> importable(OrderedDict)
        'collections:OrderedDict'
    """
    name = (
        thing if isinstance(thing, str) else f"{getattr(thing, '__module__', '')}:{getattr(thing, '__qualname__', '')}"
    )
    module, colon, attribute = name.partition(":")
    if module in ("__main__", "__mp_main__"):
        raise ConfigurationError(
            f"{attribute} is in the main module, which other processes cannot import: move it into a module of its own"
        )
    if "<" in attribute:
        raise ConfigurationError(
            f"{attribute} is inside a function, so other processes cannot import it: move it to the top of its module"
        )
    if not colon or not all(part.isidentifier() for part in (*module.split("."), *attribute.split("."))):
        raise ConfigurationError(f"expected something that can be imported, or MODULE:NAME, got {thing!r}")
    return name


def listed(listeners: Any, target: str) -> list[Served]:
    """Return the listeners that an app yields as a list.

    Args:
        listeners: one or several, or None.
        target: the name of the app, for the error.

    Raises:
        ConfigurationError: it is neither listeners nor None.
    """
    found: list[Any]
    if listeners is None:
        found = []
    elif isinstance(listeners, Iterable) and not isinstance(listeners, str | bytes):
        found = list(listeners)
    else:
        found = [listeners]
    for listener in found:
        if not hasattr(listener, "url"):
            raise ConfigurationError(
                f"{target} yields {listener!r}; an app yields its listeners, which `async with serve(…)` gives, one or several, or nothing"
            )
    return found


def reloaded(listeners: Iterable[Served]) -> list[str]:
    """Reload the certificate and token files of listeners. Return a line for each listener with files."""
    lines = []
    for listener in listeners:
        reload = getattr(listener, "reload", None)
        if reload is None:
            continue
        try:
            reload()
        except ConfigurationError as error:
            lines.append(f"{listener.url} keeps its old files: {error}")
        else:
            lines.append(f"{listener.url} has read its files again")
    return lines
