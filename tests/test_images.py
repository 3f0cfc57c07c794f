"""The container files of the example and of new projects: images that buildah makes, and what runs in them."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest

from levada.actors.interop.certificates import make_certificates

pytest.importorskip("cryptography")

ROOT = Path(__file__).resolve().parents[1]
RUN = ("--isolation", "chroot", "--network", "host")
"""What works without privileges over namespaces, too."""


def buildah(*arguments: str | Path) -> str:
    done = subprocess.run(["buildah", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout.strip()


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheels")
    make = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT)]
    subprocess.run(make, check=True)
    return folder


@pytest.fixture
def image(request: pytest.FixtureRequest, wheels: Path, tmp_path: Path) -> Iterator[str]:
    """Build the image of a folder; give the name of a container of it."""
    if shutil.which("buildah") is None:
        pytest.skip("there is no buildah: apt-get install buildah")
    folder = tmp_path / "house"
    if request.param == "auction":
        shutil.copytree(ROOT / "examples/auction", folder)
    else:
        new = [sys.executable, "-m", "levada.actors", "new", "house", *request.param.split()]
        subprocess.run(new, cwd=tmp_path, check=True)
    for module in folder.glob("*.py"):
        module.write_text(re.sub(r":\d{4}\b", ":0", module.read_text("utf-8")), "utf-8")  # free ports
    shutil.copytree(wheels, folder / "wheels")
    base = re.findall(r"^FROM (\S+)$", (folder / "Containerfile").read_text("utf-8"), re.MULTILINE)[0]
    there = subprocess.run(["buildah", "pull", "--policy", "missing", f"docker.io/library/{base}"], check=False)
    if there.returncode:
        pytest.skip(f"{base} cannot be pulled")
    name = f"levada-test-{os.getpid()}"
    buildah("build", *RUN, "--tag", name, folder)
    container = buildah("from", f"localhost/{name}")
    yield container
    buildah("rm", container)
    buildah("rmi", name)


@pytest.mark.release
@pytest.mark.loopback
@pytest.mark.timeout(600)
@pytest.mark.parametrize("image", ["auction", "", "--durable"], ids=["auction", "new", "new --durable"], indirect=True)
def test_an_image_serves_as_nobody_and_drains(image: str, tmp_path: Path) -> None:
    files = make_certificates(tmp_path / "tls")
    files.key.chmod(0o644)  # `nobody` reads it, which is warned of
    config = json.loads(buildah("inspect", image))["OCIv1"]["config"]
    assert config["User"] == "nobody"
    command = [re.sub(r":\d+$", ":0", word) for word in config["Cmd"]]
    others = (
        "FRONT=aqueduct+tls://0.0.0.0:0",
        "TICKER=rsocket+tcp://0.0.0.0:0",
        "TLS=/tls",
    )  # the auction, for other machines
    options = [f"--env={variable}" for variable in others]
    shell = ("sh", "-c", 'echo "$$ $(id -un) $(pwd)"; exec "$@"', "sh")
    run = ["buildah", "run", *RUN, *options, f"--volume={tmp_path / 'tls'}:/tls:ro", image, "--", *shell, *command]
    with subprocess.Popen(run, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            assert process.stdout is not None
            pid, user, place = process.stdout.readline().split()
            assert (user, place) == ("nobody", config["WorkingDir"])
            health = next(line.split()[1] for line in process.stdout if line.startswith("HEALTH "))
            assert any(line.startswith("SERVING ") for line in process.stdout)
            with urlopen(health.replace("0.0.0.0", "127.0.0.1"), timeout=60) as answer:
                assert answer.status == 200
            os.kill(int(pid), signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()
