"""The auction of ``examples/auction``: in a copy of its folder, as its README says, with clients of every kind."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from http.client import HTTPResponse
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import pytest

from levada.actors import cli
from levada.actors.interop.certificates import make_certificates

pytest.importorskip("pyarrow")

ROOT = Path(__file__).resolve().parents[2]
FREE = {"FRONT": "aqueduct+tcp://127.0.0.1:0", "TICKER": "rsocket+tcp://127.0.0.1:0"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(ROOT / "examples/auction", tmp_path / "auction"))


def environment(**variables: str) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join([".", *filter(None, sys.path)])} | variables


@contextmanager
def running(
    folder: Path, *command: str, logs: bool = False, variables: Mapping[str, str] = MappingProxyType({})
) -> Iterator[Iterator[str]]:
    """Run a module; give what it prints. It ends in order, and logs no error unless `logs`."""
    with subprocess.Popen(
        [sys.executable, "-m", *command],
        cwd=folder,
        env=environment(PYTHONUNBUFFERED="1", **variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL if logs else subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            yield iter(process.stdout)
        finally:
            process.terminate()
            try:
                rest, _ = process.communicate(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
    # uvicorn ends by the signal, after its lifespan. Nodes that end at the same time warn of each other, and clients of a lost node.
    assert process.returncode in (0, -signal.SIGTERM)
    usual = r"INFO:|.* WARNING levada.actors.nodes|no connection to the auction: |$"
    assert [line for line in rest.splitlines() if not re.match(usual, line)] == []


@contextmanager
def browsers(folder: Path, **variables: str) -> Iterator[str]:
    """Run the process for browsers; give its URL."""
    with running(folder, "uvicorn", "web:app", "--port", "0", variables=variables) as lines:
        yield next(found[1] for line in lines if (found := re.search(r"running on (\S+)", line)))


def ask(method: str, url: str) -> Any:
    with urlopen(Request(url, method=method), timeout=30) as answer:
        return json.load(answer)


def next_price(stream: HTTPResponse) -> Any:
    name, _, data = stream.readline().decode().rstrip().partition(": ")
    assert (name, stream.readline()) == ("data", b"\n")
    return json.loads(data)


def metrics(health: str) -> dict[str, float]:
    """The app's own metrics, over all nodes."""
    found = defaultdict[str, float](float)
    with urlopen(f"{health}metrics", timeout=30) as answer:
        for line in answer.read().decode().splitlines():
            if line.startswith("auction_"):
                name, _, value = line.partition(" ")
                found[name.partition("{")[0]] += float(value)
    return dict(found)


@pytest.mark.ci
@pytest.mark.loopback
@pytest.mark.timeout(180)
@pytest.mark.parametrize("nodes", [(), ("--nodes", "3")], ids=["alone", "nodes"])
def test_clients_of_every_kind_share_an_auction(nodes: tuple[str, ...], folder: Path) -> None:
    pytest.importorskip("fastapi")
    pytest.importorskip("prometheus_client")
    with ExitStack() as stack:
        serve = ("levada.actors", "serve", "auction:app", *nodes, "--health", "127.0.0.1:0")
        served = stack.enter_context(running(folder, *serve, variables=FREE))
        health = next(served).split()[1]
        front, ticker = sorted(next(served).split()[1] for _ in range(2))
        url = stack.enter_context(browsers(folder, FRONT=front))
        lot = f"{url}/lots/7"

        assert ask("PUT", f"{lot}?title=Clock&cents=1000&seconds=3600")
        with (
            urlopen(f"{lot}/prices", timeout=30) as stays,
            running(folder, "client", "7", variables={"FRONT": front}) as program,
        ):
            first = {"lot": "7", "title": "Clock", "cents": 1000, "bidder": "", "open": True}
            with urlopen(f"{lot}/prices", timeout=30) as leaves:
                assert next_price(leaves) == next_price(stays) == first
            assert next(program) == "Clock: 10.00 \n"
            port = str(urlsplit(ticker).port)
            foreign = [sys.executable, str(ROOT / "tests/docs/rsocket_ticker.py"), port, "7"]
            with subprocess.Popen(foreign, env=environment(), stdout=subprocess.PIPE, text=True) as ticks:
                assert ticks.stdout is not None
                assert json.loads(ticks.stdout.readline()) == first
                assert ask("POST", f"{lot}/bids/1?bidder=anna&cents=1500")
                raised = first | {"cents": 1500, "bidder": "anna"}
                assert json.loads(ticks.stdout.readline()) == raised
            assert ticks.returncode == 0
            assert next_price(stays) == raised
            assert next(program) == "Clock: 15.00 anna\n"
            assert not ask("POST", f"{lot}/bids/2?bidder=bert&cents=1500")
            assert ask("POST", f"{lot}/bids/1?bidder=anna&cents=1500")  # sent again
            assert ask("POST", f"{lot}/bids/3?bidder=bert&cents=1600")
            assert next_price(stays)["cents"] == 1600
            assert next(program) == "Clock: 16.00 bert\n"
            assert ask("GET", f"{url}/lots") == [raised | {"cents": 1600, "bidder": "bert"}]
            # Those who left were dropped with the next price.
            assert metrics(health) == {"auction_bids_total": 2.0, "auction_followers": 2.0, "auction_open_lots": 1.0}


@pytest.mark.ci
@pytest.mark.loopback
@pytest.mark.timeout(180)
def test_browsers_follow_a_lot_although_all_nodes_are_killed_one_after_the_other(folder: Path) -> None:
    pytest.importorskip("fastapi")
    serve = ("levada.actors", "serve", "auction:app", "--nodes", "3", "--health", "127.0.0.1:0")
    with running(folder, *serve, logs=True, variables=FREE) as served:
        health = next(served).split()[1]
        front, _ = sorted(next(served).split()[1] for _ in range(2))
        with browsers(folder, FRONT=front) as url:
            lot = f"{url}/lots/7"
            assert ask("PUT", f"{lot}?title=Clock&cents=1000&seconds=3600")
            with urlopen(f"{lot}/prices", timeout=30) as prices:
                assert next_price(prices)["cents"] == 1000
                for cents, node in enumerate(ask("GET", health)["nodes"], 2000):
                    os.kill(node["pid"], signal.SIGKILL)
                    assert ask("POST", f"{lot}/bids/{cents}?bidder=anna&cents={cents}")
                    assert next_price(prices)["cents"] == cents
            assert [price["cents"] for price in ask("GET", f"{url}/lots")] == [2002]


@pytest.mark.ci
@pytest.mark.timeout(180)
def test_its_own_tests_pass(folder: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, check=False)
    assert (done.returncode, "2 passed" in done.stdout) == (0, True), done.stdout + done.stderr
    # As the tutorial says, the simulation finds that a bid without an id is done twice.
    program = (folder / "auction.py").read_text("utf-8")
    (folder / "auction.py").write_text(program.replace(", command=id)", ")"), "utf-8")
    # One world in four finds it.
    words = ["-m", "levada.actors", "simulate", "test_auction:scenario", "--faults", "test_auction:FAULTS"]
    command = [sys.executable, *words]
    done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, check=False)
    assert (done.returncode, "NotLinear" in done.stdout) == (1, True), done.stdout + done.stderr


def test_what_the_container_file_and_the_readme_name_exists(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    container = (folder / "Containerfile").read_text("utf-8")
    copied = re.findall(r"(\S+\.py)(?= .*/app/)", container)
    assert copied == ["auction.py", "client.py", "web.py"]
    readme = (folder / "README.md").read_text("utf-8")
    named = set(re.findall(r"^\| `(\S+)` \|", readme, re.MULTILINE))
    assert named == {path.name for path in folder.iterdir() if path.is_file()} - {"README.md"}
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    assert {*re.findall(r"levada\[(\S+)\]", container)[0].split(",")} <= {*extras}
    command = json.loads(re.findall(r"^CMD (\[.*\])$", container, re.MULTILINE)[0])
    *serves, call = re.findall(r"^\$ levada (serve .*|call .*)$", readme, re.MULTILINE)
    for arguments in (command[1:], *(line.split() for line in [*serves, call])):
        assert cli.make_parser(["serve", "call"]).parse_args(arguments).command == arguments[0]


@pytest.mark.ci
@pytest.mark.loopback
@pytest.mark.timeout(180)
def test_it_serves_other_machines_over_tls(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("fastapi")
    pytest.importorskip("cryptography")
    made = make_certificates(tmp_path / "nodes")
    clients = tmp_path / "clients"
    clients.mkdir()
    made.ca.rename(clients / "ca.pem")
    secure = FREE | {"FRONT": "aqueduct+tls://0.0.0.0:0", "TLS": str(tmp_path / "nodes")}
    with running(folder, "levada.actors", "serve", "auction:app", "--nodes", "2", variables=secure) as served:
        front, _ = sorted(next(served).split()[1] for _ in range(2))
        outside = {"FRONT": f"aqueduct+tls://localhost:{urlsplit(front).port}", "TLS": str(clients)}
        with browsers(folder, **outside) as url:
            assert ask("PUT", f"{url}/lots/7?title=Clock&cents=1000&seconds=3600")
        make_certificates(tmp_path / "strangers")
        # A client that trusts others says so, and does not only wait.
        strange = outside | {"TLS": str(tmp_path / "strangers")}
        command = [sys.executable, "client.py", "7"]
        with subprocess.Popen(
            command, cwd=folder, env=environment(**strange), stderr=subprocess.PIPE, text=True
        ) as lost:
            assert lost.stderr is not None
            assert "no connection to the auction: " in lost.stderr.readline()
            lost.kill()


@pytest.mark.release
@pytest.mark.loopback
@pytest.mark.timeout(300)
def test_spark_reads_the_log_of_a_running_auction(folder: Path) -> None:
    pytest.importorskip("pyspark")
    pytest.importorskip("fastapi")
    serve = ("levada.actors", "serve", "auction:app", "--nodes", "2")
    with running(folder, *serve, variables=FREE) as served:
        front, _ = sorted(next(served).split()[1] for _ in range(2))
        with browsers(folder, FRONT=front) as url:
            assert ask("PUT", f"{url}/lots/7?title=Clock&cents=1000&seconds=3600")
            for number, cents in enumerate((1500, 1700, 1600)):
                assert ask("POST", f"{url}/lots/7/bids/{number}?bidder=anna{number}&cents={cents}") == (cents != 1600)
        done = subprocess.run(
            [sys.executable, "books.py"], cwd=folder, env=environment(), capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stdout) == (0, "7: 17.00 by anna1, 2 bids\n"), done.stderr
