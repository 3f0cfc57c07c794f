"""``levada journal``: inspect, verify, repair, back up, restore, copy, trim and export a journal."""

from __future__ import annotations

import argparse
import base64
import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from datetime import date, datetime, timedelta
from datetime import time as time_of_day
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from levada.framework.errors import ConfigurationError
from levada.framework.text import counted, finite, printable

from . import Subparsers
from .arguments import positive, real, seconds, whole

if TYPE_CHECKING:
    from levada.actors.journal import Copied
    from levada.actors.journal.inspection import Finding, Inspection

__all__ = ["add_parser", "run"]

_PROGRESS_EVERY = 5.0
"""Seconds between lines about a long copy."""


def add_parser(subparsers: Subparsers) -> None:
    """Describe the arguments."""
    parser = subparsers.add_parser(
        "journal",
        help="show, verify, repair, back up, restore, copy, trim and export a journal",
        description="Inspect a journal that no process has open, or a copy, even one from another machine. "
        "Only `repair --yes` and `trim` change a journal. "
        "`backup`, `copy`, `export` and `trim` also take a journal that is open.",
        epilog="Exit codes: 0 the journal is whole; 1 there is damage, or a write that was never answered; "
        "2 a mistake, or a process has the journal open.",
    )
    commands = parser.add_subparsers(title="commands", dest="what", metavar="WHAT", required=True)

    def command(name: str, function: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        own = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        own.add_argument("directory", metavar="DIR", help="a journal; for ls and verify also a directory of several")
        own.set_defaults(function=function)
        return own

    ls = command("ls", _ls, "list partitions, groups and entities")
    ls.add_argument(
        "--entities", metavar="COLUMN", help="count the rows of each value of this column; reads everything"
    )
    ls.add_argument("--limit", type=positive, default=1000, metavar="N", help="list at most N entities (default: 1000)")
    ls.add_argument("--json", action="store_true", help="print a line of JSON for each journal")
    show = command("show", _show, "print rows as lines of JSON")
    show.add_argument(
        "--partition", type=whole(0), metavar="N", help="only this partition (default: all, one after another)"
    )
    show.add_argument("--start", type=whole(0), metavar="OFFSET", help="begin at this offset (default: the oldest row)")
    show.add_argument("--limit", type=positive, metavar="N", help="print at most N rows")
    show.add_argument("--entity", metavar="NAME", help="only rows of this entity")
    show.add_argument(
        "--column", default="entity", metavar="COLUMN", help="the column of entity names (default: entity)"
    )
    verify = command("verify", _verify, "check every byte, and write nothing")
    verify.add_argument("--json", action="store_true", help="print a line of JSON for each finding")
    repair = command("repair", _repair, "cut off torn writes and continue without lost rows")
    repair.add_argument("--yes", action="store_true", help="repair the journal; without --yes only print the losses")

    def waits(own: argparse.ArgumentParser) -> None:
        own.add_argument(
            "--timeout",
            type=seconds,
            default=30.0,
            metavar="SECONDS",
            help="wait at most so long for a process that has the journal open (default: 30)",
        )

    def copies(name: str, function: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        own = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        own.add_argument("directory", metavar="SOURCE", help="a journal, or a directory of several")
        own.add_argument("target", metavar="TARGET", help="the directory to make; it must not be there")
        own.add_argument("--verify", action="store_true", help="check every byte of the copy")
        own.set_defaults(function=function)
        return own

    backup = copies("backup", _backup, "copy a journal, also while a process has it open")
    waits(backup)
    copies("restore", _restore, "copy a backup to where a journal should be; nothing is overwritten")
    text = "copy the log of durable actors to a folder or a database, also while a process has it open"
    copy = commands.add_parser("copy", help=text, description=text[0].upper() + text[1:] + ".")
    place = "a folder, or the URL of a database with the name of the table: postgresql://host/bank?table=accounts"
    copy.add_argument("source", metavar="FROM", help=place)
    copy.add_argument("target", metavar="TO", help="as FROM; empty, or what an earlier copy has left")
    copy.add_argument("--verify", action="store_true", help="compare all rows before the copy counts as whole")
    copy.set_defaults(function=_copy)
    waits(copy)
    text = "remove old rows behind snapshots from the log of durable actors, also while a process has it open"
    trim = commands.add_parser("trim", help=text, description=text[0].upper() + text[1:] + ".")
    trim.add_argument("source", metavar="LOG", help=place)
    trim.add_argument("--keep", type=real("days", 0), required=True, metavar="DAYS", help="younger rows stay")
    trim.add_argument(
        "--remember",
        type=positive,
        default=256,
        metavar="N",
        help="answers of commands that stay for each entity, as shards(remember=) has it (default: 256)",
    )
    trim.add_argument(
        "--archive",
        metavar="WHERE",
        help="write old rows there first, as Parquet: a folder, or a URL such as s3://bucket/accounts",
    )
    trim.add_argument(
        "--forget-archive",
        action="store_true",
        help="the archive that the log has had is gone for good; --archive may name a new one",
    )
    trim.add_argument(
        "--timeout",
        type=seconds,
        default=600.0,
        metavar="SECONDS",
        help="wait at most so long for a process that has the log open (default: 600)",
    )
    trim.set_defaults(function=_trim)
    export = command(
        "export", _export, "write rows to a file for other programs, also while a process has the journal open"
    )
    export.add_argument(
        "target", metavar="FILE", help="the file to make: .parquet, .csv or .arrow; it must not be there"
    )
    export.add_argument("--format", metavar="FORMAT", help="arrow, csv or parquet, whatever the name of the file")
    export.add_argument("--partition", type=whole(0), metavar="N", help="only this partition (default: all)")
    export.add_argument("--start", type=whole(0), default=0, metavar="OFFSET", help="begin at this offset")
    export.add_argument("--end", type=whole(0), metavar="OFFSET", help="end before this offset")
    export.add_argument(
        "--archive", metavar="WHERE", help="also the rows that `trim --archive` has moved there: a folder or a URL"
    )
    export.add_argument("--events", action="store_true", help="only the events of durable actors, as Spark sees them")
    waits(export)


def run(args: argparse.Namespace) -> int:
    """Run the chosen subcommand."""
    try:
        import levada.actors.journal as _  # noqa: F401 - its error names the missing package
    except ModuleNotFoundError as missing:
        raise ConfigurationError(str(missing)) from missing
    try:
        code: int = args.function(args)
    except BrokenPipeError:
        raise
    except OSError as error:  # a folder of another user, a directory in place of a file
        raise ConfigurationError(str(error)) from error
    return code


def _directory(args: argparse.Namespace) -> Path:
    from levada.actors.journal.inspection import journal_path

    directory = journal_path(args.directory)
    if not directory.is_dir():
        raise ConfigurationError(
            f"{args.directory} is not a directory: name the folder of a journal, or a folder of journals"
        )
    return directory


def _journals(args: argparse.Namespace) -> list[Path]:
    from levada.actors.journal.inspection import journals_in

    found = journals_in(_directory(args))
    if not found:
        raise ConfigurationError(
            f"there is no journal in {args.directory}: name a folder that has a ledger.sqlite, or the folder above it"
        )
    return found


def _journal(args: argparse.Namespace) -> Path:
    found = _journals(args)
    if len(found) > 1:
        names = ", ".join(path.name for path in found[:5])
        raise ConfigurationError(f"{args.directory} has {len(found)} journals, name one of them: {names}")
    return found[0]


def _ls(args: argparse.Namespace) -> int:
    from levada.actors.journal.inspection import inspect

    wrong = False
    for path in _journals(args):
        with inspect(path) as found:
            wrong = wrong or _is_wrong(found.findings)
            entities, others = found.entities(args.entities, args.limit) if args.entities is not None else (None, 0)
            if args.json:
                print(json.dumps(_summary(found, entities, others)))
            else:
                _print_summary(found, entities, others)
    return 1 if wrong else 0


def _summary(found: Inspection, entities: dict[str, int] | None, others: int) -> dict[str, Any]:
    from levada.actors.journal.places import shown

    return {
        "directory": str(found.directory),
        "epoch": found.epoch,
        "openings": found.openings,
        "columns": {field.name: str(field.type) for field in found.schema},
        "partitions": [
            {
                "partition": each.number,
                "first": each.first if each.segments else 0,
                "end": each.end,
                "rows": found.rows(each.number),
                "segments": len(each.segments),
                "bytes": each.size,
                "noted_end": None if found.promise is None else found.promise.end[each.number],
            }
            for each in found.partitions
        ],
        "groups": {name: {str(number): at for number, at in offsets.items()} for name, offsets in found.groups.items()},
        "archives": {
            str(number): {"place": shown(each.place), "end": each.end} for number, each in found.ledger.archives.items()
        },
        "staged": found.staged,
        "findings": [_finding(each) for each in found.findings],
        **({} if entities is None else {"entities": entities, "rows_of_others": others}),
    }


def _print_summary(found: Inspection, entities: dict[str, int] | None, others: int) -> None:
    from levada.actors.journal.log_events import is_log
    from levada.actors.journal.places import shown

    print(f"{printable(str(found.directory))}: journal {found.epoch}, opened {counted(found.openings, 'time')}")
    print(f"  columns   {printable(', '.join(f'{field.name}: {field.type}' for field in found.schema))}")
    for each in found.partitions:
        first = each.first if each.segments else 0
        print(
            f"  partition {each.number}: offsets {first:,} to {each.end:,}, {found.rows(each.number):,} rows, {len(each.segments)} segments, "
            f"{each.size:,} bytes"
        )
    for name, offsets in sorted(found.groups.items()):
        behind = sum(max(0, each.end - offsets.get(each.number, 0)) for each in found.partitions)
        places = ", ".join(f"{number}: {at:,}" for number, at in sorted(offsets.items()))
        print(f"  group     {printable(name)}: {behind:,} rows behind, at {places}")
    archives: dict[str, list[str]] = {}
    for number, archived in sorted(found.ledger.archives.items()):
        archives.setdefault(archived.place, []).append(f"{number}: {archived.end:,}")
    for place, ends in archives.items():
        print(f"  archive   {printable(shown(place))}: rows before {', '.join(ends)}")
    if found.staged:
        print(f"  staged    {found.staged} parts of batches that were not delivered")
    # In the log of a durable class these are the shards' own: reminders, owners, promised commands.
    nameless = "(none: rows of levada itself)" if is_log(found.schema) else "(none)"
    for name, rows in sorted((entities or {}).items(), key=lambda each: (-each[1], each[0])):
        print(f"  entity    {printable(name) or nameless}: {rows:,} rows")
    if others:
        print(f"  entities  not listed: {others:,} rows (--limit)")
    _print_findings(found.findings)


def _print_findings(findings: list[Finding]) -> None:
    for each in findings:
        print(f"  {each.kind:<9} {printable(f'{each.path}: {each.text}')}")


def _finding(found: Finding) -> dict[str, Any]:
    return {"kind": found.kind, "path": found.path, "text": found.text, "rows": found.rows}


def _is_wrong(findings: list[Finding]) -> bool:
    return any(each.kind != "note" for each in findings)


def _show(args: argparse.Namespace) -> int:
    from levada.actors.journal.inspection import inspect

    with inspect(_journal(args)) as found:
        if args.partition is not None and not 0 <= args.partition < len(found.partitions):
            raise ConfigurationError(f"the partition is {args.partition}, wanted 0 to {len(found.partitions) - 1}")
        left = args.limit
        for row in _rows(found, args):
            if left is not None:
                if left <= 0:
                    break
                left -= 1
            print(json.dumps(finite(row), default=_plain))
        for each in found.findings:
            if each.kind == "damage":
                print(f"levada: {printable(f'{each.path}: {each.text}')}", file=sys.stderr)
        return 1 if any(each.kind == "damage" for each in found.findings) else 0


def _rows(found: Inspection, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    numbers = range(len(found.partitions)) if args.partition is None else [args.partition]
    if args.entity is not None:
        for number, _, batch in found.rows_of(args.column, args.entity):
            if number in numbers:
                for row in batch.to_pylist():
                    if row["offset"] >= (args.start or 0):
                        yield {"partition": number, **row}
        return
    for number in numbers:
        for first, batch in found.batches(number, args.start):
            for place, row in enumerate(batch.to_pylist()):
                yield {"partition": number, "offset": first + place, **row}


def _plain(value: object) -> Any:
    """Return a value that JSON can write: bytes as text, or in base64 if they are not UTF-8; times in ISO 8601; durations in seconds."""
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return "base64:" + base64.b64encode(value).decode()
    if isinstance(value, datetime | date | time_of_day):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, Decimal):
        return str(value)
    return repr(value)


def _verify(args: argparse.Namespace) -> int:
    from levada.actors.journal.errors import JournalDamaged
    from levada.actors.journal.inspection import Finding, inspect

    wrong = False
    for path in _journals(args):
        try:
            with inspect(path, blocks=True) as found:
                findings, partitions = found.findings, len(found.partitions)
                rows = sum(map(found.rows, range(partitions)))
        except JournalDamaged as error:  # of the ledger
            findings, partitions, rows = [Finding("damage", error.detail, error.path)], 0, 0
        wrong = wrong or _is_wrong(findings)
        if args.json:
            for each in findings:
                print(json.dumps(_finding(each)))
            continue
        state = "damaged" if any(each.kind == "damage" for each in findings) else "whole"
        print(f"{printable(str(path))}: {state}, {rows:,} rows in {partitions} partitions")
        _print_findings(findings)
    return 1 if wrong else 0


def _repair(args: argparse.Namespace) -> int:
    from levada.actors.journal import JournalConfig, Store
    from levada.actors.journal.inspection import inspect

    path = _journal(args)
    with inspect(path) as found:
        findings, partitions = found.findings, len(found.partitions)
    if not findings:
        print(
            f"{printable(str(path))}: nothing to repair (restore older segments from a copy if verify finds damage in them)"
        )
        return 0
    lost = sum(each.rows for each in findings)
    _print_findings(findings)
    damaged = any(each.kind == "damage" for each in findings)
    if not args.yes:
        print(f"{printable(str(path))}: a repair would lose {lost:,} acknowledged rows.")
        if damaged:
            print("It is better to restore the files from a backup.")
        print(f"Nothing was changed. To repair: levada journal repair --yes {shlex.quote(printable(str(path)))}")
        return 1
    with Store.open(path, config=JournalConfig(partitions=partitions, accept_loss=True)) as store:
        statistics = store.statistics()
    print(
        f"{printable(str(path))}: repaired; {statistics.bytes_cut:,} bytes cut off, {statistics.rows_lost:,} rows lost"
        + (", damaged files are kept as NAME.damaged" if damaged else "")
    )
    return 0


def _backup(args: argparse.Namespace) -> int:
    from levada.actors.journal import backup

    progress = _Progress("bytes")
    return _copied(
        lambda: backup(_directory(args), args.target, verify=args.verify, timeout=args.timeout, progress=progress)
    )


def _restore(args: argparse.Namespace) -> int:
    from levada.actors.journal import restore

    progress = _Progress("bytes")
    return _copied(lambda: restore(_directory(args), args.target, verify=args.verify, progress=progress))


def _copied(copy: Callable[[], list[Copied]]) -> int:
    def run() -> None:
        for each in copy():
            print(
                f"{printable(str(each.directory))}: journal {each.epoch}, opening {each.opening or 'unknown'}, {each.rows:,} rows in "
                f"{len(each.end)} partitions, {each.size:,} bytes"
            )

    return _unless_damaged(run)


def _copy(args: argparse.Namespace) -> int:
    import trio

    from levada.actors.durable import copy_log
    from levada.framework import ActorSystem

    async def copy() -> None:
        async with ActorSystem("copy") as system:
            found = await copy_log(
                system,
                args.source,
                args.target,
                verify=args.verify,
                timeout=args.timeout,
                progress=_Progress("rows"),
            )
        how = f"{found.rows:,} rows copied" if found.rows else "it has all rows already"
        print(
            f"{printable(found.target)}: journal {found.epoch}, a copy of {found.source}, {how}, {len(found.end)} partitions"
        )

    return _unless_damaged(lambda: trio.run(copy))


def _trim(args: argparse.Namespace) -> int:
    import trio

    from levada.actors.durable import trim_log
    from levada.framework import ActorSystem

    async def trim() -> None:
        async with ActorSystem("trim") as system:
            rows = await trim_log(
                system,
                args.source,
                keep=args.keep * 86_400,
                remember=args.remember,
                archive=args.archive,
                forget_archive=args.forget_archive,
                timeout=args.timeout,
            )
        print(f"{rows:,} rows were trimmed")

    return _unless_damaged(lambda: trio.run(trim))


def _export(args: argparse.Namespace) -> int:
    from levada.actors.journal import export

    if args.target == "-":
        raise ConfigurationError(
            "rows are written to a file, not to standard output: name one; `levada journal show` prints rows"
        )

    def run() -> None:
        found = export(
            _journal(args),
            args.target,
            format=args.format,
            partition=args.partition,
            start=args.start,
            end=args.end,
            events=args.events,
            archive=args.archive,
            timeout=args.timeout,
            progress=_Progress("rows"),
        )
        print(f"{printable(str(found.path))}: {found.rows:,} rows, {found.size:,} bytes")

    return _unless_damaged(run)


def _unless_damaged(run: Callable[[], object]) -> int:
    from levada.actors.journal.errors import JournalDamaged

    try:
        run()
    except JournalDamaged as error:
        print(f"levada: {printable(str(error))}", file=sys.stderr)
        return 1
    return 0


class _Progress:
    """Prints how far a long copy is."""

    def __init__(self, unit: str) -> None:
        self._unit = unit
        self._next = time.monotonic() + _PROGRESS_EVERY

    def __call__(self, done: int, whole: int) -> None:
        if time.monotonic() >= self._next:
            self._next += _PROGRESS_EVERY
            print(f"levada: {done:,} of {whole:,} {self._unit}", file=sys.stderr, flush=True)
