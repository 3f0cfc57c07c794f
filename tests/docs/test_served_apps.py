"""The apps of the pages on singletons and on durable actors on nodes answer requests as they are written there, in one process."""

from __future__ import annotations

import re
import sys
import types
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

pytest.importorskip("pyarrow")

from levada.actors import rsocket
from levada.actors.durable import Durable, applies
from levada.framework import Actor, ActorSystem, Asks, handles, message

HOW_TO = Path(__file__).resolve().parents[2] / "docs" / "how-to"


@message
class Bid(Asks[str]):
    text: str


class House(Actor[Bid]):
    @handles
    def bid(self, m: Bid) -> str:
        return m.text.upper()


@message
class Deposit(Asks[int]):
    amount: int


@message
class Deposited:
    amount: int


@message
class Withdrawn:
    amount: int


class Account(Durable[Deposit]):
    balance: int = 0

    @handles
    def deposit(self, m: Deposit) -> int:
        self.record(Deposited(m.amount))
        return self.balance

    @applies
    def deposited(self, e: Deposited) -> None:
        self.balance += e.amount

    @applies
    def withdrawn(self, e: Withdrawn) -> None:
        self.balance -= e.amount


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A module with what the apps of the pages leave out."""
    module = types.ModuleType("served_app")
    vars(module).update({each.__name__: each for each in (Bid, House, Account, Deposit, Deposited, Withdrawn)})
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


@pytest.mark.parametrize(
    ("page", "requests", "answers"),
    [
        ("one-of-a-kind.md", [b"a lamp"], [b"A LAMP"]),
        ("durable-on-nodes.md", [b"anna 1", b"anna 1", b"anna 2"], [b"5", b"5", b"10"]),
    ],
)
async def test_the_app_of_the_page_answers(
    page: str,
    requests: list[bytes],
    answers: list[bytes],
    module: types.ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    code = re.findall(r"```python\n(.*?)```", (HOW_TO / page).read_text("utf-8"), re.DOTALL)[0]
    exec(compile(code.replace("rsocket+tcp://127.0.0.1:7000", "rsocket+memory://app"), page, "exec"), vars(module))
    async with (
        ActorSystem() as system,
        asynccontextmanager(module.app)(system) as listener,
        rsocket.connect(system, listener.url) as peer,
    ):
        assert [bytes((await peer.request_response(each)).data) for each in requests] == answers
