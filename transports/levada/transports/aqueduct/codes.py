"""Codes on the wire, and the rules that a peer can break."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final

import attrs

from levada.framework.errors import RemoteProtocolError

__all__ = ["PROTOCOL_ERRORS", "CloseCode", "LimitExceeded", "ResetCode", "violation"]


class CloseCode(enum.IntEnum):
    """Application close code of the QUIC connection. It is only for logs and never interpreted. Source: AQ-19 (D-9)."""

    ORDERLY = 0
    """All work was done."""
    PROTOCOL_ERROR = 1
    """The other side broke a rule."""
    APPLICATION = 2
    """The application closed the connection."""
    SERIALISATION = 3
    """A message could not be encoded or decoded, so the connection cannot continue."""
    LIMIT = 4
    """The other side used more than its limit."""
    REFUSED = 5
    """The server does not admit this client."""


class ResetCode(enum.IntEnum):
    """Code of a stream reset, or of a request to stop a stream. Source: AQ-20."""

    CANCELLED = 1
    """The sender cancelled the channel."""
    LOST = 2
    """The message that carried the other half was lost."""


PROTOCOL_ERRORS: Final[Mapping[str, str]] = {
    "E-1": "var-len int not minimal, over 64 bits, or cut by the end of its array",
    "E-2": "malformed header data",
    "E-3": "zero or cut int in ranges",
    "E-4": "numbers pass 2^64-1",
    "E-5": "second message on a oneshot",
    "E-6": "unknown frame type",
    "E-7": "not an Aqueduct 0.0.0-AFTER Version frame",
    "E-8": "frame out of place",
    "E-9": "stream or datagram ends inside a frame, or has none",
    "E-10": "direction of a channel control stream ended before its last frame",
    "E-11": "the peer accepts no datagrams",
    "E-12": "ConnectionControl twice",
    "E-13": "connection control stream ended",
    "E-14": "no Version from a client that has not been answered",
    "E-15": "illegal reset code on a channel control stream",
    "E-16": "ChannelControl by the side that minted the id",
    "E-17": "ChannelControl for an id that was never handed out",
    "E-18": "message against the flow of its channel",
    "E-19": "attachment minted by the side that receives it",
    "E-20": "reliable message number twice",
    "E-21": "message number beyond the end of the channel",
    "E-22": "sender attached twice",
    "E-23": "receiver handed over twice",
    "E-24": "message settled twice",
    "E-25": "settled a message that was never sent",
    "E-26": "finished with fewer messages than were sent",
    "E-27": "ClosedChannelLost by the side that did not mint the id",
    "AQ-20a": "message stream stopped, and the receiver still lives",
}
"""Each rule that a peer can break, with its meaning. The key is the error's `rule`. Source: section 10."""


def violation(rule: str, detail: str = "") -> RemoteProtocolError:
    """Make the error for a broken rule. The caller that knows the position in the stream sets its ``offset``."""
    text = PROTOCOL_ERRORS[rule]
    return RemoteProtocolError(f"{text}: {detail}" if detail else text, rule=rule)


@attrs.define(eq=False, slots=False, str=False)
class LimitExceeded(RemoteProtocolError):
    """The peer broke no rule, but used more than this side allows. The connection is over (close code 4)."""
