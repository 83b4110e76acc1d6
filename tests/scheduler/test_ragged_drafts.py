"""Steps in which each sequence has its own number of draft tokens, drawn anew each time: no token changes."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipstream.common.device.cpu.device import HostDevice
from slipstream.common.errors import InvalidArgumentError, MismatchError
from slipstream.common.wire.step import EVEN_DRAFT_TOKENS, RowTokens, StepCommand
from slipstream.scheduler.config import MOST_DRAFT_TOKENS
from slipstream.scheduler.draft_choice import DraftChoice
from slipstream.scheduler.observer import DecodedStep, accepted_of_first
from slipstream.services.factory import make_draft
from slipstream.services.models.head_config import DFLASH, EAGLE3
from slipstream.services.models.sampler import SimulatedAcceptance
from slipstream.services.worker.config import WorkerConfig
from slipstream.services.worker.slots import check_draft_tokens
from tests.harness.counted_jobs import Job, OutputRow
from tests.harness.eagle3_checkpoints import AUTHORS, BLOCKS, make_head, write_head
from tests.harness.inline_device import InlineDevice
from tests.harness.local_epoch import LocalEpoch, Models, Served, Way
from tests.harness.random_choice import RandomChoice
from tests.harness.seeded_jobs import make_jobs
from tests.harness.workers import local_workers
from tests.ordering.replay import Replay
from tests.scheduler.test_graphed_steps import DRAFTS, Checkpoints, checkpoints, make_config, roles
from tests.scheduler.test_graphed_steps import make_jobs as jobs_of_all_kinds

__all__ = ["checkpoints"]


def chosen_at_random(
    monkeypatch: pytest.MonkeyPatch, *, rests: float = 0.0, seed: int | None = None
) -> list[RandomChoice]:
    """Has epochs choose numbers of draft tokens at random; returns what chooses in each.

    `rests`: see RandomChoice; `seed`: drawn if not given.
    """
    seed, made = random.randrange(2**32) if seed is None else seed, list[RandomChoice]()
    print(f"seed {seed}")

    def make(*_: object) -> DraftChoice:
        made.append(RandomChoice(random.Random(seed + len(made)), changes=rests))
        return made[-1]

    monkeypatch.setattr("slipstream.scheduler.epoch.DraftChoice", make)
    return made


@pytest.mark.sampled(2)
@pytest.mark.parametrize("draft", DRAFTS[1:])
@pytest.mark.parametrize("run_ahead", [0, 1])
def test_tokens_are_those_of_plain_decoding_with_every_drafter(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, draft: str, run_ahead: int
) -> None:
    """Twice, so that prefixes are shared, or with so few pages that sequences are preempted; and all is in order.

    Requests have every way to sample, and logprobs.
    """
    device, outputs, num_pages = HostDevice(), [], 40 if run_ahead else None
    for name in ("none", draft):
        chosen = chosen_at_random(monkeypatch, rests=0.05)
        waves, log_dir = [jobs_of_all_kinds() for _ in range(2 if num_pages is None else 1)], tmp_path / name
        for job in (job for wave in waves for job in wave if num_pages is not None):
            job.spec = replace(job.spec, max_new_tokens=55)
        config = make_config(run_ahead=run_ahead, fixed_draft_tokens=None, access_log_dir=log_dir)
        log_dir.mkdir()
        with local_workers(*roles(checkpoints, name, device, None, "auto"), log_dir=log_dir, device=device) as workers:
            epoch = LocalEpoch(1, config, workers, num_pages=num_pages)
            found = epoch.run(*waves)
        outputs.append([found[job] for wave in waves for job in wave])
    assert outputs[0] == outputs[1]
    assert max(chosen[0].counts) == MOST_DRAFT_TOKENS
    assert len(chosen[0].counts) > 10
    counts = epoch.epoch.batch.counts
    assert counts.prefix_hit_tokens if num_pages is None else counts.preemptions
    report = Replay(log_dir).report()
    assert not report.races
    assert not report.stuck


@pytest.mark.sampled(1)
@pytest.mark.parametrize("run_ahead", [0, 1, 2])
def test_a_draft_that_is_always_right_stays_right_and_gives_each_sequence_its_number(
    models: Models, reference: list[list[int]], monkeypatch: pytest.MonkeyPatch, run_ahead: int
) -> None:
    """A draft whose keys and values lacked a token, or held a wrong one, would guess wrong after it."""
    chosen_at_random(monkeypatch)
    jobs = make_jobs(max_draft_tokens=(None, 2, 0))
    served = _served(Models(models.verify, models.twin, models.twin), run_ahead=run_ahead)
    assert served.run(jobs) == reference
    for job in jobs:
        # In a job's last step tokens past its end are drafted.
        assert job.stats.total_draft_tokens - job.stats.total_accepted_tokens <= MOST_DRAFT_TOKENS
        assert len(job.stats.accepted_per_position) <= (MOST_DRAFT_TOKENS, 2, 0)[jobs.index(job) % 3]


def _served(models: Models, **settings: Any) -> Served:
    served = Served(models, Way(num_draft_tokens=4, **settings))
    config = replace(Way(num_draft_tokens=4, **settings).config(None), fixed_draft_tokens=None)
    served.epoch = LocalEpoch(1, config, list(served.epoch._links.values()))  # type: ignore[arg-type]
    return served


@pytest.mark.sampled(1)
@pytest.mark.parametrize("numbers", [(4, 2, 15), (7, 15, 7)], ids=["models", "heads"])
def test_a_swap_between_drafts_of_other_numbers_changes_no_token(
    models: Models, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, numbers: tuple[int, ...]
) -> None:
    """Between language models; from an EAGLE-3 head to a block drafter, and back."""
    drafts = [models.draft, models.twin, make_draft(WorkerConfig(model=target), HostDevice(), 0)]
    if numbers[0] == 7:
        layouts = (AUTHORS, BLOCKS, AUTHORS)
        drafts = [make_head(tmp_path / str(number), target, layout) for number, layout in enumerate(layouts)]
    expected = Served(models, Way(run_ahead=0, slots=1)).run(*([job] for job in make_jobs(16)))
    # One seed: how soon draft tokens are accepted, and so the next draft comes, depends on it.
    chosen_at_random(monkeypatch, rests=0.05, seed=2)
    jobs = make_jobs(16)
    with local_workers(models.verify, *drafts) as (verify, *workers):
        swaps = list(zip(workers, numbers, strict=True))
        config = replace(Way(num_draft_tokens=4).config(None), fixed_draft_tokens=None)
        epoch = LocalEpoch(1, config, [verify, workers[0]])

        def swap(job: Job, _: OutputRow) -> None:
            num_joined = [event for event, _ in epoch.events].count("joined")
            if job.stats.total_accepted_tokens and num_joined == len(epoch.attachments) < len(swaps):
                epoch.epoch.speculation.offer(epoch.attach(*swaps[num_joined]))
            if num_joined < len(epoch.attachments):
                workers[num_joined].stream.synchronize(20.0)  # or all jobs may end before it has caught up

        epoch.on_progress = swap
        outputs = epoch.run(jobs)
    assert [outputs[job] for job in jobs] == expected
    assert [event for event, _ in epoch.events].count("joined") == 3
    assert [attachment.num_draft_tokens for attachment in epoch.attachments[1:]] == list(numbers[1:])
    assert numbers[0] == 4 or [one.description.algorithm for one in epoch.attachments] == [EAGLE3, DFLASH, EAGLE3]


@pytest.mark.parametrize("asked", [None, 3, 15])
def test_a_draft_drafts_no_more_than_it_can(models: Models, target: Path, tmp_path: Path, asked: int | None) -> None:
    """A block drafter has a most; the scheduler asks for no more, and the drafter would refuse it."""
    write_head(tmp_path, layout=BLOCKS, block_size=6)
    draft = make_draft(WorkerConfig(model=tmp_path, target=target, algorithm=DFLASH), HostDevice(), 0)
    assert draft.description.max_draft_tokens == 5
    config = replace(Way(num_draft_tokens=4).config(None), fixed_draft_tokens=None, num_draft_tokens=asked)
    with local_workers(models.verify, draft) as workers:
        epoch = LocalEpoch(1, config, workers)
        outputs = epoch.run(jobs := make_jobs(4))
        (attachment,) = epoch.attachments
    assert attachment.num_draft_tokens == min(asked or 5, 5)
    assert [outputs[job] for job in jobs] == Served(models, Way(run_ahead=0, slots=1)).run(
        *([job] for job in make_jobs(4))
    )
    draft.description = replace(draft.description, max_draft_tokens=0)
    with local_workers(models.verify, draft) as workers:
        epoch = LocalEpoch(1, replace(config, num_draft_tokens=6), workers)
        with pytest.raises(MismatchError, match="num_draft_tokens: 6, and a block has 5"):
            epoch.open()
        epoch.close(drain=False)


@pytest.mark.parametrize(
    ("given", "row_tokens", "accepted"),
    [
        ((0, 2, 3), RowTokens.RAGGED, ""),
        ((0, 2, 4), RowTokens.RAGGED, "for each of 3 slots 0 to 3"),
        ((1, 2), RowTokens.RAGGED, "for each of 3 slots 0 to 3"),
        ((0, 3, 3), RowTokens.WHOLE, "for each of 3 slots 0, or for each 3"),
        ((3, 3, 3), RowTokens.WHOLE, ""),
        ((2, 2, 2), RowTokens.WHOLE, "for each of 3 slots 0, or for each 3"),
        ((2, 2, 2), RowTokens.EVEN, ""),
        ((1, 2, 2), RowTokens.EVEN, "for each of 3 slots 0, or for each 1 or 2 or 3"),
        ((4, 4, 4), RowTokens.EVEN, "for each of 3 slots 0, or for each 1 or 2 or 3"),
    ],
)
def test_workers_refuse_numbers_that_they_cannot_run(
    given: tuple[int, ...], row_tokens: RowTokens, accepted: str
) -> None:
    command = StepCommand(epoch=1, step=1, slots=(1, 2, 3), num_draft_tokens=given)
    if not accepted:
        check_draft_tokens(command, 3, row_tokens)
        return
    with pytest.raises(InvalidArgumentError, match=f"{accepted}$"):
        check_draft_tokens(command, 3, row_tokens)


def test_what_is_accepted_of_the_first_tokens_is_told_from_chains_of_any_length() -> None:
    """As by chains of four, of which each token is accepted with another probability."""
    rng, by_position = np.random.default_rng(7), np.array([0.9, 0.7, 0.5, 0.3])
    accepted = (rng.random((40_000, 4)) < by_position).cumprod(axis=1).sum(axis=1)
    drafted = rng.integers(0, 5, len(accepted)).astype(np.int32)
    found = np.minimum(accepted, drafted).astype(np.uint32)
    step = DecodedStep(1, 1, len(found), found, drafted, (found + 1).astype(np.int32))
    assert accepted_of_first(4, [step]) == pytest.approx(by_position.cumprod().sum(), rel=0.02)
    assert accepted_of_first(1, [step]) == pytest.approx(0.9, rel=0.02)


def test_simulated_acceptance_is_that_of_the_draft_cut_at_each_sequences_number(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An accept length that short chains could never have is no error."""
    # One seed: with about one of a thousand, fewer of the hundred draft tokens are accepted.
    chosen_at_random(monkeypatch, seed=0)
    simulated = SimulatedAcceptance.with_mean(12.5, MOST_DRAFT_TOKENS)
    monkeypatch.setattr(
        models.verify, "_acceptance", lambda most: simulated if most == MOST_DRAFT_TOKENS else pytest.fail(f"{most}")
    )
    jobs = make_jobs()
    _served(models).run(jobs)
    assert sum(job.stats.total_accepted_tokens for job in jobs) > 0.8 * sum(
        job.stats.total_draft_tokens for job in jobs
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("draft", DRAFTS[1:])
def test_steps_by_graphs_have_one_number_for_all_and_change_no_token(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, draft: str
) -> None:
    """As on a GPU: graphs for a few numbers; requests whose steps no graph takes have them, too."""
    outputs: list[list[list[int]]] = []
    for name in ("none", draft):
        # One seed: a random head is right so seldom that none of few drafted steps may be accepted.
        chosen = chosen_at_random(monkeypatch, rests=0.05, seed=3)
        device, jobs, log_dir = InlineDevice(), jobs_of_all_kinds(), tmp_path / name
        log_dir.mkdir()
        config = make_config(fixed_draft_tokens=None, access_log_dir=log_dir)
        with local_workers(*roles(checkpoints, name, device, None, "auto"), log_dir=log_dir, device=device) as workers:
            found = LocalEpoch(1, config, workers, device=device).run(jobs)
        outputs.append([found[job] for job in jobs])
    assert outputs[0] == outputs[1]
    assert chosen[0].counts >= {0, *EVEN_DRAFT_TOKENS}
    assert draft == "ngram" or any(job.stats.total_accepted_tokens for job in jobs)
    report = Replay(tmp_path / draft).report()
    assert not report.races
    assert not report.stuck


def test_drafts_say_that_they_take_such_steps_on_a_cpu(tmp_path: Path, target: Path) -> None:
    assert make_draft(WorkerConfig(model=target), HostDevice(), 0).description.takes_ragged_steps
