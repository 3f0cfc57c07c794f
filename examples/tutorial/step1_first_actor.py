"""Step 1: an actor and its messages."""

from __future__ import annotations

import trio

from levada.framework import Actor, ActorSystem, handles, message


@message
class Reading:
    place: str
    celsius: float


class Station(Actor[Reading]):
    def started(self) -> None:
        self.latest: dict[str, float] = {}

    @handles
    def take(self, m: Reading) -> None:
        self.latest[m.place] = m.celsius
        print(f"{m.place}: {m.celsius} °C")


async def main() -> None:
    async with ActorSystem() as system:
        station = system.spawn(Station, name="station")
        station.tell(Reading("roof", 11.5))
        station.tell(Reading("cellar", 8.0))


if __name__ == "__main__":
    trio.run(main)
