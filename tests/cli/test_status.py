"""`status` of a server whose services are in all states."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from slipstream.cli.process import ServiceReport
from slipstream.cli.status import fetch_status
from slipstream.cli.supervisor import Supervisor
from slipstream.common.wire.server import ServiceState

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cli.conftest import MakeCommand, ServeState

pytestmark = pytest.mark.timeout(30)


@pytest.fixture
def far(tmp_path: Path) -> str:
    """The address of a socket whose folder is not on this host."""
    return f"unix:{tmp_path}/none/far.sock"


async def test_each_service_is_asked(serve_state: ServeState, fake_service: MakeCommand, far: str) -> None:
    async with Supervisor(ready_timeout_s=20, drain_timeout_s=5) as supervisor:
        ready = fake_service("ready")
        supervisor.start(ready)
        await supervisor.wait_ready()
        address = await serve_state(
            ServiceState(name="ready", address=ready.address, pid=1),
            ServiceState(name="gone", address=ready.address + ".gone", pid=2),
            ServiceState(name="far", address=far, pid=3),
        )
        status = await fetch_status(address)
    assert status.health == {"ready": "SERVING", "gone": "UNREACHABLE", "far": "ELSEWHERE"}
    assert not status.is_healthy
    assert json.loads(json.dumps(status.as_json()))["services"][1]["health"] == "UNREACHABLE"


async def test_what_cannot_be_asked_from_here_is_not_held_against_it(serve_state: ServeState, far: str) -> None:
    address = await serve_state(ServiceState(name="far", address=far, pid=3))
    assert (await fetch_status(address)).is_healthy


@pytest.mark.parametrize(
    ("draft", "words"),
    [
        (("", 0.0, ""), "algorithm standalone, 4 draft tokens a step, host fences"),
        (("attached", 11.7, ""), "algorithm standalone, 4 draft tokens a step, draft attached for 12 s, host fences"),
        (("resting", 11.7, ""), "4 draft tokens a step, draft attached for 12 s, resting now, host fences"),
        (("catching up", 0.2, ""), "draft catching up for 0 s, host fences"),
        (("missing", 200.0, "it died"), "without a draft for 3 min (it died), host fences"),
    ],
)
async def test_the_state_of_the_draft_is_said(
    serve_state: ServeState, draft: tuple[str, float, str], words: str
) -> None:
    status = await fetch_status(await serve_state())
    state, seconds, problem = draft
    changed = replace(status.state, draft_state=state, draft_state_seconds=seconds, draft_problem=problem)
    assert replace(status, state=changed).describe().endswith(words)


async def test_memory_that_a_draft_saves_is_said(serve_state: ServeState, far: str) -> None:
    draft = ServiceState(name="draft", address=far, pid=3, shared_weight_bytes=5 * 2**19)
    status = await fetch_status(await serve_state(draft))
    assert "draft borrows 2.5 MiB of the target's weights" in status.describe()
    assert status.as_json()["services"][0]["shared_weight_bytes"] == 5 * 2**19


async def test_restarts_are_shown_for_the_services_that_an_up_keeps(
    serve_state: ServeState, capsys: pytest.CaptureFixture[str], far: str
) -> None:
    def report(name: str, pid: int, state: str, last_end: str) -> ServiceReport:
        return ServiceReport(
            name=name, pid=pid, state=state, num_restarts=2, last_end=last_end, address=f"unix:/far/{name}.sock"
        )

    address = await serve_state(ServiceState(name="verify", address=far, pid=3))
    status = await fetch_status(address)
    reports = [report("verify", 3, "ready", "was killed by SIGKILL"), report("draft", 0, "died", "")]
    status.with_reports(reports).print()
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    words = f"verify ELSEWHERE 3 2 (was killed by SIGKILL) {far} - -"
    assert words.split() in rows
    assert ["draft", "died", "-", "2", "unix:/far/draft.sock", "-", "-"] in rows
    supervised = json.loads(json.dumps(status.with_reports(reports).as_json()))["supervised"]
    assert [(each["name"], each["num_restarts"]) for each in supervised] == [("verify", 2), ("draft", 2)]
    assert status.with_reports([report("verify", 4, "ready", "")]) == status
