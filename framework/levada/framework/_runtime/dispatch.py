"""Handlers for mailbox entries that are not plain messages; they are part of every handler table.

Each function has the signature of a handler, ``(actor, entry)``. It may return `END_TURN`, or a coroutine, which is driven like that of an
async handler.

Private fields used here: ``Cell._asking``, ``Actor._cell``, ``Actor._find_handler``, ``Cell._handled``,
``Actor._start``, ``Cell._table``.
"""

from __future__ import annotations

from types import CoroutineType
from typing import Any

from levada.framework.timers import Tick

from .ask import Ask, RemoteAsk, RemoteTell, ThreadAsk
from .scheduler import InlineCoroutine, coroutine_of
from .tokens import END_TURN, EndTurn, Start, Stop, Take, TakeSignal, WakeSenders
from .tracing import TracedAsk, TracedTell, TracedThreadAsk, traced

__all__ = ["RUNTIME_ENTRIES", "deliver"]


def deliver(actor: Any, message: Any) -> Any:
    """Handle a message that came inside another entry."""
    table = actor._cell._table
    handler = table.get(type(message))
    if handler is None:
        handler = actor._find_handler(type(message), table)
    return handler(actor, message)


def no_message(actor: Any) -> None:
    """Uncount an entry that is not a message."""
    actor._cell._handled -= 1


def _on_start(actor: Any, start: Start) -> Any:
    no_message(actor)
    actor._cell.entry_left(start)
    return actor._start()


def _on_stop(actor: Any, stop: Stop) -> Any:
    no_message(actor)
    cell = actor._cell
    cell.entry_left(stop)
    return cell.system.lifecycle.reached_stop(cell, stop)


def _on_room(actor: Any, _: WakeSenders) -> None:
    no_message(actor)
    actor._cell.let_in()


def _on_take(actor: Any, take: Take) -> Any:
    actor._cell.entry_left(take)
    return deliver(actor, take.next(actor._cell))


def _on_turn(actor: Any, _: EndTurn) -> Any:
    no_message(actor)
    return END_TURN


def _on_tick(actor: Any, tick: Tick) -> Any:
    actor._cell.entry_left(tick)
    if tick.alarm.take():
        return deliver(actor, tick.alarm.message)
    no_message(actor)
    return None


def _on_ask(actor: Any, ask: Ask) -> Any:
    if ask.settled:
        no_message(actor)
        ask.pass_over()
        return None  # withdrawn or timed out: no task waits for the answer
    cell = actor._cell
    cell._asking = ask
    result = deliver(actor, ask.message)
    coroutine = result
    if result is not None and type(result) is not CoroutineType:
        coroutine = coroutine_of(result)
    if coroutine is not None:
        return _finish_ask(cell, ask, coroutine)
    if cell._asking is ask:
        cell._asking = None
        ask.answer(result)
    return None


def _on_brought(actor: Any, brought: RemoteTell | RemoteAsk) -> Any:
    return traced(_for_peer, actor, brought) if actor._cell.traced else _for_peer(actor, brought)


def _on_traced_tell(actor: Any, tell: TracedTell) -> Any:
    return traced(_open_tell, actor, tell)


def _open_tell(actor: Any, tell: TracedTell) -> Any:
    return deliver(actor, tell.message)


def _on_traced_ask(actor: Any, ask: Ask) -> Any:
    return traced(_on_ask, actor, ask)


def _for_peer(actor: Any, brought: RemoteTell | RemoteAsk) -> Any:
    extras = actor._cell.make_extras()
    extras.brought = brought
    coroutine = None
    try:
        coroutine = deliver(actor, brought.message) if isinstance(brought, RemoteTell) else _on_ask(actor, brought)
        if coroutine is not None and type(coroutine) is not CoroutineType:
            coroutine = coroutine_of(coroutine)
        return None if coroutine is None else _finish_for_peer(extras, coroutine)
    finally:
        if coroutine is None:
            extras.brought = None


async def _finish_for_peer(extras: Any, coroutine: Any) -> None:
    try:
        await coroutine
    finally:
        extras.brought = None


async def _finish_ask(cell: Any, ask: Ask, coroutine: Any) -> None:
    result = await coroutine
    if cell._asking is ask:
        cell._asking = None
        ask.answer(result)


def _on_inline_coroutine(actor: Any, started: InlineCoroutine) -> Any:
    no_message(actor)  # the inline call counted it
    return _finish_ask(actor._cell, started.question, started.coroutine)


RUNTIME_ENTRIES: dict[type, Any] = {
    Ask: _on_ask,
    InlineCoroutine: _on_inline_coroutine,
    TakeSignal: _on_take,
    WakeSenders: _on_room,
    Start: _on_start,
    Stop: _on_stop,
    RemoteAsk: _on_brought,
    RemoteTell: _on_brought,
    Take: _on_take,
    ThreadAsk: _on_ask,
    Tick: _on_tick,
    TracedAsk: _on_traced_ask,
    TracedTell: _on_traced_tell,
    TracedThreadAsk: _on_traced_ask,
    EndTurn: _on_turn,
}
