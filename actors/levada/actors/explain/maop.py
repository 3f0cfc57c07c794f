"""Operations of MAOP, in one direction of a stream, or with ``--stream0`` one side of the authentication.

QUIC is encrypted, so a capture comes from a program that has the keys: Wireshark with a key log, or a peer that writes down what it sends.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from datetime import UTC, datetime

from levada.transports.maop import Authentication, MaopConfig, Operation, Result, code_name
from levada.transports.maop.authentication import Octets, read_authentication, read_result
from levada.transports.maop.codes import OperationFault
from levada.transports.maop.frames import (
    UNDEFINED,
    Block,
    BlockEnd,
    Disconnect,
    DisconnectRequest,
    Done,
    Fail,
    Message,
    Proceed,
    Refuse,
    Request,
    Response,
    decode_operation,
)
from levada.transports.maop.versions import CAPABILITY_PAIR

from . import Line, shown

__all__ = ["HELP", "add_arguments", "explain"]

HELP = "messages of one stream of a QUIC connection"

_ENTRIES = 8  # of a signal that are shown


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments for facts that are not in the bytes."""
    parser.add_argument(
        "--stream0",
        choices=("client", "server"),
        help="the bytes are this side's part of the authentication, on stream 0",
    )
    parser.add_argument(
        "--idempotency", action="store_true", help="both sides have agreed on idempotency keys after the headers"
    )
    parser.add_argument(
        "--trace", action="store_true", help="both sides have agreed on contexts of traces after the headers"
    )


def explain(data: bytes, args: argparse.Namespace) -> Iterator[Line]:
    """Explain operations, which follow each other without anything between them (MA-4)."""
    if args.stream0 is not None:
        yield from _stream0(data, client=args.stream0 == "client")
        return
    at = 0
    while at < len(data):
        try:
            found = decode_operation(data, at, idempotency=args.idempotency, traces=args.trace)
        except ValueError as error:
            yield Line(at, len(data) - at, f"no operation: {error}", damaged=True)
            return
        if found is None:
            yield Line(at, len(data) - at, "an unfinished operation", damaged=True)
            return
        operation, end = found
        yield Line(at, end - at, _text(operation))
        at = end


def _stream0(data: bytes, *, client: bool) -> Iterator[Line]:
    reader: Octets[Authentication] | Octets[Result]
    reader = Octets(read_authentication(MaopConfig())) if client else Octets(read_result())
    try:
        whole = reader.feed(data)
    except OperationFault as fault:
        yield Line(0, len(data), f"no authentication: {fault.reason} [{fault.rule}]", damaged=True)
        return
    if not whole or reader.value is None:
        yield Line(0, len(data), "an unfinished authentication", damaged=True)
        return
    length = len(data) - len(reader.rest)
    yield Line(0, length, _greeting(reader.value))
    if reader.rest:
        yield Line(length, len(reader.rest), "bytes behind the end [MA-17, MA-26]", damaged=True)


def _greeting(message: Authentication | Result) -> str:
    """Show the authentication. A pair may hold a secret, so only the capabilities are shown."""
    if isinstance(message, Authentication):
        parts = [f"AUTHENTICATION {message.auth_type} token=({len(message.token)} bytes, not shown)"]
        for key, value in message.pairs.items():
            hidden = f"({len(value.encode())} bytes, not shown)"
            parts.append(f"{shown(key)}={shown(value) if key == CAPABILITY_PAIR else hidden}")
    elif message.session_id is not None:
        parts = [f"APPROVED session={message.session_id.hex()} identifier={shown(message.identifier)}"]
    else:
        parts = [
            f"DISAPPROVED {code_name(message.code)}{_retry(message.retry_after_ms)} reason={shown(message.reason)}"
        ]
    return " ".join([*parts, f"version={message.version} vendor={shown(message.vendor)}"])


def _text(operation: Operation) -> str:
    match operation:
        case Message(msg_id, length, priority, key, trace):
            return f"MESSAGE msg_id={msg_id} length={_length(length)} priority={priority}{_key(key)}{_trace(trace)}"
        case Request(msg_id, length, priority, response, timeout, key, trace):
            limit = f"{timeout}ms" if timeout else "none"
            return (
                f"REQUEST msg_id={msg_id} length={_length(length)} priority={priority} response_msg_id={response} "
                f"timeout={limit}{_key(key)}{_trace(trace)}"
            )
        case Response(length, start, took):
            return f"RESPONSE length={_length(length)} {_times(start, took)}"
        case Proceed(streams):
            return f"PROCEED {_several([str(stream) for stream in streams])}"
        case Refuse(entries):
            return (
                f"REFUSE {_several([f'{stream}: {code_name(code)}{_retry(retry)}' for stream, retry, code in entries])}"
            )
        case Block(chunk):
            return f"BLOCK {len(chunk)} {shown(chunk)}"
        case BlockEnd(total):
            return f"BLOCK_END {total}"
        case Fail(stream, code, reason):
            return f"FAIL {stream}: {code_name(code)} reason={shown(reason)}"
        case Done(entries):
            return f"DONE {_several([f'{stream}: {_times(start, took)}' for stream, start, took in entries])}"
        case DisconnectRequest(drain, reason):
            return f"DISCONNECT_REQUEST drain={drain}ms reason={shown(reason)}"
        case Disconnect():
            return "DISCONNECT"


def _length(length: int) -> str:
    return "undefined" if length == UNDEFINED else str(length)


def _trace(trace: bytes | None) -> str:
    return f" trace={shown(trace)}" if trace else ""


def _key(key: bytes | None) -> str:
    return f" key={key.hex()}" if key else ""


def _retry(milliseconds: int) -> str:
    return f" retry_after={milliseconds}ms" if milliseconds else ""


def _times(start: int, took: int) -> str:
    """Show a start and a duration. A time outside the calendar is shown as a number."""
    try:
        moment = datetime.fromtimestamp(start / 1000, UTC).isoformat(timespec="milliseconds")
    except (ValueError, OverflowError, OSError):
        moment = str(start)
    return f"start={moment} took={took}ms"


def _several(entries: list[str]) -> str:
    more = f", … ({len(entries):,})" if len(entries) > _ENTRIES else ""
    return f"[{', '.join(entries[:_ENTRIES])}{more}]"
