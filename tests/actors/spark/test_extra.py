"""A machine without the extras: everything else imports, and the packages say what to install."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

SCRIPT = textwrap.dedent(
    """
    import sys

    class Absent:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] in ("pyarrow", "pyspark", "h11"):
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    sys.meta_path.insert(0, Absent())
    import levada.actors, levada.actors.cli
    for name in ("journal", "spark", "dashboard"):
        try:
            __import__(f"levada.actors.{name}")
        except ModuleNotFoundError as error:
            print(error.name, error)
    """
)


def test_without_pyarrow_the_packages_say_what_to_install() -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == (
        "pyarrow levada.actors.journal needs pyarrow: pip install 'levada[journal]'\n"
        "pyarrow levada.actors.spark needs pyarrow: pip install 'levada[spark]'\n"
        "h11 levada.actors.dashboard needs h11: pip install 'levada[dashboard]'\n"
    )
