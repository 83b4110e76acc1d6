"""Jobs that outlive their host's boot: CLOCK_MONOTONIC begins anew, in a time namespace."""

from __future__ import annotations

import signal
import subprocess
import time
from typing import TYPE_CHECKING, Any

import pytest

from slipstream.client import Client
from tests.harness.running import running_up

if TYPE_CHECKING:
    from pathlib import Path

JOBS = {f"job-{number}": number for number in range(4)}
"""With their seeds."""
SAMPLING: dict[str, Any] = {"max_new_tokens": 600, "temperature": 0.8, "ignore_eos": True}
OPTIONS = ("--device", "cpu", "--journal", "power", "--metrics-port", "0")
UPTIME_S = 1


def after_boot() -> tuple[str, ...]:
    """The prefix of a command on a host that was booted UPTIME_S ago."""
    back_s = int(time.clock_gettime(time.CLOCK_BOOTTIME)) - UPTIME_S
    offsets = f"--monotonic=-{back_s}", f"--boottime=-{back_s}"
    return ("unshare", "--time", *offsets, "--fork", "--kill-child")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_unfinished_jobs_go_on_after_a_boot(tmp_path: Path) -> None:
    if subprocess.run((*after_boot(), "true"), capture_output=True, check=False).returncode:
        pytest.skip("this user may make no time namespace: that needs root, and `unshare` of util-linux 2.36")
    with running_up(tmp_path, *OPTIONS) as up, Client((tmp_path / "server").read_text()) as client:
        for name, seed in JOBS.items():
            client.create_job("class Graph:\n", job_id=name, seed=seed, **SAMPLING)
        created_at = time.monotonic()
        assert next(client.watch_job("job-3")).token_ids
        up.signal(signal.SIGKILL)
        up.end()
        (tmp_path / "server").unlink()
    while time.monotonic() < created_at + UPTIME_S + 2:
        time.sleep(0.05)  # until the jobs are older than the host of the next `up`
    with running_up(tmp_path, *OPTIONS, prefix=after_boot()) as up, Client((tmp_path / "server").read_text()) as client:
        for name, seed in JOBS.items():
            expected = client.generate("class Graph:\n", seed=seed, **SAMPLING)
            tokens = [token for chunk in client.watch_job(name) for token in chunk.token_ids]
            assert tokens == [token for chunk in expected for token in chunk.token_ids]
        for child in up.children():
            if "slipstream.cli.main" in child.cmdline():
                child.send_signal(signal.SIGTERM)
        assert up.end() == 0
