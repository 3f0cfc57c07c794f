"""``levada serve --reload``: find out that the files of an app have changed, and import the app again."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Final

import trio

from levada.actors.app_failures import INSTALLED
from levada.actors.apps import find
from levada.framework.errors import ConfigurationError

__all__ = ["CodeChanges", "check_installed", "import_again", "is_code", "project_of", "shown"]

_STEP: Final = 100
"""Milliseconds without another change after which changes count as one."""
_SHOWN: Final = 3
"""Most names of changed files in a line."""


def check_installed() -> None:
    """Check that the package that watches files is installed.

    Raises:
        ConfigurationError: it is missing.
    """
    if importlib.util.find_spec("watchfiles") is None:
        raise ConfigurationError("--reload needs watchfiles: pip install 'levada[reload]'")


def project_of(target: str) -> Path:
    """Return the folder that has the top module of an app, which has been imported.

    Args:
        target: ``module:name``.

    Raises:
        ConfigurationError: the module comes from no file, or is installed among other packages.
    """
    name = target.partition(":")[0]
    file = getattr(sys.modules[name], "__file__", None)
    if file is None:
        raise ConfigurationError(f"--reload watches files, and module {name} has none")
    path = Path(file).resolve()
    if not INSTALLED.isdisjoint(path.parts):
        raise ConfigurationError(
            f"--reload watches the folder of a project, and module {name} is installed in {path.parent}: run it in its project, or install "
            "it with pip install --editable"
        )
    return path.parents[name.count(".") + (path.stem == "__init__")]


def is_code(folder: Path, path: Path) -> bool:
    """Return whether a path is a Python file of a project: neither hidden nor installed below it."""
    if path.suffix != ".py" or not path.is_relative_to(folder):
        return False
    parts = path.relative_to(folder).parts
    return INSTALLED.isdisjoint(parts) and not any(part.startswith(".") or part == "__pycache__" for part in parts)


class CodeChanges:
    """Collects the changed files of a project.

    Args:
        folder: of the project.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._paths: set[Path] = set()
        self._some = trio.Event()

    async def watch(self) -> None:
        """Watch the folder until cancelled.

        Raises:
            ConfigurationError: the folder cannot be watched.
        """
        ended = threading.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_set_at_end, ended)
            try:
                await trio.to_thread.run_sync(self._watch, ended)
            except OSError as error:
                raise ConfigurationError(f"cannot watch {self.folder} (--reload): {error}") from error

    def _watch(self, ended: threading.Event) -> None:
        from watchfiles import watch

        def wanted(_: object, path: str) -> bool:
            return is_code(self.folder, Path(path))

        for changes in watch(self.folder, watch_filter=wanted, step=_STEP, stop_event=ended):
            trio.from_thread.run_sync(self._take, [Path(path) for _, path in changes])

    def _take(self, paths: Iterable[Path]) -> None:
        self._paths.update(paths)
        self._some.set()

    async def next(self) -> list[Path]:
        """Wait for changes; return the paths of all files that have changed since the last call, relative to the folder.

        Cancellation:
            no change is lost.
        """
        await self._some.wait()
        self._some = trio.Event()
        changed, self._paths = sorted(path.relative_to(self.folder) for path in self._paths), set()
        return changed


async def _set_at_end(event: threading.Event) -> None:
    try:
        await trio.sleep_forever()
    finally:
        event.set()


def import_again(target: str, folder: Path) -> None:
    """Import an app again, with all modules of its project. If that fails, the modules are as they were.

    Args:
        target: ``module:name``.
        folder: of the project.

    Raises:
        ConfigurationError: as `find`.
    """
    before = {name: module for name, module in sys.modules.items() if _is_of(folder, name, module)}
    for name in before:
        del sys.modules[name]
    importlib.invalidate_caches()
    try:
        find(target)
    except BaseException:
        sys.modules.update(before)
        raise


def _is_of(folder: Path, name: str, module: ModuleType) -> bool:
    if name == "__main__" or name.partition(".")[0] == "levada":  # when the project is a clone of levada
        return False
    file = getattr(module, "__file__", None)
    return isinstance(file, str) and is_code(folder, Path(file).resolve())


def shown(paths: list[Path]) -> str:
    """Return the names of changed files for a line, of many only some."""
    names = ", ".join(path.as_posix() for path in paths[:_SHOWN])
    more = len(paths) - _SHOWN
    return f"{names} and {more} more" if more > 0 else names
