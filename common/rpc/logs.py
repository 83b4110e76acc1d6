"""The log of a service: lines on standard error, for people or as JSON.

Code logs with the standard library and passes a line's context in `extra`: `job`, `step`, `epoch`.
"""

from __future__ import annotations

import logging
import sys
import time
from typing import TYPE_CHECKING

from slipstream.common.errors import ConfigError

if TYPE_CHECKING:
    from structlog.typing import EventDict

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
CONSOLE, JSON = FORMATS = ("console", "json")
CONTEXT = ("job", "step", "epoch")
"""The names that are taken from a record's `extra`."""


def configure_logging(service: str, level: str = "INFO", log_format: str = CONSOLE) -> None:
    """Sends the logs of this process to stderr: time (UTC), level, `service`, logger, message, context.

    Raises ConfigError for an unknown `level` or `log_format`.
    """
    if level.upper() not in LEVELS:
        raise ConfigError("log_level", level, ", ".join(LEVELS))
    if log_format not in FORMATS:
        raise ConfigError("log_format", log_format, ", ".join(FORMATS))
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_json_formatter(service) if log_format == JSON else _ConsoleFormatter(service))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


class _ConsoleFormatter(logging.Formatter):
    def __init__(self, service: str) -> None:
        line = f"%(asctime)s.%(msecs)03dZ %(levelname)-7s {service} %(name)s: %(message)s"
        super().__init__(line, datefmt="%Y-%m-%dT%H:%M:%S")
        self.converter = time.gmtime

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the base class's name
        context = "".join(f" {name}={record.__dict__[name]}" for name in CONTEXT if name in record.__dict__)
        return super().formatMessage(record) + context


def _json_formatter(service: str) -> logging.Formatter:
    # Imported here, because it takes 40 ms.
    from structlog.processors import JSONRenderer, TimeStamper, format_exc_info
    from structlog.stdlib import ExtraAdder, ProcessorFormatter, add_log_level, add_logger_name

    def add_service(_logger: object, _method: str, event: EventDict) -> EventDict:
        event["service"] = service
        return event

    return ProcessorFormatter(
        processors=[
            TimeStamper(fmt="%Y-%m-%dT%H:%M:%S.%fZ", utc=True, key="time"),
            add_log_level,
            add_service,
            add_logger_name,
            ExtraAdder(allow=CONTEXT),
            format_exc_info,
            ProcessorFormatter.remove_processors_meta,
            JSONRenderer(default=str),
        ]
    )
