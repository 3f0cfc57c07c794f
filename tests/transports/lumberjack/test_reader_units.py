"""Units and acks: what is handed on together, what is acked, when."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import pytest

from levada.framework.errors import LocalProtocolError
from levada.transports.lumberjack import encode_data, encode_envelope, encode_json, encode_window


def frames(version: int, *numbers: int) -> bytes:
    if version == 1:
        return b"".join(encode_data(1, number, {"n": str(number)}) for number in numbers)
    return b"".join(encode_json(2, number, {"n": str(number)}) for number in numbers)


def packed(version: int, *parts: bytes) -> bytes:
    return encode_envelope(version, zlib.compress(b"".join(parts)))


def numbers(reader: Any) -> list[list[int]]:
    """What the units hold."""
    return [[int(event["n"]) for event in unit.events] for unit in reader.units]


@pytest.mark.rule("LJ-14")
@pytest.mark.parametrize("version", [1, 2])
def test_lj14_a_window_may_come_once_or_before_each_batch(version: int, desk: Any) -> None:
    """LJ-14: one rule serves a window for the whole connection and one for each batch."""
    reader = desk()
    reader.feed(encode_window(version, 2) + frames(version, 1, 2, 3, 4, 5, 6))
    assert (numbers(reader), reader.acks) == ([[1, 2], [3, 4], [5, 6]], [2, 4, 6])
    reader = desk()
    for _ in range(2):
        reader.feed(encode_window(version, 3) + frames(version, 1, 2, 3))
    assert (numbers(reader), reader.acks) == ([[1, 2, 3], [1, 2, 3]], [3, 3])


@pytest.mark.rule("LJ-15")
def test_lj15_the_ack_is_the_number_of_the_last_event(desk: Any) -> None:
    """LJ-15: not a count: a writer that numbers on over windows waits for exactly its number."""
    reader = desk()
    reader.feed(encode_window(2, 2) + frames(2, 1, 2) + encode_window(2, 2) + frames(2, 3, 4))
    assert reader.acks == [2, 4]


@pytest.mark.rule("LJ-16")
def test_lj16_a_unit_ends_when_the_window_is_full_a_new_one_comes_or_the_writer_ends(desk: Any) -> None:
    """LJ-16: (a) the window is full, (b) a W comes while events are open, (d) half-close; after (a) no new W is needed."""
    reader = desk()
    reader.feed(encode_window(1, 3) + frames(1, 1, 2, 3, 4))
    assert reader.acks == [3]
    reader.feed(encode_window(1, 2))
    assert reader.acks == [3, 4]
    reader.feed(frames(1, 5))
    reader.end()
    assert (numbers(reader), reader.acks, reader.finished) == ([[1, 2, 3], [4], [5]], [3, 4, 5], "peer_closed")


@pytest.mark.rule("LJ-16")
@pytest.mark.rule("LJ-18")
def test_lj16_lj18_an_idle_ack_leaves_the_window_as_it_is(desk: Any) -> None:
    """LJ-16, LJ-18: after an idle ack the rest of the window is acked when it is there, not an idle second later."""
    reader = desk()
    reader.feed(encode_window(1, 3) + frames(1, 1))
    reader.wait(0.999)
    assert reader.acks == []
    reader.wait(0.001)
    assert reader.acks == [1]
    reader.feed(frames(1, 2, 3))
    assert reader.acks == [1, 3]


@pytest.mark.rule("LJ-18")
def test_lj18_no_idle_ack_inside_a_frame_nor_while_nobody_reads(desk: Any) -> None:
    """LJ-18: the clock runs only while we wait in a read, starts over with octets, and stands inside a frame."""
    reader = desk()
    reader.feed(encode_window(1, 3) + frames(1, 1) + b"1")
    reader.wait(5.0)
    assert reader.acks == []
    reader.feed(frames(1, 2)[1:])
    reader.wait(0.6)
    reader.core.stop_reading(reader.now)
    reader.now += 100.0
    assert reader.core.next_deadline() is None
    reader.core.reading(reader.now)
    reader.wait(0.3)
    assert reader.acks == []
    reader.wait(0.11)
    assert reader.acks == [2]


@pytest.mark.rule("LJ-17")
def test_lj17_one_ack_a_unit_in_order_never_merged(desk: Any) -> None:
    """LJ-17: a unit committed early waits for the ones before it; each is acked once, by its own number."""
    reader = desk(commits=False, max_uncommitted_units=3)
    reader.feed(b"".join(encode_window(2, 2) + frames(2, 1, 2) for _ in range(3)))
    reader.commit(3)
    reader.commit(2)
    assert reader.acks == []
    reader.commit(1)
    assert reader.acks == [2, 2, 2]
    with pytest.raises(LocalProtocolError, match="no unit 1 waits"):
        reader.commit(1)


@pytest.mark.rule("LJ-19")
def test_lj19_partial_acks_only_in_version_2_and_only_of_what_is_committed(desk: Any) -> None:
    """LJ-19: never in version 1; in version 2 by option, of committed events, no number twice."""
    reader = desk(partial_ack_every=2, commits=False)
    reader.feed(encode_window(2, 5) + frames(2, 1, 2, 3, 4, 5))
    assert (numbers(reader), reader.acks) == ([[1, 2], [3, 4]], [])
    reader.commit(1)
    assert reader.acks == [2]
    reader.commit(2)
    reader.commit(3)
    assert (numbers(reader), reader.acks) == ([[1, 2], [3, 4], [5]], [2, 4, 5])
    whole = [unit.whole for unit in reader.units]
    assert whole == [False, False, True]
    reader = desk(partial_ack_every=2)
    reader.feed(encode_window(1, 5) + frames(1, 1, 2, 3, 4, 5))
    assert (numbers(reader), reader.acks) == ([[1, 2, 3, 4, 5]], [5])


@pytest.mark.rule("LJ-19")
def test_lj19_no_number_twice(desk: Any) -> None:
    """LJ-19: neither at the end of a window that a part ends too, nor when a W ends what is acked already."""
    reader = desk(partial_ack_every=2)
    reader.feed(
        encode_window(2, 4) + frames(2, 1, 2, 3, 4) + encode_window(2, 4) + frames(2, 1, 2) + encode_window(2, 1)
    )
    assert reader.acks == [2, 4, 2]
    reader = desk(partial_ack_every=1)
    reader.feed(encode_window(2, 2) + frames(2, 0, 1))
    assert reader.acks == [1]


@pytest.mark.rule("LJ-20")
def test_lj20_keepalives_in_version_2_while_the_sink_works(desk: Any) -> None:
    """LJ-20: ack 0 every 3 s while a unit waits for its commit; never in version 1, never without such a unit."""
    reader = desk(commits=False)
    reader.feed(encode_window(2, 1) + frames(2, 1))
    reader.wait(2.9)
    assert reader.acks == []
    reader.wait(7.0)
    assert reader.acks == [0, 0, 0]
    reader.commit(1)
    reader.wait(30.0)
    assert (reader.acks, reader.core.keepalives) == ([0, 0, 0, 1], 3)
    reader = desk(commits=False)
    reader.feed(encode_window(1, 1) + frames(1, 1))
    reader.wait(59.0)
    assert (reader.acks, reader.finished) == ([], None)


@pytest.mark.rule("LJ-21")
def test_lj21_a_window_of_nothing(desk: Any) -> None:
    """LJ-21: no answer in version 1; ack 0 in version 2, behind earlier acks. It ends an open unit and sets no window."""
    reader = desk()
    reader.feed(encode_window(1, 2) + frames(1, 1) + encode_window(1, 0))
    assert reader.acks == [1]
    reader.feed(frames(1, 2, 3))
    assert reader.acks == [1, 2]
    reader = desk(commits=False)
    reader.feed(encode_window(2, 2) + frames(2, 1) + encode_window(2, 0))
    assert reader.acks == []
    reader.commit(1)
    assert reader.acks == [1, 0]
    reader = desk()
    reader.feed(encode_window(2, 0))
    assert reader.acks == [0]


@pytest.mark.rule("LJ-22")
def test_lj22_events_before_any_window(desk: Any) -> None:
    """LJ-22: an implicit window of 1,024."""
    reader = desk()
    reader.feed(frames(1, *range(1030)))
    assert ([len(unit.events) for unit in reader.units], reader.acks) == ([1024], [1023])
    reader.wait(1.0)
    assert reader.acks == [1023, 1029]


@pytest.mark.rule("LJ-23")
@pytest.mark.parametrize("version", [1, 2])
def test_lj23_a_large_window_is_a_promise(version: int, desk: Any) -> None:
    """LJ-23: units end after `max_window` events, the window goes on; nothing is allocated by W."""
    reader = desk(max_window=4)
    reader.feed(encode_window(version, 2**32 - 1))
    assert reader.core.held == 0
    reader.feed(frames(version, *range(1, 10)))
    assert (numbers(reader), reader.acks) == ([[1, 2, 3, 4], [5, 6, 7, 8]], [4, 8])
    reader = desk(max_window=4)
    reader.feed(encode_window(version, 6) + frames(version, *range(1, 7)))
    assert reader.acks == [4, 6]


@pytest.mark.rule("LJ-23")
def test_lj23_in_an_envelope_of_version_1_slices_are_not_acked(desk: Any) -> None:
    """LJ-23: no partial ack in version 1, so there a slice; in version 2 a unit."""
    reader = desk(max_window=4)
    reader.feed(encode_window(1, 6) + packed(1, frames(1, *range(1, 7))))
    assert (numbers(reader), reader.acks) == ([[1, 2, 3, 4], [5, 6]], [6])
    reader = desk(max_window=4)
    reader.feed(encode_window(2, 6) + packed(2, frames(2, *range(1, 7))))
    assert (numbers(reader), reader.acks) == ([[1, 2, 3, 4], [5, 6]], [4, 6])


@pytest.mark.rule("LJ-24")
def test_lj24_a_window_in_an_envelope_counts(desk: Any) -> None:
    """LJ-24: W inside an envelope is W."""
    reader = desk()
    reader.feed(packed(2, encode_window(2, 2), frames(2, 1, 2), encode_window(2, 1), frames(2, 1)))
    assert (numbers(reader), reader.acks) == ([[1, 2], [1]], [2, 1])


@pytest.mark.rule("LJ-25")
def test_lj25_nothing_is_acked_before_its_commit_and_two_units_stop_the_reading(desk: Any) -> None:
    """LJ-25: commit before ack; units in order; two that wait stop the reading."""
    reader = desk(commits=False)
    reader.feed(encode_window(2, 1) + frames(2, 1))
    assert reader.core.wants_data
    reader.feed(frames(2, 2, 3, 4))
    assert (numbers(reader), reader.acks, reader.core.wants_data) == ([[1], [2]], [], False)
    reader.commit(1)
    assert (numbers(reader), reader.acks, reader.core.wants_data) == ([[1], [2], [3]], [1], False)
    reader.commit(2)
    reader.commit(3)
    assert (numbers(reader), reader.acks, reader.core.wants_data) == ([[1], [2], [3], [4]], [1, 2, 3], True)
    reader.commit(4)
    assert (reader.acks, reader.core.held) == ([1, 2, 3, 4], 0)


@pytest.mark.rule("LJ-25")
def test_lj25_a_failed_sink_ends_the_connection_without_ack(desk: Any) -> None:
    """LJ-25: failure of the sink closes without ack."""
    reader = desk(commits=False)
    reader.feed(encode_window(2, 1) + frames(2, 1, 2))
    reader.core.sink_failed()
    reader.take(reader.core.take_events())
    assert (reader.sent, reader.finished, reader.others[-1].unacked) == (b"", "sink_failed", 2)
    reader.commit(2)
    assert (reader.sent, reader.core.late_commits) == (b"", 1)


@pytest.mark.rule("LJ-28")
def test_lj28_a_closed_connection_ends_without_ack(desk: Any) -> None:
    """LJ-28: what is at the sink, or on its way there, comes again; octets that still come are ignored."""
    reader = desk(commits=False)
    reader.feed(encode_window(2, 1) + frames(2, 1, 2, 3, 4))
    reader.take(reader.core.close(0, "", 0.0))
    assert (reader.sent, reader.finished, reader.others[-1].unacked) == (b"", "closed", 3)
    reader.feed(frames(2, 5))
    reader.end()
    reader.reset()
    reader.drain()
    reader.take(reader.core.close(0, "", 0.0))
    assert (len(reader.others), reader.core.next_deadline(), len(reader.units)) == (1, None, 2)


@pytest.mark.rule("LJ-25a")
def test_lj25a_the_time_for_a_commit_is_of_version_1(desk: Any) -> None:
    """LJ-25a: 60 s in version 1, none in version 2."""
    for version, reason in ((1, "sink_failed"), (2, None)):
        reader = desk(commits=False, idle_timeout=None)
        reader.feed(encode_window(version, 1) + frames(version, 1))
        reader.wait(59.9)
        assert reader.finished is None
        reader.wait(0.1)
        assert reader.finished == reason
        reader.wait(1e4)
        assert reader.finished == reason
        reader.commit(1)
        assert (reader.core.late_commits, reader.acks[-1:]) == ((1, []) if version == 1 else (0, [1]))


@pytest.mark.rule("LJ-25a")
def test_lj25a_the_settings_say_how_long_a_commit_takes(desk: Any) -> None:
    """LJ-25a: 5 s, or no limit."""
    for limit, reason in ((5.0, "sink_failed"), (None, None)):
        reader = desk(commits=False, idle_timeout=None, commit_timeout=limit)
        reader.feed(encode_window(1, 1) + frames(1, 1))
        reader.wait(4.9)
        assert reader.finished is None
        reader.wait(1e4)
        assert reader.finished == reason


@pytest.mark.rule("LJ-26")
def test_lj26_late_commits_are_counted(desk: Any) -> None:
    """LJ-26: a commit after the end of its connection is counted; the ack goes nowhere."""
    reader = desk(commits=False)
    reader.feed(encode_window(1, 1) + frames(1, 1))
    reader.reset()
    assert (reader.peer_closed, reader.finished) == (False, None)
    reader.commit(1)
    assert (reader.core.late_commits, reader.sent, reader.finished) == (1, b"", "lost")


@pytest.mark.rule("LJ-28")
def test_lj28_half_close_finishes_the_units_then_closes(desk: Any) -> None:
    """LJ-28: the open unit is finished, committed and acked before we close."""
    reader = desk(commits=False)
    reader.feed(encode_window(1, 2) + frames(1, 1, 2, 3))
    reader.end()
    assert (numbers(reader), reader.finished, reader.core.wants_data) == ([[1, 2], [3]], None, False)
    reader.commit(1)
    reader.commit(2)
    assert (reader.acks, reader.finished) == ([2, 3], "peer_closed")


@pytest.mark.rule("LJ-28")
@pytest.mark.parametrize("how", ["inside a frame", "reset"])
def test_lj28_whole_events_of_a_broken_connection_are_handed_on_without_ack(how: str, desk: Any) -> None:
    """LJ-28: also after a reset or an end inside a frame; earlier units are still acked where there is somebody to read it."""
    reader = desk(commits=False)
    reader.feed(encode_window(1, 2) + frames(1, 1, 2, 3) + (b"1D" if how == "inside a frame" else b""))
    if how == "reset":
        reader.reset()
    else:
        reader.end()
    assert (numbers(reader), [unit.whole for unit in reader.units]) == ([[1, 2], [3]], [True, False])
    reader.commit(1)
    reader.commit(2)
    assert reader.acks == ([2] if how == "inside a frame" else [])
    assert reader.finished == ("peer_closed" if how == "inside a frame" else "lost")


@pytest.mark.rule("LJ-28")
def test_lj28_a_connection_is_lost_once(desk: Any) -> None:
    """LJ-28: the carrier may say so for each direction."""
    reader = desk(commits=False)
    reader.feed(encode_window(1, 2) + frames(1, 1, 2))
    reader.reset()
    reader.reset()
    reader.commit(1)
    assert (numbers(reader), reader.acks, reader.finished) == ([[1, 2]], [], "lost")


@pytest.mark.rule("LJ-6")
def test_lj6_behind_the_end_no_data_is_wanted_though_work_is_left(desk: Any) -> None:
    """LJ-6: windows are taken in steps, and the last step may be full when all of them are taken."""
    reader = desk()
    windows = encode_window(1, 2) * 1024
    reader.core.receive_data(windows + windows, 0.0)
    assert (reader.core.has_work, reader.core.wants_data) == (True, False)
    reader.core.receive_data(b"", 0.0)
    assert (reader.core.has_work, reader.core.wants_data) == (True, False)
    reader.work()
    assert (reader.peer_closed, reader.finished) == (True, "peer_closed")


@pytest.mark.rule("LJ-28")
def test_lj28_our_end_drops_the_open_unit_and_waits_a_moment_for_the_sink(desk: Any) -> None:
    """LJ-28: running commits have `drain_timeout`; what gets committed is acked, the rest comes again."""
    reader = desk(commits=False)
    reader.feed(encode_window(1, 1) + frames(1, 1, 2, 3, 4))
    assert not reader.core.wants_data
    reader.drain()
    reader.wait(4.0)
    reader.commit(1)
    assert (numbers(reader), reader.acks, reader.finished) == ([[1], [2]], [1], None)
    reader.wait(1.0)
    assert (reader.finished, reader.others[-1].unacked, reader.core.next_deadline()) == ("drained", 1, None)
    ends = desk(commits=False)
    ends.feed(encode_window(1, 1) + frames(1, 1, 2, 3, 4))
    held = ends.core.held
    ends.drain()
    assert 0 < ends.core.held < held
    ends.commit(1)
    ends.commit(2)
    assert (ends.core.held, ends.acks, ends.finished) == (0, [1, 2], "drained")
    idle = desk()
    idle.feed(encode_window(1, 2) + frames(1, 1))
    idle.drain()
    assert (idle.units, idle.finished) == ([], "drained")


@pytest.mark.rule("LJ-29")
def test_lj29_an_idle_connection_is_closed(desk: Any) -> None:
    """LJ-29: 60 s without octets either way and nothing uncommitted; `None` switches it off."""
    reader = desk(commits=False)
    reader.feed(encode_window(2, 1) + frames(2, 1))
    reader.wait(1000.0)
    assert reader.finished is None
    reader.commit(1)
    reader.wait(59.9)
    assert reader.finished is None
    reader.wait(0.1)
    assert reader.finished == "idle"
    reader = desk(idle_timeout=None)
    reader.wait(1e6)
    assert reader.finished is None


@pytest.mark.rule("LJ-29")
def test_lj29_a_frame_has_its_time_by_what_it_announces(desk: Any) -> None:
    """LJ-29: 30 s and one for each 256 KiB announced; octets that dribble do not help; the clock stands while we don't read."""
    for announced, limit in ((0, 30.0), (8 * 2**20, 62.0)):
        reader = desk()
        reader.feed(b"1C" + (announced or 100).to_bytes(4, "big"))
        seconds = 0
        while reader.finished is None:
            reader.feed(b"x")
            reader.wait(1.0)
            seconds += 1
        assert (reader.refused, seconds) == ("LJ-29", int(limit) + 1)
    reader = desk()
    reader.feed(b"1")
    reader.core.stop_reading(reader.now)
    reader.now += 1000
    reader.core.reading(reader.now)
    reader.wait(29.0)
    assert reader.refused is None


@pytest.mark.rule("LJ-29")
def test_lj29_the_settings_say_how_long_a_frame_takes(desk: Any) -> None:
    """LJ-29: 4 s, and one for the 256 KiB announced."""
    reader = desk(frame_timeout=4.0)
    reader.feed(b"1C" + (256 * 1024).to_bytes(4, "big"))
    reader.wait(4.9)
    assert reader.refused is None
    reader.wait(0.2)
    assert reader.refused == "LJ-29"


@pytest.mark.rule("LJ-42")
@pytest.mark.rule("LJ-42a")
@pytest.mark.parametrize("version", [1, 2])
def test_lj42_lj42a_what_costs_too_much_is_handed_on_in_slices_and_acked_once(version: int, desk: Any) -> None:
    """LJ-42, LJ-42a: slices go to the sink like units and count as such, the ack comes with the end of the window."""
    reader = desk(commits=False, max_cost=1500 if version == 1 else 3000)
    reader.feed(encode_window(version, 10) + frames(version, *range(1, 10)))
    count = len(reader.units[0].events)
    assert (count, len(reader.units), reader.core.wants_data) == (4, 2, False)
    reader.commit(1)
    reader.commit(2)
    assert reader.acks == []
    reader.feed(frames(version, 10))
    reader.commit(3)
    assert ([number for unit in numbers(reader) for number in unit], reader.acks) == (list(range(1, 11)), [10])


@pytest.mark.rule("LJ-42")
@pytest.mark.rule("LJ-42b")
@pytest.mark.parametrize("frame", [encode_data, encode_json])
def test_lj42b_what_a_large_event_takes_is_counted_before_it_is_built(frame: Any, desk: Any) -> None:
    """LJ-42b: with its bytes, and its characters twice; the connection can be paused then, as it has not begun."""
    reader = desk(commits=False)
    event = {"k": "a" * 100_000 + "\U0001f600"}
    reader.take(reader.core.receive_data(encode_window(1, 1) + frame(1, 1, event), reader.now))
    while reader.core.held < 900_000:
        assert reader.core.large
        reader.take(reader.core.work(reader.now))
    assert (reader.core.large, reader.units, reader.core.held < 950_000) == (True, [], True)
    reader.take(reader.core.work(reader.now))
    assert (reader.core.large, reader.delivered) == (False, [event])
    assert 400_000 < reader.core.held < 410_000
    reader.commit(1)
    assert (reader.acks, reader.core.held) == ([1], 0)


@pytest.mark.rule("LJ-42")
@pytest.mark.rule("LJ-42a")
@pytest.mark.parametrize("packing", [False, True], ids=["plain", "packed"])
def test_lj42_lj42a_a_large_value_that_costs_too_much_comes_in_the_next_slice(packing: bool, desk: Any) -> None:
    """LJ-42: it is not built before what came before it is handed on; each comes once."""
    data = b"".join(encode_data(1, number, {"n": str(number), "k": "a" * 200_000}) for number in range(1, 6))
    reader = desk(commits=False, max_cost=1_000_000, max_uncommitted_units=1)
    reader.feed(encode_window(1, 5) + (encode_envelope(1, zlib.compress(data)) if packing else data))
    while not reader.acks:
        assert reader.core.held < 3_500_000
        reader.commit(reader.units[-1].number)
    assert (numbers(reader), reader.acks) == ([[1], [2], [3], [4], [5]], [5])
    assert all(unit.cost < 1_000_000 for unit in reader.units)


@pytest.mark.rule("LJ-42a")
def test_lj42a_a_slice_at_the_end_of_a_window_needs_no_unit_without_events(desk: Any) -> None:
    """LJ-42a: when a W ends what is all handed on, only the ack is left, and it waits for the slice's commit."""
    reader = desk(commits=False, max_cost=300)
    reader.feed(encode_window(1, 5) + frames(1, 1) + encode_window(1, 5))
    assert (numbers(reader), reader.acks) == ([[1]], [])
    reader.commit(1)
    assert reader.acks == [1]


@pytest.mark.rule("LJ-42b")
def test_lj42b_a_paused_connection_hands_on_its_open_unit(desk: Any) -> None:
    """LJ-42b: a slice without ack; what is held is counted."""
    reader = desk()
    reader.feed(encode_window(1, 3) + frames(1, 1, 2) + b"1D")
    assert reader.core.held == 2 * (256 + 128 + 4 * (10 + 4 + 1 + 4 + 1)) + 2
    reader.core.hand_on(reader.now)
    reader.take(reader.core.take_events())
    assert (numbers(reader), reader.acks, reader.core.held) == ([[1, 2]], [], 2)
    reader.feed(frames(1, 3)[2:])
    assert (numbers(reader), reader.acks) == ([[1, 2], [3]], [3])


@pytest.mark.rule("LJ-46")
def test_lj46_units_before_a_broken_rule_may_still_be_acked(desk: Any) -> None:
    """LJ-46: for a second; the open unit and the frame at fault are dropped."""
    for seconds, acks in ((0.9, [1]), (1.1, [])):
        reader = desk(commits=False)
        reader.feed(encode_window(2, 1) + frames(2, 1) + encode_window(2, 9) + frames(2, 1) + b"2Z")
        assert (reader.refused, reader.finished, numbers(reader)) == ("LJ-2", None, [[1]])
        reader.wait(seconds)
        reader.commit(1)
        assert (reader.acks, reader.finished) == (acks, "refused")
    reader.feed(b"2")
    assert len(reader.others) == 2


def due(reader: Any, seconds: float, done: Callable[[], bool]) -> None:
    """Nothing is done a thousandth of a second before, and all of it at the deadline."""
    reader.wait(seconds - 0.001)
    assert not done()
    reader.wait(0.001 + 1e-9)
    assert done()


@pytest.mark.rule("LJ-18")
@pytest.mark.rule("LJ-20")
@pytest.mark.rule("LJ-25a")
@pytest.mark.rule("LJ-28")
@pytest.mark.rule("LJ-29")
@pytest.mark.rule("LJ-46")
def test_deadlines_are_exact(desk: Any) -> None:
    """Not a moment before or after: idle acks, keepalives, commits, ends and their grace, idleness, and frames."""
    reader = desk()
    reader.feed(encode_window(1, 3) + frames(1, 1))
    due(reader, 1.0, lambda: reader.acks == [1])
    due(reader, 60.0, lambda: reader.finished == "idle")
    reader = desk(commits=False)
    reader.feed(encode_window(2, 1) + frames(2, 1))
    due(reader, 3.0, lambda: reader.acks == [0])
    due(reader, 3.0, lambda: reader.acks == [0, 0])
    reader.drain()
    due(reader, 5.0, lambda: reader.finished == "drained")
    reader = desk(commits=False)
    reader.feed(encode_window(1, 1) + frames(1, 1))
    due(reader, 60.0, lambda: reader.finished == "sink_failed")
    reader = desk(commits=False)
    reader.feed(encode_window(1, 1) + frames(1, 1) + b"?")
    due(reader, 1.0, lambda: reader.finished == "refused")
    reader = desk()
    reader.feed(b"1C" + (2**20 - 6).to_bytes(4, "big"))
    due(reader, 34.0, lambda: reader.refused == "LJ-29")
