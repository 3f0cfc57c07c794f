"""Every program in examples/ runs as a process of its own, checks its own result and ends by itself."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from textwrap import indent

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
# Those of the tutorial have a test of their own, and so have those that start Spark. Two are the side of others that runs on nodes.
PROGRAMS = sorted(
    path
    for path in EXAMPLES.glob("*.py")
    if path.name not in ("log_pipeline.py", "accounts.py", "accounts_node.py", "crawl_worker.py")
)

LAST_LINES = {
    "chat_room.py": "3 guests said 6 lines, and all have left",
    "counter.py": "1 + 2 + … + 100 = 5050",
    "crawl.py": "200 pages scored on 2 nodes; the 20 copies among them are found",
    "fastapi_counter.py": "2 by HTTP and 42 by RSocket: one counter, and nothing is left",
    "log_summary.py": "verified: all counts match the known facts about this log",
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


@pytest.mark.ci
def test_the_notebook_runs_in_a_kernel_of_jupyter(tmp_path: Path) -> None:
    """`nbclient` starts the kernel; its own sockets are its own affair, so it runs as a program."""
    program = (
        "import sys, nbformat, nbclient; book = nbformat.read(sys.argv[1], 4); nbclient.NotebookClient(book).execute()"
    )
    program += "; nbformat.write(book, sys.argv[2])"
    arguments = [str(EXAMPLES / "notebook.ipynb"), str(tmp_path / "done.ipynb")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    cells = json.loads((tmp_path / "done.ipynb").read_text("utf-8"))["cells"]
    outputs = [output for cell in cells if cell["cell_type"] == "code" for output in cell["outputs"]]
    assert [output.get("data", output) for output in outputs] == [
        {"text/plain": ["2"]},
        {"text/plain": ["5"]},
        {"text/plain": ["[1, 2, 3, 4, 5]"]},
        {"text/plain": ["'over'"]},
    ]


def test_the_page_of_asyncio_shows_parts_of_the_examples() -> None:
    page = (EXAMPLES.parent / "docs/how-to/asyncio.md").read_text("utf-8")
    program = (EXAMPLES / "fastapi_counter.py").read_text("utf-8")
    cells = json.loads((EXAMPLES / "notebook.ipynb").read_text("utf-8"))["cells"]
    notebook = [line.rstrip() for cell in cells for line in cell["source"]]
    _, lifespan, stack = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert indent(lifespan, "    ") in program
    assert [line for line in stack.splitlines() if line not in notebook] == []


@pytest.mark.ci
@pytest.mark.timeout(300)
@pytest.mark.parametrize("adds_up", [pytest.param("spark", marks=pytest.mark.release), "pyarrow"])
def test_accounts_are_right_after_a_kill_and_so_are_their_books(adds_up: str) -> None:
    pytest.importorskip("pyspark" if adds_up == "spark" else "pyarrow")
    arguments = ["--commands", "400", *(["--no-spark"] if adds_up == "pyarrow" else [])]
    last = run(EXAMPLES / "accounts.py", *arguments)
    assert re.fullmatch(r"400 commands, one kill: the log has \d+, as the accounts say", last)


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
        timeout=280,
    )
    # On a slow machine any computing becomes a turn of a quarter of a second, which is worth a warning.
    said = [line for line in done.stderr.splitlines() if " held everything up for " not in line]
    assert (done.returncode, said) == (0, [])
    return done.stdout.splitlines()[-1]
