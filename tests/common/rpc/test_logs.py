"""Tests of a service's log output on stderr."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.common.errors import ConfigError
from slipstream.common.rpc.logs import RateLimitedLog, configure_logging

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
    assert rest[0] == "  Traceback (most recent call last):"
    assert rest[-1] == "  ZeroDivisionError: division by zero"


HOSTILE = "a\n2026-01-01T00:00:00.000Z ERROR   verify x: forged\x1b[31m\u202e\x9b\u2028\r\u00e9"


@pytest.mark.parametrize("log_format", ["console", "json"])
@pytest.mark.parametrize("line", ["log.info('%s', {0!r})", "log.info('x', extra={{'job': {0!r}}})"])
def test_nothing_from_outside_acts_or_forges_a_line(line: str, log_format: str) -> None:
    text = logged(line.format(HOSTILE), log_format=log_format)
    assert text.count("\n") == 1
    assert text.rstrip("\n").isprintable()
    assert r"\x1b[31m" in text or r"\u001b[31m" in text


def test_an_exceptions_text_stays_below_its_line() -> None:
    raises = f"try:\n    raise ValueError({HOSTILE!r})\nexcept ValueError:\n    log.exception('oh')"
    text = logged(raises, log_format="console")
    first, *rest = text.splitlines()
    assert first.endswith("ERROR   draft a.b: oh")
    assert all(line.startswith("  ") and line.isprintable() for line in rest)
    assert rest[-1].endswith(r"forged\x1b[31m\u202e\x9b\u2028\ré")


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


def test_lines_that_come_often_are_counted_and_left_out(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    log = RateLimitedLog(logging.getLogger("a.b"), logging.WARNING, interval_s=10, clock=lambda: now)
    for now in (0.0, 1.0, 9.9, 10.0, 15.0, 20.0, 31.0):
        log.write("at %g", now)
    assert caplog.messages == [
        "at 0",
        "at 10 (2 such lines were left out)",
        "at 20 (1 such lines were left out)",
        "at 31",
    ]


def test_a_log_file_takes_all_output_and_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "draft.log"
    source = """
import logging, os, sys
from pathlib import Path
from slipstream.common.rpc.logs import configure_logging
configure_logging("draft", "info", "console", log_file=Path(sys.argv[1]), max_bytes=10_000)
for number in range(1000):
    logging.getLogger("a").info("line %d %s", number, "x" * 40)
    if number % 10 == 0:
        os.write(1, b"to stdout" + bytes([10]))
        os.write(2, b"to stderr" + bytes([10]))
"""
    done = subprocess.run([sys.executable, "-c", source, str(path)], capture_output=True, timeout=30, check=True)
    assert (done.stdout, done.stderr) == (b"", b"")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["draft.log", "draft.log.1"]
    older, newer = (tmp_path / "draft.log.1").read_text(), path.read_text()
    assert 5_000 < len(older) < 10_200
    assert len(newer) < 10_200
    assert "line 999 " in newer
    lines = (older + newer).splitlines()
    numbers = [int(line.split(" line ")[1].split()[0]) for line in lines if " line " in line]
    assert numbers == list(range(numbers[0], 1000))
    first = next(number for number in numbers if number % 10 == 0)
    assert lines.count("to stdout") == lines.count("to stderr") == len(range(first, 1000, 10))


def test_a_link_in_the_place_of_a_log_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "draft.log").symlink_to(tmp_path / "precious")
    with pytest.raises(ConfigError, match=r"^log_file: "):
        configure_logging("draft", log_file=tmp_path / "draft.log")
    assert (tmp_path / "precious").read_text() == "precious"
