"""Notes of changes are ready for the changelog, and the changelog has the version that the package has."""

from __future__ import annotations

import importlib
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
CONFIG = PROJECT["tool"]["towncrier"]
NOTES = sorted((ROOT / CONFIG["directory"]).glob("*.*.md"))
KINDS = [kind["directory"] for kind in CONFIG["type"]]
FULL_NAME = re.compile(r"`(levada(?:\.\w+){2,})")


def exists(name: str) -> bool:
    """Whether an object has this name, which begins with its module; an instance attribute is looked up in the annotations."""
    parts = name.split(".")
    for cut in range(len(parts), 1, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            if not hasattr(found, part) and part not in getattr(found, "__annotations__", {}):
                return False
            found = getattr(found, part, None)
        return True
    return False


def faults(note: Path) -> Iterator[str]:
    """What keeps a note from the changelog."""
    if not re.fullmatch(rf"[a-z0-9]+(-[a-z0-9]+)*\.({'|'.join(KINDS)})\.md", note.name):
        yield f"its name has no topic in small letters, or none of the kinds {', '.join(KINDS)}"
    text = note.read_text("utf-8")
    lines = text.removesuffix("\n").split("\n")
    if len(lines) > 3:
        yield "more than three lines"
    for line in lines:
        if line != line.strip() or not line.endswith(".") or line[:1] in ("-", "*", "#"):
            yield f"not whole sentences: {line!r}"
    if not note.match("*.breaking.md"):  # those name what is gone, too
        yield from (f"there is no {name}" for name in FULL_NAME.findall(text) if not exists(name))


def test_notes_are_well_formed() -> None:
    """A name has a topic and a kind; the text is one to three lines of whole sentences, and the full names in it exist."""
    assert [f"{note.name}: {fault}" for note in NOTES for fault in faults(note)] == []


def test_what_a_note_may_not_be(tmp_path: Path) -> None:
    note = tmp_path / "Journal.change.md"
    note.write_text("`levada.framework.Actor.peer` and `levada.framework.Nothing`\n- are new.\n\n\n", "utf-8")
    assert [fault.partition(",")[0].partition(":")[0] for fault in faults(note)] == [
        "its name has no topic in small letters",
        "more than three lines",
        *["not whole sentences"] * 4,
        "there is no levada.framework.Nothing",
    ]


def test_the_readme_of_the_notes_has_the_kinds_in_the_order_of_the_changelog() -> None:
    readme = (ROOT / CONFIG["directory"] / "README.md").read_text("utf-8")
    assert re.findall(r"^\| `(\w+)` \|", readme, re.MULTILINE) == KINDS


def test_the_changelog_begins_with_the_version_of_the_package() -> None:
    changelog = (ROOT / CONFIG["filename"]).read_text("utf-8")
    releases = re.findall(r"^## (\S+) \(\d{4}-\d{2}-\d{2}\)$", changelog, re.MULTILINE)
    assert releases[0] == PROJECT["project"]["version"]
    assert releases[-1] == "0.1.0"
    assert changelog.index(CONFIG["start_string"]) < changelog.index("## ")
