"""`FaultyNetwork`: the same seed does the same; each fault looks at both ends as it says; without one it keeps the contract."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing

from levada.framework.errors import ConnectionLost
from levada.transports.carriers.contracts import ByteStream
from levada.transports.carriers.memory import memory_streams
from levada.transports.testing import CarrierCheck, CarrierTraits, Fault, FaultyNetwork, carrier_checks

TEXT = bytes(range(256)) * 4


async def a_second() -> None:
    await trio.sleep(1)


TRAITS = CarrierTraits(shape="bytes", buffered=160 * 1024, settle=a_second, timeout=100_000)


@asynccontextmanager
async def faultless() -> AsyncIterator[tuple[ByteStream, ByteStream]]:
    yield FaultyNetwork(0, faults=("none",)).pair(*memory_streams())


@pytest.mark.parametrize("check", carrier_checks(TRAITS), ids=str)
async def test_keeps_the_contract_without_a_fault(check: CarrierCheck, autojump_clock: trio.testing.MockClock) -> None:
    await check(faultless)


async def converse(network: FaultyNetwork) -> dict[str, object]:
    """Send `TEXT` both ways in small parts; return what each end got, and what came then."""
    ends: dict[str, ByteStream] = dict(zip(("client", "server"), network.pair(*memory_streams()), strict=True))
    seen: dict[str, object] = {}

    async def send(name: str) -> None:
        outcome = "sent"
        try:
            for at in range(0, len(TEXT), 10):
                await ends[name].send_all(TEXT[at : at + 10])
            await ends[name].send_eof()
        except ConnectionLost:
            outcome = "lost"
        seen[f"{name} sends"] = outcome

    async def receive(name: str) -> None:
        got = b""
        try:
            while part := await ends[name].receive_some():
                got += part
            seen[f"{name} then"] = "end"
        except ConnectionLost:
            seen[f"{name} then"] = "lost"
        assert TEXT.startswith(got)
        seen[f"{name} got"] = len(got)

    async with trio.open_nursery() as nursery:
        for name in ends:
            nursery.start_soon(send, name)
            nursery.start_soon(receive, name)
    return seen


@pytest.mark.parametrize("seed", range(20))
async def test_the_same_seed_does_the_same(seed: int, autojump_clock: trio.testing.MockClock) -> None:
    with FaultyNetwork(seed, within=1000) as network, FaultyNetwork(seed, within=1000) as again:
        await converse(network)
        await converse(again)
        assert network.happened == again.happened
        assert len(network.happened) <= 1


@pytest.mark.parametrize("fault", ["cut", "reset", "truncate", "half_close"])
@pytest.mark.parametrize("seed", range(5))
async def test_faults_look_as_described(seed: int, fault: Fault, autojump_clock: trio.testing.MockClock) -> None:
    with FaultyNetwork(seed, faults=(fault,), within=1000) as network:
        seen = await converse(network)
        assert len(network.happened) == 1
        sender, _, what = network.happened[0].partition(" sends: ")
        at = int(what.rpartition(" ")[2])
        receiver = "server" if sender == "client" else "client"
        if fault in ("cut", "reset"):
            assert {seen["client then"], seen["server then"]} <= {"lost", "end"}
            assert seen[f"{receiver} then"] == "lost"
            assert seen[f"{sender} sends"] == "lost"
            assert seen[f"{receiver} got"] == at if fault == "cut" else seen[f"{receiver} got"] <= at  # type: ignore[operator]
        else:
            assert seen[f"{receiver} then"] == "end"
            assert seen[f"{receiver} got"] == (at if fault == "truncate" else at // 10 * 10)
            assert seen[f"{sender} sends"] == ("sent" if fault == "truncate" else "lost")
            assert (seen[f"{sender} got"], seen[f"{sender} then"]) == (len(TEXT), "end")


async def test_every_fault_comes_up_and_every_place() -> None:
    happened = set()
    for seed in range(100):
        network = FaultyNetwork(seed, within=10)
        client, server = network.pair(*memory_streams())
        for stream in (client, server):
            try:
                await stream.send_all(bytes(20))
            except ConnectionLost:
                pass
        happened.update(network.happened)
    assert {text.split(":")[0] for text in happened} == {"client sends", "server sends"}
    assert {text.split()[2] for text in happened} == {"cut", "reset", "truncate", "half_close"}
    assert {int(text.split()[-1]) for text in happened} == set(range(10))


async def test_the_seed_is_in_the_failure_message() -> None:
    with pytest.raises(AssertionError) as caught, FaultyNetwork(42, faults=("cut",), within=1) as network:
        client, _ = network.pair(*memory_streams())
        for stream in (client, _):
            try:
                await stream.send_all(b"x")
            except ConnectionLost:
                pass
        raise AssertionError("the test found something")
    assert caught.value.__notes__ == [str(network)]
    assert "seed=42" in str(network)
    assert "cut at byte 0" in str(network)
