"""The bridge without Spark: what the blocking end sees of mailboxes, who is let in, what a new start changes."""

from __future__ import annotations

import errno
import os
import pickle
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

pa = pytest.importorskip("pyarrow")
pytest.importorskip("levada.actors.spark", exc_type=ImportError)

from levada.actors.authentication import Credentials, Refused  # noqa: E402
from levada.actors.durable import log_columns, log_config  # noqa: E402
from levada.actors.journal import (  # noqa: E402
    Append,
    AwaitRows,
    DeclareGroup,
    EraseEntity,
    GetExtent,
    GetGroups,
    GetJournalStatistics,
    GetReach,
    GetSchema,
    Journal,
    JournalConfig,
    JournalError,
    JournalFull,
    Keyed,
    OffsetGone,
    ReadRows,
    SchemaMismatch,
    backup,
    columns_of,
    restore,
)
from levada.actors.rsocket import RequestFailed  # noqa: E402
from levada.actors.spark import (  # noqa: E402
    BridgeConfig,
    BridgeRefused,
    Delivery,
    EpochChanged,
    UnknownName,
    serve_bridge,
)
from levada.actors.spark import worker as worker_module  # noqa: E402
from levada.actors.spark.bridge import CLEAN_EVERY, Mailbox  # noqa: E402
from levada.actors.spark.bridge_subscription import Subscription  # noqa: E402
from levada.actors.spark.protocol import (  # noqa: E402
    WINDOW,
    BlockHead,
    BridgeError,
    BridgeUnreachable,
    CommitOffsets,
    Declare,
    DeliverBatch,
    DeliveredBatch,
    DiscardBatch,
    ReadBlocks,
    StageHead,
    Token,
    failed,
    raised,
)
from levada.actors.spark.worker import RemoteMailbox, call, connection  # noqa: E402
from levada.framework import (  # noqa: E402
    Actor,
    ActorRestarted,
    ActorSystem,
    Codec,
    Failed,
    Identity,
    Normal,
    Ref,
    channel,
    handles,
    message,
    restart,
)
from levada.framework.errors import ActorStopped, ConfigurationError, ConnectionLost, LevadaError  # noqa: E402
from levada.framework.testing import Probe  # noqa: E402
from levada.transports.carriers import TlsConfig  # noqa: E402

if TYPE_CHECKING:
    from .conftest import Actors

pytestmark = pytest.mark.loopback


@message("bridge.Line")
class Line:
    number: int
    text: str = ""


COLUMNS = columns_of(Line)


def batch(*numbers: int, text: str = "") -> Any:
    return COLUMNS.encode([Line(n, text) for n in numbers])


def remote(actors: Actors, name: str = "lines") -> RemoteMailbox:
    return RemoteMailbox(actors.bridge.address, name)


def read(mailbox: RemoteMailbox, partition: int = 0, start: int = 0, end: int | None = None) -> list[int]:
    found = mailbox.describe()
    stop = found.end[partition] if end is None else end
    batches = mailbox.read(partition, start, stop, epoch=found.epoch, schema=COLUMNS.schema)
    return [number for rows in batches for number in rows.column("number").to_pylist()]


# ---------------------------------------------------------------- rows over the wire


def test_rows_that_are_appended_from_afar_are_read_again_by_offset(actors: Actors) -> None:
    actors.mailbox("lines", Line, partitions=2)
    lines = remote(actors)
    assert lines.append(batch(1, 2, 3), partition=1).first == 0
    assert lines.append(batch(4, 5), partition=1).first == 3
    found = lines.describe()
    assert (found.first, found.end) == ({0: 0, 1: 0}, {0: 0, 1: 5})
    assert found.columns().equals(COLUMNS.schema)
    assert read(lines, 1) == [1, 2, 3, 4, 5]
    assert read(lines, 1, 1, 4) == [2, 3, 4]
    assert read(lines, 1, 5) == []


def test_erased_rows_are_passed_over(actors: Actors) -> None:
    made = actors.mailbox("lines", Line, config=JournalConfig(keyed=Keyed(entity="text")))
    lines = remote(actors)
    lines.append(batch(*range(2000), text="gone"))
    lines.append(batch(1, 2, text="kept"))
    lines.append(batch(3, text="gone"))
    lines.append(batch(4, text="kept"))
    assert actors.ask(made, EraseEntity("gone", partition=0)).rows == 2001
    assert read(lines) == [1, 2, 4]
    assert read(lines, 0, 1990, 2001) == [1]
    assert read(lines, 0, 5, 10) == []


def test_rows_of_one_key_go_to_one_partition(actors: Actors) -> None:
    actors.mailbox("lines", Line, partitions=8)
    places = {remote(actors).append(batch(n), key="host-1/syslog").partition for n in range(5)}
    assert places == {6}


def test_a_stream_of_blocks_is_never_further_ahead_than_its_credit(actors: Actors) -> None:
    """The reader takes no block: the bridge sends as many as were granted, and reads no more than one chunk of the journal."""
    made = actors.mailbox("lines", Line, config=JournalConfig(block_rows=1, block_bytes=256, segment_bytes=1 << 20))
    actors.do(lambda: made.append([Line(n) for n in range(100)]))
    question = Codec().encode(ReadBlocks(0, 0, 100, remote(actors).describe().epoch))
    stream = connection(actors.bridge.address).request_stream(question, route="mailbox/lines/read", window=WINDOW)
    sizes, taken = [], []
    for left in (0, WINDOW // 2):
        taken += [BlockHead.decode(next(stream).metadata or b"").first for _ in range(left)]
        with stream._changed:
            assert stream._changed.wait_for(lambda: len(stream._items) >= WINDOW, 20)
        remote(actors).describe()  # a round trip more: what may come behind them would have come
        sizes.append(len(stream._items))
    stream.close()
    assert sizes == [WINDOW, WINDOW]
    assert taken == [0, 1, 2, 3]


def test_a_reader_that_leaves_early_ends_the_stream_and_the_connection_goes_on(actors: Actors) -> None:
    made = actors.mailbox("lines", Line, config=JournalConfig(block_rows=1, block_bytes=256, segment_bytes=1 << 20))
    actors.do(lambda: made.append([Line(n) for n in range(100)]))
    lines = remote(actors)
    found = lines.describe()
    rows: Any = lines.read(0, 0, 100, epoch=found.epoch, schema=COLUMNS.schema)
    assert next(rows).column("number").to_pylist() == [0]
    rows.close()
    assert read(lines, 0, 98) == [98, 99]
    assert connection(actors.bridge.address)._streams == {}


def test_old_rows_are_read_in_the_columns_of_today(make_actors: Callable[..., Actors]) -> None:
    actors = make_actors()
    actors.mailbox("grown", pa.schema([("a", pa.int64())]))
    RemoteMailbox(actors.bridge.address, "grown").append(pa.record_batch({"a": [1]}))
    actors.stop()
    actors.start()
    schema = pa.schema([("a", pa.int64()), ("b", pa.string())])
    actors.mailbox("grown", schema)
    grown = RemoteMailbox(actors.bridge.address, "grown")
    grown.append(pa.record_batch({"a": [2], "b": ["x"]}, schema=schema))
    rows = grown.read(0, 0, 2, epoch=grown.describe().epoch, schema=schema)
    assert [each.to_pylist() for each in rows] == [[{"a": 1, "b": None}], [{"a": 2, "b": "x"}]]


def test_waiting_for_rows_ends_when_they_come_or_with_its_time(actors: Actors) -> None:
    made = actors.mailbox("lines", Line)
    lines = remote(actors)
    assert lines.wait_for_rows({0: 0}, 1, 0.01).end == {0: 0}
    got: list[Any] = []
    waiting = threading.Thread(target=lambda: got.append(lines.wait_for_rows({0: 0}, 2, 30.0).end))
    waiting.start()
    actors.do(lambda: made.append([Line(1)]))
    actors.do(lambda: made.append([Line(2)]))
    waiting.join(20)
    assert got == [{0: 2}]


# ---------------------------------------------------------------- batches


def test_a_batch_is_seen_when_it_is_delivered_and_only_once(actors: Actors) -> None:
    actors.mailbox("lines", Line, partitions=2)
    lines = remote(actors)
    assert lines.stage(StageHead("q", 7, 0, 11), [batch(1, 2), batch(3)]) == 3
    assert lines.stage(StageHead("q", 7, 1, 12), [batch(4)]) == 1
    assert lines.stage(StageHead("q", 7, 1, 13), [batch(9, 9)]) == 2
    assert lines.describe().end == {0: 0, 1: 0}
    question = DeliverBatch("q", 7, {0: 11, 1: 12})
    assert lines.ask(question) == DeliveredBatch(False, {0: [0, 3], 1: [0, 1]})
    assert lines.ask(question) == DeliveredBatch(True, {0: [0, 3], 1: [0, 1]})
    assert (read(lines, 0), read(lines, 1)) == ([1, 2, 3], [4])


def test_what_was_discarded_cannot_be_delivered(actors: Actors) -> None:
    actors.mailbox("lines", Line)
    lines = remote(actors)
    lines.stage(StageHead("q", 0, 0, 1), [batch(1)])
    assert lines.ask(DiscardBatch("q", 0)) == 1
    with pytest.raises(JournalError, match="the rows of part 0 are not staged, there are 0"):
        lines.ask(DeliverBatch("q", 0, {0: 1}))


def test_large_batches_are_staged_in_blocks_in_their_order(actors: Actors) -> None:
    actors.mailbox("lines", Line)
    lines = remote(actors)
    rows = 3 * worker_module.BLOCK_ROWS + 1
    assert lines.stage(StageHead("q", 0, 0, 1), [batch(*range(rows))]) == rows
    lines.ask(DeliverBatch("q", 0, {0: 1}))
    assert read(lines) == list(range(rows))


def test_two_tasks_that_stage_under_one_name_are_found_out(actors: Actors) -> None:
    actors.mailbox("lines", Line)
    lines = remote(actors)
    lines.stage(StageHead("q", 0, 0, 1), [batch(1)])
    with pytest.raises(
        JournalError, match="1 rows of part 0 of batch 0 of q are staged, where rows 0 to 2 were to come"
    ):
        lines.stage(StageHead("q", 0, 0, 1), [batch(1, 2)])


def test_a_writer_waits_no_longer_than_it_was_told(actors: Actors) -> None:
    """A full journal takes deliveries when there is room; staging has a bound of its own and says so."""
    config = JournalConfig(
        segment_bytes=4096, block_bytes=2048, max_bytes=16_384, retain_bytes=None, max_staged_bytes=4096
    )
    actors.mailbox("lines", Line, config=config)
    with pytest.raises(JournalFull, match="max_staged_bytes"):
        remote(actors).stage(StageHead("q", 0, 0, 1), [batch(n, text="x" * 1000) for n in range(8)])


async def test_a_batch_that_nobody_delivers_is_dropped_in_time(tmp_path: Path, mock_clock: MockClock) -> None:
    """As after a job that was killed: its rows do not fill the room for staged ones forever."""
    async with ActorSystem() as system:
        config = BridgeConfig(max_staged_age=3600.0)
        async with serve_bridge(system, tmp_path / "b", config=config) as bridge:
            lines = await bridge.mailbox("lines", Line)
            client = RemoteMailbox(bridge.address, "lines")
            assert await trio.to_thread.run_sync(client.stage, StageHead("q", 0, 0, 1), [batch(1)]) == 1
            assert (await lines.ref.ask(GetJournalStatistics(), timeout=None)).store.bytes_staged > 0
            [staged] = tmp_path.rglob("staging/*")  # noqa: ASYNC240
            os.utime(staged, (0, 0))
            mock_clock.jump(CLEAN_EVERY)
            await wait_all_tasks_blocked()  # the journal was told before it is asked
            await lines.ref.ask(GetGroups(), timeout=None)  # answered behind what was told
            assert (await lines.ref.ask(GetJournalStatistics(), timeout=None)).store.bytes_staged == 0


# ---------------------------------------------------------------- groups


def test_groups_commit_over_the_wire(actors: Actors) -> None:
    made = actors.mailbox("lines", Line)
    actors.do(lambda: made.append([Line(1), Line(2)]))
    lines = remote(actors)
    epoch = lines.describe().epoch
    assert lines.ask(Declare("job")) == {0: 0}
    lines.ask(CommitOffsets("job", epoch, {0: 2}))
    assert actors.ask(made, GetGroups()) == {"job": {0: 2}}
    assert lines.ask(Declare("late", at_end=True)) == {0: 2}
    with pytest.raises(JournalError, match="no group 'other'"):
        lines.ask(CommitOffsets("other", epoch, {0: 1}))


# ---------------------------------------------------------------- what goes wrong


def test_errors_arrive_as_what_they_were(actors: Actors) -> None:
    actors.mailbox("lines", Line)
    with pytest.raises(UnknownName, match="no mailbox 'other' here; there are: lines") as unknown:
        remote(actors, "other").describe()
    assert unknown.value.name == "other"
    with pytest.raises(EpochChanged, match="deleted and created again") as changed:
        list(remote(actors).read(0, 0, 1, epoch="gone", schema=COLUMNS.schema))
    assert changed.value.wanted == "gone"
    with pytest.raises(JournalError, match="are not there"):
        list(remote(actors).read(0, 0, 1, epoch=remote(actors).describe().epoch, schema=COLUMNS.schema))
    with pytest.raises(JournalError, match="the columns differ from the journal's"):
        remote(actors).append(pa.record_batch({"other": ["x"]}))
    assert read(remote(actors)) == []


@pytest.mark.parametrize(
    "error",
    [
        OffsetGone("gone", path="/p", partition=3, wanted=1, first=9),
        SchemaMismatch("differs", differences=("a: string, wanted int64",)),
        UnknownName("no mailbox", "x"),
        ActorStopped("stopped", "/desk"),
        JournalFull("full", needed=3, limit=2),
    ],
)
def test_every_error_survives_the_wire_and_pickle(error: LevadaError) -> None:
    back = raised(failed(error))
    assert type(back) is type(error)
    assert attrs.asdict(back) == attrs.asdict(error)
    assert str(pickle.loads(pickle.dumps(back))) == str(error)


def test_an_error_of_a_class_without_a_name_there_is_that_of_its_base() -> None:
    class Odd(JournalError):
        pass

    assert type(raised(failed(Odd("odd")))) is JournalError
    assert isinstance(raised(RequestFailed("x", code=0x301, data=b"\xc1")), BridgeError)
    other = RequestFailed("x", code=0x201)
    assert raised(other) is other


def test_unknown_routes_and_octets_that_are_no_rows_are_refused(actors: Actors) -> None:
    actors.mailbox("lines", Line)
    peer = connection(actors.bridge.address)
    for route in ("mailbox/lines/steal", "elsewhere", "mailbox"):
        with pytest.raises(RequestFailed):
            peer.request_response(b"", route=route, timeout=50)
    with pytest.raises(RequestFailed):
        peer.request_response(b"no rows", route="mailbox/lines/append", timeout=50)
    assert remote(actors).describe().end == {0: 0}


# ---------------------------------------------------------------- who is let in


def test_the_folder_and_its_files_are_this_users_alone(actors: Actors) -> None:
    modes = {
        path.name: stat.S_IMODE(path.stat().st_mode) for path in (actors.directory, *actors.directory.glob("bridge.*"))
    }
    assert modes == {"bridge": 0o700, "bridge.socket": 0o600, "bridge.token": 0o600}
    assert stat.S_IMODE((actors.directory / "mailboxes").stat().st_mode) == 0o700
    assert len(Token.read(actors.bridge.token_file).secret) == 64


def test_a_wrong_token_is_refused(actors: Actors, tmp_path: Path) -> None:
    actors.mailbox("lines", Line)
    other = tmp_path / "other.token"
    Token.make().write(other)
    with pytest.raises(BridgeRefused, match="the token belongs to another bridge"):
        RemoteMailbox(actors.bridge.address, "lines", str(other)).describe()


@pytest.mark.parametrize("welcome", [True, False])
def test_a_program_decides_further_on_clients_that_know_the_token(
    make_actors: Callable[..., Actors], tmp_path: Path, welcome: bool
) -> None:
    asked: list[Credentials] = []

    async def decide(credentials: Credentials) -> Identity | Refused:
        asked.append(credentials)
        return Identity("executor") if welcome else Refused("executors of this user are not wanted")

    actors = make_actors(authenticate=decide)
    actors.mailbox("lines", Line)
    other = tmp_path / "other.token"
    Token.make().write(other)
    with pytest.raises(BridgeRefused, match="the token belongs to another bridge"):
        RemoteMailbox(actors.bridge.address, "lines", str(other)).describe()
    assert asked == []
    if welcome:
        assert remote(actors).describe().end == {0: 0}
    else:
        with pytest.raises(BridgeRefused, match="executors of this user are not wanted"):
            remote(actors).describe()
    assert {c.info.peer_credentials and c.info.peer_credentials[1] for c in asked} == {os.getuid()}
    assert {(c.scheme, c.token) for c in asked} == {("", b"")}  # the bridge's own affair


def test_a_process_of_another_user_is_refused(
    make_actors: Callable[..., Actors], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Simulated: the bridge lets in a user that this process is not."""
    actors = make_actors(config=BridgeConfig(allowed_uids=frozenset({os.getuid() + 1})))
    monkeypatch.setattr(worker_module, "PATIENCE", 0.0)
    with pytest.raises(ConnectionLost):
        connection(actors.bridge.address)


AS_SOMEBODY_ELSE = """
import os, sys
from levada.actors.spark.worker import connection
from levada.framework.errors import ConnectionLost
os.chdir(sys.argv[1])
here = "/proc/self/cwd"
# Once as the bridge's own user: another one may not be able to read what Python imports on the way.
connection(f"unix://{here}/bridge.socket", f"{here}/bridge.token").close()
os.setgroups([])
os.setuid(65534)
try:
    connection(f"unix://{here}/bridge.socket", f"{here}/copied.token")
except ConnectionLost:
    print("refused")
else:
    print("let in")
"""


@pytest.mark.ci
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize(("allowed", "outcome"), [({0}, "refused"), ({0, 65534}, "let in")])
def test_a_real_process_of_another_user_is_refused_though_it_has_the_token(
    make_actors: Callable[..., Actors], allowed: set[int], outcome: str
) -> None:
    """Folder and socket are opened to it, so that only the user's number is left to stop it."""
    actors = make_actors(config=BridgeConfig(allowed_uids=frozenset(allowed)))
    (actors.directory / "copied.token").write_text(actors.bridge.token_file.read_text())
    for path, mode in (("", 0o711), ("bridge.socket", 0o666), ("copied.token", 0o644)):
        (actors.directory / path).chmod(mode)
    command = [sys.executable, "-W", "ignore", "-c", AS_SOMEBODY_ELSE, str(actors.directory)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.stdout == f"{outcome}\n"
    [warning] = done.stderr.splitlines()
    assert "copied.token holds the token of a bridge and can be read by all users" in warning


def test_a_token_file_that_others_may_read_is_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "a.token"
    Token.make().write(file)
    Token.read(file)
    assert caplog.messages == []
    file.chmod(0o644)
    Token.read(file)
    assert [f"{file} holds the token of a bridge and can be read by all" in text for text in caplog.messages] == [True]


def test_a_token_file_that_is_none_is_not_shown(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("something private")
    with pytest.raises(ConfigurationError, match="is not a token file") as refused:
        Token.read(secret)
    assert "private" not in str(refused.value)
    with pytest.raises(ConfigurationError, match="No such file"):
        Token.read(tmp_path / "missing")
    assert "secret" not in repr(Token("secret", "host"))


@pytest.mark.ci
def test_addresses_that_cannot_be_used_say_why(actors: Actors, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    token = str(actors.bridge.token_file)
    with pytest.raises(ConfigurationError, match="empty"):
        connection("  ")
    with pytest.raises(ConfigurationError, match=r"token_file \(as an option: tokenFile\) is missing"):
        connection("tls://localhost:1")
    for address in ("http://x", "unix://tmp/bridge.socket"):
        with pytest.raises(ConfigurationError, match=f"is '{address}', wanted unix:///path"):
            connection(address, token)
    with pytest.raises(ConnectionLost, match="no bridge answers"):
        connection(f"unix://{tmp_path}/nobody.socket", token)
    with socket.socket(socket.AF_UNIX) as mute:
        mute.bind(f"{tmp_path}/mute.socket")
        mute.listen()
        monkeypatch.setattr(worker_module, "CONNECT_TIMEOUT", 0.05)
        with pytest.raises(ConnectionLost, match=r"mute\.socket takes connections and said nothing") as mute_bridge:
            connection(f"unix://{tmp_path}/mute.socket", token)
        assert not isinstance(mute_bridge.value, BridgeUnreachable)
    away = tmp_path / "away.token"
    attrs.evolve(Token.read(token), host="another").write(away)
    with pytest.raises(BridgeUnreachable, match="on another machine"):
        connection(actors.bridge.address, str(away))


class OtherStore(Actor[AwaitRows | GetExtent | GetReach | GetSchema | ReadRows]):
    """A log that has no blocks of mapped files."""

    log: Ref[Any]

    @handles
    async def any(self, m: Any) -> None:
        self.reply_later().send(await self.log.ask(m, timeout=None))


async def test_a_log_of_another_store_is_read(tmp_path: Path) -> None:
    events = log_columns(Line)
    async with ActorSystem() as system, serve_bridge(system, tmp_path / "b") as bridge:
        log: Any = system.spawn(partial(Journal, tmp_path / "log", events, config=log_config(1)))
        now = datetime.now(UTC)
        rows = [
            dict.fromkeys(events.names) | {"entity": "a", "sequence": n, "time": now, "kind": "line", "number": n}
            for n in range(3)
        ]
        await log.ask(Append(pa.RecordBatch.from_pylist(rows, events), partition=0), timeout=None)
        await bridge.log("events", system.spawn(OtherStore, log))
        client = RemoteMailbox(bridge.address, "events")

        def read() -> list[int]:
            found = client.describe()
            batches = client.read(0, 0, found.end[0], epoch=found.epoch, schema=found.columns())
            return [number for each in batches for number in each.column("number").to_pylist()]

        assert await trio.to_thread.run_sync(read) == [0, 1, 2]


async def test_a_folder_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    os.chmod(tmp_path, 0o755)
    async with ActorSystem() as system:
        with pytest.raises(ConfigurationError, match=r"open to this user only.*mode 755"):
            async with serve_bridge(system, tmp_path):
                pass


@pytest.mark.ci
async def test_a_backup_of_all_mailboxes_of_a_running_bridge(tmp_path: Path) -> None:
    async with ActorSystem() as system:
        async with serve_bridge(system, tmp_path / "b") as bridge:
            for name, numbers in (("lines", [1, 2]), ("orders", [3])):
                await (await bridge.mailbox(name, Line)).append(batch(*numbers))
            copies = await trio.to_thread.run_sync(backup, tmp_path / "b" / "mailboxes", tmp_path / "copy")
            assert [(each.directory.name, each.end) for each in copies] == [("lines", {0: 2}), ("orders", {0: 1})]
            await (await bridge.mailbox("more", Line)).append(batch(4))
        (tmp_path / "c").mkdir(mode=0o700)
        await trio.to_thread.run_sync(restore, tmp_path / "copy", tmp_path / "c" / "mailboxes")
        async with serve_bridge(system, tmp_path / "c") as bridge:
            lines = await bridge.mailbox("lines", Line)
            assert (await lines.append(batch(5))).first == 2


async def test_a_folder_and_certificates_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    async with ActorSystem() as system:
        for folder, why in (("file", "File exists"), ("file/below", "Not a directory")):
            with pytest.raises(ConfigurationError, match=f"cannot use the folder .*{folder}: {why}"):
                async with serve_bridge(system, tmp_path / folder):
                    pass
        config = BridgeConfig(tls=TlsConfig(certificate=tmp_path / "missing.pem"))
        with pytest.raises(ConfigurationError, match=r"cannot use .*missing\.pem: No such file"):
            async with serve_bridge(system, tmp_path / "b", url="tls://127.0.0.1:0", config=config):
                pass


async def test_one_bridge_for_each_folder(tmp_path: Path) -> None:
    async with ActorSystem() as system, serve_bridge(system, tmp_path / "b"):
        with pytest.raises(ConfigurationError, match=r"cannot listen at .*: another process .* choose another path"):
            async with serve_bridge(system, tmp_path / "b"):
                pass


async def test_tls_needs_both_a_url_and_certificates(tmp_path: Path) -> None:
    async with ActorSystem() as system:
        with pytest.raises(ConfigurationError, match="needs both"):
            async with serve_bridge(system, tmp_path / "b", url="tls://127.0.0.1:0"):
                pass
        with pytest.raises(ConfigurationError, match="is 'tcp://a:0', wanted tls"):
            async with serve_bridge(system, tmp_path / "b", url="tcp://a:0", config=BridgeConfig(tls=TlsConfig())):
                pass


# ---------------------------------------------------------------- a new start


def test_a_reader_goes_on_where_it_was_when_the_bridge_starts_again(make_actors: Callable[..., Actors]) -> None:
    actors = make_actors(config=BridgeConfig(drain_timeout=0.0))
    config = JournalConfig(block_rows=1, block_bytes=256, segment_bytes=1 << 20)
    made = actors.mailbox("lines", Line, config=config)
    actors.do(lambda: made.append([Line(n) for n in range(50)]))
    lines = remote(actors)
    rows = lines.read(0, 0, 50, epoch=lines.describe().epoch, schema=COLUMNS.schema)
    got = [next(rows).column("number")[0].as_py() for _ in range(3)]
    actors.stop()
    actors.start()
    actors.mailbox("lines", Line, config=config)
    got += [number for each in rows for number in each.column("number").to_pylist()]
    assert got == list(range(50))


def test_a_mailbox_that_is_not_open_yet_after_a_new_start_is_waited_for(make_actors: Callable[..., Actors]) -> None:
    actors = make_actors()
    actors.mailbox("lines", Line)
    lines = remote(actors)
    epoch = lines.describe().epoch
    lines.append(batch(1))
    actors.stop()
    actors.start()
    got: list[Any] = []
    rows = lines.read(0, 0, 1, epoch=epoch, schema=COLUMNS.schema)
    waiting = [
        threading.Thread(target=lambda: got.append(lines.describe().epoch)),
        threading.Thread(target=lambda: got.append(next(rows).num_rows)),
    ]
    for each in waiting:
        each.start()
    actors.mailbox("lines", Line)
    for each in waiting:
        each.join(20)
    assert {*got} == {epoch, 1}


def test_the_token_stays_and_a_delivery_is_known_after_a_new_start(make_actors: Callable[..., Actors]) -> None:
    actors = make_actors()
    actors.mailbox("lines", Line)
    lines = remote(actors)
    lines.stage(StageHead("q", 0, 0, 1), [batch(1)])
    lines.ask(DeliverBatch("q", 0, {0: 1}))
    lines.stage(StageHead("q", 1, 0, 1), [batch(2)])
    secret = Token.read(actors.bridge.token_file).secret
    actors.stop()
    with pytest.raises(ConnectionLost):
        lines.ask(DeliverBatch("q", 0, {0: 1}), patience=0.0)
    actors.start()
    actors.mailbox("lines", Line)
    assert Token.read(actors.bridge.token_file).secret == secret
    assert lines.ask(DeliverBatch("q", 0, {0: 1})).already
    assert not lines.ask(DeliverBatch("q", 1, {0: 1}, {0: 1})).already
    assert read(lines) == [1, 2]


@pytest.mark.ci
def test_what_may_not_be_done_twice_is_not(make_actors: Callable[..., Actors]) -> None:
    actors = make_actors()
    tries: list[int] = []

    def use(_: object) -> None:
        tries.append(1)
        raise ConnectionLost("lost")

    with pytest.raises(ConnectionLost):
        call(actors.bridge.address, None, use)
    assert tries == [1]
    with pytest.raises(ConnectionLost):
        call(actors.bridge.address, None, use, again=True, patience=0.1)

    def use_at_last(_: object) -> int:
        tries.append(1)
        if len(tries) < 4:
            raise ConnectionLost("lost")
        return len(tries)

    tries.clear()
    assert call(actors.bridge.address, None, use_at_last, again=True, patience=50.0) == 4


FORKING = """
import os, sys
from levada.actors.spark.worker import RemoteMailbox, connection
lines = RemoteMailbox(sys.argv[1], "lines")
mine = connection(sys.argv[1])
child = os.fork()
if not child:
    fresh = connection(sys.argv[1])
    os._exit(0 if fresh is not mine and lines.describe().end == {0: 0} else 1)
assert os.waitpid(child, 0)[1] == 0
assert connection(sys.argv[1]) is mine
print(lines.describe().end)
"""


@pytest.mark.ci
def test_a_forked_child_makes_a_connection_of_its_own(actors: Actors) -> None:
    """As the workers of Spark are: the parent's connection does not notice."""
    actors.mailbox("lines", Line)
    command = [sys.executable, "-W", "ignore", "-c", FORKING, actors.bridge.address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert (done.stdout, done.stderr) == ("{0: 0}\n", "")


# ---------------------------------------------------------------- mailboxes and subscriptions, on the actors' side


class Rows:
    """What a subscriber got; can be waited for."""

    def __init__(self) -> None:
        self.items: list[Any] = []
        self._changed = trio.Event()

    def add(self, item: Any) -> None:
        self.items.append(item)
        self._changed.set()
        self._changed = trio.Event()

    async def reach(self, count: int) -> list[Any]:
        with trio.fail_after(100):
            while len(self.items) < count:
                await self._changed.wait()
        return self.items


class Collector(Actor[Delivery | Line]):
    rows: Rows
    fail_at: int = -1

    @handles
    def take(self, m: Delivery) -> None:
        if m.message.number == self.fail_at:
            self.fail_at = -1
            raise ValueError("not this one")
        self.rows.add((m.message.number, m.key.offset))

    @handles
    def take_bare(self, m: Line) -> None:
        self.rows.add(m.number)


async def test_a_subscriber_gets_each_row_with_its_key_and_the_group_goes_on(tmp_path: Path) -> None:
    async with ActorSystem() as system:
        async with serve_bridge(system, tmp_path / "b") as bridge:
            lines = await bridge.mailbox("lines", Line)
            await lines.append([Line(1), Line(2)])
            rows = Rows()
            bridge.subscribe("lines", system.spawn(Collector, rows), group="g")
            await rows.reach(2)
            await lines.append([Line(3)])
            assert await rows.reach(3) == [(1, 0), (2, 1), (3, 2)]
        async with serve_bridge(system, tmp_path / "b") as bridge:
            lines = await bridge.mailbox("lines", Line)
            await lines.append([Line(4)])
            again = Rows()
            bridge.subscribe("lines", system.spawn(Collector, again), group="g")
            # What was handled and not yet noted when the bridge ended comes again, with the key it had.
            while (await again.reach(1))[-1] != (4, 3):
                await again.reach(len(again.items) + 1)
            assert set(again.items) <= {*rows.items, (4, 3)}


async def test_a_subscriber_gets_no_erased_rows_and_goes_on_behind_them(tmp_path: Path) -> None:
    async with ActorSystem() as system, serve_bridge(system, tmp_path / "b") as bridge:
        lines = await bridge.mailbox("lines", Line, config=JournalConfig(keyed=Keyed(entity="text")))
        await lines.append([Line(n, "gone") for n in range(1000)])
        await lines.append([Line(1, "kept")])
        await lines.ref.ask(EraseEntity("gone", partition=0), timeout=None)
        rows = Rows()
        bridge.subscribe("lines", system.spawn(Collector, rows), group="g")
        await lines.append([Line(2, "kept")])
        assert await rows.reach(2) == [(1, 1000), (2, 1001)]


async def test_a_subscriber_may_be_a_sender_and_take_bare_messages(tmp_path: Path) -> None:
    async with ActorSystem() as system, serve_bridge(system, tmp_path / "b") as bridge:
        lines = await bridge.mailbox("lines", Line)
        await lines.append([Line(1), Line(2)])
        sender, receiver = channel(Line)
        subscription = bridge.subscribe("lines", sender, group="g", keyed=False)
        with receiver:
            assert [await receiver.receive(), await receiver.receive()] == [Line(1), Line(2)]
        await lines.append([Line(3)])
        with trio.fail_after(100):
            await subscription.terminated()


async def test_a_group_has_one_subscription_at_a_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    async with ActorSystem() as system, serve_bridge(system, tmp_path / "b") as bridge:
        lines = await bridge.mailbox("lines", Line)
        await bridge.mailbox("others", Line)
        rows, later, others = Rows(), Rows(), Rows()
        first = bridge.subscribe("lines", system.spawn(Collector, rows), group="g")
        second = bridge.subscribe("lines", system.spawn(Collector, later), group="g")
        bridge.subscribe("others", system.spawn(Collector, others), group="g")
        await lines.append([Line(1)])
        assert await rows.reach(1) == [(1, 0)]
        while (await lines.ref.ask(GetGroups()))["g"] != {0: 1}:
            await trio.lowlevel.checkpoint()
        await trio.sleep(2)
        assert caplog.messages == [
            f"{second.path} waits for the end of {first.path}: the group 'g' has one subscription at a time"
        ]
        first.stop()
        await lines.append([Line(2)])
        assert await later.reach(1) == [(2, 1)]
        assert (rows.items, others.items) == ([(1, 0)], [])


@pytest.mark.parametrize("end", ["stop", "kill"])
async def test_a_subscription_that_ends_while_it_waits_lets_no_other_begin(
    tmp_path: Path, autojump_clock: MockClock, end: str
) -> None:
    """The next one of the group waits for the first one too, and the one that has ended took nothing."""
    async with ActorSystem() as system, serve_bridge(system, tmp_path / "b") as bridge:
        lines = await bridge.mailbox("lines", Line)
        found = [Rows() for _ in range(3)]
        first, second = (bridge.subscribe("lines", system.spawn(Collector, rows), group="g") for rows in found[:2])
        await trio.sleep(5)
        getattr(second, end)()
        await second.terminated()
        bridge.subscribe("lines", system.spawn(Collector, found[2]), group="g")
        await lines.append([Line(1)])
        assert await found[0].reach(1) == [(1, 0)]
        while (await lines.ref.ask(GetGroups()))["g"] != {0: 1}:
            await trio.lowlevel.checkpoint()
        await trio.sleep(5)
        first.stop()
        await lines.append([Line(2)])
        assert await found[2].reach(1) == [(2, 1)]
        assert [rows.items for rows in found[:2]] == [[(1, 0)], []]


async def test_a_subscription_that_ends_gives_way_to_the_next_of_its_group(tmp_path: Path) -> None:
    async with ActorSystem() as system, serve_bridge(system, tmp_path / "b") as bridge:
        lines = await bridge.mailbox("lines", Line)
        found = [Rows() for _ in range(4)]
        for number, rows in enumerate(found):
            collector = system.spawn(Collector, rows)
            subscription = bridge.subscribe("lines", collector, group="g")
            await lines.append([Line(number)])
            assert await rows.reach(1) == [(number, number)]
            while (await lines.ref.ask(GetGroups()))["g"] != {0: number + 1}:
                await trio.lowlevel.checkpoint()
            (collector if number % 2 else subscription).stop()  # it ends with its target too, without a further row


async def test_a_subscriber_that_fails_on_a_row_gets_it_again(tmp_path: Path) -> None:
    async with ActorSystem() as system, serve_bridge(system, tmp_path / "b") as bridge:
        lines = await bridge.mailbox("lines", Line)
        rows = Rows()
        collector = Collector(rows, 2)
        bridge.subscribe("lines", system.spawn(lambda: collector, supervise=restart("permanent")), group="g")
        await lines.append([Line(1)])
        await rows.reach(1)
        await lines.append([Line(2), Line(3)])
        assert await rows.reach(3) == [(1, 0), (2, 1), (3, 2)]


async def test_a_subscription_ends_with_its_target(tmp_path: Path) -> None:
    async with ActorSystem() as system, serve_bridge(system, tmp_path / "b") as bridge:
        lines = await bridge.mailbox("lines", Line)
        target = system.spawn(Collector, Rows())
        subscription = bridge.subscribe("lines", target, group="g", at="end")
        target.stop()
        await target.terminated()
        await lines.append([Line(1)])
        with trio.fail_after(100):
            assert await subscription.terminated() == Normal()


@pytest.mark.parametrize("group", ["\ud800", "g" * 1001, 5])
async def test_a_subscription_whose_group_is_no_name_fails_alone(tmp_path: Path, group: Any) -> None:
    async with ActorSystem() as system, serve_bridge(system, tmp_path / "b") as bridge:
        lines = await bridge.mailbox("lines", Line)
        rows = Rows()
        bridge.subscribe("lines", system.spawn(Collector, rows), group="g")
        await lines.append([Line(1)])
        await rows.reach(1)
        wrong = bridge.subscribe("lines", system.spawn(Collector, Rows()), group=group)
        reason = await wrong.terminated()
        assert isinstance(reason, Failed)
        assert isinstance(reason.error, ConfigurationError)
        assert "the group of a subscription is" in str(reason.error)
        await lines.append([Line(2)])
        assert await rows.reach(2) == [(1, 0), (2, 1)]
        assert system.statistics().restarts == 0


async def test_subscriptions_go_on_when_their_journal_starts_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever they were asking: one notes that it has some rows, the other one waits for rows, or for its own note."""
    real, failing = os.pwrite, False

    def write(descriptor: int, octets: Any, at: int) -> int:
        nonlocal failing
        if failing:
            failing = False
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(descriptor, octets, at)

    monkeypatch.setattr(os, "pwrite", write)
    async with ActorSystem() as system, serve_bridge(system, tmp_path / "b") as bridge:
        restarted = Probe(system)
        system.events.subscribe(ActorRestarted, restarted.ref)
        lines = await bridge.mailbox("lines", Line)
        groups = [Rows(), Rows()]
        for number, rows in enumerate(groups):
            bridge.subscribe("lines", system.spawn(Collector, rows), group=f"g{number}")
        for number in range(4):
            await lines.append([Line(number)])
            failing = True  # an offset of a group cannot be noted, so the journal starts anew
            for rows in groups:
                while (number, number) not in rows.items:
                    await rows.reach(len(rows.items) + 1)
            await restarted.expect(ActorRestarted, within=50.0)
        for rows in groups:
            assert list(dict.fromkeys(rows.items)) == [(number, number) for number in range(4)]


class Restless(Actor[DeclareGroup | AwaitRows]):
    """Stands for a journal that cannot be used for a while: it refuses questions, and then fails on each."""

    refusals: list[int]
    settled: trio.Event

    @handles
    def declare(self, m: DeclareGroup) -> dict[int, int] | None:
        if not self.refusals[0]:
            return {0: 0}
        self.refusals[0] -= 1
        self.reply_later().fail(JournalError("open it again"))
        return None

    @handles
    def wait(self, m: AwaitRows) -> None:
        self.refusals[1] -= 1
        if self.refusals[1] >= 0:
            raise JournalError("it starts anew")
        self._kept = self.reply_later()
        self.settled.set()


async def test_a_subscription_waits_for_a_journal_however_often_that_starts_anew(autojump_clock: MockClock) -> None:
    refusals, settled = [2, 12], trio.Event()
    async with ActorSystem() as system:
        journal = system.spawn(
            partial(Restless, refusals, settled),
            supervise=restart("permanent", max=100, within=1e9, initial_backoff=0.01),
        )
        lines: Any = Mailbox("lines", journal, columns_of(Line))
        subscription = system.spawn(
            partial(Subscription, lines, system.spawn(Collector, Rows()), group="g", keyed=True, at="first")
        )
        await settled.wait()
        assert refusals == [0, -1]
        assert subscription.is_alive


async def test_mailboxes_that_cannot_be_are_refused_where_they_are_asked_for(tmp_path: Path) -> None:
    async with ActorSystem() as system, serve_bridge(system, tmp_path / "b") as bridge:
        await bridge.mailbox("lines", Line, partitions=2)
        with pytest.raises(ConfigurationError, match="has a mailbox 'lines' already"):
            await bridge.mailbox("lines")
        for name in ("", "../up", "a/b", ".hidden"):
            with pytest.raises(ConfigurationError, match="wanted up to 100 letters"):
                await bridge.mailbox(name)
        await bridge.mailbox("plain", COLUMNS.schema)
        with pytest.raises(ConfigurationError, match="no message class"):
            bridge.subscribe("plain", system.spawn(Collector, Rows()), group="g")
        with pytest.raises(UnknownName):
            bridge.subscribe("other", system.spawn(Collector, Rows()), group="g")
        bridge.expose("x", one := system.spawn(Collector, Rows()))
        bridge.expose("x", one)
        with pytest.raises(ConfigurationError, match="wanted one without '/' that is not taken"):
            bridge.expose("x", system.spawn(Collector, Rows()))
    async with ActorSystem() as system, serve_bridge(system, tmp_path / "b") as bridge:
        with pytest.raises(ConfigurationError, match="2 partitions"):
            await bridge.mailbox("lines", Line)
        with pytest.raises(SchemaMismatch, match="number"):
            await bridge.mailbox("lines", pa.schema([("number", pa.string())]), partitions=2)
        assert (await (await bridge.mailbox("lines", partitions=2)).ref.ask(GetExtent())).end == {0: 0, 1: 0}


async def test_decimals_that_spark_has_not_are_refused_where_the_mailbox_is_made(tmp_path: Path) -> None:
    async with ActorSystem() as system, serve_bridge(system, tmp_path / "b") as bridge:
        for kind in (pa.decimal256(50, 2), pa.list_(pa.decimal256(10, 2))):
            with pytest.raises(ConfigurationError, match="price: Spark's decimals have 38 digits at most"):
                await bridge.mailbox("prices", pa.schema([("price", kind)]))
        await bridge.mailbox("prices", pa.schema([("price", pa.decimal128(38, 2))]))


async def test_nanoseconds_are_refused_when_the_mailbox_is_made(tmp_path: Path) -> None:
    nanoseconds = pa.timestamp("ns")
    async with ActorSystem() as system, serve_bridge(system, tmp_path / "b") as bridge:
        for kind, inner, instead in (
            (nanoseconds, "timestamp[ns]", "timestamp[us]"),
            (pa.timestamp("ns", "UTC"), "timestamp[ns, tz=UTC]", "timestamp[us, tz=UTC]"),
            (pa.duration("ns"), "duration[ns]", "duration[us]"),
            (pa.list_(nanoseconds), "timestamp[ns]", "timestamp[us]"),
            (pa.map_(pa.string(), nanoseconds), "timestamp[ns]", "timestamp[us]"),
            (pa.struct([("begun", nanoseconds)]), "timestamp[ns]", "timestamp[us]"),
        ):
            with pytest.raises(ConfigurationError) as refused:
                await bridge.mailbox("events", pa.schema([("at", kind)]))
            assert str(refused.value) == (
                f"at: Spark's timestamps and durations have microseconds, declare {inner} as {instead} and cast the rows "
                "(pandas makes nanoseconds)"
            )
        exact = [pa.timestamp("s"), pa.timestamp("ms"), pa.timestamp("us"), pa.duration("ms"), pa.time64("ns")]
        await bridge.mailbox("events", pa.schema([(f"at{place}", kind) for place, kind in enumerate(exact)]))


async def test_a_mailbox_that_is_cancelled_while_it_opens_can_be_opened_again(tmp_path: Path) -> None:
    async with ActorSystem() as system, serve_bridge(system, tmp_path / "b") as bridge:
        with trio.move_on_after(0):
            await bridge.mailbox("lines", Line)
        done = await (await bridge.mailbox("lines", Line)).append([Line(1)])
        assert (done.first, done.count) == (0, 1)
