"""Awaitables that a handler may return: coroutines, and anything else that ``await`` accepts."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Coroutine
from types import GeneratorType
from typing import Any

from trio.lowlevel import disable_ki_protection

__all__ = ["coroutine_of", "is_generator_function"]


def coroutine_of(result: Any) -> Coroutine[Any, Any, Any] | None:
    """Wrap an awaitable that is no coroutine in one: of compiled code, of `types.coroutine`, of a class with ``__await__``.

    Returns:
        The coroutine. ``None`` for a value that cannot be awaited, and for channel handles: these are answers, although some can be awaited.
    """
    kind = type(result)
    if hasattr(kind, "__await__"):
        return None if hasattr(kind, "attachment_kind") else _drive(result)
    if kind is GeneratorType and result.gi_code.co_flags & inspect.CO_ITERABLE_COROUTINE:
        return _drive(result)
    return None


@disable_ki_protection
async def _drive(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


def is_generator_function(function: Any) -> bool:
    """Whether a call makes a generator that cannot be awaited; a generator of `types.coroutine` can."""
    if inspect.isasyncgenfunction(function):
        return True
    return inspect.isgeneratorfunction(function) and not function.__code__.co_flags & inspect.CO_ITERABLE_COROUTINE
