"""Message classes that differ between the two programs are noticed before the first message."""

from __future__ import annotations

import logging
import re
from typing import Any, Union

import pytest
import trio
from trio.testing import MockClock

from levada.actors.aqueduct import PeerConfig, connect, serve
from levada.actors.aqueduct.schema import SCHEMA, compare_schema, schema_header
from levada.framework import ActorSystem, Receiver, Sender, message
from levada.framework.codec import Codec
from levada.framework.errors import ConnectionLost

from .conftest import Start


@message("tests.schema.Price")
class Price:
    symbol: str
    bid: float
    note: str = ""


@message("tests.schema.Follow")
class Follow:
    symbols: list[str]
    prices: Sender[Price]
    stop: Receiver[None] | None = None


def header(schema: dict[str, list[tuple[str, str, bool]]]) -> bytes:
    return Codec().encode(schema, dict[str, list[tuple[str, str, bool]]])


PRICE = [("symbol", "str", False), ("bid", "float", False), ("note", "str", True)]


def test_the_header_lists_what_can_be_reached() -> None:
    """Fields, channels in fields, unions: every class once; a type that admits anything lists nothing."""
    for item in (Follow, Sender[Follow], Union[Follow, Price], dict[str, list[Follow]]):  # noqa: UP007 - typing's own
        ((name, value),) = schema_header(item)
        assert name == SCHEMA
        assert Codec().decode(value, dict[str, list[tuple[str, str, bool]]]) == {
            "tests.schema.Follow": [
                ("symbols", "list[str]", False),
                ("prices", "Sender[Price]", False),
                ("stop", "None | Receiver[None]", True),
            ],
            "tests.schema.Price": PRICE,
        }
    assert schema_header(Any) == schema_header(int) == ()


@pytest.mark.parametrize(
    ("fields", "errors", "remarks"),
    [
        (PRICE, [], []),
        (PRICE[:2], [], []),
        ([*PRICE, ("ask", "float", True)], [], []),
        (PRICE[:1], ["tests.schema.Price: bid has no default, and is missing there"], []),
        ([*PRICE, ("ask", "float", False)], ["tests.schema.Price: ask has no default, and is missing here"], []),
        ([PRICE[0], ("bid", "int", False)], ["tests.schema.Price: bid: float here, bid: int there"], []),
        ([("name", "str", False), *PRICE[1:]], [], ["tests.schema.Price: symbol here is called name there"]),
    ],
)
def test_what_cannot_work_and_what_may(fields: Any, errors: list[str], remarks: list[str]) -> None:
    assert compare_schema(header({"tests.schema.Price": fields})) == (errors, remarks)


def test_unknown_classes_and_malformed_headers() -> None:
    assert compare_schema(header({"tests.schema.Gone": []})) == ([], ["tests.schema.Gone: there is no such class here"])
    errors, remarks = compare_schema(b"\xff")
    assert errors[0].startswith("levada-schema cannot be read: ")
    assert remarks == []


OTHER = ((SCHEMA, header({"tests.schema.Price": [PRICE[0], ("bid", "int", False)]})),)
DIFFERENCE = "message classes differ: tests.schema.Price: bid: float here, bid: int there"


@pytest.mark.parametrize("by_client", [True, False])
async def test_a_difference_is_an_error_that_says_what_differs(
    autojump_clock: MockClock, by_client: bool, scheme: str
) -> None:
    """Whichever side notices: `connect` raises, and names class, field and both types."""

    async def ignore(m: Any) -> None: ...

    client, server = PeerConfig(headers=OTHER if by_client else ()), PeerConfig(headers=() if by_client else OTHER)
    async with (
        ActorSystem() as system,
        serve(system, f"aqueduct+{scheme}://schema", ignore, Any, config=server) as listener,
    ):
        with pytest.raises(ConnectionLost, match=re.escape(DIFFERENCE)) as caught:
            async with connect(system, listener.url, object, config=client):
                pass
        assert caught.value.code == 3


@pytest.mark.parametrize("schema", ["warn", "off"])
async def test_a_difference_may_be_logged_or_left_alone(
    start: Start, caplog: pytest.LogCaptureFixture, autojump_clock: MockClock, schema: str
) -> None:
    with caplog.at_level(logging.WARNING, "levada.actors.aqueduct"):
        async with start(schema=schema, headers=OTHER) as ends:
            await ends.peer.send(Price("EURUSD", 1.08))
            with trio.fail_after(5):
                assert await ends.got.receive() == Price("EURUSD", 1.08)
    texts = [record.getMessage().partition(": ")[2] for record in caplog.records]
    assert texts == ([DIFFERENCE, DIFFERENCE] if schema == "warn" else [])
