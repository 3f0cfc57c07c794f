"""Texts of peers and names of actors on a terminal; in pipes and files they stay as they are."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from typing import Any

import attrs
import pytest
import trio
from tests.cli.test_ship import ENVIRONMENT, command, line_of

from levada.actors.cli.calls import print_bytes
from levada.actors.cli.terminal import shown
from levada.actors.console import Snapshot, Sort, text
from levada.actors.console.snapshot import NodeSnapshot, take_snapshot
from levada.actors.lumberjack import connect
from levada.framework import ActorSystem

HOSTILE = "x\x1b]0;owned\x07\r\x9b2J\u202ey"
SHOWN = r"x\x1b]0;owned\x07\r\x9b2J\u202ey"


def test_a_terminal_gets_escapes_and_line_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    with open(theirs, "w", encoding="utf-8") as out, open(ours, encoding="utf-8", newline="") as screen:
        monkeypatch.setattr(sys, "stdout", out)
        assert shown(f"{HOSTILE}\n\ud83d café\n" + "a" * 2000) == f"{SHOWN}\n\\ud83d café\n" + "a" * 2000
        print_bytes(HOSTILE.encode())
        assert screen.readline() == f"{SHOWN}\r\n"
        monkeypatch.undo()


def test_a_pipe_gets_the_text_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(HOSTILE) == HOSTILE
    print_bytes(HOSTILE.encode())
    print_bytes(HOSTILE.encode(), as_json=True)
    plain, line = capsys.readouterr().out.rsplit("\n", 2)[:2]
    assert (plain, json.loads(line)) == (HOSTILE, {"data": HOSTILE})


async def test_no_text_of_a_snapshot_reaches_the_screen_raw() -> None:
    """Another program has sent it."""

    def hostile(value: Any) -> Any:
        if isinstance(value, str):
            return HOSTILE
        if isinstance(value, tuple):
            return tuple(map(hostile, value))
        if attrs.has(type(value)):
            return attrs.evolve(
                value,
                **{
                    field.name: hostile(getattr(value, field.name)) for field in attrs.fields(type(value)) if field.init
                },
            )
        return value

    async with ActorSystem("town") as system:
        snapshot = take_snapshot(system)
    node = NodeSnapshot(name="north", state="up", pid=1, host="here", restarts=0, snapshot=snapshot)
    lost = attrs.evolve(node, snapshot=None, error="it does not answer")
    snapshot = attrs.evolve(snapshot, nodes=(node, lost))
    bad: Snapshot = hostile(snapshot)
    sorts: tuple[Sort, ...] = ("tree", "path")
    for sort in sorts:
        lines = text(bad, sort=sort).splitlines()
        assert [line for line in lines if not line.isprintable()] == []
        assert sum("owned" in line for line in lines) >= 5


@pytest.mark.ci
@pytest.mark.loopback
@pytest.mark.parametrize("on_terminal", [True, False])
async def test_what_is_received_is_printed_with_escapes_on_a_terminal_only(on_terminal: bool) -> None:
    ours, theirs = pty.openpty() if on_terminal else os.pipe()
    process = await trio.lowlevel.open_process(
        command("receive", "lumberjack://127.0.0.1:0"), env=ENVIRONMENT, stdout=theirs, stderr=subprocess.PIPE
    )
    os.close(theirs)
    try:
        url = (await line_of(process)).decode().split()[-1]
        async with ActorSystem() as system, connect(system, url) as writer:
            with trio.fail_after(20):
                await writer.deliver([{"message": HOSTILE}, {"line": "two\nlines"}, {"other": HOSTILE}])
        said = b""
        while not said.endswith(b"}\n" if not on_terminal else b"}\r\n"):
            said += os.read(ours, 4096)
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0
    finally:
        process.kill()
        os.close(ours)
    first, *others = said.decode().replace("\r\n", "\n").split("\n")
    assert first == (SHOWN if on_terminal else HOSTILE)
    assert others[:2] == ["two", "lines"]
    assert json.loads(others[2]) == {"other": HOSTILE}
