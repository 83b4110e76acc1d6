"""The log of a service: lines on standard error."""

from __future__ import annotations

import logging
import sys
import time

from slipstream.common.errors import ConfigError

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


def configure_logging(service: str, level: str = "INFO") -> None:
    """Sends everything logged in this process to stderr: time (UTC), level, `service`, logger, message.

    Raises ConfigError for a `level` that is none.
    """
    if level.upper() not in LEVELS:
        raise ConfigError("log_level", level, ", ".join(LEVELS))
    formatter = logging.Formatter(
        f"%(asctime)s.%(msecs)03dZ %(levelname)-7s {service} %(name)s: %(message)s", datefmt="%Y-%m-%dT%H:%M:%S"
    )
    formatter.converter = time.gmtime
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
