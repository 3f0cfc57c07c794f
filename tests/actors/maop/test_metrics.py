"""What is counted and what is logged, by the names of the protocol."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from levada.actors.maop import (
    Call,
    Disapproved,
    GateConfig,
    Handler,
    HandlerSpec,
    Histogram,
    MaopConfig,
    Metrics,
    OperationFailed,
    OperationRefused,
    PeerConfig,
    Refuse,
    Reply,
    connect,
)
from levada.actors.maop.metrics import NAMES
from levada.framework import Distribution

from .conftest import Start, echo, nothing, settled

SEED = {
    "ops_inflight",
    "confirms_total",
    "denies_total",
    "blocks_rx_bytes_total",
    "handler_latency_ms",
    "maop_success_count_total",
    "maop_success_bytes_total",
    "maop_invalid_content_type_total",
    "maop_blocks_rx_bytes_total",
    "maop_upload_latency_ms",
    "maop_confirms_per_sec",
    "maop_denies_per_sec",
    "maop_streaming_sessions_open",
    "maop_streaming_duration_ms",
    "maop_denies_policy_undefined_length_total",
    "maop_request_latency_ms",
    "maop_response_fail_total",
    "maop_rpc_payload_bytes",
    "maop_control_backlog",
    "maop_late_signals_total",
    "maop_response_unacked_total",
    "maop_drain_ms",
    "maop_streams_aborted_total",
    "maop_fail_total",
    "maop_approval_latency_ms",
    "maop_approval_index",
}


def values(metrics: Metrics, now: float = 0.0) -> dict[tuple[str, str], float]:
    """Return samples by name and label; of a histogram its count."""
    return {
        (metric.name, "".join(labels)): float(sum(value.counts)) if isinstance(value, Distribution) else value
        for metric, value, labels in metrics.samples(now)
    }


async def pieces() -> AsyncIterator[bytes]:
    yield b"abc"
    await trio.sleep(2)
    yield b"def"


@pytest.mark.handler_fails
@pytest.mark.rule("MA-133")
async def test_ma133_everything_is_counted_under_its_name(start: Start, autojump_clock: MockClock) -> None:
    """The seed's metrics and those added, with their labels; latencies and durations are histograms."""

    async def slow(call: Call) -> Reply:
        await trio.sleep(0.2)
        return Reply(b"{}", "application/json")

    async def fails(call: Call) -> None:
        raise ValueError

    async def refuses(call: Call) -> None:
        raise Refuse(14)

    async def take(call: Call) -> None:
        async for _ in call:
            pass

    handlers = {
        100: Handler(take, spec=HandlerSpec(allow_undefined_length=True, streaming=True)),
        101: echo,
        102: slow,
        103: fails,
        104: Handler(echo, before_execute=refuses),
    }
    async with start(handlers) as ends:
        ours, theirs = ends.peer.metrics, ends.listener.metrics
        assert ends.caller.metrics is theirs
        assert NAMES == SEED
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ends.peer.message, 100, pieces())
            await trio.sleep(1)
            assert values(theirs)["maop_streaming_sessions_open", ""] == 1
            assert values(theirs)["ops_inflight", ""] == 1
        await ends.peer.request(101, b"12345")
        await ends.peer.request(102)
        with pytest.raises(OperationFailed):
            await ends.peer.request(103)
        with pytest.raises(OperationRefused):
            await ends.peer.request(104)
        with pytest.raises(OperationRefused):
            await ends.peer.message(101, pieces())
        with trio.move_on_after(0.1):
            await ends.peer.request(102)
        await settled()
        got = values(theirs)
        wanted = {
            ("ops_inflight", ""): 0,
            ("confirms_total", ""): 5,
            ("denies_total", "CAPACITY_LIMIT"): 1,
            ("denies_total", "POLICY_UNDEFINED_LENGTH"): 1,
            ("handler_latency_ms", "100"): 1,
            ("handler_latency_ms", "101"): 1,
            ("handler_latency_ms", "102"): 1,
            ("maop_success_count_total", ""): 2,
            ("maop_success_bytes_total", "application/octet-stream"): 5,
            ("maop_success_bytes_total", "application/json"): 2,
            ("maop_upload_latency_ms", ""): 1,
            ("maop_streaming_sessions_open", ""): 0,
            ("maop_streaming_duration_ms", ""): 1,
            ("maop_denies_policy_undefined_length_total", ""): 1,
            ("maop_fail_total", "EXECUTION_ERROR"): 1,
            ("maop_fail_total", "CANCELLED"): 1,
            ("maop_response_unacked_total", ""): 0,
            ("maop_approval_latency_ms", ""): 6,
        }
        assert {key: got[key] for key in wanted} == wanted
        assert got["blocks_rx_bytes_total", ""] >= 11
        assert 200.0 <= theirs.handler_latency_ms[102].quantile(0.5) <= 300.0
        assert 2000.0 <= theirs.streaming_duration_ms.quantile(0.99) <= 3000.0
        mine = values(ours)
        assert mine["maop_request_latency_ms", ""] == 2
        assert mine["maop_rpc_payload_bytes", ""] == 2
        assert 200.0 <= ours.request_latency_ms.quantile(0.99) <= 300.0
        assert mine["maop_response_fail_total", "EXECUTION_ERROR"] == 1
        assert mine["maop_response_fail_total", "CAPACITY_LIMIT"] == 1
        await ends.peer.aclose()
        await trio.sleep(1)
        after = values(theirs)
        assert after["confirms_total", ""] == 5  # what ended connections counted stays
        assert after["maop_drain_ms", ""] == 1


@pytest.mark.rule("MA-133")
async def test_ma133_rates_are_per_second_of_the_readers_clock(start: Start, autojump_clock: MockClock) -> None:
    """maop_confirms_per_sec and maop_denies_per_sec."""
    async with start({101: echo}) as ends:
        metrics = ends.listener.metrics
        values(metrics, 100.0)
        for _ in range(20):
            await ends.peer.request(101)
        assert values(metrics, 110.0)["maop_confirms_per_sec", ""] == 2.0
        assert values(metrics, 110.5)["maop_confirms_per_sec", ""] == 2.0  # too soon for another
        assert values(metrics, 112.0)["maop_confirms_per_sec", ""] == 0.0


@pytest.mark.rule("MA-133")
def test_ma133_content_types_in_labels_are_bounded() -> None:
    """32 distinct values, the rest is other."""
    metrics = Metrics()
    for number in range(100):
        metrics.succeeded(f"text/x{number}", 2)
    metrics.succeeded("text/x0", 2)
    assert len(metrics.success_count) == 33
    assert (metrics.success_count["text/x0"], metrics.success_bytes["other"]) == (2, 136)


def test_ma133_codes_in_labels_are_bounded() -> None:
    """A peer chooses the codes of its Fails."""
    metrics = Metrics()
    metrics.response_fail.update({14: 7, 17: 2, **dict.fromkeys(range(1024, 60_000), 1)})
    labels = {label: number for (name, label), number in values(metrics).items() if name == "maop_response_fail_total"}
    assert labels == {
        "CAPACITY_LIMIT": 7,
        "EXECUTION_ERROR": 2,
        **{f"UNKNOWN_ERROR({code})": 1 for code in range(1024, 1024 + 64)},
        "other": 60_000 - 1024 - 64,
    }


def test_a_histogram_knows_its_quantiles() -> None:
    histogram = Histogram()
    assert histogram.quantile(0.99) == 0.0
    for value in (0.001, 0.5, 3.0, 1e12):
        histogram.observe(value)
    assert (histogram.count, histogram.buckets[-1]) == (4, 1)
    assert [histogram.quantile(q) for q in (0.25, 0.5, 0.75, 1.0)] == [0.01, 0.5, 3.0, float("inf")]


@pytest.mark.rule("MA-131b")
@pytest.mark.rule("MA-132")
async def test_ma131b_ma132_what_happens_is_logged_and_no_more(
    start: Start, caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    """Authentication, begin, Proceed and Refuse, Done and Fail, cancel, disconnect, with session and stream; the effective configuration.

    Never tokens, never payloads.
    """
    caplog.set_level(logging.DEBUG, "levada.actors.maop")

    async def hang(call: Call) -> None:
        await trio.sleep_forever()

    async with start({101: echo, 102: hang}, core=MaopConfig(gate=GateConfig(max_inflight_ops=77))) as ends:
        session, client, server = ends.peer.session_id.hex(), ends.client.ref.path, ends.server.ref.path
        await ends.peer.message(101, b"the payload")
        with pytest.raises(OperationRefused):
            await ends.peer.request(999)
        with trio.move_on_after(0.1):
            await ends.peer.request(102)
        await settled()
    text = caplog.text
    assert "max_inflight_ops=77" in text
    for phrase in (
        "approved: client-1",
        "begun: msg_id 101, bytes 11",
        "done: msg_id 101",
        "Proceed",
        "Refuse",
        "Done",
    ):
        assert phrase in text, phrase
    cancelled = "cancelled: msg_id 102, bytes 0, lat_ms 100, priority 128, result CANCELLED"
    assert text.count(cancelled) == 2  # by either side
    assert "draining" in text
    assert "ended: 0" in text
    assert "payload" not in text
    assert "secret" not in text
    events = {getattr(r, "event", "") for r in caplog.records if getattr(r, "connection_id", "") == session}
    assert {"approved", "begun", "done", "cancelled", "draining", "ended", "Proceed", "Refuse"} <= events
    steps: dict[str, list[tuple[int, str]]] = {client: [], server: []}
    for record in caplog.records:
        if getattr(record, "event", "") in ("begun", "proceed", "refused", "done", "failed", "cancelled"):
            assert getattr(record, "connection_id", "") == session
            steps[record.actor].append((record.stream_id, record.event))  # type: ignore[attr-defined]
    message, refused, hung = 2, 4, 8
    assert steps[server] == [(message, "begun"), (message, "done"), (hung, "begun"), (hung, "cancelled")]
    assert steps[client] == [
        (message, "begun"),
        (message, "proceed"),
        (message, "done"),
        (refused, "begun"),
        (refused, "refused"),
        (hung, "begun"),
        (hung, "proceed"),
        (hung, "cancelled"),
    ]


@pytest.mark.rule("MA-132")
async def test_ma132_the_first_and_the_last_block_and_the_response_are_logged(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    """Not each Block, by whichever side a body comes in; with session and stream."""
    caplog.set_level(logging.DEBUG, "levada.actors.maop")
    body = bytes(500_000)
    async with start({101: echo, 102: nothing}) as ends:
        assert await ends.peer.request(101, body) == body
        await ends.peer.request(102)
        session, client, server = ends.peer.session_id.hex(), ends.client.ref.path, ends.server.ref.path
    steps: dict[str, dict[int, list[tuple[str, str]]]] = {client: {}, server: {}}
    for record in caplog.records:
        event = getattr(record, "event", "")
        if event in ("first_block", "last_block", "response"):
            assert getattr(record, "connection_id", "") == session
            octets = record.getMessage().rpartition("bytes ")[2]
            steps[record.actor].setdefault(record.stream_id, []).append((event, octets))  # type: ignore[attr-defined]
    typed = str(500_000 + 1 + len("application/octet-stream"))
    assert steps[server].keys() == steps[client].keys()
    [first, last, response], none = steps[server].values()
    assert (first[0], last, response, none) == (
        "first_block",
        ("last_block", "500000"),
        ("response", typed),
        [("response", "0")],
    )
    [response, first, last], none = steps[client].values()
    assert (response, first[0], last, none) == (
        ("response", typed),
        "first_block",
        ("last_block", typed),
        [("response", "0")],
    )


@pytest.mark.rule("MA-94")
@pytest.mark.parametrize("setting", ["production", "debug"])
async def test_ma94_a_setting_says_where_reasons_are_logged(
    setting: Any, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    """Shortened to 100 characters; in the record of what happened, or in a debug record of their own."""
    caplog.set_level(logging.DEBUG, "levada.actors.maop")
    async with start({}, log_reasons=setting) as ends:
        await ends.peer.aclose("moving\nhouse " + "x" * 200)
        with pytest.raises(Disapproved):
            config = PeerConfig(log_reasons=setting)
            async with connect(ends.system, ends.listener.url, token=b"wrong", config=config):
                pass
    cut = "moving house " + "x" * 87
    found = {
        (record.levelname, text)
        for record in caplog.records
        if record.name == "levada.actors.maop"
        if getattr(record, "event", "") not in ("DisconnectRequest", "Disconnect")  # signals, at debug
        for text in (cut, "x" * 88, "credentials")
        if text in record.getMessage()
    }
    draining = [r for r in caplog.records if getattr(r, "event", "") == "draining"]
    assert all("disconnects, 5.000 s" in record.getMessage() for record in draining)
    if setting == "production":
        assert found == {("INFO", cut), ("INFO", "credentials")}
    else:
        assert found == {("DEBUG", cut), ("DEBUG", "credentials")}
