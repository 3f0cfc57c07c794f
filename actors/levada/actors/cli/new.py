"""``levada new``: a small project to start from, with tests that pass."""

from __future__ import annotations

import argparse
import importlib.util
import keyword
import re
import shutil
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Final

from levada.framework import __version__
from levada.framework.errors import ConfigurationError

from . import Subparsers

__all__ = ["add_parser", "run"]

_PROJECTS: Final = files("levada.actors.cli") / "projects"
"""A folder for each kind of project, and `common` for all: the files, as templates. Beside each folder is the text of the next commands."""
COUNTS: Final = "An actor counts log lines. Filebeat or `levada ship` sends them, and RSocket clients get the total."
KEEPS: Final = "An actor keeps log lines in a mailbox, where Spark reads them. Filebeat or `levada ship` sends them."


def add_parser(subparsers: Subparsers) -> None:
    """Describe the arguments."""
    parser = subparsers.add_parser(
        "new",
        help="create a small project: an app, its tests and pyproject.toml",
        description="Create a folder with an app for `levada serve`, its tests, pyproject.toml and, without --spark, a Containerfile. "
        "Prints the next commands.",
        epilog="Exit codes: 0 the project was created; 2 the name cannot be used, or the folder exists.",
    )
    parser.add_argument(
        "name", metavar="NAME", help="name of the folder and of the module: lower-case letters, digits and _"
    )
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--spark", action="store_true", help="an app that keeps the lines for Spark, and a query")
    kind.add_argument("--durable", action="store_true", help="an app whose actors keep their state, alone and on nodes")


def run(args: argparse.Namespace) -> int:
    """Create the project.

    Raises:
        ConfigurationError: the name cannot be used, the folder exists already, or it cannot be written to.
    """
    name: str = args.name
    if keyword.iskeyword(name):
        raise ConfigurationError(
            f"NAME is {name!r}, a word of Python's own, which names no module: choose another name"
        )
    if not re.fullmatch(r"[a-z]([a-z0-9_]*[a-z0-9])?", name):
        raise ConfigurationError(
            f"NAME is {name!r}, wanted the name of a module: lower-case letters, digits and _, with a letter first and no _ at the end"
        )
    if name in ("pytest", "pyspark", "pyarrow") or importlib.util.find_spec(name) is not None:
        raise ConfigurationError(f"a module {name} exists already, and the project would hide it: choose another name")
    extra = "[spark]" if args.spark else "[journal]" if args.durable else ""
    kind = "spark" if args.spark else "durable" if args.durable else "lines"
    kept = "lots" if args.durable else "mailboxes"
    values = {"name": name, "folder": name, "version": __version__, "extra": extra, "kept": kept}
    following = (_PROJECTS / f"{kind}.txt").read_text("utf-8")
    values["about"] = KEEPS if args.spark else COUNTS
    # The first line goes to the folder; its readers are there.
    values["commands"] = Template(following.partition("\n")[2]).substitute(values)
    templates = {
        each.name.removesuffix(".txt"): each.read_text("utf-8")
        for folder in ("common", kind)
        for each in (_PROJECTS / folder).iterdir()
    }
    made = {Template(path).substitute(values): Template(text).substitute(values) for path, text in templates.items()}
    if len(made) < len(templates):
        raise ConfigurationError(f"the project has another {name}.py: choose another name")
    folder = Path(name)
    try:
        folder.mkdir()
        try:
            for path, text in made.items():
                (folder / path).write_text(text, "utf-8")
        except OSError:
            shutil.rmtree(folder, ignore_errors=True)
            raise
    except FileExistsError:
        raise ConfigurationError(
            f"{name} is there. Nothing is overwritten: move it away, or choose another name"
        ) from None
    except OSError as error:
        raise ConfigurationError(f"cannot create {error.filename or name}: {error.strerror}") from error
    print(Template(following).substitute(values), end="")
    return 0
