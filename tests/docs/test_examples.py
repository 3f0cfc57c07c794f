"""Every program in examples/ runs as a process of its own, checks its own result and ends by itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
# Those of the tutorial have a test of their own, and so has the one that starts Spark: tests/cli/test_demo.py. Crawlers run in crawl.py.
PROGRAMS = sorted(set(EXAMPLES.glob("*.py")) - {EXAMPLES / "log_pipeline.py", EXAMPLES / "crawl_worker.py"})

LAST_LINES = {
    "chat_room.py": "3 guests said 6 lines, and all have left",
    "counter.py": "1 + 2 + … + 100 = 5050",
    "crawl.py": "200 pages scored on 2 nodes; the 20 copies among them are found",
    "log_summary.py": "verified: all counts are those that are known for this log",
    "maop_large_file.py": "in the vault there is 1 file, as it was sent",
    "maop_light_rpc.py": "106 calls on one connection, 0 left",
    "maop_undefined_stream.py": "2 streams approved, 1 refused",
    "remote_counter.py": "25 times 10 is 250, heard of [100, 200], then the connection was lost",
    "rsocket_prices.py": "500 prices, none lost and none twice, over 3 carriers",
    "price_desk.py": "the desk served 3 followers of 2 symbols",
    "ship_logs.py": "6000 lines of 3 files, each at least once",
    "supervised_pool.py": "196 jobs done, [13, 63, 113, 163] given up after 3 tries, 39 crashes survived",
    "worker_pool.py": "60 jobs done; Bob was lost at work, and what he and Cyd did not do was done by others",
}


@pytest.mark.ci
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_example(program: Path) -> None:
    assert run(program) == LAST_LINES[program.name]


@pytest.mark.ci
@pytest.mark.parametrize("nodes", [1, 4])
def test_a_crawl_has_the_same_result_on_any_number_of_nodes(nodes: int) -> None:
    last = run(EXAMPLES / "crawl.py", "--nodes", str(nodes), "--pages", "60")
    assert last == f"60 pages scored on {nodes} nodes; the 6 copies among them are found"


def run(program: Path, *arguments: str) -> str:
    """Run an example; return its last line."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "PYTHONIOENCODING": "utf-8",
    }
    done = subprocess.run(
        [sys.executable, "-W", "error", program, *arguments],
        env=environment,
        capture_output=True,
        encoding="utf-8",
        check=False,
        timeout=50,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()[-1]
