"""``levada new``: a small project to start from, with tests that pass."""

from __future__ import annotations

import argparse
import importlib.util
import keyword
import re
import shutil
from pathlib import Path
from string import Template
from typing import Final

from levada.framework import __version__
from levada.framework.errors import ConfigurationError

from . import Subparsers
from .durable_project import CONTAINER_HEAD, DURABLE_FILES, DURABLE_NEXT

__all__ = ["add_parser", "run"]

FILES: Final = {
    "$name.py": '''\
"""An actor that counts log lines: Filebeat or `levada ship` sends them, and RSocket clients get the total."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator

from levada.actors import lumberjack, rsocket
from levada.framework import Actor, ActorSystem, Asks, handles, message

HOST = os.environ.get("HOST", "127.0.0.1")
LOGS = f"lumberjack://{HOST}:5044"
DOOR = f"rsocket+tcp://{HOST}:7000"


@message
class Total(Asks[int]):
    """How many lines have arrived?"""


class Lines(Actor[lumberjack.Unit | Total]):
    total: int = 0

    @handles
    def take(self, m: lumberjack.Unit) -> None:
        # When this returns, the writer learns that these events are safe.
        self.total += len(m.events)

    @handles
    def tell_total(self, m: Total) -> int:
        return self.total


async def app(
    system: ActorSystem, logs: str = LOGS, door: str = DOOR
) -> AsyncIterator[tuple[lumberjack.Reader, rsocket.Listener]]:
    """The app of `levada serve $name:app`. The code after `yield` runs at the end."""
    lines = system.spawn(Lines, name="lines")

    async def answer(request: rsocket.Request) -> bytes:
        return str(await lines.ask(Total())).encode()

    async with lumberjack.serve(system, logs, lines) as incoming, rsocket.serve(system, door, answer) as questions:
        yield incoming, questions
''',
    "test_$name.py": '''\
"""The app on free ports, with a real writer and a real client; and in simulated worlds, whose network fails."""

from contextlib import asynccontextmanager

import trio
from levada.actors import lumberjack, rsocket
from levada.framework import ActorSystem
from levada.framework.testing.simulation import World, simulate

from $name import DOOR, LOGS, app

LINES = 20


def test_lines_are_counted() -> None:
    async def main() -> None:
        serving = asynccontextmanager(app)
        async with (
            ActorSystem() as system,
            serving(system, "lumberjack://127.0.0.1:0", "rsocket+tcp://127.0.0.1:0") as (incoming, questions),
        ):
            async with lumberjack.connect(system, incoming.url) as writer:
                await writer.deliver([{"line": "one"}, {"line": "two"}])
            async with rsocket.connect(system, questions.url) as client:
                assert (await client.request_response(b"")).data == b"2"

    trio.run(main)


async def ship() -> None:
    """A process that sends a line each second."""
    async with ActorSystem() as system, lumberjack.connect(system, LOGS) as writer:
        for number in range(LINES):
            await writer.deliver([{"line": str(number)}])
            await trio.sleep(1)


async def check() -> None:
    """A process that asks for the total. A line may be counted twice: Lumberjack sends it again if in doubt."""
    async with ActorSystem() as system, rsocket.connect(system, DOOR) as client:
        assert int((await client.request_response(b"")).data) >= LINES


async def cut(world: World) -> None:
    """The shipper loses the app for half a minute. The seed of the world decides when."""
    await world.start("app", app)
    shipper = await world.start("shipper", ship)
    await trio.sleep(world.random.uniform(0, LINES))
    world.cut("shipper", "app", seconds=30)
    assert await shipper.wait() == 0
    checker = await world.start("checker", check)
    assert await checker.wait() == 0


def test_no_line_is_lost_if_the_network_is_cut() -> None:
    simulate(cut, seeds=range(10))
''',
    "pyproject.toml": """\
[build-system]
requires = ["hatchling>=1.27"]
build-backend = "hatchling.build"

[project]
name = "$name"
version = "0.1.0"
requires-python = ">=3.11"
dependencies = ["levada$extra>=$version"]

[project.optional-dependencies]
dev = ["mypy>=1.11", "pytest>=8.2"]

[tool.hatch.build.targets.wheel]
only-include = ["$name.py"]

[tool.mypy]
files = "*.py"
strict = true
explicit_package_bases = true
""",
    "README.md": """\
# $name

$about

```
$commands```

- levada has to be in this environment first. It is not on a package index yet: `pip install '.$extra'` in its clone.
- `mypy` checks the types, such as the answer of each question.
- The addresses are in `$name.py`. If "another process or listener has this address", change the port there.
  Port 0 takes a free one, which `levada serve` prints.
- The connections are not encrypted. Give `serve` a certificate and `authenticate=` before other machines may connect.
""",
    ".gitignore": """\
__pycache__/
*.egg-info/
.venv/
$kept/
wheels/
""",
}
"""The files of the project: templates, because each contains the project's name."""

CONTAINER: Final = {
    "Containerfile": CONTAINER_HEAD
    + """\
USER nobody
ENV HOST=0.0.0.0
EXPOSE 5044 7000 8080
CMD ["levada", "serve", "$name:app", "--health", "0.0.0.0:8080"]
""",
}

SPARK_FILES: Final = {
    "$name.py": '''\
"""An actor that keeps log lines in a mailbox, where Spark reads them: Filebeat or `levada ship` sends them."""

from __future__ import annotations

from collections.abc import AsyncIterator

from levada.actors import lumberjack
from levada.actors.spark import Mailbox, serve_bridge
from levada.framework import Actor, ActorSystem, handles, message


@message
class Line:
    text: str


class Lines(Actor[lumberjack.Unit]):
    kept: Mailbox[Line]

    @handles
    async def take(self, m: lumberjack.Unit) -> None:
        # When this returns, the lines are on disk, and the writer learns that they are safe.
        texts = [event.get("line") or event.get("message") for event in m.events]
        await self.kept.append([Line(str(text)) for text in texts])


async def app(
    system: ActorSystem, logs: str = "lumberjack://127.0.0.1:5044", folder: str = "mailboxes"
) -> AsyncIterator[lumberjack.Reader]:
    """The app of `levada serve $name:app`. The code after `yield` runs at the end."""
    async with serve_bridge(system, folder) as bridge:
        lines = system.spawn(Lines, await bridge.mailbox("lines", Line), name="lines")
        async with lumberjack.serve(system, logs, lines) as incoming:
            yield incoming
''',
    "query.py": '''\
"""Count the first words of the lines. Run it while `levada serve $name:app` runs."""

from pathlib import Path

from levada.actors.spark import session
from pyspark.sql import functions as f


def main(folder: str = "mailboxes") -> None:
    spark = session()
    address = f"unix://{Path(folder).absolute()}/bridge.socket"
    lines = spark.read.format("mailbox").options(address=address, mailbox="lines").load()
    first = f.substring_index("text", " ", 1).alias("first word")
    lines.groupBy(first).count().orderBy(f.desc("count")).show(10)
    spark.stop()


if __name__ == "__main__":
    main()
''',
    "test_$name.py": '''\
"""The app on a free port, with a real writer, and Spark."""

from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
from levada.actors import lumberjack
from levada.framework import ActorSystem

import query
from $name import app


def test_lines_are_queried(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def main() -> None:
        folder = str(tmp_path / "mailboxes")
        serving = asynccontextmanager(app)
        async with ActorSystem() as system, serving(system, "lumberjack://127.0.0.1:0", folder) as incoming:
            async with lumberjack.connect(system, incoming.url) as writer:
                await writer.deliver([{"line": "ERROR one"}, {"line": "INFO two"}, {"message": "ERROR three"}])
            await trio.to_thread.run_sync(query.main, folder)

    trio.run(main)
    assert "|     ERROR|    2|\\n|      INFO|    1|" in capsys.readouterr().out
''',
}
"""With ``--spark`` these replace the files of the same name."""

NEXT: Final = """\
cd $folder
pip install -e '.[dev]' && pytest
levada serve $name:app
levada ship FILE --once --to lumberjack://127.0.0.1:5044    # or Filebeat, with output.logstash
"""
CALL: Final = """\
levada call rsocket+tcp://127.0.0.1:7000    # prints how many lines have arrived
levada simulate test_$name:cut --seeds 200    # the same system with a network that fails, in 200 simulated worlds
"""
QUERY: Final = """\
python query.py    # Spark counts the first words of the lines
"""
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
            f"NAME is {name!r}, wanted the name of a module: lower-case letters, digits and _, which is not the last"
        )
    if name in ("pytest", "pyspark", "pyarrow") or importlib.util.find_spec(name) is not None:
        raise ConfigurationError(f"a module {name} exists already, and the project would hide it: choose another name")
    extra = "[spark]" if args.spark else "[journal]" if args.durable else ""
    kept = "lots" if args.durable else "mailboxes"
    values = {"name": name, "folder": name, "version": __version__, "extra": extra, "kept": kept}
    if args.durable:
        others, following = DURABLE_FILES, DURABLE_NEXT
    else:
        others, following = (SPARK_FILES, NEXT + QUERY) if args.spark else (CONTAINER, NEXT + CALL)
    values["about"] = KEEPS if args.spark else COUNTS
    # The first line goes to the folder; its readers are there.
    values["commands"] = Template(following.partition("\n")[2]).substitute(values)
    templates = FILES | others
    files = {Template(path).substitute(values): Template(text).substitute(values) for path, text in templates.items()}
    if len(files) < len(templates):
        raise ConfigurationError(f"the project has another {name}.py: choose another name")
    folder = Path(name)
    try:
        folder.mkdir()
        try:
            for path, text in files.items():
                (folder / path).write_text(text, "utf-8")
        except OSError:
            shutil.rmtree(folder, ignore_errors=True)
            raise
    except OSError as error:
        raise ConfigurationError(f"cannot create {error.filename or name}: {error.strerror}") from error
    print(Template(following).substitute(values), end="")
    return 0
