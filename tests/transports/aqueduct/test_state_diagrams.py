"""The diagrams on the page are those of the tables."""

from __future__ import annotations

from levada.transports.aqueduct.state import SENDER, SenderInput, SenderState

from .draw_states import PAGE, diagram, drawn


def test_the_page_shows_the_tables() -> None:
    text = PAGE.read_text("utf-8")
    assert drawn(text) == text, "run python tests/transports/aqueduct/draw_states.py"


def test_a_changed_table_changes_the_diagram() -> None:
    changed = {**SENDER, (SenderState.OPEN, SenderInput.FINISH): SenderState.FINISHED}
    starts = [SenderState.OPEN]
    assert diagram(changed, list(starts)) != diagram(SENDER, list(starts))
    assert "    open --> finished: app finish" in diagram(changed, list(starts))
