"""The command ``levada``, also ``python -m levada.actors``.

Each subcommand is a module of this package, named like the subcommand and listed in `COMMANDS`, with two functions:

* ``add_parser(subparsers)`` describes its arguments with ``subparsers.add_parser("name", help=..., description=...)``;
* ``run(args)`` does the work and returns the exit code.

Only the module of the chosen subcommand is imported; ``levada --help`` imports all of them. The help must work without extras, so
`run` imports them, not the module.

Exit codes: 0 for success, 1 if the command ran and found something wrong, 2 for a mistake of the user or a peer that cannot be reached,
130 after Ctrl-C.
A `levada.framework.errors.LevadaError` prints one line on stderr. So does Ctrl-C, even during imports, so this module imports nothing large.
If the reader of the output leaves, as ``head`` does, the command ends with code 0. A full disk prints one line, with exit code 2.
Any other exception is a bug, of levada or of the program that it runs, and prints its traceback.
"""

from __future__ import annotations

import argparse
import difflib
import errno
import importlib
import io
import os
import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

from levada.actors.descriptors import raise_descriptor_limit

__all__ = ["COMMANDS", "Command", "Subparsers", "main", "make_parser", "needs_traceback", "report"]

if TYPE_CHECKING:
    _SubParsersAction = argparse._SubParsersAction[argparse.ArgumentParser]
else:
    _SubParsersAction = argparse._SubParsersAction


class _Parser(argparse.ArgumentParser):
    """A parser of a command, which refuses unknown arguments itself: the usage above the error is then the command's own."""

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride]  # of three overloads, this is the one that argparse calls
        self, args: Any = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}{self._hint(unknown)}")
        return found, unknown

    def _hint(self, unknown: Sequence[str]) -> str:
        """Return the option that the first unknown one resembles, for the error."""
        wrong = next((word.partition("=")[0] for word in unknown if word.startswith("--")), "")
        near = difflib.get_close_matches(wrong, self._option_string_actions, 1, 0.75)
        return f"; is it {near[0]}?" if near else f"; `{self.prog} --help` lists the options" if wrong else ""

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            near = difflib.get_close_matches(str(value), map(str, action.choices or ()), 1)
            if near and not error.message.endswith("?"):
                error.message += f"; is it {near[0]!r}?"
            raise


class Subparsers(_SubParsersAction):
    """Where the subcommands add their parsers."""

    words: tuple[str, ...] = ()
    """The arguments after the subcommand, unparsed. A protocol of another package is loaded only if its scheme is among them."""


COMMANDS: tuple[str, ...] = (
    "demo", "serve", "call", "interop", "explain", "ship", "receive", "new", "simulate", "bench", "top", "nodes",
    "journal", "token", "completion", "help",
)  # fmt: skip
"""The subcommands in the order of ``levada --help``. Each name is also the name of a module."""


class Command(Protocol):
    """The interface of a subcommand's module."""

    def add_parser(self, subparsers: Subparsers) -> None:
        """Add a parser, named like the module, to `subparsers`."""
        ...

    def run(self, args: argparse.Namespace) -> int:
        """Run the subcommand and return the exit code.

        Raises:
            LevadaError: printed as one line on stderr, with exit code 2, even if it is inside an exception group.
        """
        ...


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand.

    Args:
        argv: the arguments after the program's name; ``None``: the process's own.

    Returns:
        The exit code.

    Raises:
        SystemExit: after ``--help`` and ``--version`` (code 0), and for invalid arguments (code 2).
    """
    _complete_streams()
    try:
        try:
            code = _main(sys.argv[1:] if argv is None else argv)
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        code = 130  # without further imports
    except BaseException as error:
        reported = report(error)
        if reported is None:
            raise
        code = reported
    if code == 130:
        print("levada: interrupted", file=sys.stderr)
    return code


def _complete_streams() -> None:
    """Replace standard streams that are closed (the shell's ``>&-``), and let the output show every character in any encoding."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - for the life of the process
    # Python sets surrogateescape in the C locale, where the encoding is ASCII.
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in ("strict", "surrogateescape"):
        sys.stdout.reconfigure(errors="backslashreplace")


def _is_full(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def needs_traceback(error: BaseException) -> bool:
    """Return whether an error, or one of a group, says too little without its traceback."""
    from levada.framework.errors import LevadaError

    known = LevadaError | KeyboardInterrupt | BrokenPipeError | SystemExit
    return not all(isinstance(leaf, known) or _is_full(leaf) for leaf in _leaves(error))


def report(error: BaseException) -> int | None:
    """Print one line for each error, and return the exit code; return None for a bug, which has a traceback.

    Above the line for an app that cannot be imported is the traceback of its own code.
    """
    from levada.actors.app_failures import AppImportFailed
    from levada.framework.errors import LevadaError

    # A trio nursery wraps errors, Ctrl-C, and an app's sys.exit, in groups. A SystemExit alone is argparse's.
    if isinstance(error, SystemExit) or needs_traceback(error):
        return None
    leaves = list(_leaves(error))
    errors = [leaf for leaf in leaves if isinstance(leaf, LevadaError) or _is_full(leaf)]
    exits = [leaf.code for leaf in leaves if isinstance(leaf, SystemExit)]
    for code in exits:
        if code is not None and not isinstance(code, int):
            print(code, file=sys.stderr)  # as Python does
    for each in errors:
        if isinstance(each, AppImportFailed):
            traceback.print_exception(each.__cause__)
        text = str(each).partition("\n")[0]  # the errors of a Spark query have more lines
        print(f"levada: {text or type(each).__name__}", file=sys.stderr)
    if any(isinstance(leaf, BrokenPipeError) or _is_full(leaf) for leaf in leaves):
        # The interpreter flushes the output once more when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if any(isinstance(leaf, KeyboardInterrupt) for leaf in leaves):
        return 130
    if errors:
        return 2
    return next((code if isinstance(code, int) else 1 for code in exits if code is not None), 0)


def _main(argv: Sequence[str]) -> int:
    names = argv[:1] if argv and argv[0] in COMMANDS else COMMANDS
    parser = make_parser(names, argv[1:])
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help(sys.stderr)
        return 2
    raise_descriptor_limit()
    return _command(args.command).run(args)


def _command(name: str) -> Command:
    return cast("Command", importlib.import_module(f"{__name__}.{name}"))


def make_parser(names: Iterable[str] = COMMANDS, words: Sequence[str] = ()) -> argparse.ArgumentParser:
    """Make a parser.

    Args:
        names: the subcommands that it knows.
        words: the arguments after the subcommand.
    """
    from levada.framework import __version__  # not above: it imports trio

    parser = _Parser(
        prog="levada",
        description="Actors, typed channels, wire protocols and Spark, from the command line.",
        epilog="`levada COMMAND --help` describes a command in full.",
    )
    parser.add_argument("--version", action="version", version=f"levada {__version__}")
    subparsers = parser.add_subparsers(action=Subparsers, title="commands", dest="command", metavar="COMMAND")
    assert isinstance(subparsers, Subparsers)
    subparsers.words = tuple(words)
    for name in names:
        _command(name).add_parser(subparsers)
    return parser


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error
