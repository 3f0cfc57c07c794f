"""An account service that is killed at work: durable actors on two nodes, and Spark checks the books.

::

    python examples/accounts.py --commands 2000
    python examples/accounts.py --no-spark

Clients send deposits and withdrawals, each with an id. In the middle of it one node gets a ``kill -9``. Its accounts go on at the other one, where
they read their events, and clients ask again with the same ids. In the end each command is in the log once: the balances that Spark adds up from
the log are those that the accounts name, and those that the clients have counted. Without Java, ``--no-spark`` adds up the same by pyarrow.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import signal
import tempfile
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import trio
from accounts_node import Account, Balance, Deposit, Deposited, Withdraw, Withdrawn, app

from levada.actors.durable import Shards
from levada.actors.durable import shards as start_shards
from levada.actors.journal import GetExtent, ReadRows
from levada.actors.nodes import NodeDown, Nodes, NodeUp, local_nodes
from levada.actors.spark import serve_bridge, session
from levada.framework import ActorSystem

CLIENTS = 16
ACCOUNTS = [f"account-{number}" for number in range(40)]


class Clients:
    """They send the commands, and count what was answered."""

    def __init__(self, accounts: Shards[Deposit | Withdraw | Balance], commands: int) -> None:
        self.counted = Counter[str]()
        self.done = 0
        self._accounts = accounts
        self._commands = commands
        self._left = iter(range(commands))
        self.half = trio.Event()

    async def run(self) -> None:
        """Send all commands."""
        async with trio.open_nursery() as nursery:
            for _ in range(CLIENTS):
                nursery.start_soon(self._client)

    async def _client(self) -> None:
        for number in self._left:
            dice = random.Random(number)
            name, amount = dice.choice(ACCOUNTS), dice.randint(1, 100)
            # With an id, `ask` may ask again when the node is lost: the account knows what it has done.
            if dice.random() < 0.7:
                await self._accounts[name].ask(Deposit(amount), command=f"deposit-{number}")
                self.counted[name] += amount
            else:
                taken = await self._accounts[name].ask(Withdraw(amount), command=f"withdraw-{number}")
                self.counted[name] -= taken
            self.done += 1
            if self.done % max(1, self._commands // 4) == 0:
                print(f"{self.done} commands answered", flush=True)
            if 2 * self.done >= self._commands:
                self.half.set()


async def kill_one(nodes: Nodes, half: trio.Event) -> None:
    """Kill a node in the middle, and see that it comes back."""
    async with nodes.events() as events:
        await half.wait()
        victim = nodes.members[1]
        os.kill(victim.pid, signal.SIGKILL)
        async for event in events:
            if isinstance(event, NodeDown):
                print(f"{event.member.name} was killed", flush=True)
            elif isinstance(event, NodeUp):
                print(f"{event.member.name} is up again", flush=True)
                return


async def by_pyarrow(accounts: Shards[Deposit | Withdraw | Balance]) -> dict[str, int]:
    """Add up the log, partition by partition."""
    journal = accounts.journal
    assert journal is not None
    balances = Counter[str]()
    for partition, end in (await journal.ask(GetExtent())).end.items():
        at = 0
        while at < end:
            found = await journal.ask(ReadRows(partition, at))
            rows = pa.table(found.batch().select(["entity", "kind", "amount"]))
            for kind, sign in (("accounts.deposited", 1), ("accounts.withdrawn", -1)):
                sums = rows.filter(pc.field("kind") == kind).group_by("entity").aggregate([("amount", "sum")])
                for row in sums.to_pylist():
                    balances[row["entity"]] += sign * row["amount_sum"]
            at = found.end
    return dict(balances)


def by_spark(address: str) -> dict[str, int]:
    """Add up the log in Spark; blocks."""
    spark = session(master="local[2]")
    try:
        events = spark.read.format("mailbox").options(address=address, mailbox="accounts").load()
        signed = events.selectExpr(
            "entity", "CASE kind WHEN 'accounts.deposited' THEN amount ELSE -amount END AS amount"
        )
        return {row[0]: row[1] for row in signed.groupBy("entity").sum("amount").collect()}
    finally:
        spark.stop()


async def main(folder: Path, commands: int, *, spark: bool) -> None:
    async with (
        ActorSystem("bank", ask_timeout=60.0) as system,
        local_nodes(system, 2, app) as nodes,
        serve_bridge(system, folder / "bridge") as bridge,
    ):
        accounts = await start_shards(
            system, Account, events=Deposited | Withdrawn, journal=folder / "log", shards=8, nodes=nodes
        )
        clients = Clients(accounts, commands)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(kill_one, nodes, clients.half)
            await clients.run()
        asked = {name: await accounts[name].ask(Balance()) for name in ACCOUNTS}
        if spark:
            await bridge.log("accounts", accounts)
            books = await trio.to_thread.run_sync(by_spark, bridge.address)
        else:
            books = await by_pyarrow(accounts)
        accounts.ref.stop()
        await accounts.ref.terminated()
    assert {name: books.get(name, 0) for name in ACCOUNTS} == asked
    assert {name: clients.counted[name] for name in ACCOUNTS} == asked
    print(f"{commands} commands, one kill: the log has {sum(books.values())}, as the accounts say")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--commands", type=int, default=2000)
    parser.add_argument("--no-spark", dest="spark", action="store_false", help="add up the log without Spark")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)  # a node that is lost is a warning
    with tempfile.TemporaryDirectory() as directory:
        trio.run(lambda: main(Path(directory), arguments.commands, spark=arguments.spark))
