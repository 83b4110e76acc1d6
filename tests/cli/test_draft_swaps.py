"""Swaps of the draft: the command's options and output, and the control service of a running `up`, on fake drafts."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from slipstream import bundled
from slipstream.cli import draft_swaps
from slipstream.cli.draft_swaps import DraftSwaps, control_server, fetch_reports, request_swap
from slipstream.cli.models import WITHOUT_MODEL, ModelChoice
from slipstream.cli.process import ServiceCommand
from slipstream.cli.supervisor import Supervisor
from slipstream.cli.swap_draft import SwapOptions, print_outcome, run_swap
from slipstream.cli.up_config import UpConfig
from slipstream.common.errors import (
    CheckpointError,
    ConfigError,
    FailedPreconditionError,
    InvalidArgumentError,
    MismatchError,
    SlipstreamError,
    UnavailableError,
)
from slipstream.common.wire.server import DraftFigures, DraftSwap, SwapOutcome, SwapTerms
from slipstream.protos import scheduler_pb2, scheduler_pb2_grpc
from slipstream.services.models.head_config import DFLASH, EAGLE3
from slipstream.services.worker.config import STANDALONE
from tests.harness.grpc_server import running_server
from tests.harness.running import slipstream
from tests.harness.supervised import MakeCommand
from tests.harness.waiting import until

SWAPPED = SwapOutcome(
    before=DraftFigures(algorithm="standalone", num_draft_tokens=4),
    after=DraftFigures(algorithm="eagle3", num_draft_tokens=2, num_steps=9, accept_length=2.0),
)


class ScriptedScheduler(scheduler_pb2_grpc.SchedulerServicer):
    """Answers swaps as told, once it may."""

    def __init__(self) -> None:
        self.swaps: list[DraftSwap] = []
        self.answer: SwapOutcome | SlipstreamError = SWAPPED
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def SwapDraft(self, request: Any, context: object) -> Any:  # noqa: N802
        self.swaps.append(DraftSwap.from_pb(request))
        await self.may_answer.wait()
        if isinstance(self.answer, SlipstreamError):
            raise self.answer
        return self.answer.to_pb()


class Up:
    """What `up` is made of, without the other services."""

    def __init__(
        self, config: UpConfig, supervisor: Supervisor, scheduler: ScriptedScheduler, logs: list[Path]
    ) -> None:
        self.logs = logs
        self.config = config
        self.supervisor = supervisor
        self.scheduler = scheduler
        self.old = supervisor.service("draft")
        self.old_process = psutil.Process(self.old.process.pid)
        self.new = config.models.target.parent / "new"

    async def swap(self, algorithm: str = "eagle3", draft: Path | None = None, **terms: Any) -> SwapOutcome:
        draft = None if algorithm in WITHOUT_MODEL else draft or self.new
        return await request_swap(self.config.state_dir, draft, algorithm, SwapTerms(**terms))

    def drafts(self) -> list[str]:
        return [one.name for one in self.supervisor.services() if one.name.startswith("draft")]


@pytest.fixture
async def up(tmp_path: Path, fake_service: MakeCommand, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Up]:
    def worker_command(config: UpConfig, name: str) -> ServiceCommand:
        address, broken = config.socket(config.draft_instance), str(config.models.draft) + "/broken"
        command = fake_service(name, "--die-when", broken)
        argv = tuple(address if word == command.address else word for word in command.argv)
        log_path = config.log_path(config.draft_instance)
        return replace(command, argv=argv, address=address, log_path=log_path, restarts=True, is_optional=True)

    monkeypatch.setattr(draft_swaps, "worker_command", worker_command)
    for name in ("target", "old", "new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").touch()
    state_dir = tmp_path / "state"
    (state_dir / "sockets").mkdir(parents=True)
    for folder in (state_dir, state_dir / "sockets"):
        folder.chmod(0o700)
    models = ModelChoice(target=tmp_path / "target", draft=tmp_path / "old", algorithm="standalone")
    config = UpConfig(models=models, device="cpu", state_dir=state_dir, listen="127.0.0.1:0")
    scheduler, logs = ScriptedScheduler(), list[Path]()

    async def check(config: UpConfig) -> None:
        if config.models.algorithm == "eagle":
            raise CheckpointError("it is no head")

    service = ("slipstream.v1.Scheduler", scheduler_pb2_grpc.add_SchedulerServicer_to_server, scheduler)
    async with (
        running_server(service, address=config.socket("scheduler")),
        Supervisor(ready_timeout_s=20, drain_timeout_s=5) as supervisor,
        control_server(state_dir, supervisor, DraftSwaps(config, supervisor, logs.append, check)),
    ):
        supervisor.start(worker_command(config, "draft"))
        supervisor.start(fake_service("scheduler"))
        await until(lambda: all(one.is_ready for one in supervisor.services()))
        async with watching(supervisor):
            yield Up(config, supervisor, scheduler, logs)


@asynccontextmanager
async def watching(supervisor: Supervisor) -> AsyncIterator[None]:
    """Keeps the services meanwhile; none may die for good."""
    task = asyncio.create_task(supervisor.watch())
    try:
        yield
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_the_new_draft_takes_over_and_is_the_one_that_is_started_again(up: Up) -> None:
    assert await up.swap(num_draft_tokens=2, judge_steps=7) == SWAPPED
    address = up.config.socket("draft-2")
    assert up.scheduler.swaps == [DraftSwap(address=address, terms=SwapTerms(num_draft_tokens=2, judge_steps=7))]
    assert up.logs == [up.config.log_path("draft-2")]
    assert not up.old_process.is_running()
    assert up.drafts() == ["draft"]
    words = up.supervisor.service("scheduler").command.argv
    assert words[words.index("--draft") + 1] == address
    assert words[words.index("--swapped-draft-tokens") + 1] == "2"
    assert "--num-draft-tokens" not in words, "the new draft may rest as well"
    draft = up.supervisor.service("draft")
    os.kill(draft.process.pid, signal.SIGKILL)
    await until(lambda: draft.num_restarts == 1 and draft.is_ready)
    assert draft.process.command.address == address
    (report,) = (one for one in await fetch_reports(up.config.state_dir) if one.name == "draft")
    assert (report.pid, report.state, report.num_restarts) == (draft.process.pid, "ready", 1)
    assert report.last_end == "was killed by SIGKILL"
    assert await up.swap("none") == SWAPPED
    assert up.scheduler.swaps[-1].address == ""
    assert up.drafts() == []
    words = up.supervisor.service("scheduler").command.argv
    assert "--draft" not in words
    assert "--swapped-draft-tokens" not in words
    with pytest.raises(FailedPreconditionError, match="there is no draft to take away"):
        await up.swap("none")


async def test_a_draft_that_cannot_be_served_is_refused_before_anything_starts(up: Up) -> None:
    with pytest.raises(CheckpointError, match=r"^it is no head$"):
        await up.swap("eagle")
    assert (up.logs, up.drafts(), up.scheduler.swaps) == ([], ["draft"], [])
    assert up.old_process.is_running()
    assert await up.swap() == SWAPPED


async def test_a_draft_without_a_model_comes_and_goes_like_one_with_a_model(up: Up) -> None:
    assert await up.swap("ngram") == SWAPPED
    assert up.drafts() == ["draft"]
    assert not up.old_process.is_running()
    words = up.supervisor.service("scheduler").command.argv
    assert words[words.index("--draft") + 1] == up.config.socket("draft-2")
    assert await up.swap("none") == SWAPPED
    assert up.drafts() == []


async def test_a_draft_that_is_rolled_back_is_ended_and_the_old_one_stays(up: Up) -> None:
    before = up.supervisor.service("scheduler").command
    up.scheduler.answer = replace(SWAPPED, rolled_back=True, reason="worse")
    assert await up.swap() == up.scheduler.answer
    assert up.supervisor.services()[0] is up.old
    assert up.drafts() == ["draft"]
    assert up.old_process.is_running()
    assert up.supervisor.service("scheduler").command == before


async def test_a_draft_that_does_not_fit_is_ended_and_the_client_is_told_what_differs(up: Up) -> None:
    up.scheduler.answer = MismatchError(["the vocabulary differs"])
    with pytest.raises(MismatchError, match="the vocabulary differs"):
        await up.swap()
    assert up.drafts() == ["draft"]
    assert up.old_process.is_running()


async def test_a_draft_that_does_not_start_is_an_error_with_the_end_of_its_log(up: Up) -> None:
    (up.new / "broken").touch()
    with pytest.raises(
        FailedPreconditionError, match="the new draft ended with exit status 1 before it was ready"
    ) as caught:
        await up.swap()
    assert "fake service cannot load its model" in str(caught.value)
    assert up.scheduler.swaps == []
    assert up.drafts() == ["draft"]


async def test_one_swap_at_a_time_which_outlives_its_client(up: Up) -> None:
    up.scheduler.may_answer.clear()
    client = asyncio.create_task(up.swap())
    await until(lambda: bool(up.scheduler.swaps))
    with pytest.raises(FailedPreconditionError, match="another swap of the draft is under way"):
        await up.swap()
    client.cancel()
    await asyncio.gather(client, return_exceptions=True)
    up.scheduler.may_answer.set()
    await until(lambda: up.drafts() == ["draft"])
    assert not up.old_process.is_running()


@pytest.mark.parametrize(
    ("field", "algorithm", "draft"),
    [("draft", "eagle3", "nothing"), ("algorithm", "medusa", "new"), ("draft", "none", "new")],
)
async def test_what_makes_no_sense_is_refused_by_name(up: Up, field: str, algorithm: str, draft: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"^{field}: "):
        await request_swap(up.config.state_dir, up.new.parent / draft, algorithm, SwapTerms())
    assert up.scheduler.swaps == []


async def test_a_wrong_draft_is_named_by_its_option(up: Up) -> None:
    options = ("--draft", str(up.new.parent / "nothing"), "--state-dir", str(up.config.state_dir))
    found = await asyncio.to_thread(slipstream, "swap-draft", *options)
    assert found.returncode == 2
    assert found.stderr.startswith(f"slipstream: error: --draft: got '{up.new.parent / 'nothing'}', accepted: ")


async def test_an_algorithm_without_a_model_is_refused(up: Up) -> None:
    with pytest.raises(InvalidArgumentError, match="a draft model for"):
        await request_swap(up.config.state_dir, None, "eagle3", SwapTerms())


async def test_without_an_up_there_is_one_clear_sentence(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match=f"^no `slipstream up` answers in {tmp_path}$"):
        await request_swap(tmp_path, None, "none", SwapTerms())
    assert await fetch_reports(tmp_path) == []


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
    ("draft", "algorithm"),
    [(bundled.eagle3_dir(), EAGLE3), (bundled.dflash_dir(), DFLASH), (bundled.standalone_dir(), STANDALONE)],
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
