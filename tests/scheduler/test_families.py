"""Each family of decoders through the real loop and engines: transformers' greedy tokens, with and without a draft."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from slipstream.common.device.cpu.device import HostDevice
from slipstream.common.wire.sequence import SamplingParams, SequenceSpec
from slipstream.scheduler.config import SchedulerConfig
from slipstream.services.factory import make_draft, make_verify
from slipstream.services.models.head_config import EAGLE3
from slipstream.services.worker.config import NGRAM, WorkerConfig
from slipstream.services.worker.engine import RoleEngine
from tests.harness.checkpoints import write_checkpoint, write_guesser
from tests.harness.counted_jobs import Job
from tests.harness.eagle3_checkpoints import write_head
from tests.harness.local_epoch import LocalEpoch
from tests.harness.transformers_checkpoints import MIXTURES, greedy_tokens, write_by_transformers
from tests.harness.workers import local_workers

pytestmark = pytest.mark.sampled_module(2)

SEED = 11
NUM_TOKENS, NUM_LONG = 48, 200
WINDOWS = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}
CHANGES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 7},
    "qwen2": WINDOWS,
    "qwen3": WINDOWS,
}


DENSE = (
    *("gemma", "gemma2", "gemma3", "mistral3-multimodal", "ministral", "olmo2", "olmo3"),
    *("smollm3", "granite", "glm", "glm4", "seed-oss", "ernie4.5"),
)
FURTHER = (*DENSE, *MIXTURES)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("drafter", [None, NGRAM, EAGLE3])
@pytest.mark.parametrize("name", FURTHER)
def test_greedy_tokens_of_further_families_are_those_of_transformers(
    tmp_path: Path, name: str, drafter: str | None
) -> None:
    """Texts cross pages, chunks, windows, and the context that RoPE is scaled from."""
    target = write_by_transformers(tmp_path / "target", name, seed=SEED)
    prompts = _prompts()
    expected = greedy_tokens(target, prompts, NUM_LONG)
    assert sum(len(set(tokens)) for tokens in expected) >= 60, "the reference repeats itself, which proves little"
    roles = [make_verify(WorkerConfig(model=target), HostDevice(), 0)]
    if drafter == NGRAM:
        settings = WorkerConfig(algorithm=NGRAM, target=target, prompt_lookup_max=2, prompt_lookup_min=1)
        roles.append(make_draft(settings, HostDevice(), 0))
    elif drafter is not None:
        head = write_head(tmp_path / "head")
        roles.append(make_draft(WorkerConfig(model=head, algorithm=EAGLE3, target=target), HostDevice(), 0))
    tokens, accept_length = _serve(prompts, *roles, num_tokens=NUM_LONG)
    assert tokens == expected
    if drafter == NGRAM:
        assert accept_length > 1, "some drafts are right"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", CHANGES)
def test_greedy_tokens_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    target = write_checkpoint(tmp_path / "target", family=family, seed=SEED, **CHANGES[family])
    guesser = write_guesser(tmp_path / "draft", target, seed=SEED)
    prompts = _prompts()
    expected = greedy_tokens(target, prompts, NUM_TOKENS)
    assert sum(len(set(tokens)) for tokens in expected) >= 60, "the reference repeats itself, which proves little"
    verify = make_verify(WorkerConfig(model=target), HostDevice(), 0)
    draft = make_draft(WorkerConfig(model=guesser), HostDevice(), 0)
    assert _serve(prompts, verify)[0] == expected
    tokens, accept_length = _serve(prompts, verify, draft)
    assert tokens == expected
    assert 1.1 < accept_length < 4, "some drafts are right, not all"


def _prompts() -> list[list[int]]:
    """Shorter and longer than a chunk, which has 8 tokens."""
    rng = random.Random(SEED)
    return [[rng.randrange(256) for _ in range(length)] for length in (1, 7, 19, 40)]


def _serve(prompts: list[list[int]], *roles: RoleEngine, num_tokens: int = NUM_TOKENS) -> tuple[list[list[int]], float]:
    """The tokens of all prompts, served together, and their mean accept length."""
    config = SchedulerConfig(
        verify="unix:/none",
        fixed_draft_tokens=3,
        slots=len(prompts),
        context_tokens=num_tokens + 48,
        max_batched_tokens=8,
        page_tokens=4,
        debug=True,
    )
    jobs = [
        Job(
            SequenceSpec(
                job_id=str(number),
                prompt=tuple(prompt),
                max_new_tokens=num_tokens,
                sampling=SamplingParams(),
                stop_token_ids=frozenset(),
            )
        )
        for number, prompt in enumerate(prompts)
    ]
    with local_workers(*roles) as workers:
        outputs = LocalEpoch(1, config, workers).run(jobs)
    accepted = sum(job.stats.total_accepted_tokens for job in jobs)
    steps = sum(job.stats.num_verify_steps for job in jobs)
    return [outputs[job] for job in jobs], 1 + accepted / max(1, steps)
