"""A chat room made of channels in messages: whoever joins sends one sender along to hear, and gets one to speak.

The room is one actor; each guest is another connection.  Nobody polls and nobody has a number: a guest is the sender that leads to it, and
has left when that sender's channel has ended, however that came about.
"""

from __future__ import annotations

from typing import Any

import trio

from levada.actors.aqueduct import connect, serve
from levada.framework import (
    Actor,
    ActorSystem,
    Down,
    OneshotSender,
    Receiver,
    Sender,
    channel,
    handles,
    message,
    oneshot,
)
from levada.framework.errors import ChannelError


@message("chat.Said")
class Said:
    who: str
    text: str


@message("chat.Join")
class Join:
    name: str
    hear: Sender[Said]
    """What everybody says; the room sends on it."""
    speak: OneshotSender[Sender[str]]
    """The room answers with a sender of this guest's own."""


class Room(Actor[Any]):
    def started(self) -> None:
        self.guests: dict[str, Sender[Said]] = {}
        self.log: list[str] = []

    @handles
    def on_join(self, m: Join) -> None:
        self.guests[m.name] = m.hear.unreliable(
            100
        )  # a guest who does not listen misses something, and holds up nobody
        self.watch(m.hear, tag=m.name)
        sender, receiver = channel(str)
        self.start_soon(self.listen_to, m.name, receiver)
        with sender, m.speak as speak:  # the guest may have left already; a sender that was sent is theirs
            speak.send(sender)

    async def listen_to(self, name: str, words: Receiver[str]) -> None:
        async with words:
            try:
                async for text in words:
                    self.say(name, text)
            except ChannelError:
                pass  # left without a word: the connection was lost, for example
        self.say("room", f"{name} has left")

    def say(self, who: str, text: str) -> None:
        self.log.append(f"{who}: {text}")
        for guest in self.guests.values():
            try:
                guest.send_nowait(Said(who, text))
            except ChannelError:
                pass  # has just left; on_down is next

    @handles
    def on_down(self, m: Down) -> None:
        self.guests.pop(str(m.tag), None)


async def visit(system: ActorSystem, url: str, name: str, lines: list[str], expected: int, heard: list[str]) -> None:
    """Join, say something, and stay until so many lines were heard."""
    async with connect(system, url, Join) as peer:
        hear, said = channel(Said)
        speak, mine = oneshot(Sender[str])
        await peer.send(Join(name, hear, speak))
        async with await mine as voice, said:
            for line in lines:
                await voice.send(line)
            async for m in said:
                heard.append(f"{m.who}: {m.text}")
                if len(heard) == expected:
                    break


async def main() -> None:
    heard: dict[str, list[str]] = {"Ada": [], "Bob": [], "Cyd": []}
    async with ActorSystem() as system:
        room = Room()
        ref = system.spawn(lambda: room)
        async with serve(system, "aqueduct+memory://chat", ref, Join) as listener, trio.open_nursery() as nursery:
            for name, said in heard.items():
                # Everybody says two lines and stays until the own ones have come back.
                nursery.start_soon(visit, system, listener.url, name, [f"I am {name}", "bye"], 2, said)
    spoken = sorted(line for line in room.log if not line.startswith("room"))
    assert spoken == sorted(f"{name}: {text}" for name in heard for text in (f"I am {name}", "bye"))
    assert all(set(lines) <= set(room.log) for lines in heard.values())
    print(f"{len(heard)} guests said {len(spoken)} lines, and all have left")


if __name__ == "__main__":
    trio.run(main)
