"""Penalties, bias, masks and logprobs, whatever is drafted: of every token that is accepted, as without a draft."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from slipstream.common.wire.sequence import SamplingParams
from slipstream.services.models import sampler
from tests.harness.counted_jobs import Job
from tests.harness.local_epoch import Models, Served, Way
from tests.harness.seeded_jobs import adjusted_jobs, make_jobs

pytestmark = pytest.mark.sampled_module(2)


@pytest.fixture(scope="module")
def plain(models: Models) -> list[list[int]]:
    """As many jobs as the adjusted ones, without adjustments."""
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


@pytest.mark.sampled(1)
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
        assert sum(job.stats.total_accepted_tokens for job in together) > 20


@pytest.mark.sampled(1)
@pytest.mark.parametrize("run_ahead", [0, 2])
def test_a_draft_that_is_the_target_applies_them_as_well(
    models: Models, plain: list[list[int]], adjusted_reference: list[list[int]], run_ahead: int
) -> None:
    """So what it remembers of the prompt and the output is what verify does."""
    way, jobs = Way(num_draft_tokens=4, run_ahead=run_ahead, slots=3), adjusted_jobs(plain)
    assert Served(Models(models.verify, models.twin, models.twin), way).run(jobs) == adjusted_reference
    for job in jobs:
        bound = 4 if job.spec.max_draft_tokens is None else job.spec.max_draft_tokens
        assert job.stats.num_verify_steps * bound - job.stats.total_accepted_tokens <= bound


@pytest.mark.sampled(1)
@pytest.mark.parametrize("num_draft_tokens", [0, 4])
def test_the_repetition_penalty_is_that_of_transformers(models: Models, num_draft_tokens: int) -> None:
    """Over prompt and output, and over chunks; a slot that goes from one request to the next keeps nothing."""
    jobs = []
    for job, penalty in zip(make_jobs(6), (1.3, 1.7, 0.8, 1.0, 2.0, 1.2), strict=True):
        sampling = SamplingParams(repetition_penalty=penalty)
        # Half of the prompt again: its tokens are likely, and punished.
        jobs.append(Job(replace(job.spec, prompt=job.spec.prompt + job.spec.prompt[::2], sampling=sampling)))
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


def test_rows_that_are_computed_in_parts_give_the_same(
    models: Models, plain: list[list[int]], adjusted_reference: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adjustments and logprobs take many times the memory of the logits, so that large batches are."""
    way, logprobs = Way(num_draft_tokens=4, run_ahead=2, slots=8), []
    for most_logits in (1 << 24, 1):
        monkeypatch.setattr(sampler, "_MOST_LOGITS", most_logits)
        jobs = adjusted_jobs(plain)
        for job in jobs:
            job.spec = replace(job.spec, top_logprobs=3)
        served = Served(models, way)
        found = served.epoch.jobs.logprobs
        assert served.run(jobs) == adjusted_reference
        logprobs.append([[(row.logprob, *row.top) for row in found[job]] for job in jobs])
    assert logprobs[0] == logprobs[1]
    assert len(sampler.row_parts(torch.zeros(8, 5, 11))) == 8


@pytest.mark.sampled(1)
@pytest.mark.parametrize("num_draft_tokens", [0, 4])
def test_logprobs_are_those_of_a_plain_forward(
    models: Models, plain: list[list[int]], adjusted_reference: list[list[int]], num_draft_tokens: int
) -> None:
    """Logprobs are of every token, the first one included, before bias, penalties, masks and temperature."""
    asked = (5, None, 0, 20, None, 1, 20, 3)
    jobs = adjusted_jobs(plain)
    for job, number in zip(jobs, asked, strict=True):
        job.spec = replace(job.spec, top_logprobs=number)
    served = Served(models, Way(num_draft_tokens=num_draft_tokens, run_ahead=2, slots=3))
    found = served.epoch.jobs.logprobs
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
