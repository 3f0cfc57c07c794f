"""``levada call aqueduct://…`` and ``levada serve --url aqueduct://…``.

``levada call`` sends one message to the entrypoint, with a sender in it on which the answers come back.
It does not have the message classes of the server, so a message is given by its tag and its fields, and answers are shown the same way
(`levada.actors.explain.values`). Without a tag the message is plain bytes, for peers that have no message classes.
"""

from __future__ import annotations

import argparse
import base64
import inspect
import json
import re
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, get_args, get_origin, get_type_hints

import msgpack

from levada.actors.aqueduct import AqueductConfig, Listener, Peer, PeerConfig, RawMessage, connect
from levada.actors.aqueduct import serve as serve_aqueduct
from levada.actors.aqueduct.envelopes import ANSWER, ASK, TELL, read_failure
from levada.actors.aqueduct.halves import CODEC, REASONS, CancelReason, Unreadable, give_up
from levada.actors.authentication import Authenticate
from levada.actors.cli.calls import CallFailed, bytes_of, carrier_for, in_time, print_all, print_bytes, token_of
from levada.actors.cli.terminal import shown
from levada.actors.explain.values import EXT_ATTACHMENT, EXT_MESSAGE, Tagged, as_json, as_text, read_value
from levada.framework import Actor, ActorSystem, OneshotReceiver, Receiver, Sender, channel, oneshot
from levada.framework.codec import AttachmentKind
from levada.framework.errors import ChannelError, ConfigurationError, ConnectionLost, DecodeError
from levada.framework.message import tag_of
from levada.framework.text import printable

__all__ = ["REPLY", "add_arguments", "call", "message_bytes", "message_type_of", "serve"]

REPLY = "@reply"
"""Stands among the fields for the sender on which the answers come back."""


def serve(
    system: ActorSystem,
    url: str,
    handler: Any,
    *,
    carrier: Any,
    drain_timeout: float,
    authenticate: Authenticate | None,
) -> AbstractAsyncContextManager[Listener]:
    """Serve one handler. Its annotation says which messages clients may send."""
    config = PeerConfig(carrier=carrier, core=AqueductConfig(drain_timeout=drain_timeout))
    return serve_aqueduct(system, url, handler, message_type_of(handler), authenticate=authenticate, config=config)


def message_type_of(handler: Any) -> Any:
    """Return the type of the messages that a handler takes.

    Args:
        handler: an async function with an annotated parameter, or a class derived from ``Actor[…]``.

    Raises:
        ConfigurationError: the handler does not say what it takes.

    Example:
        >>> async def take(price: float) -> None: ...
        >>> message_type_of(take)
        <class 'float'>
    """
    if inspect.isclass(handler):
        types = [get_args(base)[0] for base in getattr(handler, "__orig_bases__", ()) if get_origin(base) is Actor]
    else:
        hints = get_type_hints(handler)
        types = [hints[name] for name in [*inspect.signature(handler).parameters][:1] if name in hints]
    if not types:
        raise ConfigurationError(
            f"{handler.__name__} must say which messages clients may send: annotate its parameter, or derive it from Actor[Message]; "
            "typing.Any allows every message class"
        )
    return types[0]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of Aqueduct."""
    group = parser.add_argument_group(
        "aqueduct",
        "A sender travels in the message, and the answers come on it: one answer, or many with --stream; with --fnf there is none.",
    )
    group.add_argument(
        "--tag",
        metavar="TAG",
        help="send a message of the class with this tag; --data is a JSON array of its fields in the order of their definition, "
        'with "@reply" in place of the sender (default: last). Without --tag the message is the bytes of --data',
    )
    group.add_argument(
        "--lookup",
        metavar="NAME",
        help="ask the actor that the server exposes under this name, instead of its handler; the message is a question and has no sender",
    )


async def call(args: argparse.Namespace) -> None:
    """Send, and print the answer.

    Raises:
        CallFailed: it was not delivered, or there was no answer.
        ConfigurationError: the arguments are invalid.
        ConnectionLost: no server answers there.
    """
    if args.kind in ("channel", "push"):
        raise ConfigurationError(f"--{args.kind} is not for aqueduct: use --reply, --stream or --fnf")
    data = args.data or []
    if len(data) > 1:
        raise ConfigurationError("aqueduct takes one --data")
    given = bytes_of(data[0]) if data else b""
    kind = {"response": AttachmentKind.ONESHOT_SENDER, "stream": AttachmentKind.SENDER}.get(args.kind)
    if args.lookup is not None:
        if args.tag is None or args.kind == "stream":
            raise ConfigurationError("--lookup needs --tag, and gets one answer, or none with --fnf")
        kind = None
    payload = given if args.tag is None else message_bytes(args.tag, _fields(given), kind)
    # A message with a tag is written by the codec, and so is its answer.
    config = PeerConfig(carrier=carrier_for(args), headers=() if args.tag is None else (CODEC, REASONS))
    async with (
        ActorSystem("call") as system,
        in_time(connect(system, args.url, RawMessage, token=token_of(args), config=config), args) as peer,
    ):
        try:
            await (_exchange if args.lookup is None else _ask)(peer, payload, args)
        except ConnectionLost:
            raise
        except ChannelError as error:
            raise CallFailed(str(error)) from None


async def _exchange(peer: Peer[RawMessage], payload: bytes, args: argparse.Namespace) -> None:
    if args.kind == "fnf":
        receipt = await peer.send(RawMessage(payload), receipt=True)
        if not await receipt:
            raise CallFailed("the server did not take the message")
        return
    receiver: Receiver[RawMessage] | OneshotReceiver[RawMessage]
    sender, receiver = channel(RawMessage) if args.kind == "stream" else oneshot(RawMessage)
    with sender, receiver:
        await peer.send(RawMessage(payload, [sender]))
        if isinstance(receiver, OneshotReceiver):
            _print(args, await receiver)
        else:
            await print_all(receiver, args, partial(_print, args))


async def _ask(peer: Peer[RawMessage], payload: bytes, args: argparse.Namespace) -> None:
    """Look up an actor, and ask or tell it. Source: ``docs/protocols/aqueduct-refs.md``."""
    lookup = message_bytes("levada.lookup", [args.lookup], AttachmentKind.ONESHOT_SENDER)
    found = await _answer(peer.entry, lookup)
    ref = found.attachments[0] if len(found.attachments) == 1 else None
    if not isinstance(ref, Sender):
        give_up(found.attachments)
        raise CallFailed(f"no actor named {args.lookup!r} is exposed there")
    with ref:
        if args.kind == "fnf":
            if not await (await ref.send(RawMessage(TELL + payload), receipt=True)):
                raise CallFailed("the server did not take the message")
            return
        answer = await _answer(ref, ASK + payload)
    if answer.payload.startswith(ANSWER):
        _print(args, RawMessage(answer.payload[len(ANSWER) :], answer.attachments))
        return
    give_up(answer.attachments)
    try:
        kind, text, _ = read_failure(answer.payload)
    except DecodeError as error:
        raise CallFailed(f"the answer cannot be read: {error}") from None
    raise CallFailed(f"{kind}: {text}")


async def _answer(to: Sender[RawMessage], data: bytes) -> RawMessage:
    sender, receiver = oneshot(RawMessage)
    with sender, receiver:
        await to.send(RawMessage(data, [sender]))
        return await receiver


def _print(args: argparse.Namespace, message: RawMessage) -> None:
    give_up(message.attachments)
    if args.tag is not None:
        try:
            value = read_value(message.payload)
        except ValueError:
            pass  # shown as bytes
        else:
            if isinstance(value, Tagged) and value.tag == tag_of(Unreadable):
                cause = printable(str(value.fields[0]))
                raise CallFailed(f"the server could not read the message: {cause}{_hint(cause, args.kind)}")
            if isinstance(value, Tagged) and value.tag == tag_of(CancelReason):
                raise CallFailed(f"the server cancelled the channel: {printable(str(value.fields[0]))}")
            print(json.dumps(as_json(value)) if args.json else shown(as_text(value)), flush=True)
            return
    print_bytes(message.payload, as_json=args.json)


def _hint(cause: str, kind: str) -> str:
    """Return what to change if the sender that was sent is of the wrong kind."""
    if kind == "stream" and re.search(r"expected .*\bOneshotSender\b.*, got an attachment", cause):
        return "; it is answered once: leave out --stream"
    if kind == "response" and re.search(r"expected .*\bSender\b.*, got an attachment", cause):
        return "; it is answered by a stream: add --stream"
    return ""


def message_bytes(tag: str, fields: Sequence[Any], reply: AttachmentKind | None) -> bytes:
    """Encode a message as the codec does.

    Args:
        tag: the tag of the message class.
        fields: values of JSON. ``{"message": TAG, "fields": […]}`` is a message, ``{"base64": …}`` is bytes, `REPLY` is the attachment.
        reply: the kind of the attachment; ``None`` for a message without one.

    Raises:
        ConfigurationError: a field cannot be encoded, or there is a `REPLY` without an attachment, or more than one.

    Example:
        >>> message_bytes("docs.Bid", ["EURUSD", 1], None).hex(" ")
        'c7 12 02 93 a8 64 6f 63 73 2e 42 69 64 a6 45 55 52 55 53 44 01'
    """
    places = 0

    def plain(value: Any) -> Any:
        nonlocal places
        match value:
            case str() if value == REPLY:
                places += 1
                if reply is None or places > 1:
                    raise ConfigurationError(
                        f'"{REPLY}" may stand among the fields once, and not with --fnf or --lookup'
                    )
                return msgpack.ExtType(EXT_ATTACHMENT, bytes((reply, 0)))
            case {"message": str(inner), "fields": list(inside), **rest} if not rest:
                return tagged(inner, plain(inside))
            case {"base64": str(text), **rest} if not rest:
                return base64.b64decode(text, validate=True)
            case list():
                return [plain(item) for item in value]
            case dict():
                return {key: plain(item) for key, item in value.items()}
        return value

    def tagged(name: str, values: Sequence[Any]) -> msgpack.ExtType:
        return msgpack.ExtType(EXT_MESSAGE, msgpack.packb([name, *values]))

    try:
        row = plain(list(fields))
        if reply is not None and not places:
            row.append(plain(REPLY))
        packed: bytes = msgpack.packb(tagged(tag, row))
    except ConfigurationError:
        raise
    except (ValueError, OverflowError, RecursionError) as error:
        raise ConfigurationError(f"the fields cannot be encoded: {error}") from error
    return packed


def _fields(data: bytes) -> list[Any]:
    try:
        fields = json.loads(data or b"[]")
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"with --tag, --data must be JSON: {error}") from error
    if not isinstance(fields, list):
        raise ConfigurationError(f"with --tag, --data is {json.dumps(fields)[:40]}, wanted a JSON array of fields")
    return fields
