"""A model whose logits become NaN for a sequence: that one ends with an error, all others with their tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from slipstream.common.device.cpu.device import HostDevice
from slipstream.common.errors import InternalError
from slipstream.common.wire.sequence import SamplingParams, SequenceSpec
from slipstream.services.factory import make_draft, make_verify
from slipstream.services.verify.engine import VerifyEngine
from slipstream.services.worker.config import WorkerConfig
from slipstream.services.worker.engine import RoleEngine
from slipstream.services.worker.future_map import Region, StepNumber
from tests.harness.checkpoints import write_checkpoint
from tests.harness.counted_jobs import Job
from tests.harness.local_epoch import LocalEpoch, Way
from tests.harness.workers import local_workers

COUNTED = "slipstream_sequences_not_finite_total"
NUM_TOKENS = 16


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model")


def make_jobs() -> list[Job]:
    samplings = (SamplingParams(), SamplingParams(temperature=1.0, seed=3), SamplingParams(temperature=0.9, top_k=30))
    return [
        Job(
            SequenceSpec(
                job_id=str(number),
                prompt=(number + 1, 2 * number + 40, number + 90),
                max_new_tokens=NUM_TOKENS,
                sampling=sampling,
                stop_token_ids=frozenset(),
                top_logprobs=number or None,
            )
        )
        for number, sampling in enumerate(samplings)
    ]


def serve(jobs: list[Job], way: Way, *engines: RoleEngine) -> LocalEpoch:
    with local_workers(*engines) as workers:
        epoch = LocalEpoch(1, way.config(None), workers)
        epoch.run(jobs)
    return epoch


def poisoned(path: Path, token: int, value: float) -> RoleEngine:
    """Verify with a model that has a value in place of a token's embedding."""
    engine = make_verify(WorkerConfig(model=path), HostDevice(), 0)
    assert isinstance(engine, VerifyEngine)
    engine._model.decoder.embedding.data[token] = value
    return engine


@pytest.fixture
def reference(path: Path) -> list[list[int]]:
    jobs = make_jobs()
    epoch = serve(jobs, Way(run_ahead=0), make_verify(WorkerConfig(model=path), HostDevice(), 0))
    return [epoch.outputs[job] for job in jobs]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("run_ahead", [0, 1])
@pytest.mark.parametrize("has_draft", [False, True])
def test_a_sequence_ends_where_its_logits_are_not_finite(
    path: Path, reference: list[list[int]], value: float, run_ahead: int, has_draft: bool
) -> None:
    for bad in range(len(reference)):
        others = {token for at, output in enumerate(reference) if at != bad for token in output}
        prompts = {token for job in make_jobs() for token in job.spec.prompt}
        token = next(one for one in reference[bad][3:] if one not in others | prompts)
        jobs = make_jobs()
        drafts = [make_draft(WorkerConfig(model=path), HostDevice(), 0)] if has_draft else []
        epoch = serve(jobs, Way(run_ahead=run_ahead), poisoned(path, token, value), *drafts)
        expected = [*reference]
        expected[bad] = reference[bad][: reference[bad].index(token) + 1]
        assert [epoch.outputs[job] for job in jobs] == expected
        assert list(epoch.jobs.refused) == [jobs[bad]]
        assert isinstance(epoch.jobs.refused[jobs[bad]], InternalError)
        assert "NaN or infinite" in str(epoch.jobs.refused[jobs[bad]])
        assert epoch.registry.get_sample_value(COUNTED) == 1


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("is_last", [False, True])
def test_a_draft_that_proposes_such_a_token_ends_nothing(
    path: Path, reference: list[list[int]], value: float, is_last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither one that the target never chooses, nor one that ends the output before its own logits count."""
    jobs, propose = make_jobs(), Region.propose
    known = {
        *(token for output in reference for token in output),
        *(token for job in jobs for token in job.spec.prompt),
    }
    bad = next(token for token in range(272) if token not in known)
    if is_last:
        at, bad = next(
            (at, token)
            for at, token in enumerate(reference[0])
            if at > 4 and token not in reference[0][:at] + reference[1] + reference[2]
        )
        jobs[0] = Job(replace(jobs[0].spec, max_new_tokens=at + 1))
        reference[0] = reference[0][: at + 1]

    def propose_bad(region: Region, step: StepNumber, rows: torch.Tensor, tokens: torch.Tensor) -> None:
        propose(region, step, rows, torch.full_like(tokens, bad))

    monkeypatch.setattr(Region, "propose", propose_bad)
    draft = make_draft(WorkerConfig(model=path), HostDevice(), 0)
    epoch = serve(jobs, Way(), poisoned(path, bad, value), draft)
    assert [epoch.outputs[job] for job in jobs] == reference
    assert not epoch.jobs.refused
    assert epoch.registry.get_sample_value(COUNTED) == 0


def test_a_prompt_whose_logits_are_not_finite_has_no_first_token(path: Path, reference: list[list[int]]) -> None:
    jobs = make_jobs()
    epoch = serve(jobs, Way(), poisoned(path, jobs[1].spec.prompt[0], float("nan")))
    assert [epoch.outputs[job] for job in jobs] == [reference[0], [], reference[2]]
    assert list(epoch.jobs.refused) == [jobs[1]]
