"""The commands of each transcript on a page print what the page shows, and no block shows output that nothing runs."""

from __future__ import annotations

import hashlib
import platform
import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from textwrap import dedent

import pytest
from tests.cli.test_serve import LEVADA
from tests.docs import (
    test_dashboard_page,
    test_demo_page,
    test_nodes_on_spark_page,
    test_nodes_page,
    test_pages,
    test_read_a_journal_page,
    test_read_a_mailbox_page,
    test_tutorial,
)
from tests.packages import environment, install, modules_of

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    page
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    if (ROOT / "docs" / "changes") not in page.parents
]
BLOCK = re.compile(r"^(?P<indent> *)```(?P<language>\S*).*\n(?P<text>(?:.*\n)*?)(?P=indent)```$", re.MULTILINE)
FILE = re.compile(r"(?:`(\w+\.py)`[^`\n]*\n\n```python\n|```python\n(?=# (\w+\.py)\n))(.*?)```", re.DOTALL)
FILE_OF = re.compile(r"`\w+\.py` of \[[^]]*\]\(([\w-]+\.md)\)")
PORT = re.compile(r"(?<=\.[01]:)\d+|(?<=--port )\d+")
TOKEN = "sYz0l5oN5mX0PqZl2hSg6Lw5yB0cV9mJt3nRk8dQe1U"

VARIES = {
    "docs/how-to/serve.md": dict.fromkeys(("4711", "4712", "4720", "4722"), r"\d+")
    | {"desk": re.escape(platform.node())},
    "docs/reference/command-line.md": {
        TOKEN: r"[\w-]{43}",
        hashlib.sha256(TOKEN.encode()).hexdigest(): r"[0-9a-f]{64}",
    },
}
"""Page to words of its output that stand for others, and a pattern for these: process ids, host names and secrets. Ports do too, on all pages."""

LANGUAGES = {
    "dockerfile",
    "ini",
    "mermaid",
    "python",
    "sh",
    "sql",
    "toml",
    "yaml",
    "{include}",
    "{svgbob}",
    "{toctree}",
}
"""Languages of blocks that show no output, unless they have a prompt."""

COMMANDS = re.compile(r"(?:(?:levada|pip|cd|python3?|tail|uv|towncrier) .*\n)+")
"""A block of commands without a prompt and output."""

NOT_RUN = {
    (
        "docs/how-to/break-your-own-system.md",
        "SimulationFailure: failed",
    ): "one world of one version; its own test finds the bug",
    ("docs/explanation/journal.md", "journal/"): "a folder",
    ("docs/how-to/demo.md", "files ──Lumberjack, TLS──> ingest"): "a picture",
    ("docs/how-to/demo.md", "[ 40.5 s] shipping: 223,445 records"): "how far one run was",
    ("docs/reference/benchmarks.md", ""): "measured on a quiet machine",
    ("docs/reference/quic.md", "CPU seconds of client and server"): "measured on a quiet machine",
}
"""Page and beginning of each block that is no output, or that no test can repeat, and why."""


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def transcripts(page: Path) -> list[tuple[str, str]]:
    """The commands of a page, in order, and what each prints."""
    found = []
    for block in BLOCK.finditer(page.read_text("utf-8")):
        first, *parts = re.split(r"^\$ (.*)\n", dedent(block["text"]), flags=re.MULTILINE)
        if parts:
            assert first == "", f"{name_of(page)}: output before the first command"
            found += [(command, said.rstrip("\n")) for command, said in zip(parts[::2], parts[1::2], strict=True)]
    return found


def make_files(page: Path, folder: Path) -> None:
    """Write the programs that a page shows or refers to, at free ports, and install what its `pyproject.toml` registers."""
    text = page.read_text("utf-8")
    for other in FILE_OF.findall(text):
        make_files(page.parent / other, folder)
    for named, begun, program in FILE.findall(text):
        (folder / (named or begun)).write_text(PORT.sub("0", program), "utf-8")
    for block in BLOCK.finditer(text):
        if block["language"] == "toml":
            for group, entries in tomllib.loads(block["text"])["project"]["entry-points"].items():
                install(folder, "page", group, **entries)


class Reader:
    """Does what a page says."""

    def __init__(self, page: Path, folder: Path, ended: ExitStack) -> None:
        self.folder, self.ended = folder, ended
        self.words = VARIES.get(name_of(page), {})
        self.varies = dict(self.words)
        self.known: dict[str, str] = {}  # word of the page to what it stands for
        self.servers: dict[str, subprocess.Popen[str]] = {}  # by the page's ports
        self.environment = environment(folder) | {"XDG_RUNTIME_DIR": str(folder)}

    def compare(self, shown: str, said: str, error: str) -> None:
        new: set[str] = set()

        def pattern(part: re.Match[str]) -> str:
            word = part[0]
            if word in self.known:
                return re.escape(self.known[word])
            if word in new:
                return f"(?P=_{word})"
            if word in self.varies:
                new.add(word)
                return f"(?P<_{word}>{self.varies[word]})"
            return " +" if re.fullmatch(" {2,}", word) else re.escape(word)  # the width of a column

        found = re.fullmatch(re.sub(r"\w+| +|[^\w ]+", pattern, shown), said.rstrip("\n"))
        assert found is not None, f"instead of\n{shown}\nit said\n{said}{error}"
        self.known |= {name[1:]: value for name, value in found.groupdict().items()}
        stand_for = [self.known[word] for word in self.words if word in self.known]
        assert len(set(stand_for)) == len(stand_for), f"two words of the page stand for one: {self.known}"

    def run(self, command: str, shown: str) -> None:
        if re.search(r"^levada serve |&$", command):
            self.start(command.removesuffix(" &"), shown)
            return
        command = PORT.sub(lambda port: self.known[port[0]], command)
        command = re.sub(r"\blevada (?=\w)", f"{shlex.join(LEVADA)} ", command)
        done = subprocess.run(
            command,
            shell=True,
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=250,
            check=False,
        )
        self.compare(shown, done.stdout, done.stderr)
        assert (done.stderr, done.returncode) == ("", 0)

    def start(self, command: str, shown: str) -> None:
        """Start a server; one that has its ports ends before, as a reader would end it."""
        assert shown, f"the page does not show what says that it is ready: {command}"
        ports = dict.fromkeys(PORT.findall(f"{command}\n{shown}"))
        for port in ports:
            if port in self.servers:
                self.end(self.servers[port])
            self.known.pop(port, None)
            self.varies[port] = r"\d+"
        pipe = subprocess.PIPE
        arguments = [*LEVADA, *shlex.split(PORT.sub("0", command))[1:]]
        server = self.ended.enter_context(
            subprocess.Popen(arguments, cwd=self.folder, env=self.environment, text=True, stdout=pipe, stderr=pipe)
        )
        self.ended.callback(server.kill)
        self.servers |= dict.fromkeys(ports, server)
        assert server.stdout is not None
        said = "".join(server.stdout.readline() for _ in shown.splitlines())
        self.compare(shown, said, "" if said.count("\n") > shown.count("\n") else server.communicate()[1])

    def end(self, server: subprocess.Popen[str]) -> None:
        server.terminate()
        assert (*server.communicate(timeout=250), server.returncode) == ("", "", 0)
        self.servers = {port: other for port, other in self.servers.items() if other is not server}


def run_by_others() -> set[tuple[str, str | None]]:
    """Page and output of the programs that other tests run."""
    found = {(name.rpartition(":")[0], output) for name, _, output in test_pages.PROGRAMS}
    found |= {("docs/tutorial/index.md", output) for _, output in test_tutorial.OUTPUTS}
    found |= {
        (name_of(module.PAGE), module.OUTPUT)
        for module in (test_dashboard_page, test_nodes_page, test_nodes_on_spark_page)
    }
    on_spark = (test_nodes_on_spark_page.COUNTED, test_nodes_on_spark_page.ERROR)
    found |= {(name_of(test_nodes_on_spark_page.PAGE), output) for output in on_spark}
    found |= {(name_of(test_demo_page.PAGE), output) for output in (test_demo_page.SHARES, test_demo_page.COMMANDS)}
    found |= {(name_of(test_read_a_journal_page.PAGE), output) for _, output in test_read_a_journal_page.PROGRAMS}
    found |= {(name_of(test_read_a_mailbox_page.PAGE), output) for _, output in test_read_a_mailbox_page.READERS}
    pages = ("add-a-carrier.md", "add-a-protocol.md", "add-a-store.md")
    return found | {(f"docs/how-to/{page}", output) for page in pages for _, output in modules_of(page).values()}


def run_by_nothing(page: str, text: str) -> Iterator[str]:
    """Where the page shows output that no test compares."""
    others = run_by_others()
    for block in BLOCK.finditer(text):
        shown = dedent(block["text"])
        listed = any(page == name and shown.startswith(beginning) for name, beginning in NOT_RUN)
        known = block["language"] in LANGUAGES or COMMANDS.fullmatch(shown) or (page, shown) in others
        if not (listed or known or re.search(r"^\$ ", shown, re.MULTILINE)):
            yield f"{page}:{text.count(chr(10), 0, block.start()) + 1}"
    outside = BLOCK.sub(lambda block: "\n" * block[0].count("\n"), text)
    for number, line in enumerate(outside.split("\n"), 1):
        if re.match(r"[\s>*-]*(```|~~~|\$ )", line):
            yield f"{page}:{number}"


TRANSCRIPTS = [page for page in PAGES if transcripts(page)]


@pytest.mark.ci
@pytest.mark.loopback
@pytest.mark.parametrize("page", TRANSCRIPTS, ids=name_of)
def test_commands_print_what_their_page_shows(page: Path, tmp_path: Path) -> None:
    commands = transcripts(page)
    if any(command.startswith("curl ") for command, _ in commands) and shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    if page.name == "measure.md":
        pytest.importorskip("prometheus_client")
    make_files(page, tmp_path)
    with ExitStack() as ended:
        reader = Reader(page, tmp_path, ended)
        for command, shown in commands:
            reader.run(command, shown)
        for server in dict.fromkeys(reader.servers.values()):
            reader.end(server)


def test_each_output_on_a_page_is_run() -> None:
    """Or has its reason in `NOT_RUN`."""
    texts = {name_of(page): page.read_text("utf-8") for page in PAGES}
    assert [where for page, text in texts.items() for where in run_by_nothing(page, text)] == []
    unused = [entry for entry in NOT_RUN if f"```\n{entry[1]}" not in texts[entry[0]].replace("```text", "```")]
    assert unused == []


def test_output_that_nothing_runs_is_found() -> None:
    text = (
        "It says\n\n```\nhello\n```\n\n```console\n$ levada nodes ls\nn0\n```\n\n- ```console\n  $ levada top\n  ```\n"
    )
    assert list(run_by_nothing("README.md", text)) == ["README.md:3", "README.md:12", "README.md:13", "README.md:14"]
