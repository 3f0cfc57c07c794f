"""What people read when an app fails: one sentence that names the line, and a traceback of their own code alone."""

from __future__ import annotations

import os
import sys
import sysconfig
import traceback
from pathlib import Path
from types import FrameType, TracebackType
from typing import Final

import trio

from levada.framework.errors import ConfigurationError, LevadaError
from levada.framework.text import asyncio_hint, text_of

__all__ = [
    "INSTALLED",
    "AppImportFailed",
    "ended_itself",
    "failure_text",
    "import_failed",
    "own_frames",
    "passed_app",
    "says_enough",
]

INSTALLED: Final = frozenset({"site-packages", "dist-packages"})
"""The names of folders of installed packages."""
_STANDARD: Final = Path(sysconfig.get_path("stdlib"))


class AppImportFailed(ConfigurationError):
    """The module of an app cannot be imported. Its cause is the module's error, whose traceback has `own_frames`."""


def import_failed(module: str, error: BaseException, folder: str) -> AppImportFailed:
    """Make the error for a module that raises while it is imported.

    Args:
        module: its name.
        error: what it raises.
        folder: where it was looked for; empty if that folder is gone.
    """
    own_frames(error, module)
    missing = isinstance(error, ModuleNotFoundError) and str(error) == f"No module named {error.name!r}"
    if missing:
        assert isinstance(error, ModuleNotFoundError)
        where = f"in {folder} or " if folder else ""
        cure = f"install it with {sys.executable} -m pip, or mend the name"
        text = f"no module named {error.name!r} {where}among the installed packages{_place(error, module)}: {cure}"
    elif isinstance(error, SyntaxError):
        text = f"{type(error).__name__}: {error.msg} ({_shown(error.filename or module, error.lineno or 0)})"
    else:
        text = f"{_named(error)}{_place(error, module)}"
    return AppImportFailed(f"module {module} cannot be imported: {text}")


def failure_text(error: BaseException, target: str) -> str:
    """Return the name and the text of an error of an app, and the line of the app; of a group, which says only how many they are, its parts'.

    Args:
        error: what the app raised. An error of levada says what to do without its line.
        target: ``module:name`` of the app.
    """
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(failure_text(each, target) for each in error.exceptions)
    return _named(error) + ("" if isinstance(error, LevadaError | SystemExit) else _place(error, target))


def ended_itself(error: BaseException) -> bool:
    """Return whether an app ended by an error or by its own word (`sys.exit`, Ctrl-C), and nobody cancelled it; of a group, by nothing else."""
    if isinstance(error, BaseExceptionGroup):
        return all(ended_itself(each) for each in error.exceptions)
    return isinstance(error, Exception | SystemExit | KeyboardInterrupt)


def says_enough(error: BaseException) -> bool:
    """Return whether the line of an error says what to do: an error of levada, or an app's own word. Any other needs its traceback."""
    if isinstance(error, BaseExceptionGroup):
        return all(says_enough(each) for each in error.exceptions)
    if isinstance(error, AppImportFailed):
        return error.__cause__ is None or says_enough(error.__cause__)
    return isinstance(error, LevadaError | SystemExit | KeyboardInterrupt)


def passed_app(error: BaseException, target: str) -> bool:
    """Return whether an error came through code of the app ``module:name``."""
    return bool(_own(error, target))


def own_frames(error: BaseException, target: str) -> None:
    """Take what is not an app's own out of the tracebacks of an error, its causes and its parts. If nothing is the app's own, all stays.

    Frames of levada, the standard library and installed packages are not the app's, unless its own module is installed.

    Args:
        error: what the app raised.
        target: ``module:name`` of the app, or its module.
    """
    errors: dict[int, BaseException] = {}
    ahead = [error]
    while ahead:
        each = ahead.pop()
        if id(each) in errors:
            continue
        errors[id(each)] = each
        if isinstance(each.__context__, trio.Cancelled):  # how the rest ended because of it
            each.__context__ = None
        ahead += [other for other in (each.__cause__, each.__context__) if other is not None]
        if isinstance(each, BaseExceptionGroup):
            ahead += each.exceptions
    frames = {key: _own(each, target) for key, each in errors.items()}
    if not any(frames.values()) and not isinstance(error, SyntaxError):  # which has its line itself
        return
    for key, each in errors.items():
        own: TracebackType | None = None
        for frame in reversed(frames[key]):
            own = TracebackType(own, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
        each.__traceback__ = own


def _own(error: BaseException, target: str) -> list[TracebackType]:
    package, frames = target.partition(":")[0].partition(".")[0], []
    found = error.__traceback__
    while found is not None:
        if _is_own(found.tb_frame, package):
            frames.append(found)
        found = found.tb_next
    return frames


def _is_own(frame: FrameType, package: str) -> bool:
    file = frame.f_code.co_filename
    if file.startswith("<"):  # made by attrs, or of the import system
        return False
    name = str(frame.f_globals.get("__name__")).partition(".")[0]
    if name in (package, "levada"):
        return name == package
    path = Path(file)
    return INSTALLED.isdisjoint(path.parts) and not path.is_relative_to(_STANDARD)


def _named(error: BaseException) -> str:
    if isinstance(error, AppImportFailed):
        return str(error)
    parts = (type(error).__name__, text_of(error), asyncio_hint(error))
    return ": ".join(part for part in parts if part)


def _place(error: BaseException, target: str) -> str:
    """Return the last line of the app that an error has passed, in brackets; empty if there is none."""
    frames = _own(error, target)
    if not frames:
        return ""
    last = traceback.extract_tb(frames[-1], limit=1)[0]
    return f" ({_shown(last.filename, last.lineno or 0)})"


def _shown(file: str, line: int) -> str:
    try:
        path = Path(file)
        return f"{path.relative_to(os.getcwd()) if path.is_absolute() else path}:{line}"
    except (ValueError, OSError):  # it is elsewhere, or the current folder was removed
        return f"{file}:{line}"
