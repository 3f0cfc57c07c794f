"""Snapshots, old events, and events that cannot be applied."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from traceback import walk_tb
from typing import Any

import attrs
import pytest
import trio

pytest.importorskip("pyarrow")

import pyarrow as pa

from levada.actors.durable import Durable, ReplayFailed, applies, replay, rows, shards, snapshots, upcasts
from levada.actors.durable.rows import log_config
from levada.actors.journal import SchemaMismatch, Store
from levada.framework import ActorSystem, Asks, handles, message
from levada.framework.errors import ConfigurationError
from levada.framework.message import BY_TAG

TIMES: dict[str, Any] = {"ask_timeout": 60.0, "shutdown_timeout": 20.0}


@message("test.durable.add")
class Add(Asks[list[int]]):
    number: int


def added(version: int = 1, **fields: Any) -> Any:
    """Define the event once more, as a later program would."""
    BY_TAG.pop("test.durable.added", None)
    body: dict[str, Any] = {
        "__annotations__": {"number": "int"},
        "__module__": __name__,
        "__qualname__": f"Added{version}",
    }
    for name, (kind, default) in fields.items():
        body["__annotations__"][name] = kind
        if default is not ...:
            body[name] = default
    body["event_version"] = version
    body["__annotations__"]["event_version"] = "ClassVar[int]"
    return message("test.durable.added")(type(f"Added{version}", (), body))


Added = added()


def adder(event: Any = Added, **members: Any) -> Any:
    """Define the durable class, as a later program would."""

    def add(self: Any, m: Add) -> list[int]:
        if m.number >= 0:
            self.record(event(m.number))
        return list(self.numbers)

    def apply(self: Any, e: Any) -> None:
        CALLS.append(e)
        if e.number == 13:
            raise ValueError("13 is bad luck")
        self.numbers.append(e.number)

    from attrs import field

    body = {
        "__annotations__": {"numbers": "list[int]"},
        "__module__": __name__,
        "numbers": field(factory=list),
        "add": handles(Add)(add),
        **members,
    }
    apply.__annotations__["e"] = event
    body.setdefault("apply", applies(apply))
    return type("Adder", (Durable,), body)


CALLS: list[Any] = []


async def run(folder: Path, cls: Any, events: Any, *numbers: int, ids: bool = False, **settings: Any) -> list[int]:
    """Add numbers in one life of the system; return the state."""
    CALLS.clear()
    async with ActorSystem("test", **TIMES) as system:
        found = await shards(system, cls, events=events, journal=folder, shards=1, **settings)
        state: list[int] = await found["a"].ask(Add(-1))
        for number in numbers:
            state = await found["a"].ask(Add(number), command=f"add-{number}" if ids else None)
    return state


def kinds(folder: Path) -> list[tuple[str, int | None]]:
    with Store.open(folder, None, log_config(1)) as store:
        rows = [row for _, batch in store.batches(0, 0) for row in batch.to_pylist()]
    return [(row["kind"], row["_snapshot"]) for row in rows if row["entity"] == "a"]


async def test_reading_begins_at_the_newest_snapshot(tmp_path: Path) -> None:
    cls = adder()
    assert await run(tmp_path, cls, Added, *range(5), snapshot_every=2) == [0, 1, 2, 3, 4]
    names = [name for name, _ in kinds(tmp_path)]
    assert names == [
        *["test.durable.added"] * 2,
        "$snapshot",
        *["test.durable.added"] * 2,
        "$snapshot",
        "test.durable.added",
    ]
    offsets = [snapshot for _, snapshot in kinds(tmp_path)]
    assert offsets[:2] == [None] * 2
    assert offsets[2] == offsets[3] == offsets[4] != offsets[5] == offsets[6]
    assert await run(tmp_path, cls, Added) == [0, 1, 2, 3, 4]
    assert [event.number for event in CALLS] == [4]


@pytest.mark.parametrize(
    ("rows", "newest", "applied"), [(7, 5, [4]), (6, 2, [2, 3]), (5, 2, [2, 3]), (3, None, [0, 1])]
)
async def test_a_log_whose_snapshots_name_the_one_before_is_read(
    tmp_path: Path, rows: int, newest: int | None, applied: list[int]
) -> None:
    """Version 0.2.0 wrote such logs."""
    cls = adder()
    await run(tmp_path / "new", cls, Added, *range(5), snapshot_every=2)
    with Store.open(tmp_path / "new", None, log_config(1)) as new:
        schema = new.schema
        found = [row for _, batch in new.batches(0, 0) for row in batch.to_pylist() if row["entity"] == "a"][:rows]
    for row, snapshot in zip(found, [None, None, None, 2, 2, 2, 5], strict=False):
        row["_snapshot"] = snapshot
    assert found[-1]["_snapshot"] == newest
    with Store.open(tmp_path / "old", schema, log_config(1)) as old:
        old.append([(0, pa.RecordBatch.from_pylist(found, schema))])
    assert await run(tmp_path / "old", cls, Added) == list(range(applied[-1] + 1))
    assert [event.number for event in CALLS] == applied


async def test_command_ids_are_part_of_a_snapshot(tmp_path: Path) -> None:
    cls = adder()
    assert await run(tmp_path, cls, Added, *range(6), ids=True, snapshot_every=2) == [0, 1, 2, 3, 4, 5]
    assert await run(tmp_path, cls, Added, 0, 5, ids=True) == [0, 1, 2, 3, 4, 5]  # both are answered from the log
    assert await run(tmp_path, cls, Added) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("change", ["field", "type", "version"])
async def test_a_snapshot_that_does_not_fit_is_ignored(
    tmp_path: Path, change: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert await run(tmp_path, adder(), Added, *range(5), snapshot_every=2) == [0, 1, 2, 3, 4]
    members: dict[str, Any] = {
        "snapshot_version": 2,
        "__annotations__": {"numbers": "list[int]", "snapshot_version": "ClassVar[int]"},
    }
    if change == "field":
        members = {"total": 0, "__annotations__": {"numbers": "list[int]", "total": "int"}}
    elif change == "type":
        members = {"__annotations__": {"numbers": "list[float]"}}
    caplog.set_level(logging.WARNING, "levada.actors.durable")
    assert await run(tmp_path, adder(**members), Added, 7) == [0, 1, 2, 3, 4, 7]
    assert [event.number for event in CALLS] == [0, 1, 2, 3, 4, 7]
    assert "Adder 'a': its snapshot does not fit the class" in caplog.text


async def test_a_snapshot_of_version_0_2_which_names_no_types_is_taken(tmp_path: Path) -> None:
    cls = adder()
    assert await run(tmp_path / "new", cls, Added, *range(4), ids=True, snapshot_every=4) == [0, 1, 2, 3]
    with Store.open(tmp_path / "new", None, log_config(1)) as store:
        schema = store.schema
        found = [row for _, batch in store.batches(0, 0) for row in batch.to_pylist()]
    [snapshot] = [row for row in found if row["kind"] == "$snapshot"]
    state = rows.WHOLE.decode(snapshot["_data"])
    assert state.pop("types") == {"numbers": "list[int]"}
    snapshot["_data"] = rows.WHOLE.encode(state)
    with Store.open(tmp_path / "old", schema, log_config(1)) as store:
        store.append([(0, pa.RecordBatch.from_pylist(found, schema))])
    assert await run(tmp_path / "old", cls, Added) == [0, 1, 2, 3]
    assert CALLS == []


async def test_a_snapshot_whose_values_the_class_refuses_is_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The events may lead to a state that fits; if not, the event is named and other entities go on."""
    caplog.set_level(logging.WARNING, "levada.actors.durable")
    assert await run(tmp_path, adder(), Added, *range(4), snapshot_every=2) == [0, 1, 2, 3]

    def short(self: Any, attribute: Any, value: list[int]) -> None:
        if len(value) > 3:
            raise LookupError(f"{len(value)} numbers")

    def last(self: Any, e: Any) -> None:
        CALLS.append(e)
        self.numbers = [*self.numbers[-keep:], e.number]

    last.__annotations__["e"] = Added
    numbers = attrs.field(factory=list, validator=short)
    keep = 2
    assert await run(tmp_path, adder(numbers=numbers, apply=applies(last)), Added) == [1, 2, 3]
    assert [event.number for event in CALLS] == [0, 1, 2, 3]
    assert caplog.messages == ["Adder 'a': its snapshot does not fit the class, so it is replayed from its first event"]
    keep = 3
    async with ActorSystem("test", **TIMES) as system:
        cls = adder(numbers=attrs.field(factory=list, validator=short), apply=applies(last))
        found = await shards(system, cls, events=Added, journal=tmp_path, shards=1)
        assert await found["b"].ask(Add(7)) == [7]
        with pytest.raises(ReplayFailed, match=r"Adder 'a' .*: event 4, .*: LookupError\('4 numbers'\)"):
            await found["a"].ask(Add(-1))
        assert await found["b"].ask(Add(8)) == [7, 8]
        assert (await found.statistics()).replayed == 1  # the shard has not started again


async def test_an_object_that_cannot_be_made_fails_its_commands_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR, "levada")
    errors: list[Exception] = []

    def cache() -> dict[str, int]:
        if errors:
            raise errors.pop()
        return {}

    members = {
        "__annotations__": {"numbers": "list[int]", "cache": "dict[str, int]"},
        "cache": attrs.field(init=False, factory=cache),
    }
    async with ActorSystem("test", **TIMES) as system:
        found = await shards(system, adder(**members), events=Added, journal=tmp_path, shards=1)
        assert await found["b"].ask(Add(7)) == [7]
        cause = OSError("no connection")
        errors.append(cause)
        with pytest.raises(ReplayFailed, match=r"Adder 'a' cannot be loaded: OSError\('no connection'\)") as caught:
            await found["a"].ask(Add(1))
        assert caught.value.__cause__ is cause
        assert (caught.value.entity, caught.value.type, caught.value.sequence) == ("a", "Adder", 0)
        assert await found["a"].ask(Add(1)) == [1]
        assert await found["b"].ask(Add(8)) == [7, 8]
        assert (await found.statistics()).replayed == 2
    assert caplog.messages == ["Adder 'a' cannot be loaded: OSError('no connection')"]


async def test_a_state_without_a_field_costs_its_snapshot(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "levada")

    def drop(self: Any, e: Any) -> None:
        self.numbers.append(e.number)
        self.__dict__.pop("last", None)

    drop.__annotations__["e"] = Added
    members = {"__annotations__": {"numbers": "list[int]", "last": "int"}, "last": attrs.field(default=0)}
    cls = adder(apply=applies(drop), **members)
    assert await run(tmp_path, cls, Added, *range(3), snapshot_every=2) == [0, 1, 2]
    assert [name for name, _ in kinds(tmp_path)] == ["test.durable.added"] * 3
    assert caplog.messages == [
        "Adder 'a': no snapshot, its state cannot be kept: 'Adder' object has no attribute 'last'"
    ]


@pytest.mark.parametrize(("bits", "most", "why"), [(70, 1 << 20, "expected an int from"), (0, 2, "bytes, at most 2")])
async def test_without_a_snapshot_commands_go_on(
    tmp_path: Path, bits: int, most: int, why: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A state that cannot be kept as a snapshot is an error in the log, and all events are read again."""
    caplog.set_level(logging.ERROR, "levada.actors.durable")
    monkeypatch.setattr(snapshots, "MOST_BYTES", most)

    def apply(self: Any, e: Any) -> None:
        CALLS.append(e)
        self.numbers.append(e.number << bits)

    apply.__annotations__["e"] = Added
    cls = adder(apply=applies(apply))
    wanted = [number << bits for number in range(5)]
    assert await run(tmp_path, cls, Added, *range(5), snapshot_every=2) == wanted
    assert await run(tmp_path, cls, Added) == wanted
    assert [event.number for event in CALLS] == [0, 1, 2, 3, 4]
    assert len([text for text in caplog.messages if "Adder 'a': no snapshot, its state cannot be kept" in text]) == 2
    assert why in caplog.text
    assert [name for name, _ in kinds(tmp_path)] == ["test.durable.added"] * 5


async def test_new_fields_with_defaults_are_filled(tmp_path: Path) -> None:
    await run(tmp_path, adder(), Added, 1)
    newer = added(note=("str", "none"), weight=("float | None", None))
    assert await run(tmp_path, adder(newer), newer, 2) == [1, 2]
    assert [(event.number, event.note, event.weight) for event in CALLS] == [(1, "none", None), (2, "none", None)]
    again = added(note=("str", "other"), weight=("float | None", None))
    assert await run(tmp_path, adder(again), again) == [1, 2]
    assert [event.note for event in CALLS] == ["other", "none"]


async def test_a_new_field_without_default_names_the_event(tmp_path: Path) -> None:
    await run(tmp_path, adder(), Added, 1)
    newer = added(note=("str", ...))
    with pytest.raises(ReplayFailed, match=r"event 1, 'test.durable.added', at row 1 of shard 0: .*note: has nulls"):
        await run(tmp_path, adder(newer), newer)


async def test_the_event_that_does_not_fit_is_named_among_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Events are made some at a time; those before it are, and the error names its own row."""
    monkeypatch.setattr(replay, "PIECE", 3)
    noted = added(note=("str | None", None))

    def add(self: Any, m: Add) -> list[int]:
        if m.number >= 0:
            self.record(noted(m.number, None if m.number == 4 else "x"))
        return list(self.numbers)

    members = {"add": handles(Add)(add)}
    assert await run(tmp_path, adder(noted, **members), noted, *range(8)) == [*range(8)]
    assert await run(tmp_path, adder(noted, **members), noted) == [*range(8)]
    strict = added(note=("str", ...))
    with pytest.raises(ReplayFailed, match=r"event 5, 'test.durable.added', at row 5 of shard 0: .*note: has nulls"):
        await run(tmp_path, adder(strict), strict)
    assert [event.number for event in CALLS] == [0, 1, 2]


async def test_old_versions_are_upcast(tmp_path: Path) -> None:
    await run(tmp_path, adder(), Added, 1, 2)

    def thousandfold(row: Any) -> Any:
        return {"number": row["number"] * 1000}

    second = added(2)
    with pytest.raises(ReplayFailed, match=r"it has version 1, shards\(\) knows version 2, and no method upcasts it"):
        await run(tmp_path, adder(second), second)
    cls = adder(second, old=upcasts("test.durable.added", version=1)(staticmethod(thousandfold)))
    assert await run(tmp_path, cls, second, 3) == [1000, 2000, 3]
    third = added(3, note=("str", "x"))
    more = {
        "old": upcasts("test.durable.added", version=1)(staticmethod(thousandfold)),
        "less": upcasts("test.durable.added", version=2)(staticmethod(lambda row: third(row["number"] + 1, note="up"))),
    }
    assert await run(tmp_path, adder(third, **more), third, 5) == [1001, 2001, 4, 5]
    assert [event.note for event in CALLS] == ["up", "up", "up", "x"]
    with pytest.raises(ReplayFailed, match=r"it has version 3, shards\(\) knows version 2"):
        await run(tmp_path, cls, second)


@pytest.mark.parametrize(
    ("result", "why"),
    [
        ({"number": 28.99}, "number: 28.99 does not fit int64, it would be 28"),
        ({"number": "29"}, "Could not convert '29'"),
        ({"numbr": 29}, "its upcaster returned numbr, and Added2 has no such field"),
        ({"number": 29, "tags": [[1, 2.5]]}, r"tags: \[\[1, 2.5\]\] does not fit .*, it would be \[\[1, 2\]\]"),
        (5, "'int' object is not iterable"),
        (..., r"Added2.number: expected int64, got float|Added2.number: expected int, got float"),
    ],
)
async def test_a_result_of_an_upcaster_that_does_not_fit_fails_its_entity(
    tmp_path: Path, result: Any, why: str
) -> None:
    await run(tmp_path, adder(), Added, 1)
    second = added(2, tags=("list[list[int]]", attrs.field(factory=list)))
    up = upcasts("test.durable.added", version=1)(staticmethod(lambda row: second(1.5) if result is ... else result))
    with pytest.raises(ReplayFailed, match=rf"Adder 'a' cannot be replayed: event 1, .*{why}") as failed:
        await run(tmp_path, adder(second, up=up), second)
    assert "SchemaMismatch(" not in str(failed.value)
    assert CALLS == []


@message("test.durable.renamed")
class Renamed:
    number: int


@pytest.mark.parametrize("event", [added(3), Renamed])
async def test_what_one_upcaster_returns_for_the_next_needs_no_field_of_the_class(tmp_path: Path, event: Any) -> None:
    """Nor a class: the kind of the old events may have none any more."""
    await run(tmp_path, adder(), Added, 1, 2)

    def last(row: Any) -> Any:
        return event(row["tens"]) if event is Renamed else {"number": row["tens"]}

    cls = adder(
        event,
        first=upcasts("test.durable.added", version=1)(staticmethod(lambda row: {"tens": row["number"] * 10})),
        then=upcasts("test.durable.added", version=2)(staticmethod(last)),
    )
    assert await run(tmp_path, cls, event, 3) == [10, 20, 3]


async def test_what_an_upcaster_leaves_of_a_row_is_ignored_and_nulls_are_defaults(tmp_path: Path) -> None:
    await run(tmp_path, adder(), Added, 1)
    second = added(
        2, weight=("float", 2.0), note=("str", "none"), pairs=("dict[str, float]", attrs.field(factory=dict))
    )
    old = {"weight": math.nan, "note": None, "pairs": {"x": 1.0}}
    up = upcasts("test.durable.added", version=1)(staticmethod(lambda row: {**row, **old}))
    assert await run(tmp_path, adder(second, up=up), second) == [1]
    [event] = CALLS
    assert math.isnan(event.weight)
    assert (event.note, event.pairs) == ("none", {"x": 1.0})


async def test_an_unknown_kind_is_named_and_nothing_is_lost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One entity cannot be read; the others go on, and a program that knows the kind reads it."""
    caplog.set_level(logging.CRITICAL, "levada")

    @message("test.durable.other")
    class Other:
        number: int

    def other(self: Any, e: Any) -> None:
        self.numbers.append(-e.number)

    other.__annotations__["e"] = Other

    def add(self: Any, m: Add) -> list[int]:
        if m.number >= 0:
            self.record(Other(m.number))
        return list(self.numbers)

    both = adder(other=applies(other), add=handles(Add)(add))
    assert await run(tmp_path, both, Added | Other, 4) == [-4]
    async with ActorSystem("test", **TIMES) as system:
        found = await shards(system, adder(), events=Added, journal=tmp_path, shards=1)
        for _ in range(2):
            with pytest.raises(ReplayFailed, match=r"shards\(events=…\) does not name it"):
                await found["a"].ask(Add(1))
        with pytest.raises(ReplayFailed) as caught:
            await found["a"].ask(Add(1))
        error = caught.value
        assert (error.entity, error.type, error.sequence, error.kind, error.offset) == (
            "a",
            "Adder",
            1,
            "test.durable.other",
            1,
        )
        assert await found["b"].ask(Add(1)) == [1]
        assert (await found.statistics()).failed == 1
    assert await run(tmp_path, both, Added | Other) == [-4]


async def test_a_poison_event_is_named_and_a_repaired_class_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "levada")

    def fine(self: Any, e: Any) -> None:
        self.numbers.append(e.number)

    fine.__annotations__["e"] = Added
    assert await run(tmp_path, adder(apply=applies(fine)), Added, 12, 13, 14) == [12, 13, 14]
    with pytest.raises(
        ReplayFailed, match=r"event 2, 'test.durable.added', at row 2 of shard 0: ValueError\('13 is bad luck'\)"
    ) as caught:
        await run(tmp_path, adder(), Added)
    cause = caught.value.__cause__
    assert isinstance(cause, ValueError)
    frames = [frame for frame, _ in walk_tb(cause.__traceback__)]
    assert frames[-1].f_code.co_filename == __file__
    assert not any(frame.f_locals for frame in frames), "rows in memory, for as long as the error is remembered"
    assert await run(tmp_path, adder(apply=applies(fine)), Added) == [12, 13, 14]


async def test_columns_that_changed_their_type_are_refused(tmp_path: Path) -> None:
    await run(tmp_path, adder(), Added, 1)
    BY_TAG.pop("test.durable.added", None)

    @message("test.durable.added")
    class Text:
        number: str

    def apply(self: Any, e: Any) -> None: ...

    apply.__annotations__["e"] = Text
    with pytest.raises(SchemaMismatch, match="number: string, in the journal int64"):
        await run(tmp_path, adder(apply=applies(apply)), Text)


def test_definitions_that_cannot_work_are_refused(tmp_path: Path) -> None:
    def refused(match: str, function: Any) -> None:
        with pytest.raises(ConfigurationError, match=match):
            function()

    async def late(self: Any, e: Any) -> None: ...

    late.__annotations__["e"] = Added
    refused("it must be a plain def", lambda: adder(apply=applies(late)))
    refused("one parameter annotated with its class", lambda: adder(apply=applies(lambda self, e: None)))
    refused("make it a @staticmethod", lambda: adder(up=upcasts("a", version=1)(lambda row: row)))
    refused("a version of 1 or more", lambda: upcasts("a", version=0))
    refused("wanted a method", lambda: applies(5))  # type: ignore[type-var]

    def twice(self: Any, e: Any) -> None: ...

    twice.__annotations__["e"] = Added
    refused("another method of Adder applies", lambda: adder(twice=applies(twice)))

    async def start(cls: Any) -> None:
        async with ActorSystem("test") as system:
            await shards(system, cls, events=Added, journal=tmp_path, shards=1)

    members = {"__annotations__": {"numbers": "list[int]", "lock": "trio.Lock"}, "lock": None}
    with pytest.raises(
        ConfigurationError, match=r"Adder\.lock: a field of a durable actor is state, and this one cannot be kept"
    ):
        trio.run(start, adder(**members))
