"""Step 4: a stream of readings for whoever wants it, by a channel inside a message."""

from __future__ import annotations

from collections.abc import Callable

import trio

from levada.framework import Actor, ActorSystem, Asks, Ref, Sender, channel, handles, message, restart
from levada.framework.errors import ChannelError


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


@message
class Follow:
    readings: Sender[Reading]


class Sensor(Actor[Look]):
    place: str
    thermometer: Callable[[], float]
    station: Ref[Reading | Mean | Follow]
    period: float = 0.01

    def started(self) -> None:
        self.timers.every("look", self.period, Look())

    @handles
    def look(self, m: Look) -> None:
        self.station.tell(Reading(self.place, self.thermometer()))


class Station(Actor[Reading | Mean | Follow]):
    thermometers: dict[str, Callable[[], float]]

    def __attrs_post_init__(self) -> None:
        self.latest: dict[str, float] = {}
        self.followers: list[Sender[Reading]] = []

    def started(self) -> None:
        for place, thermometer in self.thermometers.items():
            self.spawn(Sensor, place, thermometer, self.ref, name=place, supervise=restart(max=5, within=10.0))

    @handles
    def take(self, m: Reading) -> None:
        self.latest[m.place] = m.celsius
        for follower in list(self.followers):
            try:
                follower.send_nowait(m)
            except ChannelError:
                self.followers.remove(follower)

    @handles
    def mean(self, m: Mean) -> float:
        return sum(self.latest.values()) / len(self.latest)

    @handles
    def follow(self, m: Follow) -> None:
        self.followers.append(m.readings.unreliable(buffer=10))

    def stopping(self, reason: object) -> None:
        for follower in self.followers:
            follower.finish_nowait()


async def main() -> None:
    async with ActorSystem() as system:
        station = system.spawn(Station, {"roof": lambda: 11.5}, name="station")
        sender, receiver = channel(Reading)
        station.tell(Follow(sender))
        for _ in range(3):
            print(await receiver.receive())
        station.stop()
        async for _ in receiver:
            pass  # readings that were on their way
        print("the station has closed")


if __name__ == "__main__":
    trio.run(main)
