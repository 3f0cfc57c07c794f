"""What a program still holds when the interpreter ends is let go without an error, whether its run ended in order or broke."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys
from typing import Any

import levada.actors.aqueduct.refs as refs
import levada.framework._runtime.ask as asks
import levada.framework.channel as channels
import trio
from levada.actors.aqueduct import connect, serve
from levada.framework import Actor, ActorSystem, Asks, channel, handles, message, oneshot

sys.kept_modules = [refs, asks, channels]  # what they hold is let go when their other names are gone already


@message("test.exit.question")
class Question(Asks[int]):
    pass


class Silent(Actor[Question]):
    @handles
    def question(self, m: Question) -> None:
        asks.z_reply = self.reply_later()


async def nobody(_: Any) -> None:
    pass


def breaks() -> None:
    raise RuntimeError("the run breaks")


async def main() -> None:
    async with ActorSystem("there") as there, ActorSystem("here") as here:
        there.registry.register("silent", there.spawn(Silent))
        async with (
            serve(there, "aqueduct+memory://exit", nobody, Any, expose={"silent"}) as listener,
            connect(here, listener.url, object) as peer,
            trio.open_nursery() as nursery,
        ):
            refs.z_ref = await peer.lookup("silent", object)
            nursery.start_soon(refs.z_ref.ask, Question())
            channels.z_sender, receiver = channel(int)
            sender, channels.z_receiver = channel(int)
            refs.z_kept = [sender, receiver]
            channels.z_oneshot, oneshots = oneshot(int)
            while not hasattr(asks, "z_reply"):
                await trio.lowlevel.checkpoint()
            if sys.argv[1] == "breaks":
                trio.lowlevel.current_trio_token().run_sync_soon(breaks)
                await trio.sleep_forever()
            nursery.cancel_scope.cancel()


try:
    trio.run(main)
except trio.TrioInternalError:
    print("broken")
"""


@pytest.mark.ci
@pytest.mark.parametrize(("how", "says"), [("ends", ""), ("breaks", "broken\n")])
def test_it_ends_in_silence(how: str, says: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.returncode, done.stderr, done.stdout) == (0, "", says)
