"""The log records of a connection: each event with session id and stream id, never a token, never a payload. Source: MA-132."""

from __future__ import annotations

import logging
from typing import Literal

import trio

from levada.framework.embedding import FailureLog
from levada.framework.text import printable
from levada.transports.maop import (
    Begun,
    Completed,
    ErrorCode,
    Failed,
    MaopCore,
    Received,
    Refused,
    Stepped,
    StreamData,
    code_name,
    decode_operations,
)

__all__ = ["ConnectionLog"]

logger = logging.getLogger("levada.actors.maop")

MAX_TEXT = 100
"""Characters of a reason that appear in the log."""


class ConnectionLog:
    """Writes one connection's records: `info` for the connection, `debug` for each operation, `error` for failures of handlers."""

    def __init__(
        self, core: MaopCore, path: str, *, reasons: Literal["debug", "production"], failures: FailureLog
    ) -> None:
        self._core = core
        self._failures = failures
        self._path = path
        self.who = path
        """The name of the connection in each line: the path, and the client's name if it is known."""
        self._reasons = reasons
        self.verbose = logger.isEnabledFor(logging.DEBUG)
        """Whether steps of operations are logged; fixed when the connection begins."""
        self._own: dict[int, tuple[float, Begun]] = {}

    def _extra(self, event: str, stream_id: int | None = None) -> dict[str, object]:
        fields: dict[str, object] = {
            "protocol": "maop",
            "actor": self._path,
            "event": event,
            "connection_id": self._core.session_id.hex(),
        }
        if stream_id is not None:
            fields["stream_id"] = stream_id
        return fields

    def say(
        self, event: str, text: str, stream_id: int | None = None, level: int = logging.INFO, *, reason: str = ""
    ) -> None:
        """Log an event of the connection as a whole.

        Args:
            event: name of the event.
            text: the message.
            stream_id: the stream concerned.
            level: the record's level.
            reason: the peer's own text, or our text for the peer; a setting says where it is logged. Source: MA-94.
        """
        shown = f": {reason[:MAX_TEXT]}" if reason else ""
        if logger.isEnabledFor(level):
            text += shown if self._reasons == "production" else ""
            logger.log(level, "%s: %s: %s", self.who, event, printable(text), extra=self._extra(event, stream_id))
        if shown and self._reasons == "debug":
            logger.debug("%s: %s%s", self.who, event, printable(shown), extra=self._extra("reason", stream_id))

    def passed(self, event: Stepped) -> None:
        """Log a step of an operation of either side that only the core sees."""
        what = event.step
        if what == "proceed":
            self._log_own("proceed", event.stream_id, "-")
            return
        if what == "cancelled":
            self._log_own("cancelled", event.stream_id, code_name(ErrorCode.CANCELLED))
            self._own.pop(event.stream_id, None)
            return
        size = "undefined" if event.size is None else event.size
        logger.debug(
            "%s: stream %d %s: bytes %s",
            self.who,
            event.stream_id,
            what.replace("_", " "),
            size,
            extra=self._extra(what, event.stream_id),
        )

    def begun(self, event: Begun) -> None:
        """Log the beginning of an operation of this side."""
        self._own[event.stream_id] = trio.current_time(), event
        self._log_own("begun", event.stream_id, "-")

    def outcome(self, event: Completed | Refused | Failed) -> None:
        """Log how an operation of this side ended."""
        if isinstance(event, Completed):
            self._log_own("done", event.stream_id, "ok")
        else:
            name = "refused" if isinstance(event, Refused) else "failed"
            self._log_own(name, event.stream_id, code_name(event.code))
        self._own.pop(event.stream_id, None)

    def _log_own(self, what: str, stream_id: int, result: str) -> None:
        since, begun = self._own[stream_id]
        logger.debug(
            "%s: stream %d %s: msg_id %d, bytes %s, lat_ms %d, priority %d, result %s",
            self.who,
            stream_id,
            what,
            begun.msg_id,
            "undefined" if begun.size is None else begun.size,
            1000 * (trio.current_time() - since),
            begun.priority,
            result,
            extra=self._extra(what, stream_id),
        )

    def step(self, event: str, operation: Received, size: int | None = None, code: int | None = None) -> None:
        """Log a step of one of the peer's operations."""
        if self.verbose:
            logger.debug(
                "%s: stream %d %s: msg_id %d, bytes %d, lat_ms %d, priority %d, result %s",
                self.who,
                operation.stream_id,
                event,
                operation.msg_id,
                (operation.length or 0) if size is None else size,
                1000 * (trio.current_time() - operation.since),
                operation.priority,
                code_name(code) if code is not None else "ok" if event == "done" else "-",
                extra=self._extra(event, operation.stream_id),
            )

    def signals(self, output: StreamData) -> None:
        """Log the outgoing signals: Proceed, Refuse, Done, Fail, Disconnect."""
        for signal in decode_operations(bytes(output.data)):
            text = f"{signal}"
            logger.debug("%s: sends %.200s", self.who, text, extra=self._extra(type(signal).__name__))

    def failed(self, what: str, operation: Received, error: Exception) -> str:
        """Log an exception of the user's code; return the text with the audit id that the peer gets instead. Source: MA-79."""
        audit, told = self._failures.mark(error), self._failures.for_peer(error)
        text, extra = "%s: %s of msg_id %d failed, audit id %s", self._extra("handler_failed", operation.stream_id)
        self._failures.log(logger, error, text, self.who, what, operation.msg_id, audit, **extra)
        return told
