"""Placement on nodes that are hosts of a network which loses, delays and parts, in virtual time: owners never both write."""

from __future__ import annotations

import random

import pytest
import trio
from trio.testing import MockClock

pytest.importorskip("pyarrow")

from tests.actors.durable.log_reader import check_rows
from tests.actors.durable.memory_journal import MemoryJournal, Row
from tests.actors.durable.purses import Clerk, Errand, Paid, Pay, Purse, Total, app
from tests.actors.nodes.network import DRIVER, nodes_on_network
from tests.seeds import seeds
from tests.simnet import SimNet

from levada.actors.durable import placement, shards
from levada.actors.durable.rows import OWNED, ShardLog
from levada.actors.nodes import NodeLost
from levada.framework import ActorSystem
from levada.framework.errors import LevadaError
from levada.transports.quic import QuicConfig

SHARDS = 4
ENTITIES = [f"purse-{number}" for number in range(8)]


@pytest.mark.ci
@seeds(1, 6)
async def test_whatever_partitions_there_are_owners_never_both_write(
    quic: tuple[QuicConfig, QuicConfig], autojump_clock: MockClock, seed: int, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The driver opens shards elsewhere before their old owners know; each command with an id is done once; in the end all shards are back."""
    caplog.set_level("CRITICAL", "levada")
    monkeypatch.setattr(placement, "CLOSING", 1.0)  # so that there are two owners
    rng = random.Random(seed)
    net = SimNet(seed, turns=500_000, delay=0.01, jitter=0.01, loss=0.02)
    rows: list[list[Row]] = [[] for _ in range(SHARDS)]
    answers: dict[str, int] = {}
    all_done = trio.Event()
    async with (
        ActorSystem("driver", ask_timeout=5.0) as system,
        nodes_on_network(system, 3, app, net, quic) as (nodes, hosts),
    ):
        journal = system.spawn(MemoryJournal, ShardLog((Paid,)).schema, rows)
        purses = await shards(
            system, Purse, events=Paid, journal=journal, shards=SHARDS, nodes=nodes, snapshot_every=3, idle=5.0
        )

        async def customer(entity: str, customer: int) -> None:
            for number in range(12):
                await trio.sleep(rng.random() * 6)
                name, pay = f"{entity}/{customer}/{number}", Pay(rng.randrange(1, 10))
                while name not in answers:
                    try:
                        if rng.random() < 0.5:
                            clerk = await nodes.spawn(Clerk, on="any")
                            answers[name] = await clerk.ask(Errand(entity, pay, name), timeout=8.0)
                        else:
                            answers[name] = await purses[entity].ask(pay, command=name, timeout=8.0)
                    except LevadaError:
                        await trio.sleep(0.5)
            if len(answers) == len(ENTITIES) * 24:
                all_done.set()

        async def restart(name: str) -> None:
            try:
                await nodes.restart(name)
            except NodeLost:
                pass

        async with trio.open_nursery() as nursery:
            for entity in ENTITIES:
                for number in range(2):
                    nursery.start_soon(customer, entity, number)
            for _ in range(25):
                await trio.sleep(rng.choice([0.0, 0.1, 1.0, 4.0]))
                match rng.choice(["part", "part", "part", "heal", "kill", "restart", "restart"]):
                    case "part":
                        hosts.divide(*rng.sample(hosts.living(), k=min(len(hosts.living()), rng.choice([2, 2, 3]))))
                    case "heal":
                        hosts.heal()
                    case "kill":
                        hosts.task(rng.choice(["n0", "n1", "n2"])).die()
                    case _:
                        name = rng.choice(["n0", "n1", "n2"])
                        if rng.random() < 0.7 and not hosts.task(name).gone.is_set():
                            hosts.divide(hosts.task(name).host, DRIVER)
                        nursery.start_soon(restart, name)
            await trio.sleep(rng.choice([0.0, 30.0]))
            hosts.heal()
            with trio.fail_after(300):
                await all_done.wait()
        totals = {name: await purses[name].ask(Total(), timeout=60.0) for name in ENTITIES}
        assert check_rows(rows, answers) == totals
        owned = sum(row["kind"] == OWNED for each in rows for row in each)
        assert owned > SHARDS  # some have moved
        purses.ref.stop()
        await purses.ref.terminated()
