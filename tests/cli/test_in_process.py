"""One process in place of three: the same tokens."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from slipstream.cli.in_process_settings import InProcessSettings
from slipstream.client import Client
from slipstream.common.errors import ConfigError
from slipstream.common.rpc.scrape import scrape
from slipstream.scheduler.config import SchedulerConfig
from slipstream.services.worker.config import EAGLE3, WorkerConfig
from tests.harness.running import running, running_up, slipstream
from tests.harness.trace_format import check, slices_by_thread

if TYPE_CHECKING:
    from collections.abc import Iterator

    from slipstream.client.requests import RequestOptions

pytestmark = pytest.mark.timeout(90)

NUM_TOKENS = 24
REQUESTS: tuple[tuple[str, RequestOptions], ...] = (
    ("def add(a, b):\n", {"max_new_tokens": NUM_TOKENS, "ignore_eos": True}),
    ("class Queue:\n", {"max_new_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 0.8, "seed": 7}),
    ("import os\n", {"max_new_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 1, "seed": 8, "top_p": 0.9}),
)


def outputs(state_dir: Path) -> Iterator[list[int]]:
    """The tokens of each request."""
    with Client((state_dir / "server").read_text()) as client:
        for prompt, options in REQUESTS:
            yield [token for chunk in client.generate(prompt, **options) for token in chunk.token_ids]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """What three processes give."""
    state_dir = tmp_path_factory.mktemp("three")
    with running_up(state_dir):
        found = list(outputs(state_dir))
    assert all(len(tokens) == NUM_TOKENS for tokens in found)
    return found


@pytest.mark.parametrize("algorithm", ["none", "standalone", "eagle3"])
def test_tokens_are_those_of_three_processes(algorithm: str, reference: list[list[int]], tmp_path: Path) -> None:
    with running_up(tmp_path, "--in-process", "--algorithm", algorithm) as up:
        assert list(outputs(tmp_path)) == reference
        shown = json.loads(slipstream("status", "--state-dir", str(tmp_path), "--json").stdout)
        assert shown["healthy"]
        assert shown["algorithm"] == algorithm
        assert {service["pid"] for service in shown["services"]} == {child.pid for child in up.children()}
        metrics_port = next(service["metrics_port"] for service in shown["services"] if service["metrics_port"])
        timed = asyncio.run(scrape(metrics_port)).total("slipstream_step_seconds_count", phase="decode")
        assert timed > 10, "steps are timed as they are with three processes"


def test_its_steps_are_traced(tmp_path: Path) -> None:
    """As if there were three processes."""
    state_dir, out = tmp_path / "state", tmp_path / "out.json"
    with running_up(state_dir, "--in-process"):
        server = ("--server", (state_dir / "server").read_text())
        generate = ("generate", *server, "--ignore-eos", "--max-new-tokens", "400", "class Queue:")
        with running("trace", *server, "--steps", "10", "--wait", "30", str(out)) as trace, running(*generate):
            assert trace.end() == 0, trace.errors()
    content = json.loads(out.read_text(encoding="utf-8"))
    check(content)
    hosts = {lane: slices_by_thread(content)[lane] for lane in ((2, 21), (3, 31))}
    assert all(len(slices) == 10 for slices in hosts.values()), "what each worker's half was enqueued by"


def test_settings_come_over_the_command_line(tmp_path: Path) -> None:
    verify = WorkerConfig(model=tmp_path, threads=2, simulate_accept_length=2.5, access_log_dir=tmp_path / "log")
    settings = InProcessSettings(
        verify=verify,
        draft=WorkerConfig(model=Path("/usr"), algorithm=EAGLE3, target=tmp_path),
        scheduler=SchedulerConfig(verify="unix:/a", slots=3),
    )
    assert InProcessSettings.from_json(settings.as_json()) == settings
    alone = replace(settings, draft=None)
    assert InProcessSettings.from_json(alone.as_json()) == alone


def test_a_wrong_setting_is_named(tmp_path: Path) -> None:
    settings = InProcessSettings(
        verify=WorkerConfig(model=tmp_path), draft=None, scheduler=SchedulerConfig(verify="unix:/a")
    )
    text = settings.as_json().replace('"slots": 16', '"slots": 0')
    with pytest.raises(ConfigError, match=r"^slots: got 0"):
        InProcessSettings.from_json(text)
