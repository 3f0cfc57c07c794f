"""Draws the state diagrams on the page of the protocol from the tables: ``.venv/bin/python tests/transports/maop/draw_states.py``."""

from __future__ import annotations

import enum
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from levada.transports.maop.state import (
    CONNECTION,
    INITIATOR,
    RECEIVER,
    ConnectionState,
    InitiatorState,
    ReceiverState,
)

PAGE = Path(__file__).resolve().parents[3] / "docs" / "protocols" / "maop.md"
STARTS: dict[str, tuple[Mapping[Any, Any], list[enum.Enum]]] = {
    "connection": (CONNECTION, [ConnectionState.HANDSHAKE]),
    "receiver": (RECEIVER, [ReceiverState.NEW]),
    "initiator": (INITIATOR, [InitiatorState.HEADER_SENT, InitiatorState.WAITING]),
}
"""Table and first states of each machine."""


def name(member: enum.Enum) -> str:
    """Return the name of a state or input as the diagram has it."""
    return member.name.lower()


def diagram(table: Mapping[Any, Any], starts: list[enum.Enum]) -> str:
    """Draw a table; inputs that lead from one state to the same other share an arrow."""
    arrows: dict[tuple[str, str], list[str]] = defaultdict(list)
    for (state, what), after in table.items():
        arrows[name(state), name(after)].append(name(what).replace("_", " "))
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
        new = f"{begin}\n{diagram(table, starts)}\n{end}"
        pattern = f"{re.escape(begin)}\n.*?{re.escape(end)}"
        assert len(re.findall(pattern, text, flags=re.DOTALL)) == 1, f"the page wants one place for {title}"
        text = re.sub(pattern, lambda _, new=new: new, text, flags=re.DOTALL)  # type: ignore[misc]
    return text


if __name__ == "__main__":
    PAGE.write_text(drawn(PAGE.read_text("utf-8")), "utf-8")
