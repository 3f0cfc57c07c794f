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
TEXT = PAGE.read_text("utf-8")
(OUTPUT,) = re.findall(r"`python main.py` prints\n\n```\n(.*?)```", TEXT, re.DOTALL)
(ERROR,) = re.findall(r"the error gives the numbers:\n\n```\n(.*?)```", TEXT, re.DOTALL)


@pytest.mark.release
def test_the_program_prints_what_the_page_says(tmp_path: Path) -> None:
    pytest.importorskip("pyspark")
    pytest.importorskip("cryptography")
    workers, main = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)[:2]
    (tmp_path / "workers.py").write_text(workers, "utf-8")
    (tmp_path / "main.py").write_text(main, "utf-8")
    done = subprocess.run(
        [sys.executable, "main.py"], cwd=tmp_path, capture_output=True, text=True, timeout=5500, check=False
    )
    assert (done.stdout, done.returncode) == (OUTPUT, 0), done.stderr
    assert len(re.findall(r"^n[01]: node \d+$", done.stderr, re.MULTILINE)) == 2


def test_the_table_has_every_setting_that_is_refused() -> None:
    refused = set(re.findall(r"\bspark(?:\.[a-zA-Z]+)+\b", inspect.getsource(spark_settings)))
    written = set(re.findall(r"\bspark(?:\.[a-zA-Z]+)+\b", TEXT))
    assert refused - written == set()


def test_the_error_is_the_one_of_a_node_without_a_slot() -> None:
    late = "n0 did not say hello within 60 s (NodeSettings.start_timeout): "
    no_slot = spark_settings.SparkSlots(slots=2, cores=8, running=2, nodes=0).describe("local[2]")
    assert " ".join(ERROR.split()) == late + no_slot
