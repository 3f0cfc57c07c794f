"""Quotas, rates, order, repetition; and peers that do what they must not: memory stays bounded, and nobody else is harmed."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from tests.actors import carried
from trio.testing import MockClock, wait_all_tasks_blocked

from levada.actors.authenticators import BearerTokens
from levada.actors.maop import (
    Call,
    ControlConfig,
    GateConfig,
    Handler,
    HandlerSpec,
    MaopConfig,
    OperationError,
    OperationFailed,
    OperationLost,
    OperationRefused,
    OperationTimeout,
    Peer,
    PeerConfig,
    Refuse,
    RetryPolicy,
    TimesConfig,
    connect,
)
from levada.actors.maop.executions import Limiter
from levada.actors.maop.shares import TenantShares
from levada.framework import ActorSystem, Identity, Limits
from levada.transports import carriers
from levada.transports.carriers import MemoryConfig
from levada.transports.maop import MaopCore, Version, decode_operations
from levada.transports.maop.authentication import Authentication
from levada.transports.maop.frames import Block, Disconnect, Done, Fail, Message, Proceed, Request

from .conftest import NOTHING, Ends, Start, echo, nothing, settled

STREAMING = HandlerSpec(allow_undefined_length=True, streaming=True, max_payload=2**40)


async def count_running(seconds: float, counts: list[int]) -> Any:
    """Make a handler that keeps the number of those at work, and the most."""

    async def work(call: Call) -> None:
        counts[0] += 1
        counts[1] = max(counts)
        await trio.sleep(seconds)
        counts[0] -= 1

    return work


# ---------------------------------------------------------------- quotas


@pytest.mark.rule("MA-118")
async def test_ma118_connections_of_one_identity_share_a_quota(start: Start, autojump_clock: MockClock) -> None:
    """Quotas are per identity; when one is exhausted Proceed is withheld until there is room."""
    counts = [0, 0]
    tokens = {
        b"a": Identity("a-1", tenant="acme", limits=Limits(max_operations=3)),
        b"b": Identity("a-2", tenant="acme", limits=Limits(max_operations=3)),
        b"secret": Identity("other"),
    }
    work = await count_running(1.0, counts)
    async with start({101: work, 102: echo}, server={"authenticate": BearerTokens.of(tokens)}) as ends:
        async with (
            connect(ends.system, ends.listener.url, token=b"a") as first,
            connect(ends.system, ends.listener.url, token=b"b") as second,
            trio.open_nursery() as nursery,
        ):
            for peer in (first, second) * 5:
                nursery.start_soon(peer.request, 101)
            await trio.sleep(0.5)
            assert await ends.peer.request(102, b"mine is free") == b"mine is free"
        assert counts == [0, 3]
        assert trio.current_time() == pytest.approx(4.0, abs=0.02)  # ten operations by threes
        assert len(ends.listener._actor.shared.registry) == 2


@pytest.mark.rule("MA-54")
async def test_ma54_a_wait_for_room_that_is_too_long_is_refused(start: Start, autojump_clock: MockClock) -> None:
    """Refuse CAPACITY_LIMIT (14) with retry_after_ms."""
    tokens = {b"secret": Identity("c", limits=Limits(max_operations=1))}
    server = PeerConfig(core=MaopConfig(times=TimesConfig(approval_timeout=2.0)))
    work = await count_running(5.0, [0, 0])
    async with start({101: work}, server={"authenticate": BearerTokens.of(tokens), "config": server}) as ends:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ends.peer.request, 101, b"first")
            await trio.sleep(0.1)
            with pytest.raises(OperationRefused) as refused:
                await ends.peer.request(101, b"second")
            assert (refused.value.code, refused.value.retry_after) == (14, 1.0)
        await settled()
        assert ends.left() == NOTHING


@pytest.mark.rule("MA-118")
@carried.memory_only
async def test_ma118_the_rate_of_bodies_is_bounded_by_credit(start: Start, autojump_clock: MockClock) -> None:
    """max_block_rate acts by delayed flow-control credit: the sender waits, nothing is refused."""
    tokens = {b"secret": Identity("c", limits=Limits(bytes_per_second=1_000_000.0))}
    async with start({100: nothing, 101: echo}, server={"authenticate": BearerTokens.of(tokens)}) as ends:
        await ends.peer.message(100, bytes(5_000_000))
        assert trio.current_time() == pytest.approx(5.0, rel=0.1)
        await ends.peer.request(101, b"x")
        await settled()
        assert ends.left() == NOTHING


def test_the_limits_of_a_tenant_are_those_of_its_newest_client() -> None:
    """So that limits which were changed in a file of tokens apply without a restart."""

    def now() -> tuple[int, int, float | None]:
        return (
            share.quota.max_operations,
            share.quota.max_bytes,
            share.rate.bytes_per_second if share.rate is not None else None,
        )

    registry = TenantShares(PeerConfig(core=MaopConfig(gate=GateConfig(max_inflight_ops=7, max_buffer_bytes=77))))
    cores = [MaopCore(client=False, random_bytes=bytes) for _ in range(4)]
    share = registry.enter(Identity("ada", tenant="acme"), cores[0])
    assert now() == (7, 77, None)
    limits = Limits(max_operations=2, max_bytes=20, bytes_per_second=200.0)
    assert registry.enter(Identity("bob", tenant="acme", limits=limits), cores[1]) is share
    assert now() == (2, 20, 200.0)
    rate = share.rate
    registry.enter(Identity("bob", tenant="acme", limits=Limits(bytes_per_second=300.0)), cores[2])
    assert (now(), share.rate) == ((7, 77, 300.0), rate)
    registry.enter(Identity("ada", tenant="acme"), cores[3])
    assert now() == (7, 77, None)


async def test_identities_that_use_nothing_are_forgotten() -> None:
    registry = TenantShares(PeerConfig(max_identities=3))
    cores = [MaopCore(client=False, random_bytes=bytes) for _ in range(10)]
    shares = [registry.enter(Identity(f"tenant-{i}"), cores[i]) for i in range(5)]
    assert len(registry) == 5  # all in use
    shares[0].leave(cores[0])
    shares[1].leave(cores[1])
    registry.enter(Identity("tenant-5"), cores[5])
    assert len(registry) == 4
    assert registry.enter(Identity("me", tenant="tenant-4"), cores[6]) is shares[4]


@pytest.mark.rule("MA-134")
async def test_ma134_the_approval_index_spots_abuse(start: Start) -> None:
    """Confirms / (confirms + denies) per identity."""
    async with start({101: echo}) as ends:
        for _ in range(3):
            await ends.peer.request(101)
        with pytest.raises(OperationRefused):
            await ends.peer.request(999)
        assert ends.listener.approval_indexes() == {"client-1": 0.75}
        await ends.peer.aclose()
        await wait_all_tasks_blocked()
        assert ends.listener.approval_indexes() == {"client-1": 0.75}


# ---------------------------------------------------------------- order


@pytest.mark.ci
@pytest.mark.rule("MA-117")
async def test_ma117_places_at_work_follow_the_weights(start: Start, autojump_clock: MockClock) -> None:
    """Deficit round robin over classes, 16:8:4:2:1 within 10 %, over all connections; no class starves."""
    order: list[int] = []

    async def work(call: Call) -> None:
        order.append(call.priority)
        await trio.sleep(0.001)

    classes = (0, 64, 128, 192, 255)
    carrier = MemoryConfig(shape="connection", max_streams=2000)
    settings = {
        "carrier": carrier,
        "max_running": 1,
        "core": MaopConfig(gate=GateConfig(max_inflight_ops=2000, max_pending_approvals=2000)),
    }
    async with start({101: work}, **settings) as ends:
        async with (
            connect(ends.system, ends.listener.url, token=b"secret", config=ends.client.shared.config) as other,
            trio.open_nursery() as nursery,
        ):
            for number in range(155 * 2 * 5):
                peer = (ends.peer, other)[number % 2]
                nursery.start_soon(peer_request, peer, classes[number % 5])
        first = Counter(order[10:320])  # all classes wait that long, and nobody has waited long enough to be lifted
        assert sum(first.values()) == 310
        for priority, weight in zip(classes, (16, 8, 4, 2, 1), strict=True):
            assert first[priority] == pytest.approx(310 * weight / 31, rel=0.1)
        assert Counter(order) == dict.fromkeys(classes, 310)


async def peer_request(peer: Peer, priority: int) -> None:
    await peer.request(101, priority=priority, timeout=None)


@pytest.mark.rule("MA-117")
async def test_ma117_age_lifts_who_waits(autojump_clock: MockClock) -> None:
    """Each 500 ms of waiting lifts an entry by one class."""

    class Place:
        def __init__(self, name: str) -> None:
            self.name = name

        def begin(self) -> None:
            begun.append(self.name)

    begun: list[str] = []
    limiter = Limiter(1)
    limiter.submit(Place("first"), 128, 0)
    limiter.submit(Place("low"), 255, 0)
    await trio.sleep(2.1)
    for number in range(40):
        limiter.submit(Place(f"urgent {number}"), 31, 0)
    for _ in range(20):
        limiter.done()
    assert begun.index("low") < 20
    assert limiter.waiting == 41 - 20
    gone = Place("gone")
    limiter.submit(gone, 0, 0)
    assert limiter.withdraw(gone)
    assert not limiter.withdraw(gone)


@pytest.mark.rule("MA-116")
async def test_ma116_who_waits_for_a_stream_goes_by_priority(start: Start, autojump_clock: MockClock) -> None:
    """Priority decides who is first where the peer's credit is short."""
    order: list[int] = []

    async def work(call: Call) -> None:
        order.append(call.priority)
        await trio.sleep(0.01)

    async with start({101: work}, carrier=MemoryConfig(shape="connection", max_streams=2)) as ends:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(peer_request, ends.peer, 100)
            await trio.sleep(0.001)
            for priority in (110, 100, 105, 100):  # of one class
                nursery.start_soon(peer_request, ends.peer, priority)
        assert order == [100, 100, 100, 105, 110]


# ---------------------------------------------------------------- few streams


@pytest.mark.rule("MA-130")
@pytest.mark.rule("MA-136")
@pytest.mark.parametrize("kind", ["bidi", "uni"])
async def test_ma130_ma136_three_streams_are_enough(start: Start, kind: Any, autojump_clock: MockClock) -> None:
    """A peer's credit may be 3 streams of each kind, and it may take at most 4 entries in a signal."""
    carrier = MemoryConfig(shape="connection", max_streams=3, max_streams_unidirectional=3)
    core = MaopConfig(control=ControlConfig(control_batch_max=4, control_stream_kind=kind))
    keeper: list[bytes] = []

    async def keep(call: Call) -> None:
        keeper.append(await call.body())

    async with start({100: keep, 101: echo}, carrier=carrier, core=core, client={"handlers": {7: echo}}) as ends:
        async with trio.open_nursery() as nursery:
            for number in range(40):
                nursery.start_soon(ends.peer.request, 101, b"%d" % number)
                nursery.start_soon(ends.peer.message, 100, b"%d" % number)
                nursery.start_soon(ends.caller.request, 7, b"%d" % number)
        assert sorted(keeper, key=int) == [b"%d" % number for number in range(40)]
        await settled()
        assert ends.left() == NOTHING


@pytest.mark.rule("MA-81")
@pytest.mark.parametrize("streams", [2, 3, 4, 8])
async def test_ma81_the_pool_leaves_streams_for_operations(
    start: Start, streams: int, autojump_clock: MockClock
) -> None:
    """Never more control streams than the peer's credit allows, with 1 enough to work; also when all goes one after the other."""
    carrier = MemoryConfig(shape="connection", max_streams=streams, max_streams_unidirectional=1)
    async with start({100: nothing, 101: echo}, carrier=carrier, client={"handlers": {7: echo}}) as ends:
        for number in range(20):
            assert await ends.peer.request(101, b"%d" % number) == b"%d" % number
            assert await ends.caller.request(7, b"%d" % number) == b"%d" % number
            await ends.peer.message(100, b"%d" % number)
        pools = [len(end.core.pool.streams) for end in (ends.client, ends.server)]
        assert all(1 <= pool <= max(1, streams - 4) for pool in pools)
        await settled()
        assert ends.left() == NOTHING


# ---------------------------------------------------------------- repetition


@pytest.mark.rule("MA-123")
async def test_ma123_a_repetition_is_answered_without_execution(start: Start, autojump_clock: MockClock) -> None:
    """Running: Refuse 6 with a hint; finished: the stored terminal again; per identity, over connections, until the TTL."""
    ran: list[bytes] = []

    async def work(call: Call) -> bytes:
        ran.append(call.idempotency)
        await trio.sleep(1)
        return b"answer %d" % len(ran)

    async with start({101: work}, dedup_ttl=60.0) as ends:
        async with connect(ends.system, ends.listener.url, token=b"secret") as other, trio.open_nursery() as nursery:
            key = b"k" * 16
            nursery.start_soon(other.request, 101, b"body")
            nursery.start_soon(_expect, ends.peer, key, b"answer 2")
            await trio.sleep(0.5)
            with pytest.raises(OperationRefused) as refused:
                await other.request(101, b"body", idempotency=key)
            assert (refused.value.code, refused.value.retry_after) == (6, 1.0)
            patient = RetryPolicy(attempts=3, jitter=0)
            assert await other.request(101, b"body", idempotency=key, retry=patient) == b"answer 2"
            assert await ends.peer.request(101, b"body", idempotency=key) == b"answer 2"
            await ends.peer.message(101, b"body", idempotency=b"m" * 16)
            await other.message(101, b"body", idempotency=b"m" * 16)
            assert sorted(ran) == [b"", key, b"m" * 16]
            with pytest.raises(OperationRefused) as shorter:
                await ends.peer.request(101, b"bod", idempotency=key, retry=patient)
            assert (shorter.value.code, shorter.value.retry_after) == (6, None)
            opened = ends.peer.statistics().opened
            with pytest.raises(OperationFailed, match="another body") as another:
                await ends.peer.request(101, b"ydob", idempotency=key, retry=patient)
            assert (another.value.code, ends.peer.statistics().opened) == (6, opened + 1)
            assert len(ran) == 3
            await trio.sleep(61)
            assert await ends.peer.request(101, b"body", idempotency=key) == b"answer 4"
        await settled()
        assert ends.left() == NOTHING


async def _expect(peer: Peer, key: bytes, answer: bytes) -> None:
    assert await peer.request(101, b"body", idempotency=key) == answer


@pytest.mark.rule("MA-124")
async def test_ma124_the_replay_window_is_shared_by_an_identity(start: Start, autojump_clock: MockClock) -> None:
    """A second operation with the same msg_id from the same identity inside the window is refused by 6."""
    async with (
        start({101: Handler(echo, spec=HandlerSpec(replay_window=10.0))}) as ends,
        connect(ends.system, ends.listener.url, token=b"secret") as other,
    ):
        await ends.peer.request(101)
        with pytest.raises(OperationRefused) as refused:
            await other.request(101)
        assert refused.value.code == 6
        await trio.sleep(10)
        await other.request(101)


class Unreliable:
    """A handler that is refused or fails a few times before it works."""

    def __init__(self, *errors: Exception) -> None:
        self.errors: Sequence[Exception] = errors
        self.times: list[float] = []

    async def decide(self, call: Call) -> None:
        self.times.append(trio.current_time())
        if self.errors and isinstance(self.errors[0], Refuse):
            raise self.next()

    def next(self) -> Exception:
        first, *self.errors = self.errors
        return first

    async def work(self, call: Call) -> bytes:
        if self.errors:
            raise self.next()
        return await call.body()

    def handler(self) -> Handler:
        return Handler(self.work, before_execute=self.decide)


@pytest.mark.rule("MA-120")
async def test_ma120_nothing_is_repeated_without_a_policy(start: Start) -> None:
    """An implementation never repeats an operation by itself unless the caller gave a retry policy."""
    unreliable = Unreliable(Refuse(14, 0.1))
    async with start({101: unreliable.handler()}) as ends:
        with pytest.raises(OperationRefused):
            await ends.peer.request(101)
        assert len(unreliable.times) == 1


@pytest.mark.rule("MA-120")
@pytest.mark.rule("MA-127")
async def test_ma120_ma127_a_policy_repeats_with_backoff_and_hints(start: Start, autojump_clock: MockClock) -> None:
    """Only after Refuse with 14 or with a hint, or with a key; back-off is exponential with a limit, hints are the least."""
    policy = RetryPolicy(attempts=5, initial_backoff=1.0, max_backoff=3.0, jitter=0.0)
    unreliable = Unreliable(Refuse(14), Refuse(1024, 0.5), Refuse(14, 10.0), Refuse(14))
    async with start({101: unreliable.handler()}) as ends:
        assert await ends.peer.request(101, b"x", retry=policy) == b"x"
        waits = [round(b - a, 3) for a, b in zip(unreliable.times, unreliable.times[1:], strict=False)]
        assert waits == [1.0, 2.0, 10.0, 3.0]

        unreliable.errors = [Refuse(1024)]  # no hint
        with pytest.raises(OperationRefused):
            await ends.peer.message(101, b"x", retry=policy)
        unreliable.errors = [OperationError(1024, "broken")]  # no key
        with pytest.raises(OperationFailed):
            await ends.peer.message(101, b"x", retry=policy)
        unreliable.errors = [OperationError(1024, "broken")]
        await ends.peer.message(101, b"x", retry=policy, idempotency=bytes(16))
        unreliable.errors = [Refuse(14)] * 5
        with pytest.raises(OperationRefused):
            await ends.peer.message(101, b"x", retry=policy)  # attempts are used up


async def test_an_iterator_that_was_begun_is_not_sent_again(start: Start, autojump_clock: MockClock) -> None:
    unreliable = Unreliable(Refuse(14), OperationError(1024, "broken"))
    begun: list[int] = []

    async def body() -> AsyncIterator[bytes]:
        begun.append(1)
        yield b"x"

    handler = Handler(unreliable.work, before_execute=unreliable.decide, spec=HandlerSpec(allow_undefined_length=True))
    async with start({101: handler}) as ends:
        with pytest.raises(OperationFailed):
            await ends.peer.message(101, body(), retry=RetryPolicy(), idempotency=bytes(16))
        assert (len(unreliable.times), begun) == (2, [1])


def test_jitter_and_policies_have_bounds() -> None:
    policy = RetryPolicy(initial_backoff=1.0, max_backoff=8.0, jitter=0.5)
    lot = random.Random(1)
    refused = OperationRefused(code=14)
    for attempt in range(1, 2000):
        nominal = min(8.0, 2.0 ** min(attempt - 1, 10))
        assert nominal / 2 <= policy.delay(attempt, refused, lot) <= nominal
    assert policy.delay(1, OperationRefused(code=14, retry_after=60.0), lot) == 60.0
    assert policy.allows(OperationLost(code=11, not_executed=True), keyed=False)
    assert not policy.allows(OperationTimeout(code=5), keyed=False)
    with pytest.raises(ValueError, match="jitter"):
        RetryPolicy(jitter=2.0)


# ---------------------------------------------------------------- bad peers


class Raw:
    """A peer that writes what it likes."""

    def __init__(self, connection: Any) -> None:
        self.connection: carriers.Connection = connection
        self.answers = bytearray()
        """What came on the server's control streams."""

    async def control(self) -> carriers.Stream:
        return await self.connection.open_stream()

    async def open(self, operation: Any, *, uni: bool) -> carriers.Stream:
        stream = await self.connection.open_stream(unidirectional=uni)
        stream.send_nowait(operation.encode())
        return stream

    async def listen(self) -> None:
        async with trio.open_nursery() as nursery:
            while True:
                nursery.start_soon(self._read, await self.connection.accept_stream())

    async def _read(self, stream: carriers.Stream) -> None:
        while data := await stream.receive_some():
            self.answers += data

    def signals(self) -> list[Any]:
        return list(decode_operations(bytes(self.answers)))


MANY_STREAMS = MemoryConfig(shape="connection", max_streams=5000)


@asynccontextmanager
async def raw(
    ends: Ends,
    carrier: MemoryConfig = MANY_STREAMS,
    *,
    listening: bool = True,
    pairs: dict[str, str] | None = None,
) -> AsyncIterator[Raw]:
    """Connect to the server as a peer of one's own making, and be let in; `listening`: it takes what comes on its streams."""
    url = ends.listener.url.removeprefix("maop+")
    async with carriers.dial(url, carried.settings(url.partition(":")[0], carrier)) as connection:
        peer = Raw(connection)
        stream = await peer.connection.open_stream()
        stream.send_nowait(Authentication("Bearer", b"secret", pairs or {}, Version(1, 0, 0), "raw").encode(), fin=True)
        while await stream.receive_some():
            pass
        async with trio.open_nursery() as nursery:
            if listening:
                nursery.start_soon(_quietly, peer.listen)
            yield peer
            nursery.cancel_scope.cancel()


async def _quietly(listen: Any) -> None:
    try:
        await listen()
    except* carriers_errors():
        pass


def carriers_errors() -> type[Exception]:
    from levada.framework.errors import CarrierError

    return CarrierError


async def test_a_bad_peer_harms_itself_only(start: Start, autojump_clock: MockClock) -> None:
    """Giant lengths, octets without Proceed, second headers, unknown operations, streams that never finish."""
    ran: list[int] = []

    async def keep(call: Call) -> None:
        ran.append(len(await call.body()))

    handlers = {100: Handler(keep, spec=HandlerSpec(max_payload=2**62)), 101: echo}
    async with start(handlers) as ends, raw(ends) as bad:
        giant = await bad.open(Message(100, 2**61), uni=True)
        eager = await bad.open(Message(100, 5), uni=True)
        eager.send_nowait(Block(b"eager").encode())
        twice = await bad.open(Message(100, 5), uni=True)
        twice.send_nowait(Message(100, 5).encode())
        unknown = await bad.connection.open_stream(unidirectional=True)
        unknown.send_nowait(b"\xff" * 100)
        stuck = await bad.open(Message(100, 5), uni=True)
        half = await bad.connection.open_stream()
        half.send_nowait(b"\x01\x00")
        assert await ends.peer.request(101, b"unharmed") == b"unharmed"
        await trio.sleep(1)
        signals = bad.signals()
        fails = {s.target_stream_id: s.error_code for s in signals if isinstance(s, Fail)}
        assert fails == {eager.stream_id: 1, twice.stream_id: 12, unknown.stream_id: 10}
        refused = [entry for s in signals if type(s).__name__ == "Refuse" for entry in s.entries]
        assert [(entry[0], entry[2]) for entry in refused] == [(giant.stream_id, 2)]  # it could never be held
        assert [i for s in signals if isinstance(s, Proceed) for i in s.stream_ids] == [stuck.stream_id]
        await trio.sleep(40)  # the transfer's idle time
        fails = {s.target_stream_id: s.error_code for s in bad.signals() if isinstance(s, Fail)}
        assert fails[stuck.stream_id] == 5
        assert fails[half.stream_id] == 5
        assert ran == []
        assert await ends.peer.request(101, b"unharmed") == b"unharmed"


@pytest.mark.rule("MA-88")
async def test_ma88_a_flood_of_signals_ends_the_flooder_only(start: Start, autojump_clock: MockClock) -> None:
    """Above the rate control streams are not read; after 5 s of that the connection ends by CAPACITY_LIMIT (14)."""
    core = MaopConfig(control=ControlConfig(signal_rate=1000.0, signal_burst=2000, max_strikes=1000))
    async with start({101: echo}, core=core) as ends, raw(ends) as bad:
        control = await bad.control()
        flood = Done(((2, 0, 0),) * 1000).encode()

        async def pour() -> None:
            while True:
                await control.send_all(flood)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(_quietly, pour)
            reason = await bad.connection.wait_closed()
            nursery.cancel_scope.cancel()
        assert (reason.code, reason.by_peer, reason.text) == (0x100 + 14, True, "too many signals")
        assert trio.current_time() == pytest.approx(5.0, abs=1.0)
        assert await ends.peer.request(101, b"unharmed") == b"unharmed"
        assert len(ends.listener.peers) == 1


@pytest.mark.rule("MA-87")
async def test_ma87_too_many_control_streams_end_the_connection(start: Start, autojump_clock: MockClock) -> None:
    """A peer with more than 16 control streams open at once is closed by PROTOCOL_VIOLATION (12)."""
    async with start({101: echo}) as ends, raw(ends) as bad:
        for _ in range(17):
            (await bad.control()).send_nowait(Proceed(()).encode())
        assert (await bad.connection.wait_closed()).code == 0x100 + 12
        assert await ends.peer.request(101, b"unharmed") == b"unharmed"


@pytest.mark.rule("MA-93")
async def test_ma93_a_disconnect_is_an_orderly_end(start: Start, autojump_clock: MockClock) -> None:
    """Disconnect: immediate end; the receiver cancels all operations and closes with 0."""
    said: list[str] = []

    async def hang(call: Call) -> None:
        await trio.sleep_forever()

    async def undo(call: Call, reason: str) -> None:
        said.append(reason)

    async with start({100: Handler(hang, on_cancel=undo)}) as ends, raw(ends) as bad:
        await bad.open(Request(100, 0), uni=False)
        await trio.sleep(1)
        (await bad.control()).send_nowait(Disconnect().encode())
        assert (await bad.connection.wait_closed()).code == 0
        await trio.sleep(1)
        assert said == ["the connection is over"]
        assert len(ends.listener.peers) == 1


@pytest.mark.rule("MA-53")
async def test_ma53_a_flood_of_operations_is_bounded(start: Start, autojump_clock: MockClock) -> None:
    """At most max_pending_approvals operations wait; above, Refuse CAPACITY_LIMIT at once."""
    server = PeerConfig(
        core=MaopConfig(gate=GateConfig(max_pending_approvals=50, max_inflight_ops=10)),
        carrier=MemoryConfig(shape="connection", max_streams=5000, max_streams_unidirectional=5000),
    )

    async def hang(call: Call) -> None:
        await trio.sleep(1)

    async with start({100: hang, 101: echo}, server={"config": server}) as ends, raw(ends) as bad:
        for _ in range(1000):
            await bad.open(Request(100, 0, timeout_ms=0), uni=False)
        await trio.sleep(0.5)
        victim = next(peer for peer in ends.listener.peers if peer.vendor == "raw").statistics()
        assert victim.refused[14] == 1000 - 60
        assert (victim.handlers, victim.pending_approvals) == (10, 50)
        assert await ends.peer.request(101, b"x", timeout=None) == b"x"


async def test_a_system_may_hold_many_listeners(autojump_clock: MockClock, scheme: str) -> None:
    from levada.actors.maop import serve

    from .conftest import TOKENS

    async with (
        ActorSystem() as system,
        serve(system, f"maop+{scheme}://a", {101: echo}, authenticate=TOKENS) as a,
        serve(system, f"maop+{scheme}://b", {101: nothing}, authenticate=TOKENS) as b,
        connect(system, a.url, token=b"secret") as to_a,
        connect(system, b.url, token=b"secret") as to_b,
    ):
        assert (await to_a.request(101, b"x"), await to_b.request(101, b"x")) == (b"x", b"")
        assert a.metrics.confirms_total == b.metrics.confirms_total == 1
