"""Mixtures of experts on a GPU: a CPU's tokens in float32, its numbers in bfloat16, and graphs of any choice."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from slipstream.common.device.cpu.device import HostDevice
from slipstream.common.wire.sequence import SamplingParams, SequenceSpec
from slipstream.scheduler.config import SchedulerConfig
from slipstream.services.factory import make_draft, make_verify
from slipstream.services.models.experts import Experts
from slipstream.services.models.experts_config import ExpertsConfig
from slipstream.services.models.families import Mixture, Scoring
from slipstream.services.models.kernels.grouped import outputs_of_choices, run_experts
from slipstream.services.models.kernels.routing import Routed, route
from slipstream.services.worker.config import NGRAM, WorkerConfig
from tests.gpu.test_cuda_models import WatchedWorker
from tests.harness.counted_jobs import Job
from tests.harness.local_epoch import LocalEpoch
from tests.harness.paged_model import random_tokens
from tests.harness.transformers_checkpoints import write_by_transformers
from tests.harness.workers import LocalWorker, local_workers
from tests.services.models.kernels.test_grouped import LAYOUTS, fill_packed

if TYPE_CHECKING:
    from pathlib import Path

    from slipstream.common.device.cuda.device import CudaDevice
    from slipstream.common.device.interface import Device

NUM_PROMPTS, PROMPT_TOKENS, MAX_NEW_TOKENS = 5, 40, 40
NUM_DRAFT_TOKENS = 3
QWEN_30B = ExpertsConfig(
    mixture=Mixture(scoring=Scoring.SOFTMAX),
    num_experts=128,
    num_chosen=8,
    width=768,
    layers=(True,),
    is_normalised=True,
)
OSS_20B = ExpertsConfig(
    mixture=Mixture(scoring=Scoring.SOFTMAX_OF_CHOSEN, is_stacked=True),
    num_experts=32,
    num_chosen=4,
    width=2880,
    layers=(True,),
    is_normalised=False,
    limit=7.0,
)
SHAPES = {"Qwen3-30B-A3B": (QWEN_30B, 2048), "gpt-oss-20b": (OSS_20B, 2880)}
MOST_ERROR = 0.01
"""Relative: a row of another expert has an error of more than 1."""

# It says that it does not notice everything.
pytestmark = pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")


def serve(device: Device, path: Path, draft: str | None, *, num_at_once: int) -> list[list[int]]:
    """Greedy tokens of prompts that repeat themselves, in float32."""
    roles = [make_verify(WorkerConfig(model=path, dtype="float32"), device, 0)]
    if draft is not None:
        lookup = WorkerConfig(algorithm=draft, target=path, dtype="float32", prompt_lookup_min=1, prompt_lookup_max=5)
        roles.append(make_draft(lookup, device, 0))
    jobs = [
        Job(
            SequenceSpec(
                job_id=f"{number}",
                prompt=tuple(random_tokens(PROMPT_TOKENS // 2, seed=number) * 2),
                max_new_tokens=MAX_NEW_TOKENS,
                sampling=SamplingParams(),
                stop_token_ids=frozenset(),
            )
        )
        for number in range(NUM_PROMPTS)
    ]
    config = SchedulerConfig(
        verify="unix:/none",
        fixed_draft_tokens=NUM_DRAFT_TOKENS,
        slots=num_at_once,
        context_tokens=128,
        max_batched_tokens=64,
        kv_memory_mib=64,
    )
    make = LocalWorker if device.torch_device.type == "cpu" else WatchedWorker
    with local_workers(*roles, device=device, make=make) as workers:
        outputs = LocalEpoch(1, config, workers, device=device).run(jobs)
    return [outputs[job] for job in jobs]


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe", "gpt-oss"])
def test_in_float32_tokens_are_the_cpus(device: CudaDevice, tmp_path: Path, name: str) -> None:
    """Plain, drafted, and of another batch; no step waits for the device."""
    path = write_by_transformers(tmp_path / "it", name, seed=4)
    expected = serve(HostDevice(), path, None, num_at_once=NUM_PROMPTS)
    assert len({token for output in expected for token in output}) > MAX_NEW_TOKENS // 2
    assert serve(device, path, None, num_at_once=NUM_PROMPTS) == expected
    assert serve(device, path, NGRAM, num_at_once=NUM_PROMPTS) == expected
    assert serve(device, path, NGRAM, num_at_once=2) == expected


def experts_on(where: torch.device, shape: str) -> tuple[Experts, Experts]:
    """Random experts in bfloat16, and the same numbers in float32."""
    config, hidden_size = SHAPES[shape]
    experts, exact = (
        Experts(config, hidden_size, device=where, dtype=dtype) for dtype in (torch.bfloat16, torch.float32)
    )
    generator = torch.Generator(where).manual_seed(1)
    for parameter, same in zip(experts.parameters(), exact.parameters(), strict=True):
        parameter.normal_(0.0, parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 1.0, generator=generator)
        same.copy_(parameter)
    return experts, exact


@torch.inference_mode()
@pytest.mark.parametrize("shape", SHAPES)
def test_in_bfloat16_numbers_are_those_of_float32(device: CudaDevice, shape: str) -> None:
    where = device.torch_device
    experts, exact = experts_on(where, shape)
    generator = torch.Generator(where).manual_seed(2)
    for num_rows in (1, 5, 40, 320, 2048):
        x = torch.randn(num_rows, SHAPES[shape][1], generator=generator, device=where).to(torch.bfloat16)
        routed = route(experts, x)
        _, chosen, shares = routed
        assert torch.equal(chosen, exact.route(x.float())[0])
        made = exact._by_expert(x.float(), chosen).view(*chosen.shape, -1)
        expected = (made * shares[..., None]).sum(dim=1)
        error = (outputs_of_choices(experts, routed).sum(dim=1).float() - expected).norm() / expected.norm()
        assert error < MOST_ERROR, f"{num_rows} rows: {error:.4f}"


@torch.inference_mode()
@pytest.mark.parametrize(("shape", "layout"), [("gpt-oss-20b", "mxfp4"), ("Qwen3-30B-A3B", "4 bits")])
def test_packed_weights_are_what_their_formula_says(device: CudaDevice, shape: str, layout: str) -> None:
    where, (config, hidden_size), packing = device.torch_device, SHAPES[shape], LAYOUTS[layout]
    config = replace(config, num_experts=2 * config.num_chosen)
    experts = Experts(config, hidden_size, device=where, dtype=torch.bfloat16, packed=packing)
    exact = Experts(config, hidden_size, device=where, dtype=torch.float32)
    fill_packed(experts, exact, packing)
    for num_rows in (1, 5, 40, 320, 2048):
        generator = torch.Generator(where).manual_seed(num_rows)
        x = torch.randn(num_rows, hidden_size, generator=generator, device=where).to(torch.bfloat16)
        chosen, shares = experts.route(x)
        made = exact._by_expert(x.float(), chosen).view(*chosen.shape, -1)
        expected = (made * shares[..., None]).sum(dim=1)
        found = outputs_of_choices(experts, Routed(x, chosen, shares)).sum(dim=1).float()
        error = (found - expected).norm() / expected.norm()
        assert error < MOST_ERROR, f"{num_rows} rows: {error:.4f}"


@torch.inference_mode()
@pytest.mark.parametrize("shape", SHAPES)
def test_a_graph_gives_the_same_bits_for_any_choice(device: CudaDevice, shape: str) -> None:
    """The graph is made where all rows take the same experts."""
    where = device.torch_device
    experts, _ = experts_on(where, shape)
    experts.by_kernels = run_experts
    x = torch.ones(5, SHAPES[shape][1], device=where, dtype=torch.bfloat16)
    experts(x)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = experts(x)
    for seed in range(3):
        x.normal_(generator=torch.Generator(where).manual_seed(seed))
        graph.replay()
        assert torch.equal(captured, experts(x))
