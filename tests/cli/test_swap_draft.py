"""`slipstream swap-draft`: options that contradict each other, and what is printed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from slipstream import bundled
from slipstream.cli import draft_swaps
from slipstream.cli.swap_draft import SwapOptions, print_outcome, run_swap
from slipstream.common.errors import ConfigError, UnavailableError
from slipstream.common.wire.server import DraftFigures, DraftSwap, SwapOutcome, SwapTerms
from slipstream.protos import scheduler_pb2_grpc
from slipstream.services.models.head_config import EAGLE3
from slipstream.services.worker.config import STANDALONE
from tests.harness.grpc_server import running_server

if TYPE_CHECKING:
    from slipstream.protos import scheduler_pb2

OUTCOME = SwapOutcome(
    before=DraftFigures(algorithm="none"),
    after=DraftFigures(
        algorithm="eagle3", num_draft_tokens=4, num_steps=200, accept_length=2.5, tokens_per_second=812.4, step_ms=7.25
    ),
    rolled_back=True,
    reason="too few tokens are accepted",
    longest_pause_ms=12.54,
)


class _Scheduler(scheduler_pb2_grpc.SchedulerServicer):
    async def SwapDraft(  # noqa: N802
        self, request: scheduler_pb2.SwapDraftRequest, context: object
    ) -> scheduler_pb2.SwapDraftResponse:
        assert DraftSwap.from_pb(request) == DraftSwap(address="unix:/d", terms=SwapTerms(judge_steps=3))
        return OUTCOME.to_pb()


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("draft", {}),
        ("algorithm", {"draft": "d", "algorithm": "medusa"}),
        ("algorithm", {"draft": "unix:/d", "algorithm": "eagle3", "address": "unix:/s"}),
        ("draft", {"algorithm": "eagle3"}),
        ("algorithm", {"algorithm": "ngram", "address": "unix:/s"}),
        ("draft", {"algorithm": "none", "draft": "d"}),
        ("draft", {"algorithm": "ngram", "draft": "d"}),
        ("draft", {"draft": "d", "address": "unix:/s"}),
        ("num_draft_tokens", {"algorithm": "none", "num_draft_tokens": 2}),
        ("address", {"algorithm": "none", "address": "nowhere"}),
        ("judge_steps", {"algorithm": "none", "judge_steps": -1}),
        ("rollback_below", {"algorithm": "none", "rollback_below": float("nan")}),
    ],
)
def test_options_that_contradict_each_other_are_refused_by_name(field: str, given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"^{field}: "):
        SwapOptions(**given)


@pytest.mark.parametrize(
    ("draft", "algorithm"), [(bundled.eagle3_dir(), EAGLE3), (bundled.standalone_dir(), STANDALONE)]
)
async def test_the_algorithm_is_that_of_the_draft(draft: Path, algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    async def request_swap(_state_dir: Path, *given: object) -> SwapOutcome:
        asked.extend(given)
        return OUTCOME

    monkeypatch.setattr(draft_swaps, "request_swap", request_swap)
    await run_swap(SwapOptions(draft=str(draft)), Path(), as_json=True)
    assert asked[:2] == [draft, algorithm]


def test_the_table_has_the_figures_and_says_what_became_of_the_draft(capsys: pytest.CaptureFixture[str]) -> None:
    print_outcome(OUTCOME)
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert ["before", "none", "0", "0", "-", "-", "-"] in lines
    assert ["after", "eagle3", "4", "200", "2.50", "812", "7.25"] in lines
    assert ["rolled", "back:", "too", "few", "tokens", "are", "accepted"] in lines
    assert ["longest", "pause", "between", "two", "steps:", "12.5", "ms"] in lines


async def test_it_asks_a_scheduler_at_an_address(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    service = ("slipstream.v1.Scheduler", scheduler_pb2_grpc.add_SchedulerServicer_to_server, _Scheduler())
    async with running_server(service) as server:
        options = SwapOptions(draft="unix:/d", address=server.address, judge_steps=3)
        assert await run_swap(options, tmp_path, as_json=True) == 1
    assert json.loads(capsys.readouterr().out)["after"]["accept_length"] == 2.5
    with pytest.raises(UnavailableError, match="no scheduler answers at"):
        await run_swap(options, tmp_path, as_json=True)


def test_a_relative_directory_is_that_of_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert SwapOptions(draft="d", algorithm="eagle3").directory == tmp_path / "d"
    assert SwapOptions(algorithm="none").directory is None
    assert SwapOptions(algorithm="ngram", num_draft_tokens=3).directory is None
