"""Where a reader stands in a mailbox, as JSON: ``{"epoch": …, "opening": …, "0": …, "1": …}``.

These are the journal, its opening, and for each partition the offset after the last row. The rows between two positions never change. A position is
refused if it belongs to another journal, or to rows that this journal has lost or, as an older copy, never had. Version 0.1 wrote no ``opening``.

This module does without pyspark, as `levada.actors.spark.reading` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from levada.actors.journal.errors import JournalBehind

from .protocol import Compare, Compared, Description, EpochChanged
from .worker import RemoteMailbox

__all__ = ["offsets_in", "position"]


def position(found: Description, offsets: Mapping[int, int]) -> dict[str, Any]:
    """Return the position at these offsets."""
    numbers = {str(number): offset for number, offset in sorted(offsets.items())}
    return {"epoch": found.epoch, "opening": found.opening, **numbers}


def offsets_in(
    position: Mapping[str, Any], found: Description, remote: RemoteMailbox, *, held: str, again: str, skip: str = ""
) -> tuple[dict[int, int], JournalBehind | None]:
    """Return the offsets of a position. If rows before it are lost, also the error that names them, with the offsets of the remaining rows.

    Args:
        position: where the reader stands.
        found: what the bridge says of the mailbox.
        remote: the mailbox.
        held: the holder of the position, for the errors.
        again: how to begin anew, for the errors.
        skip: how to go on with the rows that are left, for the errors; empty if there is no way.

    Raises:
        EpochChanged: the position belongs to another journal.
    """
    if position["epoch"] != found.epoch:
        raise EpochChanged(
            f"{held} is of journal {position['epoch']}, and now there is {found.epoch}: it was deleted and created again, or this is another "
            f"mailbox. You can {again}",
            position["epoch"],
            found.epoch,
        )
    wanted = {int(name): value for name, value in position.items() if name not in ("epoch", "opening")}
    opening = position.get("opening")
    if opening == found.opening:
        return wanted, None
    compared = remote.ask(Compare(opening))
    behind = {number: value for number, value in wanted.items() if value > compared.ends.get(number, value)}
    if compared.known and not behind:
        return wanted, None
    kept = {number: min(value, compared.ends.get(number, value)) for number, value in wanted.items()}
    return kept, _behind(f"mailbox {remote.name}", opening, wanted, behind, compared, held, again + skip)


def _behind(
    where: str,
    opening: str | None,
    wanted: Mapping[int, int],
    behind: Mapping[int, int],
    compared: Compared,
    held: str,
    again: str,
) -> JournalBehind:
    """Return an error that names the lost rows."""
    ends = compared.ends
    if compared.known:
        gone = ", ".join(
            f"rows {ends[number]} to {value - 1} of partition {number}" for number, value in behind.items()
        )
        what = f"{gone}, which this query has read, are gone from the journal, and other rows have their offsets or will get them"
    else:
        rows = ", ".join(f"row {end} of partition {number}" for number, end in sorted(ends.items()))
        what = (
            f"{held} was written when the journal was open as {opening}, and this journal has no such opening: it is an older copy. "
            f"From {rows} on it may have other rows than this query has read, which stands at {dict(wanted)}"
        )
    number = next(iter(behind or wanted), 0)
    return JournalBehind(
        f"{where}: {what}. The same rows end at {dict(ends)}. You can put the newest copy of the journal back, or {again}",
        opening=opening or "",
        partition=number,
        wanted=wanted.get(number, 0),
        kept=ends.get(number, 0),
    )
