"""The programs of the page on nodes run as it says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "nodes.md"
TEXT = PAGE.read_text("utf-8")
(OUTPUT,) = re.findall(r"prints\n\n```\n(.*?)```", TEXT, re.DOTALL)


@pytest.mark.ci
def test_the_programs_print_what_the_page_says(tmp_path: Path) -> None:
    workers, main, *_ = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    (tmp_path / "workers.py").write_text(workers, "utf-8")
    (tmp_path / "main.py").write_text(main, "utf-8")
    done = subprocess.run(
        [sys.executable, "main.py"], cwd=tmp_path, capture_output=True, text=True, timeout=250, check=False
    )
    assert (done.stdout, done.returncode) == (OUTPUT, 0), done.stderr
