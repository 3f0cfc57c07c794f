"""A browser that looks at a node through its driver."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from tests.surroundings import measure_by
from trio.testing import MockClock

from levada.actors.console import View, Viewer
from levada.actors.nodes.inspection import SILENCE
from levada.framework import ActorSystem

from .apps import Counter, app
from .conftest import nodes_here


@pytest.fixture(autouse=True)
async def searches_take_no_time() -> None:
    """A search goes on in the next answer when it has taken too long, as it may on a busy machine."""
    measure_by(lambda: 0.0)


def view(**members: Any) -> dict[str, Any]:
    return {"view": View(**members).to_json()}


async def found(viewer: Viewer, node: str, kind: str) -> list[str]:
    """Paths of the actors of a class on a node, by a search."""
    answer = await viewer.answer(view(node=node, search=kind))
    assert (answer["node"], answer["system"], answer["searching"]) == (node, node, False)
    return [row["path"] for row in answer["rows"]]


async def test_a_browser_sees_and_changes_the_actors_of_a_node(autojump_clock: MockClock) -> None:
    async with ActorSystem("driver") as system, nodes_here(system, 2, app) as (nodes, _):
        viewer = Viewer(system, actions=True)
        elsewhere = await found(viewer, "n0", "Counter")
        others = await found(viewer, "n1", "Counter")
        counter = await nodes.spawn(Counter, on="n1")
        assert await found(viewer, "n0", "Counter") == elsewhere
        (path,) = set(await found(viewer, "n1", "Counter")) - set(others)
        answer = await viewer.answer(view(node="n1", search="Counter", selected=path))
        assert (answer["detail"]["kind"], answer["actions"]) == ("Counter", ["stop", "kill", "restart"])
        asked = await viewer.answer({"act": "stop", "path": path, "node": "n1"})
        assert (asked["act"], asked["path"]) == ("stop", path)
        assert await viewer.answer({"confirm": "guessed", "node": "n1"}) == {
            "node": "n1",
            "refused": "there is nothing to confirm: the actor has ended, or a minute has passed",
        }
        asked = await viewer.answer({"act": "stop", "path": path, "node": "n1"})
        assert await viewer.answer({"confirm": asked["confirm"], "node": "n1"}) == {
            "node": "n1",
            "done": f"stop {path}",
        }
        await counter.terminated()
        assert await found(viewer, "n1", "Counter") == others
        viewer.close()


async def test_what_the_driver_does_not_allow_is_refused_on_a_node(autojump_clock: MockClock) -> None:
    async with ActorSystem("driver") as system, nodes_here(system, 1, app):
        viewer = Viewer(system)
        answer = await viewer.answer({"act": "kill", "path": "/app", "node": "n0"})
        assert answer["refused"].startswith("actions are not allowed")
        viewer.close()


async def test_a_look_at_a_node_ends_when_the_browser_leaves(autojump_clock: MockClock) -> None:
    async with ActorSystem("driver") as system, nodes_here(system, 1, app):
        first, second = Viewer(system), Viewer(system)
        assert len(await found(first, "n0", "Watcher")) == 1
        assert len(await found(second, "n0", "Watcher")) == 2
        await trio.sleep(0.5 * SILENCE)
        assert len(await found(first, "n0", "Watcher")) == 2
        await trio.sleep(0.6 * SILENCE)
        assert len(await found(first, "n0", "Watcher")) == 1
        assert "away" in await second.answer(view(node="n0"))
        assert len(await found(second, "n0", "Watcher")) == 2  # it began anew
        first.close()
        second.close()


async def test_a_node_that_is_lost_is_away_until_it_is_back(autojump_clock: MockClock) -> None:
    async with ActorSystem("driver") as system, nodes_here(system, 1, app) as (_, tasks):
        viewer = Viewer(system)
        await found(viewer, "n0", "Watcher")
        tasks[0].kill()
        answer = await viewer.answer(view(node="n0"))
        assert (answer["node"], answer["last"]) == ("n0", 0)
        assert answer["away"].startswith("n0: ")
        refused = await viewer.answer({"act": "kill", "path": "/app", "node": "n0"})
        assert "refused" in refused
        await trio.sleep(60)
        assert len(await found(viewer, "n0", "Watcher")) == 1
        answer = await viewer.answer(view(node="n7"))
        assert answer["away"] == "n7: there is no node 'n7'; there are: n0"
        viewer.close()
