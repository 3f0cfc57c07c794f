"""The client of the console."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

import trio

from levada.framework.durations import is_duration
from levada.framework.errors import CarrierError, ConfigurationError, ConnectionLost, IdleTimeout

from .snapshot import Snapshot
from .viewing import View
from .wire import LineReader, parse_line, to_line

__all__ = ["ConsoleClient", "connect_console"]

ANSWER_LIMIT = 64 * 2**20


class ConsoleClient:
    """A connection to the console of a program. Made by `connect_console`."""

    def __init__(self, path: str, stream: trio.abc.Stream, timeout: float) -> None:
        self._path = path
        self._stream = stream
        self._timeout = timeout
        self._lines = LineReader(stream, ANSWER_LIMIT)

    async def snapshot(self, *, limit: int = 1000) -> Snapshot:
        """Ask for a snapshot. Only one call at a time may be under way.

        Args:
            limit: the most actors in it, see `take_snapshot`.

        Raises:
            IdleTimeout: no answer in time: something holds up the program.
            ConnectionLost: the program has ended.
            CarrierError: the program refused; the text says why.
            DecodeError: the answer is not a snapshot, or comes from another version of levada.

        Cancellation:
            the connection cannot be used again.
        """
        return Snapshot.from_json(await self._ask({"limit": limit}, self._timeout))

    async def view(self, view: View) -> dict[str, Any]:
        """Ask for the rows in view of a dashboard, see `Viewer.look`. Calls, errors and cancellation are as for `snapshot`."""
        return await self._ask({"view": view.to_json()}, self._timeout)

    async def act(self, members: Mapping[str, Any]) -> dict[str, Any]:
        """Prepare or confirm an action, see `Viewer.act`. The answer has ``refused``, with a reason, if it is refused. Errors as `snapshot`."""
        wanted = {name: members[name] for name in ("act", "path", "confirm", "node") if name in members}
        return await self._ask(wanted, self._timeout)

    async def command(self, name: str, *, timeout: float | None = None, **members: object) -> dict[str, Any]:
        """Request one of the program's commands (`serve_console`). Only one call at a time may be under way.

        Args:
            name: the name of the command.
            timeout: seconds for the answer; ``None``: the time-out of the connection.
            members: further members of the request, values that JSON can write.

        Returns:
            The answer.

        Raises:
            IdleTimeout, ConnectionLost, CarrierError, DecodeError: as for `snapshot`.

        Cancellation:
            the command may have been carried out; the connection cannot be used again.
        """
        return await self._ask({"do": name, **members}, self._timeout if timeout is None else timeout)

    async def _ask(self, request: dict[str, object], timeout: float) -> dict[str, Any]:
        try:
            with trio.fail_after(timeout):
                with suppress(trio.BrokenResourceError):  # it has closed the connection, and may have said why
                    await self._stream.send_all(to_line(request))
                line = await self._lines.line()
        except trio.TooSlowError:
            raise IdleTimeout(
                f"{self._path} did not answer within {timeout:g} s: a handler may be holding up the whole program"
            ) from None
        except (OSError, trio.BrokenResourceError):
            line = None
        if line is None:
            raise ConnectionLost(f"the program behind {self._path} has ended")
        members = parse_line(line)
        if "error" in members:
            raise CarrierError(f"{self._path}: {members['error']}")
        return members


@asynccontextmanager
async def connect_console(path: str | os.PathLike[str], *, timeout: float = 5.0) -> AsyncIterator[ConsoleClient]:
    """Connect to a program's console (`serve_console`).

    Args:
        path: the console's socket.
        timeout: seconds for each answer.

    Raises:
        CarrierError: no program listens there; the text says why.
        ConfigurationError: the timeout is not more than 0.
    """
    if not is_duration(timeout):
        raise ConfigurationError(f"timeout is {timeout!r}, wanted more than 0 seconds")
    path = os.fspath(path)
    try:
        stream = await trio.open_unix_socket(path)
    except FileNotFoundError:
        raise CarrierError(
            f"there is no socket {path}: a program makes one with serve_console(system, {path!r})"
        ) from None
    except ConnectionRefusedError:
        raise CarrierError(
            f"no program listens at {path}: the one that made the socket has ended, or it is another kind of file"
        ) from None
    except (OSError, ValueError) as error:
        raise CarrierError(f"cannot connect to {path}: {getattr(error, 'strerror', None) or error}") from error
    async with stream:
        yield ConsoleClient(path, stream, timeout)
