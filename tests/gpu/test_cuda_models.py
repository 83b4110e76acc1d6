"""The bundled models on a GPU: graphs, kernels and staging give the tokens that a CPU gives, and nothing waits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoTokenizer

from slipstream.benchmarks.near_ties import Scores
from slipstream.bundled import dflash_dir, eagle3_dir, mtp_dir, prompts, standalone_dir, target_dir
from slipstream.common.device.cpu.device import HostDevice
from slipstream.common.wire.sequence import SamplingParams, SequenceSpec
from slipstream.common.wire.step import EVEN_DRAFT_TOKENS
from slipstream.scheduler.config import SchedulerConfig
from slipstream.services.factory import make_draft, make_verify
from slipstream.services.models.head_config import DFLASH, EAGLE3, MTP
from slipstream.services.worker.config import NGRAM, STANDALONE, WorkerConfig
from tests.harness.counted_jobs import Job
from tests.harness.local_epoch import LocalEpoch
from tests.harness.workers import LocalWorker, local_workers
from tests.ordering.replay import Replay
from tests.scheduler.test_ragged_drafts import chosen_at_random

if TYPE_CHECKING:
    from collections import abc
    from pathlib import Path

    from slipstream.common.device.cuda.device import CudaDevice
    from slipstream.common.device.interface import Device
    from slipstream.common.wire.step import StepCommand

MODELS = {STANDALONE: standalone_dir(), EAGLE3: eagle3_dir(), MTP: mtp_dir(), DFLASH: dflash_dir()}
DRAFTS = ("none", STANDALONE, EAGLE3, MTP, DFLASH, NGRAM)
SAMPLINGS = (
    SamplingParams(),
    SamplingParams(temperature=0.8, seed=1),
    SamplingParams(temperature=0.8, top_p=0.9, seed=2),
    SamplingParams(temperature=1.0, top_k=50, presence_penalty=0.5, seed=3),
)
NUM_PROMPTS = 12
MAX_NEW_TOKENS = 40
NUM_DRAFT_TOKENS = 4
SLOTS = 6

# It says that it does not notice everything.
pytestmark = pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")


class WatchedWorker(LocalWorker):
    """Any wait of PyTorch's for the device, while a step is enqueued, is an error."""

    def send(self, command: StepCommand) -> None:
        """See `LocalWorker.send`."""
        torch.cuda.set_sync_debug_mode("error")
        try:
            super().send(command)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def make_jobs(count: int = NUM_PROMPTS) -> list[Job]:
    """Held-out prompts, each with another sampling."""
    tokenizer = AutoTokenizer.from_pretrained(target_dir())
    return [
        Job(
            SequenceSpec(
                job_id=prompt.id,
                prompt=tuple(tokenizer(prompt.text).input_ids),
                max_new_tokens=MAX_NEW_TOKENS,
                sampling=SAMPLINGS[number % len(SAMPLINGS)],
                stop_token_ids=frozenset(),
            )
        )
        for number, prompt in enumerate(prompts()[:count])
    ]


def serve(
    device: Device,
    draft: str,
    dtype: str = "float32",
    *,
    slots: int = SLOTS,
    log_dir: Path | None = None,
    kv_dtype: str = "auto",
    fixed_draft_tokens: int | None = NUM_DRAFT_TOKENS,
) -> list[list[int]]:
    """The tokens of each job, all of them there at a time."""
    settings: dict[str, Any] = {"slots": slots, "log_dir": log_dir, "kv_dtype": kv_dtype}
    settings["fixed_draft_tokens"] = fixed_draft_tokens
    return serve_ways(device, draft, dtype, at_once=(NUM_PROMPTS,), **settings)[0]


def serve_ways(
    device: Device,
    draft: str,
    dtype: str,
    *,
    at_once: abc.Sequence[int],
    slots: int = SLOTS,
    log_dir: Path | None = None,
    is_deterministic: bool = False,
    kv_dtype: str = "auto",
    fixed_draft_tokens: int | None = NUM_DRAFT_TOKENS,
) -> list[list[list[int]]]:
    """The tokens of each job, for each number of jobs that are there at a time; all on one attachment."""
    width = 1 + NUM_DRAFT_TOKENS if is_deterministic else None
    dtypes = {"dtype": dtype, "kv_dtype": kv_dtype}
    roles = [make_verify(WorkerConfig(model=target_dir(), deterministic_width=width, **dtypes), device, 0)]
    if draft != "none":
        lookup = {"prompt_lookup_min": 1, "suffix_cache_tokens": 2000} if draft == NGRAM else {}
        config = WorkerConfig(model=MODELS.get(draft), algorithm=draft, target=target_dir(), **dtypes, **lookup)
        roles.append(make_draft(config, device, 0))
    # Which rows a step without graphs accesses is asked of the device, for the log alone.
    may_wait = device.torch_device.type == "cpu" or log_dir is not None
    make = LocalWorker if may_wait else WatchedWorker
    config = SchedulerConfig(
        verify="unix:/none",
        fixed_draft_tokens=fixed_draft_tokens,
        slots=slots,
        context_tokens=256,
        max_batched_tokens=64,
        kv_memory_mib=64,
        no_prefix_cache=is_deterministic,  # as `slipstream up --deterministic` has it
        access_log_dir=log_dir,
    )
    ways = [make_jobs() for _ in at_once]
    with local_workers(*roles, log_dir=log_dir, device=device, make=make) as workers:
        outputs = LocalEpoch(1, config, workers, device=device).run(
            *(
                jobs[first : first + size]
                for jobs, size in zip(ways, at_once, strict=True)
                for first in range(0, len(jobs), size)
            )
        )
    if draft != "none" and fixed_draft_tokens is not None:
        lengths = [job.stats.mean_accept_length for jobs in ways for job in jobs]
        least = 1.2 if draft == NGRAM else 2
        assert sum(lengths) / len(lengths) > least, "the draft is right now and then"
    return [[outputs[job] for job in jobs] for jobs in ways]


@pytest.fixture(scope="module")
def reference() -> list[list[int]]:
    """Plain decoding on the CPU."""
    return serve(HostDevice(), "none")


@pytest.mark.parametrize("draft", DRAFTS)
def test_in_float32_tokens_are_the_cpus(device: CudaDevice, reference: list[list[int]], draft: str) -> None:
    assert serve(device, draft) == reference


@pytest.mark.parametrize("draft", DRAFTS)
def test_in_float32_steps_of_any_number_of_draft_tokens_give_the_cpus(
    device: CudaDevice, reference: list[list[int]], draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rows of a step have as many, drawn anew each time; the draft rests now and then."""
    chosen = chosen_at_random(monkeypatch, rests=0.05)
    assert serve(device, draft, fixed_draft_tokens=None) == reference
    assert draft == "none" or chosen[0].counts >= {0, *EVEN_DRAFT_TOKENS}


def test_one_size_for_all_steps_makes_bfloat16_equal(device: CudaDevice) -> None:
    """With either draft and without, alone and side by side."""
    found = {
        draft: serve_ways(device, draft, "bfloat16", at_once=(1, NUM_PROMPTS), is_deterministic=True)
        for draft in DRAFTS
    }
    plain = found["none"][0]
    different = [
        (draft, way, number)
        for draft, ways in found.items()
        for way, outputs in zip(("alone", "side by side"), ways, strict=True)
        for number, (output, expected) in enumerate(zip(outputs, plain, strict=True))
        if output != expected
    ]
    assert not different


def test_with_fp8_keys_and_values_one_size_makes_tokens_equal(device: CudaDevice) -> None:
    """With any draft and without, alone and side by side; in float32 most outputs are those of a CPU."""
    settings: dict[str, Any] = {"at_once": (1, NUM_PROMPTS), "is_deterministic": True, "kv_dtype": "fp8"}
    found = {draft: serve_ways(device, draft, "bfloat16", **settings) for draft in DRAFTS}
    plain = found["none"][0]
    assert [draft for draft, ways in found.items() if ways != [plain, plain]] == []
    # A number that lies between two of FP8's is rounded to the one or the other by its last bits.
    by_cpu, here = (serve(where, "none", kv_dtype="fp8") for where in (HostDevice(), device))
    num_equal = sum(one == other for one, other in zip(by_cpu, here, strict=True))
    assert num_equal >= NUM_PROMPTS * 3 // 4


@pytest.mark.timeout(300)  # where Triton's cache is empty all kernels are compiled
def test_in_bfloat16_outputs_part_at_near_ties_only(device: CudaDevice, capsys: pytest.CaptureFixture[str]) -> None:
    """The rate is printed: how many outputs part, of how many tokens that were compared."""
    jobs, scores = make_jobs(), Scores(target_dir())
    plain, together = serve_ways(device, "none", "bfloat16", at_once=(1, NUM_PROMPTS))
    found = {draft: together if draft == "none" else serve(device, draft, "bfloat16") for draft in DRAFTS}
    rates = []
    for draft, outputs in found.items():
        partings, num_compared = [], 0
        for job, one, other in zip(jobs, plain, outputs, strict=True):
            if job.spec.sampling not in SAMPLINGS[:2]:
                continue
            parting = scores.parting(job.spec.prompt, one, other, job.spec.sampling)
            num_compared += len(one) if parting is None else parting.index + 1
            if parting is not None:
                partings.append(parting)
        assert all(parting.is_near_tie for parting in partings), partings
        rates.append(f"bfloat16, {draft} against plain alone: {len(partings)} partings in {num_compared} tokens")
    with capsys.disabled():
        print("", *rates, sep="\n")


@pytest.mark.parametrize("draft", DRAFTS[1:])
def test_a_real_run_is_in_order(device: CudaDevice, draft: str, tmp_path: Path) -> None:
    serve(device, draft, log_dir=tmp_path)
    report = Replay(tmp_path).report()
    assert not report.races, report
    assert not report.stuck, report
    assert report.num_ordered > 100
