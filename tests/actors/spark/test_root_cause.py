"""The line that tells what began a failure of Spark, out of texts as Spark 4.3 and py4j give them."""

from __future__ import annotations

import pytest

pytest.importorskip("levada.actors.spark", exc_type=ImportError)

from levada.actors.spark.root_cause import MOST, root_cause

JAVA = """\
An error occurred while calling o1626.start.
: org.apache.spark.SparkException: [INTERNAL_ERROR] Cannot plan
\tat org.apache.spark.sql.Dataset.start(Dataset.scala:12)
Caused by: java.util.concurrent.ExecutionException: org.apache.spark.SparkException: Failed
\tat java.base/java.util.concurrent.FutureTask.report(FutureTask.java:122)
Caused by: java.nio.file.FileSystemException: /checkpoint/offsets: Read-only file system
\tat java.base/sun.nio.fs.UnixException.translate(UnixException.java:100)
\t... 22 more
"""

WORKER = """\
[STREAM_FAILED] Query [id = 350d, runId = 23f0] terminated with exception: [PYTHON_EXCEPTION] An exception was thrown from the Python worker: \
Traceback (most recent call last):
  File "/levada/actors/spark/sink.py", line 184, in write
    return self._tasks.stage(query, int(batch), iterator)
           ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
  File "/levada/actors/spark/worker.py", line 202, in wait
    raise problem from error
levada.framework.errors.ConnectionLost: no bridge answers: cannot connect to unix:///b: [Errno 2] No such file or directory
 SQLSTATE: 38000 SQLSTATE: XXKST
=== Streaming Query ===
Identifier: [id = 350d, runId = 23f0]
"""

CHAINED = """\
An error occurred while calling o7.load.
: org.apache.spark.api.python.PythonException: Traceback (most recent call last):
  File "a.py", line 1, in f
KeyError: 'x'

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "a.py", line 3, in g
levada.actors.spark.errors.SchemaMismatch: x: Spark has no type for decimal256(50, 2)

\tat org.apache.spark.api.python.BasePythonRunner.handle(PythonRunner.scala:1)
Caused by: org.apache.spark.api.python.PythonException: Traceback (most recent call last):
"""


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (JAVA, "FileSystemException: /checkpoint/offsets: Read-only file system"),
        (
            WORKER,
            "ConnectionLost: no bridge answers: cannot connect to unix:///b: [Errno 2] No such file or directory",
        ),
        (CHAINED, "SchemaMismatch: x: Spark has no type for decimal256(50, 2)"),
        ("An error occurred while calling o1626.start", "An error occurred while calling o1626.start"),
        ("An error occurred while calling o3.x.\n: java.lang.OutOfMemoryError: heap\n\tat x", "OutOfMemoryError: heap"),
        ("[UNRESOLVED_COLUMN] no column x\nplan", "[UNRESOLVED_COLUMN] no column x"),
        ("Java gateway process exited", "Java gateway process exited"),
        ("", ""),
    ],
)
def test_the_root_cause_is_one_line(text: str, cause: str) -> None:
    assert root_cause(text) == cause


def test_the_line_has_a_bound_and_no_control_characters() -> None:
    assert len(root_cause("x" * 10_000)) <= MOST
    assert "\x1b" not in root_cause("ValueError: \x1b[2J")
