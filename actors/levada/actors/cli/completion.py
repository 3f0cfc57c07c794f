"""``levada completion``: print the script with which a shell completes levada's commands and options."""

from __future__ import annotations

import argparse

from levada.framework.errors import ConfigurationError

from . import Subparsers, make_parser

__all__ = ["add_parser", "run"]


def add_parser(subparsers: Subparsers) -> None:
    """Describe the arguments."""
    parser = subparsers.add_parser(
        "completion",
        help="print the completion script of a shell",
        description='Print a script that completes levada\'s commands and options. bash: eval "$(levada completion bash)" in ~/.bashrc. '
        "zsh: levada completion zsh > a folder of $fpath, as _levada.",
    )
    parser.add_argument("shell", choices=("bash", "zsh"))


def run(args: argparse.Namespace) -> int:
    """Print the script."""
    try:
        import shtab
    except ModuleNotFoundError:
        raise ConfigurationError("completion needs shtab: pip install 'levada[cli]'") from None
    print(shtab.complete(make_parser(), shell=args.shell))
    return 0
