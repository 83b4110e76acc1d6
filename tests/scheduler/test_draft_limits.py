"""Drafts with a shorter context than the target's, or another vocabulary: they limit drafting, and nothing else."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from slipstream import bundled
from slipstream.common.device.cpu.device import HostDevice
from slipstream.common.wire.sequence import SamplingParams, SequenceSpec
from slipstream.services.factory import make_draft, make_verify
from slipstream.services.models.head_config import EAGLE3
from slipstream.services.worker.config import WorkerConfig
from slipstream.services.worker.engine import RoleEngine
from tests.harness.checkpoints import VOCAB_SIZE, write_json, write_weights
from tests.harness.counted_jobs import Job
from tests.harness.eagle3_checkpoints import make_head
from tests.harness.local_epoch import Models, Served, Way
from tests.harness.seeded_jobs import adjusted_jobs, make_jobs
from tests.ordering.replay import Replay

CONTEXT = 24


def write_config(path: Path, **changes: object) -> Path:
    """Changes `config.json` of a checkpoint."""
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    write_json(path / "config.json", config | changes)
    return path


def twin_of(target: Path, path: Path, vocab_size: int) -> RoleEngine:
    """The target as a draft, with fewer ids, or with more, which its logits favour."""
    weights = load_file(shutil.copytree(target, path) / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        more = torch.ones(max(0, vocab_size - VOCAB_SIZE), weights[name].shape[1])
        weights[name] = torch.cat((weights[name][:vocab_size], more, -more))[:vocab_size].contiguous()
    write_weights(path, weights)
    return make_draft(WorkerConfig(model=write_config(path, vocab_size=vocab_size)), HostDevice(), 0)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("reads_hidden", [False, True], ids=["language model", "head"])
@pytest.mark.parametrize("run_ahead", [0, 2])
def test_beyond_a_drafts_context_sequences_decode_plainly(
    models: Models, tmp_path: Path, run_ahead: int, reads_hidden: bool
) -> None:
    assert models.path is not None
    if reads_hidden:
        draft = make_head(tmp_path / "head", models.path)
        write_config(tmp_path / "head", max_position_embeddings=CONTEXT)
        draft = make_draft(WorkerConfig(model=tmp_path / "head", target=models.path, algorithm=EAGLE3), HostDevice(), 0)
    else:
        short = write_config(shutil.copytree(models.path, tmp_path / "short"), max_position_embeddings=CONTEXT)
        draft = make_draft(WorkerConfig(model=short), HostDevice(), 0)
    logs, jobs, way = tmp_path / "logs", make_jobs(10), Way(num_draft_tokens=3, run_ahead=run_ahead, slots=2)
    logs.mkdir()
    plain = Served(models, Way(run_ahead=0)).run(make_jobs(10))
    assert Served(Models(models.verify, draft, draft), way, log_dir=logs).run(jobs) == plain
    report = Replay(logs).report()
    assert not report.races
    assert not report.stuck
    assert {job.stats.num_verify_steps > 0 for job in jobs} == {True, False}
    for job in jobs:
        stats, num_prompt = job.stats, len(job.spec.prompt)
        assert (stats.tokens_beyond_draft > 0) == (num_prompt + job.spec.max_new_tokens > CONTEXT)
        if num_prompt > CONTEXT:
            assert (stats.num_verify_steps, stats.tokens_beyond_draft) == (0, job.spec.max_new_tokens - 1)
        if not reads_hidden:
            # The twin is right wherever it drafts, but for what is past a sequence's end.
            missed = 3 * stats.num_verify_steps - stats.total_accepted_tokens
            assert missed <= (0 if stats.tokens_beyond_draft else 3)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("vocab_size", [260, 300])
def test_a_draft_may_have_fewer_ids_than_the_target_or_more(
    models: Models, reference: list[list[int]], tmp_path: Path, vocab_size: int
) -> None:
    assert models.path is not None
    twin = twin_of(models.path, tmp_path / "twin", vocab_size)
    plain = Served(models, Way(run_ahead=0)).run(make_jobs(8))
    alone = Served(models, Way(run_ahead=0, slots=1)).run(*([job] for job in adjusted_jobs(plain)))
    way, jobs, adjusted = Way(num_draft_tokens=3), make_jobs(), adjusted_jobs(plain)
    assert Served(Models(models.verify, twin, twin), way).run(jobs) == reference
    assert Served(Models(models.verify, twin, twin), way).run(adjusted) == alone
    for job in (*jobs, *adjusted):
        bound = 3 if job.spec.max_draft_tokens is None else job.spec.max_draft_tokens
        missed = bound * job.stats.num_verify_steps - job.stats.total_accepted_tokens
        assert vocab_size < VOCAB_SIZE or missed <= bound, "ids that the target does not have are never guessed"
    assert sum(job.stats.total_accepted_tokens for job in (*jobs, *adjusted)) > 0


@pytest.mark.slow
def test_the_bundled_head_with_half_its_context_serves_requests_of_900_tokens(tmp_path: Path) -> None:
    device, target = HostDevice(), bundled.target_dir()
    short = write_config(shutil.copytree(bundled.eagle3_dir(), tmp_path / "head"), max_position_embeddings=512)
    verify = make_verify(WorkerConfig(model=target), device, 0)
    head = make_draft(WorkerConfig(model=short, target=target, algorithm=EAGLE3), device, 0)

    def jobs() -> list[Job]:
        return [
            Job(
                SequenceSpec(
                    job_id=str(num_prompt),
                    prompt=tuple(300 + 7 * number % 3000 for number in range(num_prompt)),
                    max_new_tokens=num_tokens - num_prompt,
                    sampling=SamplingParams(temperature=0.8, seed=num_prompt),
                    stop_token_ids=frozenset(),
                )
            )
            for num_prompt, num_tokens in ((420, 900), (700, 900), (40, 160))
        ]

    crossing, beyond, within = drafted = jobs()
    sizes = {"context_tokens": 1024, "chunk_tokens": 256, "page_tokens": 16, "debug": False}
    way = Way(num_draft_tokens=4, **sizes)  # type: ignore[arg-type]
    outputs = Served(Models(verify, head, head), way).run(drafted)
    assert outputs == Served(Models(verify, head, head), Way(**sizes)).run(jobs())  # type: ignore[arg-type]
    assert 900 - 512 <= crossing.stats.tokens_beyond_draft < 900 - 512 + 20
    assert (beyond.stats.num_verify_steps, beyond.stats.tokens_beyond_draft) == (0, 199)
    assert within.stats.tokens_beyond_draft == 0
    for job in (crossing, within):
        assert job.stats.mean_accept_length > 1.3, "the head drafts for the first 512 tokens"
