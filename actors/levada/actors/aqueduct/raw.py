"""Messages as bytes, for peers that have no message classes: other implementations, and tools."""

from __future__ import annotations

from typing import Any, ClassVar

import attrs

from levada.framework.codec import Attachments

__all__ = ["RawMessage"]


def _handles(handles: Any) -> tuple[Any, ...]:
    return tuple(handles)


@attrs.frozen(eq=False)
class RawMessage:
    """A message as bytes, without a codec.

    Channels of it (``connect(…, RawMessage)``, ``serve(…, RawMessage)``, ``channel(RawMessage)``) work with any program at the peer.

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
        ...         serve(system, "aqueduct+memory://echo", echo, RawMessage) as listener,
        ...         connect(system, listener.url, RawMessage) as peer,
        ...     ):
        ...         sender, answers = channel(RawMessage)
        ...         await peer.send(RawMessage(b"hello", [sender]))
        ...         print((await answers.receive()).payload)
        >>> trio.run(main)
        b'hello'
    """

    payload: bytes = attrs.field(default=b"", validator=attrs.validators.instance_of(bytes))
    """The bytes."""
    carries_attachments: ClassVar[bool] = True
    attachments: tuple[Any, ...] = attrs.field(default=(), converter=_handles)
    """Handles that travel with the bytes, by index: senders, receivers and oneshots. On arrival they are handles of `RawMessage` again.
    The receiver of a message must finish or close all of them."""


def encode_raw(message: Any, limit: int, attachments: Attachments) -> bytes:
    """Return the bytes of a message and take its handles; a failure gives them back.

    Raises:
        TypeError: the message is not a `RawMessage`, or one of its handles is not a handle.
        ValueError: the message has more than `limit` bytes.
        LevadaError: from ``attachments.attach``.
    """
    if not isinstance(message, RawMessage):
        raise TypeError(f"expected RawMessage, got {type(message).__qualname__}")
    if len(message.payload) > limit:
        raise ValueError(f"{len(message.payload)} bytes, at most {limit} (max_message)")
    try:
        for handle in message.attachments:
            attachments.attach(handle)
    except BaseException:
        attachments.rollback()
        raise
    return message.payload
