"""MAOP v1, without I/O: messages and calls over QUIC, each on a stream of its own, gated by Proceed.

`MaopCore` is one side of a connection. It refers to streams by number; its owner opens, writes and resets them.
``docs/protocols/maop.md`` has every decision, and the rules with their tests.

Example:
    A client and a server are wired to each other by hand. The client asks, and the server answers.

    >>> def pump() -> list[Event]:
    ...     events = []
    ...     for one, other in (client, server), (server, client), (client, server):
    ...         for out in one.data_to_send(0.0):
    ...             if isinstance(out, StreamData):
    ...                 events += other.receive_stream_data(out.stream_id, bytes(out.data), out.fin, now=0.0)
    ...     return events
    >>> client = MaopCore(client=True, random_bytes=bytes)
    >>> server = MaopCore(client=False, random_bytes=bytes, handlers={101: HandlerSpec()})
    >>> events = client.handshake_completed(token=b"secret", now=0.0) + server.handshake_completed(now=0.0)
    >>> [question] = pump()
    >>> question.auth_type, question.token
    ('bearer', b'secret')
    >>> [approved] = server.approve_client("c-42", now=0.0)
    >>> [approved] = pump()
    >>> approved.identifier
    'c-42'
    >>> stream_id = client.send_request(101, b"", now=0.0)
    >>> [execute] = pump()
    >>> execute.operation.msg_id, execute.body
    (101, b'')
    >>> server.respond(stream_id, b"hello", "text/plain", now=0.0)
    >>> [completed] = pump()
    >>> completed.content_type, completed.body
    ('text/plain', b'hello')
"""

from __future__ import annotations

from levada.transports.core import OpenStream, ResetStream, StopStream, StreamData

from .authentication import Authentication, Result
from .codes import ErrorCode, close_code, code_name, sanitise
from .config import AuthenticationConfig, ControlConfig, GateConfig, HandlerSpec, MaopConfig, ResponseTerms, TimesConfig
from .core import MaopCore
from .events import (
    Approved,
    Audited,
    AuthenticationReceived,
    Begun,
    BodyEnded,
    BodyReceived,
    BodyWanted,
    CloseConnection,
    Completed,
    ConnectionEnded,
    Disapproved,
    Draining,
    Event,
    Execute,
    Failed,
    OperationCancelled,
    OperationOffered,
    Output,
    Received,
    Refused,
    ResponseRejected,
    ResponseStarted,
    RoomWanted,
    SetPriority,
    Stepped,
    StreamUnblocked,
)
from .fairness import FairQueue, PriorityClass, class_of
from .frames import ALPN, QMUX_ALPN, UNDEFINED, Op, Operation, decode_operation, decode_operations
from .native import OCTET_STREAM, TestPlan, check_test, success_header
from .rates import AttemptLimiter, TokenBucket
from .receiver import Incoming
from .shared import DedupStore, Quota, ReplayWindow
from .side import Statistics
from .state import ConnectionState, InitiatorState, ReceiverState
from .versions import Capability, Version, parse_version

__all__ = [
    "ALPN", "OCTET_STREAM", "QMUX_ALPN", "UNDEFINED", "Approved", "AttemptLimiter", "Audited", "Authentication", "AuthenticationConfig",
    "AuthenticationReceived", "Begun", "BodyEnded", "BodyReceived", "BodyWanted", "Capability", "CloseConnection", "Completed",
    "ConnectionEnded", "ConnectionState", "ControlConfig", "DedupStore", "Disapproved", "Draining", "ErrorCode", "Event", "Execute",
    "Failed", "FairQueue", "GateConfig", "HandlerSpec", "Incoming", "InitiatorState", "MaopConfig", "MaopCore", "Op", "OpenStream",
    "Operation", "OperationCancelled", "OperationOffered", "Output", "PriorityClass", "Quota", "Received", "ReceiverState", "Refused",
    "ReplayWindow", "ResetStream", "ResponseRejected", "ResponseStarted", "ResponseTerms", "Result", "RoomWanted", "SetPriority",
    "Statistics", "Stepped", "StopStream", "StreamData", "StreamUnblocked", "TestPlan", "TimesConfig", "TokenBucket", "Version",
    "check_test", "class_of", "close_code", "code_name", "decode_operation", "decode_operations", "parse_version", "sanitise",
    "success_header",
]  # fmt: skip
