"""The page about nodes on Spark: its program prints what it says, and its table names every setting that is refused."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

from levada.actors.nodes import spark_settings

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "nodes-on-spark.md"


@pytest.mark.release
def test_the_program_prints_what_the_page_says(tmp_path: Path) -> None:
    pytest.importorskip("pyspark")
    pytest.importorskip("cryptography")
    text = PAGE.read_text("utf-8")
    workers, main = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[:2]
    output = re.search(r"`python main.py` prints\n\n```\n(.*?)```", text, re.DOTALL)
    assert output is not None
    (tmp_path / "workers.py").write_text(workers, "utf-8")
    (tmp_path / "main.py").write_text(main, "utf-8")
    done = subprocess.run(
        [sys.executable, "main.py"], cwd=tmp_path, capture_output=True, text=True, timeout=5500, check=False
    )
    assert (done.stdout, done.returncode) == (output[1], 0), done.stderr
    assert len(re.findall(r"^n[01]: node \d+$", done.stderr, re.MULTILINE)) == 2


def test_the_table_has_every_setting_that_is_refused() -> None:
    refused = set(re.findall(r"\bspark(?:\.[a-zA-Z]+)+\b", inspect.getsource(spark_settings)))
    written = set(re.findall(r"\bspark(?:\.[a-zA-Z]+)+\b", PAGE.read_text("utf-8")))
    assert refused - written == set()
