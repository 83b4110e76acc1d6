"""`slipstream status --watch` beside the real services, which come, work, go and come again."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
from typing import TYPE_CHECKING, Any

import pytest

from slipstream.client import Client
from tests.harness.grpc_server import unserved_address
from tests.harness.running import COMMAND, Running, running, running_up, slipstream, until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.timeout(120)

INTERVAL = ("--interval-s", "0.2")
NUM_TOKENS = 100


def looks(watch: Running) -> list[dict[str, Any]]:
    """The whole lines that it printed until now."""
    return [json.loads(line) for line in watch.output().split("\n")[:-1]]


def test_it_watches_a_server_that_works(server: str) -> None:
    with running("status", "--watch", "--server", server, "--json", *INTERVAL) as watch:
        until(lambda: len(looks(watch)) > 1, watch)
        with Client(server) as client:
            list(client.generate("class Queue:", max_new_tokens=NUM_TOKENS, ignore_eos=True))

        def intervals() -> list[dict[str, Any]]:
            return [look["interval"] for look in looks(watch) if look["interval"]]

        def num_tokens() -> int:
            return round(sum(each["tokens_per_s"] * each["seconds"] for each in intervals()))

        until(lambda: num_tokens() >= NUM_TOKENS, watch)
        watch.signal(signal.SIGINT)
        assert watch.end() == 0
        assert watch.errors() == ""
        assert all(look["healthy"] for look in looks(watch))
        assert [service["health"] for service in looks(watch)[0]["services"]] == ["SERVING"] * 4
        worked = [each for each in intervals() if each["step_s"]]
        assert num_tokens() == NUM_TOKENS
        assert all(sum(each["bubbles_s"].values()) <= each["step_s"] for each in worked)
        assert all(each["overlap_efficiency"] <= 1 for each in worked)
        assert max(each["mean_accept_length"] or 0 for each in worked) > 1


@pytest.mark.slow
def test_it_follows_a_server_that_goes_away_and_comes_back(tmp_path: Path) -> None:
    state_dir = tmp_path / "state"
    with running("status", "--watch", "--state-dir", str(state_dir), "--json", *INTERVAL) as watch:

        def wait(is_so: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
            until(lambda: any(map(is_so, looks(watch))), watch)
            return next(filter(is_so, looks(watch)))

        assert "no `slipstream up` is ready" in wait(lambda look: True)["error"]
        with running_up(state_dir) as up:
            assert "answers since" in wait(lambda look: look["healthy"])["event"]
            up.signal(signal.SIGINT)
            assert up.end() == 0
        wait(lambda look: "no answer" in (look["event"] or "") and "no `slipstream up` is ready" in look["error"])
        seen = len(looks(watch))
        with running_up(state_dir):
            until(lambda: any(look["interval"] for look in looks(watch)[seen:]), watch)
            again = [look for look in looks(watch)[seen:] if look["healthy"]]
        assert "started anew" in again[0]["event"]
        assert again[0]["interval"] is None
        watch.signal(signal.SIGINT)
        assert watch.end() == 0
        assert watch.errors() == ""


def test_lines_elsewhere_and_one_table_on_a_terminal(server: str, state_dir: Path) -> None:
    with running("status", "--watch", "--server", server, *INTERVAL) as watch:
        until(lambda: "overlap" in watch.output(), watch)
        on_terminal, exit_status = watched_on_a_terminal("--state-dir", str(state_dir))
        watch.signal(signal.SIGTERM)
        assert watch.end() == 0
        assert watch.errors() == ""
        blocks = watch.output().rstrip("\n").split("\n\n")
    assert len(blocks) >= 2
    for block in blocks:
        assert "\x1b" not in block
        assert block.count("SERVING") == 4
    assert exit_status == 0
    assert on_terminal.count("scheduler") >= 2
    assert "\x1b[" in on_terminal


def watched_on_a_terminal(*options: str) -> tuple[str, int]:
    """Returns its output on a terminal until Ctrl-C, which comes when the first interval is there, and its status."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
    command = (*COMMAND, "status", "--watch", *INTERVAL, *options)
    process = subprocess.Popen(command, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    written, is_asked = b"", False
    while True:
        try:
            written += os.read(ours, 65536)
        except OSError:  # how a terminal says that nobody writes to it any more
            break
        if not is_asked and b"overlap" in written:
            process.send_signal(signal.SIGINT)
            is_asked = True
    os.close(ours)
    return written.decode(), process.wait()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("interval", ["0", "-1", "nan", "1e9"])
def test_an_interval_out_of_range(interval: str) -> None:
    found = slipstream("status", "--watch", "--interval-s", interval)
    assert (found.returncode, found.stdout) == (2, "")
    assert found.stderr.startswith("slipstream: error: --interval-s: got ")


def test_an_interval_without_watching() -> None:
    found = slipstream("status", "--interval-s", "1")
    assert found.returncode == 2
    assert "a number with --watch" in found.stderr


def test_nobody_at_the_address_is_said_and_asked_again() -> None:
    with (
        unserved_address() as server,
        running("status", "--watch", "--server", server, *INTERVAL) as watch,
    ):
        until(lambda: watch.output().count(f"no answer from a server at {server}") >= 2, watch)
        watch.signal(signal.SIGINT)
        assert watch.end() == 0
