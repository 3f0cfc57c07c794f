"""The side of `accounts.py` that runs on nodes: durable accounts, and their commands and events.

It is a module of its own because nodes import it: what is in the main module of a program is not known elsewhere.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from levada.actors.durable import Durable, applies
from levada.framework import ActorSystem, Asks, handles, message


@message("accounts.Deposit", frozen=True)
class Deposit(Asks[int]):
    amount: int


@message("accounts.Withdraw", frozen=True)
class Withdraw(Asks[int]):
    """Take out what is asked for, or what is there."""

    amount: int


@message("accounts.Balance", frozen=True)
class Balance(Asks[int]):
    pass


@message("accounts.deposited", frozen=True)
class Deposited:
    amount: int


@message("accounts.withdrawn", frozen=True)
class Withdrawn:
    amount: int


class Account(Durable[Deposit | Withdraw | Balance]):
    balance: int = 0

    @handles
    def deposit(self, m: Deposit) -> int:
        self.record(Deposited(m.amount))
        return self.balance

    @handles
    def withdraw(self, m: Withdraw) -> int:
        amount = min(m.amount, self.balance)
        if amount:
            self.record(Withdrawn(amount))
        return amount

    @handles
    def look(self, _: Balance) -> int:
        return self.balance

    @applies
    def deposited(self, e: Deposited) -> None:
        self.balance += e.amount

    @applies
    def withdrawn(self, e: Withdrawn) -> None:
        self.balance -= e.amount


async def app(system: ActorSystem) -> AsyncIterator[None]:
    """What runs on each node: nothing of its own, the driver places the accounts."""
    yield
