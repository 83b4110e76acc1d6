"""Tests of a service's log output on stderr."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from slipstream.common.errors import ConfigError
from slipstream.common.rpc.logs import configure_logging

TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}"


def logged(*lines: str, log_format: str, level: str = "info") -> str:
    """Returns what these lines of code, with `log` as the logger `a.b`, write to stderr in a process of their own."""
    source = [
        "import logging; from slipstream.common.rpc.logs import configure_logging",
        f"configure_logging('draft', {level!r}, {log_format!r}); log = logging.getLogger('a.b')",
        *lines,
    ]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(source)], capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stdout == ""
    return done.stderr


def test_a_line_has_time_level_service_and_logger() -> None:
    text = logged("log.info('not this'); log.warning('but %s', 'this')", log_format="console", level="warning")
    assert re.fullmatch(rf"{TIME}Z WARNING draft a\.b: but this\n", text), text


def test_a_line_says_what_it_belongs_to() -> None:
    text = logged("log.info('so', extra={'step': 7, 'job': 'x', 'other': 1})", log_format="console")
    assert re.fullmatch(rf"{TIME}Z INFO    draft a\.b: so job=x step=7\n", text), text


def test_an_exception_comes_below() -> None:
    text = logged("try:\n    1 / 0\nexcept ZeroDivisionError:\n    log.exception('oh')", log_format="console")
    first, *rest = text.splitlines()
    assert first.endswith("ERROR   draft a.b: oh")
    assert rest[0] == "Traceback (most recent call last):"
    assert rest[-1] == "ZeroDivisionError: division by zero"


def test_as_json_everything_is_a_field() -> None:
    text = logged("log.info('so %d', 3, extra={'step': 7, 'epoch': 2, 'other': 1})", log_format="json")
    line = json.loads(text)
    assert re.fullmatch(rf"{TIME}\d{{3}}Z", line.pop("time"))
    assert line == {"event": "so 3", "service": "draft", "level": "info", "logger": "a.b", "step": 7, "epoch": 2}


def test_as_json_an_exception_stays_on_its_line() -> None:
    text = logged("try:\n    1 / 0\nexcept ZeroDivisionError:\n    log.exception('oh')", log_format="json")
    assert text.count("\n") == 1
    assert json.loads(text)["exception"].endswith("ZeroDivisionError: division by zero")


@pytest.mark.parametrize(
    ("level", "log_format", "field"), [("loud", "json", "log_level"), ("info", "xml", "log_format")]
)
def test_a_setting_that_is_none_is_refused(level: str, log_format: str, field: str) -> None:
    with pytest.raises(ConfigError, match=f"{field}: got"):
        configure_logging("draft", level, log_format)
