"""Real engines on real streams, driven by the real loop: the tokens of a request are a function of the request."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from slipstream.common.access_log import JsonLinesAccessLog, StreamName
from slipstream.common.chunk import FinishReason
from slipstream.common.device.host_device import HostDevice
from slipstream.common.sampling import SamplingParams
from slipstream.common.step import FenceName, FenceOps, Role
from slipstream.scheduler.config import SchedulerConfig
from slipstream.scheduler.jobs import Job, JobSpec
from slipstream.scheduler.ordering.replay import Replay
from slipstream.services.config import WorkerConfig
from slipstream.services.draft.engine import DraftEngine
from slipstream.services.roles import make_draft, make_verify
from tests.checkpoints import write_checkpoint, write_weights
from tests.leaks import nothing_left
from tests.scheduler.local_epoch import LocalEpoch
from tests.workers import LocalWorker

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from slipstream.common.future_map import Stash
    from slipstream.common.logprobs import TokenLogprobs
    from slipstream.common.step import StepCommand
    from slipstream.scheduler.ordering.replay import Report
    from slipstream.services.engine import EpochState, RoleEngine
    from slipstream.services.padded_chunks import PaddedChunks
    from slipstream.services.slot_table import Needs

SEED = 11
SAMPLINGS = (
    SamplingParams(),
    SamplingParams(temperature=0.8, seed=1),
    SamplingParams(temperature=1.0, top_k=40, seed=2),
    SamplingParams(temperature=1.2, top_p=0.9, seed=2**64 - 1),
    SamplingParams(temperature=0.7, min_p=0.05, top_k=100, seed=4),
)


@dataclass(frozen=True)
class Models:
    """Both sides of a step, loaded once."""

    verify: RoleEngine
    draft: RoleEngine
    twin: RoleEngine
    """A draft that is the target itself."""
    path: Path | None = None
    """Where the target was written."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """A random target, and a draft that is the target with some noise: it guesses right now and then."""
    target = write_checkpoint(tmp_path_factory.mktemp("models") / "target", seed=SEED)
    guesser = write_checkpoint(target.with_name("draft"), seed=SEED)
    weights = load_file(guesser / "model.safetensors")
    generator = torch.Generator().manual_seed(SEED)
    write_weights(
        guesser, {name: value + 0.02 * torch.randn(value.shape, generator=generator) for name, value in weights.items()}
    )
    device = HostDevice()
    return Models(
        verify=make_verify(WorkerConfig(model=target), device, 0),
        draft=make_draft(WorkerConfig(model=guesser), device, 0),
        twin=make_draft(WorkerConfig(model=target), device, 0),
        path=target,
    )


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Two streams share the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_jobs(
    count: int = len(SAMPLINGS),
    *,
    stop_token_ids: frozenset[int] = frozenset(),
    max_draft_tokens: tuple[int | None, ...] = (None,),
) -> list[Job]:
    """Prompts of 1 to 40 tokens, the same ones each time; `max_draft_tokens` of one job after the other, in turn."""
    rng = random.Random(SEED)
    specs = [
        JobSpec(
            job_id=str(number),
            prompt=tuple(rng.randrange(256) for _ in range(rng.choice((1, 7, 8, 9, 23, 40)))),
            max_new_tokens=rng.randrange(10, 24),
            sampling=SAMPLINGS[number % len(SAMPLINGS)],
            stop_token_ids=stop_token_ids,
            max_draft_tokens=max_draft_tokens[number % len(max_draft_tokens)],
        )
        for number in range(count)
    ]
    return [Job(spec) for spec in specs]


@dataclass(frozen=True, kw_only=True)
class Way:
    """How jobs are served."""

    num_draft_tokens: int = 0
    """0 is without a draft."""
    run_ahead: int = 1
    slots: int = 4
    chunk_tokens: int = 8
    page_tokens: int = 4
    debug: bool = True

    def config(self, log_dir: Path | None) -> SchedulerConfig:
        """The scheduler's settings."""
        return SchedulerConfig(
            verify="unix:/none",
            num_draft_tokens=max(1, self.num_draft_tokens),
            run_ahead=self.run_ahead,
            slots=self.slots,
            context_tokens=96,
            chunk_tokens=self.chunk_tokens,
            page_tokens=self.page_tokens,
            debug=self.debug,
            access_log_dir=log_dir,
        )


class Served:
    """Workers and an epoch."""

    def __init__(
        self, models: Models, way: Way, *, log_dir: Path | None = None, strip: FenceName | None = None
    ) -> None:
        self._strip = strip
        self._logs: list[JsonLinesAccessLog] = []
        roles = [models.verify, models.draft][: 2 if way.num_draft_tokens else 1]
        self.workers = [LocalWorker(role, self._log(role, log_dir), before_send=self._stripped) for role in roles]
        self.epoch = LocalEpoch(1, way.config(log_dir), self.workers)

    def run(self, *waves: list[Job]) -> list[list[int]]:
        """The tokens of each job."""
        outputs = self.epoch.run(*waves)
        self.close()
        assert not [error for worker in self.workers for error in worker.failures]
        return [outputs[job] for wave in waves for job in wave]

    def close(self) -> None:
        """The workers end."""
        for worker in self.workers:
            worker.close()
        for log in self._logs:
            log.close()

    def _log(self, role: RoleEngine, log_dir: Path | None) -> JsonLinesAccessLog | None:
        if log_dir is None:
            return None
        name = role.describe().role.value
        self._logs.append(JsonLinesAccessLog(log_dir / f"{name}.jsonl", StreamName(name)))
        return self._logs[-1]

    def _stripped(self, command: StepCommand) -> StepCommand:
        """The command without the waits that are to be left out."""
        waits = tuple(point for point in command.ops.waits if point.fence is not self._strip)
        return replace(command, ops=FenceOps(waits, command.ops.signals))


@pytest.fixture(scope="module")
def reference(models: Models) -> list[list[int]]:
    """Plain decoding, one request at a time, nothing runs ahead."""
    outputs = Served(models, Way(run_ahead=0, slots=1, chunk_tokens=64)).run(*([job] for job in make_jobs()))
    assert all(len(set(output)) > 5 for output in outputs), "the random model does not loop"
    return outputs


WAYS = [
    *(Way(run_ahead=run_ahead) for run_ahead in (0, 1, 2)),
    *(Way(num_draft_tokens=4, run_ahead=run_ahead) for run_ahead in (0, 1, 2)),
    Way(num_draft_tokens=1, run_ahead=1, slots=2),
    Way(num_draft_tokens=3, run_ahead=2, slots=1, page_tokens=16, chunk_tokens=64),
    Way(num_draft_tokens=4, run_ahead=1, debug=False),
]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_token_ids_are_the_same_however_they_are_served(models: Models, reference: list[list[int]], way: Way) -> None:
    together, alone = make_jobs(), make_jobs()
    with nothing_left():
        served = Served(models, way)
        outputs = served.run(together, *([job] for job in alone))
        assert outputs == reference * 2
        counts = [job.counts for job in (*together, *alone)]
        if way.num_draft_tokens:
            lengths = [count.mean_accept_length for count in counts]
            assert 1.2 < sum(lengths) / len(lengths) < way.num_draft_tokens + 1, "some drafts are right, not all"
        batch = served.epoch.epoch.batch
        assert (batch.num_running, batch.slots.num_free) == (0, way.slots)
        assert batch.pages.num_free == batch.pages.num_pages
        del served, batch


@pytest.mark.parametrize("run_ahead", [0, 2])
def test_stop_tokens_end_a_request_and_nobody_elses(models: Models, reference: list[list[int]], run_ahead: int) -> None:
    stop = reference[0][6]
    jobs = make_jobs(stop_token_ids=frozenset({stop}))
    served = Served(models, Way(num_draft_tokens=4, run_ahead=run_ahead))
    for output, full, job in zip(served.run(jobs), reference, jobs, strict=True):
        if stop in full:
            assert output == full[: full.index(stop) + 1]
            assert served.epoch.finish_reason(job) is FinishReason.STOP
        else:
            assert output == full


@pytest.mark.parametrize("seed", range(4))
def test_cancels_change_nothing_for_the_others(models: Models, seed: int) -> None:
    """Slots and pages change hands while steps of their last owners are still under way."""
    rng = random.Random(seed)
    way = Way(num_draft_tokens=2, run_ahead=rng.randrange(3), slots=2, debug=True)
    expected = Served(models, Way(run_ahead=0)).run(make_jobs(12))
    jobs = make_jobs(12)
    doomed = {job: rng.randrange(10) for job in rng.sample(jobs, 6)}
    served = Served(models, way)

    def cancel_some(*_: object) -> None:
        for job, after in doomed.items():
            if len(served.epoch.outputs[job]) >= after and job.counts.admitted_at is not None:
                served.epoch.queue.cancel(job)

    served.epoch.on_progress = cancel_some
    outputs = served.run(jobs)
    for job, output, full in zip(jobs, outputs, expected, strict=True):
        if served.epoch.finish_reason(job) is FinishReason.ABORT:
            assert job in doomed
            assert output == full[: len(output)]
        else:
            assert output == full
    assert any(served.epoch.finish_reason(job) is FinishReason.ABORT for job in jobs)


@pytest.mark.parametrize("run_ahead", [0, 2])
def test_a_draft_that_is_the_target_is_always_right(models: Models, reference: list[list[int]], run_ahead: int) -> None:
    """So draft's keys and values are those of the tokens that were accepted, and its noise is verify's."""
    for num_draft_tokens in (1, 4):
        way = Way(num_draft_tokens=num_draft_tokens, run_ahead=run_ahead)
        jobs = make_jobs()
        assert Served(Models(models.verify, models.twin, models.twin), way).run(jobs) == reference
        for job in jobs:
            # In a job's last step tokens past its end are drafted, for which there are no pages.
            missed = num_draft_tokens * job.counts.num_verify_steps - job.counts.total_accepted_tokens
            assert missed <= num_draft_tokens
            assert job.counts.num_verify_steps == -(-(job.spec.max_new_tokens - 1) // (num_draft_tokens + 1))


@pytest.mark.parametrize("run_ahead", [0, 1, 2])
@pytest.mark.parametrize("bounds", [(0, None), (0, 0, 2, 0), (1, 0, 3), (0,)], ids=str)
def test_speculation_that_is_bounded_or_off_changes_no_token(
    models: Models, reference: list[list[int]], run_ahead: int, bounds: tuple[int | None, ...]
) -> None:
    """Requests with and without it come and go in one batch, so that steps are of both kinds; the twin is always right
    as far as it may be, so a draft that lost the thread over plain steps would show."""
    num_draft_tokens = 4
    way = Way(num_draft_tokens=num_draft_tokens, run_ahead=run_ahead, slots=2)
    jobs = make_jobs(max_draft_tokens=bounds)
    assert Served(Models(models.verify, models.twin, models.twin), way).run(jobs) == reference
    for job in jobs:
        bound = num_draft_tokens if job.spec.max_draft_tokens is None else job.spec.max_draft_tokens
        counts = job.counts
        assert counts.total_draft_tokens == counts.num_verify_steps * bound
        assert counts.num_verify_steps == (-(-(job.spec.max_new_tokens - 1) // (bound + 1)) if bound else 0)
        assert counts.total_draft_tokens - counts.total_accepted_tokens <= bound
        assert counts.accepted_per_position[bound:] == [0] * (num_draft_tokens - bound)


def adjusted_jobs(plain: list[list[int]]) -> list[Job]:
    """Jobs with bias, penalties and masks, greedy and sampled, of which some speculate; and one with nothing of it.

    `plain`: what the same jobs bring with nothing of it.
    """
    frequent = sorted({token for output in plain for token in output[::3]})
    adjustments: tuple[dict[str, Any], ...] = (
        {"repetition_penalty": 1.4, "max_draft_tokens": 2},
        {"frequency_penalty": 1.2, "presence_penalty": -0.4},
        {"logit_bias": tuple((token, 6.0) for token in frequent[:3]), "frequency_penalty": 0.8},
        {},
        {"masked_token_ids": tuple(frequent), "masked_after": 9},
        {"repetition_penalty": 0.8, "presence_penalty": 1.5, "masked_token_ids": tuple(frequent), "masked_after": 4},
        {"repetition_penalty": 1.9, "logit_bias": ((frequent[5], 8.0), (frequent[7], 7.0)), "max_draft_tokens": 0},
        {"logit_bias": tuple((token, -100.0) for token in frequent[10:30]), "repetition_penalty": 1.1},
    )
    jobs = make_jobs(len(adjustments))
    for job, changes in zip(jobs, adjustments, strict=True):
        kept = {name: value for name, value in changes.items() if name not in ("max_draft_tokens", "masked_after")}
        if "masked_after" in changes:
            kept["masked_before"] = len(job.spec.prompt) + changes["masked_after"]
        sampling = replace(job.spec.sampling, **kept)
        job.spec = replace(job.spec, sampling=sampling, max_draft_tokens=changes.get("max_draft_tokens"))
    return jobs


@pytest.fixture(scope="module")
def plain(models: Models) -> list[list[int]]:
    """As many jobs as the adjusted ones, with nothing of it."""
    return Served(models, Way(run_ahead=0)).run(make_jobs(8))


@pytest.fixture(scope="module")
def adjusted_reference(models: Models, plain: list[list[int]]) -> list[list[int]]:
    """The adjusted jobs plainly, one at a time."""
    jobs = adjusted_jobs(plain)
    outputs = Served(models, Way(run_ahead=0, slots=1, chunk_tokens=64)).run(*([job] for job in jobs))
    changed = [output != as_before for output, as_before in zip(outputs, plain, strict=True)]
    assert changed == [bool(job.spec.sampling.adjusts_logits) for job in jobs], "each says something"
    for job, output in zip(jobs, outputs, strict=True):
        masked = job.spec.sampling.masked_before - len(job.spec.prompt)
        assert not set(output[: max(0, masked)]) & set(job.spec.sampling.masked_token_ids)
    return outputs


@pytest.mark.parametrize(
    "way",
    [
        Way(run_ahead=2),
        *(Way(num_draft_tokens=4, run_ahead=run_ahead) for run_ahead in (0, 1, 2)),
        Way(num_draft_tokens=3, run_ahead=2, slots=1, page_tokens=16, chunk_tokens=64),
    ],
    ids=str,
)
def test_penalties_bias_and_masks_are_exact_inside_what_is_accepted(
    models: Models, plain: list[list[int]], adjusted_reference: list[list[int]], way: Way
) -> None:
    together, alone = adjusted_jobs(plain), adjusted_jobs(plain)
    assert Served(models, way).run(together, *([job] for job in alone)) == adjusted_reference * 2
    if way.num_draft_tokens:
        assert sum(job.counts.total_accepted_tokens for job in together) > 20


@pytest.mark.parametrize("run_ahead", [0, 2])
def test_a_draft_that_is_the_target_applies_them_as_well(
    models: Models, plain: list[list[int]], adjusted_reference: list[list[int]], run_ahead: int
) -> None:
    """So what it remembers of the prompt and the output is what verify does."""
    way, jobs = Way(num_draft_tokens=4, run_ahead=run_ahead, slots=3), adjusted_jobs(plain)
    assert Served(Models(models.verify, models.twin, models.twin), way).run(jobs) == adjusted_reference
    for job in jobs:
        bound = 4 if job.spec.max_draft_tokens is None else job.spec.max_draft_tokens
        assert job.counts.total_draft_tokens - job.counts.total_accepted_tokens <= bound


@pytest.mark.parametrize("num_draft_tokens", [0, 4])
def test_the_repetition_penalty_is_that_of_transformers(models: Models, num_draft_tokens: int) -> None:
    """Over prompt and output, and over chunks; a slot that goes from one request to the next keeps nothing."""
    jobs = make_jobs(6)
    for job, penalty in zip(jobs, (1.3, 1.7, 0.8, 1.0, 2.0, 1.2), strict=True):
        sampling = SamplingParams(repetition_penalty=penalty)
        # Half of the prompt again: its tokens are likely, and punished.
        job.spec = replace(job.spec, prompt=job.spec.prompt + job.spec.prompt[::2], sampling=sampling)
    outputs = Served(models, Way(num_draft_tokens=num_draft_tokens, run_ahead=2, slots=2)).run(jobs)
    reference_model = AutoModelForCausalLM.from_pretrained(models.path, dtype=torch.float32)
    for job, output in zip(jobs, outputs, strict=True):
        generated = reference_model.generate(
            torch.tensor([job.spec.prompt]),
            max_new_tokens=job.spec.max_new_tokens,
            min_new_tokens=job.spec.max_new_tokens,
            repetition_penalty=job.spec.sampling.repetition_penalty,
            do_sample=False,
        )
        assert generated[0, len(job.spec.prompt) :].tolist() == output


@pytest.mark.parametrize("num_draft_tokens", [0, 4])
def test_logprobs_are_those_of_a_plain_forward(
    models: Models, plain: list[list[int]], adjusted_reference: list[list[int]], num_draft_tokens: int
) -> None:
    """Of every token of those that asked, before bias, penalties, masks and temperature; the first one's, too."""
    asked = (5, None, 0, 20, None, 1, 20, 3)
    jobs = adjusted_jobs(plain)
    for job, number in zip(jobs, asked, strict=True):
        job.spec = replace(job.spec, top_logprobs=number)
    served = Served(models, Way(num_draft_tokens=num_draft_tokens, run_ahead=2, slots=3))
    found: dict[Job, list[TokenLogprobs]] = {job: [] for job in jobs}
    served.epoch.on_progress = lambda job, progress: found[job].extend(progress.logprobs)
    assert served.run(jobs) == adjusted_reference
    reference_model = AutoModelForCausalLM.from_pretrained(models.path, dtype=torch.float32)
    for job, output, number in zip(jobs, adjusted_reference, asked, strict=True):
        if number is None:
            assert found[job] == []
            continue
        with torch.inference_mode():
            logits = reference_model(torch.tensor([[*job.spec.prompt, *output]])).logits[0]
        expected = logits[len(job.spec.prompt) - 1 : -1].log_softmax(dim=1)
        assert len(found[job]) == len(output)
        for row, token, likely in zip(expected, output, found[job], strict=True):
            assert likely.logprob == pytest.approx(float(row[token]), abs=1e-3)
            top = row.topk(number)
            assert [logprob for _, logprob in likely.top] == pytest.approx(top.values.tolist(), abs=1e-3)
            for other, logprob in likely.top:
                assert logprob == pytest.approx(float(row[other]), abs=1e-3)


class HiddenDrafter:
    """Implements `Drafter` by a guess that depends on the target's hidden states and on nothing else."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.states: list[torch.Tensor] = []

    def open(self, state: EpochState) -> None:
        """See `Drafter.open`."""

    def close(self) -> None:
        """See `Drafter.close`."""

    def prefill(self, chunks: PaddedChunks, hidden: torch.Tensor | None) -> None:
        """See `Drafter.prefill`."""
        assert hidden is not None
        assert len(hidden) == int(chunks.lengths.sum())

    def propose(self, rows: torch.Tensor, stash: Stash, num_tokens: int, needs: Needs) -> torch.Tensor:
        """See `Drafter.propose`."""
        assert stash.hidden_states is not None
        last = stash.hidden_states[torch.arange(len(rows)), stash.num_new - 1]
        self.states.append(last.clone())
        guess = (last.abs().sum(dim=1) * 1000).to(torch.int64) % self._vocab_size
        return guess[:, None].repeat(1, num_tokens)


@pytest.mark.parametrize("run_ahead", [0, 1, 2])
def test_a_draft_that_reads_hidden_states(
    models: Models, reference: list[list[int]], tmp_path: Path, run_ahead: int
) -> None:
    verify = models.verify.describe()
    drafter = HiddenDrafter(verify.vocab_size)
    head = DraftEngine(drafter, replace(models.draft.describe(), hidden_width=verify.hidden_width))
    served = Served(
        Models(models.verify, head, head), Way(num_draft_tokens=2, run_ahead=run_ahead, slots=2), log_dir=tmp_path
    )
    assert served.run(make_jobs()) == reference
    states = torch.cat(drafter.states)
    assert states.shape[1] == verify.hidden_width
    assert states.unique(dim=0).shape[0] > 20, "each step's own"
    report = Replay(tmp_path).report()
    assert not report.races
    assert not report.stuck


class TestReplay:
    """The order of a real run, from its logs."""

    @pytest.mark.parametrize("run_ahead", [0, 1, 2])
    def test_nothing_collides(self, models: Models, tmp_path: Path, run_ahead: int) -> None:
        report = self._report(models, tmp_path, Way(num_draft_tokens=2, run_ahead=run_ahead, slots=2))
        assert not report.races
        assert not report.stuck
        assert report.num_logs == 3
        assert report.num_ordered > 100

    def test_without_the_wait_for_the_draft_its_tokens_collide(self, models: Models, tmp_path: Path) -> None:
        report = self._report(models, tmp_path, Way(num_draft_tokens=2), strip=FenceName.DRAFT_DONE)
        texts = list(map(str, report.races))
        assert any(
            "draft's write of draft_tokens" in text and "verify's read of draft_tokens" in text for text in texts
        )

    def test_without_the_wait_for_the_stash_its_rows_collide(self, models: Models, tmp_path: Path) -> None:
        way = Way(num_draft_tokens=2, debug=False)
        report = self._report(models, tmp_path, way, strip=FenceName.VERIFY_STASH)
        for name in ("seq_lens", "bonus_tokens", "num_new", "last_tokens"):
            assert _names(report, f"verify's write of {name}", f"draft's read of {name}")

    def _report(self, models: Models, folder: Path, way: Way, strip: FenceName | None = None) -> Report:
        Served(models, way, log_dir=folder, strip=strip).run(make_jobs(4))
        return Replay(folder).report()


def _names(report: Report, *accesses: str) -> bool:
    """Whether one of the races is between these."""
    return any(all(access in str(race) for access in accesses) for race in report.races)


def test_roles_are_what_they_say(models: Models) -> None:
    assert models.verify.describe().role is Role.VERIFY
    assert models.draft.describe().role is Role.DRAFT
    models.draft.describe().check_fits(models.verify.describe())
