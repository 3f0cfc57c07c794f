"""Draws the state diagrams on the page of the protocol from the tables: ``.venv/bin/python tests/transports/aqueduct/draw_states.py``."""

from __future__ import annotations

import enum
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from levada.transports.aqueduct.state import (
    CONNECTION,
    RECEIVER,
    SENDER,
    ConnectionState,
    ReceiverState,
    SenderState,
)

PAGE = Path(__file__).resolve().parents[3] / "docs" / "protocols" / "aqueduct.md"
STARTS: dict[str, tuple[Mapping[Any, Any], list[enum.Enum]]] = {
    "connection": (CONNECTION, [ConnectionState.HANDSHAKE]),
    "sender": (SENDER, [SenderState.UNATTACHED, SenderState.OPEN]),
    "receiver": (RECEIVER, [ReceiverState.UNATTACHED, ReceiverState.OPEN]),
}
"""Table and first states of each machine. Whoever minted the id starts unattached, the other side open: it has opened the control stream."""


def name(state: enum.Enum) -> str:
    """Return the name of a state as the diagram can hold it."""
    return str(state.value).replace("-", "_").replace(" ", "_")


def diagram(table: Mapping[Any, Any], starts: list[enum.Enum]) -> str:
    """Draw a table; inputs that lead from one state to the same other share an arrow."""
    arrows: dict[tuple[str, str], list[str]] = defaultdict(list)
    for (state, what), after in table.items():
        arrows[name(state), name(after)].append(what.value)
    lines = ["```mermaid", "stateDiagram-v2"]
    lines += [f"    [*] --> {name(start)}" for start in starts]
    lines += [f"    {a} --> {b}: {' / '.join(inputs)}" for (a, b), inputs in arrows.items()]
    ends = dict.fromkeys(name(after) for after in table.values() if not any(state is after for state, _ in table))
    lines += [f"    {end} --> [*]" for end in ends]
    return "\n".join([*lines, "```"])


def drawn(text: str) -> str:
    """Return the page with all its diagrams as the tables have them."""
    for title, (table, starts) in STARTS.items():
        begin, end = f"<!-- states: {title} -->", "<!-- states: end -->"
        text, count = re.subn(
            f"{re.escape(begin)}\n.*?{re.escape(end)}",
            lambda _, b=begin, e=end, t=table, s=starts: f"{b}\n{diagram(t, s)}\n{e}",  # type: ignore[misc]
            text,
            flags=re.DOTALL,
        )
        assert count == 1, f"the page wants one place for the diagram of {title}"
    return text


if __name__ == "__main__":
    PAGE.write_text(drawn(PAGE.read_text("utf-8")), "utf-8")
