"""Settings of the whole test run: how hard hypothesis tries, and which tests are left out.

At the root, because the doctests of the three source folders are tests too.
"""

from __future__ import annotations

import gc
import logging
import os
import random
import signal
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import trio
from hypothesis import settings
from hypothesis.internal.conjecture import engine
from tests import pace

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.scheduler import LoadScopeScheduling

PROFILES = ("fast", "ci", "release", "soak")
"""How hard the tests try; each selects the tests of those before it, and those marked with its own name."""

LIMITS = {"release": 1200.0, "soak": 7200.0}
"""Seconds for one test with that mark, where the normal limit would cut it short."""

VIRTUAL = 120.0
"""Seconds for one test in virtual time: whole networks took more than the normal limit beside a busy build."""

SERVED = ("tests/actors/postgres/", "tests/actors/spark/")
"""The tests of each of these folders run in one process, which starts PostgreSQL or Spark once."""

ENVIRONMENTS = "tests/test_environments.py"
"""Each test of this file takes a minute and makes an environment of its own."""

LONG = (
    "tests/actors/aqueduct/test_cost.py",
    "tests/actors/aqueduct/test_fleet_model.py",
    "tests/actors/aqueduct/test_memory.py",
    "tests/actors/durable/test_placement_network.py",
    "tests/actors/nodes/test_local.py",
    "tests/actors/rsocket/test_cost.py",
    "tests/actors/test_console_cost.py",
    "tests/cli/test_serve_nodes.py",
    "tests/docs/test_break_your_own_system_page.py",
    "tests/simulation/test_every_call.py",
    "tests/simulation/test_fleets.py",
    "tests/simulation/test_histories.py",
    "tests/transports/quic/test_contract.py",
    "tests/transports/quic/test_network.py",
    "tests/transports/quic/test_recovery.py",
)
"""Files that take 15 seconds and more in ci, though none of their tests has a time limit of its own."""

# Deadlines are off: other work on the machine makes one slow example say nothing. `print_blob` shows how to repeat a failure.
# The newcomer's run has the same examples every time, so that a failure is the fault of the change at hand.
settings.register_profile(
    "fast", deadline=None, print_blob=True, max_examples=20, stateful_step_count=30, derandomize=True, database=None
)
# New examples on each run: many runs of 20 see what one of 100 does.
settings.register_profile("ci", deadline=None, print_blob=True, max_examples=20, stateful_step_count=30)
settings.register_profile("release", deadline=None, print_blob=True, max_examples=100)
settings.register_profile("soak", deadline=None, print_blob=True, max_examples=5_000, stateful_step_count=200)

# Hypothesis shrinks a failure for five minutes, which is also the limit of a test: the first error would be lost with it.
engine.MAX_SHRINKING_SECONDS = 60

TESTS = Path(__file__).parent / "tests"
CHILDREN = str(TESTS / "children")  # for programs that tests start; not to be imported here
collect_ignore = [CHILDREN]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--profile",
        choices=PROFILES,
        default="fast",
        help="how hard the tests try: fast (minutes), ci, release (needs toolchains and half an hour), soak (hours)",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    profile = str(config.getoption("--profile"))
    settings.load_profile(profile)
    pace.exact = profile in ("release", "soak")
    if config.option.timeout is None:
        config.option.timeout = float(config.getini("timeout")) * pace.PATIENCE
    if profile != "fast" and config.option.hypothesis_seed is None:
        # Chosen here and not by Hypothesis, so that all processes of the run share it and the header shows it.
        config.option.hypothesis_seed = random.randrange(1 << 32)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # Started in the background of a shell. The programs that tests start would inherit it, and Ctrl-C is what some are tested for.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if len(tempfile.gettempdir()) > 40 and Path("/tmp").is_dir():
        # The path of a Unix socket has 107 octets at most, of which pytest's own folders take 60.
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", "/tmp")
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        # Some tests hand their environment on as it is, others give their own path as PYTHONPATH. Only where tests run:
        # the processes of xdist must not begin as the programs of tests do.
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (CHILDREN, os.environ.get("PYTHONPATH"))))
    sys.path.append(CHILDREN)


def pytest_report_header(config: pytest.Config) -> str:
    seed = config.option.hypothesis_seed
    return f"levada profile: {config.getoption('--profile')}" + ("" if seed is None else f", --hypothesis-seed={seed}")


class _SlowHandlers(logging.Filter):
    """Drops the warnings of slow handlers: on a busy machine any handler may be slow, and no test is about that unless its mark says so."""

    wanted = False

    def filter(self, record: logging.LogRecord) -> bool:
        return self.wanted or vars(record).get("event") != "slow_handler"


_SLOW_HANDLERS = _SlowHandlers()
logging.getLogger("levada.framework.observe").addFilter(_SLOW_HANDLERS)


def pytest_runtest_setup(item: pytest.Item) -> None:
    _SLOW_HANDLERS.wanted = item.get_closest_marker("slow_handler") is not None


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> Generator[None, object, object]:
    # To look for doctests in the tests takes a sixth of the time to collect, and in the many modules that have none a tenth.
    parent.config.option.doctestmodules = (
        file_path.suffix == ".py" and not file_path.is_relative_to(TESTS) and b">>> " in file_path.read_bytes()
    )
    return (yield)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Use all cores for the whole suite; a file or a test that was asked for runs at once and in this process."""
    if config.option.keyword or config.getoption("lf", None) or config.option.usepdb:
        return 0
    if config.args_source is pytest.Config.ArgsSource.ARGS:
        return 0
    # A fifth of the time of ci is waiting: for Spark, for other programs, for the disk.
    more = 0 if config.getoption("--profile") == "fast" else 1
    return (os.cpu_count() or 1) + more


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    """Give whole files to the processes, in the order of `pytest_collection_modifyitems`."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):  # type: ignore[misc] # xdist has no types
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            folder = next(filter(file.startswith, SERVED), None)
            return nodeid if file == ENVIRONMENTS else folder or file

    config.option.loadscopereorder = False
    return ByFile(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    above = {*PROFILES[PROFILES.index(str(config.getoption("--profile"))) + 1 :]}
    selected: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    longest: dict[str, float] = {}
    for item in items:
        marks = {mark.name: mark for mark in reversed([*item.iter_markers()])}
        if not above.isdisjoint(marks):
            left_out.append(item)
            continue
        selected.append(item)
        limit = next((limit for profile, limit in LIMITS.items() if profile in marks), None)
        if "timeout" in marks:
            limit = float(marks["timeout"].args[0])
        if limit is not None:
            file = item.nodeid.partition("::")[0]
            longest[file] = max(longest.get(file, 0.0), limit)
        elif "autojump_clock" in getattr(item, "fixturenames", ()):
            limit = VIRTUAL
        if limit is not None:
            item.add_marker(pytest.mark.timeout(limit * pace.PATIENCE), append=False)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
    # What may take long begins first, so that no process is left alone with it at the end.
    selected.sort(
        key=lambda item: (-longest.get(item.nodeid.partition("::")[0], 0.0), not item.nodeid.startswith(LONG))
    )
    items[:] = selected


def _freeze() -> None:
    """Leave what is alive out of all later collections of garbage."""
    gc.collect()
    gc.freeze()


def pytest_collection_finish() -> None:
    # Modules and test items, 350,000 objects, would be looked at by each collection of each test: a third of the time of all tests.
    _freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    result = yield
    if nextitem is None or nextitem.path != item.path:
        _freeze()
    try:
        trio.lowlevel.current_trio_token()
    except RuntimeError:
        return result
    # The timer cut a hanging test out of the middle of trio's loop. Every later test would fail for that alone.
    item.session.shouldstop = f"{item.nodeid} hung inside trio, which cannot run again in this process"
    return result


def _trio_tasks() -> str:
    """Show where each task of trio waits; empty outside of trio."""
    try:
        root = trio.lowlevel.current_root_task()
    except RuntimeError:
        return ""
    lines: list[str] = []

    def add(task: trio.lowlevel.Task, depth: int) -> None:
        frames = [
            f"{frame.f_code.co_filename}:{line} {frame.f_code.co_name}" for frame, line in task.iter_await_frames()
        ]
        lines.extend("    " * depth + line for line in (task.name, *(f"  {frame}" for frame in frames)))
        for child in (child for nursery in task.child_nurseries for child in nursery.child_tasks):
            add(child, depth + 1)

    if root is not None:
        add(root, 0)
    return "\n".join(lines)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed and (tasks := _trio_tasks()):
        report.sections.append(("where the tasks of trio wait", tasks))
    # Some tests log what no UTF-8 can hold; a report on its way out of a worker process is UTF-8.
    report.sections = [(name, text.encode("utf-8", "backslashreplace").decode()) for name, text in report.sections]
    return report
