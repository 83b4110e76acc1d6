"""What `up` shows while its services load, and how long it waits for a draft."""

from __future__ import annotations

import io
import signal
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import psutil
import pytest
from rich.console import Console

from slipstream.cli import display
from slipstream.cli import up as run
from slipstream.cli.display import StateLines
from slipstream.cli.service import ServiceState
from tests.harness.example_states import STATE
from tests.harness.planted_faults import PlantedFaults
from tests.harness.running import running, status, until

if TYPE_CHECKING:
    from pathlib import Path

    from slipstream.cli.supervisor import Supervisor

LOADING, READY, DIED = ServiceState.LOADING, ServiceState.READY, ServiceState.DIED


def test_a_service_that_fails_as_it_starts_again_and_again_is_shown_once() -> None:
    output = io.StringIO()
    lines = StateLines(Console(file=output))
    for state in (LOADING, DIED, LOADING, DIED, LOADING, READY, DIED, LOADING, READY):
        lines.on_change("draft", state)
    shown = [line.split()[1] for line in output.getvalue().splitlines()]
    assert shown == ["loading", "died", "ready", "died", "loading", "ready"]


def test_services_that_are_loading_are_said_with_the_end_of_their_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    output, now = io.StringIO(), [100.0]
    monkeypatch.setattr(display, "time", SimpleNamespace(monotonic=lambda: now[0]))
    lines = StateLines(Console(file=output, width=200))
    for name, state in (("draft", LOADING), ("verify", LOADING), ("verify", READY), ("gateway", LOADING)):
        lines.on_change(name, state)
    now[0] += 10.2
    lines.say_progress(lambda name: "[info] 3 of 20" if name == "draft" else "")
    assert output.getvalue().splitlines()[-2:] == [
        "draft: still loading after 10 s: [info] 3 of 20",
        "gateway: still loading after 10 s",
    ]


@pytest.mark.parametrize(
    ("state", "problem", "reason"),
    [
        ("attached", "", ""),
        ("resting", "", ""),
        ("", "", ""),
        ("catching up", "", "it is still loading"),
        ("missing", "it has another vocabulary", "it has another vocabulary"),
    ],
)
def test_why_a_draft_does_not_take_part(state: str, problem: str, reason: str) -> None:
    assert run._why_without_draft(replace(STATE, draft_state=state, draft_problem=problem)) == reason


@pytest.mark.timeout(120)
def test_it_is_ready_once_a_draft_that_loads_slowly_takes_part(tmp_path: Path) -> None:
    """The scheduler waits for it before verify plans memory and captures graphs, and says so."""
    faults, state_dir = PlantedFaults(tmp_path / "record", "draft.before_ready:stop@1"), tmp_path / "state"
    options = ("--device", "cpu", "--metrics-port", "0", "--num-draft-tokens", "4")
    arguments = ("up", "--state-dir", str(state_dir), "--listen", "127.0.0.1:0", *options)
    with running(*arguments, environment=faults.environment) as up:
        log = state_dir / "scheduler.log"
        until(lambda: faults.have_failed and log.exists() and "waiting for the draft at" in log.read_text(), up)
        assert not (state_dir / "server").exists()
        draft = next(child for child in up.children() if any("/draft.sock" in word for word in child.cmdline()))
        until(lambda: draft.status() == psutil.STATUS_STOPPED, up)
        draft.resume()
        until((state_dir / "server").exists, up)
        found = status(state_dir)
        assert (found["algorithm"], found["draft_state"]) == ("standalone", "attached")
        assert "requests are served without it" not in up.errors()
        up.signal(signal.SIGINT)
        assert up.end() == 0


@pytest.mark.parametrize(
    ("states", "last_end", "num_looks"),
    [
        (["missing", "catching up", "attached", "attached"], "", 3),
        (["", "attached"], "", 1),
        (["missing", "attached"], "was killed by SIGKILL", 1),
        (["missing"] * 100, "", 6),
    ],
)
async def test_a_draft_is_waited_for_unless_it_failed_or_takes_long(
    monkeypatch: pytest.MonkeyPatch, states: list[str], last_end: str, num_looks: int
) -> None:
    monkeypatch.setattr(run, "_DRAFT_POLL_S", 0.0)
    looks: list[str] = []

    async def fetch_status(server: str) -> Any:
        looks.append(server)
        return SimpleNamespace(state=SimpleNamespace(draft_state=states[len(looks) - 1]))

    monkeypatch.setattr(run, "fetch_status", fetch_status)
    monkeypatch.setattr(run, "time", SimpleNamespace(monotonic=lambda: float(len(looks))))
    draft = SimpleNamespace(command=SimpleNamespace(is_optional=True), last_end=last_end)
    supervisor = cast("Supervisor", SimpleNamespace(services=lambda: [draft]))
    status = await run._with_draft("here", supervisor)
    assert len(looks) == num_looks
    assert status.state.draft_state == states[num_looks - 1]
