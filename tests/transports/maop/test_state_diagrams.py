"""The diagrams on the page are those of the tables, and every state ends."""

from __future__ import annotations

from levada.transports.maop.state import (
    CONNECTION,
    INITIATOR,
    RECEIVER,
    ConnectionInput,
    ConnectionState,
    InitiatorInput,
    InitiatorState,
    ReceiverInput,
    ReceiverState,
)

from .draw_states import PAGE, diagram, drawn


def test_the_page_shows_the_tables() -> None:
    text = PAGE.read_text("utf-8")
    assert drawn(text) == text, "run python tests/transports/maop/draw_states.py"


def test_a_changed_table_changes_the_diagram() -> None:
    changed = {**RECEIVER, (ReceiverState.ARMED, ReceiverInput.DONE): ReceiverState.ENDED}
    assert diagram(changed, [ReceiverState.NEW]) != diagram(RECEIVER, [ReceiverState.NEW])
    assert "    armed --> running: body complete" in diagram(changed, [ReceiverState.NEW])


def test_every_state_can_fail_and_no_end_leads_on() -> None:
    assert [s for s in ReceiverState if (s, ReceiverInput.FAILED) not in RECEIVER] == [ReceiverState.ENDED]
    assert [s for s in InitiatorState if (s, InitiatorInput.FAILED) not in INITIATOR] == [InitiatorState.ENDED]
    assert [s for s in ConnectionState if (s, ConnectionInput.CLOSED) not in CONNECTION] == [ConnectionState.CLOSED]
    assert not any(s is ReceiverState.ENDED for s, _ in RECEIVER)
