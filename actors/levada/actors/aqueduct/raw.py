"""Messages as octets, for peers that have no message classes: other implementations, and tools."""

from __future__ import annotations

from typing import Any, ClassVar

import attrs

from levada.framework.codec import Attachments

__all__ = ["RawMessage"]


def _handles(handles: Any) -> tuple[Any, ...]:
    return tuple(handles)


@attrs.frozen(eq=False)
class RawMessage:
    """A message that no codec has touched.

    Channels of it (``connect(…, RawMessage)``, ``serve(…, message_type=RawMessage)``, ``channel(RawMessage)``) lead to any program at the peer.

    Example:
        >>> import trio
        >>> from levada.actors.aqueduct import RawMessage, connect, serve
        >>> from levada.framework import ActorSystem, channel
        >>> async def echo(m: RawMessage) -> None:
        ...     async with m.attachments[0] as sender:
        ...         await sender.send(RawMessage(m.payload))
        >>> async def main() -> None:
        ...     async with (
        ...         ActorSystem() as system,
        ...         serve(system, "aqueduct+memory://echo", echo, message_type=RawMessage) as listener,
        ...         connect(system, listener.url, RawMessage) as peer,
        ...     ):
        ...         sender, answers = channel(RawMessage)
        ...         await peer.send(RawMessage(b"hello", [sender]))
        ...         print((await answers.receive()).payload)
        >>> trio.run(main)
        b'hello'
    """

    payload: bytes = attrs.field(default=b"", validator=attrs.validators.instance_of(bytes))
    """The octets."""
    carries_attachments: ClassVar[bool] = True
    attachments: tuple[Any, ...] = attrs.field(default=(), converter=_handles)
    """Handles that travel with them, by index: senders and receivers, oneshots too. Those that arrive are of `RawMessage` again.
    Whoever gets a message finishes or closes all of them."""


def encode_raw(message: Any, limit: int, attachments: Attachments) -> bytes:
    """Give the octets of a message and take its handles; a failure gives them back.

    Raises:
        TypeError: it is no `RawMessage`, or one of its handles is none.
        ValueError: more than `limit` octets.
        LevadaError: from ``attachments.attach``.
    """
    if not isinstance(message, RawMessage):
        raise TypeError(f"expected RawMessage, got {type(message).__qualname__}")
    if len(message.payload) > limit:
        raise ValueError(f"{len(message.payload)} octets, at most {limit} (max_message)")
    try:
        for handle in message.attachments:
            attachments.attach(handle)
    except BaseException:
        attachments.rollback()
        raise
    return message.payload
