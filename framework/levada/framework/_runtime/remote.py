"""The peer whose message is being handled: `Actor.peer` and `current_peer`.

* A message that came over a connection is in the mailbox as a `RemoteTell` or a `RemoteAsk`. All other messages are there without a wrapper,
  so this costs them nothing.
* While the message's handler runs or waits, `Extras.brought` is that entry. A restart, a stash and a router keep the entry and with it the
  peer; an actor that passes on the message itself sends a local message.
* Between such messages, an actor that a connection has spawned has the peer of the connection.
* Code that runs as a task and not as a handler says for which peer it acts (`act_for`).
* An actor may run a method of another one, as RSocket's streams do with routes. Then `Actor.peer` is the peer of the running actor.

Private fields used here: ``Cell._actor``, ``Cell._extras``, ``Actor._is_connection``, ``Cell._parent``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from levada.framework.identity import RemotePeer

from .scheduler import SOURCE

if TYPE_CHECKING:
    from .cell import Cell

__all__ = ["act_for", "current_peer", "peer_of"]


def act_for(peer: RemotePeer | None) -> None:
    """Make `current_peer` return `peer` in this task, and in the tasks that it starts."""
    SOURCE.set(peer)


def peer_of(cell: Cell | None) -> RemotePeer | None:
    """Return the peer for which the running code acts. If no actor is running, `cell` decides."""
    source = SOURCE.get()
    if isinstance(source, RemotePeer):
        return source
    if source is not None:
        worker = None if source.inline is not None else source.current_worker()
        cell = source.inline or (worker.cell if worker is not None else None) or cell
    if cell is None:
        return None
    extras = cell._extras
    if extras is not None and extras.brought is not None:
        peer: RemotePeer | None = extras.brought.peer
        return peer
    for near in (cell, cell._parent):
        actor = near._actor if near is not None else None
        if actor is not None and actor._is_connection:
            return actor.remote_peer  # type: ignore[no-any-return]
    return None


def current_peer() -> RemotePeer | None:
    """Return the peer for which the running code acts: `Actor.peer`, for functions that are handlers.

    Returns:
        The peer of the connection whose message is being handled. None in other code, and for local messages.
    """
    return peer_of(None)
