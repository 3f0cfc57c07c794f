"""Step 3: sensors that fail, and are started again."""

from __future__ import annotations

import logging
from collections.abc import Callable

import trio

from levada.framework import Actor, ActorSystem, Asks, Ref, handles, message, restart


@message
class Reading:
    place: str
    celsius: float


@message
class Mean(Asks[float]):
    """The mean of the latest readings of all places."""


@message
class Look:
    """Time to read the thermometer."""


class Sensor(Actor[Look]):
    place: str
    thermometer: Callable[[], float]
    station: Ref[Reading | Mean]
    period: float = 0.01

    def started(self) -> None:
        self.timers.every("look", self.period, Look())

    @handles
    def look(self, m: Look) -> None:
        self.station.tell(Reading(self.place, self.thermometer()))


class Station(Actor[Reading | Mean]):
    thermometers: dict[str, Callable[[], float]]

    def started(self) -> None:
        self.latest: dict[str, float] = {}
        for place, thermometer in self.thermometers.items():
            self.spawn(Sensor, place, thermometer, self.ref, name=place, supervise=restart(max=5, within=10.0))

    @handles
    def take(self, m: Reading) -> None:
        self.latest[m.place] = m.celsius

    @handles
    def mean(self, m: Mean) -> float:
        return sum(self.latest.values()) / len(self.latest)


def loose_contact() -> Callable[[], float]:
    """A thermometer that fails the first two times."""
    times = 0

    def read() -> float:
        nonlocal times
        times += 1
        if times <= 2:
            raise OSError("no contact")
        return 8.0

    return read


async def main() -> None:
    logging.getLogger("levada").setLevel(logging.CRITICAL)  # two tracebacks would be in the way here
    async with ActorSystem() as system:
        station = system.spawn(Station, {"roof": lambda: 11.5, "cellar": loose_contact()}, name="station")
        await trio.sleep(0.5)
        print(await station.ask(Mean()))
        print(f"{system.statistics().restarts} restarts")


if __name__ == "__main__":
    trio.run(main)
