"""How records of logs are written, as text or JSON, and the request that they belong to, in every process that works on it.

The identity of a request follows W3C Trace Context: https://www.w3.org/TR/trace-context/.
"""

import json
import logging
import os
import re
import struct
import sys
import time
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final, Literal

from stagepack.terminal import printable

LogFormat = Literal["text", "json"]

# Tells processes of stages how to write their logs.
_PROCESS_LOG: Final = "STAGEPACK_PROCESS_LOG"
_TEXT_LINE: Final = "%(asctime)s %(levelname)s %(message)s"
# What every record has, and what formatters add. Other attributes are fields of the JSON.
_PLAIN_ATTRIBUTES: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
# Later versions may have more after the flags.
_TRACEPARENT: Final = re.compile(
    r"(?P<version>[0-9a-f]{2})-(?P<trace>[0-9a-f]{32})-(?P<span>[0-9a-f]{16})-(?P<flags>[0-9a-f]{2})(?P<rest>-.*)?"
)
_NO_TRACE, _NO_SPAN = "0" * 32, "0" * 16
_TRACE_WORDS: Final = struct.Struct("<16s8sq")


@dataclass(frozen=True, slots=True)
class RequestTrace:
    """The identity of a request.

    Attributes:
        trace_id: of all that belongs to what the client does, in 32 hexadecimal digits.
        span_id: of the work on this request here, in 16 digits.
        parent_id: of the work of the client; empty if it has told nothing.
        flags: the flags of the client, of which 1 says that it records its work.
    """

    trace_id: str
    span_id: str
    parent_id: str = ""
    flags: str = "00"

    @property
    def traceparent(self) -> str:
        """The header that tells others of the request."""
        return f"00-{self.trace_id}-{self.span_id}-{self.flags}"

    def words(self) -> bytes:
        """Return the ids and the flags as 32 bytes."""
        return _TRACE_WORDS.pack(bytes.fromhex(self.trace_id), bytes.fromhex(self.span_id), int(self.flags, 16))

    @classmethod
    def of_words(cls, words: bytes) -> "RequestTrace | None":
        """Return what `words` has packed; None for no words."""
        if not words:
            return None
        trace_id, span_id, flags = _TRACE_WORDS.unpack(words)
        return cls(trace_id.hex(), span_id.hex(), flags=f"{flags:02x}")


# The request that the thread or task works on.
current_trace: ContextVar[RequestTrace | None] = ContextVar("current_trace", default=None)


def begin_trace(traceparent: str | None) -> RequestTrace:
    """Return the identity of a request whose client has sent this header; one that is not valid is as if there was none."""
    span_id = os.urandom(8).hex()
    match = None if traceparent is None else _TRACEPARENT.fullmatch(traceparent)
    if match is None or match["trace"] == _NO_TRACE or match["span"] == _NO_SPAN:
        return RequestTrace(os.urandom(16).hex(), span_id)
    if match["version"] == "ff" or (match["version"] == "00" and match["rest"] is not None):
        return RequestTrace(os.urandom(16).hex(), span_id)
    return RequestTrace(match["trace"], span_id, match["span"], match["flags"])


class TextFormatter(logging.Formatter):
    """Formats a record as one printable line, with the id of its request at the end; the lines of a traceback follow it, indented.

    So nothing that a record quotes reaches a terminal as a command, or looks like a record of its own.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the name of logging
        """Return the line of a record, without its traceback."""
        trace = current_trace.get()
        line = printable(" ".join(super().formatMessage(record).split()))
        return line if trace is None else f"{line} trace={trace.trace_id}"

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record, and the lines of its traceback."""
        line, *traceback_lines = super().format(record).splitlines()
        return "\n".join([line, *(f"  {printable(traceback_line)}" for traceback_line in traceback_lines)])


class JsonFormatter(logging.Formatter):
    """Formats a record as one line of JSON in ASCII: its time in UTC, its level, its message, its own fields, and its request."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        fields: dict[str, Any] = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": record.process,
            "message": record.getMessage(),
        }
        fields |= {name: value for name, value in vars(record).items() if name not in _PLAIN_ATTRIBUTES}
        if (trace := current_trace.get()) is not None:
            fields |= {"trace_id": trace.trace_id, "span_id": trace.span_id}
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields, default=str)


class _ErrorOutput(logging.StreamHandler[Any]):
    """Writes to standard error, which is another object while a line of progress is shown."""

    def emit(self, record: logging.LogRecord) -> None:
        self.setStream(sys.stderr)
        super().emit(record)


def write_log(logger: logging.Logger, log_format: LogFormat, level: str, text_line: str = _TEXT_LINE) -> None:
    """Write the records of a logger to standard error, and nowhere else."""
    handler = _ErrorOutput()
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter(text_line))
    logger.addHandler(handler)
    logger.setLevel(level.upper())
    logger.propagate = False


def write_package_log(log_format: LogFormat, level: str) -> None:
    """Write the log of stagepack and the warnings of Python, here and in processes that this one starts."""
    write_log(logging.getLogger("stagepack"), log_format, level)
    write_log(logging.getLogger("py.warnings"), log_format, "WARNING")
    logging.captureWarnings(True)
    os.environ[_PROCESS_LOG] = f"{log_format} {level}"


def write_process_log() -> None:
    """Write the log of a process as the one that has started it says; as Python does by itself if that says nothing."""
    log_format, _, level = os.environ.get(_PROCESS_LOG, "").partition(" ")
    if level:
        write_package_log("json" if log_format == "json" else "text", level)
