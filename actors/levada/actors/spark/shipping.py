"""Make a zip of this package for Spark's workers: ``spark-submit --py-files levada.zip`` or ``spark.submit.pyFiles``.

A wheel on ``sys.path`` does not work: ``levada`` is a namespace without an ``__init__.py``, and Python finds such a package in a zip only if the
zip has an entry for the folder itself, which wheels lack. The zip made here has these entries.

From a shell: ``python -m levada.actors.spark.shipping levada.zip --with-dependencies``. In a session that runs: `ship`.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import levada.actors
import levada.framework
import levada.transports

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["make_zip", "ship"]

DEPENDENCIES = "attr", "attrs", "idna", "msgpack", "outcome", "sniffio", "sortedcontainers", "trio"
"""Dependencies that are pure Python, or work without their compiled part. pyarrow does not: workers must have it installed."""
_STORED_TIME = 1980, 1, 1, 0, 0, 0  # the same files make the same bytes


def make_zip(path: str | os.PathLike[str], *, dependencies: bool = False) -> Path:
    """Write a zip from which Spark's workers can import levada; return its absolute path. An existing file is replaced atomically.

    Args:
        path: the file to write.
        dependencies: whether the zip also has `DEPENDENCIES`, for workers whose Python has only pyarrow.

    Raises:
        OSError: the file cannot be written.
    """
    target = Path(path).absolute()
    beside = target.with_name(target.name + ".new")
    folders: set[str] = set()
    with zipfile.ZipFile(beside, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, source in sorted(_files(dependencies)):
            for folder in list(Path(name).parents)[-2::-1]:
                if f"{folder.as_posix()}/" not in folders:
                    folders.add(f"{folder.as_posix()}/")
                    archive.writestr(zipfile.ZipInfo(f"{folder.as_posix()}/", _STORED_TIME), b"")
            entry = zipfile.ZipInfo(name, _STORED_TIME)
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, source.read_bytes())
    beside.replace(target)
    return target


def ship(spark: SparkSession, *, token_file: str | os.PathLike[str] | None = None, dependencies: bool = True) -> None:
    """Send levada to the Python processes of a session of Spark Connect, whose server does not have it, and register ``format("mailbox")``.

    Batches and asks work then. Streams need levada installed on the server.

    Args:
        spark: a session of Spark Connect. Its server and executors have this version of Python, and pyarrow.
        token_file: `Bridge.token_file`, to be sent too. The option ``tokenFile`` is then its name without the folder.
        dependencies: as for `make_zip`.
    """
    from .datasource import MailboxSource

    with tempfile.TemporaryDirectory(prefix="levada-spark-") as folder:
        spark.addArtifacts(str(make_zip(Path(folder) / "levada.zip", dependencies=dependencies)), pyfile=True)
    if token_file is not None:
        spark.addArtifacts(os.fspath(token_file), file=True)
    spark.dataSource.register(MailboxSource)


def _files(dependencies: bool) -> Iterator[tuple[str, Path]]:
    """Yield the names in the zip, and the files."""
    roots = [
        (f"levada/{module.__name__.rpartition('.')[2]}", Path(module.__path__[0]))
        for module in (levada.framework, levada.transports, levada.actors)
    ]
    if dependencies:
        roots += [(name, Path(importlib.import_module(name).__path__[0])) for name in DEPENDENCIES]
    # Without it `format("mailbox")` works only in sessions that `levada.actors.spark.session` has made.
    found = importlib.util.find_spec("pyspark_mailbox")
    assert found is not None
    assert found.origin is not None
    yield "pyspark_mailbox.py", Path(found.origin)
    for name, root in roots:
        for source in root.rglob("*"):
            inside = source.relative_to(root)
            if source.suffix in (".py", ".typed") and not {"_tests", "__pycache__"} & set(inside.parts):
                yield f"{name}/{inside.as_posix()}", source


def main(arguments: Sequence[str] | None = None) -> None:
    """Make a zip, from a shell."""
    parser = argparse.ArgumentParser(
        prog="python -m levada.actors.spark.shipping",
        description="Write a zip that Spark's workers can import levada from.",
    )
    parser.add_argument("path", help="file to write, for example levada.zip")
    parser.add_argument("--with-dependencies", action="store_true", help=f"also put {', '.join(DEPENDENCIES)} into it")
    asked = parser.parse_args(arguments)
    try:
        written = make_zip(asked.path, dependencies=asked.with_dependencies)
    except OSError as error:
        parser.error(f"cannot write {asked.path}: {error.strerror or error}")
    sys.stdout.write(f"{written} ({written.stat().st_size} bytes)\n")


if __name__ == "__main__":
    main()
