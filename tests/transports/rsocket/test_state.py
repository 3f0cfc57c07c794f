"""The transition tables: what they hold, and that the page shows them."""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from levada.transports.rsocket.state import (
    CONNECTION,
    STREAM,
    ConnectionInput,
    ConnectionState,
    StreamInput,
    StreamState,
)

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "protocols" / "rsocket.md").read_text("utf-8")


def words(member: Enum) -> str:
    return member.name.lower().replace("_", " ")


def drawn(table: Mapping[Any, Any], left_out: tuple[Any, ...] = ()) -> str:
    """The table as the page has it."""
    causes = defaultdict(list)
    for (state, cause), after in table.items():
        if cause not in left_out:
            causes[state, after].append(words(cause))
    return "".join(sorted(f"* {words(a)} → {words(b)}: {', '.join(sorted(why))}\n" for (a, b), why in causes.items()))


@pytest.mark.parametrize(
    ("name", "table", "left_out"), [("stream", STREAM, ()), ("connection", CONNECTION, (ConnectionInput.END,))]
)
def test_the_page_shows_the_table(name: str, table: Mapping[Any, Any], left_out: tuple[Any, ...]) -> None:
    shown = re.search(f"<!-- states: {name} -->\n(.*?)<!-- states: end -->", PAGE, re.DOTALL)
    assert shown is not None
    assert "".join(sorted(shown[1].splitlines(keepends=True))) == drawn(table, left_out)


def test_an_ended_stream_has_no_transitions_and_each_live_one_can_end() -> None:
    for state, cause in itertools.product(StreamState, StreamInput):
        if state is StreamState.ENDED:
            assert (state, cause) not in STREAM
    for state in (StreamState.BOTH, StreamState.SENDING, StreamState.RECEIVING):
        assert STREAM[state, StreamInput.RECEIVE_ERROR] is StreamState.ENDED


def test_each_direction_ends_once() -> None:
    """Completing a direction that is complete is no transition."""
    for state, cause in (
        (StreamState.SENDING, StreamInput.RECEIVE_COMPLETE),
        (StreamState.RECEIVING, StreamInput.SEND_COMPLETE),
        (StreamState.SENDING, StreamInput.SEND_STOP),
        (StreamState.RECEIVING, StreamInput.RECEIVE_STOP),
    ):
        assert (state, cause) not in STREAM


@pytest.mark.rule("RS-101")
def test_rs101_a_draining_connection_is_not_suspended() -> None:
    """After CONNECTION_CLOSE there is no resumption."""
    assert (ConnectionState.DRAINING, ConnectionInput.LOSE_CARRIER) not in CONNECTION
    assert all(CONNECTION[state, ConnectionInput.END] is ConnectionState.ENDED for state in list(ConnectionState)[:-1])
