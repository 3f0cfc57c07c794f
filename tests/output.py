"""What a process says, as far as a test waits for it."""

from __future__ import annotations

from collections.abc import Callable

import trio


async def heard(stream: trio.abc.ReceiveStream | None, enough: Callable[[bytes], bool], *, most: int = 65_536) -> bytes:
    """Read, `most` bytes at a time, until it is enough; an `AssertionError` with what was said if the process ends before."""
    assert stream is not None, "there is no pipe"
    said = b""
    while not enough(said):
        part = await stream.receive_some(most)
        assert part, f"it ended, and had said {said.decode(errors='backslashreplace')!r}"
        said += part
    return said
