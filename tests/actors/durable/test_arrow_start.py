"""Arrow imports pandas with its first array, if it is installed; this takes long, and must not hold up the actors."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("pandas")

PROGRAM = """
import sys
import tempfile
import threading
from datetime import UTC, datetime

import trio


class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "pandas":
            where = "loop" if threading.current_thread() is threading.main_thread() else "thread"
            print(where, during)


sys.meta_path.insert(0, Watch())
during = "import"

from levada.actors.durable import shards
from levada.actors.journal import Append, Envelope, Journal
from levada.framework import ActorSystem
from tests.actors.durable.accounts import EVENTS, Account, Deposit


async def main(folder):
    global during
    async with ActorSystem(ask_timeout=300.0) as system:
        during = sys.argv[1]
        if during == "journal":
            journal = system.spawn(Journal, folder)
            print(await journal.ask(Append([Envelope(datetime.now(UTC), value=b"hello")])))
            return
        accounts = await shards(system, Account, events=EVENTS, journal=folder, shards=2)
        during = "command"
        print(await accounts["anna"].ask(Deposit(5)))


with tempfile.TemporaryDirectory() as folder:
    trio.run(main, folder)
"""


@pytest.mark.ci
@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("shards", "thread shards\n5\n"),
        ("journal", "thread journal\nAppended(partition=0, first=0, count=1, repeated=0)\n"),
    ],
)
def test_the_first_array_is_made_in_a_thread(what: str, says: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, what], capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stdout == says
