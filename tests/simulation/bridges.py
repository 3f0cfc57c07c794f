"""``python -m tests.simulation.bridges FIRST COUNT [MUTANT [LEAST]]``: a bridge for Spark in a world.

As `tests.simulation.fleets`; the last number of a line is how many batches were delivered again.

The bridge has durable accounts that executors ask, the log of their events, and a mailbox into which a stream copies these events.

Spark itself is not simulated. Its side here is what `levada.actors.spark` does in Spark's processes, without threads: executors ask an exposed
actor, each question until it is answered; the driver of a stream plans micro-batches, reads them, stages their copies, and delivers each batch
until it is answered. The plan of a batch outlives the driver, as in Spark's checkpoint.
"""

from __future__ import annotations

import logging
import random
import sys
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import cycle
from pathlib import Path
from typing import Any, Final

import attrs
import pyarrow as pa
import trio
from tests.simulation.apps import leaves
from tests.simulation.bank import Account, Add, Added, Reminded
from tests.simulation.fleets import main

from levada.actors.durable import shards
from levada.actors.journal.columns import columns_of
from levada.actors.journal.log_events import events_of
from levada.actors.rsocket import COMPOSITE, ClientConfig, ConnectedPeer, CoreConfig, RequestFailed, connect
from levada.actors.spark import BridgeConfig, serve_bridge
from levada.actors.spark.desk import Desk
from levada.actors.spark.protocol import (
    BlockHead,
    CommitOffsets,
    Declare,
    DeliverBatch,
    Describe,
    Description,
    ReadBlocks,
    StageHead,
    Token,
    raised,
    rows_payload,
)
from levada.framework import Actor, ActorSystem, Asks, Codec, handles, message, restart
from levada.framework.errors import LevadaError
from levada.framework.testing.simulation import Faults, World, check_linear
from levada.transports.carriers import TlsConfig
from levada.transports.rsocket import Payload
from levada.transports.rsocket.extensions import BearerAuthentication, CompositeMetadata

__all__ = ["FAULTS", "Bridges", "Executors", "Tell"]

FAULTS: Final = Faults(strikes=10, every=0.7, disk_errors=2.0, power_failures=2.0, aims={"Deliver", "Tell", "commit"})
"""Strikes at random times; in half of the worlds, also at questions of executors, deliveries, and commits of the ledger."""
_FOLDER: Final = "/bridge"
_PORT: Final = 7100
_ENTRIES: Final = 10
"""Questions of each executor."""
_EXECUTORS: Final = 2
_PARTITIONS: Final = 2
_COPIED: Final = "copied"
"""The mailbox of the copies, and the group of the stream."""


@message("simulation.bridges.Tell")
class Tell(Asks[int]):
    """Add an id to an account; the answer is its number."""

    account: str
    id: str


@message("simulation.bridges.Copy")
class Copy:
    """The copy of an event."""

    account: str
    id: str


_COPIES: Final = columns_of(Copy)

_codec: Final = Codec()


class Teller(Actor[Tell]):
    """Passes questions of executors on to accounts."""

    accounts: Any

    @handles
    async def tell(self, m: Tell) -> int:
        """Ask the account."""
        return int(await self.accounts[m.account].ask(Add(m.id), command=m.id, timeout=20.0))


@attrs.define
class _Batch:
    """A micro-batch: its number, and the rows of each partition that are in it."""

    number: int
    start: dict[int, int]
    end: dict[int, int]
    epoch: str
    opening: str


@attrs.define
class _Checkpoint:
    """What a stream keeps outside of its driver."""

    batch: _Batch | None = None
    """The batch that was planned, and is not known to be delivered."""
    number: int = 0
    offsets: dict[int, int] = attrs.field(factory=dict)


@attrs.define(eq=False)
class Executors:
    """Processes of Spark, which ask an actor of levada.

    Args:
        certificate: of the machine ``server``, its own authority, and its key, in one file: executors are on another machine and come over TLS.
            None: all are on one machine.
    """

    certificate: Path | None = None
    errors: list[str] = attrs.field(factory=list)
    """Why connections have ended."""
    _token: Token | None = None
    """The token of the server, as it is shipped with a job."""

    @property
    def machines(self) -> tuple[str, ...]:
        """The machines of a world, the one of the server first."""
        return ("machine",) if self.certificate is None else ("server", "client")

    @property
    def config(self) -> BridgeConfig:
        """The settings of a bridge."""
        return BridgeConfig(tls=None if self.certificate is None else TlsConfig(certificate=self.certificate))

    def url(self, port: int) -> str | None:
        """Return where a bridge listens for other machines."""
        return None if self.certificate is None else f"tls://0.0.0.0:{port}"

    def open(self, desk: Desk) -> None:
        """Take note of a bridge that listens."""
        self._token = Token.read(desk.token_file)

    async def start(self, world: World, addresses: Sequence[str]) -> list[trio.Event]:
        """Start executors; each event is set when the ids of one of them are in their accounts.

        Args:
            world: has a bridge with the actor ``teller``, or nodes.
            addresses: of them, for executors.
        """
        asked = []
        for number in range(_EXECUTORS):
            todo = deque((f"e{n % 3}", f"{number}.{n}") for n in range(_ENTRIES))
            asked.append(trio.Event())
            process = self._executor(world, todo, asked[-1], addresses)
            await world.start(f"executor {number}", process, machine=self.machines[-1], restart=0.5)
        return asked

    async def check(self, world: World, asked: Sequence[trio.Event]) -> None:
        """Wait for executors, and check the history."""
        for each in asked:
            await each.wait()
        check_linear(world.history, _apply, ())

    def _executor(
        self, world: World, todo: deque[tuple[str, str]], done: trio.Event, addresses: Sequence[str]
    ) -> Callable[[], Awaitable[None]]:
        async def ask(peer: ConnectedPeer, account: str, id: str) -> int:
            return await peer.request_response(Tell(account, id), route="ask/teller")

        async def work(peer: ConnectedPeer) -> None:
            while todo:
                account, id = todo[0]
                await world.history.call(account, id, lambda id: ask(peer, account, id))  # noqa: B023 - awaited here
                todo.popleft()
                await trio.sleep(0.3)

        async def process() -> None:
            await self.until_done(work, addresses)
            done.set()

        return process

    async def until_done(self, work: Callable[[ConnectedPeer], Awaitable[None]], addresses: Sequence[str]) -> None:
        """Work over a connection, as processes of Spark have it; over another one, to the next address, if that fails."""
        for address in cycle(addresses):
            try:
                async with ActorSystem() as system, self._connect(system, address) as peer:
                    await work(peer)
            except* LevadaError as group:
                self.errors += [repr(error) for error in leaves(group)]
                await trio.sleep(0.2)
            else:
                return

    @asynccontextmanager
    async def _connect(self, system: ActorSystem, address: str) -> AsyncIterator[ConnectedPeer]:
        carrier = None
        if self.certificate is None:
            token = Token.read(Path(address.removeprefix("unix://")).with_name("bridge.token"))
        else:
            while self._token is None:  # noqa: ASYNC110 - it is shipped when there is a bridge
                await trio.sleep(0.1)
            token = self._token
            carrier = TlsConfig(ca=token.trust.encode())
        setup = Payload(b"", CompositeMetadata.of(BearerAuthentication(token.secret)).encode())
        core = CoreConfig(metadata_mime_type=COMPOSITE, setup_payload=setup)
        async with connect(system, f"rsocket+{address}", config=ClientConfig(core=core, carrier=carrier)) as peer:
            yield peer


class Bridges(Executors):
    """Bridges, executors and streams of all worlds."""

    def __init__(self, certificate: Path | None = None) -> None:
        super().__init__(certificate)
        self.delivered = 0
        """Batches that were answered."""
        self.repeated = 0
        """Batches that the mailbox had already."""
        self._checkpoint = _Checkpoint()
        self._copied = 0
        self._address = [f"unix://{_FOLDER}/bridge.socket" if certificate is None else f"tls://server:{_PORT}"]

    async def run(self, world: World) -> None:
        """Run until each id of each executor is in its account and was copied, and check the history."""
        self.errors, self._token, self._checkpoint, self._copied = [], None, _Checkpoint(), 0
        await world.start("bridge", self._serve, machine=self.machines[0], restart=0.5)
        asked = await self.start(world, self._address)
        done = trio.Event()
        await world.start("stream", self._stream(world, done), machine=self.machines[-1], restart=0.5)
        await done.wait()
        await self.check(world, asked)

    async def _serve(self) -> None:
        async with (
            ActorSystem("bridge", ask_timeout=10.0) as system,
            serve_bridge(system, _FOLDER, url=self.url(_PORT), config=self.config) as bridge,
        ):
            self.open(bridge)
            accounts = await shards(
                system, Account, events=Added | Reminded, journal="/accounts", shards=_PARTITIONS, idle=5.0
            )
            bridge.expose("teller", system.spawn(Teller, accounts, supervise=restart()))
            await bridge.log("accounts", accounts)
            await bridge.mailbox(_COPIED, Copy, partitions=_PARTITIONS)
            await trio.sleep_forever()

    def _stream(self, world: World, done: trio.Event) -> Any:
        async def process() -> None:
            rng = random.Random(f"stream {world.seed} {trio.current_time()}")

            async def copy(peer: ConnectedPeer) -> None:
                while self._copied < _EXECUTORS * _ENTRIES:
                    await self._step(peer, rng)
                    await trio.sleep(rng.choice((0.05, 0.3, 1.0)))

            await self.until_done(copy, self._address)
            world.strikes.stop()
            await self.until_done(self._check, self._address)
            done.set()

        return process

    async def _step(self, peer: ConnectedPeer, rng: random.Random) -> None:
        """Plan a batch, unless one is planned, and deliver it."""
        kept = self._checkpoint
        if kept.batch is None:
            found: Description = await _ask(peer, "accounts", Describe())
            start = kept.offsets or await _ask(peer, "accounts", Declare(_COPIED))
            if found.end == start:
                return
            kept.batch = _Batch(kept.number, start, dict(found.end), found.epoch, found.opening)
        batch, winners, rows = kept.batch, {}, {}
        for part in batch.end:
            copies = [
                Copy(row["entity"], row["id"])
                async for events in _read(peer, "accounts", batch, part)
                for row in events.to_pylist()
                if row["kind"] == "simulation.bank.Added"
            ]
            winners[part], rows[part] = rng.getrandbits(62), len(copies)
            if copies:
                head = StageHead(_COPIED, batch.number, part, winners[part])
                await _sent(peer, rows_payload(f"mailbox/{_COPIED}/stage", head, _COPIES.encode(copies)))
        staged = {part: winners[part] for part in winners if rows[part]}
        after = batch.number - 1 if batch.number else None
        question = DeliverBatch(_COPIED, batch.number, staged, {part: rows[part] for part in staged}, after)
        delivered = await _ask(peer, _COPIED, question)
        self.delivered += 1
        self.repeated += delivered.already
        self._copied += sum(rows.values())
        kept.batch, kept.number, kept.offsets = None, batch.number + 1, batch.end
        await _ask(peer, "accounts", CommitOffsets(_COPIED, batch.epoch, batch.end))

    async def _check(self, peer: ConnectedPeer) -> None:
        """Each id was added once, and its event was copied once."""
        wanted = Counter((f"e{n % 3}", f"{number}.{n}") for number in range(_EXECUTORS) for n in range(_ENTRIES))
        for mailbox in ("accounts", _COPIED):
            found: Description = await _ask(peer, mailbox, Describe())
            whole = _Batch(0, dict(found.first), dict(found.end), found.epoch, found.opening)
            rows = [
                row
                for part in whole.end
                async for batch in _read(peer, mailbox, whole, part)
                for row in batch.to_pylist()
            ]
            assert Counter((row.get("entity") or row["account"], row["id"]) for row in rows) == wanted, mailbox


async def _sent(peer: ConnectedPeer, request: Payload) -> Payload:
    try:
        return await peer.request_response(request)
    except RequestFailed as error:
        raise raised(error) from error


async def _ask(peer: ConnectedPeer, mailbox: str, question: Asks[Any]) -> Any:
    try:
        return await peer.request_response(question, route=f"mailbox/{mailbox}")
    except RequestFailed as error:
        raise raised(error) from error


async def _read(peer: ConnectedPeer, mailbox: str, batch: _Batch, part: int) -> AsyncIterator[pa.RecordBatch]:
    """Yield rows of one partition; of a log, the events."""
    start, end = batch.start.get(part, 0), batch.end[part]
    if start == end:
        return
    question = _codec.encode(ReadBlocks(part, start, end, batch.epoch, batch.opening))
    schema = None
    async with await peer.request_stream(question, route=f"mailbox/{mailbox}/read") as items:
        async for item in items:
            head = BlockHead.decode(item.metadata or b"")
            assert head.first == start, f"rows from {head.first} on came, where those from {start} on were due"
            start += head.rows
            schema = pa.ipc.read_schema(pa.py_buffer(head.schema)) if head.schema else schema
            if item.data:
                rows = pa.ipc.read_record_batch(pa.py_buffer(item.data), schema).slice(head.skip, head.rows)
                yield events_of(rows) if mailbox == "accounts" else rows
    assert start == end, f"rows ended at {start}, wanted up to {end}"


def _apply(ids: tuple[str, ...], id: str) -> tuple[tuple[str, ...], int]:
    after = ids if id in ids else (*ids, id)
    return after, after.index(id) + 1


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    bridges = Bridges()
    main(*sys.argv[1:], scenario=bridges.run, faults=FAULTS, more=lambda: bridges.repeated)
