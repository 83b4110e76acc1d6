"""Steps that decode and take in prompts on real engines and streams: the tokens are those of each request alone."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import pytest

from slipstream.common.wire.job import FinishReason
from slipstream.common.wire.step import FenceName, StepCommand, WaitPlace
from slipstream.scheduler.draft_choice import ALONE_STEPS
from slipstream.services.verify.engine import VerifyEngine
from slipstream.services.worker.engine import Phase
from slipstream.services.worker.epoch import EpochState
from tests.harness.eagle3_checkpoints import make_head
from tests.harness.local_epoch import LocalEpoch, Models, Served, Way
from tests.harness.simulated_run import make_job
from tests.harness.workers import local_workers
from tests.scheduler.test_prefix_cache import assert_all_is_given_back, jobs_that_begin_alike

pytestmark = pytest.mark.sampled_module(4)


def is_mixed(command: StepCommand) -> bool:
    """True if a step decodes and takes in prompts."""
    return bool(command.slots and command.chunks)


class _Watched(Served):
    """Counts the mixed steps of verify."""

    num_mixed = 0

    def _stripped(self, command: StepCommand) -> StepCommand:
        self.num_mixed += is_mixed(command)
        return super()._stripped(command)


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("tiny_small_steps")
@pytest.mark.parametrize("seed", range(20))
def test_random_requests_with_hits_preemptions_and_cancels_have_their_own_tokens(models: Models, seed: int) -> None:
    """20 requests each: some are samples of one prompt, some are cancelled, and pages are few."""
    rng = random.Random(seed)
    apart = Served(models, Way(run_ahead=0, slots=1, chunk_tokens=64, no_prefix_cache=True))
    expected = apart.run(jobs_that_begin_alike(seed, 20, longest_output=40))
    way = Way(
        num_draft_tokens=rng.choice((0, 1, 3, 3)),
        run_ahead=rng.choice((0, 1, 2)),
        slots=rng.choice((4, 6)),
        context_tokens=100,
        chunk_tokens=rng.choice((1, 5, 9, 16, 40)),
        num_pages=30,
    )
    print(way)
    served, jobs = _Watched(models, way), jobs_that_begin_alike(seed, 20, longest_output=40)
    if seed % 2:
        # As where verify has measured it: behind a context a chunk has fewer tokens.
        served.epoch.epoch.batch.bound_shared_steps(way.chunk_tokens, 7)
    doomed = {job: rng.randrange(10) for job in rng.sample(jobs, 4)}

    def cancel_some(*_: object) -> None:
        for job, after in doomed.items():
            if job in served.epoch.outputs and len(served.epoch.outputs[job]) >= after:
                served.epoch.jobs.cancel(job)

    served.epoch.on_progress = cancel_some
    for job, output, full in zip(jobs, served.run(jobs), expected, strict=True):
        is_cancelled = job in doomed and served.epoch.finish_reason(job) is FinishReason.ABORT
        assert output == (full[: len(output)] if is_cancelled else full)
    batch = served.epoch.epoch.batch
    assert served.num_mixed > 0
    assert batch.counts.preemptions > 0
    assert batch.slots.num_free == way.slots
    assert_all_is_given_back(served)


@pytest.mark.parametrize("fixed_draft_tokens", [None, 3])
def test_beside_prompts_some_steps_decode_alone_only_where_a_policy_is_to_learn(
    models: Models, fixed_draft_tokens: int | None
) -> None:
    """A server that chooses has a policy, which knows nothing yet of the costs here."""
    mixed: list[bool] = []

    def note(command: StepCommand) -> StepCommand:
        is_of_verify = any(point.fence is FenceName.VERIFY_PUBLISH for point in command.ops.signals)
        if is_of_verify and command.slots:
            mixed.append(is_mixed(command))
        return command

    stream, prompts = make_job("stream", (1, 2, 3), 80), [make_job(str(n), (n,) * 90, 1) for n in range(5)]
    with local_workers(models.verify, models.draft, before_send=note) as workers:
        config = replace(Way(chunk_tokens=6).config(None), fixed_draft_tokens=fixed_draft_tokens)
        LocalEpoch(1, config, workers).run([stream, *prompts])
    first, last = mixed.index(True), len(mixed) - mixed[::-1].index(True)
    alone = [len(list(steps)) for has_chunks, steps in groupby(mixed[first:last]) if not has_chunks]
    if fixed_draft_tokens is None:
        assert len(alone) > 2
        assert set(alone) == {ALONE_STEPS}
    else:
        assert alone == []


@pytest.mark.parametrize("draft", ["model", "head"])
def test_a_head_s_steps_are_not_mixed_where_waits_are_enqueued_after_their_signals(
    models: Models, target: Path, tmp_path: Path, draft: str
) -> None:
    """Its command would come before verify's, and wait for the states that verify leaves in the same step."""
    mixed: list[bool] = []

    def note(command: StepCommand) -> StepCommand:
        mixed.append(is_mixed(command))
        return command

    drafter = make_head(tmp_path / "head", target) if draft == "head" else models.draft
    both = Models(models.verify, drafter, models.twin)
    jobs, again = ([make_job("stream", (1, 2, 3), 60), make_job("prompt", (7,) * 50, 4)] for _ in range(2))
    config = replace(Way(num_draft_tokens=3, chunk_tokens=9).config(None), dispatch="acknowledged")
    with local_workers(both.verify, both.draft, before_send=note) as workers:
        outputs = LocalEpoch(1, config, workers).run(jobs)
    assert any(mixed) is (draft == "model")
    assert [outputs[job] for job in jobs] == Served(models, Way(run_ahead=0, slots=1)).run(*([job] for job in again))


@pytest.mark.parametrize("draft", ["model", "head", None])
def test_on_a_cpu_prompts_come_behind_the_stash_while_a_model_drafts(
    models: Models, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, draft: str | None
) -> None:
    """A head needs the states of the chunk with the stash, and a first token is published with its step."""
    seen: set[tuple[bool, tuple[tuple[WaitPlace | None, tuple[FenceName, ...]], ...]]] = set()
    phases = VerifyEngine.phases

    def watched(role: VerifyEngine, command: StepCommand, state: EpochState) -> list[Phase]:
        found = phases(role, command, state)
        if is_mixed(command):
            has_end = any(chunk.is_last for chunk in command.chunks)
            seen.add((has_end, tuple((phase.place, phase.fences) for phase in found)))
        return found

    monkeypatch.setattr(VerifyEngine, "phases", watched)
    drafter = make_head(tmp_path / "head", target) if draft == "head" else models.draft
    way = Way(num_draft_tokens=0 if draft is None else 3, chunk_tokens=9)
    served = Served(Models(models.verify, drafter, models.twin), way)
    served.run([make_job("stream", (1, 2, 3), 60), make_job("prompt", (7,) * 50, 1)])
    sampled = ((WaitPlace.SAMPLING, (FenceName.VERIFY_PUBLISH,)), (None, (FenceName.VERIFY_STASH,)))
    states = ((WaitPlace.PREFILL_HIDDEN, ()),) if draft == "head" else ()
    together = ((WaitPlace.START, ()), *states, *sampled)
    assert seen == {(True, together), (False, (*together, (None, ())) if draft == "model" else together)}
