"""``levada journal`` on journals in order, torn, damaged, open, and copied."""

from __future__ import annotations

import base64
import datetime as dt
import json
import os
import random
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.pace import every

pytest.importorskip("levada.actors.journal", exc_type=ImportError)

import pyarrow as pa

from levada.actors import cli
from levada.actors.durable import log_columns, log_config
from levada.actors.journal import JournalConfig, JournalFull, Keyed, Store, columns_of
from levada.actors.journal.inspection import inspect
from levada.framework import message


@message("cli.Put")
class Put:
    amount: int


@message("cli.Event")
class Event:
    entity: str
    amount: int
    body: bytes = b""
    at: dt.datetime | None = None


COLUMNS = columns_of(Event)
CONFIG = JournalConfig(
    partitions=2, keyed=Keyed(entity="entity"), segment_bytes=2048, block_bytes=1024, retain_bytes=1 << 20
)


def fill(directory: Path, rows: int = 40) -> None:
    with Store.open(directory, COLUMNS.schema, CONFIG) as store:
        store.declare_group("readers")
        for n in range(rows):
            event = Event("anna" if n % 4 else "b\x1b[2Jen", n, b"\xff" if n == 5 else b"x" * 40)
            store.append([(n % 2, COLUMNS.encode([event]))])
        store.commit_group("readers", {0: 3, 1: 2} if rows > 5 else {0: 1})


def state(directory: Path) -> dict[str, tuple[bytes, int]]:
    """All files: their bytes, and when they were changed."""
    return {
        str(path.relative_to(directory)): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    directory = tmp_path / "journal"
    fill(directory)
    return directory


Run = Callable[..., tuple[int, str]]


@pytest.fixture
def levada(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a subcommand of ``levada journal``; return its exit code and what it printed."""

    def run(*arguments: str | Path) -> tuple[int, str]:
        code = cli.main(["journal", *map(str, arguments)])
        out, err = capsys.readouterr()
        return code, out + err

    return run


def last_segment(journal: Path) -> Path:
    return max((journal / "partition-0001").glob("*.segment"))


def test_ls(journal: Path, levada: Run) -> None:
    before = state(journal)
    code, text = levada("ls", journal, "--entities", "entity")
    assert code == 0
    lines = text.splitlines()
    assert lines[0].startswith(f"{journal}: journal ")
    assert lines[0].endswith(", opened 1 time")
    assert lines[1] == "  columns   entity: string, amount: int64, body: binary, at: timestamp[us, tz=UTC]"
    assert lines[2].startswith("  partition 0: offsets 0 to 20, 20 rows, ")
    assert lines[4:] == [
        "  group     readers: 35 rows behind, at 0: 3, 1: 2",
        "  entity    anna: 30 rows",
        "  entity    b\\x1b[2Jen: 10 rows",
    ]
    assert state(journal) == before


def test_a_folder_whose_name_is_no_text(tmp_path: Path, levada: Run) -> None:
    odd = tmp_path / os.fsdecode(b"\xff?%")
    fill(odd)
    code, text = levada("ls", odd)
    assert (code, text.splitlines()[1][:12]) == (0, "  columns   ")


def test_ls_as_json(journal: Path, levada: Run) -> None:
    code, text = levada("ls", journal, "--json", "--entities", "entity")
    found = json.loads(text)
    assert code == 0
    assert [(each["first"], each["end"], each["noted_end"]) for each in found["partitions"]] == [(0, 20, 20)] * 2
    assert (found["entities"], found["rows_of_others"]) == ({"anna": 30, "b\x1b[2Jen": 10}, 0)
    assert (found["groups"], found["staged"], found["findings"]) == ({"readers": {"0": 3, "1": 2}}, 0, [])


def test_ls_lists_so_many_entities(journal: Path, levada: Run) -> None:
    code, text = levada("ls", journal, "--entities", "entity", "--limit", "1")
    assert code == 0
    assert text.splitlines()[-2:] == ["  entity    b\\x1b[2Jen: 10 rows", "  entities  not listed: 30 rows (--limit)"]


@pytest.mark.parametrize(
    ("columns", "name"), [(log_columns(Put), "(none: rows of levada itself)"), (COLUMNS.schema, "(none)")]
)
def test_rows_without_an_entity_have_a_name(columns: Any, name: str, tmp_path: Path, levada: Run) -> None:
    nothing: dict[pa.DataType, Any] = {pa.string(): "", pa.binary(): b"", pa.timestamp("us", tz="UTC"): 0}
    row = [pa.array([nothing.get(field.type, 0)], field.type) for field in columns]
    with Store.open(tmp_path / "log", columns) as store:
        store.append([(0, pa.RecordBatch.from_arrays(row, schema=columns))])
    code, text = levada("ls", tmp_path / "log", "--entities", "entity")
    assert (code, text.splitlines()[-1]) == (0, f"  entity    {name}: 1 rows")


def test_erased_rows(journal: Path, levada: Run) -> None:
    with Store.open(journal, COLUMNS.schema, CONFIG) as store:
        assert sum(store.erase("anna", partition=0)) == 10
        store.erase("anna", partition=1)
    code, text = levada("verify", journal)
    assert code == 0
    assert "the erasure of 'anna' is not finished; the next opening with Keyed(entity='entity') finishes it" in text
    with Store.open(journal, COLUMNS.schema, CONFIG):
        pass
    code, text = levada("verify", journal)
    assert (code, text) == (0, f"{journal}: whole, 10 rows in 2 partitions\n")
    assert [line for line in levada("ls", journal)[1].splitlines() if "offsets 0 to 20, 10 rows" in line]
    assert [each["rows"] for each in json.loads(levada("ls", journal, "--json")[1])["partitions"]] == [10, 0]
    assert ", 10 rows in 2 partitions" in levada("backup", journal, journal.with_name("backup"))[1]
    assert levada("show", journal, "--entity", "anna") == (0, "")
    assert len(levada("show", journal)[1].splitlines()) == 10
    assert [
        json.loads(line)["amount"] for line in levada("show", journal, "--entity", "b\x1b[2Jen")[1].splitlines()
    ] == [*range(0, 40, 4)]


def test_ls_of_the_mailboxes_of_a_bridge(tmp_path: Path, levada: Run) -> None:
    for name in ("lines", "orders"):
        fill(tmp_path / name, 2)
    code, text = levada("ls", tmp_path, "--json")
    assert code == 0
    assert [Path(json.loads(line)["directory"]).name for line in text.splitlines()] == ["lines", "orders"]
    code, text = levada("show", tmp_path)
    assert (code, text) == (2, f"levada: {tmp_path} has 2 journals, name one of them: lines, orders\n")


def test_the_events_of_an_entity(journal: Path, levada: Run) -> None:
    code, text = levada("show", journal, "--entity", "anna", "--limit", "3")
    assert code == 0
    assert [json.loads(line) for line in text.splitlines()] == [
        {"partition": 0, "offset": 1, "entity": "anna", "amount": 2, "body": "x" * 40, "at": None},
        {"partition": 0, "offset": 3, "entity": "anna", "amount": 6, "body": "x" * 40, "at": None},
        {"partition": 0, "offset": 5, "entity": "anna", "amount": 10, "body": "x" * 40, "at": None},
    ]
    code, text = levada("show", journal, "--entity", "anna", "--partition", "1", "--start", "17")
    assert [json.loads(line)["offset"] for line in text.splitlines()] == [17, 18, 19]
    code, text = levada("show", journal, "--entity", "anna", "--column", "who")
    assert (code, "no column of text or bytes is called 'who'" in text) == (2, True)


def test_an_entity_whose_name_is_not_utf8(journal: Path, levada: Run) -> None:
    name = os.fsdecode(b"\xff")  # as in sys.argv
    code, text = levada("show", journal, "--entity", name, "--column", "body")
    assert [(code, json.loads(line)["amount"]) for line in text.splitlines()] == [(0, 5)]
    assert levada("show", journal, "--entity", name) == (0, "")


def test_rows_from_an_offset(journal: Path, levada: Run) -> None:
    before = state(journal)
    code, text = levada("show", journal, "--partition", "1", "--start", "2", "--limit", "2")
    assert code == 0
    assert [(row["offset"], row["amount"], row["body"]) for row in map(json.loads, text.splitlines())] == [
        (2, 5, "base64:/w=="),
        (3, 7, "x" * 40),
    ]
    assert levada("show", journal, "--partition", "2") == (2, "levada: the partition is 2, wanted 0 to 1\n")
    assert state(journal) == before


def test_a_whole_journal(journal: Path, levada: Run) -> None:
    before = state(journal)
    assert levada("verify", journal) == (0, f"{journal}: whole, 40 rows in 2 partitions\n")
    code, text = levada("repair", journal)
    assert (code, text.startswith(f"{journal}: nothing to repair")) == (0, True)
    assert state(journal) == before


def test_an_open_journal_is_left_alone(journal: Path, levada: Run) -> None:
    with Store.open(journal, COLUMNS.schema, CONFIG):
        for arguments in (["ls"], ["show"], ["verify"], ["repair"], ["repair", "--yes"]):
            code, text = levada(*arguments, journal)
            wanted = "a process has this journal open: stop it first, or look at a copy made by levada journal backup"
            assert (code, wanted in text) == (2, True)
    assert levada("verify", journal)[0] == 0


def test_nobody_opens_a_journal_that_is_looked_at(journal: Path) -> None:
    from levada.actors.journal import JournalLocked
    from levada.actors.journal.inspection import inspect

    with inspect(journal), inspect(journal), pytest.raises(JournalLocked):
        Store.open(journal, COLUMNS.schema, CONFIG)


def test_a_copy_of_a_killed_process(journal: Path, tmp_path: Path, levada: Run) -> None:
    """With the ledger's log beside it and a torn block, without the lock, in a folder that may not be written to."""
    copy = tmp_path / "copy"
    with Store.open(journal, COLUMNS.schema, CONFIG) as store:
        store.append([(1, COLUMNS.encode([Event("carl", 1)]))])
        shutil.copytree(journal, copy)
    (copy / "lock").unlink()
    assert (copy / "ledger.sqlite-wal").stat().st_size
    with last_segment(copy).open("ab") as file:
        file.write(b"LvB1" + bytes(60))
    before = state(copy)
    for path in [copy, *copy.rglob("*")]:
        path.chmod(0o500 if path.is_dir() else 0o400)
    try:
        code, text = levada("verify", copy)
        assert (code, text.splitlines()) == (
            1,
            [
                f"{copy}: whole, 41 rows in 2 partitions",
                f"  cut       {copy}/partition-0001: 64 bytes of a write that was never answered",
            ],
        )
        assert len(levada("show", copy)[1].splitlines()) == 41
    finally:
        for path in [copy, *copy.rglob("*")]:
            path.chmod(0o700 if path.is_dir() else 0o600)
    assert state(copy) == before
    code, text = levada("repair", copy)
    assert code == 1
    assert text.splitlines()[1] == f"{copy}: a repair would lose 0 acknowledged rows."
    assert text.splitlines()[-1] == f"Nothing was changed. To repair: levada journal repair --yes {copy}"
    assert state(copy) == before
    assert levada("repair", copy, "--yes")[0] == 0
    assert levada("verify", copy) == (0, f"{copy}: whole, 41 rows in 2 partitions\n")


def test_a_repair_says_what_it_loses(journal: Path, levada: Run) -> None:
    path = last_segment(journal)
    first = int(path.stem)
    path.unlink()
    code, text = levada("repair", journal)
    assert (code, f"a repair would lose {20 - first} acknowledged rows" in text) == (1, True)
    assert "It is better to restore the files" in text
    assert not path.exists()
    code, text = levada("repair", journal, "--yes")
    assert (code, f"0 bytes cut off, {20 - first} rows lost, damaged files are kept" in text) == (0, True)
    assert levada("verify", journal)[0] == 0
    code, text = levada("show", journal, "--partition", "1")
    assert [json.loads(line)["offset"] for line in text.splitlines()] == list(range(first))


def test_damage_inside_an_older_segment_is_found_by_verify(journal: Path, levada: Run) -> None:
    path = min((journal / "partition-0000").glob("*.segment"))
    octets = bytearray(path.read_bytes())
    octets[-30] ^= 1
    path.write_bytes(octets)
    assert levada("ls", journal)[0] == 0
    code, text = levada("verify", journal)
    assert (code, f"damage    {path}: the block at byte" in text) == (1, True)


def test_a_damaged_ledger_is_named(journal: Path, levada: Run) -> None:
    (journal / "ledger.sqlite").write_bytes(b"nonsense")
    code, text = levada("verify", journal)
    assert (code, f"damage    {journal}/ledger.sqlite: " in text) == (1, True)
    assert levada("repair", journal, "--yes")[0] == 2
    (journal / "ledger.sqlite").unlink()
    assert (levada("verify", journal)[0], levada("ls", journal)[0]) == (1, 2)


def test_a_backup_and_its_restore(journal: Path, tmp_path: Path, levada: Run) -> None:
    before = state(journal)
    code, output = levada("backup", journal, tmp_path / "copy", "--verify")
    assert code == 0
    with Store.open(tmp_path / "other", COLUMNS.schema, CONFIG) as other, inspect(journal) as found:
        assert other.epoch != found.epoch
        said = rf"journal {found.epoch}, opening {found.ledger.opening}, 40 rows in 2 partitions, [\d,]+ bytes"
    assert re.fullmatch(rf"{tmp_path}/copy: {said}\n", output)
    code, output = levada("restore", tmp_path / "copy", tmp_path / "restored")
    assert code == 0
    assert re.fullmatch(rf"{tmp_path}/restored: {said}\n", output)
    (journal / "backup.lock").unlink()
    assert state(journal) == before
    fill(journal, 4)
    assert levada("restore", tmp_path / "copy", journal) == (
        2,
        f"levada: {journal} is there; the backup is older, and lacks 4 rows (partition 0: 20 to 21, partition 1: 20 to 21). "
        "Nothing is overwritten: move it away, or name another folder\n",
    )


def test_a_backup_of_a_journal_whose_process_does_not_answer(journal: Path, tmp_path: Path, levada: Run) -> None:
    with Store.open(journal, COLUMNS.schema, CONFIG):
        code, output = levada("backup", journal, tmp_path / "copy", "--timeout", "0.01")
    assert code == 2
    assert output.startswith(f"levada: {journal}: a process has this journal open and did not answer for 0.01 s: ")
    assert not (tmp_path / "copy").exists()


def test_an_export(journal: Path, tmp_path: Path, levada: Run) -> None:
    path = tmp_path / "rows.csv"
    code, output = levada("export", journal, path, "--partition", "0", "--start", "1", "--end", "3")
    assert (code, output) == (0, f"{path}: 2 rows, {path.stat().st_size:,} bytes\n")
    assert path.read_text("utf-8").splitlines() == [
        '"partition","offset","entity","amount","body","at"',
        f'0,1,"anna",2,"{base64.b64encode(b"x" * 40).decode()}",',
        f'0,2,"b\x1b[2Jen",4,"{base64.b64encode(b"x" * 40).decode()}",',
    ]
    assert levada("export", journal, path, "--format", "parquet") == (
        2,
        f"levada: {path} is there. Nothing is overwritten: move it away, or name another file\n",
    )
    assert levada("export", journal, tmp_path / "all", "--format", "parquet")[0] == 0
    assert levada("export", journal, tmp_path / "rows.xlsx")[0] == 2
    code, output = levada("export", journal, "-", "--format", "csv")
    assert (code, output.count("\n")) == (2, 1)
    assert "rows are written to a file, not to standard output: name one" in output
    last_segment(journal).unlink()
    assert levada("export", journal, tmp_path / "rows.arrow")[0] == 1


def test_a_copy_of_a_log_of_durable_actors(
    journal: Path, tmp_path: Path, levada: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = tmp_path / "log", tmp_path / "copy"
    columns = log_columns(Put)
    with Store.open(source, columns, log_config(2)) as store:
        usual = {"entity": "anna", "time": dt.datetime(2026, 1, 2, tzinfo=dt.UTC), "kind": "cli.Event"}
        rows = [dict.fromkeys(columns.names) | usual | {"sequence": n} for n in range(3)]
        store.append([(1, pa.RecordBatch.from_pylist(rows, columns))])
        epoch = store.epoch
    monkeypatch.setattr("levada.actors.cli.journal._PROGRESS_EVERY", 0.0)
    code, output = levada("copy", source, target, "--verify")
    with inspect(target) as found:
        said = f"{target}: journal {found.epoch}, a copy of {epoch}, 3 rows copied, 2 partitions"
    assert (code, output.splitlines()) == (0, [said, "levada: 3 of 3 rows"])
    said = said.replace("3 rows copied", "it has all rows already")
    assert levada("copy", source, target) == (0, f"{said}\n")
    with Store.open(target, None, log_config(2)) as store:  # the program has gone on with the copy
        store.append([(1, pa.RecordBatch.from_pylist(rows[:1], columns))])
    code, output = levada("copy", source, target)
    assert (code, f"{target} has rows, and is no unfinished copy of the log {epoch}" in output) == (2, True)
    for place, text in ((source / "copy", f"is inside {source}"), (tmp_path, "is not empty, and no log")):
        code, output = levada("copy", source, place)
        assert (code, text in output) == (2, True)
    code, output = levada("copy", journal, tmp_path / "other")
    assert (code, "this journal is not the log of a durable class" in output) == (2, True)
    with monkeypatch.context() as disk:
        disk.setattr(Store, "copy", no_room)
        code, output = levada("copy", source, tmp_path / "other")
    assert (code, output) == (2, "levada: the disk is full, and copy again: it goes on where it stopped\n")
    last_segment(source).unlink()
    assert levada("copy", source, tmp_path / "other")[0] == 1


def no_room(*_: object) -> None:
    """As the disk of a copy that is full."""
    raise JournalFull("the disk is full")


def test_a_damaged_journal_is_not_backed_up(journal: Path, tmp_path: Path, levada: Run) -> None:
    last_segment(journal).unlink()
    code, output = levada("backup", journal, tmp_path / "copy")
    assert code == 1
    assert output.startswith("levada: ")
    assert output.endswith("(levada journal verify finds all damage)\n")
    assert not (tmp_path / "copy").exists()


def test_a_long_backup_says_how_far_it_is(
    journal: Path, tmp_path: Path, levada: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("levada.actors.cli.journal._PROGRESS_EVERY", 0.0)
    code, output = levada("backup", journal, tmp_path / "copy")
    assert code == 0
    lines = [line for line in output.splitlines() if line.startswith("levada: ")]
    [(done, octets)] = re.findall(r"levada: ([\d,]+) of ([\d,]+) bytes", lines[-1])
    assert done == octets
    assert output.splitlines()[0].endswith(f", {octets} bytes")


def test_mistakes(tmp_path: Path, levada: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert levada("ls", tmp_path / "nothing") == (
        2,
        f"levada: {tmp_path / 'nothing'} is not a directory: name the folder of a journal, or a folder of journals\n",
    )
    assert levada("ls", "") == (2, "levada: the name of a folder is empty: name one, or the current folder as '.'\n")
    url = "postgresql://me:secret@db.example/bank"
    refused = (
        2,
        "levada: this is a URL, and wanted is the path of a folder or file on a disk of this machine; a database is postgresql://user@host/database\n",
    )
    assert levada("backup", tmp_path, url) == refused
    for arguments in (
        ("ls", url),
        ("backup", url, tmp_path / "a"),
        ("restore", url, tmp_path / "a"),
        ("export", url, tmp_path / "a.csv"),
    ):
        code, text = levada(*arguments)
        assert (code, "secret" in text) == (2, False)
        for word in ("pg_dump", "_events", "levada journal copy"):
            assert word in text
    code, text = levada("ls", "host=db.example user=me password=secret")
    assert (code, "postgresql://user@host/database" in text, "secret" in text) == (2, True, False)
    code, text = levada("verify", tmp_path)
    assert (code, "there is no journal in" in text) == (2, True)
    with pytest.raises(SystemExit) as ended:
        cli.main(["journal", "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert [word for word in ("ls", "show", "verify", "repair", "Exit codes") if word not in shown] == []


@pytest.mark.parametrize("command", ["ls", "show", "verify", "repair"])
def test_errors_of_the_system_are_one_line(journal: Path, levada: Run, command: str) -> None:
    (journal / "ends").unlink()
    (journal / "ends").mkdir()
    wanted = f"levada: [Errno 21] Is a directory: '{journal / 'ends'}'\n"
    assert levada(command, journal) == (2, wanted)
    name = "x" * 300
    assert levada(command, name) == (2, f"levada: [Errno 36] File name too long: '{name}'\n")


def test_a_later_version_is_refused_by_name(journal: Path, levada: Run) -> None:
    path = last_segment(journal)
    octets = bytearray(path.read_bytes())
    struct.pack_into("<I", octets, 8, 99)
    path.write_bytes(octets)
    code, text = levada("verify", journal)
    assert (code, "format version 99" in text) == (2, True)


@pytest.mark.ci
def test_no_damage_is_silent(journal: Path, tmp_path: Path, levada: Run) -> None:
    """Any octet of any file: verify finds it, or all rows are as they were; and nothing ends in a traceback."""
    rows = levada("show", journal)[1]
    lot = random.Random(0)
    files = [name for name in state(journal) if name != "lock" and not name.endswith(".index")]
    silent = 0
    for trial in range(0, 150, every(3)):
        copy = tmp_path / f"copy{trial}"
        shutil.copytree(journal, copy)
        path = copy / lot.choice(files)
        octets = bytearray(path.read_bytes())
        how: Any = lot.choice(("cut", "flip", "flip", "remove"))
        if how == "remove":
            path.unlink()
        elif how == "cut":
            os.truncate(path, lot.randrange(len(octets)))
        else:
            octets[lot.randrange(len(octets))] ^= 1 << lot.randrange(8)
            path.write_bytes(octets)
        code, _ = levada("verify", copy)
        if code == 0:
            silent += 1
            assert levada("show", copy)[1] == rows, (path, how)
        shutil.rmtree(copy)
    assert silent < 60 / every(3)  # flips in padding, in one of two copies, in free pages
