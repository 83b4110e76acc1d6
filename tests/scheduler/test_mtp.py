"""Multi-token prediction modules on real engines and streams: they draft what their definition says."""

from __future__ import annotations

import random
from pathlib import Path
from typing import NamedTuple, cast

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from slipstream.common.device.cpu.device import HostDevice
from slipstream.common.wire.sequence import SamplingParams, SequenceSpec
from slipstream.common.wire.step import FenceName
from slipstream.scheduler.link import Link
from slipstream.services.draft.drafters import HeadDrafter
from slipstream.services.factory import make_draft
from slipstream.services.models.head_config import MTP
from slipstream.services.worker.config import WorkerConfig
from slipstream.services.worker.engine import RoleEngine
from slipstream.services.worker.future_map import NextStepState
from slipstream.services.worker.slots import SamplingMode
from slipstream.training import checkpoint
from slipstream.training.mtp import MtpModule
from tests.harness.counted_jobs import Job, OutputRow
from tests.harness.eagle3_checkpoints import MODULES, NUM_MODULES, write_head
from tests.harness.local_epoch import LocalEpoch, Models, Served, Way
from tests.harness.seeded_jobs import SEED, make_jobs
from tests.harness.workers import local_workers
from tests.ordering.replay import Replay

pytestmark = pytest.mark.sampled_module(2)


class Proposal(NamedTuple):
    """The tokens that were drafted behind a sequence of `seq_len` tokens and the bonus token."""

    seq_len: int
    num_new: int
    """Of them, those of the last step, the bonus token in place of one."""
    tokens: list[int]


class Definition:
    """The modules without keys and values that are kept: every token is computed again for each draft."""

    def __init__(self, target: Path, head: Path) -> None:
        self._target = checkpoint.load_for_training(target).eval()
        self._output = load_file(target / "model.safetensors")["lm_head.weight"]
        weights, first = load_file(head / "model.safetensors"), self._target.shape.num_hidden_layers
        self._modules = [MtpModule(self._target.shape).eval() for _ in range(NUM_MODULES)]
        for number, module in enumerate(self._modules):
            prefix = f"model.layers.{first + number}."
            own = {name.removeprefix(prefix): weight for name, weight in weights.items() if name.startswith(prefix)}
            module.load_state_dict(own)

    @torch.no_grad()
    def drafts(self, tokens: list[int], count: int, start: int = 0) -> list[int]:
        """The most likely tokens behind `tokens`, the last of which is the bonus token.

        `start`: the first position of which the modules have a state.
        """
        length, known = len(tokens) - 1, list(tokens)
        states = self._target.hidden(torch.tensor([tokens[:-1]]))[:, start:]
        for number, module in enumerate(self._modules[:count], start=1):
            before, states = states, self._run(module, known[start + number : number + length], states)
            known.append(self._best(states))
        for _ in range(count - len(self._modules)):
            before = torch.cat((before, states[:, -1:]), dim=1)
            states = self._run(module, known[start + number :][: before.shape[1]], before)
            known.append(self._best(states))
        return known[len(tokens) :]

    def _run(self, module: MtpModule, tokens: list[int], states: torch.Tensor) -> torch.Tensor:
        embedded, places = self._target.model.embed_tokens(torch.tensor([tokens])), slice(0, len(tokens))
        return module.combine(embedded, states, self._target.cos[places], self._target.sin[places])

    def _best(self, states: torch.Tensor) -> int:
        return int(F.linear(states[0, -1], self._output).argmax())


class Prompter:
    """Records what is drafted for one sequence after the other, and gives verify tokens of which it accepts some."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, expected: list[list[int]]) -> None:
        """`expected`: the tokens of each sequence, its prompt and what the target is going to choose."""
        self._expected = expected
        self._random = random.Random(SEED)
        self._proposals: dict[tuple[int, ...], list[Proposal]] = {}
        self._tokens: list[int] = []
        self._propose = HeadDrafter.propose
        monkeypatch.setattr(HeadDrafter, "propose", lambda *arguments: self._record(*arguments))

    def follow(self, job: Job) -> None:
        """What is drafted from now on is for this job."""
        prompt = list(job.spec.prompt)
        self._tokens = next(tokens for tokens in self._expected if tokens[: len(prompt)] == prompt)

    def check(self, job: Job, definition: Definition, num_draft_tokens: int, *, is_late: bool = False) -> None:
        """Asserts that what was drafted for a job is what the definition says."""
        self.follow(job)
        proposals = self._proposals.pop(tuple(self._tokens))
        checked = [one for one in proposals if one.seq_len < len(self._tokens)]
        assert len(checked) > 2
        assert job.stats.total_accepted_tokens > 0
        start = checked[0].seq_len - checked[0].num_new if is_late else 0
        for seq_len, _, drafted in checked:
            assert drafted == definition.drafts(self._tokens[: seq_len + 1], num_draft_tokens, start)

    def _record(
        self, drafter: HeadDrafter, rows: torch.Tensor, stash: NextStepState, num_tokens: int, mode: SamplingMode
    ) -> torch.Tensor:
        drafted = self._propose(drafter, rows, stash, num_tokens, mode)
        found = map(Proposal, stash.seq_lens.tolist(), stash.num_new.tolist(), drafted.tolist())
        self._proposals.setdefault(tuple(self._tokens), []).extend(found)
        first = int(stash.seq_lens[0]) + 1
        right = self._tokens[first : first + self._random.randrange(num_tokens + 1)]
        drafted[0, : len(right)] = torch.tensor(right, dtype=drafted.dtype)
        return drafted


@pytest.fixture(scope="module")
def head(target: Path) -> Path:
    """Modules with random weights."""
    return write_head(target.with_name("modules"), layout=MODULES, has_embedding=False, has_tokenizer=False)


@pytest.fixture(scope="module")
def definition(target: Path, head: Path) -> Definition:
    """Their definition."""
    return Definition(target, head)


@pytest.fixture
def both(verify: RoleEngine, target: Path, head: Path) -> Models:
    """The target and the modules."""
    draft = make_draft(WorkerConfig(model=head, target=target, algorithm=MTP), HostDevice(), 0)
    return Models(verify, draft, draft)


def greedy_job(prompt: tuple[int, ...], max_new_tokens: int = 20) -> Job:
    """A job without noise."""
    spec = SequenceSpec(
        job_id="job",
        prompt=prompt,
        max_new_tokens=max_new_tokens,
        sampling=SamplingParams(),
        stop_token_ids=frozenset(),
    )
    return Job(spec)


def plain_tokens(models: Models, prompts: list[tuple[int, ...]], max_new_tokens: int = 20) -> list[list[int]]:
    """Prompts and what the target writes behind them."""
    outputs = Served(models, Way(run_ahead=0)).run([greedy_job(prompt, max_new_tokens) for prompt in prompts])
    return [[*prompt, *output] for prompt, output in zip(prompts, outputs, strict=True)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("num_draft_tokens", "chunk_tokens"),
    [(NUM_MODULES, 1), (NUM_MODULES + 2, 7), (NUM_MODULES - 1, 64)],
    ids=["as many tokens as modules", "more tokens", "fewer tokens"],
)
def test_drafts_are_those_of_the_definition(
    both: Models, definition: Definition, monkeypatch: pytest.MonkeyPatch, num_draft_tokens: int, chunk_tokens: int
) -> None:
    expected = plain_tokens(both, [job.spec.prompt for job in make_jobs()])
    prompter = Prompter(monkeypatch, expected)
    way = Way(num_draft_tokens=num_draft_tokens, run_ahead=0, slots=1, chunk_tokens=chunk_tokens)
    for job in [greedy_job(job.spec.prompt) for job in make_jobs()]:
        prompter.follow(job)
        (output,) = Served(both, way).run([job])
        assert [*job.spec.prompt, *output] in expected
        prompter.check(job, definition, num_draft_tokens)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("num_draft_tokens", [2, NUM_MODULES + 1])
def test_drafts_behind_a_hit_are_those_of_the_definition(
    both: Models, definition: Definition, monkeypatch: pytest.MonkeyPatch, num_draft_tokens: int
) -> None:
    """Prompts that end no to five tokens behind a page that they share."""
    (first,) = plain_tokens(both, [tuple(range(50, 66))])
    endings = [(), (7,), (7, 8, 9), (7, 8, 9, 10, 11), (7, 8, 9, 10, 12)]
    prompts = [(*first[:-4], *ending) for ending in endings]
    prompter = Prompter(monkeypatch, plain_tokens(both, prompts, 16))
    jobs = [*(greedy_job(prompt, 2) for prompt in prompts), *(greedy_job(prompt, 16) for prompt in prompts)]
    served = Served(both, Way(num_draft_tokens=num_draft_tokens, run_ahead=0, slots=1))
    add = served.epoch.jobs.add

    def add_followed(job: Job) -> None:
        prompter.follow(job)
        add(job)

    # As soon as it has a token, the draft may be at work.
    monkeypatch.setattr(served.epoch.jobs, "add", add_followed)
    served.run(*([job] for job in jobs))
    again = jobs[len(prompts) :]
    assert {job.stats.cached_tokens for job in again} == {28, 32}, "with and without the page before the endings"
    for job in again:
        prompter.check(job, definition, num_draft_tokens)


def test_modules_that_come_late_read_what_they_have_states_of(
    both: Models, definition: Definition, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, num_draft_tokens = tuple(range(20, 33)), NUM_MODULES + 1
    prompter, job = Prompter(monkeypatch, plain_tokens(both, [prompt], 50)), greedy_job(prompt, 50)
    config = Way(num_draft_tokens=num_draft_tokens, run_ahead=0, slots=2).config(None)
    with local_workers(both.verify, both.draft) as workers:
        epoch = LocalEpoch(1, config, workers[:1])

        def attach(job: Job, row: OutputRow) -> None:
            prompter.follow(job)
            if len(epoch.outputs[job]) > 5 and not epoch.attachments:
                epoch.epoch.speculation.offer(epoch.attach(cast("Link", workers[1])))
            if not epoch.events:
                workers[1].stream.synchronize(20.0)  # or the sequence may end before it has caught up

        epoch.on_progress = attach
        epoch.run([job])
    assert [event for event, _ in epoch.events] == ["joined"]
    prompter.check(job, definition, num_draft_tokens, is_late=True)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("run_ahead", [1, 2])
def test_each_step_waits_for_its_own_draft_when_drafts_follow_each_other_fast(
    both: Models, tmp_path: Path, run_ahead: int
) -> None:
    """As SGLang #21940 did for a draft of several layers: of all of them there is one record, which the step awaits.

    A record that is made again before its waiter came would break the pair; a fence is a number that only grows.
    """
    reports = []
    for strip in (None, FenceName.DRAFT_PROPOSED):
        logs = tmp_path / str(strip)
        logs.mkdir()
        way = Way(num_draft_tokens=NUM_MODULES, run_ahead=run_ahead, slots=3, chunk_tokens=5, debug=False)
        served = Served(both, way, log_dir=logs, strip=strip)
        outputs = served.run(make_jobs())
        reports.append(Replay(logs).report())
        if strip is None:
            assert outputs == Served(both, Way(run_ahead=0, slots=1)).run(*([job] for job in make_jobs()))
    sound, broken = reports
    assert not sound.races
    assert not sound.stuck
    assert sound.num_ordered > 100
    assert any("draft's write of draft_tokens" in str(race) for race in broken.races), "the checker sees it"
