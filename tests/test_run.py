"""The set-up script, on projects and environments made for the purpose; nothing here needs the network."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import venv
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "run.py"

# Stands for pip: notes that it was called, and does as the file pip-exit says.
PIP = """
import pathlib, sys
with open("pip-calls", "a") as log:
    log.write(" ".join(sys.argv[1:]) + "\\n")
code = pathlib.Path("pip-exit")
sys.exit(int(code.read_text()) if code.exists() else 0)
"""


def load() -> ModuleType:
    """Return ``run.py`` as a module."""
    spec = importlib.util.spec_from_file_location("run", SCRIPT)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """``run.py`` as a module whose environments hold the stand-in for pip, which saves seconds per test."""
    module = load()
    monkeypatch.setattr(module, "make_venv", make_venv)
    return module


def make_venv(root: Path) -> None:
    venv.create(root / ".venv", with_pip=False, symlinks=True)
    pip = site_packages(root) / "pip"
    pip.mkdir()
    (pip / "__init__.py").touch()
    (pip / "__main__.py").write_text(PIP)


def site_packages(root: Path) -> Path:
    return next((root / ".venv" / "lib").glob("python*")) / "site-packages"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    (tmp_path / "constraints.txt").write_text("trio==0.35.0\n")
    return tmp_path


def pip_calls(root: Path) -> int:
    log = root / "pip-calls"
    return len(log.read_text().splitlines()) if log.exists() else 0


def test_sets_up_once(run: ModuleType, root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run.set_up(root)
    assert "making .venv (there is none)" in capfd.readouterr().err
    run.set_up(root)
    assert capfd.readouterr() == ("", "")
    assert (
        root / "pip-calls"
    ).read_text() == "install --disable-pip-version-check -c constraints.txt -e .[dev] --quiet\n"


@pytest.mark.ci
@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
def test_a_changed_file_updates_in_place(
    run: ModuleType, root: Path, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    run.set_up(root)
    (root / ".venv" / "kept").touch()
    (root / name).write_text("# other\n")
    capfd.readouterr()
    run.set_up(root)
    assert pip_calls(root) == 2
    assert (root / ".venv" / "kept").exists()
    assert "making" not in capfd.readouterr().err
    assert not run.outdated(root)


@pytest.mark.ci
def test_a_changed_recipe_updates_in_place(run: ModuleType, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run.set_up(root)
    monkeypatch.setattr(run, "PIP_INSTALL", [*run.PIP_INSTALL, "--no-deps"])
    run.set_up(root)
    assert pip_calls(root) == 2


def break_interpreter(root: Path) -> None:
    python = root / ".venv" / "bin" / "python"
    python.unlink()
    python.write_text("not a program")
    python.chmod(0o755)


def remove_interpreter(root: Path) -> None:
    (root / ".venv" / "bin" / "python").unlink()


def crash_interpreter(root: Path) -> None:
    python = root / ".venv" / "bin" / "python"
    python.unlink()
    python.write_text("#!/bin/sh\nexit 127\n")
    python.chmod(0o755)


def remove_pip(root: Path) -> None:
    (site_packages(root) / "pip").rename(site_packages(root) / "pop")


def remove_stamp(root: Path) -> None:
    (root / ".venv" / "levada-stamp").unlink()


def garble_stamp(root: Path) -> None:
    (root / ".venv" / "levada-stamp").write_bytes(b"\xff\x00")


def other_python(root: Path) -> None:
    stamp = root / ".venv" / "levada-stamp"
    stamp.write_text(stamp.read_text().replace("cpython-3", "cpython-2"))


def put_a_file(root: Path) -> None:
    (root / ".venv").rename(root / "old")
    (root / ".venv").touch()


def put_a_dangling_link(root: Path) -> None:
    (root / ".venv").rename(root / "old")
    (root / ".venv").symlink_to(root / "nowhere")


@pytest.mark.ci
@pytest.mark.skipif(sys.platform == "win32", reason="breaks what is in bin/")
@pytest.mark.parametrize(
    "damage",
    [
        break_interpreter,
        remove_interpreter,
        crash_interpreter,
        remove_pip,
        remove_stamp,
        garble_stamp,
        other_python,
        put_a_file,
        put_a_dangling_link,
    ],
)
def test_a_broken_environment_is_made_anew(run: ModuleType, root: Path, damage: object) -> None:
    run.set_up(root)
    assert callable(damage)
    damage(root)
    assert run.broken(root)
    run.set_up(root)
    assert run.broken(root) is None
    assert not run.outdated(root)
    assert pip_calls(root) == 2


@pytest.mark.ci
def test_a_moved_checkout_is_set_up_anew(run: ModuleType, root: Path) -> None:
    """The scripts and the editable install in ``.venv`` point to the old place."""
    (root / "a").mkdir()
    for name in ("pyproject.toml", "constraints.txt"):
        (root / name).rename(root / "a" / name)
    run.set_up(root / "a")
    moved = (root / "a").rename(root / "b")
    assert "another folder" in run.broken(moved)


@pytest.mark.ci
def test_a_failed_install_is_reported_and_started_anew(
    run: ModuleType, root: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (root / "pip-exit").write_text("1")
    assert run.main(["test"], root) == 2
    assert "run.py: pip could not install levada" in capfd.readouterr().err
    assert "never finished" in run.broken(root)
    (root / "pip-exit").unlink()
    run.set_up(root)
    assert run.broken(root) is None


@pytest.mark.ci
def test_ctrl_c_during_an_update_is_started_anew(run: ModuleType, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: object, **kwargs: object) -> int:
        raise KeyboardInterrupt

    run.set_up(root)
    (root / "pyproject.toml").write_text("# other\n")
    with monkeypatch.context() as patch:
        patch.setattr(run, "call_with_patience", interrupt)
        assert run.main(["test"], root) == 130
    assert "never finished" in run.broken(root)
    run.set_up(root)
    assert not run.outdated(root)


@pytest.mark.ci
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no FIFOs")
def test_a_long_installation_says_that_it_goes_on(run: ModuleType, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(root / "gate")
    said: list[str] = []

    def say(start: float, text: str) -> None:
        if not said:
            (root / "gate").write_text("go on")
        said.append(text)

    monkeypatch.setattr(run, "say", say)
    waits = [sys.executable, "-c", "import sys; open('gate').read(); sys.exit(3)"]
    assert run.call_with_patience(waits, root, 0.0, every=0.01) == 3
    assert set(said) == {"still installing"}


@pytest.mark.ci
def test_two_at_once_install_once(run: ModuleType, root: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(run.set_up, [root] * 4))
    assert pip_calls(root) == 1


@pytest.mark.parametrize("module", ["venv", "ensurepip"])
def test_says_what_to_install_where_venv_is_missing(
    module: str, root: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    script = load()
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == module else find_spec(name))
    assert script.main(["demo"], root) == 2
    error = capfd.readouterr().err
    assert f"has no module {module}" in error
    assert f"apt install python3.{sys.version_info[1]}-venv (or python3-venv)" in error


@pytest.mark.timeout(180)
@pytest.mark.release
def test_a_real_environment_has_pip(root: Path) -> None:
    """The one test that pays for `ensurepip`, about three seconds."""
    load().make_venv(root)
    subprocess.run([root / ".venv/bin/python", "-m", "pip", "--version"], check=True, stdout=subprocess.DEVNULL)


@pytest.mark.ci
def test_every_check_runs_and_one_failure_counts(
    run: ModuleType, root: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run.set_up(root)
    checks = {"first": ["-c", "raise SystemExit(3)"], "second": ["-c", "print('seen')"]}
    monkeypatch.setattr(run, "CHECKS", checks)
    assert run.main(["check"], root) == 1
    lines = [line.split("  ")[:2] for line in capfd.readouterr().out.splitlines() if line]
    assert lines == [["==> first"], ["FAIL", "first"], ["==> second"], ["seen"], ["ok", "second"], ["failed: first"]]
    monkeypatch.setattr(run, "CHECKS", {"second": checks["second"]})
    assert run.main(["check"], root) == 0


@pytest.mark.ci
@pytest.mark.parametrize("task", ["check", "docs"])
def test_the_documentation_is_built_anew(run: ModuleType, root: Path, task: str) -> None:
    """Pages of an earlier build have links that lead nowhere now."""
    run.set_up(root)
    (root / "build/docs/_modules").mkdir(parents=True)
    (root / "build/docs/_modules/gone.html").touch()
    code = (
        "import pathlib, sys, run\n"
        "run.TASKS['docs'] = ['-c', 'import os, sys; sys.exit(os.path.exists(\"build/docs\"))']\n"
        "run.CHECKS = {'docs': run.TASKS['docs']}\n"
        "sys.exit(run.main([sys.argv[1]], pathlib.Path(sys.argv[2])))"
    )
    done = subprocess.run([sys.executable, "-c", code, task, root], cwd=SCRIPT.parent, check=False)
    assert done.returncode == 0


def test_the_exit_code_of_a_task_passes_through(run: ModuleType, root: Path) -> None:
    run.set_up(root)
    (root / "task.py").write_text("import os, sys; print(os.getcwd(), *sys.argv[1:]); sys.exit(7)")
    code = "import pathlib, sys, run; run.run(pathlib.Path(sys.argv[1]), ['task.py', '-k', 'x'])"
    done = subprocess.run(
        [sys.executable, "-c", code, root], cwd=SCRIPT.parent, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (7, f"{root.resolve()} -k x\n")


@pytest.mark.ci
@pytest.mark.parametrize("environment", [{}, {"PYTHONDONTWRITEBYTECODE": "1"}])
def test_bytecode_is_kept(run: ModuleType, root: Path, environment: dict[str, str]) -> None:
    """To compile everything anew takes most of the time of a short program."""
    run.set_up(root)
    (root / "task.py").write_text("import sys; print(sys.dont_write_bytecode, sys.pycache_prefix)")
    code = "import pathlib, sys, run; run.run(pathlib.Path(sys.argv[1]), ['task.py'])"
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [sys.executable, "-c", code, root],
        cwd=SCRIPT.parent,
        env=clean | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "False None\n"


@pytest.mark.parametrize("argv", [[], ["dance"], ["check", "mypy"], ["--profile", "ci"]])
def test_wrong_usage(argv: list[str]) -> None:
    done = subprocess.run([sys.executable, SCRIPT, *argv], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("run.py: cannot do ")
    assert "usage: python3 run.py test" in done.stderr


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help(flag: str) -> None:
    done = subprocess.run([sys.executable, SCRIPT, flag], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("Set up levada")
    assert done.stderr == ""


def test_an_old_python_is_told_so(
    run: ModuleType, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run.sys, "version_info", (3, 10, 2))
    assert run.main(["test"]) == 2
    assert "needs Python 3.11 or newer" in capfd.readouterr().err
