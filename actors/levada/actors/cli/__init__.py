"""The command ``levada``, also ``python -m levada.actors``.

Each subcommand is a module of this package, named like the subcommand and listed in `COMMANDS`, with two functions:

* ``add_parser(subparsers)`` describes its arguments by ``subparsers.add_parser("name", help=..., description=...)``;
* ``run(args)`` does the work and returns the exit code.

Only the module of the chosen subcommand is imported; ``levada --help`` imports all of them.
So a module imports what needs an extra inside `run`, and the help works without that extra.

Exit codes: 0 for success, 1 if the work was done but found something wrong, 2 for a mistake of the user,
130 after Ctrl-C, with one line on stderr, also during imports: so nothing large is imported here.
A `levada.framework.errors.LevadaError` is a mistake of the user or a fact of the outside world: one line on stderr.
Any other exception is a bug of levada and shows its traceback.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol, cast

__all__ = ["COMMANDS", "Command", "Subparsers", "main", "make_parser"]

if TYPE_CHECKING:
    _SubParsersAction = argparse._SubParsersAction[argparse.ArgumentParser]
else:
    _SubParsersAction = argparse._SubParsersAction


class Subparsers(_SubParsersAction):
    """Where the subcommands add their parsers."""

    words: tuple[str, ...] = ()
    """The arguments after the subcommand, unparsed: protocols of other packages are loaded only if they are among them."""


COMMANDS: tuple[str, ...] = (
    "demo", "serve", "call", "interop", "explain", "ship", "receive", "new", "bench", "top", "nodes", "journal",
    "token", "completion",
)  # fmt: skip
"""Names of the subcommands, which are also their modules' names, in the order of ``levada --help``."""


class Command(Protocol):
    """What the module of a subcommand offers."""

    def add_parser(self, subparsers: Subparsers) -> None:
        """Add the subcommand's own parser, named like the module, to `subparsers`."""
        ...

    def run(self, args: argparse.Namespace) -> int:
        """Do the work.

        Returns:
            The exit code.

        Raises:
            LevadaError: shown as one line on stderr, exit code 2; also from within an exception group.
        """
        ...


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand.

    Args:
        argv: the arguments after the program's name; ``None`` takes the process's arguments.

    Returns:
        The exit code.

    Raises:
        SystemExit: after ``--help`` and ``--version`` (code 0), and for arguments that make no sense (code 2).
    """
    try:
        code = _main(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:
        code = 130  # and nothing more is imported
    except BaseException as error:
        from levada.framework.errors import LevadaError

        # trio's nurseries wrap what ends them in groups, Ctrl-C and our own errors alike.
        leaves = list(_leaves(error))
        if not all(isinstance(leaf, LevadaError | KeyboardInterrupt) for leaf in leaves):
            raise
        for leaf in leaves:
            if isinstance(leaf, LevadaError):
                # The first line says what; Spark's errors go on about where.
                text = str(leaf).strip().partition("\n")[0]
                print(f"levada: {text or type(leaf).__name__}", file=sys.stderr)
        code = 130 if any(isinstance(leaf, KeyboardInterrupt) for leaf in leaves) else 2
    if code == 130:
        print("levada: interrupted", file=sys.stderr)
    return code


def _main(argv: Sequence[str]) -> int:
    names = argv[:1] if argv and argv[0] in COMMANDS else COMMANDS
    parser = make_parser(names, argv[1:])
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help(sys.stderr)
        return 2
    return _command(args.command).run(args)


def _command(name: str) -> Command:
    return cast("Command", importlib.import_module(f"{__name__}.{name}"))


def make_parser(names: Iterable[str] = COMMANDS, words: Sequence[str] = ()) -> argparse.ArgumentParser:
    """Make the parser of these subcommands.

    Args:
        names: of the subcommands.
        words: the arguments after the subcommand.
    """
    import importlib.metadata

    parser = argparse.ArgumentParser(
        prog="levada",
        description="Actors, typed channels, wire protocols and Spark, from the command line.",
        epilog="`levada COMMAND --help` describes a command in full.",
    )
    try:
        version = importlib.metadata.version("levada")
    except importlib.metadata.PackageNotFoundError:
        version = "from a source tree that is not installed"
    parser.add_argument("--version", action="version", version=f"levada {version}")
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
