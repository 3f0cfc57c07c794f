"""Settings of a MAOP endpoint, and declarations of its handlers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, Literal

import attrs
from attrs import validators as v

from .versions import Capability, Version

__all__ = [
    "AuthenticationConfig", "ControlConfig", "GateConfig", "HandlerSpec", "MaopConfig", "ResponseTerms", "TimesConfig",
]  # fmt: skip

MIB: Final = 2**20


def _number(default: int, least: int = 1, most: int = 2**62) -> Any:
    return attrs.field(default=default, validator=[v.instance_of(int), v.ge(least), v.le(most)])


def _ids(values: Iterable[int]) -> frozenset[int]:
    return frozenset(values)


def _seconds(default: float) -> Any:
    return attrs.field(default=default, converter=float, validator=v.gt(0.0))


def _optional_seconds() -> Any:
    return attrs.field(default=None, converter=attrs.converters.optional(float), validator=v.optional(v.gt(0.0)))


@attrs.frozen(kw_only=True)
class HandlerSpec:
    """Declares what the endpoint may do with one msg_id. Source: MA-112."""

    name: str = ""
    """Symbolic name, for logs."""
    messages: bool = True
    """Whether it takes Messages. Source: MA-43."""
    requests: bool = True
    """Whether it takes Requests."""
    responses: frozenset[int] = attrs.field(default=frozenset({0}), converter=_ids)
    """Ids of the responses that it can produce; 0 is Success. Source: MA-63."""
    success_layout: frozenset[int] = attrs.field(default=frozenset(), converter=_ids)
    """Other response ids that use the layout of Success, by agreement with the peer. Source: MA-99a."""
    max_payload: int = _number(8 * MIB, 0)
    """Largest body in bytes, announced or received. Source: MA-54b."""
    allow_undefined_length: bool | None = None
    """Overrides `GateConfig.refuse_undefined_length_by_default`. Source: MA-54a."""
    streaming: bool = False
    """Whether execution starts with the first Block instead of Block End. Source: MA-113."""
    gated: bool = False
    """Whether the application decides on each operation (`beforeExecute`), after the core's checks. Source: MA-113."""
    role: str | None = None
    """Role that the peer must have. Source: MA-44."""
    allow_while_draining: bool = False
    """Whether operations may begin while the connection drains. Source: MA-89."""
    replay_window: float = attrs.field(default=0.0, converter=float, validator=v.ge(0.0))
    """Seconds in which a second operation of this kind from one identity is refused; 0 turns this off. Source: MA-124."""
    max_timeout: float | None = _optional_seconds()
    """Cap in seconds on the requester's timeout. Source: MA-127."""
    priority: int | None = attrs.field(default=None, validator=v.optional(v.in_(range(256))))
    """Overrides the priority that operations request. Source: MA-116."""

    def __attrs_post_init__(self) -> None:
        if any(not 0 <= i < 65_536 for i in self.responses | self.success_layout):
            raise ValueError("response ids go from 0 to 65535")


@attrs.frozen(kw_only=True)
class ResponseTerms:
    """What a requester wants of the Response. Source: section 8."""

    msg_id: int = 0
    """Kind of Response; 0 is Success. Source: MA-63."""
    success_layout: bool | None = None
    """Whether this kind has the Success header; None: only 0 has. Source: MA-99a."""
    timeout_ms: int | None = None
    """Milliseconds from the whole body to the Response header; 0 for no limit, None for `TimesConfig.default_request_timeout_ms`."""
    streamed: bool = False
    """Whether its body comes as `ResponseStarted`, `BodyReceived`, `Completed`; otherwise whole."""
    acknowledge: bool = True
    """Whether Done is sent once it is complete; otherwise the caller ends it with `consumed` or `reject`. Source: MA-71."""
    max_size: int | None = 8 * MIB
    """Its largest size in bytes, including the native header; None for no limit."""
    allow_undefined: bool = True
    """Whether it may have undefined length."""

    @property
    def success(self) -> bool:
        """Whether the Response has the Success header."""
        return self.msg_id == 0 if self.success_layout is None else self.success_layout


DEFAULT_TERMS: Final = ResponseTerms()


@attrs.frozen(kw_only=True)
class AuthenticationConfig:
    """Limits of the authentication on stream 0. Times are in seconds."""

    max_token: int = _number(65_535, 0, 65_535)
    """Largest token in bytes. Source: MA-18."""
    max_pairs: int = _number(255, 0, 255)
    """Most metadata pairs. Source: MA-18."""
    max_pair_bytes: int = _number(65_536, 0)
    """Bytes of all pairs, including their lengths. Source: MA-18."""
    auth_timeout: float = _seconds(5.0)
    """Time from the end of the handshake to the decision. Source: MA-20."""
    answer_timeout: float = _seconds(10.0)
    """How long a client waits for the result."""
    disapproved_linger: float = _seconds(1.0)
    """How long a refused client may take to close the connection. Source: MA-27."""
    auth_close_timeout: float = _seconds(2.0)
    """How long a direction of stream 0 may stay open after the result. Source: MA-26."""
    max_held_early: int = _number(MIB)
    """Bytes that a client holds for streams that overtook the result."""


@attrs.frozen(kw_only=True)
class ControlConfig:
    """The control pool: its streams, and the rate of signals that the peer may send. Times are in seconds."""

    global_control_pool_size: int = _number(4, 1, 16)
    """Control streams that this side opens, within the peer's credit. Source: MA-81."""
    control_stream_kind: Literal["bidi", "uni"] = attrs.field(default="bidi", validator=v.in_(("bidi", "uni")))
    """Kind of the control streams that this side opens. Source: MA-82."""
    control_batch_max: int = _number(256, 1, 65_535)
    """Most entries in one signal sent. Source: MA-38."""
    control_ring: int = _number(4096)
    """Signals waiting on one control stream above which approvals pause; four times as many end the connection. Source: MA-85."""
    max_control_streams: int = _number(16)
    """Control streams that the peer may have open. Source: MA-87."""
    signal_rate: float = _seconds(50_000.0)
    """Signal entries a second that the peer may send. Source: MA-88."""
    signal_burst: int = _number(100_000)
    """Signal entries that the peer may send in one burst. Source: MA-88."""
    flood_timeout: float = _seconds(5.0)
    """How long control streams may wait for the rate before the connection ends. Source: MA-88."""
    unknown_signal_rate: int = _number(100)
    """Signals a second for unknown streams that count as a strike. Source: MA-49."""
    max_strikes: int = _number(3)
    """Strikes that end the connection. Source: MA-12."""
    done_flush: float = attrs.field(default=0.0, converter=float, validator=v.ge(0.0))
    """How long a Done may wait for more. Source: MA-126 (`done_flush_ms`)."""
    proceed_coalesce: float = attrs.field(default=0.0, converter=float, validator=v.ge(0.0))
    """How long a Proceed may wait for more; 0 is the end of the turn. Source: MA-50."""


@attrs.frozen(kw_only=True)
class GateConfig:
    """What the peer may have open at once, and what is held for it."""

    refuse_undefined_length_by_default: bool = True
    """Whether undefined length needs a handler that allows it. Source: MA-54a."""
    max_pending_approvals: int = _number(1024, 1, 65_535)
    """Undecided operations. Source: MA-53."""
    max_inflight_ops: int = _number(1024, 1, 65_535)
    """Operations approved and not ended. Source: MA-118."""
    max_buffer_bytes: int = _number(64 * MIB)
    """Bytes of bodies held for the application. Source: MA-54c, MA-118."""
    max_op_rate: float | None = _optional_seconds()
    """New operations a second; further ones wait. Source: MA-128."""
    capacity_retry: float = _seconds(1.0)
    """Retry hint in a refusal for lack of capacity. Source: MA-54."""
    max_open_streams: int = _number(65_535)
    """Open streams of the peer; further ones fail at once."""
    stream_window: int = _number(MIB)
    """Unconsumed bytes of a streamed body above which `MaopCore.is_blocked`."""


@attrs.frozen(kw_only=True)
class TimesConfig:
    """How long each step of an operation, and the end of a connection, may take. Times are in seconds unless the name says ``_ms``."""

    approval_timeout: float = _seconds(10.0)
    """Wait for Proceed or Refuse, on both sides. Source: MA-53."""
    transfer_idle_timeout: float = _seconds(30.0)
    """Longest pause within a body. Source: MA-126."""
    transfer_total_timeout: float | None = _optional_seconds()
    """Longest time for a body from the peer, starting with the approval. Source: MA-126."""
    default_request_timeout_ms: int = _number(5000, 0, 2**32 - 1)
    """Timeout of a Request if the caller gives none. Source: MA-68."""
    response_grace: float = _seconds(1.0)
    """Added to the timeout by the requester; also its wait for the Fail that explains a reset. Source: MA-67, MA-69."""
    response_transfer_timeout: float = _seconds(30.0)
    """Longest pause within the body of a Response. Source: MA-69."""
    response_ack_timeout: float = _seconds(1.0)
    """How long a responder remembers a Response for its Done. Source: MA-71."""
    drain_timeout: float = attrs.field(default=5.0, converter=float, validator=v.ge(0.0))
    """How long running operations may take when this side disconnects in order. Source: MA-89."""
    max_drain_time: float = _seconds(30.0)
    """Cap on the drain time that the peer requests. Source: MA-92."""
    flush_timeout: float = _seconds(0.5)
    """Wait for the acknowledgement of signals before the connection ends. Source: MA-92, MA-93."""


@attrs.frozen(kw_only=True)
class MaopConfig:
    """Limits, delays and policies of one side. Immutable; derive with `attrs.evolve`."""

    vendor: str = attrs.field(default="levada", validator=[v.instance_of(str), v.max_len(63)])
    """Program name, sent at authentication."""
    version: Version = attrs.field(factory=lambda: Version(1, 0, 0))
    """Protocol version of this side. Source: MA-31."""
    capabilities: Capability = attrs.field(factory=lambda: Capability(0b1111))
    """Announced capabilities; `Capability.IDEMPOTENCY` changes the wire format if both sides have it. Source: MA-35."""
    native_test: bool = True
    """Whether the peer may use the native Test. Its two bytes request an answer of up to 32 MiB, sent as fast as the peer takes it.
    Source: section 13.2, MA-112."""
    max_block_chunk_size: int = _number(131_072, 1, 2**32 - 1)
    """Largest Block sent, in bytes. Source: section 7."""
    max_blocks_per_message: int = _number(4096)
    """Blocks below 1 KiB in a body of defined length. Source: section 7."""
    tolerate_u64_block_length: bool = False
    """Whether Block lengths of eight bytes are read too. Source: MA-137."""
    strict_timestamps: bool = False
    """Whether impossible times in a Response are an error. Source: MA-73."""

    authentication: AuthenticationConfig = attrs.field(
        factory=AuthenticationConfig, validator=v.instance_of(AuthenticationConfig)
    )
    control: ControlConfig = attrs.field(factory=ControlConfig, validator=v.instance_of(ControlConfig))
    gate: GateConfig = attrs.field(factory=GateConfig, validator=v.instance_of(GateConfig))
    times: TimesConfig = attrs.field(factory=TimesConfig, validator=v.instance_of(TimesConfig))


TEST_SPEC: Final = HandlerSpec(name="levada.native.test", max_payload=MIB, allow_undefined_length=False)
"""The native Test. Source: MA-101, MA-109."""
