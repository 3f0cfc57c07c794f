"""Tests pass with the oldest versions that pyproject.toml allows: of the runtime's dependencies and of Spark; and on every Python that is here."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
CORE = ("trio", "attrs", "msgpack")
TOOLS = ("pytest", "pytest-trio", "pytest-timeout", "hypothesis")
TESTS_NEED = "cryptography"
"""What the tests of the actors make certificates with."""
BRIDGE = ("test_asks_spark", "test_query", "test_sink", "test_source")
"""Tests of Spark itself: each starts a session."""


def floors(extra: str | None = None) -> dict[str, str]:
    """Return the oldest version of each dependency."""
    dependencies = PROJECT["dependencies"] if extra is None else PROJECT["optional-dependencies"][extra]
    found = [re.match(r"([\w-]+)(?:\[\w+\])?>=([\d.]+)", dependency) for dependency in dependencies]
    return {floor[1]: floor[2] for floor in found if floor is not None}


def oldest(extra: str | None = None) -> list[str]:
    return [f"{name}=={version}.*" for name, version in floors(extra).items()]


def test_each_dependency_has_a_floor() -> None:
    assert sorted(floors()) == sorted(CORE)


def test_the_page_of_versions_has_the_floors() -> None:
    page = (ROOT / "docs/reference/versions.md").read_text("utf-8")
    rows = dict(re.findall(r"^\| (\w+) \| from ([\d.]+) \|", page, re.MULTILINE))
    spark = {"PySpark": floors("spark")["pyspark"]}
    assert rows == floors() | spark
    assert f"| Python | from {PROJECT['requires-python'].removeprefix('>=')} to 3.14 |" in page


def python_of(minor: int) -> str | None:
    """Find Python 3.`minor` on the PATH or among those of pyenv; what stands on the PATH may be pyenv's empty shim."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    found = [shutil.which(f"python3.{minor}"), *map(str, pyenv.glob(f"versions/3.{minor}.*/bin/python"))]
    show = "import sys; print(sys.version_info[:2])"
    for python in filter(None, found):
        done = subprocess.run([python, "-c", show], capture_output=True, text=True, check=False)
        if done.stdout.strip() == str((3, minor)):
            return python
    return None


def run_tests(folder: Path, python: str, *packages: str, tests: tuple[str, ...] = ("tests/framework",)) -> None:
    """Run tests in an environment with just these packages and the test tools."""
    subprocess.run([python, "-m", "venv", str(folder)], check=True)
    python = str(folder / "bin" / "python")
    quiet = ["--quiet", "--disable-pip-version-check"]
    subprocess.run([python, "-m", "pip", "install", *quiet, *packages, *TOOLS], check=True)
    sources = [str(ROOT / name) for name in ("framework", "transports", "actors")]
    done = subprocess.run(
        [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sources), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert re.search(r"\d+ passed", done.stdout)


@pytest.mark.release
@pytest.mark.timeout(900)
def test_the_runtime_on_the_oldest_versions(tmp_path: Path) -> None:
    run_tests(tmp_path / "venv", sys.executable, *oldest())


@pytest.mark.release
@pytest.mark.timeout(900)
def test_traces_and_metrics_on_the_oldest_versions(tmp_path: Path) -> None:
    sdk = f"opentelemetry-sdk=={floors('otel')['opentelemetry-api']}.*"
    packages = [*oldest(), *oldest("otel"), *oldest("prometheus"), sdk, TESTS_NEED]
    tests = ("tests/actors/test_otel.py", "tests/actors/metrics")
    run_tests(tmp_path / "venv", sys.executable, *packages, tests=tests)


@pytest.mark.release
@pytest.mark.timeout(900)
def test_reloads_on_the_oldest_versions(tmp_path: Path) -> None:
    packages = [*oldest(), *oldest("reload"), TESTS_NEED]
    run_tests(tmp_path / "venv", sys.executable, *packages, tests=("tests/cli/test_reloading.py",))


@pytest.mark.release
@pytest.mark.timeout(3600)
def test_the_bridge_on_the_oldest_versions(tmp_path: Path) -> None:
    """The newest ones are in constraints.txt, where all other tests run."""
    tests = ("--profile", "ci", *(f"tests/actors/spark/{name}.py" for name in BRIDGE))
    packages = [*oldest("spark"), *oldest("journal"), *CORE, TESTS_NEED]
    run_tests(tmp_path / "venv", sys.executable, *packages, tests=tests)


@pytest.mark.release
@pytest.mark.timeout(900)
def test_the_oldest_type_checkers_see_the_same_in_code_of_users(tmp_path: Path) -> None:
    dev = floors("dev")
    checkers = [f"mypy=={dev['mypy']}.*", f"pyright[nodejs]=={dev['pyright']}.*"]
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    python = str(tmp_path / "venv" / "bin" / "python")
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *checkers], check=True)
    code = shutil.copy(ROOT / "tests" / "typing" / "user_code.py", tmp_path)
    for tool in (["mypy", "--strict", "--python-executable"], ["pyright", "--pythonpath"]):
        done = subprocess.run(
            [python, "-m", *tool, sys.executable, code], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout[-5000:]


@pytest.mark.release
@pytest.mark.timeout(900)
@pytest.mark.parametrize("minor", [11, 12, 13, 14])
def test_the_runtime_on_every_python(tmp_path: Path, minor: int) -> None:
    if sys.version_info[:2] == (3, minor):
        pytest.skip("that is the Python of this run")
    python = python_of(minor)
    if python is None:
        pytest.skip(f"there is no Python 3.{minor} on this machine")
    run_tests(tmp_path / "venv", python, *CORE, "-c", str(ROOT / "constraints.txt"))


ELSEWHERE = """
import importlib, os, signal, socket, sys
import trio
from levada.actors.interop import certificates  # brings cryptography

pair, unix = socket.socketpair, socket.AF_UNIX
socket.socketpair = lambda family=unix, *more: pair(family, *more)  # trio's own
for module, names in {
    os: "getuid geteuid getgid fork register_at_fork sched_getaffinity sched_setaffinity killpg nice fchmod pwritev O_CLOEXEC O_NONBLOCK O_DIRECTORY",
    socket: "AF_UNIX SO_REUSEPORT SO_PEERCRED",
    signal: "SIGHUP SIGUSR1 SIGUSR2 SIGKILL SIGSTOP SIGCONT",
}.items():
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)
for name in ("fcntl", "termios", "resource", "pwd", "grp"):
    sys.modules[name] = None
folder, *public = sys.argv[1:]
for name in public:
    importlib.import_module(name)

from levada.actors import cli
from levada.actors.journal import JournalConfig, Store

import pyarrow as pa

with Store.open(folder, pa.schema([("word", pa.string())]), config=JournalConfig(partitions=1)) as store:
    pass
for command in ("journal ls " + folder, "top --once", "nodes ls", "serve json:dumps --nodes 2"):
    print(cli.main(command.split()), flush=True)
"""


@pytest.mark.ci
def test_where_posix_has_more_than_a_system_commands_say_so(tmp_path: Path) -> None:
    """Names of modules that Windows has not are taken away; what needs none of them works, and the rest says what it needs."""
    pytest.importorskip("pyarrow")
    public = sorted(
        {
            *re.findall(
                r"automodule:: (\S+)", "".join(page.read_text("utf-8") for page in (ROOT / "docs/api").glob("*.rst"))
            )
        }
    )
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, str(tmp_path / "words"), *public],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if line.isdecimal()] == ["0", "2", "2", "2"]
    assert done.stderr.splitlines() == [
        "levada: servers are found through Unix sockets, which this system does not have",
        "levada: servers are found through Unix sockets, which this system does not have",
        "levada: --nodes and --reload need Unix sockets, which this system does not have",
    ]
