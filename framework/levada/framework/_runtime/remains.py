"""Cleaning up after an actor object: the channel handles in its fields, and the frames that its failure passed through.

Neither may wait for the garbage collector.  A kept error keeps its traceback, the traceback keeps frames, a frame keeps the actor, and the
actor keeps its handles. So a reader at the other end of a channel would wait for as long as anything keeps the error.  Therefore:

* `end_handles` ends the handles in the fields of an actor that ends or restarts;
* an error that was logged and goes no further keeps the lines of its traceback but not the frames (`drop_frames`).

Private fields used here: ``Actor._slots``.
"""

from __future__ import annotations

import dis
import functools
import inspect
import types
from collections.abc import Iterator
from traceback import walk_tb
from typing import Any

from levada.framework.links import Reason

from .channel_core import handles_in, may_hold

__all__ = ["drop_frames", "end_handles", "open_handles", "without_frames"]


def end_handles(handles: list[Any], reason: Reason) -> None:
    """End the channels whose handles an actor held when it ended: senders cancel, receivers close."""
    for handle in handles:
        handle.disown(reason)


def open_handles(actor: Any) -> list[Any]:
    """List the handles in an actor's fields whose channels are open, and that were not moved, finished or bound to a mailbox."""
    fields: list[Any] = []
    for value in vars(actor).values():
        kind: type = type(value)
        if may_hold(kind):  # most actors have none; then this is the whole cost, 0.1 µs for each field
            fields.append(value)
    for name in type(actor)._slots:
        fields.append(getattr(actor, name, None))
    return [handle for handle in handles_in(fields, sampled=True) if handle.in_use] if fields else fields


def drop_frames(error: BaseException) -> None:
    """Remove the frames from the tracebacks of an error, its causes and its contexts, and keep the lines.

    This takes two steps.  A cleared frame still refers to its caller, so the error of an ask would keep the asker's variables: the traceback
    is rebuilt from frames without callers.  Code that has caught the error may keep the old traceback, so its frames are cleared too.
    """
    todo: list[BaseException | None] = [error]
    seen: set[int] = set()
    while todo:
        one = todo.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        todo += (one.__cause__, one.__context__)
        if isinstance(one, BaseExceptionGroup):
            todo += one.exceptions
        if one.__traceback__ is not None and one.__traceback__.tb_frame.f_globals is not _NOWHERE:
            old = one.__traceback__
            BaseException.with_traceback(one, without_frames(old))  # an assignment fails on a frozen dataclass
            for frame, _ in walk_tb(old):
                _clear(frame)


def _clear(frame: types.FrameType) -> None:
    # On Python 3.11 and 3.12 `clear` would close a waiting generator or coroutine; later versions refuse.
    if not frame.f_code.co_flags & _GENERATES or frame.f_code.co_code[frame.f_lasti] != _YIELD:
        try:
            frame.clear()
        except RuntimeError:
            pass  # the frame is running


_YIELD = dis.opmap["YIELD_VALUE"]
_GENERATES = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR

_NOWHERE: dict[str, Any] = {}
"""The globals of all frames made by `without_frames`."""


def _nothing() -> Iterator[None]:
    yield


@functools.lru_cache(256)
def _name_only(code: types.CodeType) -> types.CodeType:
    """Make code that does nothing and looks like `code` in a traceback."""
    return _nothing.__code__.replace(
        co_filename=code.co_filename,
        co_name=code.co_name,
        co_qualname=code.co_qualname,
        co_firstlineno=code.co_firstlineno,
    )


def without_frames(traceback: types.TracebackType | None) -> types.TracebackType | None:
    """Make a traceback with the same lines from empty frames: frames of generators that never run."""
    entries: list[types.TracebackType] = []
    entry = traceback
    while entry is not None:
        entries.append(entry)
        entry = entry.tb_next
    made: types.TracebackType | None = None
    for entry in reversed(entries):
        frame = types.FunctionType(_name_only(entry.tb_frame.f_code), _NOWHERE)().gi_frame
        made = types.TracebackType(made, frame, -1, entry.tb_lineno)
    return made
