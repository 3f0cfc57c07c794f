"""Output of nodes that share a pipe: whole lines, each behind a name."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator

import pytest

from levada.actors.nodes.spark_output import LONGEST, NamedLines, named_output


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    read, write = os.pipe()
    os.set_blocking(read, False)
    yield read, write
    os.close(read)
    os.close(write)


def test_a_line_is_written_when_it_is_complete(pipe: tuple[int, int]) -> None:
    read, write = pipe
    lines = NamedLines("n1", write)
    print("half", end="", file=lines)
    with pytest.raises(BlockingIOError):
        os.read(read, 100)
    print(" and whole\nnext\nrest", end="", file=lines)
    assert os.read(read, 100) == b"n1: half and whole\nn1: next\n"
    lines.finish()
    assert os.read(read, 100) == b"n1: rest\n"
    lines.finish()
    with pytest.raises(BlockingIOError):
        os.read(read, 100)


def test_a_line_without_an_end_is_cut(pipe: tuple[int, int]) -> None:
    read, write = pipe
    os.set_blocking(read, True)
    lines = NamedLines("n1", write)
    writer = threading.Thread(target=lines.write, args=("x" * (LONGEST + 1),))
    writer.start()
    got = b""
    while not got.endswith(b"\n"):
        got += os.read(read, 1 << 20)
    writer.join()
    assert got == b"n1: " + b"x" * (LONGEST + 1) + b"\n"


def test_what_no_encoding_holds_is_written_nevertheless(pipe: tuple[int, int]) -> None:
    read, write = pipe
    NamedLines("n1", write).write("\ud800\n")
    assert os.read(read, 100) == b"n1: \\ud800\n"


def test_lines_of_many_threads_stay_whole(pipe: tuple[int, int]) -> None:
    read, write = pipe
    lines = NamedLines("n1", write)
    threads = [
        threading.Thread(target=lambda n=n: [lines.write(f"{n}" * 40 + "\n") for _ in range(20)]) for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    got = os.read(read, 1 << 20).decode().splitlines()
    assert sorted(set(got)) == [f"n1: {n}" + f"{n}" * 39 for n in range(8)]
    assert len(got) == 160


def test_output_that_nothing_reads_is_dropped() -> None:
    read, write = os.pipe()
    os.close(read)
    assert NamedLines("n1", write).write("lost\n") == 5
    os.close(write)


def test_output_is_named_within_a_block(capfd: pytest.CaptureFixture[str]) -> None:
    before = sys.stdout, sys.stderr
    with named_output("n7"):
        print("one")
        sys.stderr.write("two")
    assert (sys.stdout, sys.stderr) == before
    assert capfd.readouterr() == ("n7: one\n", "n7: two\n")
