"""A bridge that is away, or starts again: Spark's processes wait half a minute for it, whatever they were doing; what was staged is there."""

from __future__ import annotations

import errno
import socket
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import pytest
import trio
from trio.testing import MockClock

pa = pytest.importorskip("pyarrow")
pytest.importorskip("levada.actors.spark", exc_type=ImportError)

from tests.actors.durable.memory_journal import MemoryJournal  # noqa: E402

from levada.actors.journal import (  # noqa: E402
    Extent,
    GetExtent,
    GetJournalStatistics,
    GetReach,
    JournalBehind,
    JournalConfig,
    JournalError,
    Reach,
    ReadRows,
    Rows,
    columns_of,
)
from levada.actors.spark import BridgeConfig, UnknownName, serve_bridge  # noqa: E402
from levada.actors.spark.asks import RemoteActor, ask_many  # noqa: E402
from levada.actors.spark.bridge import OPENING  # noqa: E402
from levada.actors.spark.bridge_reading import JournalAway, blocks_of  # noqa: E402
from levada.actors.spark.protocol import (  # noqa: E402
    BridgeUnreachable,
    CommitOffsets,
    Declare,
    DeliverBatch,
    Describe,
    ReadBlocks,
    StageHead,
    Token,
)
from levada.actors.spark.worker import PATIENCE, RemoteMailbox, call, connection  # noqa: E402
from levada.framework import ActorSystem, handles, message  # noqa: E402
from levada.framework.errors import ConnectionLost  # noqa: E402

if TYPE_CHECKING:
    from .conftest import Actors, VirtualTime

pytestmark = pytest.mark.loopback


@message("away.Line")
class Line:
    number: int


COLUMNS = columns_of(Line)
HEAD = StageHead("q", 0, 0, 1)


def rows(*numbers: int) -> Any:
    return COLUMNS.encode([Line(number) for number in numbers])


def numbers(mailbox: RemoteMailbox) -> list[int]:
    found = mailbox.describe()
    batches = mailbox.read(0, 0, found.end[0], epoch=found.epoch, schema=COLUMNS.schema)
    return [number for batch in batches for number in batch.column("number").to_pylist()]


class Desk:
    """A mailbox with three rows and a stage of two."""

    def __init__(self, actors: Actors) -> None:
        self.actors = actors
        self.lines = RemoteMailbox(actors.bridge.address, "lines")
        self.open()
        self.lines.append(rows(1, 2, 3))
        self.epoch = self.lines.describe().epoch
        self.lines.ask(Declare("group"))
        self.lines.stage(HEAD, [rows(4, 5)])

    def open(self) -> None:
        self.actors.mailbox("lines", Line)

    def come_back(self) -> None:
        self.actors.start()
        self.open()

    def restart(self) -> None:
        self.actors.stop()
        self.come_back()


@pytest.fixture
def desk(make_actors: Callable[..., Actors]) -> Desk:
    return Desk(make_actors(config=BridgeConfig(drain_timeout=0.0)))


USES: dict[str, Callable[[Desk], object]] = {
    "describe": lambda desk: desk.lines.describe(),
    "wait": lambda desk: desk.lines.wait_for_rows({0: 0}, 1, 1.0),
    "measure": lambda desk: desk.lines.measure(0, 0, 3, 1000),
    "commit": lambda desk: desk.lines.ask(CommitOffsets("group", desk.epoch, {0: 1})),
    "deliver": lambda desk: desk.lines.ask(DeliverBatch("q", 0, {0: 1}, {0: 2})),
    "read": lambda desk: list(desk.lines.read(0, 0, 3, epoch=desk.epoch, schema=COLUMNS.schema)),
    "stage": lambda desk: desk.lines.stage(StageHead("q", 0, 1, 2), [rows(6)]),
    "append": lambda desk: desk.lines.append(rows(7)),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_bridge_that_is_away_is_waited_for_half_a_minute(
    desk: Desk, virtual_time: VirtualTime, use: Callable[[Desk], object]
) -> None:
    desk.actors.stop()
    virtual_time.at(PATIENCE - 2, desk.come_back)
    use(desk)
    assert PATIENCE - 2 <= virtual_time.now < PATIENCE
    desk.actors.stop()
    away = virtual_time.now
    with pytest.raises(ConnectionLost, match="no bridge answers"):
        use(desk)
    assert PATIENCE - 2 < virtual_time.now - away <= PATIENCE


def test_the_time_counts_from_when_the_bridge_went_away(desk: Desk, virtual_time: VirtualTime) -> None:
    """Not from when the question was asked: a delivery may have waited for minutes, and may do so again."""
    lost = 0

    def use(_: object) -> int:
        nonlocal lost
        if lost < 3:
            lost += 1
            virtual_time.now += 2 * PATIENCE
            desk.actors.stop()
            virtual_time.at(PATIENCE - 2, desk.come_back)
            raise ConnectionLost("lost")
        return lost

    assert call(desk.actors.bridge.address, None, use, again=True) == 3


def test_a_connection_that_is_lost_again_and_again_is_given_up(desk: Desk, virtual_time: VirtualTime) -> None:
    def use(_: object) -> None:
        raise ConnectionLost("lost")

    with pytest.raises(ConnectionLost, match=r"^lost$"):
        call(desk.actors.bridge.address, None, use, again=True)
    assert PATIENCE - 2 < virtual_time.now <= PATIENCE


# ---------------------------------------------------------------- what was staged


def test_a_batch_that_was_staged_is_delivered_by_the_next_bridge(desk: Desk) -> None:
    """Also if only some of its tasks were done when the first one ended."""
    desk.restart()
    assert desk.lines.stage(StageHead("q", 0, 1, 2), [rows(6)]) == 1
    desk.restart()
    question = DeliverBatch("q", 0, {0: 1, 1: 2}, {0: 2, 1: 1})
    assert not desk.lines.ask(question).already
    desk.restart()
    assert desk.lines.ask(question).already
    assert numbers(desk.lines) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("at", [0, 1, 9, 10, 29])
def test_a_task_goes_on_staging_where_it_was_when_the_bridge_starts_again(desk: Desk, at: int) -> None:
    """With blocks on their way whose answers nobody has seen."""

    def blocks() -> Iterator[Any]:
        for number in range(30):
            if number == at:
                desk.restart()
            yield rows(number, number)

    assert desk.lines.stage(StageHead("q", 1, 0, 7), blocks()) == 60
    desk.lines.ask(DeliverBatch("q", 1, {0: 7}, {0: 60}))
    assert numbers(desk.lines)[3:] == [number for number in range(30) for _ in range(2)]


def test_blocks_that_are_sent_twice_are_there_once(desk: Desk) -> None:
    for _ in range(2):
        desk.lines.stage(StageHead("q", 1, 0, 7), [rows(1), rows(2, 3)])
    desk.lines.stage(StageHead("q", 1, 0, 7), [rows(1), rows(2, 3), rows(4)])
    desk.lines.ask(DeliverBatch("q", 1, {0: 7}, {0: 4}))
    assert numbers(desk.lines)[3:] == [1, 2, 3, 4]


def test_a_block_behind_a_gap_is_refused(desk: Desk) -> None:
    with pytest.raises(
        JournalError, match="2 rows of part 0 of batch 0 of q are staged, where rows 3 to 4 were to come"
    ):
        _stage_at(desk, 3)
    with pytest.raises(JournalError, match="0 rows of part 5"):
        _stage_at(desk, 1, part=5)


def _stage_at(desk: Desk, at: int, part: int = 0) -> None:
    from levada.actors.spark.protocol import rows_payload

    payload = rows_payload("mailbox/lines/stage", StageHead("q", 0, part, 1, at), rows(9))
    call(desk.actors.bridge.address, None, lambda peer: peer.request_response(payload, timeout=100))


def test_fewer_rows_than_were_staged_are_not_delivered(desk: Desk) -> None:
    """As after a power failure."""
    desk.actors.stop()
    [staged] = desk.actors.directory.rglob("staging/*")
    staged.write_bytes(staged.read_bytes()[:-8])
    desk.come_back()
    with pytest.raises(JournalError, match="the 2 rows of part 0 are not staged, there are 0"):
        desk.lines.ask(DeliverBatch("q", 0, {0: 1}, {0: 2}))
    assert numbers(desk.lines) == [1, 2, 3]


def test_what_is_staged_counts_after_a_new_start(desk: Desk) -> None:
    before = desk.actors.ask(desk.actors.mailboxes["lines"], GetJournalStatistics()).store.bytes_staged
    desk.restart()
    after = desk.actors.ask(desk.actors.mailboxes["lines"], GetJournalStatistics()).store.bytes_staged
    assert before == after > 0


# ---------------------------------------------------------------- names


async def test_a_request_waits_until_its_mailbox_is_open_again(tmp_path: Path) -> None:
    """Of a process that the bridge has never seen, too; what never was there is unknown as soon as all others are open."""
    async with ActorSystem() as system:
        async with serve_bridge(system, tmp_path / "b") as bridge:
            for name in ("one", "two"):
                await bridge.mailbox(name, Line)
        async with serve_bridge(system, tmp_path / "b") as bridge, trio.open_nursery() as nursery:
            done = {name: trio.Event() for name in ("one", "two", "other")}
            unknown: list[str] = []

            async def describe(name: str) -> None:
                try:
                    await trio.to_thread.run_sync(RemoteMailbox(bridge.address, name).describe)
                except UnknownName as error:
                    unknown.append(error.name)
                done[name].set()

            for name in done:
                nursery.start_soon(describe, name)
            peer = await trio.to_thread.run_sync(connection, bridge.address)
            await trio.to_thread.run_sync(lambda: peer.request_response(b"", route="hello", timeout=100))
            assert not any(each.is_set() for each in done.values())
            await bridge.mailbox("two", Line)
            await done["two"].wait()
            assert not done["one"].is_set()
            await bridge.mailbox("one", Line)
            await done["one"].wait()
            await done["other"].wait()
            assert unknown == ["other"]


async def test_a_mailbox_that_is_not_opened_again_is_unknown_after_half_a_minute(
    tmp_path: Path, mock_clock: MockClock
) -> None:
    async with ActorSystem() as system:
        async with serve_bridge(system, tmp_path / "b") as bridge:
            await bridge.mailbox("lines", Line, config=JournalConfig())
        async with serve_bridge(system, tmp_path / "b") as bridge:
            lines = RemoteMailbox(bridge.address, "lines")
            mock_clock.jump(OPENING)
            with pytest.raises(
                UnknownName, match="no mailbox 'lines' is open, although it is on disk; there are: none"
            ):
                await trio.to_thread.run_sync(lines.describe)


@pytest.mark.parametrize(
    "reason",
    [
        OSError(errno.EHOSTUNREACH, "No route to host"),
        OSError(errno.ENETUNREACH, "Network is unreachable"),
        ssl.SSLCertVerificationError(1, "certificate verify failed"),
    ],
    ids=lambda reason: str(reason),
)
def test_an_address_that_cannot_be_right_is_not_waited_for(
    desk: Desk, virtual_time: VirtualTime, monkeypatch: pytest.MonkeyPatch, reason: OSError
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise reason

    monkeypatch.setattr(socket, "create_connection", fail)
    url, token = "tls://127.0.0.1:1", str(desk.actors.bridge.token_file)
    with pytest.raises(BridgeUnreachable, match="no bridge answers: "):
        RemoteMailbox(url, "lines", token).describe()
    actor = RemoteActor("nobody", f"{url};tls://127.0.0.1:2", token)
    with pytest.raises(BridgeUnreachable, match="no bridge answers: "):
        list(ask_many(actor, [Describe()]))
    assert virtual_time.now == 0.0


@pytest.mark.ci
@pytest.mark.parametrize("order", [1, -1])
def test_one_way_that_may_come_back_is_waited_for(
    desk: Desk, virtual_time: VirtualTime, monkeypatch: pytest.MonkeyPatch, order: int
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EHOSTUNREACH, "No route to host")

    monkeypatch.setattr(socket, "create_connection", fail)
    ways = [desk.actors.bridge.address.split(",")[0], "tls://127.0.0.1:1"][::order]
    token = str(desk.actors.bridge.token_file)
    desk.actors.stop()
    with pytest.raises(ConnectionLost) as lost:
        RemoteMailbox(",".join(ways), "lines", token).describe()
    assert not isinstance(lost.value, BridgeUnreachable)
    assert PATIENCE - 2 < virtual_time.now <= PATIENCE
    for _ in range(2):  # the nodes take turns
        begun = virtual_time.now
        with pytest.raises(ConnectionLost):
            list(ask_many(RemoteActor("nobody", ";".join(ways), token), [Describe()], timeout=5.0))
        assert virtual_time.now - begun > 3.0


def test_a_bridge_on_another_machine_is_not_waited_for(desk: Desk, virtual_time: VirtualTime, tmp_path: Path) -> None:
    attrs.evolve(Token.read(desk.actors.bridge.token_file), host="another").write(tmp_path / "away.token")
    with pytest.raises(BridgeUnreachable, match="is on another machine"):
        RemoteMailbox(desk.actors.bridge.address.split(",")[0], "lines", str(tmp_path / "away.token")).describe()
    assert virtual_time.now == 0.0


class PutBack(MemoryJournal):
    """A journal that is put back to its first two rows after the first answer, and grows again."""

    opening = "1-first"

    @handles
    def extent(self, _: GetExtent) -> Extent:
        found = super().extent(_)
        return Extent(found.epoch, found.first, found.end, self.opening)

    @handles
    def reach(self, m: GetReach) -> Reach:
        assert (m.opening, self.opening) == ("1-first", "1-second")
        return Reach(False, {0: 2})

    @handles
    def read(self, m: ReadRows) -> Rows:
        found = super().read(ReadRows(m.partition, m.start, m.start + 3))
        self.opening = "1-second"
        self.rows[0][2:] = [{"number": 100 + number} for number in range(2, 6)]
        return found


async def test_rows_of_an_older_copy_that_was_put_back_while_they_are_read_are_not_taken_for_the_same() -> None:
    written = [{"number": number} for number in range(6)]
    async with ActorSystem("reader") as system:
        journal = JournalAway(system.spawn(PutBack, COLUMNS.schema, [written]))
        blocks = blocks_of("lines", journal, ReadBlocks(0, 0, 6, "epoch", "1-first"))
        with pytest.raises(
            JournalBehind, match=r"rows 0 to 5 were asked for .* and since then it was put back to row 2"
        ):
            async for _ in blocks:
                pass
        await blocks.aclose()
