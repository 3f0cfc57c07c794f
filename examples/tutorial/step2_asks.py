"""Step 2: questions."""

from __future__ import annotations

import trio

from levada.framework import Actor, ActorSystem, Asks, handles, message
from levada.framework.errors import ActorStopped


@message
class Reading:
    place: str
    celsius: float


@message
class Mean(Asks[float]):
    """The mean of the latest readings of all places."""


class Station(Actor[Reading | Mean]):
    def started(self) -> None:
        self.latest: dict[str, float] = {}

    @handles
    def take(self, m: Reading) -> None:
        self.latest[m.place] = m.celsius

    @handles
    def mean(self, m: Mean) -> float:
        return sum(self.latest.values()) / len(self.latest)


async def main() -> None:
    async with ActorSystem() as system:
        station = system.spawn(Station, name="station")
        station.tell(Reading("roof", 11.5))
        station.tell(Reading("cellar", 8.0))
        print(await station.ask(Mean(), timeout=1.0))

        station.stop()
        try:
            await station.ask(Mean())
        except ActorStopped as error:
            print(error)


if __name__ == "__main__":
    trio.run(main)
