"""A race of two ways to one server, and what a fallback remembers of it."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import attrs
import pytest
import trio

from levada.framework.errors import ConfigurationError, ConnectionClosed, ConnectionLost, LevadaError
from levada.transports.carriers import Connection
from levada.transports.carriers.memory import MemoryConnection, memory_connections
from levada.transports.carriers.race import Fallback, race


@attrs.define
class Way:
    """A way to a server: after `delay` seconds it is connected, or fails with `error`."""

    delay: float
    error: LevadaError | None = None
    began: list[float] = attrs.field(factory=list)
    """Seconds."""
    ends: list[str] = attrs.field(factory=list)
    connection: MemoryConnection | None = None

    @asynccontextmanager
    async def __call__(self) -> AsyncIterator[Connection]:
        self.began.append(trio.current_time())
        try:
            await trio.sleep(self.delay)
            if self.error is not None:
                raise self.error
            self.connection, _ = memory_connections()
            async with self.connection as connection:
                yield connection
        except BaseException as error:
            self.ends.append(type(error).__name__)
            raise
        self.ends.append("in order")


def since(start: float) -> float:
    return round(trio.current_time() - start, 6)


async def test_the_first_alone_if_it_is_fast(autojump_clock: trio.abc.Clock) -> None:
    first, second = Way(0.2), Way(0.0)
    start = trio.current_time()
    async with race([first, second], head_start=0.25) as (won, connection):
        assert connection is first.connection
        assert (won, since(start)) == (0, 0.2)
    assert (first.ends, second.began) == (["in order"], [])
    with pytest.raises(ConnectionClosed):
        await connection.open_stream()


async def test_the_second_after_the_head_start(autojump_clock: trio.abc.Clock) -> None:
    """The one that never answers is cancelled as soon as the other has won."""
    first, second = Way(float("inf")), Way(0.1)
    start = trio.current_time()
    async with race([first, second], head_start=0.25) as (won, connection):
        assert connection is second.connection
        assert (won, since(start)) == (1, 0.35)
        await trio.testing.wait_all_tasks_blocked()
        assert first.ends == ["Cancelled"]
    assert second.ends == ["in order"]


async def test_the_first_may_still_win_after_the_head_start(autojump_clock: trio.abc.Clock) -> None:
    first, second = Way(0.3), Way(0.1)
    async with race([first, second], head_start=0.25) as (won, _):
        assert won == 0
    assert (first.ends, second.ends) == (["in order"], ["Cancelled"])


async def test_of_two_in_one_moment_one_wins_and_the_other_is_closed(autojump_clock: trio.abc.Clock) -> None:
    ways = [Way(0.3), Way(0.3)]
    async with race(ways, head_start=0.0) as (won, connection):
        assert connection is ways[won].connection
        await trio.testing.wait_all_tasks_blocked()
        loser = ways[1 - won]
        assert len(loser.ends) == 1
        if loser.connection is not None:
            assert (await loser.connection.wait_closed()).code == 0
    assert ways[won].ends == ["in order"]


async def test_a_failure_ends_the_head_start(autojump_clock: trio.abc.Clock) -> None:
    first, second = Way(0.01, ConnectionLost("refused")), Way(0.1)
    start = trio.current_time()
    async with race([first, second], head_start=0.25) as (won, _):
        assert (won, since(start)) == (1, 0.11)


async def test_no_way_works(autojump_clock: trio.abc.Clock) -> None:
    ways = [Way(0.5, ConnectionLost("no QUIC")), Way(0.1, ConnectionLost("no TLS"))]
    with pytest.raises(ConnectionLost, match=r"^no QUIC; no TLS$"):
        async with race(ways, head_start=0.25):
            pass


async def test_settings_that_cannot_work_are_named(autojump_clock: trio.abc.Clock) -> None:
    ways = [Way(0.5, ConnectionLost("no QUIC")), Way(0.0, ConfigurationError("no such file"))]
    with pytest.raises(ConfigurationError, match="no such file"):
        async with race(ways, head_start=0.25):
            pass


@pytest.mark.parametrize("delay", [0.0, 0.3], ids=["during the race", "with a connection"])
async def test_cancelled(delay: float, autojump_clock: trio.abc.Clock) -> None:
    ways = [Way(0.2), Way(float("inf"))]
    with trio.move_on_after(0.1 + delay) as scope:
        async with race(ways, head_start=0.05):
            await trio.sleep_forever()
    assert scope.cancelled_caught
    assert [way.ends for way in ways] == [["Cancelled"], ["Cancelled"]]


async def test_an_error_of_the_block_comes_out_as_it_is(autojump_clock: trio.abc.Clock) -> None:
    way = Way(0.0)
    with pytest.raises(KeyError, match="mine"):
        async with race([way, Way(0.0)], head_start=0.25):
            raise KeyError("mine")
    assert way.ends == ["Cancelled"]


async def connect(fallback: Fallback, quic: Way, tls: Way, server: str = "example.org:443") -> tuple[float, bool]:
    """Connect; the seconds that it took, and whether it was TLS."""
    start = trio.current_time()
    async with fallback.dial(server, quic, tls) as connection:
        return since(start), connection is tls.connection


async def test_a_fallback_remembers_for_a_while_what_worked(autojump_clock: trio.abc.Clock) -> None:
    fallback, quic, tls = Fallback(remember=60.0), Way(float("inf")), Way(0.1)
    assert await connect(fallback, quic, tls) == (0.35, True)
    assert await connect(fallback, quic, tls) == (0.1, True)
    assert len(quic.began) == 1
    assert await connect(fallback, quic, tls, "other.org:443") == (0.35, True)
    await trio.sleep(60.0)  # the second connection does not make it longer
    assert await connect(fallback, quic, tls) == (0.35, True)
    quic.delay, tls.delay = 0.1, float("inf")
    assert await connect(fallback, quic, tls) == (0.35, False)
    assert await connect(fallback, quic, tls) == (0.1, False)


async def test_a_fallback_remembers_a_bounded_number_of_servers(autojump_clock: trio.abc.Clock) -> None:
    fallback, quic, tls = Fallback(limit=2), Way(float("inf")), Way(0.0)
    for server in ("a", "b", "c"):
        await connect(fallback, quic, tls, server)
    assert [fallback.preferred(server) for server in ("a", "b", "c")] == ["quic", "tls", "tls"]


def test_a_memory_of_another_run_is_none() -> None:
    """Each run of trio has a clock of its own."""
    fallback = Fallback(remember=60.0)

    async def lose(start: float) -> str:
        clock = trio.lowlevel.current_clock()
        assert isinstance(clock, trio.testing.MockClock)
        clock.jump(start)
        before = fallback.preferred("a")
        fallback.note("a", "tls")
        return before

    for start in (1_000.0, 10.0, 1_000_000.0):
        assert trio.run(lose, start, clock=trio.testing.MockClock()) == "quic"


@pytest.mark.parametrize(
    "wrong",
    [
        {"head_start": -1.0},
        {"head_start": math.nan},
        {"remember": -1.0},
        {"remember": math.nan},
        {"limit": 0},
    ],
)
def test_settings_of_a_fallback(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError, match="a fallback needs"):
        Fallback(**wrong)  # type: ignore[arg-type]
