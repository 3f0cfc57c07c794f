"""The snippets of the page on clusters are whole: each has its imports, so that it can be copied."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs/how-to/cluster.md"
SNIPPETS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("snippet", SNIPPETS, ids=range(len(SNIPPETS)))
def test_a_snippet_has_its_imports(snippet: str) -> None:
    command = [
        sys.executable,
        "-m",
        "ruff",
        "check",
        "--isolated",
        "--no-cache",
        "--select",
        "F",
        "--stdin-filename",
        "snippet.py",
        "-",
    ]
    done = subprocess.run(command, input=snippet, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
