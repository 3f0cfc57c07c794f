"""The wheel and the sdist, installed as a user would: contents, commands, and what each extra brings."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LAYERS = ("framework", "transports", "actors")
PUBLIC = sorted(
    set(
        re.findall(
            r"automodule:: (\S+)", "".join(page.read_text("utf-8") for page in (ROOT / "docs/api").glob("*.rst"))
        )
    )
)
"""What the reference shows."""

TEST_KIT = {"levada.framework.testing.fixtures", "levada.framework.testing.stateful"}
WEBSOCKET = "levada.transports.carriers.websocket"  # chosen by URL, and missed by a `ConfigurationError` then

JOURNAL = {
    "levada.actors.durable", "levada.actors.durable.testing", "levada.actors.journal", "levada.actors.spark", "levada.actors.spark.shipping"
}  # fmt: skip
NEEDS: dict[str, set[str]] = {
    "quic": {"levada.transports.quic"},
    "websocket": {"levada.actors.dashboard", WEBSOCKET},  # wsproto brings h11, which the dashboard asks for
    "journal": JOURNAL,
    "postgres": JOURNAL | {"levada.actors.postgres"},
    "spark": JOURNAL | {"levada.actors.spark.query"},
    "connect": JOURNAL | {"levada.actors.spark.query"},
    "cli": set(),
    "prometheus": set(),
    "dashboard": {"levada.actors.dashboard", WEBSOCKET},
    "otel": {"levada.actors.otel"},
    "reload": set(),
}
"""The packages that import with an extra and not without it."""

IMPORT_ALL = """
import importlib, json, sys
failed = {}
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ImportError as error:
        failed[name] = str(error)
print(json.dumps(failed))
"""


def call(*command: str | Path, folder: Path, code: int = 0) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Make the sdist, and the wheel from the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    call(sys.executable, "-m", "build", "--outdir", folder, ROOT, folder=folder)
    return next(folder.glob("*.whl")), next(folder.glob("*.tar.gz"))


def environment(folder: Path, requirement: str) -> Path:
    """Install something alone; return the folder with the programs."""
    call(sys.executable, "-m", "venv", "--without-pip", folder, folder=folder.parent)  # our own pip is there already
    programs = folder / "bin"
    constraints = ("-c", ROOT / "constraints.txt")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", programs / "python")
    call(*pip, "install", "--quiet", *constraints, requirement, folder=folder)
    assert "No broken requirements" in call(*pip, "check", folder=folder)
    return programs


def sources() -> Iterator[tuple[str, Path]]:
    """Find each file that belongs into the wheel, with its name there."""
    for layer in LAYERS:
        for file in [*(ROOT / layer / "levada").rglob("*"), *(ROOT / layer).glob("*.py")]:
            if file.is_file() and "__pycache__" not in file.parts:
                yield file.relative_to(ROOT / layer).as_posix(), file


@pytest.mark.ci
@pytest.mark.timeout(300)
def test_the_core_from_a_wheel(distributions: tuple[Path, Path], tmp_path: Path) -> None:
    wheel, sdist = distributions
    with zipfile.ZipFile(wheel) as archive:
        packed = {name: archive.read(name) for name in archive.namelist() if ".dist-info/" not in name}
    expected = {name: file.read_bytes() for name, file in sources()}
    assert packed.keys() == expected.keys()
    assert packed == expected
    assert {f"levada/{layer}/py.typed" for layer in LAYERS} | {"levada/actors/dashboard/assets/app.js"} <= packed.keys()
    with zipfile.ZipFile(wheel) as archive:
        licences = {name.rpartition("/")[2]: archive.read(name) for name in archive.namelist() if "/licenses/" in name}
    uplot = "actors/levada/actors/dashboard/assets/uplot.LICENSE"
    assert licences == {"LICENSE": (ROOT / "LICENSE").read_bytes(), "uplot.LICENSE": (ROOT / uplot).read_bytes()}
    assert b"Copyright (c) 2022 Leon Sorokin" in licences["uplot.LICENSE"]
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "LICENSE", "constraints.txt", "benchmarks/actors.py", "tests/test_install.py"} <= names

    programs = environment(tmp_path / "core", str(wheel))
    assert call(programs / "levada", "--version", folder=tmp_path) == f"levada {wheel.name.split('-')[1]}\n"
    assert "run an app as a process" in call(programs / "levada", "--help", folder=tmp_path)
    failed = json.loads(call(programs / "python", "-c", IMPORT_ALL, *PUBLIC, folder=tmp_path))
    assert failed.keys() - TEST_KIT == set().union(*NEEDS.values())
    assert [name for name, text in failed.items() if "pip install" not in text] == [WEBSOCKET]
    bench = call(programs / "levada", "bench", "actors", folder=tmp_path, code=2)
    assert re.search(r"needs a source tree .* clone the repository, pip install -e '\.\[dev\]' in it", bench)


@pytest.mark.release
@pytest.mark.timeout(900)
@pytest.mark.parametrize("extra", NEEDS)
def test_each_extra_alone(distributions: tuple[Path, Path], tmp_path: Path, extra: str) -> None:
    programs = environment(tmp_path / extra, f"{distributions[0]}[{extra}]")
    failed = json.loads(call(programs / "python", "-c", IMPORT_ALL, *PUBLIC, folder=tmp_path))
    others = set().union(*NEEDS.values()) - NEEDS[extra]
    assert failed.keys() - TEST_KIT == others
    call(programs / "levada", "--version", folder=tmp_path)


def shown(page: str, pattern: str) -> list[str]:
    """Return the arguments of the command of pip that a text shows."""
    (found,) = set(re.findall(rf"(?m){pattern}", page))
    program, *arguments = shlex.split(found)
    assert program == "pip"
    return arguments


@pytest.mark.release
@pytest.mark.timeout(900)
def test_the_commands_of_the_pages_install_it_where_nothing_is(
    distributions: tuple[Path, Path], tmp_path: Path
) -> None:
    """From a clone, with an extra added later; then from a wheel, as in the two containers."""
    readme, versions, deploy = (
        (ROOT / name).read_text("utf-8")
        for name in ("README.md", "docs/reference/versions.md", "docs/how-to/deploy.md")
    )
    with tarfile.open(distributions[1]) as archive:
        archive.extractall(tmp_path, filter="data")
    (clone,) = tmp_path.iterdir()

    def made(name: str) -> tuple[str | Path, ...]:
        call(sys.executable, "-m", "venv", tmp_path / name, folder=tmp_path)
        return tmp_path / name / "bin" / "python", "-m", "pip", "--disable-pip-version-check"

    def missing(name: str) -> set[str]:
        failed = json.loads(call(tmp_path / name / "bin/python", "-c", IMPORT_ALL, *PUBLIC, folder=tmp_path))
        return set(failed) - TEST_KIT

    one = made("one")
    call(*one, *shown(readme, r"^(pip install \.) "), folder=clone)
    assert "levada.transports.quic" in missing("one")
    call(*one, *shown(versions, r"`(pip install 'levada\[quic\]')`"), folder=tmp_path)
    assert missing("one") == set().union(*NEEDS.values()) - NEEDS["quic"]

    call(*one, *shown(versions, r"`(pip wheel [^`]+)`"), folder=clone)
    call(*made("two"), *shown(deploy, r"^RUN (pip install .*)$"), folder=clone)
    assert missing("two") == set().union(*NEEDS.values()) - NEEDS["quic"] - NEEDS["cli"]

    call(tmp_path / "one/bin/levada", "new", "tally", folder=tmp_path)
    container = (tmp_path / "tally/Containerfile").read_text("utf-8")
    wheel = shown(container, r"(pip wheel .*)$")
    call(*one, *wheel[:-1], clone, folder=tmp_path / "tally")
    call(*made("three"), *shown(container, r"^RUN (pip install .*)$"), folder=tmp_path / "tally")
    assert "levada serve" in call(tmp_path / "three/bin/levada", "serve", "--help", folder=tmp_path)

    new = (
        (ROOT / "README.md")
        .read_text("utf-8")
        .partition("levada new tally\ncd tally\n")[2]
        .partition(" && pytest\n")[0]
    )
    call(*one, *shown(new, r"^(pip install .*)$"), folder=tmp_path / "tally")
    assert "2 passed" in call(tmp_path / "one/bin/pytest", "-q", folder=tmp_path / "tally")


def test_each_extra_is_tested() -> None:
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    extras = re.findall(
        r"^(\w+) = \[", text.partition("[project.optional-dependencies]")[2].partition("\n[")[0], re.MULTILINE
    )
    assert set(extras) - {"all", "dev", "docs"} == NEEDS.keys()
