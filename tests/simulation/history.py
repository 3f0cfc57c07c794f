"""Histories of a journal on a simulated disk: what is done in each life of the process, and how that ends.

A history is drawn from a seed, or loaded from a file. Both hold the same: operations with their rows, and faults at calls. A seed aims a fault at
the call of some number; when it hits, the name of the call is noted, and `named` has it by that name. So a failure that was saved, and
shrunk, still means the same when the code makes other calls.
"""

from __future__ import annotations

import errno
import json
import random
from random import Random
from typing import Any, Literal

import attrs

from levada.framework.testing.simulation import Call, Fault

__all__ = ["History", "Life", "draw"]

Operation = list[Any]
"""The name of an operation, then its arguments, as `runner.Run` has them."""


@attrs.frozen(kw_only=True)
class Life:
    """The life of one process: it opens the journal, and does operations."""

    operations: list[Operation] = attrs.field(factory=list)
    faults: list[tuple[Call, Fault]] = attrs.field(factory=list)
    aims: list[tuple[str, int, Fault]] = attrs.field(factory=list)
    """Faults one after the other: each at the changing call of a kind, or of any with "", that comes as so manieth behind the one before."""
    end: Literal["close", "kill", "power"] = "close"
    """What happens behind the last operation, or with "power" also behind a crash."""
    seed: int = 0
    """Of the power failure."""
    share: float = 0.0
    """Of unsynced changes that survive the power failure."""
    rot: list[Any] = attrs.field(factory=list)
    """What a bit that turned before this life is in: a file, a byte, and the bit. Or, to be named, two shares and the bit.

    It turns if the life before was closed in order. From then on the journal may refuse whatever it likes, and must not be wrong."""
    columns: int = 0
    """Columns that the journal has got from this life on, more than at first."""
    full: int = -1
    """The number of the operation before which the disk is full until the next one; -1: none."""


@attrs.frozen(kw_only=True)
class History:
    """What happens to one journal."""

    lives: list[Life]
    model: Literal["ordered", "lax"] = "ordered"
    sector: int = 512
    config: dict[str, Any] = attrs.field(factory=dict)
    """Arguments of `JournalConfig`; `keyed` says whether it is keyed, and `remember` how many rows' commands are known."""

    def to_json(self) -> str:
        """Return it as text, with a line for each life."""
        head = {"model": self.model, "sector": self.sector, "config": self.config}
        lives = ",\n  ".join(json.dumps(_compact(life)) for life in self.lives)
        return f'{{"history": {json.dumps(head)},\n "lives": [\n  {lives}\n ]}}\n'

    @classmethod
    def of_json(cls, text: str) -> History:
        """Undo `to_json`."""
        found = json.loads(text)
        lives = []
        for life in found["lives"]:
            faults = [(Call(*call), Fault(**fault)) for call, fault in life.pop("faults", [])]
            lives.append(Life(faults=faults, **life))
        return cls(lives=lives, **found["history"])


def _compact(life: Life) -> dict[str, Any]:
    found = attrs.asdict(life, filter=lambda field, value: value != _DEFAULTS[field.name], recurse=False)
    found.pop("aims", None)
    if life.faults:
        found["faults"] = [(attrs.astuple(call), _fault(fault)) for call, fault in life.faults]
    return found


def _fault(fault: Fault) -> dict[str, Any]:
    return attrs.asdict(fault, filter=lambda field, value: value != field.default)


_DEFAULTS = attrs.asdict(Life(), recurse=False)

CRASHES = [Fault(crash=True), Fault(crash=True, done=1.0), Fault(crash=True, done=0.5)]
ERRORS = [
    Fault(errno.EIO),
    Fault(errno.EIO, done=0.5),
    Fault(errno.EIO, done=1.0),
    Fault(errno.ENOSPC),
    Fault(errno.ENOSPC, done=0.5),
]


def draw(seed: int) -> History:
    """Draw a history. Its workload, its commands, its faults and its disk are drawn apart, so that one may change alone."""
    work, commands, faults, disk = (random.Random(f"{seed} {part}") for part in ("work", "commands", "faults", "disk"))
    partitions = work.choice([1, 2, 2, 3])
    config: dict[str, Any] = {
        "partitions": partitions,
        "segment_bytes": work.choice([2048, 2048, 4096]),
        "block_rows": work.choice([8, 20, 1000]),
        "block_bytes": 1024,
        "max_bytes": 1 << 20,
        "retain_bytes": work.choice([None, None, 1, 4000]),
        "sync": work.choice(["group", "group", "group", "never"]),
        "keyed": work.random() < 0.5,
        "remember": commands.choice([30, 100, 1_000_000]),
    }
    if work.random() < 0.2:
        config["retain_time"] = 50.0
    if work.random() < 0.2:
        config["segment_time"] = 20.0
    merges = work.random() < 0.06
    if merges:
        config["segment_bytes"] = 27_000  # which 70 small blocks nearly fill
    drawer = _Drawer(work, config, partitions)
    lives = []
    for number in range(work.randint(2, 4)):
        operations = [drawer.operation() for _ in range(work.randint(1, 9))]
        if merges and not number:
            operations.append(["many", 0, drawer.first(100), 70])
        for _ in range(commands.randint(0, 3) if config["keyed"] else 0):
            operations.insert(commands.randint(0, len(operations)), drawer.keyed_operation(commands))
        columns = int(number > 0 and commands.random() < 0.1)
        lives.append(_with_faults(faults, Life(operations=operations, columns=columns)))
    if faults.random() < 0.12:
        lives[-1] = attrs.evolve(lives[-1], aims=[], end="close", full=-1)
        rot = [round(faults.random(), 4), round(faults.random(), 4), faults.randrange(8)]
        lives.append(Life(operations=[drawer.operation() for _ in range(3)], rot=rot))
    return History(
        lives=lives, model=disk.choice(["ordered", "lax"]), sector=disk.choice([64, 512, 512, 4096]), config=config
    )


def _with_faults(draw: random.Random, life: Life) -> Life:
    end: Literal["close", "kill", "power"] = draw.choice(["close", "kill", "power", "power"])
    share = draw.choice([0.0, 0.1, 0.5, 0.5, 0.9, 1.0])
    calls = draw.choice([12, 40, 20 + 8 * len(life.operations)])
    aims: list[tuple[str, int, Fault]] = []
    kind = draw.random()
    if kind < 0.45:
        aims.append(("", draw.randint(1, calls), draw.choice(CRASHES)))
    elif kind < 0.55:
        aims.append(
            (draw.choice(["unlink", "rename", "fsync", "commit", "link"]), draw.randint(1, 8), draw.choice(CRASHES))
        )
    elif kind < 0.7:  # a crash while something is taken back
        aims.append((draw.choice(["", "create", "write", "fdatasync"]), draw.randint(1, calls), draw.choice(ERRORS)))
        aims.append((draw.choice(["", "unlink", "fsync"]), draw.randint(1, 2), draw.choice(CRASHES)))
    elif kind < 0.8:
        aims += [("", draw.randint(1, calls), draw.choice(ERRORS)) for _ in range(draw.randint(1, 3))]
    elif kind < 0.85:
        aims += [("", draw.randint(1, 6), Fault(done=0.5)) for _ in range(calls // 3)]
    elif kind < 0.89:
        error = draw.choice([Fault(errno.EIO), Fault(errno.EMFILE)])
        aims.append((draw.choice(["open", "read", "map", "names", "stat", "database"]), draw.randint(1, 40), error))
    full = draw.randrange(len(life.operations)) if draw.random() < 0.08 else -1
    return attrs.evolve(life, aims=aims, end=end, seed=draw.randrange(1 << 32), share=share, full=full)


@attrs.define
class _Drawer:
    """Draws operations, with rows that have numbers of their own."""

    random: random.Random
    config: dict[str, Any]
    partitions: int
    rows: int = 0
    batches: list[Operation] = attrs.field(factory=list)

    def first(self, count: int) -> int:
        self.rows += count
        return self.rows - count

    def parts(self, most: int) -> list[list[int]]:
        found = []
        for _ in range(self.random.randint(1, most)):
            count = self.random.choice([1, 1, 3, 10, 30, 60, 75])
            found.append([self.random.randrange(self.partitions), self.first(count), count])
        return found

    def operation(self) -> Operation:
        names = (
            ["append"] * 5
            + ["group"] * 3
            + ["deliver"] * 2
            + ["again", "stage", "stage", "declare", "commit", "commit"]
        )
        names += ["forget", "retain", "wait", "sync_ends", "look", "reopen"] + ["erase"] * 3 * self.config["keyed"]
        name = self.random.choice(names)
        match name:
            case "append" | "group":
                return [name, self.parts(3)]
            case "deliver":
                self.batches.append(["deliver", len(self.batches), self.parts(3)])
                return self.batches[-1]
            case "again":
                return self.random.choice(self.batches) if self.batches else ["retain"]
            case "stage":
                parts = [[part, *rest] for part, (_, *rest) in enumerate(self.parts(3))]
                batch = len(self.batches)
                self.batches.append(["hand_in", batch, parts, 0])
                return ["stage", batch, parts, 0] if self.random.random() < 0.3 else ["hand_in", batch, parts, 0]
            case "declare":
                return [name, self.random.choice("gh"), self.random.choice(["first", "end"])]
            case "commit":
                shares = {
                    str(p): round(self.random.random(), 2) for p in range(self.partitions) if self.random.random() < 0.8
                }
                return [
                    name,
                    self.random.choice("gh"),
                    shares if self.random.random() < 0.6 else dict.fromkeys(shares, 1.0),
                ]
            case "forget":
                return [name, self.random.choice("gh")]
            case "wait":
                return [name, self.random.choice([0.3, 2.0, 30.0, 100.0])]
            case "erase":
                return [name, self.random.randrange(self.partitions), f"e{self.random.randrange(3)}"]
            case _:
                return [name]

    def keyed_operation(self, draw: Random) -> Operation:
        number, share = draw.randrange(self.partitions), round(draw.random(), 4)
        match draw.choice(["trim", "prune", "commands", "commands", "repeat", "reuse", "copy"]):
            case "copy":
                counts = draw.choices([0, 1, 10, 60], k=2)
                return (
                    ["copy", number, self.first(sum(counts)), *counts]
                    if any(counts)
                    else ["copy", number, self.first(1), 1, 0]
                )
            case "trim":
                return ["trim", number, f"e{draw.randrange(3)}", share, self.first(10)]
            case "prune":
                return ["prune", number, draw.randrange(1, 5), share, self.first(10)]
            case "commands":
                counts = draw.choices([1, 3, 10, 60], k=draw.randint(1, 3))
                return ["commands", [[draw.randrange(self.partitions), self.first(n), n] for n in counts]]
            case name:
                return [name, share]
