"""An answer is what the handler returned, whatever later commands do to the state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
import trio

pytest.importorskip("pyarrow")

from levada.actors.durable import Durable, Shards, applies, shards
from levada.actors.durable.turns import copy_of
from levada.framework import ActorSystem, Asks, Receiver, Sender, channel, handles, message


@message("test.answers.basket")
class Basket:
    items: list[int]


@message("test.answers.put")
class Put(Asks[list[int]]):
    item: int


@message("test.answers.put_in")
class PutIn(Asks[Basket]):
    item: int


@message("test.answers.look")
class Look(Asks[dict[str, list[int]]]):
    pass


@message("test.answers.was_put")
class WasPut:
    item: int


class Shopper(Durable[Put | PutIn | Look]):
    basket: Basket = attrs.field(factory=lambda: Basket([]))

    @handles
    def put(self, m: Put) -> list[int]:
        self.record(WasPut(m.item))
        return self.basket.items

    @handles
    def put_in(self, m: PutIn) -> Basket:
        self.record(WasPut(m.item))
        return self.basket

    @handles
    def look(self, _: Look) -> dict[str, list[int]]:
        return {"items": self.basket.items}

    @applies
    def was_put(self, e: WasPut) -> None:
        self.basket.items.append(e.item)


async def ask_all(shopper: Any, *questions: tuple[Asks[Any], str | None]) -> list[Any]:
    """Ask at the same time; return the answers in the order of the questions."""
    answers: list[Any] = [None] * len(questions)

    async def ask(place: int, question: Asks[Any], command: str | None) -> None:
        answers[place] = await shopper.ask(question, command=command)

    async with trio.open_nursery() as nursery:
        for place, (question, command) in enumerate(questions):
            nursery.start_soon(ask, place, question, command)
    return answers


async def shoppers_in(system: ActorSystem, folder: Path) -> Shards[Any]:
    return await shards(system, Shopper, events=WasPut, journal=folder, shards=1)


@pytest.mark.parametrize("ids", [("a", "b", "c"), (None, None, None)])
async def test_later_commands_do_not_change_an_answer(tmp_path: Path, ids: tuple[str | None, ...]) -> None:
    questions: list[tuple[Asks[Any], str | None]] = list(zip([Put(0), PutIn(1), Put(2)], ids, strict=True))
    async with ActorSystem("test", ask_timeout=60.0) as system:
        shopper = (await shoppers_in(system, tmp_path))["anna"]
        answers = await ask_all(shopper, *questions)
        # The askers begin in any order.
        assert sorted(len(each.items if isinstance(each, Basket) else each) for each in answers) == [1, 2, 3]
    if ids[0] is not None:
        async with ActorSystem("test", ask_timeout=60.0) as system:
            shopper = (await shoppers_in(system, tmp_path))["anna"]
            assert await ask_all(shopper, *questions) == answers


async def test_an_asker_cannot_change_the_state(tmp_path: Path) -> None:
    async with ActorSystem("test", ask_timeout=60.0) as system:
        shopper = (await shoppers_in(system, tmp_path))["anna"]
        await shopper.ask(Put(1))
        (await shopper.ask(Look()))["items"].clear()
        assert await shopper.ask(Look()) == {"items": [1]}


@message("test.answers.frozen", frozen=True)
class Frozen:
    value: Any


def test_mutable_values_are_copied_with_what_is_in_them() -> None:
    inner = [1]
    for value in ([inner], {"a": inner}, (0, inner), Basket(inner), Frozen(inner), Frozen({1: (Basket(inner),)})):
        found = copy_of(value)
        inner.append(2)
        assert found != value
        assert type(found) is type(value)
        inner.pop()
        assert found == value
    for each in ({1, 2}, bytearray(b"a"), [1], {1: 2}):
        assert copy_of(each) == each
        assert copy_of(each) is not each


def test_values_that_cannot_change_and_handles_are_not_copied() -> None:
    sender: Sender[int]
    receiver: Receiver[int]
    sender, receiver = channel(int)
    with sender, receiver:
        for value in (1, "a", (1, (2.0, b"")), frozenset({1}), Frozen(1), Frozen((1, Frozen("a"))), sender, receiver):
            assert copy_of(value) is value
        found = copy_of([Frozen([sender]), {"r": receiver}])
        assert found[0].value[0] is sender
        assert found[1]["r"] is receiver
