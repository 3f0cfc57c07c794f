"""Files that hold secrets or received data."""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest

from levada.framework.errors import ConfigurationError
from levada.framework.platform import REAL
from levada.transports.carriers.tls import TlsConfig, make_context
from levada.transports.private_files import make_private_folder, warn_if_others_can_read

pytestmark = pytest.mark.skipif(os.name != "posix", reason="file modes of POSIX")


@pytest.fixture(autouse=True)
def generous_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_they_are_private_from_the_first_moment(tmp_path: Path) -> None:
    make_private_folder(tmp_path / "a" / "b")
    assert mode(tmp_path / "a" / "b") == 0o700
    with REAL.files.opened(tmp_path / "file", os.O_WRONLY | os.O_CREAT) as descriptor:
        assert os.fstat(descriptor).st_mode & 0o777 == 0o600


@pytest.mark.parametrize(("bits", "warned"), [(0o600, False), (0o640, False), (0o644, True)])
def test_a_secret_that_all_can_read_is_warned_about(
    bits: int, warned: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "key.pem"
    file.write_text("secret")
    file.chmod(bits)
    warn_if_others_can_read(file, "a private key")
    assert [record.getMessage() for record in caplog.records] == (
        [f"{file} holds a private key and can be read by all users of this machine: chmod 600 it"] if warned else []
    )
    warn_if_others_can_read(tmp_path / "nowhere", "a private key")
    with pytest.raises(ConfigurationError):
        make_context(TlsConfig(certificate=file), ssl.Purpose.CLIENT_AUTH)


@pytest.mark.skipif(not hasattr(os, "readlink") or not Path("/proc/self/fd").exists(), reason="shows names by /proc")
def test_the_names_of_new_folders_are_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a power failure takes all that is in them."""
    synced: list[str] = []
    real = os.fsync

    def sync(descriptor: int) -> None:
        real(descriptor)
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))

    monkeypatch.setattr(REAL.files, "fsync", sync)
    REAL.files.make_durable_folder(tmp_path / "a" / "b" / "c")
    # Each before there is something in it; the first name too, since the process that made it may have been killed right then.
    assert synced == [str(tmp_path.parent), str(tmp_path), str(tmp_path / "a"), str(tmp_path / "a" / "b")]
    assert mode(tmp_path / "a" / "b" / "c") == 0o700
    synced.clear()
    REAL.files.make_durable_folder(
        tmp_path / "a" / "b" / "c"
    )  # the process that made it may have been killed right then
    assert synced == [str(tmp_path / "a" / "b")]
