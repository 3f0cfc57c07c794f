"""The screen of ``levada top``: rows, keys and widths, as values."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from levada.actors.console import NodeSnapshot, Row, Snapshot
from levada.actors.console.view import text
from levada.framework import Statistics

pytest.importorskip("rich")

from levada.actors.cli.screen import Screen, keys_in


def row(path: str, kind: str, *, own: bool = True, level: int | None = None, **members: Any) -> Row:
    fields: dict[str, Any] = {
        "state": "idle", "depth": 0, "age": 0.0, "handled": 0, "restarts": 0, "handler": None, "where": None, "waits_for": (), "hidden": 0,
    }  # fmt: skip
    level = path.count("/") if level is None else level
    return Row(level=level, path=path, kind=kind, own=own, **{**fields, **members})


def snapshot(*rows: Row, **members: Any) -> Snapshot:
    counts = dict.fromkeys(Statistics.__annotations__, 0)
    empty = (0,) * 32
    actors = (row("/", "_Root", own=False, level=0), *rows)
    known = {"system": "town", "phase": "running", "pid": 7, "time": 10.0, "statistics": Statistics(**counts)}
    return Snapshot(**{**known, "turn_times": empty, "queue_times": empty, "actors": actors, **members})


SHOP = snapshot(
    row("/$1", "Console", own=False),
    row("/shop", "Shop"),
    row("/shop/cart", "Cart", depth=3, age=2.0, state="waiting", handler="Cart.add", where="shop.py:7", waits_for=("/shop/till",)),
    row("/shop/till", "Till", depth=12, handled=50, restarts=2),
    row("/$2", "Control", own=False),
    row("/$2/$3", "Supervisor", own=False),
    row("/$2/$3/$4", "Catalogue"),
)  # fmt: skip


def screen(now: Snapshot = SHOP, before: Snapshot | None = None, **members: Any) -> Screen:
    made = Screen(**members)
    made.take(now, before)
    return made


def lines(made: Screen, width: int = 80, height: int = 24) -> list[str]:
    return [line.plain.rstrip() for line in made.lines(width, height)]


def names(made: Screen, **size: int) -> list[str]:
    shown = lines(made, **size)
    begin = next(number for number, line in enumerate(shown) if line.startswith("actor "))
    return [
        line.split("  ")[0] if not line.startswith(" ") else "  " + line.strip().split("  ")[0]
        for line in shown[begin + 1 : -1]
        if line
    ]


def press(made: Screen, *keys: str) -> Screen:
    for key in keys:
        assert not made.press(key)
    return made


def test_the_programs_own_actors_are_shown_wherever_they_are() -> None:
    assert names(screen()) == ["shop", "  cart", "  till", "$2/$3/$4"]


def test_a_key_shows_the_others_after_them() -> None:
    made = press(screen(), "i")
    assert [line.split()[0] for line in lines(made)[3:-1] if line] == [
        "shop",
        "cart",
        "till",
        "$2/$3/$4",
        "$1",
        "$2",
        "$3",
    ]
    assert names(press(made, "i")) == ["shop", "  cart", "  till", "$2/$3/$4"]


def test_actors_of_nodes_are_below_their_node() -> None:
    node = NodeSnapshot(name="n0", state="up", pid=8, host="vm", restarts=0, snapshot=SHOP)
    gone = NodeSnapshot(name="n1", state="down", pid=None, host="", restarts=3, snapshot=None, error="no answer")
    made = screen(snapshot(row("/nodes", "Supervisor", own=False), nodes=(node, gone)))
    assert [line.split()[:2] for line in lines(made)[3:-1] if line] == [
        ["n0", "node"],
        ["shop", "Shop"],
        ["cart", "Cart"],
        ["till", "Till"],
        ["$2/$3/$4", "Catalogue"],
        ["n1", "node"],
    ]


def test_without_a_terminal_levadas_own_actors_of_the_driver_come_behind_the_nodes() -> None:
    """Else they would hide the program's actors, which are on the nodes."""
    shop = attrs.evolve(SHOP, actors=(SHOP.actors[0], row("/shop", "Shop"), row("/$5", "Console", own=False)))
    node = NodeSnapshot(name="n0", state="up", pid=8, host="vm", restarts=0, snapshot=shop)
    shown = text(snapshot(row("/$1", "Console", own=False), row("/desk", "Desk"), nodes=(node,))).splitlines()
    at = next(number for number, line in enumerate(shown) if line.startswith("actor "))
    assert [line.split()[0] for line in shown[at + 1 :]] == ["/", "desk", "n0", "shop", "$5", "$1"]


def test_failures_of_nodes_are_counted_without_a_terminal_too() -> None:
    failed = attrs.evolve(SHOP, statistics=attrs.evolve(SHOP.statistics, actors=6, failures=3), stalls=((9.0, 3.5),))
    node = NodeSnapshot(name="n0", state="up", pid=8, host="vm", restarts=0, snapshot=failed)
    gone = NodeSnapshot(name="n1", state="down", pid=None, host="", restarts=3, snapshot=None, error="no answer")
    lines = text(snapshot(nodes=(node, gone))).splitlines()
    assert lines[0].startswith("town (process 7, running): 6 actors, 0 ready,")
    assert "; so far 3 failures, 0 restarts" in lines[0]
    assert lines[1].endswith("longest stall 3.5 s")
    assert lines[2] == "nodes: 1 up, 1 down"


@pytest.mark.parametrize("width", [80, 100, 120, 200])
def test_every_width_has_whole_states_names_and_keys(width: int) -> None:
    shown = lines(screen(), width=width)
    assert len(shown) == 24
    assert max(map(len, shown)) <= width
    assert any("cart" in line and "waiting" in line for line in shown)
    assert not any("…" in line[:60] for line in shown)  # in the last column it may be
    assert shown[-1] == " q quit  ↑↓ move  ←→ fold  ⏎ detail  / filter  s sort  r reverse  i all"
    assert ("Cart.add shop.py:7 waits for /shop/till" in "\n".join(shown)) == (width >= 120)


def test_a_hundred_rows_scroll() -> None:
    made = screen(snapshot(*(row(f"/a{number:02}", "Actor") for number in range(100))))
    assert names(made)[0] == "a00"
    room = len(names(made))
    press(made, "end")
    assert names(made)[-1] == "a99"
    assert made.at == "/a99"
    press(made, "page up", "up")
    assert made.at == f"/a{98 - room}"
    assert f"a{98 - room}" in names(made)
    assert names(press(made, "home"))[0] == "a00"
    press(made, "down", "j", "k")
    assert (made.at, names(made)[0]) == ("/a01", "a00")


def test_the_chosen_row_stays_chosen() -> None:
    made = press(screen(), "down", "down")
    assert made.at == "/shop/till"
    made.take(snapshot(row("/new", "New"), *SHOP.actors[1:]), SHOP)
    assert made.at == "/shop/till"
    made.take(snapshot(row("/new", "New")), SHOP)
    assert made.at == "/new"


def test_folding() -> None:
    made = press(screen(), "left")
    assert names(made) == ["shop (+2)", "$2/$3/$4"]
    assert names(press(made, "right")) == ["shop", "  cart", "  till", "$2/$3/$4"]
    press(made, "down", "left")
    assert made.at == "/shop"
    assert names(press(made, " ")) == ["shop (+2)", "$2/$3/$4"]
    assert names(press(made, " ")) == ["shop", "  cart", "  till", "$2/$3/$4"]


def test_sorting_and_reversing() -> None:
    made = press(screen(), "s", "s")
    assert made.sort == "queue"
    assert names(made) == ["/shop/till", "/shop/cart", "/shop", "/$2/$3/$4"]
    assert lines(made)[2] == "4 actors, by queue"
    assert names(press(made, "r"))[-1] == "/shop/till"
    assert "reversed" in lines(made)[2]


def test_a_filter_finds_all_actors_by_path_or_class() -> None:
    made = press(screen(), "/", *"CART")
    assert lines(made)[-1].startswith("filter: CART█")
    assert names(made) == ["/shop/cart"]
    press(made, "erase", "erase", "erase", "erase", *"consol", "enter")
    assert names(made) == ["/$1"]
    assert lines(made)[2] == "1 actors with consol (Esc clears), by tree"
    assert names(press(made, "escape")) == ["shop", "  cart", "  till", "$2/$3/$4"]
    # The letter of a command is a letter while one types.
    assert made.press("/") is False
    assert made.press("q") is False
    assert (made.filter, made.press("escape"), made.filter) == ("q", False, "")


def test_the_detail_pane_says_where_the_handler_waits() -> None:
    made = press(screen(), "down", "enter")
    shown = "\n".join(lines(made))
    assert "── /shop/cart" in shown
    assert "   mailbox  3 messages, the oldest for 2.0 s" in shown
    assert "        in  Cart.add at shop.py:7" in shown
    assert " waits for  /shop/till" in shown
    assert len(lines(made)) == 24
    assert "──" not in "\n".join(lines(press(made, "enter")))


def test_the_head_has_the_rate_and_the_stall() -> None:
    rows = [
        attrs.evolve(each, handled=each.handled + 20) if each.path == "/shop/till" else each for each in SHOP.actors[1:]
    ]
    later = snapshot(*rows, time=12.0, cpu=1.0, stalls=((11.0, 0.25),))
    shown = lines(screen(later, SHOP))
    assert shown[0] == "town (process 7, running, 50 % CPU): 0 actors, 10 messages/s"
    assert shown[1].startswith("longest stall 250.0 ms; 0 failures; 0 restarts; 0 dead letters")
    red = [span.style for line in screen(later, SHOP).lines(80, 24)[1:2] for span in line.spans if span.style]
    assert red == ["red"]


def test_what_is_wrong_is_above_the_table() -> None:
    long = "/shop/till falls behind: 1,200 messages wait, the oldest for 4.0 s. It gets 900 a second and handles 300."
    made = screen()
    made.take(SHOP, None, [long, "Node n1 is down.", "n0: The event loop was held up.", "one more", "and another"])
    shown = lines(made)
    assert shown[2:7] == [
        "! /shop/till falls behind: 1,200 messages wait, the oldest for 4.0 s. It gets",
        "  900 a second and handles 300.",
        "! Node n1 is down.",
        "! n0: The event loop was held up.",
        "! and 2 more: levada top --web shows all",
    ]
    assert len(shown) == 24
    assert names(made) == ["shop", "  cart", "  till", "$2/$3/$4"]
    made.take(SHOP, None)
    assert not any(line.startswith("!") for line in lines(made))


def test_names_cannot_write_on_the_terminal() -> None:
    made = press(screen(snapshot(row("/x\x1b[2J", "X", about="y\x1b]0;z\x07"))), "enter", "/", "\u00e9")
    assert "\x1b" not in "".join(lines(made))


def test_q_leaves() -> None:
    assert screen().press("q") is True


def test_the_bytes_of_keys() -> None:
    sent = b"q\x1b[A\x1bOB\x1b[5~\r\x7f\x1b\xc3\xa9\x01"
    assert list(keys_in(sent)) == ["q", "up", "down", "page up", "enter", "erase", "escape", "é"]
