"""The log of a service: lines on standard error, for people or as JSON.

Code logs with the standard library and passes a line's context in `extra`: `job`, `step`, `epoch`. Whatever a message
or an exception says, a record is one line, and below it an indented traceback; no character acts on a terminal.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler
from textwrap import indent
from typing import TYPE_CHECKING, Any

from slipstream.common.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable
    from io import TextIOWrapper
    from pathlib import Path

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
CONSOLE, JSON = FORMATS = ("console", "json")
CONTEXT = ("job", "step", "epoch")
"""The names that are taken from a record's `extra`."""


def configure_logging(
    service: str,
    level: str = "INFO",
    log_format: str = CONSOLE,
    *,
    log_file: Path | None = None,
    max_bytes: int = 2**26,
) -> None:
    """Sends the logs of this process to stderr: time (UTC), level, `service`, logger, message, context.

    With `log_file`, stdout and stderr themselves go there: see `RotatingOutput`. Raises ConfigError for an unknown
    `level` or `log_format`, and for a file that cannot be written.
    """
    if level.upper() not in LEVELS:
        raise ConfigError("log_level", level, ", ".join(LEVELS))
    if log_format not in FORMATS:
        raise ConfigError("log_format", log_format, ", ".join(FORMATS))
    handler: logging.Handler = (
        logging.StreamHandler(sys.stderr) if log_file is None else RotatingOutput(log_file, max_bytes)
    )
    handler.setFormatter(_JsonFormatter(service) if log_format == JSON else _ConsoleFormatter(service))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def escaped(text: str) -> str:
    """Returns text on one line, with backslashes in place of all characters that do not print."""
    return text if text.isprintable() else "".join(map(_escaped_character, text))


def escaped_lines(text: str) -> str:
    """The same, but for the ends of its lines."""
    return "\n".join(map(escaped, text.split("\n")))


def _escaped_character(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode()


class RateLimitedLog:
    """Writes lines to a logger, at most one for each `interval_s`; the next line says how many were left out."""

    def __init__(
        self,
        logger: logging.Logger,
        level: int,
        *,
        interval_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._logger = logger
        self._level = level
        self._interval_s = interval_s
        self._clock = clock
        self._next_at = float("-inf")
        self._num_left_out = 0

    def write(self, message: str, *values: object) -> None:
        """Logs `message % values`, or counts it."""
        now = self._clock()
        if now < self._next_at:
            self._num_left_out += 1
            return
        more = f" ({self._num_left_out} such lines were left out)" if self._num_left_out else ""
        self._next_at, self._num_left_out = now + self._interval_s, 0
        self._logger.log(self._level, message + more, *values)


class RotatingOutput(RotatingFileHandler):
    """Sends the log, and all else that this process writes to stdout and stderr, to a file that is bounded in size.

    A full file is renamed to `PATH.1`, in place of the one before. A link at the path is not followed.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        """Raises ConfigError naming `log_file`."""
        try:
            super().__init__(path, maxBytes=max_bytes, backupCount=1, encoding="utf-8")
        except OSError as error:
            raise ConfigError("log_file", str(path), f"a file that this user can write to ({error})") from error

    def _open(self) -> TextIOWrapper:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        file = os.fdopen(os.open(self.baseFilename, flags, 0o600), "a", encoding="utf-8")
        # What libraries and the interpreter write themselves: a panic, a fatal error.
        for standard in (1, 2):
            os.dup2(file.fileno(), standard)
        return file


class _ConsoleFormatter(logging.Formatter):
    def __init__(self, service: str) -> None:
        line = f"%(asctime)s.%(msecs)03dZ %(levelname)-7s {service} %(name)s: %(message)s"
        super().__init__(line, datefmt="%Y-%m-%dT%H:%M:%S")
        self.converter = time.gmtime

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the base class's name
        context = "".join(f" {name}={record.__dict__[name]}" for name in CONTEXT if name in record.__dict__)
        return escaped(super().formatMessage(record) + context)

    def formatException(self, ei: Any) -> str:  # noqa: N802 - the base class's name
        return indent(escaped_lines(super().formatException(ei)), "  ")


class _JsonFormatter(logging.Formatter):
    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        line = {"time": time, "level": record.levelname.lower(), "service": self._service, "logger": record.name}
        line |= {name: record.__dict__[name] for name in CONTEXT if name in record.__dict__}
        line["event"] = record.getMessage()
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)
