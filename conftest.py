"""Settings of the whole test run: how hard hypothesis tries, and which tests are left out.

At the root, because the doctests of the three source folders are tests too.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest
import trio
from hypothesis import settings

# Deadlines are off: other work on the machine makes one slow example say nothing. `print_blob` shows how to repeat a failure.
settings.register_profile("fast", deadline=None, print_blob=True, max_examples=30, stateful_step_count=30)
# The same examples on every run, so that a failure is the fault of the change at hand.
settings.register_profile("ci", deadline=None, print_blob=True, max_examples=100, derandomize=True)
settings.register_profile("soak", deadline=None, print_blob=True, max_examples=5_000, stateful_step_count=200)

CHILDREN = str(Path(__file__).parent / "tests" / "children")  # for programs that tests start; not to be imported here
collect_ignore = [CHILDREN]
SOAK_TIMEOUT = 3600.0  # seconds for one test, where the normal limit would cut a long search short


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--profile",
        choices=("fast", "ci", "soak"),
        default="fast",
        help="how thorough the tests are; soak also selects the tests marked soak and takes hours (default: fast)",
    )


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile(str(config.getoption("--profile")))
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # Started in the background of a shell. The programs that tests start would inherit it, and Ctrl-C is what some are tested for.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if len(tempfile.gettempdir()) > 40 and Path("/tmp").is_dir():
        # The path of a Unix socket has 107 octets at most, of which pytest's own folders take 60.
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", "/tmp")
    # Some tests hand their environment on as it is, others give their own path as PYTHONPATH.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (CHILDREN, os.environ.get("PYTHONPATH"))))
    sys.path.append(CHILDREN)


def pytest_report_header(config: pytest.Config) -> str:
    return f"levada profile: {config.getoption('--profile')}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--profile") == "soak":
        for item in items:
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(SOAK_TIMEOUT))
        return
    left_out = [item for item in items if item.get_closest_marker("soak")]
    if left_out:
        items[:] = [item for item in items if item not in set(left_out)]
        config.hook.pytest_deselected(items=left_out)


def pytest_collection_finish() -> None:
    # Modules and test items, 350,000 objects, would be looked at by each collection of each test: a third of the time of all tests.
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    result = yield
    try:
        trio.lowlevel.current_trio_token()
    except RuntimeError:
        return result
    # The timer cut a hanging test out of the middle of trio's loop. Every later test would fail for that alone.
    item.session.shouldstop = f"{item.nodeid} hung inside trio, which cannot run again in this process"
    return result


@pytest.fixture
def thorough(request: pytest.FixtureRequest) -> None:
    """For tests that take long for what they add: skipped in the profile fast."""
    if request.config.getoption("--profile") == "fast":
        pytest.skip("takes long: in the profiles ci and soak only")
