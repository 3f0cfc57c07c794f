"""Telemetry by MAOP: a body whose length nobody knows, taken as fast as the other side can, for as long as it comes."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import trio

from levada.actors.authenticators import BearerTokens
from levada.actors.maop import Call, Handler, HandlerSpec, MaopError, OperationError, OperationRefused, connect, serve
from levada.framework import ActorSystem, Identity

TELEMETRY, CONFIGURATION = 200, 201
NEGATIVE = 1100
"""Codes from 1024 on are the application's own."""
READINGS = 100_000
FAR_AHEAD = 4 * 2**20
"""More octets than sender and receiver keep between them."""


class Station:
    """Adds readings up."""

    def __init__(self) -> None:
        self.octets = 0
        self.count = 0
        self.total = 0

    async def take(self, call: Call) -> None:
        rest = b""
        async for chunk in call:
            self.octets += len(chunk)
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                reading = json.loads(line)
                if reading["watt"] < 0:
                    raise OperationError(code=NEGATIVE, detail=f"reading {reading['number']} is negative")
                self.count += 1
                self.total += reading["watt"]

    async def configure(self, call: Call) -> None:
        await call.body()


class Meter:
    """Gives readings, and watches how far it gets ahead of the station."""

    def __init__(self, station: Station, *, wrong: int | None = None) -> None:
        self.station = station
        self.wrong = wrong
        self.octets = station.octets
        self.ahead = 0

    async def readings(self) -> AsyncIterator[bytes]:
        for first in range(0, READINGS, 500):
            watts = [(n, -1 if n == self.wrong else n % 1000) for n in range(first, first + 500)]
            chunk = b"".join(b'{"number": %d, "watt": %d}\n' % reading for reading in watts)
            self.octets += len(chunk)
            self.ahead = max(self.ahead, self.octets - self.station.octets)
            yield chunk


async def main() -> None:
    station = Station()
    handlers = {
        TELEMETRY: Handler(
            station.take, spec=HandlerSpec(streaming=True, allow_undefined_length=True, max_payload=2**40)
        ),
        CONFIGURATION: Handler(station.configure),
    }
    async with (
        ActorSystem() as system,
        serve(
            system, "maop+memory://station", handlers, authenticate=BearerTokens.of({b"secret": Identity("meter-1")})
        ) as listener,
        connect(system, listener.url, token=b"secret") as peer,
    ):
        meter = Meter(station)
        await peer.message(TELEMETRY, meter.readings())
        assert (station.count, station.total) == (READINGS, sum(n % 1000 for n in range(READINGS)))
        assert meter.ahead < FAR_AHEAD
        print(f"{station.count} readings taken, the meter never {FAR_AHEAD // 2**20} MiB ahead")
        try:
            await peer.message(CONFIGURATION, meter.readings())
        except OperationRefused as refused:
            print("where a length is wanted:", refused)
        wrong = Meter(station, wrong=30_000)
        try:
            await peer.message(TELEMETRY, wrong.readings())
        except MaopError as error:
            print(error)
        approved, refused_count = listener.metrics.confirms_total, listener.metrics.denies.total()
    print(f"{approved} streams approved, {refused_count} refused")


if __name__ == "__main__":
    trio.run(main)
