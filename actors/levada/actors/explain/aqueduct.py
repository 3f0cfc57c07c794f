"""Frames of Aqueduct, in one direction of a stream or in a datagram.

QUIC is encrypted, so a capture comes from a program that has the keys: Wireshark with a key log, or a peer that records its traffic.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

from levada.framework.errors import ProtocolError
from levada.transports.aqueduct import Frame, Headers, Incomplete, decode_frame
from levada.transports.aqueduct.frames import (
    ENTRYPOINT,
    FLOW,
    MINTER,
    ONESHOT,
    AckNackUnreliable,
    AckReliable,
    ChannelControl,
    ClosedChannelLost,
    CloseReceiver,
    ConnectionControl,
    FinishSender,
    Message,
    SentUnreliable,
    Version,
)

from . import Line, shown
from .values import Tagged, as_text, read_value

__all__ = ["HELP", "add_arguments", "explain"]

HELP = "frames of one stream of a QUIC connection"

LIMIT = 2**32  # bytes of a payload; the capture is in memory already
_OWN_HEADERS = ("levada-",)  # others may hold a secret


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add nothing: the frames of both sides are explained alike."""


def explain(data: bytes, args: argparse.Namespace) -> Iterator[Line]:
    """Explain frames, which follow each other without anything between them (AQ-8)."""
    at = 0
    while at < len(data):
        try:
            frame, end = decode_frame(data, at, max_message=LIMIT, max_control=LIMIT)
        except Incomplete:
            yield Line(at, len(data) - at, "an unfinished frame", damaged=True)
            return
        except ProtocolError as error:
            yield Line(at, len(data) - at, f"not a frame: {error}", damaged=True)
            return
        yield Line(at, end - at, _text(frame))
        at = end


def _text(frame: Frame) -> str:
    match frame:
        case Version():
            return "VERSION 0.0.0-AFTER"
        case ConnectionControl(headers):
            return " ".join(["CONNECTION_CONTROL", *_headers(headers)])
        case ChannelControl(channel):
            return f"CHANNEL_CONTROL {_channel(channel)}"
        case Message(channel, number, attachments, payload):
            attached = ", ".join(_attachment(channel, one) for one in attachments)
            return (
                f"MESSAGE {_channel(channel)} number={number}"
                f"{f' attached=[{attached}]' if attached else ''} payload={_payload(payload)}"
            )
        case SentUnreliable(count):
            return f"SENT_UNRELIABLE {count}"
        case AckReliable(runs):
            return f"ACK_RELIABLE {_runs(runs, 'acked', 'left out')}"
        case AckNackUnreliable(runs):
            return f"ACK_NACK_UNRELIABLE {_runs(runs, 'acked', 'nacked')}"
        case FinishSender(count):
            return f"FINISH_SENDER {count} messages"
        case CloseReceiver(runs):
            return f"CLOSE_RECEIVER {_runs(runs, 'acked', 'nacked')}".rstrip()
        case ClosedChannelLost(channel):
            return f"CLOSED_CHANNEL_LOST {_channel(channel)}"


def _headers(headers: Headers) -> Iterator[str]:
    for key, value in headers:
        yield f"{key}={shown(value) if key.startswith(_OWN_HEADERS) else f'({len(value)} bytes, not shown)'}"


def _channel(channel: int) -> str:
    """Show a channel's id, the direction in which it flows, and the side that minted the id (AQ-6)."""
    if channel == ENTRYPOINT:
        return "channel=0 (entrypoint)"
    flow = "to client" if channel & FLOW else "to server"
    return f"channel={channel} ({flow}, {'server' if channel & MINTER else 'client'}'s{', oneshot' if channel & ONESHOT else ''})"


def _attachment(channel: int, attached: int) -> str:
    """Show one attachment of a message (AQ-26)."""
    kind = "sender" if (channel ^ attached) & FLOW else "receiver"
    return f"{'oneshot ' if attached & ONESHOT else ''}{kind} {attached}"


def _payload(payload: bytes) -> str:
    try:
        value = read_value(payload)
    except ValueError:
        return shown(payload)
    return f"<{as_text(value)}>" if isinstance(value, Tagged) else shown(payload)


def _runs(runs: Sequence[int], yes: str, no: str) -> str:
    parts = [f"{run} {no if at % 2 else yes}" for at, run in enumerate(runs) if run]
    return ", ".join(parts)
