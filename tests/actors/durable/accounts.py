"""A durable account, as the tests of durable actors use it."""

from __future__ import annotations

import pytest

pytest.importorskip("pyarrow")

from levada.actors.durable import Durable, applies
from levada.framework import Asks, handles, message


@message("test.durable.deposit", frozen=True)
class Deposit(Asks[int]):
    amount: int


@message("test.durable.withdraw", frozen=True)
class Withdraw(Asks[int]):
    amount: int


@message("test.durable.balance", frozen=True)
class Balance(Asks[int]):
    pass


@message("test.durable.move", frozen=True)
class Move(Asks[int]):
    """Several deposits, one event each."""

    amounts: list[int]


@message("test.durable.deposited", frozen=True)
class Deposited:
    amount: int


@message("test.durable.withdrawn", frozen=True)
class Withdrawn:
    amount: int
    note: str = ""


class Account(Durable[Deposit | Withdraw | Balance | Move]):
    balance: int = 0

    @handles
    def deposit(self, m: Deposit) -> int:
        self.record(Deposited(m.amount))
        return self.balance

    @handles
    def withdraw(self, m: Withdraw) -> int:
        self.record(Withdrawn(m.amount))
        if self.balance < 0:
            raise ValueError(f"{self.entity} has {self.balance}")
        return self.balance

    @handles
    def look(self, _: Balance) -> int:
        return self.balance

    @handles
    def move(self, m: Move) -> int:
        self.record(*map(Deposited, m.amounts))
        return self.balance

    @applies
    def deposited(self, e: Deposited) -> None:
        self.balance += e.amount

    @applies
    def withdrawn(self, e: Withdrawn) -> None:
        self.balance -= e.amount


EVENTS = Deposited | Withdrawn
