"""What a service writes to stderr."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from slipstream.common.errors import ConfigError
from slipstream.common.logs import configure_logging


def test_a_line_has_time_level_service_and_logger() -> None:
    source = (
        "import logging; from slipstream.common.logs import configure_logging; configure_logging('draft', 'warning');"
        "logging.getLogger('a.b').info('not this'); logging.getLogger('a.b').warning('but this')"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout == ""
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z WARNING draft a\.b: but this\n", done.stderr), (
        done.stderr
    )


def test_a_level_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="log_level: got 'loud'"):
        configure_logging("draft", "loud")
