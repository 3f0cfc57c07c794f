#!/usr/bin/env python3
"""Set up levada in .venv if needed, then run one task.

usage: python3 run.py test [--profile fast|ci|release|soak] [arguments of pytest]
       python3 run.py demo [arguments of the demo]
       python3 run.py check
       python3 run.py docs

test    run the test suite: about 3 minutes; ci takes 12 minutes, release an hour, soak hours
demo    run a log pipeline made of actors; it checks its own result and then ends
check   run ruff, mypy, pyright, import-linter and the build of the documentation side by side, all of them even if one fails
docs    make the site of the documentation in build/docs

Python 3.11 or newer is the only requirement. The first run takes about a minute, later runs start at once.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parent
USAGE = (__doc__ or "").strip()
PYTHON = ".venv/Scripts/python.exe" if sys.platform == "win32" else ".venv/bin/python"
STAMP = ".venv/levada-stamp"
PIP_INSTALL = ["-m", "pip", "install", "--disable-pip-version-check", "-c", "constraints.txt", "-e", ".[dev]"]
DOCS = ["-m", "sphinx", "--quiet", "--fail-on-warning", "--keep-going", "docs", "build/docs"]
TASKS = {"test": ["-m", "pytest", "-n", "auto"], "demo": ["-m", "levada.actors", "demo"], "docs": DOCS}
CHECKS = {
    "ruff check": ["-m", "ruff", "check"],
    "ruff format": ["-m", "ruff", "format", "--check"],
    "mypy": ["-m", "mypy"],
    "pyright": ["-m", "pyright", "--pythonpath", PYTHON],  # else it takes the first python of PATH
    "docs": DOCS,
    "import-linter": ["-c", "from importlinter.cli import lint_imports_command as run; run()", "--no-logo"],
}


class Problem(Exception):
    """A problem that the user can solve; its text says how."""


def main(argv: list[str], root: Path = ROOT) -> int:
    """Run the task that `argv` names and return its exit code."""
    if argv[:1] in (["-h"], ["--help"]):
        print(USAGE)
        return 0
    if sys.version_info < (3, 11):
        return fail(f"levada needs Python 3.11 or newer; this is {sys.version.split()[0]}: run run.py with a newer one")
    if not argv or argv[0] not in {*TASKS, "check"} or (argv[0] == "check" and argv[1:]):
        return fail(f"cannot do {' '.join(argv) or 'nothing'!r}\n\n{USAGE}")
    try:
        set_up(root)
        if argv[0] in ("check", "docs"):
            # Sphinx keeps pages that it would not write again, with links that have become dead, and repeats no warning of a page that it
            # does not read again.
            remove(root / "build/docs")
        if argv[0] == "check":
            return check(root)
        return run(root, [*TASKS[argv[0]], *argv[1:]])
    except (Problem, OSError) as problem:
        return fail(str(problem))
    except KeyboardInterrupt:
        return fail("interrupted; if that was during set-up, the next run repairs it", code=130)


def set_up(root: Path) -> None:
    """Make, repair or update ``.venv`` in `root`, if needed.

    Raises:
        Problem: the set-up failed.
    """
    if not broken(root) and not outdated(root):
        return
    with lock(root):
        # Looked at again: the process that held the lock may have done the work.
        reason = broken(root)
        if not reason and not outdated(root):
            return
        start = time.monotonic()
        if reason:
            say(start, f"making .venv ({reason}) with Python {sys.version.split()[0]}")
            remove(root / ".venv")
            make_venv(root)
        # From here to the last line the stamp is missing, so that an interrupted set-up starts anew.
        (root / STAMP).unlink(missing_ok=True)
        say(start, "installing levada with its tools and extras into .venv" + (" (about a minute)" if reason else ""))
        # pip's progress bars are for people; a log gets only errors.
        quiet = [] if sys.stderr.isatty() else ["--quiet"]
        if call_with_patience([str(root / PYTHON), *PIP_INSTALL, *quiet], root, start):
            raise Problem("pip could not install levada; the reason is above. Solve it and run this again")
        (root / STAMP).write_text("\n".join(fingerprint(root)), encoding="utf-8")
        say(start, "ready")


def call_with_patience(command: list[str], root: Path, start: float, every: float = 10.0) -> int:
    """Run a command that may take a minute, with a word of progress `every` so many seconds. Return its exit code."""
    with subprocess.Popen(command, cwd=root, stdout=sys.stderr) as process:
        try:
            while True:
                try:
                    return process.wait(every)
                except subprocess.TimeoutExpired:
                    say(start, "still installing")
        except BaseException:
            process.wait()  # Ctrl-C reached it as well
            raise


def broken(root: Path) -> str | None:
    """Return why ``.venv`` must be made anew, or None if it works."""
    if not os.path.lexists(root / ".venv"):
        return "there is none"
    if not (root / STAMP).is_file():
        return "its set-up was never finished"
    if installed(root)[0] != fingerprint(root)[0]:
        return "it belongs to another Python or another folder"
    # Finding pip instead of importing it makes this 20 ms.
    probe = [str(root / PYTHON), "-c", "import importlib.util, sys; sys.exit(not importlib.util.find_spec('pip'))"]
    try:
        works = subprocess.call(probe, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) == 0
    except OSError:
        works = False
    return None if works else "its Python does not start or has no pip"


def outdated(root: Path) -> bool:
    """Whether the installed packages differ from the ones asked for now."""
    return installed(root) != fingerprint(root)


def installed(root: Path) -> list[str]:
    """Return the fingerprint of the last finished set-up."""
    return (root / STAMP).read_text(encoding="utf-8", errors="replace").split("\n")


def fingerprint(root: Path) -> list[str]:
    """Return what forces a new ``.venv``, then a hash of the files that it is installed from."""
    digest = hashlib.sha256(repr(PIP_INSTALL).encode())
    for name in ("pyproject.toml", "constraints.txt"):
        digest.update(hashlib.sha256((root / name).read_bytes()).digest())
    return [f"{sys.implementation.cache_tag} {root}", digest.hexdigest()]


def make_venv(root: Path) -> None:
    """Make an empty ``.venv`` with pip.

    Raises:
        Problem: this Python lacks a module for it, or pip was not installed.
    """
    missing = [name for name in ("venv", "ensurepip") if importlib.util.find_spec(name) is None]
    if missing:
        version = f"{sys.version_info[0]}.{sys.version_info[1]}"
        raise Problem(
            f"this Python ({sys.executable}) has no module {' and no '.join(missing)}, which making .venv needs; "
            f"on Debian or Ubuntu: apt install python{version}-venv (or python3-venv)"
        )
    if subprocess.call([sys.executable, "-m", "venv", ".venv"], cwd=root, stdout=sys.stderr):
        raise Problem(f"{sys.executable} -m venv .venv failed; the reason is above")


def remove(path: Path) -> None:
    """Remove a folder, a file or a link, whichever is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def lock(root: Path) -> Iterator[None]:
    """Keep other runs out of the set-up. The operating system frees the lock when the process ends, however it ends."""
    if sys.platform == "win32":  # has no fcntl, so two set-ups at the same moment are possible there
        yield
        return
    import fcntl

    with (root / ".venv.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(time.monotonic(), "another run.py is setting up .venv; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def check(root: Path) -> int:
    """Run all checks side by side, also if one fails; return 1 if one failed."""
    failed = []
    start = time.monotonic()
    with contextlib.ExitStack() as stack:
        runs = []
        for name, command in CHECKS.items():
            said = stack.enter_context(tempfile.TemporaryFile())
            process = subprocess.Popen([str(root / PYTHON), *command], cwd=root, stdout=said, stderr=subprocess.STDOUT)
            stack.enter_context(process)
            stack.callback(process.kill)  # for Ctrl-C; one that has ended does not mind
            runs.append((name, process, said))
        for name, process, said in runs:
            print(f"==> {name}", flush=True)
            code = process.wait()
            said.seek(0)
            print(said.read().decode(errors="replace"), end="")
            if code:
                failed.append(name)
            print(f"{'FAIL' if code else 'ok'}  {name}  {time.monotonic() - start:.1f} s\n", flush=True)
    print(f"failed: {', '.join(failed)}" if failed else "all checks are ok")
    return 1 if failed else 0


def run(root: Path, command: list[str]) -> int:
    """Run `command` with the Python of ``.venv``; return its exit code, unless it replaces this process."""
    # Without its caches Python compiles everything in each process: half a second for a program, 20 s to collect the tests. A folder for
    # them alone (PYTHONPYCACHEPREFIX) would leave out the caches that pip has made, and the first run would take 10 s more.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    if sys.platform != "win32":
        # The task becomes this process, so signals and exit codes need no passing on.
        os.chdir(root)
        os.execv(root / PYTHON, [str(root / PYTHON), *command])
    return subprocess.call([str(root / PYTHON), *command], cwd=root)


def say(start: float, text: str) -> None:
    """Report progress, with the seconds since `start`."""
    print(f"run.py: [{time.monotonic() - start:5.1f} s] {text}", file=sys.stderr, flush=True)


def fail(text: str, code: int = 2) -> int:
    """Report an error; return its exit code."""
    print(f"run.py: {text}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
